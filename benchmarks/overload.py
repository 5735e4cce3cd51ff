"""What happens at 2 and 5 times the load that can be served, and afterwards.

Three sleeping stages of known cost (those of benchmarks/deadlines.py), each in a process of its own, with an SLO. The
peak is measured with a closed load in the same run; then open-loop Poisson arrivals at multiples of it, and afterwards
at half of it, until latency is what it was before.

    goodput     answered within the SLO, beside the peak; the bar is 90 %
    refusals    from the call to the error: p99, the bar is 10 ms; how late the load itself called stands beside it
    admitted    latency of what was answered, beside the SLO; and what was let in and then cut off
    memory      of the runtime and all workers together (RSS): its slope after a warm-up
    recovery    from the end of the overload to the first quarter of a second like before; the bar is 5 s

    python -m benchmarks.overload [--quick] [--seconds 60] [--loads 2 5] [--grpc] [--transport NAME]

With `--grpc` the same load goes through `weftline serve`, which keeps the other cores: the load is pinned on the last
one, so that it does not take from the server what it measures. `--transport` sets grpc.transport of the server.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import sys
import threading
import time
from array import array
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any, Protocol

from benchmarks.conditions import conditions, memory_bytes, peak_memory, quantile
from benchmarks.deadlines import ITEMS_MAX, STAGES
from benchmarks.overload_server import OverloadServer, overload_server
from weftline.engine.bench.arrivals import Open
from weftline.engine.request import RequestOptions
from weftline.engine.runtime.clock import MonotonicClock
from weftline.engine.session import Session, load
from weftline.errors import LimitReached, WeftlineError
from weftline.pipelines.spec.builder import Builder

SLO_MS = 300.0
CALLERS = 48
CALM = 0.5
"""Share of the peak that is asked for before and after the overload."""

WINDOW_S = 0.25
"""Latency counts as recovered when all requests of such a window are answered in a usual time."""

USUAL = 1.5
"""A usual time: at most so many times the 99th percentile of the calm before."""

CLOCK = MonotonicClock()

GOODPUT_BAR, REFUSAL_BAR_MS, RECOVERY_BAR_S = 0.9, 10.0, 5.0


class Asked(Protocol):
    """What is put under load: a session, or a gRPC server."""

    async def arun(self, options: RequestOptions, /, *, value: str) -> Any: ...

    def pids(self) -> Mapping[str, int]: ...


class Tally:
    """What became of the requests of one load, as numbers only: the load's own memory is not what is looked at."""

    def __init__(self) -> None:
        self.sent_ms, self.late_ms, self.answered_ms, self.refused_ms, self.cut_ms = (array("d") for _ in range(5))
        self.answered_at_ms, self.lost_at_ms = array("d"), array("d")
        self.ended_last_ms = 0.0

    async def send(self, session: Asked, at_ms: float, deadline_ms: float | None) -> None:
        """Send a request that was meant to be sent at `at_ms`; latency counts from then."""
        self.sent_ms.append(at_ms)
        late_ms = CLOCK.now_ms() - at_ms
        self.late_ms.append(late_ms)
        left_ms = None if deadline_ms is None else max(deadline_ms - late_ms, 0.0)
        try:
            await session.arun(RequestOptions(deadline_ms=left_ms), value="a text")
        except WeftlineError as error:
            refused = isinstance(error, LimitReached) or str(error).startswith("by recent measurements")
            took_ms = CLOCK.now_ms() - at_ms
            if refused:
                self.refused_ms.append(took_ms - late_ms)
            else:
                self.cut_ms.append(took_ms)
            self.lost_at_ms.append(at_ms)
        else:
            self.answered_ms.append(CLOCK.now_ms() - at_ms)
            self.answered_at_ms.append(at_ms)
        self.ended_last_ms = CLOCK.now_ms()

    @property
    def notes_mb(self) -> float:
        """How much memory the numbers take."""
        kept = (value for value in vars(self).values() if isinstance(value, array))
        return sum(len(numbers) * numbers.itemsize for numbers in kept) / 1e6

    @property
    def good(self) -> int:
        return sum(latency <= SLO_MS for latency in self.answered_ms)


