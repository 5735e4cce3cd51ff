"""Time of requests with encoded pictures and recordings: alone, with 8 callers, and beside a hostile caller.

    python benchmarks/decoding.py [--rounds 5] [--requests 20] [--tree PATH ...] [--hostile]

Each round measures each tree once, one after the other, so that all trees see the same load of the machine; the first
round is not counted. --tree
names other checkouts of the project to compare with; ratios are of medians over the rounds, to the last tree. --hostile
sends, by another caller, pictures that take a decoder long.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import io
import json
import os
import statistics
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from weftline.engine.request import RequestOptions
from weftline.engine.session import Session, load
from weftline.errors import WeftlineError
from weftline.pipelines.spec.builder import Builder

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


MEDIA: dict[str, tuple[str, Callable[[], bytes]]] = {
    "JPEG 640 x 480": ("image", lambda: picture(640, 480, "JPEG", quality=85)),
    "PNG 640 x 480": ("image", lambda: picture(640, 480, "PNG")),
    "JPEG 1920 x 1080": ("image", lambda: picture(1920, 1080, "JPEG", quality=85)),
    "progressive JPEG 1920 x 1080": ("image", lambda: picture(1920, 1080, "JPEG", quality=85, progressive=True)),
    "JPEG 4000 x 3000": ("image", lambda: picture(4000, 3000, "JPEG", quality=85)),
    "PNG 1920 x 1080": ("image", lambda: picture(1920, 1080, "PNG")),
    "WAV 10 s": ("audio", lambda: recording("WAV", 10, 16_000)),
    "FLAC 30 s": ("audio", lambda: recording("FLAC", 30, 16_000)),
    "MP3 30 s": ("audio", lambda: recording("MP3", 30, 44_100)),
    "Ogg 30 s": ("audio", lambda: recording("OGG", 30, 44_100)),
}


def session_for(kind: str) -> Session:
    """Open a pipeline of one step with an image or audio input."""
    p = Builder("decoding", base_dir=Path(__file__).parent)
    function = f"decoding_steps.py:{'see' if kind == 'image' else 'hear'}"
    p.output("y", p.step("s", "function", x=p.input("x", kind), function=function).output)
    return load(p).open()


async def once(session: Session, data: bytes, caller: str) -> float:
    """Return the time of one request in ms."""
    began = time.perf_counter()
    with await session.borrow({"x": data}, RequestOptions(), paths=False, caller=caller):
        return (time.perf_counter() - began) * 1e3


async def attack(session: Session, data: bytes) -> None:
    """Send four pictures at a time, as one caller, until cancelled."""

    async def loop() -> None:
        while True:
            with contextlib.suppress(WeftlineError):
                await once(session, data, "hostile")

    await asyncio.gather(*(loop() for _ in range(4)))


async def figures(session: Session, data: bytes, requests: int, hostile: bytes | None) -> list[float]:
    """Return p50 in ms of one caller, and requests a second of 8; beside a hostile caller p50 alone."""
    await once(session, data, "a")
    attacking = asyncio.create_task(attack(session, hostile)) if hostile is not None else None
    if attacking is not None:
        await asyncio.sleep(1.0)
    try:
        p50 = statistics.median([await once(session, data, "a") for _ in range(requests)])
    finally:
        if attacking is not None:
            attacking.cancel()
            await asyncio.gather(attacking, return_exceptions=True)
    if hostile is not None:
        return [p50]
    await asyncio.gather(*(once(session, data, f"{n}") for n in range(CALLERS)))  # starts what is needed
    began = time.perf_counter()
    await asyncio.gather(*(once(session, data, f"{n % CALLERS}") for n in range(2 * CALLERS)))
    return [p50, 2 * CALLERS / (time.perf_counter() - began)]


def serve(requests: int, hostile: bool) -> None:
    """Measure the medium that each line of standard input names, and print its figures as JSON."""
    sessions = {kind: session_for(kind) for kind in ("image", "audio")}
    made: dict[str, bytes] = {}
    try:
        for line in sys.stdin:
            kind, make = MEDIA[line.strip()]
            data = made.get(line) or made.setdefault(line, make())
            attack = slow_picture() if hostile else None
            print(json.dumps(asyncio.run(figures(sessions[kind], data, requests, attack))), flush=True)
    finally:
        for session in sessions.values():
            session.close()


def start(tree: str, arguments: list[str]) -> subprocess.Popen[str]:
    """Start the measuring process of one checkout."""
    command = [sys.executable, __file__, "--measure", *arguments]
    return subprocess.Popen(
        command, env={**os.environ, "PYTHONPATH": tree}, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )


def ask(process: subprocess.Popen[str], name: str) -> list[float]:
    """Return the figures of one medium in one checkout."""
    if process.stdin is None or process.stdout is None:
        raise RuntimeError("started without pipes")
    process.stdin.write(name + "\n")
    process.stdin.flush()
    return [float(one) for one in json.loads(process.stdout.readline())]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--requests", type=int, default=20)
    parser.add_argument("--tree", action="append", default=[])
    parser.add_argument("--hostile", action="store_true")
    parser.add_argument("--measure", action="store_true", help="this tree, the media named on standard input")
    args = parser.parse_args()
    if args.measure:
        serve(args.requests, args.hostile)
        return
    trees = [str(Path(__file__).resolve().parents[1]), *args.tree]
    arguments = ["--requests", str(args.requests), *["--hostile"] * args.hostile]
    processes = [start(tree, arguments) for tree in trees]
    names = [name for name, (kind, _) in MEDIA.items() if kind == "image" or not args.hostile]
    print(
        "medium; then for each tree: p50 in ms [least-most of the rounds], requests/s of 8 callers, ratios to the last"
    )
    for name in names:
        rounds = [[ask(process, name) for process in processes] for _ in range(args.rounds + 1)][1:]
        print(name, *(_shown(rounds, tree) for tree in range(len(trees))), sep="; ", flush=True)
    for process in processes:
        process.communicate()


def _shown(rounds: list[list[list[float]]], tree: int) -> str:
    """Return the figures of one tree. rounds: by round, tree and figure."""
    texts = []
    for figure, unit in enumerate(("ms", "/s")[: len(rounds[0][0])]):
        values = [one[tree][figure] for one in rounds]
        ratio = statistics.median([one[tree][figure] / one[-1][figure] for one in rounds])
        texts.append(f"{statistics.median(values):.1f} {unit} [{min(values):.1f}-{max(values):.1f}] x{ratio:.2f}")
    return ", ".join(texts)


if __name__ == "__main__":
    main()
