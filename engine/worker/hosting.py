"""A batch node inside its worker: inputs in, batches run, outputs out.

A HostedStep knows its node and its ports, and nothing of sockets. `run` does a dispatch of its own; `call` does one
batch on values of any origin and leaves what it gives where it is, which is what a chain hands from step to step.

On a GPU the ports that the node takes there are given as tensors on the device, and the node's work goes on the step's
own stream. A device that is lost ends the worker: DeviceLost goes through everything here.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from weftline.engine.messages import Done, Failure, Given, Item, Ran, Run, StepToOpen
from weftline.engine.packed import Row, Source
from weftline.engine.values import live
from weftline.engine.worker.batch import HostedBatch
from weftline.engine.worker.faults import failure, free_caches, out_of_memory
from weftline.engine.worker.giving import HOST, Giving, marked
from weftline.engine.worker.inbox import Cancels
from weftline.engine.worker.memory import Memory
from weftline.engine.worker.outputs import NOTHING_ASIDE, Aside, OutputPorts
from weftline.engine.worker.padding import Padding
from weftline.errors import StepError
from weftline.nodes.contract import BatchNode, Node
from weftline.nodes.ports import PortType
from weftline.nodes.want_of_memory import is_out_of_memory
from weftline.shm.device.driver import DeviceLost
from weftline.shm.device.names import is_gpu
from weftline.shm.lease import EVENT_BYTES

CANCELLED = Failure("RequestCancelled", "nobody waits for it any more")
_NOBODY: Mapping[int, Failure] = {}


class HostedStep:
    """One step of this worker, with its node.

    near:          the inputs that the node is given on its device; none where the worker has no way to the device.
    stream:        that of its work there, 0 on the CPU.
    batches:       calls of the node since `begin`.
    out_of_memory: items of the largest batch since `begin` for which there was no memory.
    """

    def __init__(
        self, step: StepToOpen, node: Node, memory: Memory, cancels: Cancels | None = None, stream: int = 0
    ) -> None:
        if not isinstance(node, BatchNode):
            raise StepError(f"step {step.name}: {type(node).__name__} is no BatchNode")
        self.name = step.name
        self.node = node
        self.items_max = step.items_max
        self.memory = memory
        self.copies_inputs = step.mutates_inputs
        self.inputs = [name for name, _ in step.inputs]
        self.outputs = [(name, PortType.parse(type)) for name, type in step.outputs]
        self.cancels = cancels or Cancels()
        self.batches = self.out_of_memory = self._reached = 0
        self._lists = [port for port, (_, type) in enumerate(step.inputs) if type.startswith("list[")]
        self._padding = Padding.of(step)
        self._on_gpu = memory.near is not None and is_gpu(step.device)
        self.near = frozenset(step.near_inputs if self._on_gpu else ())
        if self._on_gpu and memory.near is not None:
            stream = stream or memory.near.stream()
        self.stream = stream
        self.where = tuple(step.near_outputs.get(name, HOST) if self._on_gpu else HOST for name, _ in self.outputs)
        self._ports = OutputPorts(self.outputs, memory, self._on_gpu, self.copies_inputs, step.finite)
        self._giving = Giving(memory, self.where)

    def begin(self) -> None:
        self.batches = self.out_of_memory = self._reached = 0
        self._ports.lacked_memory = False

    def run(self, message: Run, refused: Mapping[int, Failure] = _NOBODY) -> Done:
        """Do a dispatch; `refused` items, by position, have their result already.

        When the answer says that it is unfinished, its work goes on on the device, as the memory's `work`.
        """
        items, of = message.items, len(message.items)
        self.begin()
        self.memory.begin()
        started = time.perf_counter()
        results: list[Given | Failure] = []
        whole = Aside.of_blocks(message.room, message.near_room) if message.room or message.near_room else None
        for at in range(0, of, self.items_max):
            if at:
                self.cancels.look()
            batch = items[at : at + self.items_max]
            if refused or self.cancels.gone:
                results += self._run_some(batch, at, refused)
            else:
                aside = NOTHING_ASIDE if whole is None else whole.part(at, len(batch), of)
                self._reached += len(batch)
                rows = self.call(batch, [item.inputs for item in batch], aside)
                results += self._giving.give(rows, aside.host, aside.near)
        ended, unfinished, moved = finish(self.memory, message, results)
        ran = Ran((time.perf_counter() - started) * 1000, self.batches, self._reached)
        copied = self.memory.copied_bytes
        return Done(message.dispatch, ended, (ran,), copied, self.out_of_memory, unfinished, moved)

    def _run_some(self, batch: Sequence[Item], at: int, refused: Mapping[int, Failure]) -> list[Given | Failure]:
        """Run a batch without its refused and cancelled items; it asks for room of its own."""
        out = {p: refused[at + p] for p in range(len(batch)) if at + p in refused}
        out |= {p: CANCELLED for p, item in enumerate(batch) if item.id in self.cancels.gone}
        left = [item for p, item in enumerate(batch) if p not in out]
        self._reached += len(left)
        given = iter(self._giving.give(self.call(left, [item.inputs for item in left])) if left else ())
        return [out[p] if p in out else next(given) for p in range(len(batch))]

    def call(
        self, items: Sequence[Item], rows: Sequence[Sequence[Source]], aside: Aside = NOTHING_ASIDE
    ) -> list[Row | Failure]:
        """Run one batch on these inputs and return each item's outputs, not yet placed, or why it has none.

        aside: where outputs may be written. When the node raises, the halves of the batch are run apart, so that only
        the item at fault fails.
        """
        work = self.memory.work
        taken = 0 if work is None else work.taken
        try:
            return self._call(items, rows, aside) if self._on_gpu else self._compute(items, rows, aside)
        except DeviceLost:
            raise
        except Exception as error:
            no_memory = is_out_of_memory(error)
            told = out_of_memory(error) if no_memory else failure(error)
        if self._on_gpu and self.memory.near is not None:
            self.memory.near.check()  # whose fault it was is known only while the device can be used
            if work is not None:
                work.give_up(taken)
        if no_memory:
            self.out_of_memory = max(self.out_of_memory, len(items))
            self.free_memory()
        count = len(items)
        if count == 1:
            return [told]
        half = count // 2
        left = self.call(items[:half], rows[:half], aside.part(0, half, count))
        return left + self.call(items[half:], rows[half:], aside.part(half, count - half, count))

    def gives_near(self, port: int) -> bool:
        """Whether an output is placed in the device arena, for readers there."""
        return self._giving.where_of(port) != HOST

    def free_memory(self) -> None:
        """Give back what is kept of the device for later."""
        free_caches()
        if self.memory.near is not None:
            self.memory.near.scratch.trim()

    def _call(self, items: Sequence[Item], rows: Sequence[Sequence[Source]], aside: Aside) -> list[Row | Failure]:
        near, work = self.memory.near, self.memory.work
        if near is None or work is None:
            return self._compute(items, rows, aside)
        work.begin(self.stream)
        with near.on(self.stream):  # what is looked at afterwards is still torch's work, and in its turn
            return self._compute(items, rows, aside)

    def _compute(self, items: Sequence[Item], rows: Sequence[Sequence[Source]], aside: Aside) -> list[Row | Failure]:
        self.batches += 1
        if self.memory.near is None:
            arenas = self.memory.arenas
            columns = [[live(source, arenas) for source in column] for column in zip(*rows)]
            if self.copies_inputs:
                columns = [list(map(_private, column)) for column in columns]
        else:
            columns = [self._column(name, column) for name, column in zip(self.inputs, zip(*rows))]
        came = [tuple(column) for column in columns]  # as they were given out: a node may change the lists
        for port in self._lists:
            came[port] = tuple(map(_fixed, columns[port]))
        values = dict(zip(self.inputs, columns))
        padded = self._padding.pad(values) if self._padding is not None else None
        if self._on_gpu and self.memory.work is not None:
            self.memory.work.launch()
        given = self.node.run(HostedBatch(self, items, rows, values, aside, padded))
        outputs = self._ports.check(given, len(items))
        if padded is not None:
            outputs = {n: [padded.cut(n, v, at) for at, v in enumerate(outputs[n])] for n, _ in self.outputs}
        made = self._ports.rows(outputs, rows, came, aside)
        if self._ports.lacked_memory:
            self.out_of_memory = max(self.out_of_memory, 1)
        return made

    def _column(self, name: str, sources: Sequence[Source]) -> list[Any]:
        """Return a port's values as the node of a worker with a device sees them, one for each item."""
        if name in self.near and self.memory.work is not None:
            return self.memory.work.column(sources, self.copies_inputs)
        column = [self.memory.live(source) for source in sources]
        return [_private(value) for value in column] if self.copies_inputs else column


def finish(
    memory: Memory, message: Run, results: Sequence[Given | Failure]
) -> tuple[tuple[Given | Failure, ...], bool, int]:
    """Be done with a dispatch: return its results, whether it goes on on the device, and the bytes moved there."""
    if memory.work is None:
        return tuple(results), False, 0
    moved = memory.work.moved_bytes
    if not memory.end(message.ready) or message.ready is None:
        return tuple(results), False, moved
    written = memory.work.blocks.union(block.key for block in message.near_room.values())
    return marked(results, written, message.ready.place(0, EVENT_BYTES)), True, moved


def _private(value: Any) -> Any:
    """Return a copy that a node may write into."""
    if isinstance(value, np.ndarray):
        return value.copy()
    return [_private(one) for one in value] if isinstance(value, list) else value


def _fixed(value: Any) -> Any:
    """Return a list as it is now: the node it is given to may change it."""
    return tuple(map(_fixed, value)) if isinstance(value, list) else value
