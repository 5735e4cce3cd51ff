"""What the runtime and its workers say to each other.

Small frozen structs, MessagePack on the wire, never pickle: a message holds ids, places in shared memory, and values of
up to INLINE_BYTES_MAX bytes. Messages travel on one Unix stream socket for each worker, in order, each with a four-byte
length in front. Two of them bring a file descriptor along (Hello and Attach).

    runtime -> worker    Open, Attach, Retire, Run, Room, Submit, Cancel, Close
    worker -> runtime    Hello, Progress, OpenFailed, Ready, Need, Done, Pieces
"""

from __future__ import annotations

from typing import Any

import msgspec

from weftline.shm.block import Block, Place


class Value(msgspec.Struct, frozen=True, array_like=True):
    """One value of one port: its kind, and its bytes either inline (`data`) or in shared memory (`place`).

    dtype and shape belong to the kinds that are tensors (tensor, image, audio).
    """

    kind: str
    dtype: str = ""
    shape: tuple[int, ...] = ()
    data: bytes | None = None
    place: Place | None = None

    @property
    def size_bytes(self) -> int:
        return len(self.data) if self.data is not None else self.place.size_bytes if self.place else 0


class Failure(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Why an item has no outputs: the name of an error class in weftline.errors, and its message."""

    error: str
    message: str


class Given(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """An item's outputs, one value for each output port of the step, in port order."""

    outputs: tuple[Value, ...]


class Item(msgspec.Struct, frozen=True, array_like=True):
    """One item of a batch: its id and one value for each connected input, in the order of the plan."""

    id: int
    inputs: tuple[Value, ...]


# runtime -> worker


class StepToOpen(msgspec.Struct, frozen=True):
    """A step as its worker needs to know it; fields as in PlannedStep, port types as written text."""

    index: int
    name: str
    node: str
    options: dict[str, Any]
    inputs: tuple[tuple[str, str], ...]
    outputs: tuple[tuple[str, str], ...]
    device: str
    items_max: int
    mutates_inputs: bool


class Open(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The first message: make an arena, then open these steps."""

    worker: str
    arena_bytes: int
    threads: int
    base_dir: str
    cache_dir: str
    steps: tuple[StepToOpen, ...]


class Attach(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Map another process's arena; its descriptor comes with this message.

    size_bytes 0 and no descriptor: this is the id of the worker's own arena.
    """

    arena: int
    size_bytes: int


class Retire(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Unmap an arena: its writer is gone and nobody needs its bytes."""

    arena: int


class Run(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Run a step on these items, in batches of at most its items_max; answered by one Done.

    room: for output ports (by index) whose size is known beforehand, a leased block for all items side by side.
    """

    dispatch: int
    step: int
    items: tuple[Item, ...]
    room: dict[int, Block] = {}


class Room(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Answers Need: one block for each size asked for, or none at all and the reason."""

    blocks: tuple[Block, ...]
    refused: str = ""


class Submit(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Hand items to a streaming step; answered by Pieces."""

    step: int
    items: tuple[Item, ...]


class Cancel(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Drop these items of a streaming step; answered by Pieces with the last piece of each."""

    step: int
    items: tuple[int, ...]


class Close(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Close every node and exit."""


# worker -> runtime


class Hello(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The worker is up and its arena stands; the descriptor comes with this message."""

    pid: int
    arena_bytes: int


class Progress(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """How far a step has come in opening: a short phrase and a fraction from 0 to 1."""

    step: str
    phrase: str
    fraction: float


class OpenFailed(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """A step could not be opened; the worker exits."""

    step: str
    failure: Failure


class Ready(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Every step is open and warm. `opened_ms` says how long each took."""

    opened_ms: dict[str, float]


class Need(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The running work needs blocks of these sizes for its outputs; the worker waits for Room."""

    sizes: tuple[int, ...]


class Done(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """A dispatch is over: one result for each item, in item order.

    run_ms:       time spent in the node.
    batches:      how many calls of the node it took.
    copied_bytes: bytes of outputs that had to be copied into shared memory.
    """

    dispatch: int
    results: tuple[Given | Failure, ...]
    run_ms: float
    batches: int
    copied_bytes: int


class PieceOf(msgspec.Struct, frozen=True, array_like=True):
    """Part of a streaming item's answer: new values by output port index, and whether it ends here and how."""

    item: int
    outputs: dict[int, Value]
    last: bool = False
    failure: Failure | None = None


class Pieces(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """What one round of a streaming step produced."""

    step: int
    pieces: tuple[PieceOf, ...]
    run_ms: float
    copied_bytes: int = 0


ToWorker = Open | Attach | Retire | Run | Room | Submit | Cancel | Close
FromWorker = Hello | Progress | OpenFailed | Ready | Need | Done | Pieces

encode = msgspec.msgpack.Encoder().encode
decode_to_worker = msgspec.msgpack.Decoder(ToWorker).decode
decode_from_worker = msgspec.msgpack.Decoder(FromWorker).decode
