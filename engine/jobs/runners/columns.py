"""Column encoding of one port's values for a whole block of rows.

    +-----------+----------------+---------+------------------+------------------+-- -
    | head size |      head      | padding |  arrays of rows  |  arrays of rows  | ...
    | 8 bytes   | MessagePack    | to 64   |  side by side    |                  |
    +-----------+----------------+---------+------------------+------------------+-- -

Texts, bytes, json and detections stand in the head, each as the bytes that it would travel as by itself. Tensors lie
behind it, and are views of these bytes when they are read; those of one dtype and shape touch, so that any of them that
follow each other are one array. A list is its lengths, and a column of all its elements. Equal objects in every row are
written once.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import msgspec
import numpy as np

from weftline.engine.protocol.packed import Packed
from weftline.engine.protocol.values import ARRAYS, live
from weftline.nodes.ports import PortType
from weftline.shm.block import ALIGN_BYTES, align_up
from weftline.shm.view import numpy_dtype

COLUMN = PortType.parse("uint8[?]")
"""The type of a port that carries a column."""

ABSENT, FAILED = 1, 2
"""Why a row has no value: the step that would have given it was skipped, or it or an earlier one failed on the row."""

_SIZE_BYTES = 8


class Column(NamedTuple):
    """One port's values.

    values: one for each row; None where there is none.
    marks:  one byte for each row, 0 where there is a value, else ABSENT or FAILED; empty when every row has one.
    """

    values: Sequence[Packed | None]
    marks: bytes = b""


class _Head(msgspec.Struct, array_like=True, frozen=True):
    """Values of one kind and dtype, or parts that are.

    rows:    how many rows; of these, `marks` says which have a value. All else is about those that have.
    data:    of kinds that are bytes, one for each value.
    shapes:  of tensors, the shape of each; a single one when it is the same for all.
    lengths: of lists, how long each is; `items` are their elements, one list after the other.
    same:    `items` has one value, which stands in every row.
    parts:   values of several kinds: the positions of each kind's.
    """

    rows: int
    kind: str = ""
    marks: bytes = b""
    dtype: str = ""
    data: tuple[bytes, ...] = ()
    shapes: tuple[tuple[int, ...], ...] = ()
    lengths: tuple[int, ...] | None = None
    items: _Head | None = None
    same: bool = False
    parts: tuple[tuple[tuple[int, ...], _Head], ...] = ()


_encode_head = msgspec.msgpack.Encoder().encode
_decode_head = msgspec.msgpack.Decoder(_Head).decode


class PackedColumn:
    """A column that is ready to be written into `size_bytes` bytes."""

    def __init__(self, column: Column) -> None:
        self._arrays: list[tuple[int, list[np.ndarray]]] = []  # where a run of touching arrays starts, and the run
        self._end = 0
        values, marks = column
        present: Sequence[Packed] = [one for one in values if one is not None] if marks else values  # type: ignore[assignment]
        head = self._head(present)
        self._front = _encode_head(_Head(len(values), marks=marks, items=head) if marks else head)
        self._start = align_up(_SIZE_BYTES + len(self._front), ALIGN_BYTES)
        self.size_bytes = self._start + self._end

    def write(self, room: np.ndarray) -> None:
        """Write into `room`, uint8 [size_bytes]."""
        front = _SIZE_BYTES + len(self._front)
        room[:_SIZE_BYTES] = np.frombuffer(len(self._front).to_bytes(_SIZE_BYTES, "little"), np.uint8)
        room[_SIZE_BYTES:front] = np.frombuffer(self._front, np.uint8)
        room[front : self._start] = 0
        for at, run in self._arrays:
            size = run[0].nbytes
            whole = room[self._start + at : self._start + at + size * len(run)]
            np.stack(run, out=whole.view(run[0].dtype).reshape(len(run), *run[0].shape))

    def array(self) -> np.ndarray:
        """Return the column as an array of its own."""
        room = np.empty(self.size_bytes, np.uint8)
        self.write(room)
        return room

    def _head(self, values: Sequence[Packed]) -> _Head:
        """Describe values, all of them present, and lay out their arrays."""
        rows = len(values)
        if not rows:
            return _Head(0)
        first = values[0]
        if rows > 1 and all(one is first for one in values):
            return _Head(rows, same=True, items=self._head([first]))
        kind, dtype = first.kind, first.dtype
        if any(one.kind != kind or one.dtype != dtype for one in values):
            return _Head(rows, parts=tuple(self._parts(values)))
        if kind in ARRAYS:
            return _Head(rows, kind, dtype=dtype, shapes=self._lay_out(values))
        if kind == "list":
            lists = [_elements(one) for one in values]
            items = self._head([item for one in lists for item in one])
            return _Head(rows, kind, lengths=tuple(map(len, lists)), items=items)
        return _Head(rows, kind, data=tuple([one.data for one in values]))

    def _parts(self, values: Sequence[Packed]) -> Iterator[tuple[tuple[int, ...], _Head]]:
        groups: dict[Hashable, list[int]] = {}
        for place, one in enumerate(values):
            groups.setdefault((one.kind, one.dtype), []).append(place)
        for places in groups.values():
            yield tuple(places), self._head([values[place] for place in places])

    def _lay_out(self, values: Sequence[Packed]) -> tuple[tuple[int, ...], ...]:
        """Find places for arrays of one dtype; return their shapes, one of them for all that are alike."""
        shape = values[0].shape
        alike = all(one.shape == shape for one in values)
        arrays = [one.array for one in values]
        for run in [arrays] if alike else [[one] for one in arrays]:
            self._arrays.append((self._end, run))
            self._end = align_up(self._end + run[0].nbytes * len(run), ALIGN_BYTES)
        return (shape,) if alike else tuple(one.shape for one in values)


def read(blob: np.ndarray) -> Column:
    """Return the column that was written; tensors are views of `blob`, uint8 [bytes].

    msgspec.DecodeError when it was not written by a PackedColumn.
    """
    view = blob.data
    size = int.from_bytes(view[:_SIZE_BYTES], "little")
    head = _decode_head(view[_SIZE_BYTES : _SIZE_BYTES + size])
    reader = _Reader(blob, align_up(_SIZE_BYTES + size, ALIGN_BYTES))
    if not head.marks or head.items is None:
        return Column(reader.values(head))
    present = iter(reader.values(head.items))
    return Column([None if mark else next(present) for mark in head.marks], head.marks)


def own(value: Packed) -> Any:
    """Return a value as a caller of Session.run has it; arrays are views of the column they were read from."""
    if value.array is not None:
        return value.array
    if value.items is not None:
        return [own(item) for item in _elements(value)]
    return live(value, _NO_ARENAS)


_NO_ARENAS: Mapping[int, Any] = {}


class _Reader:
    """Reads values in the order in which they were laid out; `at`: where the next array lies."""

    def __init__(self, blob: np.ndarray, at: int) -> None:
        self._blob = blob
        self._at = at

    def values(self, head: _Head) -> list[Packed]:
        if head.same and head.items is not None:
            return self.values(head.items) * head.rows
        if head.parts:
            return self._parts(head)
        if head.lengths is not None:
            items = self.values(head.items) if head.items is not None else []
            bounds = pairwise(accumulate(head.lengths, initial=0))
            return [Packed("list", items=tuple(items[start:end])) for start, end in bounds]
        if head.kind in ARRAYS:
            return self._arrays(head)
        kind = head.kind
        return [Packed(kind, data=data) for data in head.data]

    def _parts(self, head: _Head) -> list[Packed]:
        found: dict[int, Packed] = {}
        for places, part in head.parts:
            found.update(zip(places, self.values(part)))
        return [found[place] for place in range(head.rows)]

    def _arrays(self, head: _Head) -> list[Packed]:
        if len(head.shapes) == 1:
            shape = head.shapes[0]
            whole = self._run(head.dtype, (head.rows, *shape))
            return [Packed(head.kind, head.dtype, shape, whole[row, ...]) for row in range(head.rows)]
        return [Packed(head.kind, head.dtype, shape, self._run(head.dtype, shape)) for shape in head.shapes]

    def _run(self, dtype: str, shape: tuple[int, ...]) -> np.ndarray:
        held = numpy_dtype(dtype)
        start, self._at = self._at, align_up(self._at + math.prod(shape) * held.itemsize, ALIGN_BYTES)
        return self._blob[start : start + math.prod(shape) * held.itemsize].view(held).reshape(shape)


def _elements(value: Packed) -> tuple[Packed, ...]:
    """Return the elements of a list; none of them lies anywhere else."""
    items = value.items or ()
    return tuple(item for item in items if isinstance(item, Packed))
