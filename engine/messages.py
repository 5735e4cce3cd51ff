"""What the runtime and its workers say to each other.

Small frozen structs, MessagePack on the wire, never pickle: a message holds ids, places in shared memory, and values of
up to INLINE_BYTES_MAX bytes. Messages travel on one Unix stream socket for each worker, in order, each with a four-byte
length in front. Four of them bring a file descriptor along (Hello and Attach, DeviceUp and AttachDevice).

    runtime -> worker    Open, Attach, AttachDevice, Retire, Chain, Run, Room, Submit, Feed, Cancel, Pause, Resume,
                         EndSequences, Quarantine, KvResize, Settle, GiveOnHost, Fetch, Sleep, Wake, Close
    worker -> runtime    Hello, DeviceUp, AttachFailed, Progress, OpenFailed, Ready, Beat, Need, Suspected, Done,
                         Released, Settled, Fetched, Pieces, Took, KvResized, Slept, Awake
"""

from __future__ import annotations

from typing import Any

import msgspec

from weftline.shm.block import Block, Key, Place


class Value(msgspec.Struct, frozen=True, array_like=True):
    """One value of one port: its kind, and its bytes inline (`data`), in shared memory (`place`), on a device (`near`).

    dtype and shape belong to the kinds that are tensors (tensor, image, audio).
    items:  of kind 'list', its elements, in order.
    near:   where a tensor lies in a device's arena; beside `place` when the same bytes are in both.
    ready:  of a tensor whose `near` is still being written: the event that says when it is done, as a place in the
            event arena of the worker that writes it.
    A value of kind 'absent' has nothing: the step that would have given it was skipped.
    """

    kind: str
    dtype: str = ""
    shape: tuple[int, ...] = ()
    data: bytes | None = None
    place: Place | None = None
    items: tuple[Value, ...] | None = None
    near: Place | None = None
    ready: Place | None = None

    @property
    def size_bytes(self) -> int:
        if self.data is not None:
            return len(self.data)
        if self.items is not None:
            return sum(one.size_bytes for one in self.items)
        lies = self.place or self.near
        return lies.size_bytes if lies else 0

    @property
    def keys(self) -> tuple[Key, ...]:
        """The leases that its bytes are held by, each once."""
        if self.near is not None:
            return tuple(dict.fromkeys(one.key for one in (self.place, self.near, self.ready) if one is not None))
        if self.place is not None:
            return (self.place.key,)
        if self.items:
            return tuple(dict.fromkeys(key for one in self.items for key in one.keys))
        return ()


ABSENT = Value("absent")
"""The value that is not there."""

PIECES = Value("pieces")
"""Stands in an item for an input that comes piece by piece, by Feed."""


