"""Measure a running request of a local model, and make its Record for observers when it ends."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from typing import Any

from weftline.engine.result import BorrowedResult, StreamedOutput
from weftline.engine.scheduler.request import StepTiming
from weftline.engine.serving.backend import Ask, Record
from weftline.errors import WeftlineError, traceback_of

Begin = Callable[[Ask], str]
"""Returns the trace context of a request's own span, before it runs; '' when it is not traced."""


class RequestRecord:
    """Measurements of one running request, for its Record."""

    __slots__ = ("_ask", "_first_ms", "_pieces", "_started", "_started_ns", "_timings", "_usage", "traceparent")

    def __init__(self, ask: Ask, begin: Begin | None) -> None:
        self._ask = ask
        self._started = time.perf_counter()
        self._started_ns = time.time_ns()
        self._first_ms: float | None = None
        self._pieces = 0
        self._usage: Mapping[str, Any] = {}
        self._timings: tuple[StepTiming, ...] = ()
        self.traceparent = begin(ask) if begin is not None else ""

    def add_chunk(self, piece: StreamedOutput) -> None:
        if not piece.last:
            if not self._pieces:
                self._first_ms = self._elapsed_ms()
            self._pieces += 1
        elif piece.output == "usage" and isinstance(piece.value, dict):
            self._usage = piece.value

    def set_timings(self, timings: tuple[StepTiming, ...]) -> None:
        self._timings = timings

    def answered(self, borrowed: BorrowedResult) -> Record:
        usage = borrowed.outputs.get("usage")
        self._usage = usage if isinstance(usage, dict) else {}
        return self._record("OK", borrowed.version, borrowed.timings, borrowed.total_ms)

    def ended(self, version: int) -> Record:
        return self._record("OK", version, self._timings)

    def failed(self, error: BaseException, version: int) -> Record:
        gone = isinstance(error, asyncio.CancelledError | GeneratorExit)
        status = error.status if isinstance(error, WeftlineError) else "CANCELLED" if gone else "INTERNAL"
        timings = error.timings if isinstance(error, WeftlineError) else ()
        message = f"{error}" if isinstance(error, WeftlineError) else "" if gone else type(error).__name__
        return self._record(status, version, timings, error=message, traceback=traceback_of(error))

    def _record(
        self,
        status: str,
        version: int,
        timings: tuple[StepTiming, ...] = (),
        total_ms: float | None = None,
        error: str = "",
        traceback: str = "",
    ) -> Record:
        elapsed_ms = self._elapsed_ms() if total_ms is None else total_ms
        began_ms = [one.started_ms - one.queued_ms for one in timings]
        return Record(
            self._ask.model,
            version,
            status,
            self._started_ns,
            elapsed_ms,
            self._ask,
            timings,
            min(began_ms, default=0.0),
            self._first_ms,
            self._pieces,
            self._usage,
            error,
            self.traceparent,
            traceback,
        )

    def _elapsed_ms(self) -> float:
        return (time.perf_counter() - self._started) * 1000
