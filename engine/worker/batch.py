"""Batch steps: a BatchNode hosted in a worker, its view of a batch, and padding.

`HostedStep.run` executes a dispatch: it reads the inputs, runs batches, and places the outputs. `HostedStep.call` runs
one batch and returns outputs that are not placed yet, which is what a chain passes from step to step (chain.py). On a
GPU, the ports that the node reads on the device are passed as device tensors, and the node's work is queued on the
step's stream. A lost device ends the worker: DeviceLost passes through every function here.

`HostedBatch` is the node's view of a batch. It computes values on demand.

`Padding` pads inputs of different sizes to one size, so that a batch is one array, and slices the outputs back. Sizes
are those of named dims: a step that pads `T` to 64 or 128 pads every input `float32[T, 80]` to the smallest of these
sizes that fits its longest item. A size above the last one is padded to the longest item of the batch. An output dim of
the same name is sliced to each item's own size.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from weftline.engine.protocol.messages import (
    BatchDone,
    Failure,
    Item,
    ItemMetadata,
    ItemResult,
    RunBatch,
    StepRun,
    StepToOpen,
    Value,
)
from weftline.engine.protocol.packed import Row, Source
from weftline.engine.protocol.values import live, side_by_side, stacked
from weftline.engine.worker.faults import check_device, failure, free_caches, out_of_memory
from weftline.engine.worker.inbox import Cancels
from weftline.engine.worker.item_options import ItemOptions, OptionSets
from weftline.engine.worker.memory import Memory
from weftline.engine.worker.outputs import (
    HOST,
    NOT_PREALLOCATED,
    OutputPlacement,
    OutputPorts,
    Preallocated,
    with_ready_event,
)
from weftline.engine.worker.ownership import copy_aliased
from weftline.engine.worker.threads import call_unlocked, held
from weftline.errors import ModelError, StepError
from weftline.nodes.contract import Batch, BatchNode, Node
from weftline.nodes.current import Scope, within
from weftline.nodes.grouping import padded_size
from weftline.nodes.out_of_memory import is_out_of_memory
from weftline.nodes.ports import PortType
from weftline.nodes.urgency import USUAL, SequencePart, Urgency, seed_of
from weftline.shm.device.driver import DeviceLost
from weftline.shm.device.names import is_gpu
from weftline.shm.lease import EVENT_BYTES
from weftline.shm.spec import TensorSpec
from weftline.shm.view import numpy_dtype

CANCELLED = Failure("RequestCancelled", "the request was cancelled")
_NO_FAILURES: Mapping[int, Failure] = {}


class HostedStep:
    """A batch step of this worker, with its node.

    remembers:     the node may keep inputs after the call, so arrays are copied for it.
    device_inputs: the inputs that the node reads on its device; none where the worker has no device driver.
    options:       the options of its items.
    stream:        its device stream, 0 on the CPU.
    batches:       calls of the node since `begin`.
    out_of_memory: size of the largest batch since `begin` that ran out of memory.
    """

    def __init__(
        self,
        step: StepToOpen,
        node: Node,
        memory: Memory,
        cancels: Cancels | None = None,
        stream: int = 0,
        select_output: Callable[[], None] = lambda: None,
    ) -> None:
        """select_output: called before each dispatch, so that what the node prints counts as its step's."""
        if not isinstance(node, BatchNode):
            raise StepError(f"step {step.name}: {type(node).__name__} is not a BatchNode")
        self.name = step.name
        self.node = node
        self._select_output = select_output
        self.options = OptionSets(step, node)
        self.items_max = step.batch.items_max
        self.memory = memory
        self.copies_inputs = step.mutates_inputs
        self.remembers = step.remembers
        self.inputs = [name for name, _ in step.inputs]
        self.outputs = [(name, PortType.parse(type)) for name, type in step.outputs]
        self.cancels = cancels or Cancels()
        self.batches = self.out_of_memory = self._reached = 0
        self._lists = [port for port, (_, type) in enumerate(step.inputs) if type.startswith("list[")]
        self._padding = Padding.of(step)
        self._device = step.device
        self._on_gpu = memory.device is not None and is_gpu(step.device)
        self.device_inputs = frozenset(step.device_inputs if self._on_gpu else ())
        if self._on_gpu and memory.device is not None:
            stream = stream or memory.device.new_stream()
        self.stream = stream
        self.where = tuple(step.device_outputs.get(name, HOST) if self._on_gpu else HOST for name, _ in self.outputs)
        self._ports = OutputPorts(self.outputs, memory, self._on_gpu, self.copies_inputs, step.policy)
        self._placement = OutputPlacement(memory, self.where)

    def begin(self, options: int = 0) -> None:
        """Begin a dispatch. options: number of all of its items' options, where it is of a chain."""
        self._select_output()
        self.options.stage = options
        self.batches = self.out_of_memory = self._reached = 0
        self._ports.ran_out_of_memory = False

    def run(self, message: RunBatch, refused: Mapping[int, Failure] = _NO_FAILURES) -> BatchDone:
        """Run a dispatch; `refused`: failures of quarantined items, by position.

        When the result is marked unfinished, its device work is still running, as the memory's `dispatch`.
        """
        items, of = message.items, len(message.items)
        self.begin()
        self.memory.begin_dispatch()
        started = time.perf_counter()
        results: list[ItemResult | Failure] = []
        whole = (
            Preallocated.of_blocks(message.output_blocks, message.device_output_blocks)
            if message.output_blocks or message.device_output_blocks
            else None
        )
        for at in range(0, of, self.items_max):
            if at:
                self.cancels.poll()
            batch = items[at : at + self.items_max]
            if refused or self.cancels.cancelled:
                results += self._run_some(batch, at, refused)
            else:
                preallocated = NOT_PREALLOCATED if whole is None else whole.slice(at, len(batch), of)
                self._reached += len(batch)
                rows = self.call(batch, [item.inputs for item in batch], preallocated)
                results += self._placement.place(rows, preallocated.host, preallocated.device)
        ended, unfinished, moved = finish(self.memory, message, results)
        ran = StepRun((time.perf_counter() - started) * 1000, self.batches, self._reached)
        copied = self.memory.copied_bytes
        return BatchDone(message.dispatch, ended, (ran,), copied, self.out_of_memory, unfinished, moved)

    def _run_some(self, batch: Sequence[Item], at: int, refused: Mapping[int, Failure]) -> list[ItemResult | Failure]:
        """Run a batch without its refused and cancelled items; its outputs need new blocks."""
        out = {p: refused[at + p] for p in range(len(batch)) if at + p in refused}
        out |= {p: CANCELLED for p, item in enumerate(batch) if item.id in self.cancels.cancelled}
        left = [item for p, item in enumerate(batch) if p not in out]
        self._reached += len(left)
        placed = iter(self._placement.place(self.call(left, [item.inputs for item in left])) if left else ())
        return [out[p] if p in out else next(placed) for p in range(len(batch))]

    def call(
        self, items: Sequence[Item], rows: Sequence[Sequence[Source]], preallocated: Preallocated = NOT_PREALLOCATED
    ) -> list[Row | Failure]:
        """Run one batch and return each item's outputs, not yet placed, or its failure.

        aside: blocks for the outputs. When the node raises, the batch is bisected, so that only the
        faulty item fails.
        """
        dispatch = self.memory.dispatch
        taken = 0 if dispatch is None else dispatch.scratch_count
        try:
            return self._call(items, rows, preallocated) if self._on_gpu else self._compute(items, rows, preallocated)
        except DeviceLost:
            raise
        except Exception as error:
            no_memory = is_out_of_memory(error)
            failed = None  # of several items, each half is retried on its own
            if len(items) == 1:
                failed = out_of_memory(error) if no_memory else failure(error)
        check_device(self.memory.device, self._device)  # an error is the item's own only if the device still works
        if self._on_gpu and dispatch is not None:
            dispatch.free_scratch_since(taken)
        if no_memory:
            self.out_of_memory = max(self.out_of_memory, len(items))
            self.free_memory()
        count = len(items)
        if failed is not None:
            return [failed]
        half = count // 2
        left = self.call(items[:half], rows[:half], preallocated.slice(0, half, count))
        copy_aliased(left, rows[:half], self.memory)
        return left + self.call(items[half:], rows[half:], preallocated.slice(half, count - half, count))

    def settle(
        self,
        position: int,
        outputs: dict[str, Any],
        rows: Sequence[Sequence[Source]],
        call_inputs: Sequence[tuple[Any, ...]],
        preallocated: Preallocated,
        padded: Padded | None,
    ) -> None:
        """Pack an item's outputs during the node's call; later writes by the node do not change them.

        Replaces the values in `outputs`, except exceptions. StepError when a value does not match its port's type.
        """
        row: list[Any] = []
        for port, (name, _) in enumerate(self.outputs):
            value = outputs.pop(name)
            if not isinstance(value, BaseException):
                value = value if padded is None else padded.unpad(name, value, position)
                value = self._ports.check_value(value, port, position, rows[position], call_inputs, preallocated)
            row.append(value)
            del value  # only the row may reference it
        copy_aliased([row], [rows[position]], self.memory)
        outputs.update(zip((name for name, _ in self.outputs), row))

    def is_device_output(self, port: int) -> bool:
        """Return whether an output is placed in the device arena."""
        return self._placement.placement_of(port) != HOST

    def free_memory(self) -> None:
        """Free cached device memory."""
        free_caches()
        if self.memory.device is not None:
            self.memory.device.scratch.trim()

    def _call(
        self, items: Sequence[Item], rows: Sequence[Sequence[Source]], preallocated: Preallocated
    ) -> list[Row | Failure]:
        device, dispatch = self.memory.device, self.memory.dispatch
        if device is None or dispatch is None:
            return self._compute(items, rows, preallocated)
        dispatch.begin_step(self.stream)
        with device.use_stream(self.stream):  # torch also uses it for checks of the outputs
            return self._compute(items, rows, preallocated)

    def _compute(
        self, items: Sequence[Item], rows: Sequence[Sequence[Source]], preallocated: Preallocated
    ) -> list[Row | Failure]:
        self.batches += 1
        if self.memory.device is None:
            arenas = self.memory.arenas
            columns = [[live(source, arenas) for source in column] for column in zip(*rows)]
            if self.copies_inputs:
                columns = [list(map(_writable_copy, column)) for column in columns]
            elif self.remembers:
                columns = [list(map(read_only_copy, column)) for column in columns]
        else:
            columns = [self._column(name, column) for name, column in zip(self.inputs, zip(*rows))]
        call_inputs = [tuple(column) for column in columns]  # as passed to the node, which may change the lists
        for port in self._lists:
            call_inputs[port] = tuple(map(_frozen, columns[port]))
        values = dict(zip(self.inputs, columns))
        padded = self._padding.pad(values) if self._padding is not None else None
        if self._on_gpu and self.memory.dispatch is not None:
            self.memory.dispatch.before_call()
        batch = HostedBatch(self, items, rows, values, call_inputs, preallocated, padded)
        if self.options.any:
            batch.configs = self.options.select(self.node, items)
            self._ports.finite = [self.options.of(item).policy.finite for item in items]
        with within(Scope(batch)):
            lock = self.memory.lock
            returned = self.node.run(batch) if lock is None else call_unlocked(lock, self.node.run, batch)
            outputs = self._ports.check_columns(returned, len(items))
            if padded is not None:
                outputs = {n: [padded.unpad(n, v, at) for at, v in enumerate(outputs[n])] for n, _ in self.outputs}
            made = self._ports.check_rows(outputs, rows, call_inputs, preallocated)
        if self._ports.ran_out_of_memory:
            self.out_of_memory = max(self.out_of_memory, 1)
        return made

    def _column(self, name: str, sources: Sequence[Source]) -> list[Any]:
        """Return a port's values in a worker with a device, one per item."""
        if name in self.device_inputs and self.memory.dispatch is not None:
            return self.memory.dispatch.device_column(sources, self.copies_inputs)
        column = [self.memory.live(source) for source in sources]
        if self.copies_inputs:
            return [_writable_copy(value) for value in column]
        return [read_only_copy(value) for value in column] if self.remembers else column


