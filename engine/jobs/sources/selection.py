"""Row selection: filter, seeded shuffle, shard, limit and row ids.

Selected rows are gathered into *windows*; a window is put in order, reduced to its shard, and emitted in tables. A
position names the start of the current window and the number of its rows already emitted, so that resuming rebuilds
the same window and continues inside it. Memory holds one window, and a digest of each id from a column.

A shuffle permutes the pieces, and then the rows inside windows of WINDOW_ROWS rows. It depends on the seed alone and
needs memory for one window. It is not a uniform permutation: rows stay near rows of neighbouring pieces. It uses only
numbers that numpy guarantees to be stable: the raw bits of PCG64, and a stable sort.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from weftline.engine.jobs.rows import CSV_CELL, JSON_CELL, Position, Rows
from weftline.engine.jobs.sources.cells import cell_kind, is_unicode, json_values, view_type
from weftline.engine.jobs.sources.reader import (
    FOLDER,
    HIDDEN,
    UNUSABLE,
    Batch,
    ColumnReader,
    DatasetReader,
    Mark,
    RowRange,
    rows_at_a_time,
    with_reasons,
)
from weftline.engine.jobs.sources.text_reader import StandardInput
from weftline.engine.jobs.sources.where import RowFilter
from weftline.engine.jobs.spec import DataSpec
from weftline.errors import InputError
from weftline.nodes.json_value import SURROGATE
from weftline.nodes.strict_json import kind_of
from weftline.pipelines.check.problems import did_you_mean, listed

GATHER_ROWS = 1_000
"""Rows of a window without a shuffle, after filter and shard."""

WINDOW_ROWS = 10_000
"""Rows of a window that is shuffled."""

WINDOW_BYTES = 64 << 20
"""Size at which a window ends early."""

CHECKED_ROWS = 2_000_000
"""Most ids that are compared with each other, at 120 bytes of memory each."""

START: Position = {"piece": 0, "at": None, "skip": 0, "turn": 1, "seen": 0, "given": 0}
"""First position. `turn` counts windows from 1; `seen` counts rows before sharding, `given` rows after limits."""

_ID_BYTES = 16
_MASK = (1 << 64) - 1


@dataclass(slots=True)
class _Window:
    """Selected rows, and the piece and mark of the first of them."""

    piece: int
    at: Mark | None
    tables: list[pa.Table] = field(default_factory=list)
    ids: list[Sequence[str] | tuple[str, np.ndarray]] = field(default_factory=list)
    rows: int = 0
    size_bytes: int = 0

    def add(self, table: pa.Table, ids: Sequence[str] | tuple[str, np.ndarray]) -> None:
        self.tables.append(table)
        self.ids.append(ids)
        self.rows += table.num_rows
        self.size_bytes += table.nbytes


class SelectedSource:
    """Source of a reader's rows, with the selection of a DataSpec. Not thread-safe."""

    def __init__(self, reader: DatasetReader, spec: DataSpec) -> None:
        _check(spec)
        if taken := sorted(set(HIDDEN) & set(reader.schema.names)):
            raise InputError(f"columns called {', '.join(taken)}: these names are Weftline's own; rename them")
        self._reader, self._spec = reader, spec
        self._where = RowFilter(spec.where, reader.schema)
        if spec.id is not None:
            check_id(spec.id, reader.schema)
        self._pieces = _ordered(reader.pieces(spec.shuffle is not None), spec.shuffle)
        self._folders = len({one.folder for one in reader.origins}) > 1
        shares = spec.shard[1] if spec.shard is not None else 1
        self._once = reader.origins[0] is StandardInput.origin
        self._ids = IdCheck(self._ids_again)
        self._enough = WINDOW_ROWS if spec.shuffle is not None else min(GATHER_ROWS * shares, WINDOW_ROWS)

    @property
    def schema(self) -> pa.Schema:
        """Columns of the data set; tables can also have those of reader.HIDDEN."""
        return self._reader.schema

    @property
    def folder(self) -> str:
        """Folder that paths in columns are relative to, unless tables have the column FOLDER."""
        return self._reader.origins[0].folder

    @property
    def roots(self) -> tuple[str, ...]:
        """Folders that files named in rows must be below."""
        own: Sequence[str] | None = getattr(self._reader, "roots", None)
        return tuple(own if own is not None else dict.fromkeys(one.root or one.folder for one in self._reader.origins))

    @property
    def expected(self) -> int | None:
        if self._where:
            return None
        rows = self._reader.rows
        return None if rows is None else left(rows, self._spec.shard, self._spec.limit)

    def fingerprint(self) -> Mapping[str, str]:
        return self._reader.fingerprint()

    def close(self) -> None:
        self._reader.close()

    def read(self, after: Position | None = None, row_number: int = 0) -> Iterator[Rows]:
        emitted = after["given"] if after else 0
        if self._spec.id is not None:
            if self._once:
                after = None  # earlier ids are checked as the stream passes them
            else:
                self._ids.look_before(emitted)
        for rows in self._rows(after):
            if self._spec.id is not None:
                self._ids.look(rows)
            if rows.row_number >= emitted:
                yield Rows(row_number + rows.row_number - emitted, rows.ids, rows.table, rows.after)

    def _rows(self, after: Position | None) -> Iterator[Rows]:
        """Yield rows from a position on, with numbers counted from the first row of the job."""
        at: Position = after or START
        limit = self._spec.limit
        turn, seen, emitted, skip = at["turn"], at["seen"], at["given"], at["skip"]
        if limit is not None and emitted >= limit:
            return
        for window in self._windows(at["piece"], at["at"]):
            for table, names, done in self._tables(window, turn, seen, skip, limit, emitted):
                emitted += len(names)
                here = {
                    "piece": window.piece,
                    "at": window.at,
                    "skip": done,
                    "turn": turn,
                    "seen": seen,
                    "given": emitted,
                }
                yield Rows(emitted - len(names), names, table, here)
                if limit is not None and emitted >= limit:
                    return
            turn, seen, skip = turn + 1, seen + window.rows, 0

    def _ids_again(self, after: Position | None) -> Iterator[Rows]:
        """Yield rows for their ids alone; a shuffle reads all columns, since windows depend on their size."""
        if self._spec.id is None or self._spec.shuffle is not None or not isinstance(self._reader, ColumnReader):
            yield from self._rows(after)
            return
        with closing(self._reader.only({self._spec.id, *self._where.columns})) as reader:
            yield from SelectedSource(reader, self._spec)._rows(after)

    def _windows(self, first: int, at: Mark | None) -> Iterator[_Window]:
        """Yield windows, starting at a mark of a piece."""
        window: _Window | None = None
        for number in range(first, len(self._pieces)):
            piece = self._pieces[number]
            for batch in self._reader.read(piece, at if number == first else None):
                table, ids = self._selected(batch, piece)
                if not table.num_rows:
                    continue
                window = window or _Window(number, batch.at)
                window.add(table, ids)
                if window.rows >= self._enough or window.size_bytes >= WINDOW_BYTES:
                    yield window
                    window = None
        if window is not None:
            yield window

    def _selected(self, batch: Batch, piece: RowRange) -> tuple[pa.Table, Sequence[str] | tuple[str, np.ndarray]]:
        """Return the rows of a batch that pass the filter, and the parts of their ids."""
        table, origin = batch.table, self._reader.origins[piece.origin]
        if self._folders:
            folder = pa.repeat(pa.scalar(origin.folder), table.num_rows)
            table = table.append_column(pa.field(FOLDER, pa.string()), folder)
        rows = np.arange(batch.row, batch.row + table.num_rows)
        table = with_reasons(table, self._unfit_ids(table))
        if not self._where:
            return table, batch.names if batch.names is not None else (origin.name, rows)
        mask, reasons = self._where.evaluate(table)
        table, kept = with_reasons(table, reasons), np.flatnonzero(np.asarray(mask))
        if len(kept) < table.num_rows:
            table = table.take(pa.array(kept))
        if batch.names is not None:
            return table, [batch.names[row] for row in kept.tolist()]
        return table, (origin.name, rows[kept])

    def _unfit_ids(self, table: pa.Table) -> dict[int, str]:
        """Return by row why a value of the id column is no id."""
        name = self._spec.id
        if name is None or cell_kind(self.schema.field(name)) != JSON_CELL:
            return {}
        values = json_values(table.column(name).to_pylist())
        return {row: f"column {name}: {why}" for row, one in enumerate(values) if (why := _no_id(one))}

    def _tables(
        self, window: _Window, turn: int, seen: int, skip: int, limit: int | None, emitted: int
    ) -> Iterator[tuple[pa.Table, list[str], int]]:
        """Yield tables of a window's rows in order, their ids, and the number of rows emitted so far."""
        order = self._order(window.rows, turn, seen)
        count = window.rows if order is None else len(order)
        end = count if limit is None else min(count, skip + limit - emitted)
        table = pa.concat_tables(window.tables) if len(window.tables) > 1 else window.tables[0]
        if order is not None:
            table = table.combine_chunks()
        size = rows_at_a_time(window.rows, window.size_bytes)
        for start in range(skip, end, size):
            stop = min(start + size, end)
            if order is None:
                part, places = table.slice(start, stop - start), np.arange(start, stop)
            else:
                places = order[start:stop]
                part = table.take(pa.array(places))
            yield part, self._names(part, _ids(window.ids, places)), stop

    def _order(self, rows: int, turn: int, seen: int) -> np.ndarray | None:
        """Return the row numbers of a window to emit, in order; None: all, unchanged."""
        chosen = share(rows, seen, self._spec.shard)
        if self._spec.shuffle is None:
            return chosen
        order = permutation(rows, self._spec.shuffle, turn)
        return order if chosen is None else order[chosen]

    def _names(self, table: pa.Table, made: list[str]) -> list[str]:
        if self._spec.id is None:
            return made
        broken = None
        if UNUSABLE in table.schema.names:
            broken = pc.is_valid(table.column(UNUSABLE)).to_pylist()
        return ids_of(table, self._spec.id, made, broken)


