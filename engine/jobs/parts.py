"""Assembly of answers into parts, committed in order by a thread."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, BinaryIO

from weftline.engine.jobs.blocks import Mark
from weftline.engine.jobs.output.columns import Columns
from weftline.engine.jobs.output.manifest import ErrorRow
from weftline.engine.jobs.output.store import Draft, Store
from weftline.engine.jobs.output.tables import write_part
from weftline.engine.jobs.output.values import MediaEncoder, settled
from weftline.engine.jobs.preparing import Prepared
from weftline.engine.jobs.rows import BlockResult, RowBlock
from weftline.engine.jobs.tally import Tally

if TYPE_CHECKING:
    import pyarrow as pa

Commit = Callable[["ResultPart"], None]
"""Commits a part that is complete; called in a thread."""


class ResultPart:
    """A part as it fills.

    place:   of its first row here; `rows` how many have come, error rows among them.
    places:  of the rows in `batches`, in order.
    """

    def __init__(self, part: int, place: int, draft: Draft | None) -> None:
        self.part, self.place, self.draft = part, place, draft
        self.rows = 0
        self.batches: list[pa.RecordBatch] = []
        self.places: list[int] = []
        self.errors: list[ErrorRow] = []
        self.tally = Tally()
        self.after = Mark()
        self._began_s = time.monotonic()

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._began_s

    def add(self, block: RowBlock, answered: BlockResult, batch: pa.RecordBatch, after: Mark) -> None:
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
    """Fills parts and hands each to `commit` when it is complete; one is being committed while the next fills."""

    def __init__(self, columns: Columns, store: Store, commit: Commit, committed: Callable[[int], None]) -> None:
        """committed: told how many rows have been committed since, after each part."""
        self._columns, self._store, self._commit, self._committed = columns, store, commit, committed
        self._media = bool(columns.media_outputs)
        self._encoder = MediaEncoder()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="weftline-commit")
        self._filling: ResultPart | None = None
        self._under_way: Future[int] | None = None

    def add(self, block: RowBlock, answered: BlockResult, after: Mark) -> BlockResult:
        """Take in the answer to the next block; return it with rows that cannot be written as error rows."""
        if self._filling is None:
            draft = None
            if self._media and self._columns.media == "files":
                self.wait()  # a part's files are begun when those of the one before are committed
                draft = self._store.begin(block.part)
            self._filling = ResultPart(block.part, block.place_of(0), draft)
        write = self._filling.draft.add if self._filling.draft is not None else None
        answered, batch = settled(self._columns, answered, block, self._encoder, write)
        self._filling.add(block, answered, batch, after)
        return answered

    def complete(self) -> None:
        """The part that fills has all of its rows: have it committed."""
        part, self._filling = self._filling, None
        if part is None:
            return
        self.wait()
        self._under_way = self._thread.submit(self._carry_out, part)

    def wait(self) -> None:
        """Wait until what is complete is committed; OutputFailed when it could not be."""
        under_way, self._under_way = self._under_way, None
        if under_way is not None:
            self._committed(under_way.result())

    def look(self) -> None:
        """Take note of a commit that is over."""
        if self._under_way is not None and self._under_way.done():
            self.wait()

    def close(self) -> None:
        """Wait for the commit that is under way, whatever becomes of it; what is not complete is let go."""
        self._thread.shutdown(wait=True)
        self._encoder.close()

    def _carry_out(self, part: ResultPart) -> int:
        self._commit(part)
        return part.rows


def commit_next(job: Prepared, store: Store) -> Commit:
    """Return what commits parts that follow each other."""

    def commit(part: ResultPart) -> None:
        store.commit(
            part.part, part.place, part.rows, writing(job, part.batches), part.errors, part.draft or (),
            part.after.to_json(), part.tally.to_json(), part.seconds,
        )  # fmt: skip

    return commit


def writing(job: Prepared, batches: Sequence[pa.RecordBatch]) -> Callable[[BinaryIO], None]:
    """Return what writes these rows as a part's file."""

    def write(file: BinaryIO) -> None:
        write_part(job.format, job.columns.schema, batches, file)

    return write
