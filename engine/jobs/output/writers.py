"""Table writers: Parquet, JSON lines, Arrow and the `datasets` format.

The same rows give the same bytes, in whatever batches they come. The file is the caller's: it is written from front to
back, neither flushed nor closed, and what it raises is raised here. Versions of pyarrow may differ in their bytes.

    parquet  zstd, dictionaries, statistics
    jsonl    UTF-8, one object a line, keys in the order of the columns, null where a value is absent
    arrow    the IPC file format (Feather 2), zstd
    hf       the IPC stream format, not compressed: `datasets` maps it into memory
"""

from __future__ import annotations

import io
from collections.abc import Iterable
from typing import Any, BinaryIO, Protocol

from weftline.engine.jobs.output.arrow import pa, pq
from weftline.engine.jobs.output.groups import Groups
from weftline.engine.jobs.output.lines import lines
from weftline.errors import InputError, MissingPackage

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