def finish(
    memory: Memory, message: RunBatch, results: Sequence[ItemResult | Failure]
) -> tuple[tuple[ItemResult | Failure, ...], bool, int]:
    """End a dispatch: return its results, whether its device work is unfinished, and bytes moved."""
    if memory.dispatch is None:
        return tuple(results), False, 0
    moved = memory.dispatch.moved_bytes
    if not memory.end_dispatch(message.ready) or message.ready is None:
        return tuple(results), False, moved
    written = memory.dispatch.written_blocks.union(block.key for block in message.device_output_blocks.values())
    return with_ready_event(results, written, message.ready.place(0, EVENT_BYTES)), True, moved


def _writable_copy(value: Any) -> Any:
    """Return a writable copy for a node."""
    if isinstance(value, np.ndarray):
        return value.copy()
    return [_writable_copy(one) for one in value] if isinstance(value, list) else value


def read_only_copy(value: Any) -> Any:
    """Return a read-only copy, for a node that may read it after the input's lease has ended."""
    if isinstance(value, np.ndarray):
        value = value.copy()
        value.flags.writeable = False
        return value
    return [read_only_copy(one) for one in value] if isinstance(value, list) else value


def _frozen(value: Any) -> Any:
    """Return a list as a tuple, recursively: the node may change the list."""
    return tuple(map(_frozen, value)) if isinstance(value, list) else value


