"""Reader of committed parts, batch by batch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import BinaryIO

from weftline.engine.jobs.output.arrow import pa, pq
from weftline.errors import OutputFailed


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
