"""Blocks of a job: partition by row number, read-ahead, and in-order delivery.

Part `p` starts at row p * part_rows, and no block crosses a part. So a data set is partitioned equally in every run,
wherever that run starts.

`run_in_order` bounds memory by the number of blocks: `ahead` in the runner, and as many read ahead. Large blocks are
bounded by BYTES_MAX in the runner and in the read-ahead, and at least one is admitted.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from weftline.engine.jobs.rows import Position, RowBlock, Rows, Source

if TYPE_CHECKING:
    import pyarrow as pa


@dataclass(frozen=True, slots=True)
class ResumePoint:
    """Where to resume reading: at `position` the row with this number is next."""

    position: Position | None = None
    row_number: int = 0

    def to_json(self) -> dict[str, Any]:
        return {"position": None if self.position is None else dict(self.position), "place": self.row_number}

    @classmethod
    def from_json(cls, value: Position) -> ResumePoint:
        return cls(value["position"], value["place"])


@dataclass(frozen=True, slots=True)
class BlockRows:
    """The rows of one block, as read.

    part:       the part of the rows.
    row_number: of the first row.
    after:      a resume point at or before the next row.
    """

    part: int
    row_number: int
    ids: Sequence[str]
    table: pa.Table
    after: ResumePoint

    @property
    def end(self) -> int:
        """The number of the row after the last."""
        return self.row_number + len(self.ids)


def read_on(source: Source, mark: ResumePoint, row_number: int) -> Iterator[tuple[ResumePoint, Rows]]:
    """Yield the rows from `row_number` on, each Rows with its resume point."""
    for rows in source.read(mark.position, mark.row_number):
        here, end = mark, rows.row_number + len(rows)
        mark = ResumePoint(rows.after, end)
        if end > row_number:
            yield here, _from(rows, max(0, row_number - rows.row_number))


def cut(rows: Iterator[tuple[ResumePoint, Rows]], part_rows: int, block_rows: int) -> Iterator[BlockRows]:
    """Partition consecutive rows into blocks; the last may be short."""
    import pyarrow as pa

    waiting: list[tuple[ResumePoint, Rows]] = []
    count = 0

    def take(most: int) -> BlockRows:
        nonlocal count
        row_number = waiting[0][1].row_number
        ids: list[str] = []
        tables: list[pa.Table] = []
        after = ResumePoint()
        while waiting and len(ids) < most:
            mark, first = waiting.pop(0)
            some = min(most - len(ids), len(first))
            ids += first.ids[:some]
            tables.append(first.table.slice(0, some))
            after = ResumePoint(first.after, first.row_number + len(first))
            if some < len(first):
                waiting.insert(0, (mark, _from(first, some)))
                after = mark
        count -= len(ids)
        return BlockRows(row_number // part_rows, row_number, ids, pa.concat_tables(tables), after)

    for mark, one in rows:
        if not len(one):
            continue
        waiting.append((mark, one))
        count += len(one)
        while count >= (most := _room(waiting[0][1].row_number, part_rows, block_rows)):
            yield take(most)
            if not count:
                break
    while waiting:
        yield take(_room(waiting[0][1].row_number, part_rows, block_rows))


def size_of(block: RowBlock) -> int:
    """Estimate the bytes of a block's inputs and kept columns."""
    found = int(block.table.nbytes)
    for values in block.inputs.values():
        for value in values:
            if isinstance(value, str | bytes):
                found += len(value)
            else:
                found += int(getattr(value, "nbytes", 64))
    return found


def _room(row_number: int, part_rows: int, block_rows: int) -> int:
    """Return the rows of the block at this row; blocks are counted from the start of the part."""
    inside = row_number % part_rows
    return min(block_rows - inside % block_rows, part_rows - inside)


def _from(rows: Rows, at: int) -> Rows:
    if not at:
        return rows
    return Rows(rows.row_number + at, rows.ids[at:], rows.table.slice(at), rows.after)


BYTES_MAX = 512 << 20
"""Most bytes of blocks in the runner, and of blocks read ahead; a single block may be larger."""

LOOK_S = 0.2
"""Interval of `idle` while nothing happens."""

Block = TypeVar("Block")
Answer = TypeVar("Answer")


class _Ahead(Generic[Block]):
    """Reads a bounded number of blocks ahead, in a thread."""

    def __init__(self, blocks: Iterable[Block], most: int, size: Callable[[Block], int], wake: threading.Event) -> None:
        self._blocks, self._most, self._size, self._wake = blocks, most, size, wake
        self._read: deque[Block] = deque()
        self._bytes = 0
        self._changed = threading.Condition()
        self._over = self._left = False
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="weftline-read-ahead", daemon=True)
        self._thread.start()

    def take(self) -> Block | None:
        """Return the next block; None if none is ready."""
        with self._changed:
            if not self._read:
                return None
            block = self._read.popleft()
            self._bytes -= self._size(block)
            self._changed.notify()
            return block

    def over(self) -> bool:
        """Return True after the last block; raises the error of the source, if any."""
        with self._changed:
            over = self._over and not self._read
        if over and self._error is not None:
            raise self._error
        return over

    def leave(self) -> None:
        """Stop reading. The thread ends at the source's next rows."""
        with self._changed:
            self._left = True
            self._changed.notify()

    def _run(self) -> None:
        try:
            for block in self._blocks:
                with self._changed:
                    while not self._left and (len(self._read) >= self._most or self._bytes >= BYTES_MAX):
                        self._changed.wait()
                    if self._left:
                        return
                    self._read.append(block)
                    self._bytes += self._size(block)
                self._wake.set()
        except BaseException as error:
            self._error = error
        finally:
            with self._changed:
                self._over = True
            self._wake.set()


def run_in_order(
    blocks: Iterable[Block],
    submit: Callable[[Block], Future[Answer]],
    ahead: int,
    *,
    size: Callable[[Block], int] = lambda block: 0,
    stop: Callable[[], bool] = lambda: False,
    idle: Callable[[], None] = lambda: None,
) -> Generator[tuple[Block, Answer], None, None]:
    """Yield each block with its result, in order; errors are raised at their block. Close it when leaving early.

    ahead: most blocks in execution.
    size:  approximate bytes of a block.
    stop:  polled often; True ends the generator.
    idle:  called every LOOK_S while nothing else happens.
    """
    wake = threading.Event()
    read = _Ahead(blocks, ahead, size, wake)
    asked_bytes = 0
    asked: deque[tuple[Block, Future[Answer]]] = deque()
    try:
        while not stop():
            while len(asked) < ahead and asked_bytes < BYTES_MAX and (block := read.take()) is not None:
                asked_bytes += size(block)
                future = submit(block)
                asked.append((block, future))
                future.add_done_callback(lambda _: wake.set())
            if asked and asked[0][1].done():
                block, future = asked.popleft()
                asked_bytes -= size(block)
                yield block, future.result()
            elif not asked and read.over():
                return
            else:
                if not wake.wait(LOOK_S):
                    idle()
                wake.clear()
    finally:
        read.leave()
        for _, future in asked:
            future.cancel()
