"""What a job takes from the usual requests beside it, and what they take from the job.

One step of known cost: a fixed part for each call, and a part for each item. Usual requests come at random moments
(Poisson), one at a time, and keep the step busy for a given share of its time. The job has rows without end, through a
SessionRunner on the same session. Each round measures one after the other, in turning order:

    quiet       usual requests alone
    solo        the job alone
    both        the two together

and the same on two instances of which one is reserved. The bars are those of medians over the rounds:

    p99 of usual requests beside the job    at most quiet p99 + job_batch_ms, and 10 %
    the job beside them                     at least 80 % of solo
    p99 with an instance reserved           at most 1.2 times its quiet p99

    echo        sleeps, as a step on an accelerator leaves the cores alone
    matmul      computes on one core in each instance, which it shares with the runtime and with this load

The latest of a few hundred requests is at the mercy of the machine, so the load's own lateness stands beside: how late
it called, p99.

    python -m benchmarks.live_job [--quick] [--rounds 5] [--seconds 10] [--share 0.15] [--steps echo matmul]
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass

import pyarrow as pa

from benchmarks.busy_step import Busy, BusyConfig, multiplications, values
from benchmarks.conditions import conditions, peak_memory, quantile, spread
from weftline.engine.bench.arrivals import Open
from weftline.engine.jobs.rows import BlockResult, RowBlock
from weftline.engine.jobs.runners.session_runner import SessionRunner
from weftline.engine.runtime.clock import MonotonicClock
from weftline.engine.session import Session, load
from weftline.pipelines.spec.builder import Builder

CALL_MS, ITEM_MS, ITEMS_MAX = 10.0, 2.0, 16
"""Of the step: what a call takes, what each item adds, and the largest batch (42 ms)."""

JOB_BATCH_MS = 30.0
"""Longest batch of the job: 10 rows."""

WARM_UP_S = 1.0
"""Requests and rows of the first second do not count."""

P99_SLACK, SOLO_BAR, RESERVED_BAR = 1.1, 0.8, 1.2
CLOCK = MonotonicClock()


@dataclass(slots=True)
class Seen:
    """What one measurement showed: latencies of usual requests, how late they were sent, and rows a second."""

    latency_ms: list[float]
    late_ms: list[float]
    rows_per_s: float = 0.0

    @property
    def p99_ms(self) -> float:
        return quantile(self.latency_ms, 0.99)


class Job(threading.Thread):
    """A job with rows without end, that keeps the runner busy."""

    def __init__(self, session: Session) -> None:
        super().__init__(daemon=True)
        self._runner = SessionRunner(session)
        self._over = threading.Event()
        self._done: list[tuple[float, int]] = []
        self.start()

    def run(self) -> None:
        place, rows = 0, self._runner.block_rows
        waiting: deque[Future[BlockResult]] = deque()
        while not self._over.is_set():
            while len(waiting) < self._runner.ahead:
                ids = [str(number) for number in range(place, place + rows)]
                block = RowBlock(0, place, ids, {"value": values(rows, place)}, pa.table({}))
                waiting.append(self._runner.submit(block))
                place += rows
            answered = waiting.popleft().result()
            if answered.errors:
                raise RuntimeError(f"rows failed: {dict(answered.errors)}")
            self._done.append((time.perf_counter(), rows))
        for one in waiting:
            one.result()

    def stop(self) -> list[tuple[float, int]]:
        """Return when blocks were answered, and how many rows they had."""
        self._over.set()
        self.join()
        self._runner.close()
        return self._done


def usual_requests(session: Session, rate_per_s: float, seconds: float, seed: int) -> Seen:
    """Send requests at random moments; latency counts from the moment that was meant."""
    seen = Seen([], [])

    async def one(at_ms: float, counts: bool) -> None:
        late_ms = CLOCK.now_ms() - at_ms
        await session.arun(value="a usual request")
        if counts:
            seen.late_ms.append(late_ms)
            seen.latency_ms.append(CLOCK.now_ms() - at_ms)

    async def every() -> None:
        start_ms, tasks = CLOCK.now_ms(), set[asyncio.Task[None]]()
        for offset_ms in Open(rate_per_s, seed=seed).arrivals(WARM_UP_S + seconds):
            if (wait_ms := start_ms + offset_ms - CLOCK.now_ms()) > 0:
                await asyncio.sleep(wait_ms / 1000)
            tasks.add(asyncio.create_task(one(start_ms + offset_ms, offset_ms >= WARM_UP_S * 1000)))
        await asyncio.gather(*tasks)

    asyncio.run(every())
    return seen


def measure(session: Session, rate_per_s: float, job: bool, seconds: float, seed: int) -> Seen:
    """Run one measurement; a rate of 0 sends no usual requests."""
    start = time.perf_counter() + WARM_UP_S
    beside = Job(session) if job else None
    if rate_per_s:
        seen = usual_requests(session, rate_per_s, seconds, seed)
    else:
        seen = Seen([], [])
        time.sleep(WARM_UP_S + seconds)
    end = time.perf_counter()
    if beside is not None:
        seen.rows_per_s = sum(rows for at, rows in beside.stop() if start <= at < end) / (end - start)
    return seen


def pipeline(step: str, instances: int) -> Builder:
    built = Builder("live-job", limits={"arena_bytes": 4 << 20, "job_batch_ms": JOB_BATCH_MS})
    wire = built.input("value", "text")
    more = {"instances": 2, "reserved": 1} if instances == 2 else {}
    if step == "echo":
        one = built.step("step", "echo", value=wire, delay_ms=CALL_MS, delay_item_ms=ITEM_MS,
                         batch={"items_max": ITEMS_MAX}, **more)  # fmt: skip
    else:
        a_ms = multiplications(10.0) / 10
        node = Busy(BusyConfig(round(a_ms * CALL_MS), max(1, round(a_ms * ITEM_MS))))
        one = built.step("step", node, value=wire, batch={"items_max": ITEMS_MAX}, **more)
    built.output("value", one.value)
    return built


def rounds_of(step: str, instances: int, rounds: int, seconds: float, rate_per_s: float) -> dict[str, list[Seen]]:
    """Measure in turning order, and return what was seen by kind."""
    found: dict[str, list[Seen]] = {"quiet": [], "solo": [], "both": []}
    with load(pipeline(step, instances)).open() as session:
        kinds: dict[str, Callable[[int], Seen]] = {
            "quiet": lambda seed: measure(session, rate_per_s, False, seconds, seed),
            "solo": lambda seed: measure(session, 0.0, True, seconds, seed),
            "both": lambda seed: measure(session, rate_per_s, True, seconds, seed),
        }
        measure(session, rate_per_s, True, 1.0, 0)  # the step's times are learnt
        names = list(kinds)
        for number in range(rounds):
            for name in names[number % 3 :] + names[: number % 3]:
                found[name].append(kinds[name](number + 1))
    return found


def report(title: str, found: Mapping[str, list[Seen]]) -> dict[str, float]:
    """Print the rows of one pipeline, and return the medians."""
    print(f"{title}")
    for name in ("quiet", "both"):
        seen = found[name]
        count = statistics.median(len(one.latency_ms) for one in seen)
        p50 = [quantile(one.latency_ms, 0.5) for one in seen]
        late = [quantile(one.late_ms, 0.99) for one in seen]
        print(
            f"    usual requests {name:5}  p50 {spread(p50, 1)}  p99 {spread([one.p99_ms for one in seen], 1)} ms,"
            f" {count:.0f} a round, sent late p99 {spread(late, 1)} ms"
        )
    for name in ("solo", "both"):
        print(f"    the job        {name:5}  {spread([one.rows_per_s for one in found[name]])} rows/s")
    pairs = list(zip(found["quiet"], found["solo"], found["both"], strict=True))
    medians = {
        "over": statistics.median(
            both.p99_ms / ((quiet.p99_ms + JOB_BATCH_MS) * P99_SLACK) for quiet, _, both in pairs
        ),
        "times": statistics.median(both.p99_ms / quiet.p99_ms for quiet, _, both in pairs),
        "share": statistics.median(both.rows_per_s / solo.rows_per_s for _, solo, both in pairs),
    }
    print(
        f"    p99 beside the job is {medians['times']:.2f} times the quiet one, {100 * medians['over']:.0f} % of (quiet"
        f" p99 + {JOB_BATCH_MS:g} ms) + 10 %; the job keeps {100 * medians['share']:.0f} % of its solo rows/s",
        flush=True,
    )
    return medians


def compare(step: str, rounds: int, seconds: float, share: float) -> list[str]:
    """Run all rounds for one step, print them, and return the bars that were missed."""
    rate_per_s = share / ((CALL_MS + ITEM_MS) / 1000)
    one = report(f"{step}, one instance, {rate_per_s:.0f} usual requests/s ({share:.0%} of its time)",
                 rounds_of(step, 1, rounds, seconds, rate_per_s))  # fmt: skip
    two = report(f"{step}, two instances, one reserved, {rate_per_s:.0f} usual requests/s",
                 rounds_of(step, 2, rounds, seconds, rate_per_s))  # fmt: skip
    missed = []
    if one["over"] > 1:
        missed.append(f"{step} p99 at {100 * one['over']:.0f} % of what it may be")
    if one["share"] < SOLO_BAR:
        missed.append(f"{step} the job at {100 * one['share']:.0f} % of solo")
    if two["times"] > RESERVED_BAR:
        missed.append(f"{step} p99 with an instance reserved at {two['times']:.2f} times quiet")
    return missed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=10.0, help="length of each measurement")
    parser.add_argument("--share", type=float, default=0.15, help="of the step's time that usual requests take")
    parser.add_argument("--steps", nargs="+", choices=("echo", "matmul"), default=["echo", "matmul"])
    parser.add_argument("--quick", action="store_true", help="2 rounds of 3 s")
    options = parser.parse_args()
    rounds, seconds = (2, 3.0) if options.quick else (options.rounds, options.seconds)
    print(conditions())
    print(
        f"the step takes {CALL_MS:g} ms a call and {ITEM_MS:g} ms an item, at most {ITEMS_MAX} items; job_batch_ms"
        f" {JOB_BATCH_MS:g}; {rounds} rounds of {seconds:g} s"
    )
    missed = [bar for step in options.steps for bar in compare(step, rounds, seconds, options.share)]
    print(
        f"bars: p99 within quiet + job_batch_ms + 10 %, {100 * SOLO_BAR:.0f} % of solo, within {RESERVED_BAR:g} times"
        f" quiet with one reserved: {'missed: ' + '; '.join(missed) if missed else 'met'}"
    )
    print(peak_memory())
    return 0


if __name__ == "__main__":
    sys.exit(main())
