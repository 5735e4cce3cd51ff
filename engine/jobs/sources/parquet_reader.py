"""Parquet reader by row group, with batches sized by average row bytes."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from copy import copy
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.parquet as pq

from weftline.engine.jobs.sources import fingerprint
from weftline.engine.jobs.sources.finding import SourceFile, origins, unreadable
from weftline.engine.jobs.sources.piece import Batch, Mark, Origin, RowRange, rows_at_a_time
from weftline.engine.jobs.sources.schemas import check_names, fitted, lacking, plain

FOOTERS_AT_A_TIME = 8
OPEN_MAX = 8
"""Files that stay open at a time: rows in another order come from many."""


@dataclass(frozen=True, slots=True)
class _Footer:
    schema: pa.Schema
    rows: tuple[int, ...]
    size_bytes: tuple[int, ...]


class ParquetReader:
    """Reads every file's footer when it is made; rows only when they are asked for."""

    def __init__(self, files: Sequence[SourceFile]) -> None:
        self._files = files
        self.origins: Sequence[Origin] = origins(files)
        with ThreadPoolExecutor(FOOTERS_AT_A_TIME) as threads:
            self._footers = list(threads.map(_footer, files))
        self.schema: pa.Schema = plain(self._footers[0].schema)
        for one, footer in zip(files, self._footers, strict=True):
            check_names(footer.schema, one.shown)
            lacking(self.schema, footer.schema, one.shown, files[0].shown)
        self._open: dict[int, pq.ParquetFile] = {}

    @property
    def rows(self) -> int | None:
        return sum(sum(footer.rows) for footer in self._footers)

    def pieces(self, fine: bool) -> Sequence[RowRange]:
        found = []
        for origin, footer in enumerate(self._footers):
            row = 0
            for part, rows in enumerate(footer.rows):
                found.append(RowRange(origin, part, row, rows))
                row += rows
        return found

    def read(self, piece: RowRange, at: Mark | None = None) -> Iterator[Batch]:
        """Yield batches; a mark is the number of a batch in its row group."""
        footer, shown = self._footers[piece.origin], self._files[piece.origin].shown
        size = rows_at_a_time(footer.rows[piece.part], footer.size_bytes[piece.part])
        row = piece.row
        try:
            columns = self.schema.names
            batches = self._file(piece.origin).iter_batches(size, row_groups=[piece.part], columns=_roots(columns))
            for number, batch in enumerate(batches):
                if number >= (at or 0):
                    table = pa.Table.from_batches([batch])
                    yield Batch(number, row, fitted(table, self.schema, shown))
                row += batch.num_rows
        except (pa.ArrowException, OSError) as error:
            raise unreadable(f"{shown}, row group {piece.part}", error) from None

    def only(self, names: Collection[str]) -> ParquetReader:
        other = copy(self)
        other.schema = pa.schema([field for field in self.schema if field.name in names])
        other._open = {}
        return other

    def fingerprint(self) -> Mapping[str, str]:
        return fingerprint.of_tables(self._files, self.origins)

    def close(self) -> None:
        for file in self._open.values():
            file.close(force=True)
        self._open.clear()

    def _file(self, origin: int) -> pq.ParquetFile:
        if origin not in self._open:
            while len(self._open) >= OPEN_MAX:
                self._open.pop(next(iter(self._open))).close(force=True)
            self._open[origin] = _opened(self._files[origin])
        return self._open[origin]


def _roots(columns: Sequence[str]) -> Sequence[str] | None:
    """Return the columns to read; None, all of them, where a dot in a name would be taken for a path."""
    return None if any("." in name for name in columns) else columns


def _opened(file: SourceFile) -> pq.ParquetFile:
    return pq.ParquetFile(file.path if file.local else file.open())


def _footer(file: SourceFile) -> _Footer:
    try:
        with _opened(file) as opened:
            about = opened.metadata
            groups = [about.row_group(number) for number in range(about.num_row_groups)]
            rows, sizes = (one.num_rows for one in groups), (one.total_byte_size for one in groups)
            return _Footer(opened.schema_arrow, tuple(rows), tuple(sizes))
    except (pa.ArrowException, OSError) as error:
        raise unreadable(file.shown, error) from None
