"""Image header parser: format, size, frames and metadata without decoding.

Decoders allocate from these claims, some of them while they only 'open' a file, so they are read here first, by hand
and within the bytes given. Formats: PNG (W3C PNG 3rd edition), JPEG (ITU T.81), WebP (RFC 9649), BMP, GIF89a.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass

from weftline.errors import InputError

FORMATS = ("PNG", "JPEG", "WEBP", "BMP", "GIF")
"""What is decoded, by the names Pillow uses."""

REFUSED: tuple[tuple[bytes, str], ...] = (
    (b"\x00\x00\x00\x0cjP  ", "JPEG 2000"), (b"\xff\x4f\xff\x51", "JPEG 2000"), (b"8BPS", "Photoshop"),
    (b"\xd0\xcf\x11\xe0", "FlashPix"), (b"II*\x00", "TIFF"), (b"MM\x00*", "TIFF"), (b"%PDF", "PDF"),
    (b"%!PS", "PostScript"), (b"<svg", "SVG"), (b"<?xml", "SVG"), (b"\x00\x00\x01\x00", "icon"), (b"gimp xcf", "XCF"),
)  # fmt: skip
"""Formats that are recognised only to be refused by name: their decoders have long histories of memory errors."""

WORKING_BYTES_PER_PIXEL: Mapping[str, int] = {"PNG": 9, "JPEG": 13, "WEBP": 18, "BMP": 9, "GIF": 9}
"""Most memory that decoding takes beside the result, by format: Pillow keeps 4 bytes a pixel, twice where EXIF turns
the picture; coefficients of a progressive JPEG take up to 8 more, and libwebp's canvases up to 10."""

WORKING_BYTES_LEAST = 4 << 20
"""Memory that decoding takes however small the picture is: bands of rows on their way, and a decoder's tables."""

_JPEG_SIZES = {*range(0xC0, 0xD0)} - {0xC4, 0xC8, 0xCC}
"""JPEG markers that carry the picture's size: SOF0 to SOF15 without DHT, JPG and DAC."""

_JPEG_BARE = {0x01, *range(0xD0, 0xD9)}
"""JPEG markers without a length."""


@dataclass(frozen=True, slots=True)
class ImageHeader:
    """A picture's claims. `metadata_bytes`: colour profiles, EXIF, text and application data before the picture."""

    format: str
    width: int
    height: int
    frames: int = 1
    metadata_bytes: int = 0

    @property
    def pixels(self) -> int:
        return self.width * self.height

    @property
    def working_bytes(self) -> int:
        """Memory that decoding takes beside its result."""
        return self.pixels * WORKING_BYTES_PER_PIXEL[self.format] + WORKING_BYTES_LEAST


def read_header(data: bytes) -> ImageHeader:
    """Return what the header of `data` claims; InputError for other formats and for headers that end early."""
    try:
        if data.startswith(b"\x89PNG\r\n\x1a\n"):
            return _png(data)
        if data.startswith(b"\xff\xd8\xff"):
            return _jpeg(data)
        if data[:4] == b"RIFF" and data[8:12] == b"WEBP":
            return _webp(data)
        if data.startswith((b"GIF87a", b"GIF89a")):
            return ImageHeader("GIF", *struct.unpack_from("<HH", data, 6))
        if data.startswith(b"BM"):
            return _bmp(data)
    except (struct.error, IndexError):
        raise InputError("the picture is truncated: its header ends early") from None
    name = next((name for magic, name in REFUSED if data.startswith(magic)), "")
    if data[4:8] == b"ftyp":
        name = "HEIF, AVIF or video"
    found = f"a {name} file" if name else "no picture that is known"
    raise InputError(f"{found}; pictures are {', '.join(FORMATS)}")


def _png(data: bytes) -> ImageHeader:
    if data[12:16] != b"IHDR":
        raise InputError("the picture is corrupt: a PNG without its header chunk")
    width, height = struct.unpack_from(">II", data, 16)
    at, metadata, frames = 8, 0, 1
    while at + 8 <= len(data):
        length, kind = struct.unpack_from(">I4s", data, at)
        if kind in (b"iCCP", b"eXIf", b"tEXt", b"zTXt", b"iTXt"):
            metadata += length
        elif kind == b"acTL":
            frames = struct.unpack_from(">I", data, at + 8)[0]
        elif kind == b"IEND":
            break
        at += 12 + length
    return ImageHeader("PNG", width, height, frames, metadata)


def _jpeg(data: bytes) -> ImageHeader:
    at, metadata = 2, 0
    while True:
        if data[at] != 0xFF:
            raise InputError("the picture is corrupt: a JPEG marker is missing")
        marker = data[at + 1]
        if marker == 0xFF:  # fill byte
            at += 1
            continue
        if marker in _JPEG_BARE:
            at += 2
            continue
        length = struct.unpack_from(">H", data, at + 2)[0]
        if marker in _JPEG_SIZES:
            height, width = struct.unpack_from(">HH", data, at + 5)
            return ImageHeader("JPEG", width, height, 1, metadata)
        if marker in (0xDA, 0xD9):
            raise InputError("the picture is corrupt: a JPEG without a size before its data")
        if 0xE0 <= marker <= 0xEF or marker == 0xFE:
            metadata += length
        at += 2 + length


def _webp(data: bytes) -> ImageHeader:
    kind = data[12:16]
    if kind == b"VP8X":
        width = 1 + int.from_bytes(data[24:27], "little")
        height = 1 + int.from_bytes(data[27:30], "little")
        frames = 2 if data[20] & 0x02 else 1  # the animation flag; the frames themselves are not counted
        return ImageHeader("WEBP", width, height, frames, _webp_metadata(data))
    if kind == b"VP8L":
        bits = struct.unpack_from("<I", data, 21)[0]
        return ImageHeader("WEBP", 1 + (bits & 0x3FFF), 1 + (bits >> 14 & 0x3FFF))
    if kind == b"VP8 ":
        width, height = struct.unpack_from("<HH", data, 26)
        return ImageHeader("WEBP", width & 0x3FFF, height & 0x3FFF)
    raise InputError("the picture is corrupt: a WebP without a picture chunk")


def _webp_metadata(data: bytes) -> int:
    at, metadata = 12, 0
    while at + 8 <= len(data):
        kind, length = struct.unpack_from("<4sI", data, at)
        metadata += length if kind in (b"ICCP", b"EXIF", b"XMP ") else 0
        at += 8 + length + (length & 1)
    return metadata


def _bmp(data: bytes) -> ImageHeader:
    if struct.unpack_from("<I", data, 14)[0] < 40:
        raise InputError("a BMP of a form older than Windows 3; save it as PNG")
    width, height = struct.unpack_from("<ii", data, 18)
    return ImageHeader("BMP", abs(width), abs(height))  # a negative height is a top-down picture
