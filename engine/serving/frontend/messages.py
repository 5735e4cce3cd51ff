"""Messages between the engine and an ingress process.

Messages are small frozen structs in MessagePack, each with a four-byte length prefix (`transport.py`). Small values
travel inside a message; large ones lie at a Place in the shared buffer of the sender (arena 0). The receiver releases
the block of a message once it has read the values.

    engine -> ingress    Start, Catalog, SessionStats, ResponseReady, FrontendResponse, ResponseChunk, StreamEnded,
                         RequestFailed, CommandDone, PermitTaken, Ping, Drain
    ingress -> engine    ServersOpened, StartFailed, FrontendRequest, CancelRequest, FetchResponse, WindowCredit,
                         BlockReleased, Command, TakePermit, SpendPermits, Pong, Drained

Each FrontendRequest gets exactly one FrontendResponse, StreamEnded or RequestFailed, also when it is cancelled. A large
FrontendResponse is announced by ResponseReady, and sent after FetchResponse: the ingress process has reserved memory
for it by then. Each Command gets one CommandDone or RequestFailed, and each TakePermit one PermitTaken.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec

from weftline.engine.protocol.messages import Value
from weftline.engine.scheduler.request import StepTiming
from weftline.engine.serving.backend import Ask
from weftline.engine.serving.config import ServeConfig
from weftline.engine.serving.model_info import ModelInfo, ModelState
from weftline.errors import InputError, LimitReached, PipelineError, RequestCancelled, StepError, WeftlineError

ARENA = 0
"""Arena number in places; each direction has one arena."""

NO_BLOCK = -1
"""Block of a message without values in the shared buffer."""

WINDOW_BYTES = 1 << 20
"""Stream window: most bytes sent to an ingress process and not read by it."""

PING_S = 0.5
"""Heartbeat interval."""

LOAD, UNLOAD, METRICS, STATISTICS = "load", "unload", "metrics", "statistics"
"""Actions of a Command."""

GRPC, HTTP = "grpc", "http"
"""Names of the servers that an ingress process can run."""

_log = logging.getLogger("weftline.ingress")


class WireError(msgspec.Struct, frozen=True, array_like=True):
    """An error in a message: the name of its class in weftline.errors, and its text.

    status: '' for the status of the class.
    """

    error: str
    message: str
    status: str = ""
    retry_after_s: float = 0.0
    step: str = ""
    timings: tuple[StepTiming, ...] = ()
    param: str = ""


# engine -> ingress


class Start(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Open the servers of an encoded IngressSpec; the first message."""

    spec: bytes


