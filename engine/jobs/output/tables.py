"""Table writers: Parquet, JSON lines, Arrow and the `datasets` format.

The same rows give the same bytes, in whatever batches they come. The file is the caller's: it is written from front to
back, neither flushed nor closed, and what it raises is raised here. Versions of pyarrow may differ in their bytes.

    parquet  zstd, dictionaries, statistics
    jsonl    UTF-8, one object a line, keys in the order of the columns, null where a value is absent
    arrow    the IPC file format (Feather 2), zstd
    hf       the IPC stream format, not compressed: `datasets` maps it into memory

Grouping of rows into Parquet row groups and Arrow record batches.

Where a group ends depends on the rows alone, never on the batches they came in: with the row that makes it GROUP_ROWS
long, or GROUP_BYTES large. So memory is bounded whatever rows hold, and equal rows give equal files.

Reader of committed parts, batch by batch.

Merge of retried rows into their committed part, in row order.

What comes out is the part that would have been written had they not failed.

Concatenation of parts into one file or a Hugging Face data set folder.
"""

from __future__ import annotations

import io
import json
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, BinaryIO, Protocol

import numpy as np

from weftline.engine.jobs.output.arrow import pa, pc, pq
from weftline.engine.jobs.output.json_lines import lines
from weftline.errors import InputError, MissingPackage, OutputFailed

ZSTD_LEVEL = 3


class PartWriter(Protocol):
    """Writes rows."""

    def add(self, batch: pa.RecordBatch) -> None:
        """Write rows, or keep them until there are more."""

    def close(self) -> None:
        """Write what is left, and the end. The file stays open."""

    def abandon(self) -> None:
        """Write no more; the file has no end. For a file that failed."""


def part_writer(format: str, schema: pa.Schema, out: BinaryIO) -> PartWriter:
    """Return a writer of rows with that schema onto `out`."""
    return Lines(schema, out) if format == "jsonl" else Grouped(format, schema, out)


def write_part(format: str, schema: pa.Schema, batches: Iterable[pa.RecordBatch], out: BinaryIO) -> int:
    """Write all rows onto `out` and return how many there were. After an error nothing more is written."""
    writer, rows = part_writer(format, schema, out), 0
    try:
        for batch in batches:
            writer.add(batch)
            rows += len(batch)
        writer.close()
    except BaseException:
        writer.abandon()
        raise
    return rows


def check_columns(schema: pa.Schema, format: str) -> None:
    """Raise InputError with every column that this format cannot hold, before anything is written."""
    problems = []
    for field in schema:
        try:
            empty = pa.table([pa.nulls(1, field.type)], schema=pa.schema([field.with_nullable(True)]))
            write_part(format, empty.schema, empty.to_batches(), io.BytesIO())
            if format == "hf":
                features(empty.schema)
        except (pa.ArrowException, ValueError, TypeError, NotImplementedError) as error:
            problems.append(f"column {field.name}: {field.type} cannot be written as {format}: {_first_line(error)}")
    if problems:
        fix = "choose the columns to keep (--keep), without these, or another format"
        raise InputError("\n".join([*problems, f"    fix: {fix}"]))


def features(schema: pa.Schema) -> Any:
    """Return the columns as `datasets` describes them; MissingPackage without it."""
    try:
        from datasets import Features
    except ImportError:
        raise MissingPackage("datasets", "batch") from None
    return Features.from_arrow_schema(schema)


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


class Grouped:
    """Writes rows in groups."""

    def __init__(self, format: str, schema: pa.Schema, out: BinaryIO) -> None:
        self._groups, self._gate = Groups(schema), _Gate(out)
        self._sink = _sink(format, schema, self._gate)

    def add(self, batch: pa.RecordBatch) -> None:
        for group in self._groups.add(batch):
            self._put(group)

    def close(self) -> None:
        for group in self._groups.rest():
            self._put(group)
        self._sink.close()

    def abandon(self) -> None:
        self._gate.shut = True

    def _put(self, group: pa.Table) -> None:
        if isinstance(self._sink, pq.ParquetWriter):
            self._sink.write_table(group, row_group_size=len(group))
        else:
            self._sink.write_table(group, max_chunksize=len(group))


class _Gate(io.RawIOBase):
    """Stands before a file: pyarrow writes a footer when a writer is merely forgotten, which a shut gate swallows."""

    def __init__(self, out: BinaryIO) -> None:
        self._out, self._at = out, 0
        self.shut = False

    def writable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def write(self, data: Any) -> int:
        size = memoryview(data).nbytes
        if not self.shut:
            self._out.write(data)
        self._at += size
        return size


