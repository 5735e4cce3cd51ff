"""Grouping of rows into Parquet row groups and Arrow record batches.

Where a group ends depends on the rows alone, never on the batches they came in: with the row that makes it GROUP_ROWS
long, or GROUP_BYTES large. So memory is bounded whatever rows hold, and equal rows give equal files.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from weftline.engine.jobs.output.arrow import pa, pc

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
