"""Reader of in-memory tables, for `pipeline.map`."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence

import pyarrow as pa

from weftline.engine.jobs.sources.piece import Batch, Mark, Origin, RowRange, rows_at_a_time
from weftline.engine.jobs.sources.schemas import check_names, fitted, plain

PIECE_ROWS = 1_000


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
