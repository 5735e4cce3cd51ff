"""A long time of everything at once: load, deaths, cancels, deadlines, failures, slow readers. Does anything grow?

    python -m benchmarks.soak [--minutes 60] [--leak memory|worker|descriptors|leases] [--seed 1]

Sixteen callers ask a pipeline for arrays and streams, some are cancelled, some have too little time, some read slowly,
some texts are bad; every few seconds a worker is killed. Looked at are the memory of this process (RSS), of a worker
that is never killed, open descriptors, mapped shared memory, and leased bytes of the arenas; growth.py decides. When
the load is over everything must be back where it was.

`--leak` plants a leak on purpose, and then the run is right when that one is found. The exit code is 0 when what was to
be found was found and nothing else, else 1. Within hours a megabyte an hour is seen; what a shorter run would have seen
is told beside each figure.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import signal
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.conditions import conditions, descriptors, memory_bytes, peak_memory, shared_bytes
from benchmarks.growth import Bar, Growth, growth
from weftline.engine.session import Session, load
from weftline.errors import WeftlineError
from weftline.pipelines.builder import Builder

CALLERS = 16
KILL_EVERY_S = 5.0
SAMPLES_MAX = 4000
"""Most times that everything is looked at, a second apart at most: what is noted must not grow itself."""

LEAKED_BYTES = 32_000_000
"""What a planted leak of memory or leases comes to in the whole time."""

HUNG_S, SETTLED_S = 60.0, 30.0

MB = 1e6
BARS = {
    "memory": Bar(1 * MB, 6 * MB, "MB", MB),
    "worker": Bar(1 * MB, 6 * MB, "MB", MB),
    "descriptors": Bar(1.0, 6.0, "open"),
    "shared": Bar(1 * MB, 6 * MB, "MB", MB),
    "leases": Bar(1 * MB, 1 * MB, "MB", MB),
}
LEAKS = ("memory", "worker", "descriptors", "leases")
EXPECTED = frozenset(
    ("answered", "read", "cancelled", "WorkerDied", "DeadlineExceeded", "LimitReached")
)  # how a request may end here


def pipeline(hoards: bool) -> Builder:
    p = Builder(
        "soak",
        base_dir=Path(__file__).parent,
        limits={"arena_bytes": 64 << 20, "stream_bytes_max": 50_000, "stall_max_ms": 500, "requests_max": 200},
    )
    x, text = p.input("x", "float32[N]"), p.input("text", "text")
    batch: dict[str, Any] = {"items_max": 4, "wait_max_ms": 2}
    first = p.step("first", "function", x=x, batch=batch, function="soak_steps.py:more")
    second = p.step("second", "function", x=first.output, batch=batch, instances=2, function="soak_steps.py:halves")
    shouts = "soak_steps.py:Hoards" if hoards else "soak_steps.py:Honest"
    picky = p.step("picky", "function", text=text, retry=1, fallback={"output": "sorry"}, function=shouts)
    told = p.step("told", "trickle", value=text, pieces=10, piece_bytes=4000, delay_ms=1, when="text != 'bad'")
    p.output("y", second.output)
    p.output("said", picky.output)
    p.output("told", told.value)
    return p


class Soak:
    """One run. `samples`: by what is looked at, (seconds since the start, value); `ends`: how requests ended."""

    def __init__(self, session: Session, seconds: float, leak: str, seed: int) -> None:
        self.samples: dict[str, list[tuple[float, float]]] = {name: [] for name in BARS}
        self.ends: Counter[str] = Counter()
        self._session = session
        self._seconds = seconds
        self._leak = leak
        self._random = random.Random(seed)
        self._arrays = [np.full(size, size, np.float32) for size in (10, 6_000, 30_000)]
        self._kept: list[Any] = []  # what is leaked on purpose
        self._began_s = time.monotonic()

    async def run(self) -> None:
        callers = [self._call() for _ in range(CALLERS)]
        await asyncio.wait_for(asyncio.gather(*callers, self._kill(), self._watch()), self._seconds + HUNG_S)

    @property
    def _passed_s(self) -> float:
        return time.monotonic() - self._began_s

    async def _call(self) -> None:
        draw = self._random
        while self._passed_s < self._seconds:
            request = {"x": draw.choice(self._arrays), "text": draw.choice(["good", "bad"])}
            asking = asyncio.create_task(draw.choice([self._ask, self._ask, self._read])(request))
            if draw.random() < 0.2:
                await asyncio.sleep(0.03 * draw.random())
                asking.cancel()
            try:
                self.ends[await asyncio.wait_for(asking, HUNG_S)] += 1
            except asyncio.CancelledError:
                self.ends["cancelled"] += 1
            except WeftlineError as error:
                self.ends[type(error).__name__] += 1

    async def _ask(self, request: dict[str, Any]) -> str:
        deadline_ms = self._random.choice([None, None, 30, 300])
        answer = await self._session.arun(**request, deadline_ms=deadline_ms, priority=self._random.randrange(-5, 5))
        x, bad = request["x"], request["text"] == "bad"
        right = answer["y"].shape == (len(x) // 2,) and (answer["y"] == x[0] + 1).all()
        if not right or answer["said"] != ("sorry" if bad else "GOOD") or (answer["told"] is None) != bad:
            return "wrong answer"
        return "answered"

    async def _read(self, request: dict[str, Any]) -> str:
        async for _ in self._session.astream(**request):
            await asyncio.sleep(self._random.choice([0, 0, 0.001]))
        return "read"

    async def _kill(self) -> None:
        """Kill a worker now and then; never that of `picky`, whose memory is looked at."""
        while self._passed_s < self._seconds - KILL_EVERY_S:
            await asyncio.sleep(KILL_EVERY_S * (0.5 + self._random.random()))
            pids = [pid for name, pid in self._session.pids().items() if name != "picky"]
            if pids:
                os.kill(self._random.choice(pids), signal.SIGKILL)

    async def _watch(self) -> None:
        runtime = self._session._current.runtime
        pause_s = max(0.2, min(1.0, self._seconds / 100), self._seconds / SAMPLES_MAX)
        while (passed_s := self._passed_s) < self._seconds:
            size_bytes = int(LEAKED_BYTES * pause_s / self._seconds)
            if self._leak == "memory":
                self._kept.append(bytearray(b"x" * size_bytes))
            elif self._leak == "descriptors":
                self._kept.append(os.open(os.devnull, os.O_RDONLY))
            elif self._leak == "leases":
                self._kept.append(runtime.reserve([size_bytes]))
            values = {
                "memory": memory_bytes([os.getpid()]),
                "worker": memory_bytes([self._session.pids()["picky"]]),
                "descriptors": descriptors(),
                "shared": shared_bytes(),
                "leases": self._session.stats()["arena"]["leased_bytes"],
            }
            for name, value in values.items():
                self.samples[name].append((passed_s, float(value)))
            await asyncio.sleep(pause_s)


def settled(session: Session) -> str:
    """Wait until nothing of any request is left; return what is, '' for nothing."""
    until_s, left = time.monotonic() + SETTLED_S, "everything"
    while left and time.monotonic() < until_s:
        time.sleep(0.05)
        stats = session.stats()
        held = stats["requests"]["open"], sum(stats["queued"].values()), stats["arena"]["leased_bytes"]
        left = "" if not any(held) else f"{held[0]} requests open, {held[1]} items queued, {held[2]} bytes leased"
    return left


def verdict(found: Sequence[Growth], ends: Counter[str], left: str, leak: str) -> list[str]:
    """Return what is not as it should be."""
    wrong = [f"{one.name} grows" for one in found if one.found and one.name != leak]
    wrong += [
        f"the leak that was planted, {leak}, was not found" for one in found if one.name == leak and not one.found
    ]
    wrong += [f"{count} requests ended with {end}" for end, count in ends.items() if end not in EXPECTED]
    wrong += ["nothing was answered"] if not ends["answered"] else []
    return wrong + ([f"left at the end: {left}"] if left and leak != "leases" else [])


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="A long time of mixed faults: does anything grow?")
    parser.add_argument("--minutes", type=float, help="60 when left out, 1 with a leak")
    parser.add_argument("--leak", choices=LEAKS, default="", help="plant a leak, which has to be found")
    parser.add_argument("--seed", type=int, default=1)
    told = parser.parse_args(arguments)
    minutes = told.minutes or (1.0 if told.leak else 60.0)
    print(conditions())
    with load(pipeline(told.leak == "worker")).open() as session:
        soak = Soak(session, minutes * 60, told.leak, told.seed)
        asyncio.run(soak.run())
        left = settled(session)
        deaths = session.stats()["worker_deaths"]
    found = [growth(name, bar, soak.samples[name]) for name, bar in BARS.items()]
    print(f"{minutes:g} minutes, {deaths} workers died; requests: {dict(soak.ends)}")
    for one in found:
        print(f"  {one}")
    print(peak_memory())
    wrong = verdict(found, soak.ends, left, told.leak)
    print("\n".join(wrong) or ("the planted leak was found" if told.leak else "nothing grows and nothing is left"))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
