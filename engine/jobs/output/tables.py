"""Parts of a job's results: write, read, amend and concatenate them in each format.

Equal rows give equal bytes, in whatever batches they arrive; pyarrow versions may differ. A file is written
sequentially, and neither flushed nor closed.

    parquet  zstd, dictionaries, statistics
    jsonl    UTF-8, one object per line, keys in column order, null for absent values
    arrow    the IPC file format (Feather 2), zstd
    hf       the IPC stream format, uncompressed: `datasets` maps it into memory

Parquet row groups and Arrow record batches end after GROUP_ROWS rows or GROUP_BYTES, which depends on the rows alone
and bounds memory.
"""

from __future__ import annotations

import io
import json
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, BinaryIO

import numpy as np

from weftline.engine.jobs.output.arrow import pa, pc, pq
from weftline.engine.jobs.output.json_lines import lines
from weftline.errors import InputError, MissingPackage, OutputFailed, first_line

ZSTD_LEVEL = 3
GROUP_ROWS = 50_000
GROUP_BYTES = 64 << 20
COPY_BYTES = 1 << 20


class LineWriter:
    """Writes rows as JSON lines, without buffering."""

    def __init__(self, schema: pa.Schema, out: BinaryIO) -> None:
        self._schema, self._out = schema, out

    def add(self, batch: pa.RecordBatch) -> None:
        for text in lines(self._schema, batch):
            self._out.write(text)

    def close(self) -> None:
        pass

    def abandon(self) -> None:
        pass


class GroupWriter:
    """Writes rows in groups to Parquet or Arrow IPC."""

    def __init__(self, format: str, schema: pa.Schema, out: BinaryIO) -> None:
        self._groups, self._out = Groups(schema), _Detachable(out)
        self._sink = _sink(format, schema, self._out)

    def add(self, batch: pa.RecordBatch) -> None:
        """Write full groups and keep the rest."""
        for group in self._groups.add(batch):
            self._put(group)

    def close(self) -> None:
        """Write the last group and the footer. The file stays open."""
        for group in self._groups.rest():
            self._put(group)
        self._sink.close()

    def abandon(self) -> None:
        """Write nothing more, after an error: the file has no footer."""
        self._out.detached = True

    def _put(self, group: pa.Table) -> None:
        limit = "row_group_size" if isinstance(self._sink, pq.ParquetWriter) else "max_chunksize"
        self._sink.write_table(group, **{limit: len(group)})


class _Detachable(io.RawIOBase):
    """Output file that can be detached: pyarrow writes a footer when an unclosed writer is deleted."""

    def __init__(self, out: BinaryIO) -> None:
        self._out, self._at = out, 0
        self.detached = False

    def writable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def write(self, data: Any) -> int:
        size = memoryview(data).nbytes
        if not self.detached:
            self._out.write(data)
        self._at += size
        return size


def _sink(format: str, schema: pa.Schema, out: _Detachable) -> Any:
    if format == "parquet":
        return pq.ParquetWriter(out, schema, version="2.6", compression="zstd", compression_level=ZSTD_LEVEL)
    if format == "hf":
        return pa.ipc.new_stream(out, schema)
    options = pa.ipc.IpcWriteOptions(compression=pa.Codec("zstd", ZSTD_LEVEL))
    return pa.ipc.new_file(out, schema, options=options)


def part_writer(format: str, schema: pa.Schema, out: BinaryIO) -> LineWriter | GroupWriter:
    """Return a writer of rows with that schema."""
    return LineWriter(schema, out) if format == "jsonl" else GroupWriter(format, schema, out)


def write_part(format: str, schema: pa.Schema, batches: Iterable[pa.RecordBatch], out: BinaryIO) -> int:
    """Write all rows and return their number. Nothing is written after an error."""
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


_NOT_WRITTEN = (pa.ArrowException, OSError, ValueError, TypeError, NotImplementedError)