def _ordered(pieces: Sequence[RowRange], seed: int | None) -> Sequence[RowRange]:
    return pieces if seed is None else [pieces[place] for place in permutation(len(pieces), seed, 0).tolist()]


def _ids(parts: Sequence[Sequence[str] | tuple[str, np.ndarray]], places: np.ndarray) -> list[str]:
    """Return the ids of these rows of a window."""
    if len(parts) == 1 and isinstance(parts[0], tuple):
        name, rows = parts[0]
        return [f"{name}#{row}" for row in rows[places].tolist()]
    starts = np.cumsum([0, *(len(one[1]) if isinstance(one, tuple) else len(one) for one in parts)])
    ids: list[Any] = []
    for part, place in zip((np.searchsorted(starts, places, "right") - 1).tolist(), places.tolist(), strict=True):
        one = parts[part]
        here = place - int(starts[part])
        ids.append(f"{one[0]}#{one[1][here]}" if isinstance(one, tuple) else one[here])
    return ids


def _check(spec: DataSpec) -> None:
    problems = []
    if spec.shard is not None and not 1 <= spec.shard[0] <= spec.shard[1]:
        problems.append(f"--shard {spec.shard[0]}/{spec.shard[1]}: expected i/n with i from 1 to n")
    if spec.limit is not None and spec.limit < 1:
        problems.append(f"--limit {spec.limit}: expected 1 or more")
    if problems:
        raise InputError("\n".join(problems))


