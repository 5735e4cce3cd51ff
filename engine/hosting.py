"""A batch node inside its worker: inputs in, batches run, outputs out.

A HostedStep knows its node and its ports, and nothing of sockets. `run` does a dispatch of its own; `call` does one
batch on values of any origin and leaves what it gives where it is, which is what a chain hands from step to step.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from weftline.engine.batch import HostedBatch
from weftline.engine.faults import failure, free_caches, is_out_of_memory, out_of_memory
from weftline.engine.inbox import Cancels
from weftline.engine.memory import Memory, Row, Source
from weftline.engine.messages import Done, Failure, Given, Item, Ran, Run, StepToOpen, Value
from weftline.engine.padding import Padding
from weftline.engine.values import ARRAYS, is_of, live, pack
from weftline.errors import InputError, StepError
from weftline.nodes.contract import BatchNode, Node, Outputs
from weftline.nodes.ports import PortType
from weftline.shm.block import INLINE_BYTES_MAX, Block, Place

CANCELLED = Failure("RequestCancelled", "nobody waits for it any more")
_PASSED_ON = (*ARRAYS, "text", "bytes")
"""Kinds whose values a node cannot have changed: when it gives one back, it goes on as it came."""

_NOTHING: Mapping[int, Any] = {}


class HostedStep:
    """One step of this worker, with its node.

    batches:       calls of the node since `begin`.
    out_of_memory: items of the largest batch since `begin` for which there was no memory.
    """

    def __init__(self, step: StepToOpen, node: Node, memory: Memory, cancels: Cancels | None = None) -> None:
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

    def begin(self) -> None:
        self.batches = self.out_of_memory = self.memory.copied_bytes = self._reached = 0

    def run(self, message: Run, refused: Mapping[int, Failure] = _NOTHING) -> Done:
        """Do a dispatch; `refused` items, by position, have their result already."""
        items, of = message.items, len(message.items)
        self.begin()
        started = time.perf_counter()
        results: list[Given | Failure] = []
        for at in range(0, of, self.items_max):
            if at:
                self.cancels.look()
            batch = items[at : at + self.items_max]
            if refused or self.cancels.gone:
                results += self._run_some(batch, at, refused)
            else:
                rooms = _rooms(message.room, at, len(batch), of) if message.room else _NOTHING
                self._reached += len(batch)
                rows = self.call(batch, [item.inputs for item in batch], rooms)
                results += self.memory.give(rows, rooms)
        ran = Ran((time.perf_counter() - started) * 1000, self.batches, self._reached)
        return Done(message.dispatch, tuple(results), (ran,), self.memory.copied_bytes, self.out_of_memory)

    def _run_some(self, batch: Sequence[Item], at: int, refused: Mapping[int, Failure]) -> list[Given | Failure]:
        """Run a batch without its refused and cancelled items; it asks for room of its own."""
        out = {p: refused[at + p] for p in range(len(batch)) if at + p in refused}
        out |= {p: CANCELLED for p, item in enumerate(batch) if item.id in self.cancels.gone}
        left = [item for p, item in enumerate(batch) if p not in out]
        self._reached += len(left)
        given = iter(self.memory.give(self.call(left, [item.inputs for item in left]), _NOTHING) if left else ())
        return [out[p] if p in out else next(given) for p in range(len(batch))]

    def call(
        self, items: Sequence[Item], rows: Sequence[Sequence[Source]], rooms: Mapping[int, Place] = _NOTHING
    ) -> list[Row | Failure]:
        """Run one batch on these inputs and return each item's outputs, not yet placed, or why it has none.

        rooms: where outputs may be written, by port. When the node raises, the halves of the batch are run apart, so
        that only the item at fault fails.
        """
        try:
            return self._call(items, rows, rooms)
        except Exception as error:
            no_memory = is_out_of_memory(error)
            told = out_of_memory(error) if no_memory else failure(error)
        if no_memory:
            self.out_of_memory = max(self.out_of_memory, len(items))
            free_caches()
        count = len(items)
        if count == 1:
            return [told]
        half = count // 2
        left = self.call(items[:half], rows[:half], _part(rooms, 0, half, count))
        return left + self.call(items[half:], rows[half:], _part(rooms, half, count - half, count))

    def _call(
        self, items: Sequence[Item], rows: Sequence[Sequence[Source]], rooms: Mapping[int, Place]
    ) -> list[Row | Failure]:
        self.batches += 1
        arenas = self.memory.arenas
        columns = [[live(source, arenas) for source in column] for column in zip(*rows)]
        if self.copies_inputs:
            columns = [[_private(value) for value in column] for column in columns]
        came = [tuple(column) for column in columns]  # as they were given out: a node may change the lists
        for port in self._lists:
            came[port] = tuple(map(_fixed, columns[port]))
        values = dict(zip(self.inputs, columns))
        padded = self._padding.pad(values) if self._padding is not None else None
        outputs = self.node.run(HostedBatch(self, items, rows, values, rooms, padded))
        count = len(items)
        for name, _ in self.outputs:
            if name not in outputs:
                raise StepError(f"the node gave no {name}; it gave {', '.join(outputs) or 'nothing'}")
            if len(outputs[name]) != count:
                raise StepError(f"{name}: the node gave {len(outputs[name])} values for {count} items")
        if padded is not None:
            outputs = {
                name: [padded.cut(name, v, at) for at, v in enumerate(outputs[name])] for name, _ in self.outputs
            }
        return [self._row(position, row, came, outputs, rooms) for position, row in enumerate(rows)]

    def _row(
        self,
        position: int,
        row: Sequence[Source],
        came: Sequence[tuple[Any, ...]],
        outputs: Outputs,
        rooms: Mapping[int, Place],
    ) -> Row | Failure:
        """Return one item's outputs, or the first failure among them."""
        made: Row = []
        for port, (name, type) in enumerate(self.outputs):
            packed = self._pack(outputs[name][position], type, name, position, row, came, rooms.get(port))
            if isinstance(packed, Failure):
                return packed
            made.append(packed)
        return made

    def _pack(
        self,
        value: Any,
        type: PortType,
        name: str,
        position: int,
        row: Sequence[Source],
        came: Sequence[tuple[Any, ...]],
        room: Place | None,
    ) -> Source | Failure:
        """Return an output ready to be placed: what came in and is given back goes on as it came."""
        if isinstance(value, BaseException):
            if not is_out_of_memory(value):
                return failure(value)
            self.out_of_memory = max(self.out_of_memory, 1)
            return out_of_memory(value)
        if not self.copies_inputs:
            for column, source in zip(came, row):
                if value is column[position] and source.kind in _PASSED_ON and is_of(source, type):
                    return source
        try:
            if type.kind == "list":
                return pack(value, type, name, self._known(position, row, came))
            packed = pack(value, type, name)
        except (StepError, InputError) as error:
            return failure(error)
        if packed.array is None or packed.size_bytes <= INLINE_BYTES_MAX:
            return packed
        return self.memory.lies_at(packed, row, room) or packed

    def _known(self, position: int, row: Sequence[Source], came: Sequence[tuple[Any, ...]]) -> Any:
        """Return a function that finds where an element of an output list lies in shared memory already."""
        held: dict[int, tuple[Any, Value]] = {}
        if not self.copies_inputs:
            for column, source in zip(came, row):
                _index(column[position], source, held)

        def known(value: Any, type: PortType) -> Value | None:
            found = held.get(id(value))
            if found is not None and found[0] is value and is_of(found[1], type):
                return found[1]
            if type.kind not in ARRAYS or not isinstance(value, np.ndarray) or value.nbytes <= INLINE_BYTES_MAX:
                return None
            return self.memory.lies_at(pack(value, type, "an element"), row)

        return known