def stored(schema: pa.Schema, format: str) -> pa.Schema:
    """Return the schema that a file of this format has: Parquet stores times of seconds in milliseconds.

    A column that the format cannot hold keeps its type; `check_columns` reports it.
    """
    return pa.schema([_stored_field(field, format) for field in schema], metadata=schema.metadata)


def _stored_field(field: pa.Field, format: str) -> pa.Field:
    if format != "parquet":
        return field
    try:
        return field.with_type(pq.read_schema(io.BytesIO(_written(field, format))).field(0).type)
    except _NOT_WRITTEN:
        return field


def _written(field: pa.Field, format: str) -> bytes:
    """Return a file with this column alone."""
    one = pa.table([pa.nulls(1, field.type)], schema=pa.schema([field.with_nullable(True)]))
    out = io.BytesIO()
    write_part(format, one.schema, one.to_batches(), out)
    return out.getvalue()


def check_columns(schema: pa.Schema, format: str) -> None:
    """Raise InputError with every column that the format cannot hold."""
    problems = []
    for field in schema:
        try:
            _written(field, format)
            if format == "hf":
                features(pa.schema([field.with_nullable(True)]))
        except _NOT_WRITTEN as error:
            problems.append(f"column {field.name}: {field.type} cannot be written as {format}: {first_line(error)}")
    if problems:
        fix = "choose the columns to keep (--keep), without these, or another format"
        raise InputError("\n".join([*problems, f"    fix: {fix}"]))


def features(schema: pa.Schema) -> Any:
    """Return the columns as `datasets.Features`; MissingPackage if `datasets` is not installed."""
    try:
        from datasets import Features
    except ImportError:
        raise MissingPackage("datasets", "batch") from None
    return Features.from_arrow_schema(schema)


class Groups:
    """Regroups batches of rows into tables of bounded size."""

    def __init__(self, schema: pa.Schema, rows_max: int = GROUP_ROWS, bytes_max: int = GROUP_BYTES) -> None:
        self._schema, self._rows_max, self._bytes_max = schema, rows_max, bytes_max
        self._waiting: list[pa.RecordBatch] = []
        self._rows = self._bytes = 0

    def add(self, batch: pa.RecordBatch) -> Iterator[pa.Table]:
        """Yield the groups that these rows complete."""
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
                yield self._popped()

    def rest(self) -> Iterator[pa.Table]:
        """Yield the incomplete last group, if any."""
        if self._rows:
            yield self._popped()

    def _popped(self) -> pa.Table:
        table = pa.Table.from_batches(self._waiting, self._schema)
        self._waiting, self._rows, self._bytes = [], 0, 0
        return seamless(table)


def seamless(table: pa.Table) -> pa.Table:
    """Copy rows into new memory whose bytes depend on the values alone.

    `take` drops offsets and the values under nulls.
    """
    return table.combine_chunks().take(pa.array(np.arange(len(table)), pa.int64())).combine_chunks()


def row_bytes(array: pa.Array) -> np.ndarray:
    """Estimate the bytes of each row, int64[rows]; equal rows have equal sizes."""
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
    """Yield the rows of a committed part of any format but jsonl, at most one group at a time.

    The batches have the field metadata of `schema`, which some formats lose. OutputFailed if the file cannot be read,
    or has other columns.
    """
    try:
        for batch in _stored_batches(file, format):
            if batch.schema.names != schema.names or batch.schema.types != schema.types:
                raise OutputFailed(
                    f"a part of the results has other columns than the job\n    found: {_shown(batch.schema)}\n"
                    f"    expected: {_shown(schema)}\n    fix: --restart begins anew"
                )
            yield pa.RecordBatch.from_arrays(batch.columns, schema=schema)
    except pa.ArrowException as error:
        raise OutputFailed(f"a part of the results cannot be read: {error}") from None