class Memory(threading.Thread):
    """Looks at the memory of some processes once a second."""

    def __init__(self, session: Asked) -> None:
        super().__init__(daemon=True)
        self.seen: list[tuple[float, int]] = []
        self._session = session
        self._over = threading.Event()
        self.start()

    def run(self) -> None:
        while not self._over.wait(1.0):
            pids = [os.getpid(), *self._session.pids().values()]
            self.seen.append((time.monotonic(), memory_bytes(pids)))

    def stop(self) -> list[tuple[float, int]]:
        self._over.set()
        self.join()
        return self.seen


def pipeline() -> Builder:
    built = Builder("overload", limits={"deadline_ms": SLO_MS, "arena_bytes": 1 << 20})
    wire: Any = built.input("value", "text")
    for index, (fixed_ms, item_ms) in enumerate(STAGES):
        batch = {"items_max": ITEMS_MAX, "wait": "auto"}
        wire = built.step(
            f"stage{index}", "echo", value=wire, delay_ms=fixed_ms, delay_item_ms=item_ms, batch=batch
        ).value
    built.output("value", wire)
    return built


def drive(session: Asked, arrivals_ms: Iterator[float] | None, seconds: float = 0.0) -> Tally:
    """Send requests at these times, or with CALLERS callers for so long; return what became of them."""
    tally = Tally()

    async def call(until_ms: float) -> None:
        while (now_ms := CLOCK.now_ms()) < until_ms:
            await tally.send(session, now_ms, None)

    async def closed() -> None:
        until_ms = CLOCK.now_ms() + seconds * 1000
        await asyncio.gather(*(call(until_ms) for _ in range(CALLERS)))

    async def opened(arrivals_ms: Iterator[float]) -> None:
        start_ms, tasks = CLOCK.now_ms(), set[asyncio.Task[None]]()
        for offset_ms in arrivals_ms:
            at_ms = start_ms + offset_ms
            if (wait_ms := at_ms - CLOCK.now_ms()) > 0:
                await asyncio.sleep(wait_ms / 1000)
            task = asyncio.create_task(tally.send(session, at_ms, SLO_MS))
            tasks.add(task)
            task.add_done_callback(tasks.discard)
        await asyncio.gather(*tasks)

    asyncio.run(closed() if arrivals_ms is None else opened(arrivals_ms))
    return tally