class HostedBatch(Batch):
    """A batch of items from a message or from an earlier step of a chain."""

    __slots__ = ("_call_inputs", "_items", "_padded", "_preallocated", "_rows", "_step")

    def __init__(
        self,
        step: HostedStep,
        items: Sequence[Item],
        rows: Sequence[Sequence[Source]],
        values: Mapping[str, Sequence[Any]],
        call_inputs: Sequence[tuple[Any, ...]],
        preallocated: Preallocated,
        padded: Padded | None,
    ) -> None:
        self.configs = ()
        self._step = step
        self._items = items
        self._rows = rows
        self._values = values
        self._call_inputs = call_inputs
        self._preallocated = preallocated
        self._padded = padded

    @property
    def ids(self) -> tuple[int, ...]:  # type: ignore[override]
        return tuple(item.id for item in self._items)

    def __len__(self) -> int:
        return len(self._items)

    def stacked(self, port: str) -> Any:
        with held(self._step.memory.lock):
            return self._stacked_now(port)

    def _stacked_now(self, port: str) -> Any:
        values = self._values[port]
        dispatch = self._step.memory.dispatch
        if dispatch is not None and port in self._step.device_inputs:
            return values[0].reshape(1, *values[0].shape) if len(values) == 1 else dispatch.stack(values)
        if len(values) == 1:
            return np.asarray(values[0])[None]
        if self._padded is not None and port in self._padded.lengths:
            whole = self._padded.whole.get(port)
        elif self._step.copies_inputs or self._step.remembers:
            whole = None
        else:
            index = self._step.inputs.index(port)
            sources = [source for row in self._rows if isinstance(source := row[index], Value)]
            travelled = len(sources) == len(values)
            whole = stacked(sources, self._step.memory.arenas) if travelled else side_by_side(values)
        return np.stack(values) if whole is None else whole

    def output_buffer(self, port: str, dtype: str, shape: tuple[int, ...]) -> Any:
        with held(self._step.memory.lock):
            return self._output_buffer_now(port, dtype, shape)

    def _output_buffer_now(self, port: str, dtype: str, shape: tuple[int, ...]) -> Any:
        index = next((i for i, (name, _) in enumerate(self._step.outputs) if name == port), -1)
        device = self._preallocated.device.get(index)
        if device is not None:
            return self._step.memory.tensor_in(device, TensorSpec(dtype, (len(self), *shape)))
        if index >= 0 and self._step.is_device_output(index):
            return None  # a block in host memory is not where the device reads it
        place = self._preallocated.host.get(index)
        if place is None:
            return None
        return self._step.memory.array_in(place, numpy_dtype(dtype), (len(self), *shape))

    def settle(self, position: int, outputs: dict[str, Any]) -> None:
        with held(self._step.memory.lock):
            self._step.settle(position, outputs, self._rows, self._call_inputs, self._preallocated, self._padded)

    def cancelled(self, position: int) -> bool:
        return self._step.cancels.has(self._items[position].id)

    def lengths(self, port: str) -> Sequence[int]:
        if self._padded is None:
            raise KeyError(port)
        return self._padded.lengths[port]

    def urgency(self, position: int) -> Urgency:
        item = self._items[position]
        return urgency_of(item.metadata, self._step.options.of(item))


