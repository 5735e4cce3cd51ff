"""What a request gives back: its outputs and how long each step took, whole or piece by piece."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from weftline.engine import events as ev
from weftline.engine.request import StepTiming
from weftline.errors import BY_NAME, LimitReached, SessionClosed, StepError, WeftlineError


class Result(Mapping[str, Any]):
    """The outputs of one request by name, and how long each step took.

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


@dataclass(frozen=True, slots=True)
class StreamedOutput:
    """Part of a request's answer as it becomes known.

    last False: `value` is what is new on a streamed output (text to append).
    last True:  `value` is the whole value of the output.
    """

    output: str
    value: Any
    last: bool


class OutputStream(Iterator[StreamedOutput]):
    """Iterates over a request's pieces. Leaving it early, closing it or dropping it cancels the request.

    get:     waits for the next piece, or for the command that ends the request.
    abandon: tells the engine that nobody waits any more; called once.
    """

    def __init__(self, get: Callable[[], StreamedOutput | ev.Command], abandon: Callable[[], None]) -> None:
        self._get = get
        self._abandon: Callable[[], None] | None = abandon

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
        abandon, self._abandon = self._abandon, None
        if abandon is not None:
            abandon()

    def __enter__(self) -> OutputStream:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()


def error_of(end: ev.Command) -> WeftlineError:
    """Return the exception for a request that ended without an answer."""
    if isinstance(end, ev.Refuse):
        return LimitReached(end.message, end.retry_after_s)
    if not isinstance(end, ev.Fail) or end.error == "SessionClosed":
        return SessionClosed("the session was closed before the request was finished")
    if end.error == "StepError":
        return StepError(end.message, end.step)
    return BY_NAME[end.error](f"step {end.step}: {end.message}" if end.step else end.message)
