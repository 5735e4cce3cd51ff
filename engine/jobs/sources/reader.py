"""Data types of reading: sources, pieces of a data set and batches of rows.

    data set --Piece--> pieces --Batch--> selection --Rows-->

A *piece* is a run of rows that can be read without reading what stands before it: a row group, a range, a whole file.
A *batch* is what one step of reading gives. A piece is always cut into the same batches, so that a *mark*, which says
where a batch begins, leads back to exactly that batch and to those that follow it.

Schema consistency across batches and files.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import pyarrow as pa

from weftline.errors import InputError
from weftline.pipelines.check.problems import listed

Mark = Any
"""Where a batch begins in its piece, as a JSON value. Opaque to everybody but the reader."""

UNUSABLE = "weftline:unusable"
"""Hidden column: why a row could not be read at all, null for the others. All other columns of such a row are null."""

FOLDER = "weftline:folder"
"""Hidden column: the folder of the file that a row came from; only there when files lie in several folders."""

HIDDEN = (UNUSABLE, FOLDER)
"""Columns that Rows.table may have beyond Source.schema."""

MEANS = b"weftline"
"""Key in the metadata of a column: `path` when its text names files that are meant, `json` when it is written JSON."""

BATCH_ROWS_MAX = 4_096
BATCH_BYTES = 16 << 20
"""What one batch holds at most, roughly: bytes are guessed from what rows take on average."""


@dataclass(frozen=True, slots=True)
class Origin:
    """Where rows come from, for people and for what rows name.

    name:   stands in row ids: the file's path below the folder that all files share.
    shown:  stands in messages: the file as the user wrote it.
    folder: path or URL that the paths in its rows are relative to; '' is the working directory.
    """

    name: str
    shown: str
    folder: str = ""


@dataclass(frozen=True, slots=True)
class RowRange:
    """A run of rows that can be read alone.

    origin: index in Reader.origins.
    part:   which part of the file: a row group, a record batch, a range; 0 for a whole file.
    row:    number in the file of the first row, from 0.
    rows:   how many; None while that is unknown.
    """

    origin: int
    part: int = 0
    row: int = 0
    rows: int | None = None


@dataclass(frozen=True, slots=True)
class Batch:
    """Rows of one piece that were read together.

    at:    reading the piece from this mark begins with this batch.
    row:   number in the file of the first row.
    table: their columns; UNUSABLE is among them where rows can be broken.
    names: ids that the data set gives by itself; None: made from file and row.
    """

    at: Mark
    row: int
    table: pa.Table
    names: Sequence[str] | None = None


class DatasetReader(Protocol):
    """A data set of one format, as it lies there. Every error is an InputError that names the file."""

    @property
    def schema(self) -> pa.Schema:
        """The columns without hidden ones; every batch has them in this order and of these types."""

    @property
    def origins(self) -> Sequence[Origin]: ...

    @property
    def rows(self) -> int | None:
        """How many there are; None when only reading everything would tell."""

    def pieces(self, fine: bool) -> Sequence[RowRange]:
        """Return all pieces in the data set's own order; small ones when `fine`, to be put in another order."""

    def read(self, piece: RowRange, at: Mark | None = None) -> Iterator[Batch]:
        """Yield the batches of a piece, from a mark on."""

    def fingerprint(self) -> Mapping[str, str]:
        """Return what identifies the data, one entry for each file or fact."""

    def close(self) -> None:
        """Let go of files. Safe to call twice."""


@runtime_checkable
class ColumnReader(DatasetReader, Protocol):
    """One that need not read all columns."""

    def only(self, names: Collection[str]) -> DatasetReader:
        """Return another reader, of these columns alone: it gives the same batches, and has files open of its own."""


def rows_at_a_time(rows: int, size_bytes: int) -> int:
    """Return how many rows make a batch, when so many rows take so many bytes."""
    return max(1, min(BATCH_ROWS_MAX, rows * BATCH_BYTES // max(size_bytes, 1)))


def plain(schema: pa.Schema) -> pa.Schema:
    """Return a schema without dictionaries, which differ from batch to batch, and without pandas' index notes."""
    fields = [pa.field(field.name, _plain(field.type), metadata=field.metadata) for field in schema]
    metadata = {key: text for key, text in (schema.metadata or {}).items() if key != b"pandas"}
    return pa.schema(fields, metadata or None)


def _plain(type: pa.DataType) -> pa.DataType:
    return type.value_type if pa.types.is_dictionary(type) else type


def check_names(schema: pa.Schema, shown: str) -> None:
    """Refuse a file whose columns cannot be told apart, or that has none."""
    twice = sorted({name for name in schema.names if schema.names.count(name) > 1})
    if twice:
        raise InputError(f"{shown}: several columns are called {listed(twice)}; names must differ")
    if not schema.names:
        raise InputError(f"{shown}: has no columns")


def lacking(schema: pa.Schema, found: pa.Schema, shown: str, first: str) -> None:
    """Refuse a later file that does not have the first file's columns; what it has beyond them is left out."""
    missing = [name for name in schema.names if name not in found.names]
    if missing:
        raise InputError(f"{shown}: has no column {listed(missing)}, which {first} has\n    fix: run them as two jobs")


def fitted(table: pa.Table, schema: pa.Schema, shown: str) -> pa.Table:
    """Return the columns of `schema`, cast where a file has another type; InputError names file and column."""
    columns = []
    for field in schema:
        column = table.column(field.name)
        if column.type != field.type:
            try:
                column = column.cast(field.type)
            except (pa.ArrowInvalid, pa.ArrowNotImplementedError, pa.ArrowTypeError) as error:
                reason = str(error).splitlines()[0][:200]
                raise InputError(
                    f"{shown}: column {field.name}: found {column.type}, expected {field.type} as before it ({reason})"
                ) from None
        columns.append(column)
    return pa.table(columns, schema=schema) if columns else table.select([])
