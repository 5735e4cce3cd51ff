"""Encoding of a block's rows as port values, with an error for each unusable row.

The inputs of a row are checked by engine/inputs.py, as those of a request. Small values are converted column by
column, which takes a fraction of the time; a row that raises doubts on the way is left to the intake, whose word is
final. Pictures and recordings are measured first and decoded by a few threads, a portion's at a time.

A block is sent in portions, so that large values are never all in memory at once. Where a portion ends depends on the
rows alone, so that the same block always has the same portions.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Any

from weftline.engine.inputs import RequestInputs, media_limits
from weftline.engine.jobs.rows import RowBlock, RowError
from weftline.engine.jobs.runners.each_row import row_error, usable
from weftline.engine.protocol.packed import Packed
from weftline.engine.protocol.values import pack
from weftline.errors import InputError, LimitReached, StepError
from weftline.nodes.media import MediaLimits, to_value
from weftline.nodes.ports import PortType
from weftline.pipelines.placement.plan import Plan
from weftline.pipelines.spec.graph import Input

PORTION_BYTES = 24 << 20
"""Most bytes of inputs in a portion of more than one row."""

DECODED_AHEAD = 16
"""Rows with pictures or recordings that are measured at a time."""

Columns = Mapping[str, Sequence[Packed | None]]
"""For each input of the pipeline one value for each row; None where it is absent."""


@dataclass(frozen=True, slots=True)
class Portion:
    """Rows of a block that travel together. rows: their numbers in the block. columns: their inputs, beside `rows`."""

    rows: Sequence[int]
    columns: Columns

    def part(self, start: int, end: int) -> Portion:
        """Return its rows from `start` to before `end`, counted from its first."""
        return Portion(self.rows[start:end], {name: column[start:end] for name, column in self.columns.items()})


class Packer:
    """Makes rows ready for one plan, the pipeline's own. Thread-safe. decoders: threads for what takes long."""

    def __init__(self, plan: Plan, decoders: Executor) -> None:
        self._intake = RequestInputs(plan)
        self._decoders = decoders
        self._inputs = {one.name: (plan.input_types[one.name], media_limits(plan, one)) for one in plan.inputs}
        self._asked = {one.name for one in plan.inputs if not one.hidden}
        self._needed = {one.name for one in plan.inputs if not one.may_be_left_out and not one.hidden}
        self._usual = {one.name: _default(one, plan.input_types[one.name]) for one in plan.inputs}
        self._bytes_max = plan.limits.request_bytes_max
        self._slow = any(_is_media(plan.input_types[name]) for name in self._asked)

    def portions(self, block: RowBlock, errors: dict[int, RowError]) -> Iterator[Portion]:
        """Yield the rows that can be sent, in order; put why others cannot into `errors`."""
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
        """Return a portion with its pictures and recordings decoded; rows where that fails are left out."""
        if not self._slow:
            return Portion(rows, held)
        columns = {name: list(self._decoders.map(_decoded, column)) for name, column in held.items()}
        for column in columns.values():
            errors.update({row: one for row, one in zip(rows, column) if isinstance(one, RowError)})
        kept = [at for at, row in enumerate(rows) if row not in errors]
        whole: Columns = {name: [column[at] for at in kept] for name, column in columns.items()}  # type: ignore[misc]
        return Portion([rows[at] for at in kept], whole)

    def _measured(self, block: RowBlock, rows: Sequence[int], errors: dict[int, RowError]) -> Columns:
        """Return rows as the intake packs them, several at a time."""
        given = [usable(block, row, errors) for row in rows]
        packed = self._decoders.map(lambda one: None if one is None else self._taken_in(one), given)
        return self._whole(dict(zip(rows, packed)), rows, errors)

    def _quick(self, block: RowBlock, rows: Sequence[int], errors: dict[int, RowError]) -> Columns:
        """Return rows converted column by column."""
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
            again = self._whole({row: self._taken_in(one) for row, one in given.items()}, list(given), errors)
            for name, column in again.items():
                for row, value in zip(given, column):
                    columns[name][row - rows[0]] = value
        return columns

    def _converted(
        self, name: str, values: Sequence[Any], rows: Sequence[int], doubtful: set[int]
    ) -> list[Packed | None]:
        """Return one input of every row, None where there is none; rows with anything unusual are `doubtful`."""
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

    def _taken_in(self, given: Mapping[str, Any]) -> dict[str, Packed] | RowError:
        """Return what the intake makes of a row, or why it refuses it."""
        try:
            return self._intake.pack(given)
        except (InputError, LimitReached) as error:
            return row_error(error)

    def _whole(
        self,
        packed: Mapping[int, dict[str, Packed] | RowError | None],
        rows: Sequence[int],
        errors: dict[int, RowError],
    ) -> Columns:
        """Return packed rows as columns, with what they leave out; None in rows that are refused."""
        columns: dict[str, list[Packed | None]] = {name: [] for name in self._inputs}
        for row in rows:
            one = packed[row]
            if isinstance(one, RowError):
                errors[row] = one
            for name, column in columns.items():
                column.append(one.get(name, self._usual[name]) if isinstance(one, dict) else None)
        return columns


def _decoded(value: Packed | None) -> Packed | RowError | None:
    """Return a value with nothing left to decode, or why it cannot be decoded."""
    try:
        return None if value is None else value.decoded()
    except InputError as error:
        return row_error(error)


def _default(one: Input, type: PortType) -> Packed | None:
    """Return what an input is in a row that leaves it out; None when it is absent then."""
    if one.default is None and not one.hidden:
        return None
    if one.default is None and one.optional:
        return None
    return pack(to_value(type, one.default, MediaLimits()), type, f"input {one.name}")


def _is_media(type: PortType) -> bool:
    return _is_media(type.item) if type.item is not None else type.kind in ("image", "audio")
