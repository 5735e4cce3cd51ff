"""Parquet reader by row group, with batches sized by average row bytes.

Arrow file and stream reader (Feather included), memory-mapped for local files.

A whole file is one piece; for another order a piece is one record batch of a file, and a stream stays whole.

Arrow stream reader for standard input.

Reader of in-memory tables, for `pipeline.map`.

Hugging Face data sets, from disk (`save_to_disk`) or by name, read as Arrow.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from copy import copy
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from weftline.engine.jobs.sources.formats import shown_url
from weftline.engine.jobs.sources.locations import SourceFile, of_tables, origins, unreadable
from weftline.engine.jobs.sources.reader import (
    Batch,
    Mark,
    Origin,
    RowRange,
    check_names,
    fitted,
    lacking,
    plain,
    rows_at_a_time,
)
from weftline.engine.jobs.sources.text_reader import StandardInput
from weftline.errors import InputError
from weftline.pipelines.check.problems import did_you_mean, listed

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
        return of_tables(self._files, self.origins)

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
        return of_tables(self._files, self.origins)

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


class StreamReader:
    """Reads the schema when it is made. A mark is a record batch, a row in it, and that row's number in the stream."""

    def __init__(self, stdin: StandardInput) -> None:
        self.origins: Sequence[Origin] = (stdin.origin,)
        self._stream = stdin.open()
        try:
            self._reader = pa.ipc.open_stream(self._stream)
        except (pa.ArrowException, OSError) as error:
            raise unreadable(stdin.origin.shown, error) from None
        check_names(self._reader.schema, stdin.origin.shown)
        self.schema: pa.Schema = plain(self._reader.schema)
        self._stdin, self._read = stdin, False

    @property
    def rows(self) -> int | None:
        return None

    def pieces(self, fine: bool) -> Sequence[RowRange]:
        return [RowRange(0)]

    def read(self, piece: RowRange, at: Mark | None = None) -> Iterator[Batch]:
        """Yield batches, once."""
        if self._read:
            self._stdin.open()  # refuses
        self._read = True
        shown, row = self.origins[0].shown, 0
        first, start, _ = at or (0, 0, 0)
        try:
            for number, batch in enumerate(self._reader):
                table = pa.Table.from_batches([batch])
                for offset, part in slices(table):
                    if (number, offset) >= (first, start):
                        yield Batch([number, offset, row], row, fitted(part, self.schema, shown))
                    row += part.num_rows
        except (pa.ArrowException, OSError) as error:
            raise unreadable(shown, error) from None

    def fingerprint(self) -> Mapping[str, str]:
        return {"stdin": "cannot be checked"}

    def close(self) -> None:
        self._stream.close()


class TableReader:
    def __init__(self, table: pa.Table) -> None:
        check_names(table.schema, "the table")
        self._table = table
        self._size = rows_at_a_time(table.num_rows, table.nbytes)
        self.origins: Sequence[Origin] = (Origin("rows", "the table"),)
        self.schema: pa.Schema = plain(table.schema)

    @property
    def rows(self) -> int | None:
        return int(self._table.num_rows)

    def pieces(self, fine: bool) -> Sequence[RowRange]:
        size = min(PIECE_ROWS, self._size) if fine else max(self._table.num_rows, 1)
        total = self._table.num_rows
        return [RowRange(0, 0, row, min(size, total - row)) for row in range(0, total, size)]

    def read(self, piece: RowRange, at: Mark | None = None) -> Iterator[Batch]:
        """Yield batches; a mark is the number of a row."""
        end = piece.row + (piece.rows or 0)
        for row in range(piece.row if at is None else at, end, self._size):
            part = self._table.slice(row, min(self._size, end - row))
            yield Batch(row, row, fitted(part, self.schema, "the table"))

    def fingerprint(self) -> Mapping[str, str]:
        digest = hashlib.sha256(str(self.schema).encode())
        for batch in self._table.to_batches():
            digest.update(batch.serialize())
        return {"rows": f"{self._table.num_rows} rows sha256:{digest.hexdigest()}"}

    def close(self) -> None:
        """Nothing is open."""


PIECE_ROWS = 1_000
PROBE_ROWS = 8
"""Rows that are read first, to learn how many bytes a row takes."""