def slope_mb_per_min(seen: list[tuple[float, int]]) -> float:
    """Return the slope of the least-squares line through the last five sixths."""
    kept = seen[len(seen) // 6 :]
    if len(kept) < 3:
        return float("nan")
    return statistics.linear_regression([at for at, _ in kept], [size / 1e6 for _, size in kept]).slope * 60


def recovered_after_s(after: Tally, since_ms: float, usual_ms: float) -> float:
    """Return how long after `since_ms` the first window began in which all were answered in a usual time."""
    windows: dict[int, bool] = {}
    for at_ms, latency_ms in zip(after.answered_at_ms, after.answered_ms, strict=True):
        window = int((at_ms - since_ms) / 1000 / WINDOW_S)
        windows[window] = windows.get(window, True) and latency_ms <= usual_ms
    for at_ms in after.lost_at_ms:
        windows[int((at_ms - since_ms) / 1000 / WINDOW_S)] = False
    return next((window * WINDOW_S for window in sorted(windows) if windows[window]), float("inf"))


def overload(session: Asked, times: float, peak_per_s: float, usual_ms: float, seconds: float) -> list[str]:
    """Overload a session and let it recover, print what was seen, and return the bars that were missed."""
    watching = Memory(session)
    tally = drive(session, Open(peak_per_s * times, seed=int(times)).arrivals(seconds))
    after = drive(session, Open(peak_per_s * CALM, seed=99).arrivals(max(6.0, seconds / 6)))
    memory = watching.stop()
    end_ms = max(tally.sent_ms)
    share = tally.good / seconds / peak_per_s
    refusal_ms = quantile(tally.refused_ms, 0.99)
    recovery_s = recovered_after_s(after, end_ms, USUAL * usual_ms)
    during = [(at, size) for at, size in memory if at * 1000 <= end_ms]
    print(
        f"{times:g}x for {seconds:g} s: {len(tally.sent_ms)} sent, goodput {tally.good / seconds:.0f}/s,"
        f" {100 * share:.1f} % of peak; refused {100 * len(tally.refused_ms) / len(tally.sent_ms):.0f} %, let in"
        f" and cut off {100 * len(tally.cut_ms) / len(tally.sent_ms):.1f} %"
    )
    print(
        f"    refusals p50 {quantile(tally.refused_ms, 0.5):.2f} ms, p99 {refusal_ms:.2f} ms, most"
        f" {max(tally.refused_ms, default=0):.1f} ms; answered p50 {quantile(tally.answered_ms, 0.5):.0f} ms, p99"
        f" {quantile(tally.answered_ms, 0.99):.0f} ms (SLO {SLO_MS:g} ms); cut off after at most"
        f" {max(tally.cut_ms, default=0):.0f} ms; the load was late by p99 {quantile(tally.late_ms, 0.99):.1f} ms"
    )
    print(
        f"    memory {during[0][1] / 1e6:.0f} -> {during[-1][1] / 1e6:.0f} MB, slope after warm-up"
        f" {slope_mb_per_min(during):+.2f} MB/min, of which the load's own notes {tally.notes_mb / seconds * 60:.2f};"
        f" recovered after {recovery_s:.2f} s",
        flush=True,
    )
    missed = []
    if share < GOODPUT_BAR:
        missed.append(f"{times:g}x goodput {100 * share:.0f} %")
    if refusal_ms >= REFUSAL_BAR_MS:
        missed.append(f"{times:g}x refusals p99 {refusal_ms:.1f} ms")
    if recovery_s >= RECOVERY_BAR_S:
        missed.append(f"{times:g}x recovery {recovery_s:.1f} s")
    return missed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60.0, help="length of each overload")
    parser.add_argument("--loads", type=float, nargs="+", default=[2.0, 5.0], help="multiples of the peak")
    parser.add_argument("--quick", action="store_true", help="10 s each")
    parser.add_argument("--grpc", action="store_true", help="through the gRPC server of `weftline serve`")
    parser.add_argument("--transport", default="", help="grpc.transport of the server; its default when left out")
    options = parser.parse_args()
    if options.transport and not options.grpc:
        parser.error("--transport: only with --grpc")
    seconds = 10.0 if options.quick else options.seconds
    print(conditions())
    asked: AbstractContextManager[Session | OverloadServer] = (
        overload_server(pipeline(), options.transport) if options.grpc else load(pipeline()).open()
    )
    with asked as session:
        drive(session, None, 2.0)
        closed = drive(session, None, max(5.0, seconds / 6))
        peak_per_s = closed.good / ((closed.ended_last_ms - min(closed.sent_ms)) / 1000)
        calm = drive(session, Open(peak_per_s * CALM, seed=98).arrivals(max(5.0, seconds / 6)))
        usual_ms = quantile(calm.answered_ms, 0.99)
        print(
            f"peak {peak_per_s:.0f}/s with {CALLERS} callers, p99 {quantile(closed.answered_ms, 0.99):.0f} ms; at"
            f" {CALM:g} of it p99 {usual_ms:.0f} ms"
        )
        missed = [bar for times in options.loads for bar in overload(session, times, peak_per_s, usual_ms, seconds)]
    print(
        f"bars: goodput {100 * GOODPUT_BAR:.0f} % of peak, refusals p99 < {REFUSAL_BAR_MS:g} ms, recovery <"
        f" {RECOVERY_BAR_S:g} s: {'missed: ' + '; '.join(missed) if missed else 'met'}"
    )
    print(peak_memory())
    return 0


if __name__ == "__main__":
    sys.exit(main())
