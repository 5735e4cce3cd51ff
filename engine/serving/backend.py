"""`Backend` protocol: named models to infer, describe, load and measure.

The gRPC and HTTP servers depend on this protocol and not on sessions. The same server code runs in the engine's process
(`local.py`) or in an ingress process connected to it by a socket and shared memory (`frontend/`).

    answer = await backend.ask(Ask("ocr", {"photo": png_bytes}, deadline_ms=500))
    with answer:
        send(answer.outputs["text"])            # arrays may be views of shared memory until `release`

Errors are WeftlineErrors. Cancelling the task that awaits `ask`, or closing a stream, cancels the request.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from types import TracebackType
from typing import Any, Protocol

import msgspec

from weftline.engine.protocol.packed import Packed
from weftline.engine.result import StreamedOutput
from weftline.engine.scheduler.request import StepTiming
from weftline.engine.serving.model_info import ModelInfo, ModelState
from weftline.nodes.urgency import SequencePart


class Ask(msgspec.Struct, frozen=True, array_like=True):
    """One parsed request.

    model:       name of a model; looked up, never part of a path.
    inputs:      values by port name, as for `Session.run`, except that paths are refused. Arrays may be views of the
                 received message; a PendingTensor is read into its final place.
    outputs:     names of the selected outputs; None: all.
    deadline_ms: time left; None: the model's default.
    version:     requested version; '' for the serving one. Any other is UnknownModel.
    id:          the client's request id, for logs and traces; '' without one.
    caller:      name in the token file; '' without tokens. Never the token.
    protocol:        server it arrived at: 'grpc', 'grpc-stream' or 'http'; a metric label.
    traceparent: W3C trace context of the request; '' without one.
    size_bytes:  size of its message, for metrics; 0: unknown.
    job:         True for a row of a job, which yields to interactive requests.
    seed:        base of its random draws; None: a new one.
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
    protocol: str = ""
    traceparent: str = ""
    size_bytes: int = 0
    job: bool = False
    seed: int | None = None


class Answer(msgspec.Struct):
    """The outputs of one request, lent: arrays may be views of shared memory and are to be copied before `release`.

    Large outputs may still be in another process until `load`, so that a server reserves memory for them first.

    outputs:     by name; an absent one is None. Detections, text (str), json values, bytes, lists and numpy arrays.
    version:     the version that answered.
    traceparent: W3C trace context of the request's own span; '' when nothing is traced.
    fetch:       sets the fields above and `give_back`; None: they are set.
    known_bytes: size of the outputs, from a backend that has it; 0: unknown.
    """

    outputs: Mapping[str, Any]
    timings: tuple[StepTiming, ...] = ()
    total_ms: float = 0.0
    version: int = 0
    traceparent: str = ""
    give_back: Callable[[], None] | None = None
    fetch: Callable[[Answer], Awaitable[None]] | None = None
    known_bytes: int = 0

    @property
    def size_bytes(self) -> int:
        """Size of the outputs in bytes: exact for arrays, text and bytes, estimated for json values."""
        return self.known_bytes or sum(map(value_bytes, self.outputs.values()))

    async def load(self) -> None:
        """Copy the outputs to this process if they are in another one."""
        fetch, self.fetch = self.fetch, None
        if fetch is not None:
            await fetch(self)

    def release(self) -> None:
        """Give the memory back. Safe to call twice."""
        give_back, self.give_back = self.give_back, None
        if give_back is not None:
            give_back()

    def __enter__(self) -> Answer:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.release()


_FLAT = (str, bytes, bytearray)

SAMPLED = 64
"""Elements of a list or mapping whose sizes are added up; the others are assumed to be like them."""


def value_bytes(value: Any) -> int:
    """Return the size of an output in bytes: exact for arrays, text and bytes, estimated for json values."""
    if isinstance(value, Packed):
        return value.size_bytes
    size = getattr(value, "nbytes", None)
    if size is not None:
        return int(size)
    if isinstance(value, _FLAT):
        return len(value)
    if isinstance(value, Mapping):
        return value_bytes(list(value)) + value_bytes(list(value.values()))
    if isinstance(value, Sequence) and value:
        some = value[:SAMPLED]
        return sum(map(value_bytes, some)) * len(value) // len(some)
    return 16


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


Done = Callable[["Answer | BaseException"], None]
"""Receives the answer of a request, to be released, or its error."""


class Backend(Protocol):
    """Models by name. Used from one event loop."""

    def index(self) -> tuple[ModelState, ...]:
        """Return every model with its state, sorted by name; cheap enough to be polled."""

    def info(self, model: str, version: str = "") -> ModelInfo:
        """Return a model's metadata.

        UnknownModel if there is none of that name and version, SessionClosed if it is not ready.
        """

    async def ask(self, ask: Ask) -> Answer:
        """Answer one request."""

    def try_submit(self, ask: Ask, done: Done) -> Callable[[], None] | None:
        """Start one request from the event loop, without a task; return a function that cancels it.

        That function has no effect once the request has ended. None, and nothing is started, if the request has to wait
        before it can be sent: use `ask`. Errors found at once are raised.

        done: called once in the event loop, after this has returned; never after the request was cancelled.
        """

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
