"""Messages between the runtime and its workers, with their encoder and decoders.

Messages are frozen structs, encoded as MessagePack, never as pickle. They hold ids, places in shared memory, and values
of up to INLINE_BYTES_MAX bytes. Each worker has one Unix stream socket. Messages on it are ordered and length-prefixed
(four bytes). Four of them carry a file descriptor: Hello and Attach, DeviceUp and AttachDevice. A step in a message is
the number of a deployment: what the worker has opened, which steps of several programs may use.

    runtime -> worker    OpenSteps, Attach, AttachDevice, Retire, SetOptions, DropOptions, Chain, DropChains, RunBatch,
                         OutputBuffer, Submit, InputChunks, CancelItems, PauseItems, ResumeItems, EndSequences,
                         QuarantineItems, KvResize, Settle, UseHostOutputs, Fetch, Sleep, Wake, Close
    worker -> runtime    Hello, DeviceUp, AttachFailed, OpenProgress, OpenFailed, Ready, Heartbeat, BufferRequest,
                         Suspected, BatchDone, Released, Settled, Fetched, OutputChunks, ChunkRead, KvResized, Asleep,
                         Awake
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec

from weftline.errors import BY_NAME
from weftline.nodes.declared_files import FileIdentity
from weftline.pipelines.spec.policy import BatchPolicy, CallPolicy
from weftline.shm.block import Block, Key, Place

ErrorName = Annotated[str, msgspec.Meta(pattern=rf"\A(?:{'|'.join(BY_NAME)})\Z")]
"""Name of an error class that a worker may send; a message with another name does not decode."""

COUNT_MAX = 1 << 53
"""Limit on counts and sizes in bytes that a worker sends: whole numbers that a float holds exactly."""

TIME_MS_MAX = 1e12
"""Limit on times that a worker sends, 31 years: finite, and so are sums of them."""

Count = Annotated[int, msgspec.Meta(ge=0, le=COUNT_MAX)]
Ms = Annotated[float, msgspec.Meta(ge=0, le=TIME_MS_MAX)]
"""A duration in milliseconds. NaN does not decode, nor do infinite and negative numbers."""

NAME_CHARS_MAX, REASON_CHARS_MAX = 1024, 16_384

Name = Annotated[str, msgspec.Meta(max_length=NAME_CHARS_MAX)]
Reason = Annotated[str, msgspec.Meta(max_length=REASON_CHARS_MAX)]
"""A text of a worker for errors and logs."""

Digest = Annotated[bytes, msgspec.Meta(max_length=32)]
"""A SHA-256, or nothing."""

CHUNK_OVERHEAD_BYTES = 256
"""Memory charged for a queued chunk of a stream, in addition to its value: the Python objects around it."""


class Value(msgspec.Struct, frozen=True, array_like=True):
    """One value of a port: its kind, and its bytes.

    The bytes are inline (`data`), in shared memory (`place`) or on a device (`device_place`).

    dtype, shape: for tensor kinds (tensor, image, audio).
    items:  for kind 'list', the elements in order.
    device_place: place of a tensor in a device arena; set in addition to `place` when the same bytes are in both.
    ready:  event that fires when the write to `device_place` is complete, as a place in the event arena of the writing
            worker; None if it is complete already.
    A value of kind 'absent' has no content: the step that produces it was skipped.
    """

    kind: str
    dtype: str = ""
    shape: tuple[int, ...] = ()
    data: bytes | None = None
    place: Place | None = None
    items: tuple[Value, ...] | None = None
    device_place: Place | None = None
    ready: Place | None = None

    @property
    def size_bytes(self) -> int:
        if self.data is not None:
            return len(self.data)
        if self.items is not None:
            return sum(one.size_bytes for one in self.items)
        place = self.place or self.device_place
        return place.size_bytes if place else 0

    @property
    def keys(self) -> tuple[Key, ...]:
        """Return the keys of the leases on its memory, without duplicates."""
        if self.device_place is not None:
            return tuple(
                dict.fromkeys(one.key for one in (self.place, self.device_place, self.ready) if one is not None)
            )
        if self.place is not None:
            return (self.place.key,)
        if self.items:
            return tuple(dict.fromkeys(key for one in self.items for key in one.keys))
        return ()


ABSENT = Value("absent")
"""The absent value: an output of a skipped step, or an optional input that was left out."""

PIECES = Value("pieces")
"""Placeholder in an item for an input that is sent in chunks, by InputChunks."""


class Failure(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Failure of an item: the name of an error class in weftline.errors, and a message.

    stage:     position of the failed step in a chain.
    param:     as in InputError.
    traceback: frames of the exception raised by the step's code, bounded; '' if there are none. For the caller in this
               process and for logs. It is never sent to a network client.
    """

    error: ErrorName
    message: Reason
    stage: Count = 0
    traceback: Annotated[str, msgspec.Meta(max_length=65_536)] = ""
    param: Name = ""