def _sink(format: str, schema: pa.Schema, out: _Gate) -> Any:
    if format == "parquet":
        return pq.ParquetWriter(out, schema, version="2.6", compression="zstd", compression_level=ZSTD_LEVEL)
    if format == "hf":
        return pa.ipc.new_stream(out, schema)
    options = pa.ipc.IpcWriteOptions(compression=pa.Codec("zstd", ZSTD_LEVEL))
    return pa.ipc.new_file(out, schema, options=options)


class Lines:
    """Writes rows as lines of JSON, as they come."""

    def __init__(self, schema: pa.Schema, out: BinaryIO) -> None:
        self._schema, self._out = schema, out

    def add(self, batch: pa.RecordBatch) -> None:
        for text in lines(self._schema, batch):
            self._out.write(text)

    def close(self) -> None:
        pass

    def abandon(self) -> None:
        pass


GROUP_ROWS = 50_000
GROUP_BYTES = 64 << 20


class Groups:
    """Takes batches and gives groups, each a table without seams."""

    def __init__(self, schema: pa.Schema, rows_max: int = GROUP_ROWS, bytes_max: int = GROUP_BYTES) -> None:
        self._schema, self._rows_max, self._bytes_max = schema, rows_max, bytes_max
        self._waiting: list[pa.RecordBatch] = []
        self._rows = self._bytes = 0

    def add(self, batch: pa.RecordBatch) -> Iterator[pa.Table]:
        """Yield the groups that are full with these rows."""
        until = np.cumsum(sum((row_bytes(one) for one in batch.columns), np.zeros(len(batch), np.int64)))
        start = 0
        while start < len(batch):
            before = int(until[start - 1]) if start else 0
            full = int(np.searchsorted(until, self._bytes_max - self._bytes + before)) + 1
            end = min(len(batch), full, start + self._rows_max - self._rows)
            self._waiting.append(batch.slice(start, end - start))
            self._rows += end - start
            self._bytes += int(until[end - 1]) - before
            start = end
            if self._rows >= self._rows_max or self._bytes >= self._bytes_max:
                yield self._taken()

    def rest(self) -> Iterator[pa.Table]:
        """Yield what is left, if anything is."""
        if self._rows:
            yield self._taken()

    def _taken(self) -> pa.Table:
        table = pa.Table.from_batches(self._waiting, self._schema)
        self._waiting, self._rows, self._bytes = [], 0, 0
        return seamless(table)


def seamless(table: pa.Table) -> pa.Table:
    """Return equal rows in memory of their own, which holds the same bytes wherever the rows came from.

    Taking every row leaves offsets, and what lies under nulls, behind.
    """
    return table.combine_chunks().take(pa.array(np.arange(len(table)), pa.int64())).combine_chunks()


def row_bytes(array: pa.Array) -> np.ndarray:
    """Return about how many bytes each row takes, int64[rows]; for equal rows the same, however they lie in memory."""
    kind = array.type
    if isinstance(array, pa.ExtensionArray):
        return row_bytes(array.storage)
    if pa.types.is_struct(kind):
        sizes = sum((row_bytes(one) for one in array.flatten()), np.zeros(len(array), np.int64))
    elif pa.types.is_fixed_size_list(kind):
        sizes = np.full(len(array), 8 * kind.list_size, np.int64)
    elif pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_map(kind):
        offsets = np.asarray(array.offsets, np.int64)
        inner = array.values[offsets[0] : offsets[-1]]  # of a map: its entries
        until = np.concatenate(([0], np.cumsum(row_bytes(inner))))
        sizes = np.diff(until[offsets - offsets[0]]) + 8
    elif pa.types.is_primitive(kind) or pa.types.is_null(kind) or pa.types.is_decimal(kind):
        return np.full(len(array), 8, np.int64)
    else:
        try:
            sizes = np.asarray(pc.fill_null(pc.binary_length(array), 0), np.int64) + 8
        except (pa.ArrowNotImplementedError, pa.ArrowKeyError):
            return np.full(len(array), 64, np.int64)
    return np.where(np.asarray(array.is_valid()), sizes, 8) if array.null_count else sizes