def _stored_batches(file: BinaryIO, format: str) -> Iterator[pa.RecordBatch]:
    if format == "parquet":
        parquet = pq.ParquetFile(file)
        for group in range(parquet.num_row_groups):  # without this, batches span groups and memory is not bounded
            yield from parquet.iter_batches(GROUP_ROWS, row_groups=[group])
    elif format == "arrow":
        reader = pa.ipc.open_file(file)
        yield from map(reader.get_batch, range(reader.num_record_batches))
    else:
        yield from pa.ipc.open_stream(file)


def _shown(schema: pa.Schema) -> str:
    return ", ".join(f"{field.name}: {field.type}" for field in schema)


def merge_rows(old: pa.Table, old_numbers: Sequence[int], new: pa.Table, new_numbers: Sequence[int]) -> pa.Table:
    """Return the rows of both tables ordered by row number; ValueError if the numbers do not match the rows.

    Both tables have the same schema, and no row number in common.
    """
    order = _order(old_numbers, len(old), new_numbers, len(new))
    return pa.concat_tables([old, new]).take(pa.array(order, pa.int64()))


def amend_part(
    old: BinaryIO,
    old_numbers: Sequence[int],
    new: Iterable[pa.RecordBatch],
    new_numbers: Sequence[int],
    format: str,
    schema: pa.Schema,
    out: BinaryIO,
) -> None:
    """Write the next revision of a part: its rows merged with retried rows, as if those had never failed.

    old, old_numbers: the committed part, and the number of each of its rows.
    new, new_numbers: the added rows, and their numbers.
    OutputFailed if the part cannot be read, or has another number of rows.
    """
    if format == "jsonl":
        before, after = old.read().splitlines(True), []
        for batch in new:
            for text in lines(schema, batch):
                after += text.splitlines(True)
        _check_length(len(before), old_numbers)
        both = before + after
        out.writelines(both[index] for index in _order(old_numbers, len(before), new_numbers, len(after)))
        return
    kept = pa.Table.from_batches(batches(old, format, schema), schema)
    _check_length(len(kept), old_numbers)
    merged = merge_rows(kept, old_numbers, pa.Table.from_batches(new, schema), new_numbers)
    write_part(format, schema, merged.to_batches(), out)


def _check_length(rows: int, row_numbers: Sequence[int]) -> None:
    if rows != len(row_numbers):
        raise OutputFailed(f"a part of the results has {rows} rows, expected {len(row_numbers)}\n    fix: --restart")


def _order(old_numbers: Sequence[int], old_rows: int, new_numbers: Sequence[int], new_rows: int) -> np.ndarray:
    """Return the order of the concatenated rows by row number."""
    if len(old_numbers) != old_rows or len(new_numbers) != new_rows:
        raise ValueError(f"{len(old_numbers)} and {len(new_numbers)} row numbers for {old_rows} and {new_rows} rows")
    row_numbers = np.array([*old_numbers, *new_numbers], np.int64)
    if len(np.unique(row_numbers)) < len(row_numbers):
        raise ValueError("two rows have the same number")
    return np.argsort(row_numbers, kind="stable")


def join_parts(parts: Iterable[Callable[[], BinaryIO]], format: str, out: BinaryIO, schema: pa.Schema) -> None:
    """Concatenate all parts, in order, with one group of rows in memory.

    The file equals a single part of all rows. OutputFailed if a part cannot be read.
    """
    if format == "jsonl":
        for opener in parts:
            with opener() as part:
                shutil.copyfileobj(part, out, COPY_BYTES)
    else:
        write_part(format, schema, _all_batches(parts, format, schema), out)


def _all_batches(parts: Iterable[Callable[[], BinaryIO]], format: str, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    for opener in parts:
        with opener() as part:
            yield from batches(part, format, schema)


def hf_files(names: Sequence[str], schema: pa.Schema, fingerprint: str) -> dict[str, bytes]:
    """Return the metadata files of a `datasets` folder, by name: layout.EXTRAS["hf"].

    names:       files of the parts, in order; at least one.
    fingerprint: cache key of `datasets`; different for different rows.
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
    return {
        name: (json.dumps(value, indent=2) + "\n").encode()
        for name, value in (("dataset_info.json", info), ("state.json", state))
    }
