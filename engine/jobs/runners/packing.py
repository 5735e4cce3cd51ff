"""Packing of a block's inputs: their conversion, and the encoding of one port's values as a column.

    +-----------+----------------+---------+------------------+------------------+-- -
    | head size |      head      | padding |  arrays of rows  |  arrays of rows  | ...
    | 8 bytes   | MessagePack    | to 64   |  side by side    |                  |
    +-----------+----------------+---------+------------------+------------------+-- -

Texts, bytes, JSON and detections are in the head, in their wire format. Tensors follow, and are read as views; tensors
of one dtype and shape are contiguous, so that consecutive ones are one array. A list is its lengths, and a column of
all its elements. An object that is equal in every row is written once.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import msgspec
import numpy as np

from weftline.engine.inputs import RequestInputs, media_limits
from weftline.engine.jobs.rows import RowBlock, RowError, row_error, usable
from weftline.engine.protocol.packed import Packed
from weftline.engine.protocol.values import ARRAYS, live, pack
from weftline.errors import InputError, LimitReached, StepError
from weftline.nodes.media import MediaLimits, to_value
from weftline.nodes.ports import PortType
from weftline.pipelines.placement.plan import Plan
from weftline.pipelines.spec.graph import Input
from weftline.shm.block import ALIGN_BYTES, align_up
from weftline.shm.view import numpy_dtype

COLUMN = PortType.parse("uint8[?]")
"""Type of a port with columns."""

ABSENT, FAILED = 1, 2
"""Mark of a row without a value: the producing step was skipped, or it or an earlier step failed."""

_SIZE_BYTES = 8


class Column(NamedTuple):
    """One port's values.

    values: one per row; None without a value.
    marks:  one byte per row: 0 with a value, else ABSENT or FAILED; empty if every row has a value.
    """

    values: Sequence[Packed | None]
    marks: bytes = b""


class _Head(msgspec.Struct, array_like=True, frozen=True):
    """Values of one kind and dtype, or parts of several kinds.

    rows:    number of rows; `marks` selects those with a value. The other fields describe the values.
    data:    byte kinds: the bytes of each value.
    shapes:  tensors: the shape of each, or one shape of all.
    lengths: lists: the length of each; `items` are the concatenated elements.
    same:    `items` has one value, which is in every row.
    parts:   values of several kinds: the positions of each kind.
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
    """A column that can be written into `size_bytes` bytes."""

    def __init__(self, column: Column) -> None:
        self._arrays: list[tuple[int, list[np.ndarray]]] = []  # offset of contiguous arrays, and the arrays
        self._end = 0
        values, marks = column
        present: Sequence[Packed] = [one for one in values if one is not None] if marks else values  # type: ignore[assignment]
        head = self._head(present)
        self._front = _encode_head(_Head(len(values), marks=marks, items=head) if marks else head)
        self._start = align_up(_SIZE_BYTES + len(self._front), ALIGN_BYTES)
        self.size_bytes = self._start + self._end

    def write(self, capacity: np.ndarray) -> None:
        """Write into `capacity`, uint8 [size_bytes]."""
        front = _SIZE_BYTES + len(self._front)
        capacity[:_SIZE_BYTES] = np.frombuffer(len(self._front).to_bytes(_SIZE_BYTES, "little"), np.uint8)
        capacity[_SIZE_BYTES:front] = np.frombuffer(self._front, np.uint8)
        capacity[front : self._start] = 0
        for at, run in self._arrays:
            size = run[0].nbytes
            whole = capacity[self._start + at : self._start + at + size * len(run)]
            np.stack(run, out=whole.view(run[0].dtype).reshape(len(run), *run[0].shape))

    def array(self) -> np.ndarray:
        """Return the column as a new array."""
        capacity = np.empty(self.size_bytes, np.uint8)
        self.write(capacity)
        return capacity

    def _head(self, values: Sequence[Packed]) -> _Head:
        """Describe present values, and lay out their arrays."""
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
        """Lay out arrays of one dtype; return their shapes, or one if they are equal."""
        shape = values[0].shape
        alike = all(one.shape == shape for one in values)
        arrays = [one.array for one in values]
        for run in [arrays] if alike else [[one] for one in arrays]:
            self._arrays.append((self._end, run))
            self._end = align_up(self._end + run[0].nbytes * len(run), ALIGN_BYTES)
        return (shape,) if alike else tuple(one.shape for one in values)


