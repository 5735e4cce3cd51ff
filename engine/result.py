"""What a request gives back: its outputs and how long each step took, whole or piece by piece."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any

import numpy as np

from weftline.engine.messages import Value
from weftline.engine.reading import Heard, StreamedOutput
from weftline.engine.scheduling import events as ev
from weftline.engine.scheduling.request import StepTiming
from weftline.errors import BY_NAME, SessionClosed, StepError, WeftlineError


class Result(Mapping[str, Any]):
    """The outputs of one request by name, and how long each step took.

    An optional output whose step was skipped is None.

    timings:  one StepTiming for each step that ran, in the order they finished.
    total_ms: from the call to having every output.
    """

    def __init__(self, outputs: Mapping[str, Any], timings: Sequence[StepTiming], total_ms: float) -> None:
        self._outputs = dict(outputs)
        self.timings = tuple(timings)
        self.total_ms = total_ms

    def __getitem__(self, name: str) -> Any:
        return self._outputs[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._outputs)

    def __len__(self) -> int:
        return len(self._outputs)

    def __repr__(self) -> str:
        return f"Result({self._outputs!r}, total_ms={self.total_ms:.1f})"


class OutputStream(Iterator[StreamedOutput]):
    """Iterates over a request's pieces. Leaving it early, closing it or dropping it cancels the request.

    get:     waits for the next piece, or for the command that ends the request.
    abandon: tells the engine that nobody reads any more, called once: with True where no lock may be waited for.
    """

    def __init__(self, get: Callable[[], Heard], abandon: Callable[[bool], None]) -> None:
        self._get = get
        self._abandon: Callable[[bool], None] | None = abandon

    def __next__(self) -> StreamedOutput:
        if self._abandon is None:
            raise StopIteration
        try:
            piece = self._get()
        except BaseException:
            self.close()
            raise
        if isinstance(piece, StreamedOutput):
            return piece
        self.close()
        if isinstance(piece, ev.Finish):
            raise StopIteration
        raise error_of(piece)

    def close(self) -> None:
        """Cancel the request if it is not finished. Safe to call twice."""
        self._leave(False)

    def _leave(self, dropped: bool) -> None:
        abandon, self._abandon = self._abandon, None
        if abandon is not None:
            abandon(dropped)

    def __enter__(self) -> OutputStream:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def __del__(self) -> None:
        self._leave(True)  # wherever the garbage collector runs, which may be inside one of the engine's locks


def placed_bytes(value: Value) -> int:
    """How many bytes of a value, or of its elements, lie in shared memory."""
    if value.items is not None:
        return sum(placed_bytes(one) for one in value.items)
    return value.place.size_bytes if value.place is not None else 0


def owned(value: Any) -> Any:
    """Return an output as the caller's own: views of shared memory are copied, in lists too."""
    if isinstance(value, np.ndarray):
        return value.copy()
    if isinstance(value, list):
        return [owned(one) for one in value]
    return value


def error_of(end: ev.Command) -> WeftlineError:
    """Return the exception for a request that ended without an answer; `timings` has the steps that ran."""
    if isinstance(end, ev.Refuse):
        refusal = BY_NAME[end.error](end.message)
        refusal.retry_after_s = end.retry_after_s
        return refusal
    if not isinstance(end, ev.Fail) or end.error == "SessionClosed":
        return SessionClosed(end.message if isinstance(end, ev.Fail) else "the session was closed")
    error = _error_of_fail(end)
    error.timings = end.timings
    return error


def _error_of_fail(end: ev.Fail) -> WeftlineError:
    if end.error == "StepError":
        return StepError(end.message, end.step)
    return BY_NAME[end.error](f"step {end.step}: {end.message}" if end.step else end.message)