def permutation(count: int, seed: int, turn: int) -> np.ndarray:
    """Return a seeded permutation, int64[count]; turn 0 is for pieces, others for windows."""
    bits = np.random.PCG64(np.random.SeedSequence([seed & _MASK, turn]))
    return np.argsort(bits.random_raw(count), kind="stable") if count else np.zeros(0, np.int64)


def share(count: int, seen: int, shard: tuple[int, int] | None) -> np.ndarray | None:
    """Return the indices of the rows in a shard, int64, after `seen` earlier rows; None: all rows.

    Row k, from 0, belongs to shard k % n + 1 of n.
    """
    if shard is None:
        return None
    which, of = shard
    return np.arange((which - 1 - seen) % of, count, of)


def left(rows: int, shard: tuple[int, int] | None, limit: int | None) -> int:
    """Return the number of rows left by shard and limit."""
    if shard is not None:
        which, of = shard
        rows = max(0, -(-(rows - which + 1) // of))
    return rows if limit is None else min(rows, limit)


class IdCheck:
    """Checks that row ids are unique, by a 16-byte digest of each.

    again: reads the rows after a position, or all, again: a resumed job checks earlier rows too.
    """

    def __init__(self, again: Callable[[Position | None], Iterator[Rows]]) -> None:
        self._again = again
        self._seen: set[bytes] = set()
        self._looked = 0
        self._after: Position | None = None

    def look_before(self, row_number: int) -> None:
        """Check the rows before a row that were not checked yet; InputError as in `look`."""
        if self._looked >= row_number or len(self._seen) >= CHECKED_ROWS:
            return
        for rows in self._again(self._after):
            self.look(rows)
            if self._looked >= row_number or len(self._seen) >= CHECKED_ROWS:
                return

    def look(self, rows: Rows) -> None:
        """Raise InputError for an id that occurred before, in this run or an earlier one."""
        new = rows.ids[max(0, self._looked - rows.row_number) :]
        if new:
            self._looked, self._after = rows.row_number + len(rows), rows.after
        for id in new[: max(0, CHECKED_ROWS - len(self._seen))]:
            digest = hashlib.blake2b(id.encode("utf-8", "surrogatepass"), digest_size=_ID_BYTES).digest()
            if digest in self._seen:
                raise InputError(
                    f"row id {id!r:.200} comes twice\n    fix: choose a column whose values differ, or leave --id out"
                )
            self._seen.add(digest)


def check_id(name: str, schema: pa.Schema) -> None:
    """Refuse a column that is missing or of a type unfit for ids."""
    if name not in schema.names:
        hint = did_you_mean(name, schema.names)
        raise InputError(
            f"--id {name:.80}: there is no such column{f'; {hint}' if hint else ''}\n"
            f"    columns: {listed(schema.names)}"
        )
    column = schema.field(name)
    type = pa.string() if cell_kind(column) == CSV_CELL else view_type(column) if cell_kind(column) else column.type
    fits = (pa.types.is_string, pa.types.is_large_string, pa.types.is_integer, pa.types.is_date, pa.types.is_timestamp)
    if not any(one(type) for one in fits):
        raise InputError(f"--id {name:.80}: a column of {type}; expected text or whole numbers")


def _no_id(value: Any) -> str:
    if value is None or value.__class__ is int or (isinstance(value, str) and is_unicode(value)):
        return ""
    return SURROGATE if isinstance(value, str) else f"expected text or a whole number, found {kind_of(value)}"


def _id_texts(column: pa.ChunkedArray, field: pa.Field) -> list[str | None]:
    if cell_kind(field) != JSON_CELL:
        found: list[str | None] = column.cast(pa.string()).to_pylist()
        return found
    values = json_values(column.to_pylist())
    return [None if value is None or _no_id(value) else str(value) for value in values]


def ids_of(table: pa.Table, name: str, instead: Sequence[str], broken: Sequence[bool] | None) -> list[str]:
    """Return the ids of a column as text; unreadable rows are named by file and row.

    instead: ids made from file and row.
    broken:  True for unreadable rows.
    """
    found = _id_texts(table.column(name), table.schema.field(name))
    for row, id in enumerate(found):
        if id is None:
            if broken is None or not broken[row]:
                raise InputError(f"row {instead[row]}: column {name} is null, and --id {name} makes row ids from it")
            found[row] = instead[row]
    return [id for id in found if id is not None]
