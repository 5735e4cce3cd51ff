"""Row selection: filter, order, shard and limit.

Rows are gathered into *windows* until there are enough of them; a window is put in order, its share is taken, and it is
given out in tables. A position names where the window in hand begins and how much of it was given out, so that reading
on makes the same window again and goes on inside it. Memory holds one window, and of ids from a column a digest each.

Row order: seeded shuffle, shards and limits; pure.

The order of a shuffle is made twice: pieces change places, and then rows inside windows of WINDOW_ROWS selected rows.
It is the same wherever and whenever the same seed is used, and needs no more room than one window. It is no draw from
all orders of all rows: rows end up near rows of pieces that came near to theirs.

Only streams of numbers that numpy promises never to change are used: the raw bits of PCG64, and a stable sort.

Row ids from a column or from file and row, checked for uniqueness.
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

from weftline.engine.jobs.rows import Position, Rows
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
)
from weftline.engine.jobs.sources.text_reader import StandardInput
from weftline.engine.jobs.sources.where import RowFilter
from weftline.engine.jobs.spec import DataSpec
from weftline.errors import InputError
from weftline.pipelines.check.problems import did_you_mean, listed

GATHER_ROWS = 1_000
"""Rows that are gathered, filters and shares applied, before a table is given out."""

START: Position = {"piece": 0, "at": None, "skip": 0, "turn": 1, "seen": 0, "given": 0}
"""Where reading begins. `turn` counts windows from 1; `seen` and `given` count rows before shares and after limits."""


@dataclass(slots=True)
class _Window:
    """Selected rows that wait for their turn, and where the first of them was read."""

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
    """A Source: what a reader gives, with a DataSpec's selection applied. Read by one thread at a time."""

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
        """The columns of the data set; tables may have those of piece.HIDDEN besides."""
        return self._reader.schema

    @property
    def folder(self) -> str:
        """What paths in columns are relative to, where tables do not say so themselves."""
        return self._reader.origins[0].folder

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

    def read(self, after: Position | None = None, place: int = 0) -> Iterator[Rows]:
        given = after["given"] if after else 0
        if self._spec.id is not None:
            if self._once:
                after = None  # the rows before are looked at as they pass
            else:
                self._ids.look_before(given)
        for rows in self._rows(after):
            if self._spec.id is not None:
                self._ids.look(rows)
            if rows.place >= given:
                yield Rows(place + rows.place - given, rows.ids, rows.table, rows.after)

    def _rows(self, after: Position | None) -> Iterator[Rows]:
        """Yield rows from a position on; their places are counted from the first row of all."""
        at: Position = after or START
        limit = self._spec.limit
        turn, seen, given, skip = at["turn"], at["seen"], at["given"], at["skip"]
        if limit is not None and given >= limit:
            return
        for window in self._windows(at["piece"], at["at"]):
            for table, names, done in self._given_out(window, turn, seen, skip, limit, given):
                given += len(names)
                here = {
                    "piece": window.piece,
                    "at": window.at,
                    "skip": done,
                    "turn": turn,
                    "seen": seen,
                    "given": given,
                }
                yield Rows(given - len(names), names, table, here)
                if limit is not None and given >= limit:
                    return
            turn, seen, skip = turn + 1, seen + window.rows, 0

    def _ids_again(self, after: Position | None) -> Iterator[Rows]:
        """Yield rows whose ids count alone; of a shuffle all columns are read, since windows end by their bytes."""
        if self._spec.id is None or self._spec.shuffle is not None or not isinstance(self._reader, ColumnReader):
            yield from self._rows(after)
            return
        with closing(self._reader.only({self._spec.id, *self._where.columns})) as reader:
            yield from SelectedSource(reader, self._spec)._rows(after)

    def _windows(self, first: int, at: Mark | None) -> Iterator[_Window]:
        """Yield windows from a batch of a piece on."""
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
        """Return the rows of a batch that the filters keep, and what their ids are made from."""
        table, origin = batch.table, self._reader.origins[piece.origin]
        if self._folders:
            folder = pa.repeat(pa.scalar(origin.folder), table.num_rows)
            table = table.append_column(pa.field(FOLDER, pa.string()), folder)
        rows = np.arange(batch.row, batch.row + table.num_rows)
        if not self._where:
            return table, batch.names if batch.names is not None else (origin.name, rows)
        kept = np.flatnonzero(np.asarray(self._where.mask(table)))
        if len(kept) < table.num_rows:
            table = table.take(pa.array(kept))
        if batch.names is not None:
            return table, [batch.names[row] for row in kept.tolist()]
        return table, (origin.name, rows[kept])

    def _given_out(
        self, window: _Window, turn: int, seen: int, skip: int, limit: int | None, given: int
    ) -> Iterator[tuple[pa.Table, list[str], int]]:
        """Yield tables of a window's rows in order, their ids, and how many rows of it are then given out."""
        order = self._order(window.rows, turn, seen)
        count = window.rows if order is None else len(order)
        end = count if limit is None else min(count, skip + limit - given)
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
        """Return which rows of a window are given out, in their order; None: all, as they stand."""
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
    """Return the ids of rows at these places of a window."""
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


