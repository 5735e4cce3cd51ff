"""What a node gave for a batch: checked against its ports, and ready to be placed.

A value that came in and is given back goes on as it came; a part of an input, or what was written into the room that
was set aside, is told by where it lies. On a GPU a tensor of any library is seen where it is on the device.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from weftline.engine.messages import Failure, Value
from weftline.engine.packed import Row, Source
from weftline.engine.values import ARRAYS, OnDevice, is_of, pack
from weftline.engine.worker.faults import failure, out_of_memory
from weftline.engine.worker.finite import is_finite
from weftline.engine.worker.memory import Memory
from weftline.errors import InputError, StepError
from weftline.nodes.contract import Outputs
from weftline.nodes.ports import PortType
from weftline.nodes.want_of_memory import is_out_of_memory
from weftline.shm.block import INLINE_BYTES_MAX, Block, Place
from weftline.shm.device.tensor import DeviceTensor

_PASSED_ON = (*ARRAYS, "text", "bytes")
"""Kinds whose values a node cannot have changed: when it gives one back, it goes on as it came."""

_NOT_FINITE = "{}: found NaN or an infinite number, expected none: the step says `finite: true`"


class Aside(NamedTuple):
    """Room set aside for the outputs of some items, by output port: in host memory, and on the device."""

    host: Mapping[int, Place]
    near: Mapping[int, Place]

    @classmethod
    def of_blocks(cls, host: Mapping[int, Block], near: Mapping[int, Block]) -> Aside:
        return cls(
            {port: block.place(0, block.size_bytes) for port, block in host.items()},
            {port: block.place(0, block.size_bytes) for port, block in near.items()},
        )

    def part(self, at: int, count: int, of: int) -> Aside:
        """Return the part that belongs to items at..at+count of the `of` items that this is for."""
        return Aside(_part(self.host, at, count, of), _part(self.near, at, count, of))


NOTHING_ASIDE = Aside({}, {})


class OutputPorts:
    """The output ports of one hosted step.

    finite:        an item fails whose outputs hold NaN or an infinite number.
    lacked_memory: the node gave, for some item since somebody last set it to False, that there was no memory.
    """

    def __init__(
        self,
        ports: Sequence[tuple[str, PortType]],
        memory: Memory,
        near: bool,
        copies_inputs: bool,
        finite: bool = False,
    ) -> None:
        self.ports = ports
        self._finite = finite
        self.lacked_memory = False
        self._memory = memory
        self._on_device: OnDevice | None = self._seen if near else None
        self._copies_inputs = copies_inputs

    def check(self, outputs: Outputs, count: int) -> Mapping[str, Sequence[Any]]:
        """Return what the node gave, by port; StepError unless it is one value for each of `count` items."""
        for name, _ in self.ports:
            if name not in outputs:
                raise StepError(f"the node gave no {name}; it gave {', '.join(outputs) or 'nothing'}")
            if len(outputs[name]) != count:
                raise StepError(f"{name}: the node gave {len(outputs[name])} values for {count} items")
        if self._on_device is None:
            return outputs
        return {name: self._seen_whole(outputs[name], self._on_device) for name, _ in self.ports}

    def rows(
        self,
        outputs: Mapping[str, Sequence[Any]],
        rows: Sequence[Sequence[Source]],
        came: Sequence[tuple[Any, ...]],
        aside: Aside,
    ) -> list[Row | Failure]:
        """Return each item's outputs, or the first failure among them.

        rows, came: its inputs as they came, by item and port, and as the node saw them, by port and item.
        """
        made: list[Row | Failure] = [[] for _ in rows]
        for port, (name, type) in enumerate(self.ports):
            given = outputs[name]
            for position, row in enumerate(rows):
                so_far, value = made[position], given[position]
                if isinstance(so_far, Failure):
                    continue
                if isinstance(value, BaseException):
                    made[position] = self._failed(value)
                    continue
                try:
                    ready = self._ready(value, type, name, port, position, row, came, aside)
                    if self._finite and not is_finite(value, ready, self._look):
                        raise StepError(_NOT_FINITE.format(name))
                    so_far.append(ready)
                except (StepError, InputError) as error:
                    made[position] = failure(error)
        return made

    def _failed(self, error: BaseException) -> Failure:
        """Return what an item has whose output is an error."""
        if not is_out_of_memory(error):
            return failure(error)
        self.lacked_memory = True
        return out_of_memory(error)

    def _seen_whole(self, given: Any, on_device: OnDevice) -> Any:
        """Return an output of all items as one tensor on the device, if it is one: its items then are neighbours."""
        if isinstance(given, list | tuple | np.ndarray):
            return given
        try:
            whole = on_device(given)
        except ValueError:
            return given  # its items are looked at one by one
        return given if whole is None else whole

    def _seen(self, value: Any) -> DeviceTensor | None:
        near, work = self._memory.near, self._memory.work
        return None if near is None or work is None else near.on_device(value, work.stream)

    def _look(self, value: Any) -> Any:
        """Return a tensor that a node gave as numpy or torch sees it."""
        tensor = value if self._on_device is None else self._on_device(value)
        if not isinstance(tensor, DeviceTensor):
            return value
        near, work = self._memory.near, self._memory.work
        return tensor.torch() if near is None or work is None else near.look(tensor, work.stream)

    def _ready(
        self,
        value: Any,
        type: PortType,
        name: str,
        port: int,
        position: int,
        row: Sequence[Source],
        came: Sequence[tuple[Any, ...]],
        aside: Aside,
    ) -> Source:
        """Return an output ready to be placed, or where it lies; StepError when it is not of its port's type."""
        if not self._copies_inputs:
            for column, source in zip(came, row):
                if value is column[position] and source.kind in _PASSED_ON and is_of(source, type):
                    return source
        on_device = self._on_device
        if type.kind == "list":
            return pack(value, type, name, self._known(position, row, came, on_device), on_device)
        packed = pack(value, type, name, None, on_device)
        if packed.size_bytes <= INLINE_BYTES_MAX:
            return packed
        if packed.near is not None:
            return self._memory.lies_near(packed, row, aside.near.get(port)) or packed
        return self._memory.lies_at(packed, row, aside.host.get(port)) or packed

    def _known(
        self, position: int, row: Sequence[Source], came: Sequence[tuple[Any, ...]], on_device: OnDevice | None
    ) -> Any:
        """Return a function that finds where an element of an output list lies in shared memory already."""
        held: dict[int, tuple[Any, Value]] = {}
        if not self._copies_inputs:
            for column, source in zip(came, row):
                _index(column[position], source, held)

        def known(value: Any, type: PortType) -> Value | None:
            found = held.get(id(value))
            if found is not None and found[0] is value and is_of(found[1], type):
                return found[1]
            if type.kind not in ARRAYS:
                return None
            if isinstance(value, np.ndarray):
                large = value.nbytes > INLINE_BYTES_MAX
                return self._memory.lies_at(pack(value, type, "an element"), row) if large else None
            if on_device is None or on_device(value) is None:
                return None
            packed = pack(value, type, "an element", None, on_device)
            return self._memory.lies_near(packed, row) if packed.size_bytes > INLINE_BYTES_MAX else None

        return known


def _part(rooms: Mapping[int, Place], at: int, count: int, of: int) -> dict[int, Place]:
    return {
        port: place._replace(
            offset=place.offset + at * (place.size_bytes // of), size_bytes=count * (place.size_bytes // of)
        )
        for port, place in rooms.items()
    }


def _index(value: Any, source: Source, held: dict[int, tuple[Any, Value]]) -> None:
    """Note values that lie in shared memory by identity, lists by their elements."""
    if source.items is not None:
        for one, item in zip(value, source.items):
            _index(one, item, held)
    elif isinstance(source, Value) and (source.place or source.near) is not None and source.kind in _PASSED_ON:
        held[id(value)] = (value, source)