def read(blob: np.ndarray) -> Column:
    """Decode a PackedColumn; tensors are views of `blob`, uint8 [bytes].

    msgspec.DecodeError for other bytes.
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
    """Return a value as Session.run returns it; arrays are views of their column."""
    if value.array is not None:
        return value.array
    if value.items is not None:
        return [own(item) for item in _elements(value)]
    return live(value, _NO_ARENAS)


_NO_ARENAS: Mapping[int, Any] = {}


class _Reader:
    """Reads values in layout order. at: offset of the next array."""

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
    """Return the elements of a list, all of them in this column."""
    items = value.items or ()
    return tuple(item for item in items if isinstance(item, Packed))


PORTION_BYTES = 24 << 20
"""Most bytes of inputs in a portion of more than one row."""

DECODED_AHEAD = 16
"""Rows with images or audio that are measured at a time."""

Columns = Mapping[str, Sequence[Packed | None]]
"""By pipeline input, one value per row; None if absent."""


@dataclass(frozen=True, slots=True)
class Portion:
    """Rows of a block in one request. rows: their indices in the block. columns: their inputs."""

    rows: Sequence[int]
    columns: Columns

    def part(self, start: int, end: int) -> Portion:
        """Return the rows from `start` to before `end`, counted from the first."""
        return Portion(self.rows[start:end], {name: column[start:end] for name, column in self.columns.items()})


class Packer:
    """Converts rows to a plan's inputs. Thread-safe. decoders: threads for images and audio."""

    def __init__(self, plan: Plan, decoders: Executor) -> None:
        self._request_inputs = RequestInputs(plan)
        self._decoders = decoders
        self._inputs = {one.name: (plan.input_types[one.name], media_limits(plan, one)) for one in plan.inputs}
        self._asked = {one.name for one in plan.inputs if not one.hidden}
        self._needed = {one.name for one in plan.inputs if not one.may_be_left_out and not one.hidden}
        self._usual = {one.name: _default(one, plan.input_types[one.name]) for one in plan.inputs}
        self._bytes_max = plan.limits.request_bytes_max
        self._slow = any(_is_media(plan.input_types[name]) for name in self._asked)

    def portions(self, block: RowBlock, errors: dict[int, RowError]) -> Iterator[Portion]:
        """Yield the valid rows in order; the errors of the others go to `errors`."""
        size = DECODED_AHEAD if self._slow else max(len(block), 1)
        rows: list[int] = []
        held: dict[str, list[Packed | None]] = {name: [] for name in self._inputs}
        held_bytes = 0
        for start in range(0, len(block), size):
            asked = range(start, min(start + size, len(block)))
            columns = self._measured(block, asked, errors) if self._slow else self._quick(block, asked, errors)
            sizes = [sum([one.size_bytes for one in row if one is not None]) for row in zip(*columns.values())]
            for at, row in enumerate(asked):
                if row in errors:
                    continue
                if rows and held_bytes + sizes[at] > PORTION_BYTES:
                    yield self._ready(rows, held, errors)
                    rows, held, held_bytes = [], {name: [] for name in self._inputs}, 0
                rows.append(row)
                held_bytes += sizes[at]
                for name, column in columns.items():
                    held[name].append(column[at])
        if rows:
            yield self._ready(rows, held, errors)

    def _ready(self, rows: Sequence[int], held: Columns, errors: dict[int, RowError]) -> Portion:
        """Return a portion with decoded images and audio, without rows that fail."""
        if not self._slow:
            return Portion(rows, held)
        columns = {name: list(self._decoders.map(_decoded, column)) for name, column in held.items()}
        for column in columns.values():
            errors.update({row: one for row, one in zip(rows, column) if isinstance(one, RowError)})
        kept = [at for at, row in enumerate(rows) if row not in errors]
        whole: Columns = {name: [column[at] for at in kept] for name, column in columns.items()}  # type: ignore[misc]
        return Portion([rows[at] for at in kept], whole)

    def _measured(self, block: RowBlock, rows: Sequence[int], errors: dict[int, RowError]) -> Columns:
        """Pack rows concurrently."""
        given = [usable(block, row, errors) for row in rows]
        packed = self._decoders.map(lambda one: None if one is None else self._packed_row(one), given)
        return self._whole(dict(zip(rows, packed)), rows, errors)

    def _quick(self, block: RowBlock, rows: Sequence[int], errors: dict[int, RowError]) -> Columns:
        """Pack rows column by column."""
        doubtful = set(rows) if block.inputs.keys() - self._asked else set()
        columns: dict[str, list[Packed | None]] = {}
        for name in self._inputs:
            values = block.inputs.get(name)
            if values is None:
                columns[name] = [self._usual[name]] * len(rows)
                if name in self._needed:
                    doubtful.update(rows)
            else:
                columns[name] = self._converted(name, values, rows, doubtful)
        if doubtful:
            given = {row: one for row in sorted(doubtful) if (one := usable(block, row, errors)) is not None}
            again = self._whole({row: self._packed_row(one) for row, one in given.items()}, list(given), errors)
            for name, column in again.items():
                for row, value in zip(given, column):
                    columns[name][row - rows[0]] = value
        return columns

    def _converted(
        self, name: str, values: Sequence[Any], rows: Sequence[int], doubtful: set[int]
    ) -> list[Packed | None]:
        """Pack one input of every row, None if absent; rows to validate singly go to `doubtful`."""
        type, limits = self._inputs[name]
        usual, text = self._usual[name], type.kind == "text"
        most = min(limits.bytes_max, self._bytes_max // max(len(self._inputs), 1))
        column: list[Packed | None] = []
        for row in rows:
            raw = values[row]
            packed = usual
            if raw is None:
                if name in self._needed:
                    doubtful.add(row)
            else:
                try:
                    if text and raw.__class__ is str:
                        packed = Packed("text", data=raw.encode())
                    else:
                        packed = pack(to_value(type, raw, limits), type, name)
                    if packed.size_bytes > most:
                        doubtful.add(row)
                except (InputError, StepError, UnicodeEncodeError):
                    doubtful.add(row)
            column.append(packed)
        return column

    def _packed_row(self, given: Mapping[str, Any]) -> dict[str, Packed] | RowError:
        """Pack one row, or return its error."""
        try:
            return self._request_inputs.pack(given)
        except (InputError, LimitReached) as error:
            return row_error(error)

    def _whole(
        self,
        packed: Mapping[int, dict[str, Packed] | RowError | None],
        rows: Sequence[int],
        errors: dict[int, RowError],
    ) -> Columns:
        """Return packed rows as columns with defaults; None in failed rows."""
        columns: dict[str, list[Packed | None]] = {name: [] for name in self._inputs}
        for row in rows:
            one = packed[row]
            if isinstance(one, RowError):
                errors[row] = one
            for name, column in columns.items():
                column.append(one.get(name, self._usual[name]) if isinstance(one, dict) else None)
        return columns


def _decoded(value: Packed | None) -> Packed | RowError | None:
    """Decode a value, or return its error."""
    try:
        return None if value is None else value.decoded()
    except InputError as error:
        return row_error(error)


def _default(one: Input, type: PortType) -> Packed | None:
    """Return the default of an input; None without one."""
    if one.default is None and not one.hidden:
        return None
    if one.default is None and one.optional:
        return None
    return pack(to_value(type, one.default, MediaLimits()), type, f"input {one.name}")


def _is_media(type: PortType) -> bool:
    return _is_media(type.item) if type.item is not None else type.kind in ("image", "audio")
