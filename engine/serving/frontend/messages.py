"""Messages between the engine and an ingress process.

Small frozen structs, MessagePack on the wire, each with a four-byte length in front; never pickle. Values are the
engine's own: small ones inside the message, large ones at a place in the extent of the side that says them (arena 0).
Whoever reads a place says so, and only then is its block used again.

    engine -> ingress    Begin, Catalog, Figures, Answered, Piece, Finished, Failed, Ordered, Ping, Drain
    ingress -> engine    Opened, NotOpened, Question, Cancel, More, Taken, Order, Pong, Drained

Every Question gets exactly one Answered, Finished or Failed, a cancelled one too; every Order one Ordered or Failed.
"""

from __future__ import annotations

from typing import Any

import msgspec

from weftline.engine.protocol.messages import Value
from weftline.engine.scheduler.request import StepTiming
from weftline.engine.serving.face import ModelFace, ModelState
from weftline.nodes.urgency import SequencePart

ARENA = 0
"""The arena number in places: there is one in each direction."""

WINDOW_BYTES = 1 << 20
"""How much of a stream may be on its way to an ingress process that has not read it."""

PING_S = 1.0
"""How often each side is told that the other lives."""

LOAD, UNLOAD, METRICS, STATISTICS = "load", "unload", "metrics", "statistics"
"""What an Order may ask for."""


class Trouble(msgspec.Struct, frozen=True, array_like=True):
    """An error on its way: the name of its class in weftline.errors, and what it says.

    status: '' when it is that of the class.
    """

    error: str
    message: str
    status: str = ""
    retry_after_s: float = 0.0
    step: str = ""
    timings: tuple[StepTiming, ...] = ()


# engine -> ingress


class Begin(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The first message: which doors to open, and all they are told (`spec.py` writes and reads it)."""

    spec: bytes


class Catalog(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Every model with its state, and the faces of those that can be asked; sent when it changes."""

    index: tuple[ModelState, ...]
    faces: tuple[ModelFace, ...]


class Figures(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The figures of every model that serves, as `Backend.stats` gives them; sent when they change, once a second."""

    models: dict[str, dict[str, Any]]


class FrontendResponse(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The outputs of a Question. `block`: where the placed ones lie, to be given back by Taken; -1: none is."""

    id: int
    outputs: dict[str, Value]
    block: int = -1
    timings: tuple[StepTiming, ...] = ()
    total_ms: float = 0.0
    version: int = 0
    traceparent: str = ""


class ResponseChunk(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Part of a stream, a StreamedOutput; `block` as in Answered."""

    id: int
    output: str
    value: Value
    last: bool
    block: int = -1


class Finished(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """A stream has ended well."""

    id: int


class RequestFailed(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """A Question or an Order has failed."""

    id: int
    trouble: Trouble


class Ordered(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """An Order was carried out: the version loaded, or the bytes asked for."""

    id: int
    version: int = 0
    data: bytes = b""


class Ping(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Say Pong."""


class Drain(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Take nothing new, let open calls finish for at most so long, close the doors, say Drained, and end."""

    grace_s: float


# ingress -> engine


class ServersOpened(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The doors stand open, at these ports by door name."""

    ports: dict[str, int]


class NotOpened(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """A door could not be opened; the process ends."""

    trouble: Trouble


class Question(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """A backend.Ask; fields as there. `stream`: answer by Piece and Finished instead of Answered."""

    id: int
    stream: bool
    model: str
    inputs: dict[str, Value]
    outputs: tuple[str, ...] | None = None
    deadline_ms: float | None = None
    priority: int = 0
    sequence: SequencePart | None = None
    version: str = ""
    name: str = ""
    caller: str = ""
    door: str = ""
    traceparent: str = ""
    size_bytes: int = 0
    job: bool = False
    seed: int | None = None


class Cancel(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Nobody waits for this Question any more; one that has ended meanwhile is meant by nobody."""

    id: int


class More(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """So much more of a stream was read."""

    id: int
    size_bytes: int


class BlockReleased(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The block of an answer is not looked at any more."""

    block: int


class Order(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Load or unload a model; give all figures as Prometheus' text; or the statistics of models by version."""

    id: int
    what: str
    model: str = ""
    versions: dict[str, int] = {}


class Pong(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The ingress process lives and its loop turns."""


class Drained(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Every call has ended and the doors are closed; the process ends."""


ToIngress = (
    Begin | Catalog | Figures | FrontendResponse | ResponseChunk | Finished | RequestFailed | Ordered | Ping | Drain
)
FromIngress = ServersOpened | NotOpened | Question | Cancel | More | BlockReleased | Order | Pong | Drained

encode = msgspec.msgpack.Encoder().encode
decode_to_ingress = msgspec.msgpack.Decoder(ToIngress).decode
decode_from_ingress = msgspec.msgpack.Decoder(FromIngress).decode