class Failure(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Why an item has no outputs: the name of an error class in weftline.errors, and its message.

    stage: of a chain, which of its steps failed, by position.
    """

    error: str
    message: str
    stage: int = 0


class Given(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """An item's outputs: one value for each output port of the step, or for each of a chain's `returns`, in order."""

    outputs: tuple[Value, ...]


class Brought(msgspec.Struct, frozen=True, array_like=True):
    """What an item brings along from its request; None in an Item stands for the usual: priority 0, no deadline.

    priority: from -100 to 100.
    left_ms:  milliseconds to the deadline, when the message was sent.
    sequence: id of its sequence of requests, '' outside of one; `start` and `end` mark its first and last item.
    seed:     what chance in it is drawn from; None draws anew.
    element:  of a `map:` step, which element of the list it is; -1 otherwise. Said only beside a seed.
    """

    priority: int = 0
    left_ms: float | None = None
    sequence: str = ""
    start: bool = False
    end: bool = False
    seed: int | None = None
    element: int = -1


class Item(msgspec.Struct, frozen=True, array_like=True):
    """One item of a batch: its id and one value for each connected input, in the order of the plan."""

    id: int
    inputs: tuple[Value, ...]
    brought: Brought | None = None


# runtime -> worker


class StepToOpen(msgspec.Struct, frozen=True):
    """A step as its worker needs to know it; fields as in PlannedStep, port types as written text.

    base_dir: what relative paths in its options are relative to; '': that of Open.
    streams:  it is run as a StreamNode.
    fed:      the inputs that its node is given by `feed`.
    near_inputs:  the inputs that its node is given as DeviceTensors, wherever they come from.
    near_outputs: for output ports that somebody reads on the device: 'device' when nobody needs them in host memory,
                  else 'both'. All others are brought to host memory.
    """

    index: int
    name: str
    node: str
    options: dict[str, Any]
    inputs: tuple[tuple[str, str], ...]
    outputs: tuple[tuple[str, str], ...]
    device: str
    items_max: int
    mutates_inputs: bool
    pad: dict[str, tuple[int, ...]] = {}
    pad_value: float = 0.0
    base_dir: str = ""
    streams: bool = False
    fed: tuple[str, ...] = ()
    near_inputs: tuple[str, ...] = ()
    near_outputs: dict[str, str] = {}
    finite: bool = False


class Open(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The first message: make the arenas, then open these steps.

    device:             the GPU that the steps of this worker use, '' for none.
    device_arena_bytes: size of the arena on it; 0: no step of the worker gives anything there.
    ordering:           'host': a value is told of when it is whole. 'event': as soon as it is on its way, with an
                        event that readers wait for on the device.
    """

    worker: str
    arena_bytes: int
    threads: int
    base_dir: str
    cache_dir: str
    steps: tuple[StepToOpen, ...]
    device: str = ""
    device_arena_bytes: int = 0
    ordering: str = "host"


class Attach(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Map another process's arena; its descriptor comes with this message.

    size_bytes 0 and no descriptor: this is the id of the worker's own arena.
    """

    arena: int
    size_bytes: int


class AttachDevice(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Map another worker's arena on this worker's device; as DeviceUp told of it.

    size_bytes 0: this is the id of the worker's own device arena. Its events are known as those of arena `-arena`.
    """

    arena: int
    size_bytes: int
    rung: str = ""
    handle: bytes = b""
    events: tuple[bytes, ...] = ()


class Retire(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Unmap an arena: its writer is gone and nobody needs its bytes."""

    arena: int


class Stage(msgspec.Struct, frozen=True, array_like=True):
    """One step of a chain.

    inputs: for each connected input port, where it comes from: (-1, position in Item.inputs), or (an earlier stage,
            its output port).
    """

    step: int
    inputs: tuple[tuple[int, int], ...]


class Chain(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Steps of this worker that hand over to each other inside it; sent once, before the first Run that names it.

    returns: what is answered, as (stage, output port); everything else stays in the worker.
    """

    id: int
    stages: tuple[Stage, ...]
    returns: tuple[tuple[int, int], ...]


class Run(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Run a step on these items, in batches of at most its items_max; answered by one Done.

    chain:   0, or the id of a Chain that starts with `step`; items are then those of its first stage, plus the inputs
             that later stages read.
    room:    for output ports (by index) whose size is known beforehand, a leased block for all items side by side.
    near_room: the same, in the worker's device arena.
    ready:   the event, as a block of the worker's event arena, that marks what is given on the device.
    suspect: a worker has died of this item, or may have: say by Suspected what it is made of before running it.
    """

    dispatch: int
    step: int
    items: tuple[Item, ...]
    room: dict[int, Block] = {}
    chain: int = 0
    suspect: bool = False
    near_room: dict[int, Block] = {}
    ready: Block | None = None


class Room(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Answers Need: one block for each size asked for, `near` those on the device, or none at all and the reason."""

    blocks: tuple[Block, ...]
    refused: str = ""
    near: tuple[Block, ...] = ()


class Submit(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Hand items to a streaming step; answered by Pieces. `suspect` as in Run."""

    step: int
    items: tuple[Item, ...]
    suspect: bool = False


class PieceFor(msgspec.Struct, frozen=True, array_like=True):
    """Part of an input of an item that a streaming step has: the input's position, and what is new.

    last: nothing follows, and `value` is the whole value; before that it is always inline.
    """

    item: int
    input: int
    value: Value
    last: bool = False


class Feed(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Hand pieces of inputs to a streaming step; answered by Took. Those of items it does not have are left out."""

    step: int
    pieces: tuple[PieceFor, ...]


class Cancel(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Nobody waits for these items any more.

    A streaming step drops them and answers by Pieces with the last piece of each. A batch that holds them is told when
    it asks, and one that has not begun leaves them out; its Done has a result for each of them all the same.
    """

    step: int
    items: tuple[int, ...]


class Pause(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Produce nothing more of these items of a streaming step until Resume: their readers are slow."""

    step: int
    items: tuple[int, ...]


class Resume(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Go on with paused items."""

    step: int
    items: tuple[int, ...]


class EndSequences(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """These sequences of requests are over; the step's node may forget them."""

    step: int
    sequences: tuple[str, ...]


class Quarantine(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Refuse items of this step that are made of what killed a worker before; `digests` replaces earlier ones."""

    step: int
    digests: tuple[bytes, ...]


class KvResize(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Have this streaming step hold so many bytes of KV memory, between two of its rounds; answered by KvResized."""

    step: int
    bytes: int


class Settle(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Say Settled once everything is done that is on this worker's streams now: a reader of its arena has died."""

    token: int


class GiveOnHost(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Give everything in host memory from now on: somebody cannot attach this worker's device arena."""


class Fetch(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Copy these tensors, which lie in this worker's device arena alone, to host memory; answered by Fetched."""

    token: int
    values: tuple[Value, ...]


class Sleep(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Give back what a step's node holds of its device; answered by Slept.

    keep: 'host': weights wait in host memory. 'nothing': they are dropped, and loaded again.
    """

    step: int
    keep: str


class Wake(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Have a sleeping step ready again; answered by Awake."""

    step: int


class Close(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Close every node and exit."""


# worker -> runtime


class Hello(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The worker is up and its arena stands; the descriptor comes with this message."""

    pid: int
    arena_bytes: int


class DeviceUp(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The worker's arena on its device stands; sent after Hello, before the first step opens.

    device: 'cuda:0' and so on.
    rung:   how it can be shared. 'descriptor': by the one that comes with this message, and it outlives the worker.
            'handle': by `handle`, the older way; it ends with the worker. 'host': not at all, so that there is none
            (size_bytes 0) and tensors travel through host memory.
    events: the handles by which others open its events; none with ordering 'host'.
    why:    what was refused on the rungs above.
    """

    device: str
    size_bytes: int
    rung: str
    handle: bytes = b""
    events: tuple[bytes, ...] = ()
    why: str = ""


class AttachFailed(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """This worker cannot map a device arena that it was told of, and says why: what lies there alone it cannot read.

    arena: below 0 when it can map the arena, and cannot open the events of the worker that writes there.
    """

    arena: int
    why: str


class Progress(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """How far a step has come in opening: a short phrase and a fraction from 0 to 1."""

    step: str
    phrase: str
    fraction: float


class OpenFailed(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """A step could not be opened; the worker exits."""

    step: str
    failure: Failure


class DeviceUse(msgspec.Struct, frozen=True, array_like=True):
    """What a step's node takes of its device, in bytes: once it is open, and at its most while it warmed up."""

    open_bytes: int
    peak_bytes: int


class Ready(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Every step is open and warm. `opened_ms` says how long each took, `warm_ms` its warm-up alone.

    device_use:   by step, what was measured.
    device_bytes: what the whole worker takes of its device, but for its context; 0 without one.
    device_free:  what the device has left then, whoever takes the rest.
    """

    opened_ms: dict[str, float]
    warm_ms: dict[str, float] = {}
    device_use: dict[str, DeviceUse] = {}
    device_bytes: int = 0
    device_free: int = 0


class KvReport(msgspec.Struct, frozen=True, array_like=True):
    """What a streaming step does with its KV memory; fields as in NodeMemory."""

    step: int
    used_bytes: int
    idle_bytes: int
    free_bytes: int
    waiting: int = 0
    preempted: int = 0


class Figures(msgspec.Struct, frozen=True, array_like=True):
    """What a step's node counts of itself, by name."""

    step: int
    values: dict[str, float]


class Beat(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The process lives and its interpreter runs; sent by a thread of its own, every BEAT_S seconds.

    memory:  of each step that has KV memory, as it was after one of its last rounds.
    figures: of each step whose node offers them, as they were then.
    """

    memory: tuple[KvReport, ...] = ()
    figures: tuple[Figures, ...] = ()


class Need(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The running work needs blocks of these sizes for its outputs; the worker waits for Room.

    near: those that it needs in its device arena.
    """

    sizes: tuple[int, ...]
    near: tuple[int, ...] = ()


class Suspected(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """What the items of a suspect dispatch are made of: a SHA-256 of each one's inputs, sent before they are run.

    digests: b'' of an item that cannot be read by this worker.
    streams: of a suspect Submit, its items; `dispatch` is then 0.
    """

    dispatch: int
    digests: tuple[bytes, ...]
    streams: tuple[int, ...] = ()


class Ran(msgspec.Struct, frozen=True, array_like=True):
    """How one step of a dispatch ran.

    run_ms:  time spent in it.
    batches: how many calls of the node it took.
    items:   how many items reached it.
    """

    run_ms: float
    batches: int
    items: int


class Done(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """A dispatch is over: one result for each item, in item order.

    ran:           one for each stage; one alone without a chain.
    copied_bytes:  bytes of outputs that had to be copied into shared memory.
    out_of_memory: the device or the host had no memory for a batch of so many items; 0: it never happened.
    unfinished:    its work goes on on the device: what it reads and writes there stays leased until Released.
    near_bytes:    bytes of tensors moved to or from the device.
    """

    dispatch: int
    results: tuple[Given | Failure, ...]
    ran: tuple[Ran, ...]
    copied_bytes: int = 0
    out_of_memory: int = 0
    unfinished: bool = False
    near_bytes: int = 0


class Released(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The device has done all the work of these dispatches, which were told of as unfinished."""

    dispatches: tuple[int, ...]


class Settled(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Everything is done that was on the worker's streams when it was asked."""

    token: int


class Fetched(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The tensors of a Fetch as they lie in host memory, in the same order; or none at all, and why."""

    token: int
    values: tuple[Value, ...]
    refused: str = ""


class Slept(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """A step's node sleeps; `freed_bytes` of its device came free."""

    step: int
    freed_bytes: int


class Awake(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """A step's node is ready again after `took_ms`; or why it cannot be."""

    step: int
    took_ms: float
    failure: Failure | None = None


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


class Took(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The pieces of a Feed are with the node: their items, one for each piece."""

    step: int
    items: tuple[int, ...]


class KvResized(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """A step holds so many bytes of KV memory now: what it was told, in whole pages, or what it could not give up."""

    step: int
    bytes: int


ToWorker = (
    Open
    | Attach
    | AttachDevice
    | Retire
    | Chain
    | Run
    | Room
    | Submit
    | Feed
    | Cancel
    | Pause
    | Resume
    | EndSequences
    | Quarantine
    | KvResize
    | Settle
    | GiveOnHost
    | Fetch
    | Sleep
    | Wake
    | Close
)
FromWorker = (
    Hello
    | DeviceUp
    | AttachFailed
    | Progress
    | OpenFailed
    | Ready
    | Beat
    | Need
    | Suspected
    | Done
    | Released
    | Settled
    | Fetched
    | Pieces
    | Took
    | KvResized
    | Slept
    | Awake
)

BEAT_S = 1.0
"""How often a worker says that it lives, in seconds."""

encode = msgspec.msgpack.Encoder().encode
decode_to_worker = msgspec.msgpack.Decoder(ToWorker).decode
decode_from_worker = msgspec.msgpack.Decoder(FromWorker).decode
