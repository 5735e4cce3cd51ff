"""`Backend` protocol: named models to infer, describe, load and measure.

Doors (gRPC, HTTP) know this protocol and nothing of sessions, so the same door code runs beside the engine (`local.py`)
or in a process of its own that reaches the engine through a socket and shared memory (`link/`).

    answer = await backend.ask(Ask("ocr", {"photo": png_bytes}, deadline_ms=500))
    with answer:
        send(answer.outputs["text"])            # arrays may be views of shared memory until `release`

Errors are WeftlineErrors; cancelling the task that awaits `ask`, or closing a stream, withdraws the request.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from types import TracebackType
from typing import Any, Protocol

import msgspec

from weftline.engine.result import StreamedOutput
from weftline.engine.scheduler.request import StepTiming
from weftline.engine.serving.face import ModelFace, ModelState
from weftline.nodes.urgency import SequencePart


class Ask(msgspec.Struct, frozen=True, array_like=True):
    """One request as a door understood it.

    model:       name of a model; looked up, never part of a path.
    inputs:      values by port name, as `Session.run` takes them, but for files: a path is refused. Arrays may be views
                 of the received message; a PendingTensor is read where it will lie.
    outputs:     which are wanted; None: all.
    deadline_ms: time left; None: the model's own.
    version:     which version it is for; '' for the one that serves. Another one is InputError.
    id:          the caller's name for it, for logs and traces; '' when it gave none.
    caller:      who asks, by the name in the token file; '' without tokens. Never the token.
    door:        'grpc', 'grpc-stream', 'http'; for figures.
    traceparent: W3C trace context that came with it; '' without.
    size_bytes:  of the message it came in, for figures; 0: unknown.
    job:         it is a row of a job, which waits wherever usual requests do.
    seed:        what chance in it is drawn from; None draws anew.
    """

    model: str
    inputs: Mapping[str, Any]
    outputs: Sequence[str] | None = None
    deadline_ms: float | None = None
    priority: int = 0
    sequence: SequencePart | None = None
    version: str = ""
    id: str = ""
    caller: str = ""
    door: str = ""
    traceparent: str = ""
    size_bytes: int = 0
    job: bool = False
    seed: int | None = None


class Answer(msgspec.Struct):
    """The outputs of one request, lent: arrays may be views of shared memory and are to be copied before `release`.

    outputs:     by name; an absent one is None. Detections, text (str), json values, bytes, lists and numpy arrays.
    version:     the version that answered.
    traceparent: W3C trace context of the request's own span; '' when nothing is traced.
    """

    outputs: Mapping[str, Any]
    timings: tuple[StepTiming, ...] = ()
    total_ms: float = 0.0
    version: int = 0
    traceparent: str = ""
    give_back: Callable[[], None] | None = None

    def release(self) -> None:
        """Give the memory back. Safe to call twice."""
        give_back, self.give_back = self.give_back, None
        if give_back is not None:
            give_back()

    def __enter__(self) -> Answer:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.release()


class Record(msgspec.Struct, frozen=True):
    """One request that has ended, for observers. Never holds a value of it.

    status:        the gRPC status name: 'OK', 'INVALID_ARGUMENT', ...
    started_ns:    wall-clock time of its arrival, in ns since the epoch.
    first_ms:      to the first piece of a streamed answer; None without pieces.
    total_ms:      until its outputs were there.
    started_ms, clock: `timings` are on the runtime's clock, which read `started_ms` when the request arrived.
    usage:         of an llm step's `usage` output, when the pipeline gives it: prompt_tokens, completion_tokens, ...
    traceback:     of the exception that a step's code raised; for the server's log alone.
    """

    model: str
    version: int
    status: str
    started_ns: int
    total_ms: float
    ask: Ask
    timings: tuple[StepTiming, ...] = ()
    started_ms: float = 0.0
    first_ms: float | None = None
    pieces: int = 0
    usage: Mapping[str, Any] = msgspec.field(default_factory=dict)
    error: str = ""
    traceparent: str = ""
    traceback: str = ""


Observer = Callable[[Record], None]
"""Called once for every request that ends, in the engine's process; must be quick, and an exception of it is logged."""


class Backend(Protocol):
    """Models by name. Used from one event loop."""

    def index(self) -> tuple[ModelState, ...]:
        """Return every model with its state, sorted by name; cheap enough to be polled."""

    def face(self, model: str, version: str = "") -> ModelFace:
        """Return a model's face: UnknownModel when there is none of that name and version, SessionClosed when it cannot
        be asked now."""

    async def ask(self, ask: Ask) -> Answer:
        """Answer one request."""

    def stream(self, ask: Ask) -> AsyncGenerator[StreamedOutput, None]:
        """Answer one request piece by piece, as `Session.astream` does; `aclose` withdraws it."""

    async def load(self, model: str) -> int:
        """Load a pipeline that the operator configured, or load it again, and return its version."""

    async def unload(self, model: str) -> None:
        """Let a pipeline's open requests finish and end it; it can be loaded again."""

    def stats(self, model: str) -> Mapping[str, Any]:
        """Return `Session.stats()` of a model; {} when nothing serves."""

    async def metrics(self) -> bytes:
        """Return all figures in Prometheus' text format."""
