"""Retry of error rows: reads them again, runs them and merges the answers into their parts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, BinaryIO

from weftline.engine.jobs.blocks import Cut, Mark, read_on
from weftline.engine.jobs.output.manifest import ErrorRow
from weftline.engine.jobs.output.store import Store
from weftline.engine.jobs.output.tables import amend_part
from weftline.engine.jobs.parts import Commit, ResultPart
from weftline.engine.jobs.preparing import Prepared
from weftline.engine.jobs.tally import Tally
from weftline.errors import InputError

if TYPE_CHECKING:
    import pyarrow as pa


def cuts_again(job: Prepared, store: Store, rows: list[ErrorRow]) -> Iterator[tuple[Cut, list[int], bool]]:
    """Yield the error rows as blocks, each with its rows' places and whether it is the last of its part."""
    by_part: dict[int, list[int]] = {}
    for row in rows:
        by_part.setdefault(row.part, []).append(row.place)
    for part, places in by_part.items():
        record = store.records[part]
        before = store.records[part - 1].after if part else {}
        mark = Mark.from_json(before) if before else Mark()
        found = list(_found(job, mark, record.place, record.place + record.rows, places))
        for at in range(0, len(places), job.block_rows):
            some = places[at : at + job.block_rows]
            ids, tables = zip(*found[at : at + job.block_rows], strict=True)
            yield Cut(part, some[0], ids, _joined(tables), Mark()), some, at + job.block_rows >= len(places)


def _found(job: Prepared, mark: Mark, start: int, end: int, places: list[int]) -> Iterator[tuple[str, pa.Table]]:
    """Yield id and columns of the rows at these places, which rise."""
    left = iter(places)
    wanted = next(left, None)
    for _, rows in read_on(job.source, mark, start):
        while wanted is not None and wanted < rows.place + len(rows):
            yield rows.ids[wanted - rows.place], rows.table.slice(wanted - rows.place, 1)
            wanted = next(left, None)
        if wanted is None or rows.place + len(rows) >= end:
            break
    if wanted is not None:
        raise InputError(f"row {wanted} of the job is not in the data any more")


def _joined(tables: tuple[pa.Table, ...]) -> pa.Table:
    import pyarrow as pa

    return pa.concat_tables(tables)


def commit_again(job: Prepared, store: Store) -> Commit:
    """Return what puts rows that were run again in the place of their parts' error rows."""

    def commit(part: ResultPart) -> None:
        record = store.records[part.part]
        failed = set(record.error_places)
        places = [place for place in range(record.place, record.place + record.rows) if place not in failed]
        tally = Tally.from_json(record.tally)
        tally.merge(part.tally)

        def write(out: BinaryIO) -> None:
            with store.open_part(part.part) as old:
                amend_part(old, places, part.batches, part.places, job.format, job.columns.schema, out)

        store.amend(part.part, write, part.errors, part.draft or (), tally.to_json(), part.seconds)

    return commit
