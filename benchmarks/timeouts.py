"""Measure the goodput of a step with a timeout, for 1 to 64 callers in a closed loop.

One step of known cost that sleeps instead of computing, in a process of its own; its timeout is 1.5 times that cost and
includes the time in the queue. Each caller calls again 5 ms after an answer or an error. A call that ends after its
timeout is thrown away, so starting it wastes the worker: goodput should be that of one caller, whatever their number.

    good    answers a second
    wasted  share of the items that the worker ran for nothing
    failed  errors a second, and the median time until the error

    python -m benchmarks.timeouts [--quick] [--seconds 5] [--callers 1 2 8 64] [--items-max 1]
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from benchmarks.conditions import conditions, peak_memory
from weftline.engine.session import Session, load
from weftline.errors import DeadlineExceeded
from weftline.pipelines.spec.builder import Builder

RUN_MS, TIMEOUT_MS = 100.0, 150.0
PAUSE_S = 0.005
WARM_UP = 4
"""Requests before the measurement: times are known after three."""

BAR = 0.9
"""Goodput of any number of callers, as a share of that of one."""


def pipeline(items_max: int) -> Builder:
    built = Builder("timeouts", base_dir=Path(__file__).parent, limits={"arena_bytes": 1 << 20})
    batch = {"items_max": items_max}
    step = built.step(
        "step", "echo", value=built.input("value", "text"), delay_ms=RUN_MS, timeout_ms=TIMEOUT_MS, batch=batch
    )
    built.output("value", step.value)
    return built


def call(session: Session, until_s: float) -> tuple[int, list[float]]:
    """Call until a time; return the number of answers and the milliseconds until each error."""
    good, failed_ms = 0, []
    while (began_s := time.monotonic()) < until_s:
        try:
            session.run(value="a text")
            good += 1
        except DeadlineExceeded:
            failed_ms.append((time.monotonic() - began_s) * 1000)
        time.sleep(PAUSE_S)
    return good, failed_ms


def measure(session: Session, callers: int, seconds: float) -> float:
    """Print and return the goodput of a number of callers."""
    before = session.stats()["items"]
    until_s = time.monotonic() + seconds
    with ThreadPoolExecutor(callers) as pool:
        ends = list(pool.map(lambda _: call(session, until_s), range(callers)))
    items = session.stats()["items"] - before
    good, failed_ms = sum(end[0] for end in ends), [ms for end in ends for ms in end[1]]
    wasted = 100 * max(0.0, 1 - good / items) if items else 0.0
    median_ms = statistics.median(failed_ms) if failed_ms else 0.0
    print(
        f"{callers:3} callers  good {good / seconds:5.1f}/s  wasted {wasted:4.1f} %"
        f"  failed {len(failed_ms) / seconds:6.1f}/s after {median_ms:.1f} ms",
        flush=True,
    )
    return good / seconds


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=5.0, help="length of one measurement")
    parser.add_argument("--callers", type=int, nargs="+", default=[1, 2, 8, 64])
    parser.add_argument("--items-max", type=int, default=1, help="items of a batch")
    parser.add_argument("--quick", action="store_true", help="2 s each")
    options = parser.parse_args()
    print(conditions())
    print(f"one step of {RUN_MS:g} ms with timeout_ms {TIMEOUT_MS:g}, one instance")
    with load(pipeline(options.items_max)).open() as session:
        for _ in range(WARM_UP):
            session.run(value="a text")
        found = [measure(session, callers, 2.0 if options.quick else options.seconds) for callers in options.callers]
    met = min(found) >= BAR * found[0]
    print(f"bar: {BAR} times the goodput of {options.callers[0]}: {'met' if met else 'missed'}")
    print(peak_memory())
    return 0


if __name__ == "__main__":
    sys.exit(main())
