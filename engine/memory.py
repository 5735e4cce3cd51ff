"""What a worker sees of shared memory, and how its outputs get there.

Outputs that are part of an input, or were written where they will be read from, stay where they are; the others are
copied side by side, one block for each output port, into room set aside beforehand or asked for now.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from weftline.engine.messages import Failure, Given, Value
from weftline.engine.packed import Layout, Packed
from weftline.errors import LimitReached
from weftline.shm.arena import HostArena
from weftline.shm.block import Block, Place
from weftline.shm.view import bytes_view, offset_in

Need = Callable[[Sequence[int]], Sequence[Block]]
"""Ask for one block of each size; LimitReached when there is no room."""

Source = Value | Packed
"""A value as it came in a message, or as a step of this process gave it."""

Row = list[Source]
"""What one item answers, one for each output port."""


class Memory:
    """Every attached arena by id, the id of the worker's own, and how to ask for room in it.

    copied_bytes: bytes copied into shared memory since somebody last set it to 0.
    """

    def __init__(self, arenas: dict[int, HostArena], own: int, need: Need) -> None:
        self.arenas = arenas
        self.own = own
        self.need = need
        self.copied_bytes = 0

    @property
    def own_arena(self) -> HostArena:
        return self.arenas[self.own]

    def lies_at(self, packed: Packed, sources: Sequence[Source], room: Place | None = None) -> Value | None:
        """Return an array as it lies in shared memory already: in `room`, or as (part of) one of `sources`."""
        if packed.array is None:
            return None
        if room is not None:
            offset = offset_in(self.own_arena, packed.array)
            if offset is not None and _within(offset, packed.size_bytes, room):
                return packed.at(room._replace(offset=offset, size_bytes=packed.size_bytes))
        for source in sources:
            if source.items:
                found = self.lies_at(packed, source.items)
                if found is not None:
                    return found
            place = source.place if isinstance(source, Value) else None
            if place is not None:
                offset = offset_in(self.arenas[place.arena], packed.array)
                if offset is not None and _within(offset, packed.size_bytes, place):
                    return packed.at(place._replace(offset=offset, size_bytes=packed.size_bytes))
        return None

    def give(self, rows: Sequence[Row | Failure], rooms: Mapping[int, Place]) -> list[Given | Failure]:
        """Return what items answer: values inline where they are small, placed where they are large.

        rooms: blocks set aside, by output. Where there is no room for all together, each item gets its own or fails.
        """
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
            self._place([row for row in rows if isinstance(row, list)], rooms)
        except LimitReached:
            return [row if isinstance(row, Failure) else self._give_alone(row) for row in rows]
        return [row if isinstance(row, Failure) else _given(row) for row in rows]

    def give_one(self, packed: Packed) -> Value:
        """Turn one Packed into a Value; LimitReached when there is no room for it."""
        row: Row = [packed]
        if packed.travels_inline:
            return packed.inline()
        self._place([row], {})
        return _given(row).outputs[0]

    def _give_alone(self, row: Row) -> Given | Failure:
        try:
            self._place([row], {})
        except LimitReached as error:
            return Failure("LimitReached", str(error))
        return _given(row)

    def _place(self, rows: Sequence[Row], rooms: Mapping[int, Place]) -> None:
        """Copy every Packed in these rows to a place: those of one output side by side."""
        asked: list[tuple[int, list[Row], Layout]] = []
        for index in range(len(rows[0])):
            held = [row for row in rows if isinstance(row[index], Packed)]
            if not held:
                continue
            layout = Layout([value for row in held if isinstance(value := row[index], Packed)])
            room = rooms.get(index)
            if room is not None and room.size_bytes == layout.size_bytes:
                self._copy(index, held, layout, room)
            else:
                asked.append((index, held, layout))
        if asked:
            blocks = self.need([layout.size_bytes for _, _, layout in asked])
            for (index, held, layout), block in zip(asked, blocks, strict=True):
                self._copy(index, held, layout, block.place(0, layout.size_bytes))

    def _copy(self, index: int, rows: Sequence[Row], layout: Layout, place: Place) -> None:
        layout.write(bytes_view(self.own_arena, place))
        self.copied_bytes += layout.size_bytes
        for row, value in zip(rows, layout.at(place), strict=True):
            row[index] = value

    def array_in(self, room: Place, dtype: np.dtype, shape: tuple[int, ...]) -> np.ndarray | None:
        """Return a writable array that fills `room`, or None when it does not fill it exactly."""
        if int(np.prod(shape)) * dtype.itemsize != room.size_bytes:
            return None
        return np.ndarray(shape, dtype, self.own_arena.buffer, room.offset)


def _given(row: Row) -> Given:
    return Given(tuple(value if isinstance(value, Value) else value.inline() for value in row))


def _within(offset: int, size_bytes: int, place: Place) -> bool:
    return place.offset <= offset and offset + size_bytes <= place.offset + place.size_bytes