class Catalog(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """All models with their states, and the metadata of those that serve; sent on every change."""

    index: tuple[ModelState, ...]
    infos: tuple[ModelInfo, ...]


class SessionStats(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """`Backend.stats` of every model that serves; sent on change, at most once a second."""

    models: dict[str, dict[str, Any]]


class InputsRead(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The inputs of a request are copied, and their block is free."""

    id: int


class ResponseReady(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The outputs of a request are there; they are sent after FetchResponse. size_bytes: estimated."""

    id: int
    size_bytes: int


class FrontendResponse(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The outputs of a request.

    block: block of the large outputs, released with BlockReleased; NO_BLOCK: none.
    """

    id: int
    outputs: dict[str, Value]
    block: int = NO_BLOCK
    timings: tuple[StepTiming, ...] = ()
    total_ms: float = 0.0
    version: int = 0
    traceparent: str = ""


class ResponseChunk(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """One StreamedOutput of a streamed request; `block` as in FrontendResponse."""

    id: int
    output: str
    value: Value
    last: bool
    block: int = NO_BLOCK


class StreamEnded(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """End of a stream without an error."""

    id: int


class RequestFailed(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Failure of a FrontendRequest or a Command."""

    id: int
    error: WireError


class CommandDone(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Result of a Command: the version loaded, or the bytes requested."""

    id: int
    version: int = 0
    data: bytes = b""


class PermitTaken(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Response to TakePermit. wait_s: 0.0, or the time until the token's next permit."""

    id: int
    wait_s: float


class Ping(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Heartbeat; the response is Pong."""


class Drain(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Refuse new calls, finish open ones within `grace_s`, close the servers, send Drained, and exit."""

    grace_s: float


# ingress -> engine


class ServersOpened(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """All servers listen; ports by server name."""

    ports: dict[str, int]


class StartFailed(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """A server could not listen; the process exits."""

    error: WireError


class FrontendRequest(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """A request; its `ask` has no inputs, they are in `inputs`.

    stream: respond with ResponseChunk and StreamEnded in place of FrontendResponse.
    """

    id: int
    stream: bool
    ask: Ask
    inputs: dict[str, Value]


class CancelRequest(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Cancel a FrontendRequest; no effect if it has ended."""

    id: int


class FetchResponse(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Send the FrontendResponse that a ResponseReady has announced."""

    id: int


class WindowCredit(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Flow control: `size_bytes` more of a stream have been read."""

    id: int
    size_bytes: int


class BlockReleased(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Release the block of a response."""

    block: int


class Command(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Load or unload a model, or read Prometheus metrics or model statistics."""

    id: int
    action: str
    model: str = ""
    versions: dict[str, int] = {}


class TakePermit(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Take a permit for one request of a token, by its name, from the server's account of rates."""

    id: int
    token: str


class SpendPermits(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Charge a token for what an admitted request costs beyond one request; there is no answer."""

    token: str
    cost: float


class Pong(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Response to Ping. log_dropped: lines of the log that this process has dropped since its start."""

    log_dropped: int = 0


class Drained(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """All calls have ended and the servers are closed; the process exits."""


ToIngress = (
    Start
    | Catalog
    | SessionStats
    | InputsRead
    | ResponseReady
    | FrontendResponse
    | ResponseChunk
    | StreamEnded
    | RequestFailed
    | CommandDone
    | PermitTaken
    | Ping
    | Drain
)
FromIngress = (
    ServersOpened
    | StartFailed
    | FrontendRequest
    | CancelRequest
    | FetchResponse
    | WindowCredit
    | BlockReleased
    | Command
    | TakePermit
    | SpendPermits
    | Pong
    | Drained
)

encode = msgspec.msgpack.Encoder().encode
decode_to_ingress = msgspec.msgpack.Decoder(ToIngress).decode
decode_from_ingress = msgspec.msgpack.Decoder(FromIngress).decode


# start parameters


@dataclass(frozen=True, slots=True)
class IngressSpec:
    """Start parameters of an ingress process.

    name:    for logs.
    servers: names of the servers to run, GRPC and HTTP, configured by `config`.
    config:  the server configuration; the ingress process reads the files that it names.
    """

    name: str
    servers: tuple[str, ...]
    config: ServeConfig

    def at(self, ports: dict[str, int]) -> IngressSpec:
        """Return the spec with fixed ports, so that a restarted process listens where it did before."""
        config = self.config
        if GRPC in ports:
            config = replace(config, grpc=replace(config.grpc, port=ports[GRPC]))
        if HTTP in ports and config.http is not None:
            config = replace(config, http=replace(config.http, port=ports[HTTP]))
        return replace(self, config=config)


def frame_bytes_max(config: ServeConfig) -> int:
    """Return the longest message of an ingress process: a request with inline inputs."""
    return 2 * config.limits.message_bytes_max + (16 << 20)


def encode_spec(spec: IngressSpec) -> bytes:
    return msgspec.msgpack.encode(spec, enc_hook=_encode_path)


def decode_spec(data: bytes) -> IngressSpec:
    """Decode the result of `encode_spec`; raises msgspec's errors for anything else."""
    return msgspec.msgpack.decode(data, type=IngressSpec, dec_hook=_decode_path)


def _encode_path(value: Any) -> Any:
    if isinstance(value, Path):
        return str(value.absolute())  # the reader's working directory may differ
    raise NotImplementedError(f"a {type(value).__name__} in a configuration")


def _decode_path(type: type[Any], value: Any) -> Any:
    if type is Path:
        return Path(value)
    raise NotImplementedError(f"a {type.__name__} in a configuration")


# errors


def _subclasses(cls: type[WeftlineError]) -> Iterator[type[WeftlineError]]:
    yield cls
    for subclass in cls.__subclasses__():
        yield from _subclasses(subclass)


_ERRORS = {cls.__name__: cls for cls in _subclasses(WeftlineError) if cls.__module__ == "weftline.errors"}


def to_wire_error(error: BaseException) -> WireError:
    """Encode an error.

    An exception other than a WeftlineError is logged here and sent without its text.
    """
    if isinstance(error, MemoryError):
        error = LimitReached("the server has no memory for this now; try again later, or with less", 1.0)
    if not isinstance(error, WeftlineError):
        _log.error("a request failed with an unexpected exception", exc_info=error)
        return WireError("WeftlineError", "the request failed inside the server")
    name = next((cls.__name__ for cls in type(error).__mro__ if _ERRORS.get(cls.__name__) is cls), "WeftlineError")
    status = error.status if error.status != _ERRORS[name].status else ""
    step = error.step if isinstance(error, StepError) else ""
    param = error.param if isinstance(error, InputError) else ""
    return WireError(name, str(error), status, error.retry_after_s, step, tuple(error.timings), param)


def from_wire_error(wire: WireError) -> WeftlineError:
    """Decode an error; one of an unknown class becomes a plain WeftlineError."""
    cls = _ERRORS.get(wire.error, WeftlineError)
    error = cls.__new__(cls, wire.message)  # without __init__, which would extend the text again
    if isinstance(error, StepError):
        error.step = wire.step
    if isinstance(error, PipelineError):
        error.problems = ()
    if isinstance(error, InputError):
        error.param = wire.param
    if wire.status:
        error.status = wire.status  # type: ignore[misc]
    error.retry_after_s = wire.retry_after_s
    error.timings = wire.timings
    return error


CANCELLED = to_wire_error(RequestCancelled("the caller withdrew the request"))
"""Error of a cancelled request, which closes its id."""