def _rooms(blocks: Mapping[int, Block], at: int, count: int, of: int) -> dict[int, Place]:
    """Return the part of each leased block that belongs to items at..at+count of a dispatch of `of` items."""
    return _part({port: block.place(0, block.size_bytes) for port, block in blocks.items()}, at, count, of)


def _part(rooms: Mapping[int, Place], at: int, count: int, of: int) -> dict[int, Place]:
    return {
        port: place._replace(
            offset=place.offset + at * (place.size_bytes // of), size_bytes=count * (place.size_bytes // of)
        )
        for port, place in rooms.items()
    }


def _private(value: Any) -> Any:
    """Return a copy that a node may write into."""
    if isinstance(value, np.ndarray):
        return value.copy()
    return [_private(one) for one in value] if isinstance(value, list) else value


def _fixed(value: Any) -> Any:
    """Return a list as it is now: the node it is given to may change it."""
    return tuple(map(_fixed, value)) if isinstance(value, list) else value


def _index(value: Any, source: Source, held: dict[int, tuple[Any, Value]]) -> None:
    """Note values that lie in shared memory by identity, lists by their elements."""
    if source.items is not None:
        for one, item in zip(value, source.items):
            _index(one, item, held)
    elif isinstance(source, Value) and source.place is not None and source.kind in _PASSED_ON:
        held[id(value)] = (value, source)
