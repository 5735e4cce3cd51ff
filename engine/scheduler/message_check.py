"""Compare messages of workers with the work that was sent to them. Pure.

The decoder (`engine/protocol/messages.py`) bounds each field by itself: times are finite, counts are not negative,
texts are short. Here fields are compared with the plan and the worker's state: ids and names of steps, the stages,
batches and items of a dispatch, sizes, and for each output its kind, dtype, shape, size in bytes and lease. A worker
that sends another message is killed; its items are handled like those of any death.

An output may be in a block that was leased for its dispatch, or in one of its own inputs. A place in a block of another
request would be that request's data.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from typing import Any

from weftline.engine.protocol import messages as msg
from weftline.engine.protocol.messages import Value
from weftline.engine.scheduler.routes import Form, Unit
from weftline.engine.scheduler.state import SchedulerState
from weftline.engine.scheduler.workers import Dispatch
from weftline.errors import InputError
from weftline.nodes.ports import Dim, PortType
from weftline.shm.block import INLINE_BYTES_MAX, PAGE_BYTES, Block, Key, align_up
from weftline.shm.spec import byte_size

LIST_ITEMS_MAX = 65_536
"""Longest list that a value may be."""

ARRAYS = {"tensor": None, "image": "uint8", "audio": "float32"}
"""Kinds that have a dtype and a shape, with their dtype; None: as in the port's type."""

BYTES_KINDS = frozenset({"text", "json", "bytes", "detections"})
CALLS_PER_ITEM_MAX = 4
"""Most calls of a node for each item: a batch of n that all fail is halved to single items, 2 n - 1 calls."""

LATE_MS = 60_000.0
"""Time over its limit that a dispatch may have run: its worker is killed for it, but its answer may arrive first."""


def fault(state: SchedulerState, worker_id: int, message: msg.FromWorker) -> str:
    """Return what is wrong with a message; '' if it can come from this worker at this time. BatchDone: `result_fault`.

    It is called only for messages of the types in CHECKED.
    """
    return _CHECKS[type(message)](state, worker_id, message)


def _hello(state: SchedulerState, worker_id: int, message: msg.Hello) -> str:
    most = align_up(state.deployed.workers[worker_id].arena_bytes, PAGE_BYTES)
    return "" if 0 < message.arena_bytes <= most else f"its arena has {message.arena_bytes} bytes, planned are {most}"


def _names_step(state: SchedulerState, worker_id: int, message: msg.OpenProgress | msg.OpenFailed) -> str:
    return _foreign_step(state, worker_id, [message.step])


def _ready(state: SchedulerState, worker_id: int, message: msg.Ready) -> str:
    return _foreign_step(state, worker_id, chain(message.opened_ms, message.warm_ms, message.device_use))


def _foreign_step(state: SchedulerState, worker_id: int, names: Iterable[str]) -> str:
    own = {queue.name for queue in state.queues_of[worker_id]}
    other = next((name for name in names if name not in own), None)
    return "" if other is None else f"it reported step {other!r:.60}, which it does not run"


def _heartbeat(state: SchedulerState, worker_id: int, message: msg.Heartbeat) -> str:
    own = state.steps_of[worker_id]
    for reports in (message.memory, message.figures):
        if len(reports) > len(own) or any(one.step not in own for one in reports):
            return "it sent statistics for a step that it does not run"
    return ""


def _buffer_request(state: SchedulerState, worker_id: int, message: msg.BufferRequest) -> str:
    worker = state.workers[worker_id]
    count = len(message.sizes) + len(message.device_sizes)
    dispatched = sum(len(one.tasks) * len(one.unit.returns) for one in worker.running)
    streamed = sum(len(task.unit.returns) for task in worker.streams.values())
    copies = sum(len(asked.values) for token, asked in state.host_copies.items() if token in worker.fetches)
    most = LIST_ITEMS_MAX + dispatched + streamed + copies
    return f"it requested {count} blocks for {most} values" if count > most else ""


def _suspected(state: SchedulerState, worker_id: int, message: msg.Suspected) -> str:
    worker = state.workers[worker_id]
    if message.streams:
        fits = len(message.digests) == len(message.streams)
        fits = fits and all(worker.streams[id].deaths for id in message.streams if id in worker.streams)
    else:
        running = next((one for one in worker.heads if one.id == message.dispatch), None)
        fits = running is None or (running.suspect and len(running.tasks) == len(message.digests))
    return "" if fits else "it sent digests of other items"


def _output_chunks(state: SchedulerState, worker_id: int, message: msg.OutputChunks) -> str:
    for piece in message.pieces:
        task = state.workers[worker_id].streams.get(piece.item)
        if task is None or task.unit.deployment != message.step:
            continue
        ports = len(task.unit.returns)
        if any(port >= ports for port in piece.outputs) or (piece.failure is not None and piece.failure.stage):
            return "it sent a chunk of an output that its step does not have"
        if piece.failure is not None and not piece.last:
            return "it sent a failure before the last chunk of an item"
        for port, value in piece.outputs.items() if not piece.last else ():
            type = task.unit.types[port]
            if type is not None and not _fits(value, type, chunk=True):
                return f"it sent a chunk that is no {type}"
    return ""


_CHECKS: Mapping[type, Callable[[SchedulerState, int, Any], str]] = {
    msg.Hello: _hello,
    msg.OpenProgress: _names_step,
    msg.OpenFailed: _names_step,
    msg.Ready: _ready,
    msg.Heartbeat: _heartbeat,
    msg.BufferRequest: _buffer_request,
    msg.Suspected: _suspected,
    msg.OutputChunks: _output_chunks,
}