class HuggingFaceReader:
    """Reads one split. For another order a piece is a range of rows; else everything is one piece."""

    def __init__(self, dataset: Any, origin: Origin) -> None:
        self._dataset = dataset.with_format("arrow")
        self._fingerprint = str(dataset._fingerprint)
        self.origins: Sequence[Origin] = (origin,)
        try:
            probe = self._table(0, PROBE_ROWS)
        except (pa.ArrowException, OSError) as error:
            raise InputError(f"{origin.shown}: cannot be read: {str(error).splitlines()[0]}") from None
        check_names(probe.schema, origin.shown)
        self._batch_rows = rows_at_a_time(probe.num_rows, probe.nbytes)
        self.schema: pa.Schema = plain(probe.schema)

    @property
    def rows(self) -> int | None:
        return len(self._dataset)

    def pieces(self, fine: bool) -> Sequence[RowRange]:
        total = len(self._dataset)
        size = min(PIECE_ROWS, self._batch_rows) if fine else max(total, 1)
        return [RowRange(0, 0, row, min(size, total - row)) for row in range(0, total, size)]

    def read(self, piece: RowRange, at: Mark | None = None) -> Iterator[Batch]:
        """Yield batches; a mark is the number of a row in the data set."""
        shown, end = self.origins[0].shown, piece.row + (piece.rows or 0)
        for row in range(piece.row if at is None else at, end, self._batch_rows):
            try:
                table = self._table(row, min(row + self._batch_rows, end))
            except (pa.ArrowException, OSError) as error:
                raise InputError(f"{shown}, row {row}: cannot be read: {str(error).splitlines()[0]}") from None
            yield Batch(row, row, fitted(table, self.schema, shown))

    def fingerprint(self) -> Mapping[str, str]:
        return {self.origins[0].name: f"{len(self._dataset)} rows datasets:{self._fingerprint}"}

    def close(self) -> None:
        """datasets keeps its files mapped as long as the data set lives."""

    def _table(self, start: int, end: int) -> pa.Table:
        return self._dataset[start : min(end, len(self._dataset))]


def from_disk(path: str, shown: str, split: str | None, storage: Mapping[str, str]) -> HuggingFaceReader:
    """Open a folder that `save_to_disk` wrote; InputError when it is none, or has no such split."""
    import datasets

    try:
        found = datasets.load_from_disk(path, storage_options=dict(storage) or None)
    except (OSError, ValueError, KeyError, pa.ArrowException) as error:
        raise InputError(shown_url(f"{shown}: no Hugging Face data set: {_one_line(error)}")) from None
    dataset = _one_split(found, split, shown)
    return HuggingFaceReader(dataset, Origin(str(dataset.split or "rows"), shown, path))


def by_name(name: str, split: str | None) -> HuggingFaceReader:
    """Open `NAME` or `NAME:CONFIG`; InputError when it cannot be had."""
    import datasets

    path, _, config = name.partition(":")
    if not path.strip():
        raise InputError(f"hf:{name}: names no data set; expected hf:NAME or hf:NAME:CONFIG")
    try:
        found = datasets.load_dataset(path, config or None, split=split)
    except Exception as error:  # whatever a hub, a builder or a file system raises
        raise InputError(
            f"hf:{name}: cannot be had: {type(error).__name__}: {_one_line(error)}\n"
            "    fix: check the name, the split and the network; a folder that save_to_disk wrote needs neither"
        ) from None
    dataset = _one_split(found, None if split else split, f"hf:{name}")
    return HuggingFaceReader(dataset, Origin(str(dataset.split or "rows"), f"hf:{name}"))


def _one_split(found: Any, split: str | None, shown: str) -> Any:
    if not isinstance(found, Mapping):
        if split is not None and str(getattr(found, "split", None)) != split:
            raise InputError(f"{shown}: has the split {found.split} alone; --split {split} is not there")
        return found
    if split is None and len(found) == 1:
        return next(iter(found.values()))
    if split is None:
        raise InputError(f"{shown}: has the splits {listed(found)}\n    fix: add --split, one of them")
    if split not in found:
        hint = did_you_mean(split, found)
        raise InputError(f"{shown}: has no split {split}; {hint or 'it has'} ({listed(found)})")
    return found[split]


def _one_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0][:300] if lines else type(error).__name__