def urgency_of(metadata: ItemMetadata | None, options: ItemOptions) -> Urgency:
    """Return an item's metadata as the node contract's Urgency."""
    if metadata is None:
        return USUAL
    sequence = SequencePart(metadata.sequence, metadata.start, metadata.end) if metadata.sequence else None
    seed = None if metadata.seed is None else seed_of(metadata.seed, options.name, metadata.element)
    return Urgency(metadata.priority, metadata.left_ms, sequence, seed, metadata.caller, options.program)


@dataclass(slots=True)
class Padded:
    """The padding of one batch.

    lengths: for each padded input port, every item's unpadded size along its (first) padded axis.
    whole:   padded ports as one array [items, ...], where the items have one shape.
    sizes:   for each padded dim, every item's unpadded size.
    axes:    for each output port with padded dims, (axis, dim).
    """

    axes: Mapping[str, Sequence[tuple[int, str]]]
    lengths: dict[str, list[int]] = field(default_factory=dict)
    whole: dict[str, np.ndarray] = field(default_factory=dict)
    sizes: dict[str, list[int]] = field(default_factory=dict)

    def unpad(self, port: str, value: Any, position: int) -> Any:
        """Slice one item's output to its unpadded size."""
        for axis, dim in self.axes.get(port, ()):
            if dim in self.sizes and getattr(value, "ndim", 0) > axis:
                value = value[(slice(None),) * axis + (slice(self.sizes[dim][position]),)]
        return value