CHECKED = frozenset(_CHECKS)


def result_fault(dispatch: Dispatch, message: msg.BatchDone) -> str:
    """Return which figure of a BatchDone cannot be that of its dispatch; '' for none."""
    unit, items = dispatch.unit, len(dispatch.tasks)
    if len(message.results) != items:
        return "it returned results of a batch that is not running"
    if len(message.ran) > len(unit.steps):
        return f"it returned figures of {len(message.ran)} stages for a dispatch of {len(unit.steps)}"
    calls_max = CALLS_PER_ITEM_MAX * items
    for one in message.ran:
        late = one.run_ms > LATE_MS and one.run_ms > 2 * dispatch.limit_ms + LATE_MS
        if late or one.items > items or one.batches > calls_max:
            return f"it returned figures that {items} items cannot have: {one}"
    if message.out_of_memory > items:
        return f"it ran out of memory at {message.out_of_memory} items and had {items}"
    return ""


def failure_fault(unit: Unit, failure: msg.Failure) -> str:
    """Return whether a failure is of a stage that its dispatch does not have; '' otherwise."""
    stages = len(unit.steps)
    if failure.stage < stages:
        return ""
    return f"it returned a failure of a stage that is not among the {stages} of its dispatch"


def outputs_fault(unit: Unit, outputs: Sequence[Value]) -> str:
    """Return which output of an item does not match its port; '' for none. Leases: `foreign`."""
    if len(outputs) != len(unit.returns):
        return f"it returned {len(outputs)} outputs, and its step has {len(unit.returns)}"
    for type, seen, value in zip(unit.types, unit.forms, outputs):
        if type is None or seen is None:
            continue
        data = value.data
        form = None
        if (
            data is not None
            and len(data) <= INLINE_BYTES_MAX
            and value.place is None
            and value.items is None
            and value.device_place is None
            and value.ready is None
        ):
            form = value.kind, value.dtype, value.shape, 0 if value.kind in BYTES_KINDS else len(data)
            if form in seen:
                continue
        if not _fits(value, type):
            return f"it returned {_shown(value)} for an output of type {type}"
        if form is not None and len(value.shape) <= DIMS_KEPT:
            _keep_form(seen, form)
    return ""


def _keep_form(seen: set[Form], form: Form) -> None:
    """Remember that inline values of this form fit their port: whether one does follows from its form alone."""
    if len(seen) >= FORMS_KEPT:
        seen.clear()
    seen.add(form)


def foreign(outputs: Iterable[Value], inputs: Iterable[Key], blocks: Iterable[Block]) -> bool:
    """Return whether outputs lie in memory that is neither an input of their item nor leased for it."""
    own = {*inputs, *(block.key for block in blocks)}
    return any(key not in own for value in outputs if value.data is None for key in value.keys)


FORMS_KEPT, DIMS_KEPT = 256, 8
"""Most remembered forms of a port, and most dimensions of a remembered shape; a worker's message may have more."""

_size_of = functools.lru_cache(1024)(byte_size)


def _fits(value: Value, type: PortType, chunk: bool = False) -> bool:
    """Return whether a value is one of this type, with as many bytes as its dtype and shape take.

    chunk: it is a part of a streamed value: its bytes are inline, and its shape may differ.
    """
    kind = value.kind
    if type.kind not in (kind, "any"):
        return False
    if value.data is not None and (value.items is not None or value.keys or value.device_place is not None):
        return False
    if kind == "list":
        return _is_list(value, type.item)
    if value.items is not None:
        return False
    if kind in BYTES_KINDS:
        size = _bytes(value, chunk)
        return size is not None and not (value.dtype or value.shape or value.device_place or value.ready)
    if kind not in ARRAYS:
        return False
    size = _bytes(value, chunk)
    dtype = type.dtype or ARRAYS[kind]
    try:
        sized = _size_of if len(value.shape) <= DIMS_KEPT else byte_size
        whole = sized(value.dtype, value.shape) == size
    except InputError:
        return False
    return whole and (dtype is None or dtype == value.dtype) and (chunk or _has_dims(value.shape, kind, type.dims))


def _is_list(value: Value, item: PortType | None) -> bool:
    if value.items is None or len(value.items) > LIST_ITEMS_MAX or value.place or value.device_place or value.ready:
        return False
    type = item or PortType("any")
    return not (value.dtype or value.shape) and all(_fits(one, type) for one in value.items)


def _bytes(value: Value, chunk: bool) -> int | None:
    """Return the size of a value's bytes; None where it has none, or two places of different size."""
    if value.data is not None:
        return len(value.data) if chunk or len(value.data) <= INLINE_BYTES_MAX else None
    sizes = {place.size_bytes for place in (value.place, value.device_place) if place is not None}
    return sizes.pop() if len(sizes) == 1 else None


def _has_dims(shape: tuple[int, ...], kind: str, dims: tuple[Dim, ...] | None) -> bool:
    if kind == "image":
        return len(shape) == 3 and shape[2] == 3
    if kind == "audio":
        return len(shape) == 1
    if dims is None or (len(dims) == 1 == len(shape) and dims[0].__class__ is str):  # fast path: most ports
        return True
    named: dict[str, int] = {}
    return len(dims) == len(shape) and all(
        size == (dim if isinstance(dim, int) else size if dim == "?" else named.setdefault(dim, size))
        for dim, size in zip(dims, shape)
    )


def _shown(value: Value) -> str:
    return f"{value.kind!r:.20} of {value.size_bytes} bytes"
