"""Arrow file and stream reader (Feather included), memory-mapped for local files.

A whole file is one piece; for another order a piece is one record batch of a file, and a stream stays whole.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pyarrow as pa

from weftline.engine.jobs.sources import fingerprint
from weftline.engine.jobs.sources.finding import SourceFile, origins, unreadable
from weftline.engine.jobs.sources.piece import Batch, Mark, Origin, RowRange, rows_at_a_time
from weftline.engine.jobs.sources.schemas import check_names, fitted, lacking, plain
from weftline.errors import InputError

MAGIC = b"ARROW1"
FEATHER_1 = b"FEA1"


class ArrowReader:
    """Looks at every file's schema when it is made."""

    def __init__(self, files: Sequence[SourceFile]) -> None:
        self._files = files
        self.origins: Sequence[Origin] = origins(files)
        self._schema: pa.Schema | None = None
        for one in files:
            found = self._described(one)
            check_names(found, one.shown)
            self._schema = plain(found) if self._schema is None else self._schema
            lacking(self._schema, found, one.shown, files[0].shown)

    @property
    def schema(self) -> pa.Schema:
        return self._schema

    @property
    def rows(self) -> int | None:
        """Known for files on this machine; of a stream and of a file elsewhere only reading would tell."""
        if not all(one.local for one in self._files):
            return None
        counts = [self._counts(one) for one in self._files]
        return None if any(one is None for one in counts) else sum(sum(one or ()) for one in counts)

    def pieces(self, fine: bool) -> Sequence[RowRange]:
        found: list[RowRange] = []
        for origin, file in enumerate(self._files):
            counts = self._counts(file) if fine else None
            if counts is None:
                found.append(RowRange(origin, -1))
                continue
            row = 0
            for part, rows in enumerate(counts):
                found.append(RowRange(origin, part, row, rows))
                row += rows
        return found

    def read(self, piece: RowRange, at: Mark | None = None) -> Iterator[Batch]:
        """Yield batches; a mark is a record batch, a row in it, and that row's number in the file."""
        file = self._files[piece.origin]
        first, start, row = at or (max(piece.part, 0), 0, piece.row)
        try:
            with _Opened(file) as opened:
                last = None if piece.part < 0 else piece.part + 1
                for number, batch in opened.batches(first, last):
                    skip = start if number == first else 0
                    for offset, table in slices(pa.Table.from_batches([batch]), skip):
                        yield Batch([number, offset, row], row, fitted(table, self.schema, file.shown))
                        row += table.num_rows
        except (pa.ArrowException, OSError) as error:
            raise unreadable(file.shown, error) from None

    def fingerprint(self) -> Mapping[str, str]:
        return fingerprint.of_tables(self._files, self.origins)

    def close(self) -> None:
        """Nothing stays open between reads."""

    def _described(self, file: SourceFile) -> pa.Schema:
        try:
            with _Opened(file) as opened:
                return opened.schema
        except (pa.ArrowException, OSError) as error:
            raise unreadable(file.shown, error) from None

    def _counts(self, file: SourceFile) -> list[int] | None:
        """Return the rows of each record batch of a file; None for a stream."""
        try:
            with _Opened(file) as opened:
                return [batch.num_rows for _, batch in opened.batches(0, None)] if opened.is_file else None
        except (pa.ArrowException, OSError) as error:
            raise unreadable(file.shown, error) from None


class _Opened:
    """An open file or stream; let go of when the block ends."""

    def __init__(self, file: SourceFile) -> None:
        self._source: Any = pa.memory_map(file.path) if file.local else file.open()
        try:
            magic = self._source.read(len(MAGIC))
            if magic.startswith(FEATHER_1):
                raise InputError(f"{file.shown}: Feather of version 1\n    fix: write it anew with a newer pyarrow")
            self.is_file = magic == MAGIC
            self._source.seek(0)
            self._reader = pa.ipc.open_file(self._source) if self.is_file else pa.ipc.open_stream(self._source)
        except BaseException:
            self._source.close()
            raise
        self.schema: pa.Schema = self._reader.schema

    def batches(self, first: int, end: int | None) -> Iterator[tuple[int, pa.RecordBatch]]:
        """Yield record batches with their numbers, from one on and up to another; of a stream the first are dropped."""
        if self.is_file:
            for number in range(first, self._reader.num_record_batches if end is None else end):
                yield number, self._reader.get_batch(number)
            return
        for number, batch in enumerate(self._reader):
            if number >= first:
                yield number, batch

    def __enter__(self) -> _Opened:
        return self

    def __exit__(self, *error: object) -> None:
        self._source.close()


def slices(table: pa.Table, start: int = 0) -> Iterator[tuple[int, pa.Table]]:
    """Yield a table from a row on in pieces that are no larger than a batch, each with its first row's number."""
    size = rows_at_a_time(table.num_rows, table.nbytes)
    for offset in range(start, table.num_rows, size):
        yield offset, table.slice(offset, size)