@dataclass(frozen=True, slots=True)
class Padding:
    """The padding of one step. inputs, outputs: the padded (axis, dim) by port."""

    buckets: Mapping[str, Sequence[int]]
    inputs: Mapping[str, Sequence[tuple[int, str]]]
    outputs: Mapping[str, Sequence[tuple[int, str]]]
    fill: Mapping[str, Any]

    @classmethod
    def of(cls, step: StepToOpen) -> Padding | None:
        """Return the padding of a step, None without; ModelError for a pad value that its dtype cannot hold."""
        if not step.batch.pad:
            return None
        inputs = {name: axes for name, type in step.inputs if (axes := _axes(type, step.batch.pad))}
        outputs = {name: axes for name, type in step.outputs if (axes := _axes(type, step.batch.pad))}
        padded = [(name, PortType.parse(type).dtype) for name, type in step.inputs if name in inputs]
        fill = {name: _filler(dtype, step.batch.pad_value) for name, dtype in padded}
        return cls({dim: tuple(sorted(sizes)) for dim, sizes in step.batch.pad.items()}, inputs, outputs, fill)

    def pad(self, columns: dict[str, list[Any]]) -> Padded:
        """Pad these columns in place; absent values stay None, with size 0."""
        done = Padded(self.outputs)
        for port, axes in self.inputs.items():
            for axis, dim in axes:
                own = [0 if value is None else int(value.shape[axis]) for value in columns[port]]
                known = done.sizes.setdefault(dim, own)
                done.sizes[dim] = [max(pair) for pair in zip(known, own, strict=True)]
                done.lengths.setdefault(port, own)
        sizes = {dim: padded_size(max(found, default=0), self.buckets[dim]) for dim, found in done.sizes.items()}
        for port, axes in self.inputs.items():
            whole = _pad(columns[port], [(axis, sizes[dim]) for axis, dim in axes], self.fill[port])
            if whole is not None:
                done.whole[port] = whole
        return done


def _pad(column: list[Any], wanted: Sequence[tuple[int, int]], fill: Any) -> np.ndarray | None:
    """Pad the arrays of a column along (axis, size); returns the stacked array if the padded arrays form one."""
    shapes = []
    for value in column:
        shape = [] if value is None else list(value.shape)
        for axis, size in wanted if value is not None else ():
            shape[axis] = size
        shapes.append(tuple(shape))
    if all(value is not None and value.shape == shape for value, shape in zip(column, shapes, strict=True)):
        return None  # all have this size: they may already be contiguous
    if None in [None if value is None else 0 for value in column] or len(set(shapes)) > 1:
        column[:] = [
            None if value is None else _into(value, np.empty(shape, value.dtype), fill)
            for value, shape in zip(column, shapes, strict=True)
        ]
        return None
    whole = np.empty((len(column), *shapes[0]), column[0].dtype)
    column[:] = [_into(value, row, fill) for value, row in zip(column, whole, strict=True)]
    return whole


def _into(value: np.ndarray, out: np.ndarray, fill: Any) -> np.ndarray:
    out[...] = fill
    out[tuple(slice(size) for size in value.shape)] = value
    return out


def _axes(type: str, pad: Mapping[str, Sequence[int]]) -> list[tuple[int, str]]:
    dims = PortType.parse(type).dims or ()
    return [(axis, dim) for axis, dim in enumerate(dims) if isinstance(dim, str) and dim in pad]


def _filler(dtype: str | None, value: float) -> Any:
    """Return the pad value for `dtype`; for a dtype that numpy lacks, its bit pattern."""
    if dtype == "bfloat16":
        return np.float32(value).view(np.uint32) >> 16
    if dtype is not None and dtype.startswith("float8") and value:
        raise ModelError(f"batch.pad_value: {value} cannot be filled into {dtype}; only 0 can")
    return value if dtype is None or dtype.startswith(("float", "complex")) else int(value)
