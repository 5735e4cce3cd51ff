"""How a step's outputs get where their readers find them.

Small values travel inside the message. Of the others those of one output port lie side by side in one block, in room
set aside beforehand or asked for now: in host memory, in the worker's arena on its device, or in both, as the plan says
for each port. What lies where it should already stays there; everything else is copied once: within the device, to it,
from it straight into the host arena, or within host memory.

    where       a tensor of the device                  an array
    'host'      copied down, or inline                  copied, or inline
    'device'    copied within the device                copied up
    'both'      within the device, and down             up, and copied
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec
import numpy as np

from weftline.engine.messages import Failure, Given, Value
from weftline.engine.packed import Layout, Packed, Row, Source
from weftline.engine.worker.device_work import DeviceWork
from weftline.engine.worker.memory import Memory
from weftline.errors import LimitReached
from weftline.shm.block import Block, Key, Place
from weftline.shm.device.tensor import DeviceTensor
from weftline.shm.lease import DEVICE_ALIGN_BYTES
from weftline.shm.view import bytes_view, numpy_dtype

HOST, DEVICE, BOTH = "host", "device", "both"
"""Where the readers of an output are."""

_NOTHING: Mapping[int, Place] = {}


class Giving:
    """Gives the outputs of one step, or of one chain; `where` says of each where its readers are."""

    def __init__(self, memory: Memory, where: Sequence[str]) -> None:
        self._memory = memory
        self._where = tuple(where)

    def give(
        self,
        rows: Sequence[Row | Failure],
        rooms: Mapping[int, Place] = _NOTHING,
        near_rooms: Mapping[int, Place] = _NOTHING,
    ) -> list[Given | Failure]:
        """Return what items answer: values inline where they are small, placed where they are large.

        rooms, near_rooms: blocks set aside, by output, in host memory and on the device. Where there is no room for all
        together, each item gets its own or fails.
        """
        if self._memory.work is not None:
            self._bring(rows, self._memory.work)
        given: list[Given | Failure] = []
        large = False
        for row in rows:
            if isinstance(row, Failure):
                given.append(row)
                continue
            for index, value in enumerate(row):
                if value.__class__ is Packed:
                    if value.travels_inline:
                        row[index] = value.inline()
                    else:
                        large = True
            given.append(Given(tuple(row)))  # type: ignore[arg-type]
        if not large:
            return given
        try:
            self._place([row for row in rows if isinstance(row, list)], rooms, near_rooms)
        except LimitReached:
            return [row if isinstance(row, Failure) else self._give_alone(row) for row in rows]
        return [row if isinstance(row, Failure) else _given(row) for row in rows]

    def give_one(self, packed: Packed) -> Value:
        """Turn one Packed into a Value; LimitReached when there is no room for it."""
        row: Row = [packed]
        if self._memory.work is not None:
            self._bring([row], self._memory.work)
            packed = row[0]  # type: ignore[assignment]
        if packed.travels_inline:
            return packed.inline()
        self._place([row], _NOTHING, _NOTHING)
        return _given(row).outputs[0]

    def _give_alone(self, row: Row) -> Given | Failure:
        try:
            self._place([row], _NOTHING, _NOTHING)
        except LimitReached as error:
            return Failure("LimitReached", str(error))
        return _given(row)

    def where_of(self, index: int) -> str:
        """Return where an output is placed: where its readers are, if they can see what is given on the device."""
        near = self._memory.near
        return self._where[index] if near is not None and near.gives and index < len(self._where) else HOST

    # what is small, or lies on the device alone

    def _bring(self, rows: Sequence[Row | Failure], work: DeviceWork) -> None:
        """Bring small tensors to the host, and find out what else must come there."""
        small: list[Packed] = []
        for row in rows:
            if isinstance(row, list):
                for index, value in enumerate(row):
                    row[index] = self._to_come(value, self.where_of(index))
                    _note_small(row[index], small)
        if not small:
            return
        arrays = _brought(small, work)
        for row in rows:
            if isinstance(row, list):
                row[:] = [_with_arrays(value, arrays) for value in row]

    def _to_come(self, value: Source, where: str) -> Source:
        """Return a value that lies on the device alone as one that is still to be placed, if others read it as well."""
        if value.items is not None:
            items = tuple(self._to_come(item, where) for item in value.items)
            if all(one is other for one, other in zip(items, value.items)):
                return value
            return Packed("list", items=items)
        if where == DEVICE or isinstance(value, Packed) or value.near is None or value.place is not None:
            return value
        near = self._memory.near
        if near is None or not near.sees(value):
            return value
        return Packed(value.kind, value.dtype, value.shape, near=near.view(value), lies=value)

    # what is large

    def _place(self, rows: Sequence[Row], rooms: Mapping[int, Place], near_rooms: Mapping[int, Place]) -> None:
        """Copy every Packed in these rows to its places: those of one output side by side."""
        host: dict[int, Layout] = {}
        near: dict[int, Layout] = {}
        for index in range(len(rows[0])):
            leaves = [leaf for row in rows if isinstance(value := row[index], Packed) for leaf in value.leaves()]
            if not leaves:
                continue
            where = self.where_of(index)
            if where != DEVICE:
                host[index] = Layout(leaves)
            if where != HOST:
                to_go = [leaf for leaf in leaves if leaf.lies is None]
                if to_go:
                    near[index] = Layout(to_go, DEVICE_ALIGN_BYTES)
        here, there = self._places(host, near, rooms, near_rooms)
        lie = self._copy_here(host, here), self._copy_there(near, there)
        for row in rows:
            row[:] = [_placed(value, *lie) for value in row]

    def _places(
        self,
        host: Mapping[int, Layout],
        near: Mapping[int, Layout],
        rooms: Mapping[int, Place],
        near_rooms: Mapping[int, Place],
    ) -> tuple[dict[int, Place], dict[int, Place]]:
        """Return the room of each output in host memory and on the device, asking at once for what is missing."""
        here, missing = _fitting(host, rooms)
        there, missing_near = _fitting(near, near_rooms) if near else ({}, [])
        if missing or missing_near:
            sizes = [host[index].size_bytes for index in missing], [near[index].size_bytes for index in missing_near]
            blocks, near_blocks = self._memory.need(*sizes)
            here |= _of_blocks(missing, blocks, sizes[0])
            if missing_near:
                there |= _of_blocks(missing_near, near_blocks, sizes[1])
        return here, there

    def _copy_here(self, host: Mapping[int, Layout], here: Mapping[int, Place]) -> dict[int, Place]:
        """Copy to host memory, and put what comes from the device on its way; return where each part will lie."""
        memory = self._memory
        lie: dict[int, Place] = {}
        down: list[tuple[DeviceTensor, int]] = []
        came: list[Value] = []
        for index, place in here.items():
            for leaf, at in host[index].parts(place):
                lie[id(leaf)] = at
                room = bytes_view(memory.own_arena, at)
                if leaf.near is None:
                    leaf.write(room)
                    continue
                down.append((leaf.near, int(np.frombuffer(room, np.uint8).ctypes.data)))
                if leaf.lies is not None:
                    came.append(leaf.lies)
            memory.copied_bytes += place.size_bytes
        if down and memory.work is not None:
            memory.work.copy_down(down, came)
        return lie

    def _copy_there(self, near: Mapping[int, Layout], there: Mapping[int, Place]) -> dict[int, Place]:
        """Put copies to the device arena on their way, and wait for what comes from it; return where each part lies."""
        memory, work = self._memory, self._memory.work
        if work is None:
            return {}
        lie: dict[int, Place] = {}
        across: list[tuple[DeviceTensor, int]] = []
        base = memory.near.arena.address if memory.near is not None and memory.near.arena is not None else 0
        for index, place in there.items():
            work.blocks.add(place.key)
            for leaf, at in near[index].parts(place):
                lie[id(leaf)] = at
                if leaf.near is not None:
                    across.append((leaf.near, base + at.offset))
                else:
                    work.copy_up(np.ascontiguousarray(leaf.array), base + at.offset)
            memory.copied_bytes += place.size_bytes
        work.copy_near(across)
        work.wait_down()  # last, so that nobody waits for copies that stay on the device
        return lie


def marked(results: Sequence[Given | Failure], own: set[Key], ready: Place) -> tuple[Given | Failure, ...]:
    """Return results whose tensors in the blocks `own` are still being written: each says by which event it is done."""

    def mark(value: Value) -> Value:
        if value.items is not None:
            return msgspec.structs.replace(value, items=tuple(map(mark, value.items)))
        if value.near is None or value.near.key not in own:
            return value
        return msgspec.structs.replace(value, ready=ready)

    return tuple(Given(tuple(map(mark, one.outputs))) if isinstance(one, Given) else one for one in results)


def _fitting(layouts: Mapping[int, Layout], rooms: Mapping[int, Place]) -> tuple[dict[int, Place], list[int]]:
    """Return the rooms that are of the right size, and the outputs that have none."""
    if not rooms:
        return {}, list(layouts)
    found = {index: rooms[index] for index in layouts if index in rooms}
    found = {index: place for index, place in found.items() if place.size_bytes == layouts[index].size_bytes}
    return found, [index for index in layouts if index not in found]


def _of_blocks(indexes: Sequence[int], blocks: Sequence[Block], sizes: Sequence[int]) -> dict[int, Place]:
    return {index: block.place(0, size) for index, block, size in zip(indexes, blocks, sizes, strict=True)}


def _placed(value: Source, host: Mapping[int, Place], near: Mapping[int, Place]) -> Source:
    """Return a value as it lies, with its elements if it is a list."""
    if isinstance(value, Value):
        return value
    if value.items is not None:
        items = (_placed(item, host, near) for item in value.items)
        return Value(value.kind, items=tuple(items))  # type: ignore[arg-type]
    if not value.size_bytes:
        return value.inline()
    lies = value.lies
    there = near.get(id(value)) if lies is None else lies.near
    ready = None if lies is None else lies.ready
    return Value(value.kind, value.dtype, value.shape, None, host.get(id(value)), None, there, ready)


def _note_small(value: Source, small: list[Packed]) -> None:
    """Note the tensors on the device that travel inside the message."""
    if isinstance(value, Packed) and value.travels_inline:
        small.extend(leaf for leaf in value.leaves() if leaf.near is not None)


def _brought(small: Sequence[Packed], work: DeviceWork) -> dict[int, Packed]:
    """Return tensors of the device as arrays, by identity; all are waited for at once."""
    starts, size = [], 0
    for leaf in small:
        starts.append(size)
        size += leaf.size_bytes
    staged = np.empty(size, np.uint8)
    pairs = [(leaf.near, staged.ctypes.data + start) for leaf, start in zip(small, starts) if leaf.near is not None]
    work.copy_down(pairs, [leaf.lies for leaf in small if leaf.lies is not None])
    work.wait_down()
    found = {}
    for leaf, start in zip(small, starts):
        raw = staged[start : start + leaf.size_bytes]
        array = np.frombuffer(raw.tobytes(), numpy_dtype(leaf.dtype)).reshape(leaf.shape)
        found[id(leaf)] = Packed(leaf.kind, leaf.dtype, leaf.shape, array)
    return found


def _with_arrays(value: Source, arrays: Mapping[int, Packed]) -> Source:
    if not isinstance(value, Packed):
        return value
    if value.items is not None:
        return msgspec.structs.replace(value, items=tuple(_with_arrays(item, arrays) for item in value.items))
    return arrays.get(id(value), value)


def _given(row: Row) -> Given:
    return Given(tuple(value if isinstance(value, Value) else value.inline() for value in row))
