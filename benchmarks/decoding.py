"""Time of requests with encoded pictures and recordings: alone, with 8 callers, and beside a hostile caller.

    python benchmarks/decoding.py [--rounds 5] [--requests 20] [--tree PATH ...] [--hostile]

Each round measures each tree once, one after the other, so that all trees see the same load of the machine. --tree
names other checkouts of the project to compare with; ratios are of medians over the rounds, to the last tree. --hostile
sends, by another caller, pictures that take a decoder long.
"""

from __future__ import annotations

import argparse
import asyncio
import io
import json
import os
import statistics
import struct
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

CALLERS = 8


def picture(width: int, height: int, format: str, **options: object) -> bytes:
    """Return a picture with the detail of a photograph."""
    from PIL import Image

    rng = np.random.default_rng(0)
    coarse = Image.fromarray(rng.integers(0, 255, (height // 16 + 1, width // 16 + 1, 3), dtype=np.uint8))
    pixels = np.asarray(coarse.resize((width, height), Image.Resampling.BICUBIC), np.int16)
    noise = rng.integers(-4, 4, pixels.shape, np.int16)
    out = io.BytesIO()
    Image.fromarray((pixels + noise).clip(0, 255).astype(np.uint8)).save(out, format, **options)
    return out.getvalue()


def recording(format: str, seconds: float, rate_hz: int) -> bytes:
    """Return a recording of noise."""
    import soundfile

    samples = np.random.default_rng(0).normal(0, 0.1, int(seconds * rate_hz)).astype(np.float32)
    out = io.BytesIO()
    with soundfile.SoundFile(out, "w", rate_hz, 1, format=format) as file:
        for at in range(0, len(samples), 4096):
            file.write(samples[at : at + 4096])
    return out.getvalue()


def slow_picture() -> bytes:
    """Return a run-length encoded BMP of 2 MB that ends empty lines: a step of a Python loop each."""
    pixels = b"\0\0" * 1_000_000 + b"\0\1"
    info = struct.pack("<IiiHHIIiiII", 40, 1000, 1000, 1, 8, 1, len(pixels), 2835, 2835, 256, 0)
    head = struct.pack("<2sIHHI", b"BM", 1078 + len(pixels), 0, 0, 1078)
    return head + info + bytes(1024) + pixels


MEDIA = {
    "JPEG 640 x 480": lambda: ("image", picture(640, 480, "JPEG", quality=85)),
    "PNG 640 x 480": lambda: ("image", picture(640, 480, "PNG")),
    "JPEG 1920 x 1080": lambda: ("image", picture(1920, 1080, "JPEG", quality=85)),
    "progressive JPEG 1920 x 1080": lambda: ("image", picture(1920, 1080, "JPEG", quality=85, progressive=True)),
    "JPEG 4000 x 3000": lambda: ("image", picture(4000, 3000, "JPEG", quality=85)),
    "PNG 1920 x 1080": lambda: ("image", picture(1920, 1080, "PNG")),
    "WAV 10 s": lambda: ("audio", recording("WAV", 10, 16_000)),
    "FLAC 30 s": lambda: ("audio", recording("FLAC", 30, 16_000)),
    "MP3 30 s": lambda: ("audio", recording("MP3", 30, 44_100)),
    "Ogg 30 s": lambda: ("audio", recording("OGG", 30, 44_100)),
}


def measure(requests: int, hostile: bool) -> dict[str, list[float]]:
    """Return p50 in ms of one caller, and requests a second of 8, by medium."""
    from weftline import Pipeline

    found = {}
    for name, make in MEDIA.items():
        kind, data = make()
        p = Pipeline("decoding")
        step = p.step("s", "weftline.nodes.classify:Noop" if False else "shape", x=p.input("x", kind))
        p.output("y", step.y)
        del step
        found[name] = [len(data)]
    return found
