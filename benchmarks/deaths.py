"""What callers notice when workers are killed, and what is left behind after deaths and cancels.

Part one: 64 callers ask a chain of three function steps, each in a process of its own, and every two seconds one of the
workers is killed with SIGKILL, at random.

    hung        requests that never ended: there must be none
    answered    share of the requests that were answered; the bar is 70 %
    wrong       answers that are not what the steps make of the input: there must be none
    death seen  from the kill to the runtime knowing; the bar is 50 ms
    error told  from the kill to the error of every request that failed; the bar is 1 s

Part two: requests to a batched step, a slow one, and one that streams, cancelled at random moments of their lives.

After each part everything must be back where it was: counters, leases, queues, descriptors, mapped shared memory.

    python -m benchmarks.deaths [--quick] [--seconds 60] [--cancels 10000]
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import os
import random
import signal
import statistics
import sys
import threading
import time
from bisect import bisect_right
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.conditions import conditions, descriptors, memory_bytes, peak_memory, quantile, shared_bytes
from weftline.engine.driver import Driver
from weftline.engine.session import Session, load
from weftline.errors import RequestCancelled, WeftlineError
from weftline.pipelines.builder import Builder

CALLERS = 64
KILL_EVERY_S = 2.0
READY_MAX_S = 10.0
"""Longest wait for the workers to be back when the killing is over."""

LOOK_S = 0.0005
"""How often the runtime is asked whether it has seen a death."""

CANCEL_AFTER_MS_MAX = 40.0
ANSWERED_BAR, SEEN_BAR_MS, TOLD_BAR_MS = 0.7, 50.0, 1000.0


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
    told = built.step("tell", "trickle", value=slow.value, pieces=5, delay_ms=2.0, worker="three")
    built.output("text", told.value)
    return built


def under_fire(session: Session, seconds: float) -> list[str]:
    """Kill workers under load, print what callers noticed, and return the bars that were missed."""
    wrong: list[str] = []

    async def ask(inputs: Mapping[str, Any], deadline_ms: float | None) -> Any:
        result = await session.arun(**inputs)
        if result["text"] != inputs["text"] + "abc":
            wrong.append(result["text"])
        return result

    def drive(length_s: float) -> Driver:
        driver = Driver(ask, lambda number: {"text": str(number)}, None)
        asyncio.run(driver.closed(CALLERS, length_s * 1000))
        return driver

    drive(1.0)
    before = Baseline.of(session)
    memory = memory_bytes([os.getpid(), *session.pids().values()])
    killer = Killer(session, seconds)
    killer.start()
    outcomes = drive(seconds).outcomes
    killer.join()
    until = time.monotonic() + READY_MAX_S
    while not session.ready and time.monotonic() < until:
        time.sleep(0.05)
    ok = sum(one.ok for one in outcomes)
    hung = sum(one.error == RequestCancelled.__name__ for one in outcomes)
    failed = [one for one in outcomes if not one.ok]
    told_ms = []
    for one in failed:
        kill = bisect_right(killer.kills_ms, one.ended_ms) - 1
        told_ms.append(one.ended_ms - killer.kills_ms[kill] if kill >= 0 else float("inf"))
    errors = ", ".join(f"{count} {name}" for name, count in Counter(one.error for one in failed).most_common())
    longest_ms = max(one.latency_ms for one in outcomes)
    print(
        f"{len(killer.kills_ms)} kills in {seconds:g} s, {CALLERS} callers: {len(outcomes)} requests,"
        f" {100 * ok / len(outcomes):.3f} % answered, {hung} hung, {len(wrong)} wrong; failed: {errors or 'none'};"
        f" longest {longest_ms:.0f} ms"
    )
    print(
        f"    death seen after {statistics.median(killer.seen_ms):.1f} ms, at most {max(killer.seen_ms):.1f} ms; error"
        f" told after p50 {quantile(told_ms, 0.5):.0f} ms, at most {max(told_ms, default=0.0):.0f} ms"
    )
    share = ok / len(outcomes)
    outcomes.clear()
    failed.clear()
    gc.collect()
    after = Baseline.reached(session, before)
    grown = memory_bytes([os.getpid(), *session.pids().values()]) - memory
    print(f"    before {before}\n    after  {after}; memory {grown / 1e6:+.1f} MB", flush=True)
    missed = [f"{hung} hung"] * bool(hung) + [f"{len(wrong)} wrong answers"] * bool(wrong)
    missed += [f"{100 * share:.0f} % answered"] * (share < ANSWERED_BAR)
    missed += [f"death seen after {max(killer.seen_ms):.0f} ms"] * (max(killer.seen_ms) >= SEEN_BAR_MS)
    missed += [f"error told after {max(told_ms, default=0):.0f} ms"] * (max(told_ms, default=0) > TOLD_BAR_MS)
    missed += ["not back at the baseline after deaths"] * (after != before)
    return missed


def cancels(session: Session, count: int) -> list[str]:
    """Cancel requests at random moments, print what is left, and return what is not as it was."""
    draw = random.Random(11)
    ends: Counter[str] = Counter()
    left = iter(range(count))

    async def read(text: str) -> None:
        async for _ in session.astream(text=text):
            pass

    async def caller() -> None:
        for number in left:
            streams = draw.random() < 0.5
            asked = asyncio.ensure_future(read(str(number)) if streams else session.arun(text=str(number)))
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
    print(f"{count} cancels at random: {dict(ends)}; requests {requests}")
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
        f"bars: none hung or wrong, {100 * ANSWERED_BAR:.0f} % answered, death seen < {SEEN_BAR_MS:g} ms, error told <="
        f" {TOLD_BAR_MS:g} ms, all back at the baseline: {'missed: ' + '; '.join(missed) if missed else 'met'}"
    )
    print(peak_memory())
    return 0


if __name__ == "__main__":
    sys.exit(main())
