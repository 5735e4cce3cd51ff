"""Readers of Arrow data: Parquet, Arrow IPC and Hugging Face data sets.

Each reads batches of bounded size. Batch boundaries depend on the file alone, so that a mark leads to the same batch
when a job resumes.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
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
    cast_columns,
    check_columns,
    check_names,
    normalized_schema,
    rows_at_a_time,
)
from weftline.engine.jobs.sources.text_reader import StandardInput
from weftline.errors import InputError, first_line
from weftline.pipelines.check.problems import did_you_mean, listed

FOOTERS_AT_A_TIME = 8
OPEN_MAX = 8
"""Most files open at a time: shuffled rows come from many files."""

MAGIC = b"ARROW1"
FEATHER_1 = b"FEA1"
PIECE_ROWS = 1_000
PROBE_ROWS = 8
"""Rows read first, to estimate the bytes per row."""

_READ_ERRORS = (pa.ArrowException, OSError)


@dataclass(frozen=True, slots=True)
class _Footer:
    schema: pa.Schema
    rows: tuple[int, ...]
    size_bytes: tuple[int, ...]


class ParquetReader:
    """Parquet files; a piece is a row group, and a mark the number of a batch in it. Reads all footers on creation.

    schema: columns of the table of these files, null where a file lacks one; None: those of the first file.
    """

    def __init__(self, files: Sequence[SourceFile], schema: pa.Schema | None = None) -> None:
        self._files = files
        self.origins: Sequence[Origin] = origins(files)
        with ThreadPoolExecutor(FOOTERS_AT_A_TIME) as threads:
            self._footers = list(threads.map(_footer, files))
        self.schema: pa.Schema = normalized_schema(self._footers[0].schema if schema is None else schema)
        for file, footer in zip(files, self._footers, strict=True):
            check_names(footer.schema, file.shown)
            if schema is None:
                check_columns(self.schema, footer.schema, file.shown, files[0].shown)
        self._open: dict[int, pq.ParquetFile] = {}

    @property
    def rows(self) -> int | None:
        return sum(sum(footer.rows) for footer in self._footers)

    def pieces(self, fine: bool) -> Sequence[RowRange]:
        return [piece for origin, one in enumerate(self._footers) for piece in _numbered_parts(origin, one.rows)]

    def read(self, piece: RowRange, at: Mark | None = None) -> Iterator[Batch]:
        footer, shown = self._footers[piece.origin], self._files[piece.origin].shown
        size = rows_at_a_time(footer.rows[piece.part], footer.size_bytes[piece.part])
        row = piece.row
        # a dot in a column name would be read as a path: then all columns are read
        columns = [name for name in self.schema.names if name in footer.schema.names] or footer.schema.names[:1]
        columns = None if any("." in name for name in columns) else columns
        try:
            batches = self._file(piece.origin).iter_batches(size, row_groups=[piece.part], columns=columns)
            for number, batch in enumerate(batches):
                if number >= (at or 0):
                    table = _with_columns(pa.Table.from_batches([batch]), self.schema)
                    yield Batch(number, row, cast_columns(table, self.schema, shown))
                row += batch.num_rows
        except _READ_ERRORS as error:
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
            self._open[origin] = _parquet_file(self._files[origin])
        return self._open[origin]


def _with_columns(table: pa.Table, schema: pa.Schema) -> pa.Table:
    """Append the columns of a schema that a table lacks, as nulls."""
    for field in schema:
        if field.name not in table.column_names:
            table = table.append_column(field, pa.nulls(table.num_rows, field.type))
    return table


def _numbered_parts(origin: int, counts: Iterable[int]) -> Iterator[RowRange]:
    """Yield the parts of a file, given the number of rows of each."""
    row = 0
    for part, rows in enumerate(counts):
        yield RowRange(origin, part, row, rows)
        row += rows


def _parquet_file(file: SourceFile) -> pq.ParquetFile:
    return pq.ParquetFile(file.path if file.local else file.open())


def _footer(file: SourceFile) -> _Footer:
    try:
        with _parquet_file(file) as opened:
            groups = [opened.metadata.row_group(number) for number in range(opened.metadata.num_row_groups)]
            rows, sizes = (one.num_rows for one in groups), (one.total_byte_size for one in groups)
            return _Footer(opened.schema_arrow, tuple(rows), tuple(sizes))
    except _READ_ERRORS as error:
        raise unreadable(file.shown, error) from None


class ArrowReader:
    """Arrow IPC files and streams (Feather 2 included), memory-mapped where local.

    A piece is a file, or a record batch of a file when `fine`. A mark is a record batch, a row in it, and that row's
    number in the file. Reads all schemas on creation.
    """

    def __init__(self, files: Sequence[SourceFile]) -> None:
        self._files = files
        self.origins: Sequence[Origin] = origins(files)
        schemas = [self._schema_of(file) for file in files]
        self.schema: pa.Schema = normalized_schema(schemas[0])
        for file, schema in zip(files, schemas, strict=True):
            check_columns(self.schema, schema, file.shown, files[0].shown)

    @property
    def rows(self) -> int | None:
        """Row count of local files; None if a file is remote or is a stream."""
        if not all(file.local for file in self._files):
            return None
        total = 0
        for file in self._files:
            counts = self._counts(file)
            if counts is None:
                return None
            total += sum(counts)
        return total

    def pieces(self, fine: bool) -> Sequence[RowRange]:
        found: list[RowRange] = []
        for origin, file in enumerate(self._files):
            counts = self._counts(file) if fine else None
            found += [RowRange(origin, -1)] if counts is None else _numbered_parts(origin, counts)
        return found

    def read(self, piece: RowRange, at: Mark | None = None) -> Iterator[Batch]:
        file = self._files[piece.origin]
        first, start, row = at or (max(piece.part, 0), 0, piece.row)
        try:
            with _IpcFile(file) as opened:
                batches = opened.batches(first, None if piece.part < 0 else piece.part + 1)
                yield from _sliced(batches, self.schema, file.shown, (first, start), row - start)
        except _READ_ERRORS as error:
            raise unreadable(file.shown, error) from None

    def fingerprint(self) -> Mapping[str, str]:
        return of_tables(self._files, self.origins)

    def close(self) -> None:
        """Do nothing: no file stays open between reads."""

    def _schema_of(self, file: SourceFile) -> pa.Schema:
        try:
            with _IpcFile(file) as opened:
                check_names(opened.schema, file.shown)
                return opened.schema
        except _READ_ERRORS as error:
            raise unreadable(file.shown, error) from None

    def _counts(self, file: SourceFile) -> list[int] | None:
        """Return the number of rows of each record batch; None for a stream."""
        try:
            with _IpcFile(file) as opened:
                return [batch.num_rows for _, batch in opened.batches(0, None)] if opened.is_file else None
        except _READ_ERRORS as error:
            raise unreadable(file.shown, error) from None


class _IpcFile:
    """An open Arrow IPC file or stream."""

    def __init__(self, file: SourceFile) -> None:
        self._source: Any = pa.memory_map(file.path) if file.local else file.open()
        try:
            magic = self._source.read(len(MAGIC))
            if magic.startswith(FEATHER_1):
                raise InputError(
                    f"{file.shown}: Feather version 1 is not supported\n    fix: write the file with a newer pyarrow"
                )
            self.is_file = magic == MAGIC
            self._source.seek(0)
            self._reader = pa.ipc.open_file(self._source) if self.is_file else pa.ipc.open_stream(self._source)
        except BaseException:
            self._source.close()
            raise
        self.schema: pa.Schema = self._reader.schema

    def batches(self, first: int, end: int | None) -> Iterator[tuple[int, pa.RecordBatch]]:
        """Yield numbered record batches from `first` to `end`; a stream is read from its start and ignores `end`."""
        if self.is_file:
            for number in range(first, self._reader.num_record_batches if end is None else end):
                yield number, self._reader.get_batch(number)
            return
        for number, batch in enumerate(self._reader):
            if number >= first:
                yield number, batch

    def __enter__(self) -> _IpcFile:
        return self

    def __exit__(self, *error: object) -> None:
        self._source.close()


class StreamReader:
    """Arrow stream on standard input; can be read once. A mark is as in ArrowReader."""

    def __init__(self, stdin: StandardInput) -> None:
        self.origins: Sequence[Origin] = (stdin.origin,)
        self._stdin, self._read = stdin, False
        self._stream = stdin.open()
        try:
            self._reader = pa.ipc.open_stream(self._stream)
        except _READ_ERRORS as error:
            raise unreadable(stdin.origin.shown, error) from None
        check_names(self._reader.schema, stdin.origin.shown)
        self.schema: pa.Schema = normalized_schema(self._reader.schema)

    @property
    def rows(self) -> int | None:
        return None

    def pieces(self, fine: bool) -> Sequence[RowRange]:
        return [RowRange(0)]

    def read(self, piece: RowRange, at: Mark | None = None) -> Iterator[Batch]:
        if self._read:
            self._stdin.open()  # raises: standard input can be read once
        self._read = True
        first, start, _ = at or (0, 0, 0)
        try:
            yield from _sliced(enumerate(self._reader), self.schema, self.origins[0].shown, (first, start), 0)
        except _READ_ERRORS as error:
            raise unreadable(self.origins[0].shown, error) from None

    def fingerprint(self) -> Mapping[str, str]:
        return {"stdin": "cannot be checked"}

    def close(self) -> None:
        self._stream.close()


def _sliced(
    batches: Iterable[tuple[int, pa.RecordBatch]], schema: pa.Schema, shown: str, first: tuple[int, int], row: int
) -> Iterator[Batch]:
    """Yield numbered record batches as batches of bounded size.

    first: the record batch and the row in it to begin with; what precedes it is counted and skipped.
    row:   number in the file of the first row of `batches`.
    """
    for number, batch in batches:
        table = pa.Table.from_batches([batch])
        size = rows_at_a_time(table.num_rows, table.nbytes)
        for offset in range(0, table.num_rows, size):
            part = table.slice(offset, size)
            if (number, offset) >= first:
                yield Batch([number, offset, row], row, cast_columns(part, schema, shown))
            row += part.num_rows


class HuggingFaceReader:
    """One split of a Hugging Face data set. `datasets` keeps its files mapped while the data set exists.

    A piece is a range of rows, or all when not `fine`; a mark is a row.
    """

    def __init__(self, dataset: Any, origin: Origin, roots: Sequence[str] | None = None) -> None:
        """Open a split. roots: folders that its file names must be below; None: those of its origin."""
        self.roots = roots
        self._dataset = dataset.with_format("arrow")
        self._fingerprint = str(dataset._fingerprint)
        try:
            probe = self._dataset[0 : min(PROBE_ROWS, len(self._dataset))]
        except _READ_ERRORS as error:
            raise InputError(f"{origin.shown}: cannot be read: {first_line(error):.300}") from None
        check_names(probe.schema, origin.shown)
        self._batch_rows = rows_at_a_time(probe.num_rows, probe.nbytes)
        self.origins: Sequence[Origin] = (origin,)
        self.schema: pa.Schema = normalized_schema(probe.schema)

    @property
    def rows(self) -> int | None:
        return len(self._dataset)

    def pieces(self, fine: bool) -> Sequence[RowRange]:
        total = len(self._dataset)
        size = min(PIECE_ROWS, self._batch_rows) if fine else max(total, 1)
        return [RowRange(0, 0, row, min(size, total - row)) for row in range(0, total, size)]

    def read(self, piece: RowRange, at: Mark | None = None) -> Iterator[Batch]:
        shown, end = self.origins[0].shown, piece.row + (piece.rows or 0)
        for row in range(piece.row if at is None else at, end, self._batch_rows):
            try:
                table = self._dataset[row : min(row + self._batch_rows, end)]
            except _READ_ERRORS as error:
                raise InputError(f"{shown}, row {row}: cannot be read: {first_line(error):.300}") from None
            yield Batch(row, row, cast_columns(table, self.schema, shown))

    def fingerprint(self) -> Mapping[str, str]:
        return {self.origins[0].name: f"{len(self._dataset)} rows datasets:{self._fingerprint}"}

    def close(self) -> None:
        """Do nothing: `datasets` closes its files."""


def from_disk(path: str, shown: str, split: str | None, storage: Mapping[str, str]) -> HuggingFaceReader:
    """Open a folder written by `save_to_disk`; InputError if it is none, or lacks the split."""
    import datasets

    try:
        found = datasets.load_from_disk(path, storage_options=dict(storage) or None)
    except (OSError, ValueError, KeyError, pa.ArrowException) as error:
        raise InputError(shown_url(f"{shown}: no Hugging Face data set: {first_line(error):.300}")) from None
    dataset = _one_split(found, split, shown)
    return HuggingFaceReader(dataset, Origin(str(dataset.split or "rows"), shown, path))


def hub_caches() -> tuple[str, ...]:
    """Return the folders of files that `datasets` downloads and its rows name; none unless it is imported."""
    config = getattr(sys.modules.get("datasets"), "config", None)
    names = ("HF_DATASETS_CACHE", "DOWNLOADED_DATASETS_PATH", "EXTRACTED_DATASETS_PATH")
    found = [str(getattr(config, name)) for name in names if getattr(config, name, None)]
    hub = getattr(sys.modules.get("huggingface_hub.constants"), "HF_HUB_CACHE", None)
    return (*found, *([str(hub)] if hub else []))


def by_name(name: str, split: str | None) -> HuggingFaceReader:
    """Open `NAME` or `NAME:CONFIG` from the Hub; InputError if it cannot be loaded."""
    import datasets

    path, _, config = name.partition(":")
    if not path.strip():
        raise InputError(f"hf:{name}: names no data set; expected hf:NAME or hf:NAME:CONFIG")
    try:
        found = datasets.load_dataset(path, config or None, split=split)
    except Exception as error:  # any exception of a hub, a builder or a file system
        raise InputError(
            f"hf:{name}: cannot be loaded: {type(error).__name__}: {first_line(error):.300}\n"
            "    fix: check the name, the split and the network; a folder written by save_to_disk needs neither"
        ) from None
    dataset = _one_split(found, None if split else split, f"hf:{name}")
    return HuggingFaceReader(dataset, Origin(str(dataset.split or "rows"), f"hf:{name}"), hub_caches())


def _one_split(found: Any, split: str | None, shown: str) -> Any:
    if not isinstance(found, Mapping):
        if split is not None and str(getattr(found, "split", None)) != split:
            raise InputError(f"{shown}: has only the split {found.split}; --split {split} does not exist")
        return found
    if split is None and len(found) == 1:
        return next(iter(found.values()))
    if split is None:
        raise InputError(f"{shown}: has the splits {listed(found)}\n    fix: add --split, one of them")
    if split not in found:
        hint = did_you_mean(split, found)
        raise InputError(f"{shown}: has no split {split}; {hint or 'it has'} ({listed(found)})")
    return found[split]
