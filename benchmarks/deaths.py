"""What callers notice when workers are killed, and what is left behind after deaths and cancels.

Part one: 64 callers ask a chain of three function steps, each in a process of its own, and every two seconds one of the
workers is killed with SIGKILL, at random.

    hung        requests that never ended: there must be none
    answered    share of the requests that were answered; the bar is 70 %
    wrong       answers that are not what the steps make of the input: there must be none
    death seen  from the kill to the runtime knowing; the bar is 50 ms
    error       from the kill to the error of every request that failed; the bar is 1 s

Part two: requests to a batched step, a slow one, and one that streams, cancelled at random moments of their lives.

After each part everything must be back where it was: counters, leases, queues, descriptors, mapped shared memory.

    python -m benchmarks.deaths [--quick] [--seconds 60] [--cancels 10000]
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import os
import random
import signal
import statistics
import sys
import threading
import time
from array import array
from bisect import bisect_right
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.conditions import conditions, descriptors, memory_bytes, peak_memory, quantile, shared_bytes
from weftline.engine.session import Session, load
from weftline.errors import WeftlineError
from weftline.pipelines.spec.builder import Builder

CALLERS = 64
KILL_EVERY_S = 2.0
HUNG_S = 30.0
"""A request that has not ended so long after the last was sent hangs."""

READY_MAX_S = 10.0
"""Longest wait for the workers to be back when the killing is over."""

LOOK_S = 0.0005
"""How often the runtime is asked whether it has seen a death."""

CANCEL_AFTER_MS_MAX = 40.0
ANSWERED_BAR, SEEN_BAR_MS, ERROR_BAR_MS = 0.7, 50.0, 1000.0


@dataclass(frozen=True, slots=True)
class Baseline:
    """What a session holds when nothing is going on."""

    open: int
    queued: int
    leased_bytes: int
    blocks: int
    descriptors: int
    shared_bytes: int

    @classmethod
    def of(cls, session: Session) -> Baseline:
        stats = session.stats()
        arena = stats["arena"]
        queued = sum(stats["queued"].values())
        return cls(
            stats["requests"]["open"], queued, arena["leased_bytes"], arena["blocks"], descriptors(), shared_bytes()
        )

    @classmethod
    def reached(cls, session: Session, before: Baseline, seconds: float = 5.0) -> Baseline:
        """Return what is held, as soon as it is what it was before, or what it is when `seconds` have passed."""
        until = time.monotonic() + seconds
        while (found := cls.of(session)) != before and time.monotonic() < until:
            time.sleep(0.05)
        return found


class Killer(threading.Thread):
    """Kills a random worker now and then, and times how soon the runtime knows."""

    def __init__(self, session: Session, seconds: float) -> None:
        super().__init__(daemon=True)
        self.kills_ms: list[float] = []
        self.seen_ms: list[float] = []
        self._session = session
        self._seconds = seconds
        self._random = random.Random(7)

    def run(self) -> None:
        end = time.monotonic() + self._seconds
        while time.monotonic() + KILL_EVERY_S < end:
            time.sleep(KILL_EVERY_S)
            pids = sorted(self._session.pids().values())
            if not pids:
                continue
            deaths = self._session.stats()["worker_deaths"]
            at = time.monotonic()
            os.kill(self._random.choice(pids), signal.SIGKILL)
            while self._session.stats()["worker_deaths"] == deaths and time.monotonic() < at + 1:
                time.sleep(LOOK_S)
            self.kills_ms.append(at * 1000)
            self.seen_ms.append((time.monotonic() - at) * 1000)


def chain() -> Builder:
    built = Builder("deaths", base_dir=Path(__file__).parent, limits={"arena_bytes": 4 << 20})
    wire: Any = built.input("text", "text")
    for letter in "abc":
        function = f"death_steps.py:{letter}"
        wire = built.step(letter, "function", text=wire, function=function, worker=f"worker-{letter}").output
    built.output("text", wire)
    return built


def stages() -> Builder:
    """Return a pipeline where a request can be cancelled queued, batched, running, between steps, and streaming."""
    built = Builder("cancels", limits={"arena_bytes": 4 << 20})
    wire: Any = built.input("text", "text")
    batch = {"items_max": 8, "wait_max_ms": 3.0}
    gathered = built.step("gather", "echo", value=wire, delay_ms=1.0, batch=batch, worker="one")
    slow = built.step("slow", "echo", value=gathered.value, delay_ms=4.0, batch={"items_max": 16}, worker="two")
    streamed = built.step("tell", "trickle", value=slow.value, pieces=5, delay_ms=2.0, worker="three")
    built.output("text", streamed.value)
    return built


@dataclass(slots=True)
class Noticed:
    """What callers noticed: latencies of answers in milliseconds, failures as (when, error), and wrong answers."""

    latencies_ms: array[float] = field(default_factory=lambda: array("d"))
    failures: list[tuple[float, str]] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    hung: int = 0


def drive(session: Session, seconds: float) -> Noticed:
    """Let CALLERS callers ask for so long, and check every answer."""
    noticed, numbers = Noticed(), itertools.count()

    async def call(until_s: float) -> None:
        while (started_s := time.monotonic()) < until_s:
            text = str(next(numbers))
            try:
                answer = (await session.arun(text=text))["text"]
            except WeftlineError as error:
                noticed.failures.append((time.monotonic() * 1000, type(error).__name__))
                continue
            noticed.latencies_ms.append((time.monotonic() - started_s) * 1000)
            if answer != text + "abc":
                noticed.wrong.append(answer)

    async def every() -> None:
        until_s = time.monotonic() + seconds
        _, hung = await asyncio.wait(
            [asyncio.create_task(call(until_s)) for _ in range(CALLERS)], timeout=seconds + HUNG_S
        )
        noticed.hung = len(hung)
        for task in hung:
            task.cancel()

    asyncio.run(every())
    return noticed


def under_fire(session: Session, seconds: float) -> list[str]:
    """Kill workers under load, print what callers noticed, and return the bars that were missed."""
    drive(session, 1.0)
    before = Baseline.of(session)
    memory = memory_bytes([os.getpid(), *session.pids().values()])
    killer = Killer(session, seconds)
    killer.start()
    noticed = drive(session, seconds)
    killer.join()
    until = time.monotonic() + READY_MAX_S
    while not session.ready and time.monotonic() < until:
        time.sleep(0.05)
    error_ms = []
    for at_ms, _ in noticed.failures:
        kill = bisect_right(killer.kills_ms, at_ms) - 1
        error_ms.append(at_ms - killer.kills_ms[kill] if kill >= 0 else float("inf"))
    errors = ", ".join(f"{count} {name}" for name, count in Counter(name for _, name in noticed.failures).most_common())
    ok, wrong = len(noticed.latencies_ms), len(noticed.wrong)
    share = ok / (ok + len(error_ms) + noticed.hung)
    print(
        f"{len(killer.kills_ms)} kills in {seconds:g} s, {CALLERS} callers: {ok} answers, {100 * share:.3f} % of"
        f" requests; {noticed.hung} hung, {wrong} wrong; failed: {errors or 'none'}"
    )
    print(
        f"    answered after p50 {quantile(noticed.latencies_ms, 0.5):.1f} ms, p99"
        f" {quantile(noticed.latencies_ms, 0.99):.1f} ms, at most {max(noticed.latencies_ms):.0f} ms; death seen after"
        f" {statistics.median(killer.seen_ms):.1f} ms, at most {max(killer.seen_ms):.1f} ms; error after at most"
        f" {max(error_ms, default=0.0):.0f} ms"
    )
    after = Baseline.reached(session, before)
    grown = memory_bytes([os.getpid(), *session.pids().values()]) - memory
    print(f"    before {before}\n    after  {after}; RSS of all processes {grown / 1e6:+.1f} MB", flush=True)
    missed = [f"{noticed.hung} hung"] * bool(noticed.hung) + [f"{wrong} wrong answers"] * bool(wrong)
    missed += [f"{100 * share:.0f} % answered"] * (share < ANSWERED_BAR)
    missed += [f"death seen after {max(killer.seen_ms):.0f} ms"] * (max(killer.seen_ms) >= SEEN_BAR_MS)
    missed += [f"error after {max(error_ms, default=0):.0f} ms"] * (max(error_ms, default=0) > ERROR_BAR_MS)
    missed += ["not back at the baseline after deaths"] * (after != before)
    return missed


def cancels(session: Session, count: int) -> list[str]:
    """Cancel requests at random moments, print what is left, and return what is not as it was."""
    draw = random.Random(11)
    ends: Counter[str] = Counter()
    numbers = itertools.count()

    async def read(text: str) -> None:
        async for _ in session.astream(text=text):
            pass

    async def caller() -> None:
        while ends["cancelled"] < count:
            text = str(next(numbers))
            asked = asyncio.ensure_future(read(text) if draw.random() < 0.5 else session.arun(text=text))
            await asyncio.wait([asked], timeout=draw.uniform(0.0, CANCEL_AFTER_MS_MAX) / 1000)
            asked.cancel()
            try:
                await asked
                ends["answered before the cancel"] += 1
            except asyncio.CancelledError:
                ends["cancelled"] += 1
            except WeftlineError as error:
                ends[type(error).__name__] += 1

    async def all_callers() -> None:
        await asyncio.gather(*(caller() for _ in range(CALLERS)))

    session.run(text="first")
    before = Baseline.of(session)
    asyncio.run(all_callers())
    after = Baseline.reached(session, before)
    requests = session.stats()["requests"]
    summed = requests["admitted"] == sum(requests[end] for end in ("ok", "failed", "cancelled", "expired", "open"))
    works = session.run(text="still here")["text"] != ""
    print(f"cancels at random moments: {dict(ends)}; requests {requests}")
    print(f"    before {before}\n    after  {after}", flush=True)
    missed = ["not back at the baseline after cancels"] * (after != before)
    return missed + ["counters do not add up"] * (not summed) + ["it does not answer any more"] * (not works)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60.0, help="length of the killing")
    parser.add_argument("--cancels", type=int, default=10_000)
    parser.add_argument("--quick", action="store_true", help="10 s, 1 000 cancels")
    options = parser.parse_args()
    seconds, count = (10.0, 1000) if options.quick else (options.seconds, options.cancels)
    print(conditions())
    with load(chain()).open() as session:
        missed = under_fire(session, seconds)
    with load(stages()).open() as session:
        missed += cancels(session, count)
    print(
        f"bars: none hung or wrong, {100 * ANSWERED_BAR:.0f} % answered, death seen < {SEEN_BAR_MS:g} ms, error <="
        f" {ERROR_BAR_MS:g} ms, all back at the baseline: {'missed: ' + '; '.join(missed) if missed else 'met'}"
    )
    print(peak_memory())
    return 0


if __name__ == "__main__":
    sys.exit(main())
