"""Parts of a job: assembly of results, commit in order, and retry of error rows."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, BinaryIO

from weftline.engine.jobs.blocks import BlockRows, ResumePoint, read_on
from weftline.engine.jobs.output.columns import Columns
from weftline.engine.jobs.output.manifest import ErrorRow
from weftline.engine.jobs.output.store import Draft, Store
from weftline.engine.jobs.output.tables import amend_part, write_part
from weftline.engine.jobs.output.values import MediaEncoder, settled
from weftline.engine.jobs.prepare import PreparedJob
from weftline.engine.jobs.progress import Tally
from weftline.engine.jobs.rows import BlockResult, RowBlock
from weftline.errors import InputError

if TYPE_CHECKING:
    import pyarrow as pa


Commit = Callable[["ResultPart"], None]
"""Commits a complete part; called in a thread."""


class ResultPart:
    """A part in assembly.

    place:   of its first row; `rows`: rows so far, with error rows.
    places:  of the rows in `batches`, in order.
    """

    def __init__(self, part: int, place: int, draft: Draft | None) -> None:
        self.part, self.place, self.draft = part, place, draft
        self.rows = 0
        self.batches: list[pa.RecordBatch] = []
        self.places: list[int] = []
        self.errors: list[ErrorRow] = []
        self.tally = Tally()
        self.after = ResumePoint()
        self._began_s = time.monotonic()

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._began_s

    def add(self, block: RowBlock, answered: BlockResult, batch: pa.RecordBatch, after: ResumePoint) -> None:
        self.rows += len(block)
        self.batches.append(batch)
        self.places += [block.place_of(row) for row in range(len(block)) if row not in answered.errors]
        for row, error in sorted(answered.errors.items()):
            self.errors.append(
                ErrorRow(
                    place=block.place_of(row), id=str(block.ids[row]), step=error.step, error=error.error,
                    reason=error.reason, part=self.part,
                )
            )  # fmt: skip
        self.tally.merge(answered.tally)
        self.after = after


class Parts:
    """Assembles parts and commits complete ones; one commits while the next is assembled."""

    def __init__(self, columns: Columns, store: Store, commit: Commit, committed: Callable[[int], None]) -> None:
        """committed: called with the rows of each committed part."""
        self._columns, self._store, self._commit, self._committed = columns, store, commit, committed
        self._media = bool(columns.media_outputs)
        self._encoder = MediaEncoder()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="weftline-commit")
        self._filling: ResultPart | None = None
        self._under_way: Future[int] | None = None

    def add(self, block: RowBlock, answered: BlockResult, after: ResumePoint) -> BlockResult:
        """Add the next block's result; returns it with unwritable rows as error rows."""
        if self._filling is None:
            draft = None
            if self._media and self._columns.media == "files":
                self.wait()  # a part's files are created after the commit of the previous part
                draft = self._store.begin(block.part)
            self._filling = ResultPart(block.part, block.place_of(0), draft)
        write = self._filling.draft.add if self._filling.draft is not None else None
        answered, batch = settled(self._columns, answered, block, self._encoder, write)
        self._filling.add(block, answered, batch, after)
        return answered

    def complete(self) -> None:
        """Commit the part in assembly, which has all its rows."""
        part, self._filling = self._filling, None
        if part is None:
            return
        self.wait()
        self._under_way = self._thread.submit(self._carry_out, part)

    def wait(self) -> None:
        """Wait for the commit in progress; OutputFailed if it failed."""
        under_way, self._under_way = self._under_way, None
        if under_way is not None:
            self._committed(under_way.result())

    def look(self) -> None:
        """Record a commit that has ended."""
        if self._under_way is not None and self._under_way.done():
            self.wait()

    def close(self) -> None:
        """Wait for the commit in progress, and discard the incomplete part."""
        self._thread.shutdown(wait=True)
        self._encoder.close()

    def _carry_out(self, part: ResultPart) -> int:
        self._commit(part)
        return part.rows


def commit_next(job: PreparedJob, store: Store) -> Commit:
    """Return the callback that commits consecutive parts."""

    def commit(part: ResultPart) -> None:
        store.commit(
            part.part, part.place, part.rows, writing(job, part.batches), part.errors, part.draft or (),
            part.after.to_json(), part.tally.to_json(), part.seconds,
        )  # fmt: skip

    return commit


def writing(job: PreparedJob, batches: Sequence[pa.RecordBatch]) -> Callable[[BinaryIO], None]:
    """Return the callback that writes these rows as a part's file."""

    def write(file: BinaryIO) -> None:
        write_part(job.format, job.columns.schema, batches, file)

    return write


def cuts_again(job: PreparedJob, store: Store, rows: list[ErrorRow]) -> Iterator[tuple[BlockRows, list[int], bool]]:
    """Yield the error rows as blocks, with their places and a flag for the last of a part."""
    by_part: dict[int, list[int]] = {}
    for row in rows:
        by_part.setdefault(row.part, []).append(row.place)
    for part, places in by_part.items():
        record = store.records[part]
        before = store.records[part - 1].after if part else {}
        mark = ResumePoint.from_json(before) if before else ResumePoint()
        found = list(_found(job, mark, record.place, record.place + record.rows, places))
        for at in range(0, len(places), job.block_rows):
            some = places[at : at + job.block_rows]
            ids, tables = zip(*found[at : at + job.block_rows], strict=True)
            yield (
                BlockRows(part, some[0], ids, _joined(tables), ResumePoint()),
                some,
                at + job.block_rows >= len(places),
            )


def _found(
    job: PreparedJob, mark: ResumePoint, start: int, end: int, places: list[int]
) -> Iterator[tuple[str, pa.Table]]:
    """Yield id and columns of the rows at these ascending places."""
    left = iter(places)
    wanted = next(left, None)
    for _, rows in read_on(job.source, mark, start):
        while wanted is not None and wanted < rows.place + len(rows):
            yield rows.ids[wanted - rows.place], rows.table.slice(wanted - rows.place, 1)
            wanted = next(left, None)
        if wanted is None or rows.place + len(rows) >= end:
            break
    if wanted is not None:
        raise InputError(f"row {wanted} of the job is no longer in the data")


def _joined(tables: tuple[pa.Table, ...]) -> pa.Table:
    import pyarrow as pa

    return pa.concat_tables(tables)


def commit_again(job: PreparedJob, store: Store) -> Commit:
    """Return the callback that replaces error rows of committed parts."""

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
