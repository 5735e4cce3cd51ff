"""A long time of everything at once: load, deaths, cancels, deadlines, failures, slow readers. Does anything grow?

    python -m benchmarks.soak [--minutes 10] [--callers 64] [--largest-mb 8]
                              [--leak memory|worker|descriptors|leases] [--seed 1]

Callers send arrays of 1 KB to 8 MB and texts to one pipeline, and compare every byte of what returns with what is
expected. Some requests are cancelled, some have short deadlines, some readers are slow, some texts are bad. Every few
seconds a worker is killed.

Two questions are asked of the samples. Does anything grow (growth.py): private memory of this process, private memory
of a worker that is never killed, open descriptors, mapped shared memory, leased bytes? And is the memory of all
processes flat: after the second minute, do the medians of its windows stay within 5 %? That total is each process's
private memory (RssAnon) and the arenas, counted once; a sample counts while every worker is ready. Pages of files
(libraries) are left out: other programs share them. When the load is over every request, lease and descriptor must be
back.

`--leak` plants a leak on purpose, and then the run is right when that one is found. The exit code is 0 when what was to
be found was found and nothing else, else 1. The smallest growth that a run can see is printed beside each figure.
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
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.conditions import conditions, descriptors, memory_bytes, peak_memory, private_bytes, shared_bytes
from benchmarks.growth import WARM_UP, Bar, Flatness, Growth, flatness, growth
from weftline.engine.request import RequestOptions
from weftline.engine.session import Session, load
from weftline.errors import WeftlineError
from weftline.pipelines.spec.builder import Builder

KILL_EVERY_S = 5.0
OFFSETS = 65_536
"""At how many places of the numbers 0, 1, 2... an input may begin: one answer is hardly ever right for another."""

FLAT_AFTER_S, FLAT_SHARE = 120.0, 0.05
"""The bar on the memory of all processes: from when on, and by what share its windows may differ."""

SAMPLES_MAX = 4000
"""Most times that everything is looked at, half a second apart at most: what is noted must not grow itself."""

LEAKED_BYTES = 32_000_000
"""What a planted leak of memory or leases comes to in the whole time."""

HUNG_S, SETTLED_S = 60.0, 30.0

SMALLEST = 256
"""Numbers in the smallest input: 1 KB."""

PIECES, PIECE_BYTES = 10, 4000
STREAMED = "".join(letter * PIECE_BYTES for letter in "abcdefghij")
"""What `streamed` returns for every good text."""

MB = 1e6
BARS = {
    "memory": Bar(1 * MB, 12 * MB, "MB", MB),
    "worker": Bar(1 * MB, 6 * MB, "MB", MB),
    "descriptors": Bar(1.0, 6.0, "open"),
    "shared": Bar(1 * MB, 6 * MB, "MB", MB),
    "leases": Bar(1 * MB, 40 * MB, "MB", MB),
}
"""Floors of memory and leases: what 64 callers with 8 MB have in hand differs by as much from minute to minute. A lease
that leaks is found however small it is: when the load is over none may be left."""

LEAKS = ("memory", "worker", "descriptors", "leases")
EXPECTED = frozenset(
    ("answered", "read", "cancelled", "WorkerDied", "DeadlineExceeded", "LimitReached")
)  # how a request may end here


def pipeline(hoards: bool, largest_bytes: int, version: int = 0) -> Builder:
    """Return the pipeline. version: of its graph; what it loads is the same."""
    p = Builder(
        "soak",
        base_dir=Path(__file__).parent,
        limits={
            "arena_bytes": max(64 << 20, 16 * largest_bytes),
            "stream_bytes_max": 50_000,
            "stall_max_ms": 500,
            "requests_max": 200,
        },
    )
    x, text = p.input("x", "float32[N]"), p.input("text", "text")
    batch: dict[str, Any] = {"batch": {"items_max": 4, "wait_max_ms": 2}}
    batch |= {"share": True}
    first = p.step("first", "function", x=x, **batch, function="soak_steps.py:more")
    second = p.step("second", "function", x=first.output, **batch, instances=2, function="soak_steps.py:halves")
    shouts = "soak_steps.py:Hoards" if hoards else "soak_steps.py:Honest"
    picky = p.step(
        "picky", "function", text=text, retry=1, fallback={"output": "sorry"}, function=shouts, share=True,
        timeout_ms=60_000 + version,
    )  # fmt: skip
    streamed = p.step(
        "streamed", "trickle", value=text, pieces=PIECES, piece_bytes=PIECE_BYTES, delay_ms=1, when="text != 'bad'"
    )
    p.output("y", second.output)
    p.output("said", picky.output)
    p.output("streamed", streamed.value)
    return p


class Soak:
    """One run.

    samples:  by what is looked at, (seconds since the start, value); `shared` only while every worker was ready.
    totals:   the memory of all processes while every worker was ready, in the same form.
    private:  the part of it that is not shared memory.
    resident: the sum of their RSS at every time, which counts shared pages in each of them.
    ends:     how requests ended.
    """

    def __init__(
        self,
        session: Session,
        seconds: float,
        leak: str,
        seed: int,
        callers: int,
        largest_bytes: int,
        reload_s: float = 0.0,
    ) -> None:
        self.samples: dict[str, list[tuple[float, float]]] = {name: [] for name in BARS}
        self.totals: list[tuple[float, float]] = []
        self.private: list[tuple[float, float]] = []
        self.resident: list[tuple[float, float]] = []
        self.ends: Counter[str] = Counter()
        self._session = session
        self._seconds = seconds
        self._leak = leak
        self._callers = callers
        self._reload_s = reload_s
        self._largest = largest_bytes // 4
        self._random = random.Random(seed)
        self._numbers = np.arange(self._largest + OFFSETS + 1, dtype=np.float32)  # all below 2^24, so exact
        self._kept: list[Any] = []  # what is leaked on purpose
        self._began_s = time.monotonic()

    async def run(self) -> None:
        callers = [self._call() for _ in range(self._callers)]
        watch = asyncio.to_thread(self._watch)  # its samples are due when the callers keep the event loop busy, too
        reload = asyncio.to_thread(self._reload)
        await asyncio.wait_for(asyncio.gather(*callers, self._kill(), watch, reload), self._seconds + HUNG_S)

    @property
    def input_bytes(self) -> int:
        """Return what the callers' inputs take of this process's private memory, all of them together."""
        return self._numbers.nbytes

    @property
    def _passed_s(self) -> float:
        return time.monotonic() - self._began_s

    async def _call(self) -> None:
        draw = self._random
        while self._passed_s < self._seconds:
            size = int(SMALLEST * (self._largest / SMALLEST) ** draw.random())  # as many small ones as large ones
            at = draw.randrange(OFFSETS)
            request = {"x": self._numbers[at : at + size], "text": draw.choice(["good", "bad"])}
            asking = asyncio.create_task(draw.choice([self._ask, self._ask, self._read])(request, at))
            if draw.random() < 0.2:
                await asyncio.sleep(0.03 * draw.random())
                asking.cancel()
            try:
                self.ends[await asyncio.wait_for(asking, HUNG_S)] += 1
            except asyncio.CancelledError:
                self.ends["cancelled"] += 1
            except WeftlineError as error:
                self.ends[type(error).__name__] += 1

    async def _ask(self, request: dict[str, Any], at: int) -> str:
        deadline_ms = self._random.choice([None, None, 30, 300])
        answer = await self._session.arun(
            RequestOptions(deadline_ms=deadline_ms, priority=self._random.randrange(-5, 5)), **request
        )
        return "answered" if is_right(answer, request, self._numbers[at + 1 :]) else "wrong answer"

    async def _read(self, request: dict[str, Any], at: int) -> str:
        last: dict[str, Any] = {}
        pieces: list[str] = []
        async for piece in self._session.astream(**request):
            if piece.last:
                last[piece.output] = piece.value
            else:
                pieces.append(piece.value)
            await asyncio.sleep(self._random.choice([0, 0, 0.001]))
        whole = "".join(pieces) == (last.get("streamed") or "")
        return "read" if whole and is_right(last, request, self._numbers[at + 1 :]) else "wrong answer"

    async def _kill(self) -> None:
        """Kill one worker or two, again and again, some seconds after all were ready.

        Never that of `picky`, whose memory is looked at.
        """
        every_s = min(KILL_EVERY_S, self._seconds / 10)
        while self._passed_s < self._seconds - every_s:
            await asyncio.sleep(every_s * (0.5 + self._random.random()))
            if missing(self._session.stats()):
                continue
            pids = [pid for name, pid in self._session.pids().items() if name != "picky"]
            for pid in self._random.sample(pids, self._random.choice([1, 1, 2])):
                os.kill(pid, signal.SIGKILL)

    def _reload(self) -> None:
        """Change the graph every `reload_s`: what is loaded stays, and so do its processes."""
        while self._reload_s and self._passed_s < self._seconds - self._reload_s:
            time.sleep(self._reload_s)
            version, engine = self._session.version + 1, self._session._current.engine
            self._session.reload(pipeline(self._leak == "worker", 4 * self._largest, version))
            self.ends["reload of models"] += self._session._current.engine is not engine

    def _watch(self) -> None:
        runtime = self._session._current.runtime
        pause_s = max(0.2, min(0.5, self._seconds / 100), self._seconds / SAMPLES_MAX)
        while (passed_s := self._passed_s) < self._seconds:
            size_bytes = int(LEAKED_BYTES * pause_s / self._seconds)
            if self._leak == "memory":
                self._kept.append(bytearray(b"x" * size_bytes))
            elif self._leak == "descriptors":
                self._kept.append(os.open(os.devnull, os.O_RDONLY))
            elif self._leak == "leases":
                self._kept.append(runtime.reserve(self._session._current.program, [size_bytes]))
            pids, stats = self._session.pids(), self._session.stats()
            values = {
                "memory": private_bytes([os.getpid()]),
                "worker": private_bytes([pids["picky"]]),
                "descriptors": descriptors(),
                "shared": shared_bytes(),
                "leases": stats["arena"]["leased_bytes"],
            }
            complete = not missing(stats) and not missing(self._session.stats())
            for name, value in values.items():
                if complete or name != "shared":  # the arena of a worker that is being restarted is not mapped
                    self.samples[name].append((passed_s, float(value)))
            self.resident.append((passed_s, float(memory_bytes([os.getpid(), *pids.values()]))))
            if complete:
                private = values["memory"] + private_bytes(pids.values())
                self.private.append((passed_s, float(private)))
                self.totals.append((passed_s, float(private + values["shared"])))
            time.sleep(pause_s)


def is_right(answer: Mapping[str, Any], request: Mapping[str, Any], expected: np.ndarray) -> bool:
    """Return whether an answer is what the request's inputs come to, every number of it.

    expected: the numbers that `y` begins with, and more.
    """
    bad = request["text"] == "bad"
    streamed, said = (None, "sorry") if bad else (STREAMED, "GOOD")
    if "y" not in answer or answer["streamed"] != streamed or answer["said"] != said:
        return False
    return np.array_equal(answer["y"], expected[: len(request["x"]) // 2])


def missing(stats: Mapping[str, Any]) -> int:
    """Return how many workers are not ready."""
    return sum(step["all"] - step["ready"] for step in stats["workers"].values())


def settled(session: Session, opened: int | None) -> str:
    """Wait until nothing of any request is left and every worker is back; return what is left, '' for nothing.

    opened: how many descriptors were open before the load; None where more of them are no fault.
    """
    until_s, left = time.monotonic() + SETTLED_S, "everything"
    while left and time.monotonic() < until_s:
        time.sleep(0.05)
        stats = session.stats()
        counts = {
            "requests open": stats["requests"]["open"],
            "items queued": sum(stats["queued"].values()),
            "bytes leased": stats["arena"]["leased_bytes"],
            "leases released twice": stats["arena"]["stale_total"],
            "workers missing": missing(stats),
            "descriptors too many": 0 if opened is None else max(0, descriptors() - opened),
        }
        left = ", ".join(f"{count} {what}" for what, count in counts.items() if count)
    return left


def verdict(
    found: Sequence[Growth], ends: Counter[str], left: str, leak: str, total: Flatness | None = None
) -> list[str]:
    """Return what is not as it should be. total: the memory of all processes, None where nothing is asked of it."""
    wrong = [f"{one.name} grows" for one in found if one.found and one.name != leak]
    if total is not None and total.share > FLAT_SHARE and not leak:
        wrong.append(f"the memory of all processes is not flat within {FLAT_SHARE:.0%}")
    seen = [one.name for one in found if one.found] + (["leases"] if "bytes leased" in left else [])
    wrong += [f"the leak that was planted, {leak}, was not found"] if leak and leak not in seen else []
    wrong += [f"{count} requests ended with {end}" for end, count in ends.items() if end not in EXPECTED]
    wrong += ["nothing was answered"] if not ends["answered"] else []
    return wrong + ([f"left at the end: {left}"] if left and leak != "leases" else [])


def run(
    seconds: float, callers: int, largest_bytes: int, leak: str = "", seed: int = 1, reload_s: float = 0.0
) -> tuple[Soak, str, int]:
    """Run the load and wait until it has settled; return it, what is left, and how many workers died."""
    with load(pipeline(leak == "worker", largest_bytes)).open() as session:
        asyncio.run(session.arun(x=np.ones(SMALLEST, np.float32), text="good"))  # the first one opens what stays open
        opened = descriptors()
        soak = Soak(session, seconds, leak, seed, callers, largest_bytes, reload_s)
        asyncio.run(soak.run())
        left = settled(session, None if leak == "descriptors" else opened)
        return soak, left, session.stats()["worker_deaths"]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="A long time of mixed faults: does anything grow?")
    parser.add_argument("--minutes", type=float, help="10 when left out, 1 with a leak")
    parser.add_argument("--callers", type=int, default=64, help="requests open at a time (64)")
    parser.add_argument("--largest-mb", type=float, default=8.0, help="largest input, in MiB (8); the smallest is 1 KB")
    parser.add_argument("--leak", choices=LEAKS, default="", help="plant a leak, which has to be found")
    parser.add_argument("--reload-s", type=float, default=0.0, help="seconds between reloads of the graph; 0: none")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args(arguments)
    minutes = options.minutes or (1.0 if options.leak else 10.0)
    seconds, largest_bytes = minutes * 60, int(options.largest_mb * (1 << 20))
    if seconds < 60 or not 0.002 <= options.largest_mb <= 60:
        parser.error("--minutes: at least 1; --largest-mb: 0.002 to 60")
    print(conditions())
    soak, left, deaths = run(seconds, options.callers, largest_bytes, options.leak, options.seed, options.reload_s)
    found = [growth(name, bar, soak.samples[name]) for name, bar in BARS.items()]
    after_s = min(FLAT_AFTER_S, WARM_UP * seconds)
    total = None if options.leak else flatness(soak.totals, after_s)
    soak.ends = +soak.ends
    print(f"{minutes:g} minutes, {options.callers} callers, {deaths} workers died; requests: {dict(soak.ends)}")
    for one in found:
        print(f"  {one}")
    resident = [value / MB for at_s, value in soak.resident if at_s >= after_s]
    if total is not None:
        private, inputs = flatness(soak.private, after_s), soak.input_bytes / MB
        print(f"memory of all processes after {after_s:.0f} s: {total} (bar {FLAT_SHARE:.0%})")
        print(f"  private: {private}, of it {inputs:.0f} MB the callers' inputs")
    print(f"  sum of RSS, shared pages in each process: {min(resident):.0f} to {max(resident):.0f} MB, deaths included")
    print(peak_memory())
    wrong = verdict(found, soak.ends, left, options.leak, total)
    print("\n".join(wrong) or ("the planted leak was found" if options.leak else "nothing grows and nothing is left"))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
