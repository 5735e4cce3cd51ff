"""Load generator: event loop that sends requests on schedule and records outcomes.

Requests run on an event loop in the caller's thread: from eight callers on that costs the process less than a thread
for each. Arrivals of an open load are timed by a thread of their own, because an event loop sleeps in whole
milliseconds. Outcomes are only collected during the load, and frozen for the garbage collector.
"""

from __future__ import annotations

import asyncio
import gc
import itertools
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

from weftline.engine.bench.outcome import RequestOutcome
from weftline.engine.runtime.clock import Clock, MonotonicClock
from weftline.errors import LimitReached, RequestCancelled, traceback_of

REQUESTS_MAX = 200_000
"""Most requests of one load: their timings are kept, some 1 KB each."""

OPEN_MAX = 4096
"""Most unanswered requests of an open load; further arrivals fail without being sent."""

START_MS = 20.0
"""From the start of an open load to its time 0, so that its first arrival is not late."""

DRAIN_S, DRAIN_INTERRUPTED_S = 60.0, 2.0
"""Longest wait for requests that are open when the load has ended, or was interrupted; then they are cancelled."""

REFUSED_WAIT_S = 0.001
"""Shortest pause of a caller after a refused request."""

TICK_S = 0.25
"""Interval of progress reports."""

Inputs = Callable[[int], Mapping[str, Any]]
"""Returns the inputs of a request by its number, from 0; runs in the event loop, so it must be quick."""

Progress = Callable[[float, int], None]
"""Callback with the share of the load that is done, 0 to 1, and the number of ended requests."""

Ask = Callable[[Mapping[str, Any], float | None], Awaitable[Any]]
"""Answers one request: its inputs, and its deadline in milliseconds."""


class LoadGenerator:
    """One load, run once by `closed` or `open`, which return the reason of an early end, or ''."""

    def __init__(
        self, ask: Ask, make_inputs: Inputs, deadline_ms: float | None, progress: Progress | None = None
    ) -> None:
        self.outcomes: list[RequestOutcome] = []
        self.start_ms = 0.0
        self._failed: set[str] = set()  # classes of errors so far: the first of each keeps its traceback
        self._ask = ask
        self._make_inputs = make_inputs
        self._deadline_ms = deadline_ms
        self._progress = progress
        self._clock: Clock = MonotonicClock()
        self._numbers = itertools.count()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._stop = threading.Event()

    async def closed(
        self, callers: int, length_ms: float, warm_up_ms: float = 0.0, requests_max: int = REQUESTS_MAX
    ) -> str:
        left = itertools.count(requests_max, -1)

        async def call() -> None:
            while not self._stop.is_set() and (now_ms := self._clock.now_ms()) < self.start_ms + length_ms:
                if now_ms >= self.start_ms + warm_up_ms and next(left) <= 0:
                    return
                refusal = await self._one(now_ms)
                if refusal is not None:
                    await asyncio.sleep(max(refusal.retry_after_s, REFUSED_WAIT_S))

        async with self._started(length_ms):
            for _ in range(callers):
                self._begin(call())
            return await self._ended(length_ms)

    async def open(self, arrivals_ms: Iterator[float], length_ms: float = 0.0) -> str:
        loop, sent = asyncio.get_running_loop(), asyncio.Event()

        def send(due: list[float]) -> None:
            for at_ms in due:
                if len(self._tasks) < OPEN_MAX:
                    self._begin(self._one(at_ms))
                else:
                    why = f"{OPEN_MAX} requests of the load are open; the load holds no more"
                    self._end(at_ms, self._clock.now_ms(), LimitReached(why))

        def pace() -> None:
            try:
                for due in self._due(arrivals_ms):
                    loop.call_soon_threadsafe(send, due)
                loop.call_soon_threadsafe(sent.set)
            except RuntimeError:  # the loop was closed: the load was interrupted
                pass

        async with self._started(length_ms, START_MS):
            threading.Thread(target=pace, name="arrivals", daemon=True).start()
            return await self._ended(sent=sent)

    def _due(self, arrivals_ms: Iterator[float]) -> Iterator[list[float]]:
        """Yield arrivals when their time has come, all that are due together; sleeps in between."""
        due: list[float] = []
        for offset_ms in arrivals_ms:
            at_ms = self.start_ms + offset_ms
            if at_ms > self._clock.now_ms():
                if due:
                    yield due
                    due = []
                if self._stop.wait(max(at_ms - self._clock.now_ms(), 0.0) / 1000):
                    return
            due.append(at_ms)
        if due:
            yield due

    def _begin(self, work: Coroutine[Any, Any, Any]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _one(self, sent_ms: float) -> LimitReached | None:
        """Send one request and note what became of it; return its refusal, if it was one."""
        inputs = self._make_inputs(next(self._numbers))
        now_ms = self._clock.now_ms()
        late_ms = now_ms - sent_ms
        left_ms = None if self._deadline_ms is None else max(self._deadline_ms - late_ms, 0.0)
        try:
            result = await self._ask(inputs, left_ms)
        except asyncio.CancelledError:
            self._end(sent_ms, now_ms, RequestCancelled("it was open when the load ended, and was withdrawn"))
            raise
        except Exception as error:
            self._end(sent_ms, now_ms, error)
            return error if isinstance(error, LimitReached) else None
        timings = tuple(getattr(result, "timings", ()))
        self.outcomes.append(RequestOutcome(sent_ms, self._clock.now_ms(), timings=timings, late_ms=late_ms))
        return None

    def _end(self, sent_ms: float, begun_ms: float, error: Exception) -> None:
        timings = tuple(getattr(error, "timings", ()))
        kind, late_ms = type(error).__name__, begun_ms - sent_ms
        traceback = "" if kind in self._failed else traceback_of(error)
        self._failed.add(kind)
        now_ms = self._clock.now_ms()
        self.outcomes.append(RequestOutcome(sent_ms, now_ms, False, kind, timings, late_ms, str(error), traceback))

    async def _ended(self, length_ms: float = 0.0, sent: asyncio.Event | None = None) -> str:
        """Wait until everything is sent and answered; what is not answered soon after the last sending is withdrawn."""
        why, drain_s = "", DRAIN_S
        try:
            if sent is not None:
                await sent.wait()
            else:
                await asyncio.wait(self._tasks.copy(), timeout=length_ms / 1000)
        except asyncio.CancelledError:
            why, drain_s = "interrupted", DRAIN_INTERRUPTED_S
        self._stop.set()
        if self._tasks:
            await asyncio.wait(self._tasks.copy(), timeout=drain_s)
        left = self._tasks.copy()
        for task in left:
            task.cancel()
        if left:
            await asyncio.wait(left)
            why = why or f"{len(left)} requests had not ended {drain_s:g} s after the last was sent"
        return why

    @asynccontextmanager
    async def _started(self, length_ms: float, ahead_ms: float = 0.0) -> AsyncIterator[None]:
        """Set the load's time 0, report progress, and keep measurements out of garbage collection.

        The garbage collector's full passes grow with the number of kept timings and would become part of the figures.
        """

        async def tell() -> None:
            while True:
                await asyncio.sleep(TICK_S)
                gc.freeze()
                if self._progress is not None and length_ms:
                    share = (self._clock.now_ms() - self.start_ms) / length_ms
                    self._progress(min(max(share, 0.0), 1.0), len(self.outcomes))

        gc.collect()
        self.start_ms = self._clock.now_ms() + ahead_ms
        telling = asyncio.get_running_loop().create_task(tell())
        try:
            yield
        finally:
            telling.cancel()
            gc.unfreeze()
