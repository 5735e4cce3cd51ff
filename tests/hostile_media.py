"""Pictures and recordings of few bytes that take a decoder long, and honest ones beside them."""

from __future__ import annotations

import io
import struct
import zlib

import numpy as np
import soundfile
from PIL import Image


def jpeg(width: int = 64, height: int = 64, **options: object) -> bytes:
    """Return a JPEG of noise."""
    out = io.BytesIO()
    pixels = np.random.default_rng(0).integers(0, 255, (height, width, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(out, "JPEG", **options)
    return out.getvalue()


def png(width: int = 64, height: int = 64) -> bytes:
    """Return a PNG of noise."""
    out = io.BytesIO()
    pixels = np.random.default_rng(0).integers(0, 255, (height, width, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(out, "PNG", compress_level=1)
    return out.getvalue()


def jpeg_of_scans(scans: int, width: int = 4000, height: int = 4000) -> bytes:
    """Return a progressive JPEG whose last scan is repeated: some bytes each, and a pass over all pixels."""
    out = io.BytesIO()
    Image.new("L", (width, height)).save(out, "JPEG", progressive=True)
    data = out.getvalue()
    last = data.rindex(b"\xff\xda")
    return data[:-2] + data[last:-2] * scans + data[-2:]


def jpeg_of_markers(count: int, marker: bytes = b"\xff\xfe\x00\x02") -> bytes:
    """Return a JPEG with comments without text before its picture."""
    data = jpeg()
    return data[:2] + marker * count + data[2:]


def png_of_chunks(count: int) -> bytes:
    """Return a PNG with empty private chunks before its pixels."""
    data = png()
    chunk = struct.pack(">I4sI", 0, b"teSt", zlib.crc32(b"teSt"))
    return data[:33] + chunk * count + data[33:]


def webp_of_chunks(count: int) -> bytes:
    """Return an extended WebP with empty chunks behind its picture."""
    out = io.BytesIO()
    Image.new("RGBA", (8, 8), (1, 2, 3, 4)).save(out, "WEBP")
    data = out.getvalue() + b"teSt\0\0\0\0" * count
    assert data[12:16] == b"VP8X"
    return data[:4] + struct.pack("<I", len(data) - 8) + data[8:]


def gif_of_blocks(count: int) -> bytes:
    """Return a GIF with a comment of one character a block before its frame."""
    out = io.BytesIO()
    Image.new("P", (8, 8)).save(out, "GIF")
    data = out.getvalue()
    frame = 13 + (3 << (data[10] & 7) + 1 if data[10] & 0x80 else 0)
    return data[:frame] + b"\x21\xfe" + b"\x01a" * count + b"\0" + data[frame:]


def bmp_of_ends(ends: int, side: int = 1000) -> bytes:
    """Return a run-length encoded BMP whose commands end lines that are empty: each is a step of a Python loop."""
    palette = bytes(4 * 256)
    pixels = b"\0\0" * ends + b"\0\1"
    offset = 14 + 40 + len(palette)
    head = struct.pack("<2sIHHI", b"BM", offset + len(pixels), 0, 0, offset)
    info = struct.pack("<IiiHHIIiiII", 40, side, side, 1, 8, 1, len(pixels), 2835, 2835, 256, 0)
    return head + info + palette + pixels


def wav(seconds: float = 0.5, rate_hz: int = 16_000) -> bytes:
    """Return a WAV of noise."""
    return recording("WAV", seconds, rate_hz)


def recording(format: str, seconds: float = 0.5, rate_hz: int = 16_000) -> bytes:
    """Return a recording of noise in a format of libsndfile."""
    out = io.BytesIO()
    samples = np.random.default_rng(0).normal(0, 0.1, int(seconds * rate_hz)).astype(np.float32)
    with soundfile.SoundFile(out, "w", rate_hz, 1, format=format) as file:
        for at in range(0, len(samples), 4096):  # libsndfile's Vorbis encoder overflows the stack for long blocks
            file.write(samples[at : at + 4096])
    return out.getvalue()


def wav_of_chunks(count: int, behind: bool = False) -> bytes:
    """Return a WAV with empty chunks before, or behind, its samples."""
    data, chunks = wav(), b"teSt\0\0\0\0" * count
    data = data + chunks if behind else data[:12] + chunks + data[12:]
    return data[:4] + struct.pack("<I", len(data) - 8) + data[8:]
