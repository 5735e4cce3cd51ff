"""Partition of rows into blocks and parts by row number; pure.

Part `p` holds the places from p * part_rows on; a block never reaches into another part. So the same data set is cut
alike in every run, wherever that run began.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from weftline.engine.jobs.rows import Position, RowBlock, Rows, Source

if TYPE_CHECKING:
    import pyarrow as pa


@dataclass(frozen=True, slots=True)
class Mark:
    """Where to read on: from `position` on the row with this place comes, and all that follow."""

    position: Position | None = None
    place: int = 0

    def to_json(self) -> dict[str, Any]:
        return {"position": None if self.position is None else dict(self.position), "place": self.place}

    @classmethod
    def from_json(cls, said: Position) -> Mark:
        return cls(said["position"], said["place"])


@dataclass(frozen=True, slots=True)
class Cut:
    """The rows of one block as they were read.

    part:  the part they belong to; `place` is that of the first.
    after: a mark from which the row after the last one can be reached.
    """

    part: int
    place: int
    ids: Sequence[str]
    table: pa.Table
    after: Mark

    @property
    def end(self) -> int:
        """The place after the last row's."""
        return self.place + len(self.ids)


def read_on(source: Source, mark: Mark, place: int) -> Iterator[tuple[Mark, Rows]]:
    """Yield the rows from `place` on, with the mark each Rows was read from."""
    for rows in source.read(mark.position, mark.place):
        here, end = mark, rows.place + len(rows)
        mark = Mark(rows.after, end)
        if end > place:
            yield here, _from(rows, max(0, place - rows.place))


def cut(rows: Iterator[tuple[Mark, Rows]], part_rows: int, block_rows: int) -> Iterator[Cut]:
    """Cut rows that follow each other into blocks; the last may be short."""
    import pyarrow as pa

    waiting: list[tuple[Mark, Rows]] = []
    count = 0

    def take(most: int) -> Cut:
        nonlocal count
        place = waiting[0][1].place
        ids: list[str] = []
        tables: list[pa.Table] = []
        after = Mark()
        while waiting and len(ids) < most:
            mark, first = waiting.pop(0)
            some = min(most - len(ids), len(first))
            ids += first.ids[:some]
            tables.append(first.table.slice(0, some))
            after = Mark(first.after, first.place + len(first))
            if some < len(first):
                waiting.insert(0, (mark, _from(first, some)))
                after = mark
        count -= len(ids)
        return Cut(place // part_rows, place, ids, pa.concat_tables(tables), after)

    for mark, one in rows:
        if not len(one):
            continue
        waiting.append((mark, one))
        count += len(one)
        while count >= (most := _room(waiting[0][1].place, part_rows, block_rows)):
            yield take(most)
            if not count:
                break
    while waiting:
        yield take(_room(waiting[0][1].place, part_rows, block_rows))


def size_of(block: RowBlock) -> int:
    """Return about how many bytes a block's inputs and kept columns hold."""
    found = int(block.table.nbytes)
    for values in block.inputs.values():
        for value in values:
            if isinstance(value, str | bytes):
                found += len(value)
            else:
                found += int(getattr(value, "nbytes", 64))
    return found


def _room(place: int, part_rows: int, block_rows: int) -> int:
    """Return how many rows the block has that begins at this place: blocks are counted from the part's beginning."""
    inside = place % part_rows
    return min(block_rows - inside % block_rows, part_rows - inside)


def _from(rows: Rows, at: int) -> Rows:
    if not at:
        return rows
    return Rows(rows.place + at, rows.ids[at:], rows.table.slice(at), rows.after)
