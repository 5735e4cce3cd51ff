"""Load test of a session or any other callable, open or closed loop.

    with weftline.load("pipeline.yaml").open() as session:
        report = bench(session, lambda number: {"text": f"question {number}"}, Open(rate_per_s=200))
        print(report.per_s, report.latency.p99)

Latency counts from the scheduled send time, and the delay of the actual send is recorded: a load generator that cannot
keep up is visible in the report.
"""

from __future__ import annotations

import asyncio
import inspect
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from weftline.engine.bench.arrivals import Closed, Open
from weftline.engine.bench.load_generator import REQUESTS_MAX, Ask, Inputs, LoadGenerator, Progress
from weftline.engine.bench.outcome import RequestOutcome
from weftline.engine.bench.report import Report, report
from weftline.engine.request import RequestOptions
from weftline.engine.session import Session
from weftline.errors import BY_NAME, InputError

__all__ = ["Closed", "Open", "Report", "RequestOutcome", "bench", "run_closed", "run_open"]

CALLERS_MAX = 1024
"""Most callers of a closed load, and most threads for a target that is a plain function."""


def bench(
    session: Session,
    make_inputs: Inputs,
    load: Closed | Open = Closed(),  # noqa: B008  frozen
    *,
    duration_s: float = 10.0,
    warm_up_s: float = 1.0,
    requests_max: int = REQUESTS_MAX,
    deadline_ms: float | None = None,
    priority: int = 0,
    outputs: Sequence[str] | None = None,
    progress: Progress | None = None,
) -> Report:
    """Run a load on a session and return the report; InputError for inputs that the pipeline refuses.

    warm_up_s:    time before the first request that counts.
    requests_max: most measured requests, at most REQUESTS_MAX.
    deadline_ms:  of every request; the pipeline's own when left out.
    Ctrl-C ends the load: the report has the requests so far, and `stopped` is set. Must not be called in an event loop.
    """
    if isinstance(load, Closed) and not 1 <= load.callers <= CALLERS_MAX:
        raise InputError(f"{load.callers} callers; a closed load has 1 to {CALLERS_MAX}")
    if isinstance(load, Open) and not load.rate_per_s > 0:
        raise InputError(f"a rate of {load.rate_per_s:g} requests/s; an open load has more than 0")
    ask = _asking(session, priority, outputs)
    asyncio.run(_probe(ask, make_inputs))
    most = min(requests_max, REQUESTS_MAX)
    budget_ms = session.plan.limits.deadline_ms if deadline_ms is None else deadline_ms
    run = LoadGenerator(ask, make_inputs, deadline_ms, progress)
    length_ms, warm_up_ms = (warm_up_s + duration_s) * 1000, warm_up_s * 1000
    if isinstance(load, Closed):
        driving = run.closed(load.callers, length_ms, warm_up_ms, most)
    else:
        driving = run.open(_at_most(load.arrivals(length_ms / 1000), warm_up_ms, most), length_ms)
    stopped = asyncio.run(driving)
    since_ms = run.start_ms + warm_up_ms
    if not stopped and sum(one.sent_ms >= since_ms for one in run.outcomes) >= most:
        stopped = f"after {most} requests"
    until_ms = -math.inf if stopped else run.start_ms + length_ms
    return report(
        run.outcomes,
        session.plan,
        str(load),
        since_ms=since_ms,
        until_ms=until_ms,
        deadline_ms=budget_ms,
        stopped=stopped,
    )


def run_open(
    target: Session | Callable[[Mapping[str, Any]], Any],
    arrivals_ms: Iterable[float],
    make_inputs: Inputs,
    deadline_ms: float | None = None,
) -> list[RequestOutcome]:
    """Send a request at each of these times, in milliseconds from the start and rising; return the outcome of each.

    target: a session, or a function of the inputs. A coroutine function runs in the load's event loop, a plain one in a
            thread. What it returns or raises may bring `timings`.
    """
    with _Target(target) as ask:
        run = LoadGenerator(ask, make_inputs, deadline_ms)
        asyncio.run(run.open(iter(arrivals_ms)))
        return run.outcomes


def run_closed(
    target: Session | Callable[[Mapping[str, Any]], Any],
    callers: int,
    make_inputs: Inputs,
    *,
    duration_s: float,
    deadline_ms: float | None = None,
) -> list[RequestOutcome]:
    """Run a closed load: N concurrent callers for a given time; return the outcome of each request."""
    with _Target(target) as ask:
        run = LoadGenerator(ask, make_inputs, deadline_ms)
        asyncio.run(run.closed(callers, duration_s * 1000))
        return run.outcomes


async def _probe(ask: Ask, make_inputs: Inputs) -> None:
    """Send one request and raise InputError if its inputs are refused; the load records other failures."""
    try:
        await ask(make_inputs(0), None)
    except InputError:
        raise
    except tuple(BY_NAME.values()):
        pass


def _at_most(arrivals_ms: Iterable[float], warm_up_ms: float, most: int) -> Iterator[float]:
    """Yield arrivals, but of those after the warm-up no more than `most`."""
    left = most
    for at_ms in arrivals_ms:
        if at_ms >= warm_up_ms:
            left -= 1
        if left < 0:
            return
        yield at_ms


def _asking(session: Session, priority: int = 0, outputs: Sequence[str] | None = None) -> Ask:
    async def ask(inputs: Mapping[str, Any], deadline_ms: float | None) -> Any:
        return await session.arun(RequestOptions(outputs=outputs, deadline_ms=deadline_ms, priority=priority), **inputs)

    return ask


class _Target:
    """Makes an Ask of a session or a function; threads for a plain one end with it."""

    def __init__(self, target: Session | Callable[[Mapping[str, Any]], Any]) -> None:
        self._target = target
        self._threads: ThreadPoolExecutor | None = None

    def __enter__(self) -> Ask:
        target = self._target
        if isinstance(target, Session):
            return _asking(target)
        if inspect.iscoroutinefunction(target):
            return lambda inputs, deadline_ms: target(inputs)
        threads = self._threads = ThreadPoolExecutor(CALLERS_MAX, "load")
        return lambda inputs, deadline_ms: asyncio.get_running_loop().run_in_executor(threads, target, inputs)

    def __exit__(self, *error: object) -> None:
        if self._threads is not None:
            self._threads.shutdown(wait=True, cancel_futures=True)