WINDOW_ROWS = 10_000
"""Rows that change places with each other."""

WINDOW_BYTES = 64 << 20
"""A window is closed early when its rows take so much room."""

_MASK = (1 << 64) - 1


def permutation(count: int, seed: int, turn: int) -> np.ndarray:
    """Return int64[count]: the numbers from 0 in an order made from the seed; turn 0 orders pieces, others windows."""
    bits = np.random.PCG64(np.random.SeedSequence([seed & _MASK, turn]))
    return np.argsort(bits.random_raw(count), kind="stable") if count else np.zeros(0, np.int64)


def share(count: int, seen: int, shard: tuple[int, int] | None) -> np.ndarray | None:
    """Return int64: which of `count` rows belong to a share, when `seen` came before them; None: all do.

    Row k, from 0, belongs to share k % n + 1 of n.
    """
    if shard is None:
        return None
    which, of = shard
    return np.arange((which - 1 - seen) % of, count, of)


def left(rows: int, shard: tuple[int, int] | None, limit: int | None) -> int:
    """Return how many of `rows` selected rows a job has after shares and limit."""
    if shard is not None:
        which, of = shard
        rows = max(0, -(-(rows - which + 1) // of))
    return rows if limit is None else min(rows, limit)


CHECKED_ROWS = 2_000_000
"""So many ids of one run are compared with each other; those beyond are not, since that takes room: 120 bytes each."""

_ID_BYTES = 16


class IdCheck:
    """Remembers 16 bytes of each id, of rows numbered from the first one that a job means.

    again: reads the rows after a position, or all, once more: those before a job that goes on are looked at too.
    """

    def __init__(self, again: Callable[[Position | None], Iterator[Rows]]) -> None:
        self._again = again
        self._seen: set[bytes] = set()
        self._looked = 0
        self._after: Position | None = None

    def look_before(self, place: int) -> None:
        """Look at the rows before a place, so far as that was not done; InputError as from `look`."""
        if self._looked >= place or len(self._seen) >= CHECKED_ROWS:
            return
        for rows in self._again(self._after):
            self.look(rows)
            if self._looked >= place or len(self._seen) >= CHECKED_ROWS:
                return

    def look(self, rows: Rows) -> None:
        """Refuse an id that came before, in this reading or an earlier one; InputError names it."""
        new = rows.ids[max(0, self._looked - rows.place) :]
        if new:
            self._looked, self._after = rows.place + len(rows), rows.after
        for id in new[: max(0, CHECKED_ROWS - len(self._seen))]:
            digest = hashlib.blake2b(id.encode("utf-8", "surrogatepass"), digest_size=_ID_BYTES).digest()
            if digest in self._seen:
                raise InputError(
                    f"row id {id!r:.200} comes twice\n    fix: choose a column whose values differ, or leave --id out"
                )
            self._seen.add(digest)


def check_id(name: str, schema: pa.Schema) -> None:
    """Refuse a column that cannot have ids."""
    if name not in schema.names:
        hint = did_you_mean(name, schema.names)
        raise InputError(
            f"--id {name:.80}: there is no such column{f'; {hint}' if hint else ''}\n"
            f"    columns: {listed(schema.names)}"
        )
    type = schema.field(name).type
    fits = (pa.types.is_string, pa.types.is_large_string, pa.types.is_integer, pa.types.is_date, pa.types.is_timestamp)
    if not any(one(type) for one in fits):
        raise InputError(f"--id {name:.80}: a column of {type}; expected text or whole numbers")


def ids_of(table: pa.Table, name: str, instead: Sequence[str], broken: Sequence[bool] | None) -> list[str]:
    """Return the ids of a column as text; rows that could not be read are called after file and row.

    instead: ids made from file and row.
    broken:  which rows could not be read.
    """
    found: list[str | None] = table.column(name).cast(pa.string()).to_pylist()
    for row, id in enumerate(found):
        if id is None:
            if broken is None or not broken[row]:
                raise InputError(f"row {instead[row]}: column {name} is empty, and --id {name} makes row ids from it")
            found[row] = instead[row]
    return [id for id in found if id is not None]