def batches(file: BinaryIO, format: str, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    """Yield the rows of a part of any format but jsonl, a group of them in memory at a time.

    OutputFailed when the file cannot be read, or has other columns than `schema`.
    """
    try:
        for table in _tables(file, format):
            yield from _fitting(table, schema).to_batches()
    except pa.ArrowException as error:
        raise OutputFailed(f"a part of the results cannot be read: {error}") from None


def _tables(file: BinaryIO, format: str) -> Iterator[pa.Table]:
    if format == "parquet":
        parquet = pq.ParquetFile(file)
        for group in range(parquet.num_row_groups):
            yield parquet.read_row_group(group)
    elif format == "arrow":
        arrow = pa.ipc.open_file(file)
        for place in range(arrow.num_record_batches):
            yield pa.Table.from_batches([arrow.get_batch(place)])
    else:
        for batch in pa.ipc.open_stream(file):
            yield pa.Table.from_batches([batch])


def _fitting(table: pa.Table, schema: pa.Schema) -> pa.Table:
    """Return the table with the field metadata of `schema`, which some formats lose."""
    if table.schema.names != schema.names or table.schema.types != schema.types:
        raise OutputFailed(
            f"a part of the results has other columns than the job\n    found: {_shown(table.schema)}\n"
            f"    expected: {_shown(schema)}\n    fix: --restart begins anew"
        )
    return pa.Table.from_arrays(table.columns, schema=schema)


def _shown(schema: pa.Schema) -> str:
    return ", ".join(f"{field.name}: {field.type}" for field in schema)


def merge_rows(old: pa.Table, old_places: Sequence[int], new: pa.Table, new_places: Sequence[int]) -> pa.Table:
    """Return the rows of both tables in the order of their places; ValueError when places do not fit the rows.

    Both have the same schema, and no place in common.
    """
    order = _order(old_places, len(old), new_places, len(new))
    return pa.concat_tables([old, new]).take(pa.array(order, pa.int64()))


def amend_part(
    old: BinaryIO,
    old_places: Sequence[int],
    new: Iterable[pa.RecordBatch],
    new_places: Sequence[int],
    format: str,
    schema: pa.Schema,
    out: BinaryIO,
) -> None:
    """Write a part's next revision onto `out`: its rows, and those that have been answered since.

    old, old_places: the part as it is, and the place of each row in it.
    new, new_places: the rows that are added, and their places.
    OutputFailed when the part cannot be read, or has another number of rows.
    """
    if format == "jsonl":
        before, after = old.read().splitlines(True), []
        for batch in new:
            for text in lines(schema, batch):
                after += text.splitlines(True)
        _check_length(len(before), old_places)
        both = before + after
        out.writelines(both[place] for place in _order(old_places, len(before), new_places, len(after)))
        return
    kept = pa.Table.from_batches(batches(old, format, schema), schema)
    _check_length(len(kept), old_places)
    merged = merge_rows(kept, old_places, pa.Table.from_batches(new, schema), new_places)
    write_part(format, schema, merged.to_batches(), out)


def _check_length(rows: int, places: Sequence[int]) -> None:
    if rows != len(places):
        raise OutputFailed(f"a part of the results has {rows} rows, expected {len(places)}\n    fix: --restart")


def _order(old_places: Sequence[int], old_rows: int, new_places: Sequence[int], new_rows: int) -> np.ndarray:
    """Return which row of both together comes when."""
    if len(old_places) != old_rows or len(new_places) != new_rows:
        counts = f"{len(old_places)} and {len(new_places)} places for {old_rows} and {new_rows} rows"
        raise ValueError(counts)
    places = np.array([*old_places, *new_places], np.int64)
    if len(np.unique(places)) < len(places):
        raise ValueError("two rows have the same place")
    return np.argsort(places, kind="stable")


COPY_BYTES = 1 << 20


def join_parts(parts: Iterable[Callable[[], BinaryIO]], format: str, out: BinaryIO, schema: pa.Schema) -> None:
    """Write all parts, in order, onto `out` as one file, one group of rows in memory at a time.

    The file is the one that all rows would have given as a single part. OutputFailed when a part cannot be read.
    """
    if format == "jsonl":
        for opener in parts:
            with opener() as part:
                shutil.copyfileobj(part, out, COPY_BYTES)
    else:
        write_part(format, schema, _all(parts, format, schema), out)


def _all(parts: Iterable[Callable[[], BinaryIO]], format: str, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    for opener in parts:
        with opener() as part:
            yield from batches(part, format, schema)


def hf_files(names: Sequence[str], schema: pa.Schema, fingerprint: str) -> dict[str, bytes]:
    """Return the files that make a data set of a folder with parts, by name: formats.EXTRAS["hf"].

    names:       of the parts' files, in order; at least one.
    fingerprint: `datasets` caches what it makes of the data set under it: another one for other rows.
    """
    state: dict[str, object] = {
        "_data_files": [{"filename": name} for name in names],
        "_fingerprint": fingerprint,
        "_format_columns": None,
        "_format_kwargs": {},
        "_format_type": None,
        "_output_all_columns": False,
        "_split": None,
    }
    info = {"citation": "", "description": "", "features": features(schema).to_dict(), "homepage": "", "license": ""}
    return {"dataset_info.json": _document(info), "state.json": _document(state)}


def _document(value: object) -> bytes:
    return (json.dumps(value, indent=2) + "\n").encode()