class ItemResult(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Outputs of an item, in order: one value per output port of the step, or per entry of a chain's `returns`."""

    outputs: tuple[Value, ...]


class ItemMetadata(msgspec.Struct, frozen=True, array_like=True):
    """Metadata of an item from its request; None in an Item means the defaults: priority 0, no deadline.

    priority: from -100 to 100.
    left_ms:  milliseconds to the deadline, or to the end of the step's timeout, when the message was sent.
    sequence: id of its sequence of requests, '' for none; `start` and `end` mark the first and last item.
    seed:     seed of its random number generator; None: unseeded.
    element:  index of the list element in a `map:` step, else -1. Set only with a seed.
    caller:   authenticated identity of the client; '' for none.
    options:  number of its step's options, by SetOptions; 0: those that the node was opened with. A chain has those of
              its stages instead.
    """

    priority: int = 0
    left_ms: float | None = None
    sequence: str = ""
    start: bool = False
    end: bool = False
    seed: int | None = None
    element: int = -1
    caller: str = ""
    options: int = 0


class Item(msgspec.Struct, frozen=True, array_like=True):
    """One item of a batch: its id, and one value for each connected input in plan order."""

    id: int
    inputs: tuple[Value, ...]
    metadata: ItemMetadata | None = None


# runtime -> worker


class StepToOpen(msgspec.Struct, frozen=True):
    """Configuration of a step for its worker; fields as in PlannedStep, port types as text.

    policy:       keys of the step that apply to single calls of its node.
    base_dir:     base of relative paths in its options; '': the base_dir of OpenSteps.
    streams:      the step is run as a StreamNode.
    fed:          inputs that are passed to its node by `feed`.
    device_inputs:  inputs that are passed to its node as DeviceTensors, whatever their source.
    device_outputs: for output ports with a reader on the device: 'device' if no reader needs host memory, else 'both'.
                  All other outputs are copied to host memory.
    remembers:    its node may keep its inputs between calls, so they are private copies.
    memory_limit_bytes:   limit on its device memory, for a step that uses the remaining memory; 0: as its options set.
    reserve_bytes: device memory that such a step must leave free.
    kv_most_bytes: limit on its KV memory at run time, where steps share it; 0: the size at start.
    files:        state of the files that it loads, which is compared whenever its node opens or wakes.
    thread:       the worker thread that runs it, from 1; 0: the worker has one thread for all of its steps.
    """

    index: int
    name: str
    node: str
    options: dict[str, Any]
    inputs: tuple[tuple[str, str], ...]
    outputs: tuple[tuple[str, str], ...]
    device: str
    batch: BatchPolicy
    mutates_inputs: bool
    policy: CallPolicy = CallPolicy()
    base_dir: str = ""
    streams: bool = False
    fed: tuple[str, ...] = ()
    device_inputs: tuple[str, ...] = ()
    device_outputs: dict[str, str] = {}
    remembers: bool = False
    memory_limit_bytes: int = 0
    reserve_bytes: int = 0
    kv_most_bytes: int = 0
    thread: int = 0
    files: tuple[FileIdentity, ...] = ()


class OpenSteps(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Create the arenas and open these steps. The first message to a worker.

    device:             GPU of the steps of this worker, '' for none.
    device_arena_bytes: size of the arena on it; 0: no step of the worker has outputs there.
    ordering:           'host': a value is sent when it is complete. 'event': a value is sent while it is being written,
                        with an event that readers wait for on the device.
    log_level:          lowest level of log records written to standard error; 30: WARNING.
    nvtx:               write NVTX ranges around the calls of the steps.
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
    log_level: int = 30
    nvtx: bool = False


class Attach(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Map the arena of another process; its descriptor is sent with this message.

    With size_bytes 0 and no descriptor, `arena` is the id of the worker's own arena.
    """

    arena: int
    size_bytes: int


class AttachDevice(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Map another worker's arena on this worker's device; fields as in DeviceUp.

    With size_bytes 0, `arena` is the id of the worker's own device arena. The id of its event arena is `-arena`.
    """

    arena: int
    size_bytes: int
    share_mode: str = ""
    handle: bytes = b""
    events: tuple[bytes, ...] = ()


class Retire(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Unmap an arena. Its writer has exited, and no lease on it is left."""

    arena: int


class SetOptions(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Define options of items: those of a step that uses a deployment which was opened with others.

    Sent to every worker of the deployment before the first item that has them, and again after each restart.

    step:    the deployment.
    number:  from 1, by which items and stages of chains name them; never used twice.
    name:    name of the program's step: seeds depend on it.
    program: number of the program for a streaming step, whose node may keep data of items; 0: the one of number 0.
    options: the node's request options; all other options are those that it was opened with.
    """

    step: int
    number: int
    name: str
    program: int
    options: dict[str, Any]
    policy: CallPolicy


class DropOptions(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Forget options of items: no item or chain names them again, and none that has them is running."""

    step: int
    numbers: tuple[int, ...]


class Stage(msgspec.Struct, frozen=True, array_like=True):
    """One step of a chain.

    inputs:  source of each connected input port: (-1, position in Item.inputs), or (earlier stage, its output port).
    options: number of its items' options, by SetOptions; 0: those that the node was opened with.
    """

    step: int
    inputs: tuple[tuple[int, int], ...]
    options: int = 0


class Chain(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Define a chain: steps that pass values to each other inside the worker. Sent once, before its first RunBatch.

    returns: values to return, as (stage, output port). All others stay in the worker.
    """

    id: int
    stages: tuple[Stage, ...]
    returns: tuple[tuple[int, int], ...]


class DropChains(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Forget these chains: no RunBatch names them again, and none of them runs."""

    chains: tuple[int, ...]


class RunBatch(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Run a step on these items, in batches of at most its items_max; answered by one BatchDone.

    chain:     0, or the id of a Chain that starts with `step`. Items then hold the inputs of its first stage, followed
               by the inputs that later stages read.
    output_blocks: preallocated output buffers by output port index, where the size is known: a leased block for all
               items.
    device_output_blocks: the same in the worker's device arena.
    ready:     event for the outputs on the device, as a block of the worker's event arena.
    suspect:   this item may have killed a worker: the worker sends Suspected with its digest before running it.
    """

    dispatch: int
    step: int
    items: tuple[Item, ...]
    output_blocks: dict[int, Block] = {}
    chain: int = 0
    suspect: bool = False
    device_output_blocks: dict[int, Block] = {}
    ready: Block | None = None


class OutputBuffer(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Reply to the BufferRequest of `dispatch`: one block per requested size, or none and the reason (`refused`).

    device_blocks: the blocks in the device arena.
    """

    blocks: tuple[Block, ...]
    refused: str = ""
    device_blocks: tuple[Block, ...] = ()
    dispatch: int = 0


class Submit(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Submit items to a streaming step; answered by OutputChunks. `suspect` as in RunBatch."""

    step: int
    items: tuple[Item, ...]
    suspect: bool = False


class InputChunk(msgspec.Struct, frozen=True, array_like=True):
    """Chunk of an input of an item in a streaming step: the position of the input, and the new part of its value.

    last: the final message for this input: `value` is the complete value. Chunks before it are always inline.
    """

    item: int
    input: int
    value: Value
    last: bool = False


class InputChunks(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Send chunks of inputs to a streaming step; answered by ChunkRead. Chunks of unknown items are dropped."""

    step: int
    pieces: tuple[InputChunk, ...]


class CancelItems(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Cancel these items.

    A streaming step drops them and sends OutputChunks with the last chunk of each. A running batch can poll for the
    cancellation. A batch that has not started omits them. Its BatchDone contains a result for each of them anyway.
    """

    step: int
    items: tuple[int, ...]


class PauseItems(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Pause these items of a streaming step until ResumeItems (back-pressure)."""

    step: int
    items: tuple[int, ...]


class ResumeItems(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Resume paused items."""

    step: int
    items: tuple[int, ...]


class EndSequences(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """End sequences of requests: the step's node may free their state."""

    step: int
    sequences: tuple[str, ...]


class QuarantineItems(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Reject items of this step whose inputs match a quarantined digest; `digests` replaces the earlier list."""

    step: int
    digests: tuple[bytes, ...]


class KvResize(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Resize the KV memory of a streaming step between two of its rounds; answered by KvResized."""

    step: int
    bytes: int


class Settle(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Device fence after the death of a reader: send Settled when the current work on this worker's streams is done."""

    token: int


class UseHostOutputs(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Write all outputs to host memory from now on: another worker cannot attach this worker's device arena."""


class Fetch(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Copy tensors that are only in this worker's device arena to host memory; answered by Fetched."""

    token: int
    values: tuple[Value, ...]


class Sleep(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Free the device memory of a step's node; answered by Asleep.

    keep: 'host': weights are moved to host memory. 'nothing': they are dropped, and reloaded on Wake.
    """

    step: int
    keep: str


class Wake(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Wake a sleeping step; answered by Awake."""

    step: int


class Close(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Close every node and exit."""


# worker -> runtime


class Hello(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Report that the worker has started and created its arena; the descriptor is sent with this message."""

    pid: Count
    arena_bytes: Count


class DeviceUp(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Report that the worker has created its device arena; sent after Hello, before the first step opens.

    device: 'cuda:0' and so on.
    share_mode: 'descriptor': by the descriptor sent with this message; the memory outlives the worker.
            'handle': by the CUDA IPC `handle`; the memory ends with the worker. 'host': not shareable. There is then
            no arena (size_bytes 0), and tensors are sent through host memory.
    events: IPC handles of its events; none with ordering 'host'.
    why:    errors of the sharing modes that were tried first.
    """

    device: Name
    size_bytes: Count
    share_mode: Name
    handle: bytes = b""
    events: tuple[bytes, ...] = ()
    why: Reason = ""


class AttachFailed(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Report that this worker cannot map a device arena, so it cannot read values that are only there.

    arena: negative if the arena can be mapped and the events of its writer cannot be opened.
    """

    arena: Annotated[int, msgspec.Meta(ge=-COUNT_MAX, le=COUNT_MAX)]
    why: Reason


class OpenProgress(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Progress of opening a step: a short phrase, and a fraction from 0 to 1."""

    step: Name
    phrase: Name
    fraction: Annotated[float, msgspec.Meta(ge=0, le=1)]


class OpenFailed(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Report that a step could not be opened. The worker exits."""

    step: Name
    failure: Failure


class DeviceUse(msgspec.Struct, frozen=True, array_like=True):
    """Device memory of a step's node in bytes: after opening, and the peak during warm-up."""

    open_bytes: Count
    peak_bytes: Count


class Ready(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Report that every step is open and warmed up.

    opened_ms:    time to open each step, with its warm-up.
    warm_ms:      time of its warm-up alone.
    device_use:   measured device memory by step.
    device_bytes: device memory of the worker without its CUDA context; 0 without a device.
    device_free:  free memory of the device at that time, with every process on it counted.
    """

    opened_ms: dict[Name, Ms]
    warm_ms: dict[Name, Ms] = {}
    device_use: dict[Name, DeviceUse] = {}
    device_bytes: Count = 0
    device_free: Count = 0


class KvReport(msgspec.Struct, frozen=True, array_like=True):
    """KV memory use of a streaming step; fields as in NodeMemory."""

    step: Count
    used_bytes: Count
    idle_bytes: Count
    free_bytes: Count
    waiting: Count = 0
    preempted: Count = 0
    wanted_bytes: Count = 0


class NodeStats(msgspec.Struct, frozen=True, array_like=True):
    """Statistics of a step's node, by name."""

    step: Count
    values: dict[str, float]


class Heartbeat(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Heartbeat: the process is alive and its interpreter runs. Sent every BEAT_S seconds by a separate thread.

    memory:  KV memory of each step that has any, after one of its last rounds.
    figures: statistics of each step whose node has any, collected at that time.
    """

    memory: tuple[KvReport, ...] = ()
    figures: tuple[NodeStats, ...] = ()


class BufferRequest(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Request output blocks of these sizes for the running dispatch; the worker waits for OutputBuffer.

    device_sizes: sizes of blocks in its device arena.
    dispatch: the waiting dispatch in a worker whose steps have separate threads; else 0.
    """

    sizes: tuple[Count, ...]
    device_sizes: tuple[Count, ...] = ()
    dispatch: Count = 0


class Suspected(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Digests of the items of a suspect dispatch: SHA-256 of each item's inputs and options, sent before they are run.

    digests: b'' for an item that this worker cannot read.
    streams: the items of a suspect Submit; `dispatch` is then 0.
    """

    dispatch: Count
    digests: tuple[Digest, ...]
    streams: tuple[Count, ...] = ()


class StepRun(msgspec.Struct, frozen=True, array_like=True):
    """Statistics of one step of a dispatch.

    run_ms:  run time.
    batches: number of calls of the node.
    items:   number of items that reached the step.
    """

    run_ms: Ms
    batches: Count
    items: Count


class BatchDone(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Results of a dispatch: one for each item, in item order.

    ran:           statistics of each stage; a single entry without a chain.
    copied_bytes:  bytes of outputs copied into shared memory.
    out_of_memory: size of the batch that ran out of device or host memory; 0: none did.
    unfinished:    work on the device continues: the memory that it reads and writes stays leased until Released.
    device_moved_bytes:    bytes of tensors copied to or from the device.
    """

    dispatch: Count
    results: tuple[ItemResult | Failure, ...]
    ran: tuple[StepRun, ...]
    copied_bytes: Count = 0
    out_of_memory: Count = 0
    unfinished: bool = False
    device_moved_bytes: Count = 0


class Released(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Report that the device work of these dispatches is done. Their BatchDone was marked `unfinished`."""

    dispatches: tuple[Count, ...]


class Settled(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Reply to Settle: the work that was on the worker's streams when it arrived is done."""

    token: Count


class Fetched(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Reply to Fetch: the copies in host memory, in the same order; or none, and the reason (`refused`)."""

    token: Count
    values: tuple[Value, ...]
    refused: Reason = ""


class Asleep(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Reply to Sleep: a step's node sleeps, and has freed `freed_bytes` of device memory."""

    step: Count
    freed_bytes: Count


class Awake(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Reply to Wake: a step's node is ready after `took_ms`, or cannot be woken (`failure`)."""

    step: Count
    took_ms: Ms
    failure: Failure | None = None


class OutputChunk(msgspec.Struct, frozen=True, array_like=True):
    """Output chunk of a streaming item: new values by output port index. The last one may carry a failure."""

    item: Count
    outputs: dict[Count, Value]
    last: bool = False
    failure: Failure | None = None


class OutputChunks(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Output chunks of one round of a streaming step."""

    step: Count
    pieces: tuple[OutputChunk, ...]
    run_ms: Ms
    copied_bytes: Count = 0


class ChunkRead(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Acknowledge input chunks that the node has received: their items, one for each chunk."""

    step: Count
    items: tuple[Count, ...]


class KvResized(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Reply to KvResize: the actual KV memory of a step. It is the requested size in whole pages, or more if in use."""

    step: Count
    bytes: Count


ToWorker = (
    OpenSteps
    | Attach
    | AttachDevice
    | Retire
    | SetOptions
    | DropOptions
    | Chain
    | DropChains
    | RunBatch
    | OutputBuffer
    | Submit
    | InputChunks
    | CancelItems
    | PauseItems
    | ResumeItems
    | EndSequences
    | QuarantineItems
    | KvResize
    | Settle
    | UseHostOutputs
    | Fetch
    | Sleep
    | Wake
    | Close
)
FromWorker = (
    Hello
    | DeviceUp
    | AttachFailed
    | OpenProgress
    | OpenFailed
    | Ready
    | Heartbeat
    | BufferRequest
    | Suspected
    | BatchDone
    | Released
    | Settled
    | Fetched
    | OutputChunks
    | ChunkRead
    | KvResized
    | Asleep
    | Awake
)

BEAT_S = 1.0
"""Interval between heartbeats of a worker, in seconds."""

encode = msgspec.msgpack.Encoder().encode
decode_to_worker = msgspec.msgpack.Decoder(ToWorker).decode
decode_from_worker = msgspec.msgpack.Decoder(FromWorker).decode
