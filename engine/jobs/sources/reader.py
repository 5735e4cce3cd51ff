"""Reader interface of a data set: pieces, batches, marks and schema checks.

    data set -> pieces (RowRange) -> Batch -> selection -> Rows

A *piece* is a range of rows that can be read without the rows before it: a row group, a range, a whole file. A *batch*
is the result of one read step. A piece is always cut into the same batches, so that a *mark*, the start of a batch in
its piece, leads back to the same batch and to those after it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import pyarrow as pa

from weftline.engine.jobs.sources.arrow_types import may_hold
from weftline.errors import InputError, first_line
from weftline.pipelines.check.problems import listed

Mark = Any
"""Start of a batch in its piece, as a JSON value. Only its reader interprets it."""

UNUSABLE = "weftline:unusable"
"""Hidden column: why a row could not be read, null for readable rows."""

HIDDEN_FIELD = pa.field(UNUSABLE, pa.string())

FOLDER = "weftline:folder"
"""Hidden column: folder of the row's file. Present if the files lie in several folders."""

HIDDEN = (UNUSABLE, FOLDER)
"""Columns of Rows.table that are not in Source.schema."""

MEANS = b"weftline"
"""Metadata key of a text column: `path` if it holds file names to read, `json` if it holds JSON text, or the mark of
cells: CSV_CELL or JSON_CELL. A column of cells has the type of the first rows in a reader's schema, and is text in a
batch."""

LATE = b"weftline.late"
"""Metadata key of a column that the first rows lack, and that an optional input reads; not kept by default."""

BATCH_ROWS_MAX = 4_096
BATCH_BYTES = 16 << 20
"""Approximate limit of a batch, from the average bytes per row."""


@dataclass(frozen=True, slots=True)
class Origin:
    """File or data set that rows come from.

    name:   used in row ids: the file's path below the folder common to all files.
    shown:  used in messages: the file as the user wrote it.
    folder: path or URL that paths in its rows are relative to; '' is the working directory.
    root:   path or URL of the folder that these paths must not leave; '': `folder`.
    """

    name: str
    shown: str
    folder: str = ""
    root: str = ""


@dataclass(frozen=True, slots=True)
class RowRange:
    """Range of rows that can be read alone.

    origin: index in DatasetReader.origins.
    part:   number of the row group, record batch or range in the file; 0 for a whole file.
    row:    number of the first row in the file, from 0.
    rows:   number of rows; None if unknown.
    """

    origin: int
    part: int = 0
    row: int = 0
    rows: int | None = None


@dataclass(frozen=True, slots=True)
class Batch:
    """Rows of one piece that were read together.

    at:    mark of this batch in its piece.
    row:   number of the first row in the file.
    table: the columns, with UNUSABLE if rows can be unreadable.
    names: row ids that the format defines; None: made from file and row number.
    """

    at: Mark
    row: int
    table: pa.Table
    names: Sequence[str] | None = None


class DatasetReader(Protocol):
    """Reader of one format. Every error is an InputError that names the file."""

    @property
    def schema(self) -> pa.Schema:
        """Columns without hidden ones; every batch has them in this order and, but for cells, of these types."""

    @property
    def origins(self) -> Sequence[Origin]: ...

    @property
    def rows(self) -> int | None:
        """Number of rows; None if it requires reading everything."""

    def pieces(self, fine: bool) -> Sequence[RowRange]:
        """Return all pieces in file order; small ones when `fine`, for a shuffle."""

    def read(self, piece: RowRange, at: Mark | None = None) -> Iterator[Batch]:
        """Yield the batches of a piece, from a mark on."""

    def fingerprint(self) -> Mapping[str, str]:
        """Return what identifies the data, one entry for each file or fact."""

    def close(self) -> None:
        """Close all files. Safe to call twice."""


@runtime_checkable
class ColumnReader(DatasetReader, Protocol):
    """Reader that can read a subset of the columns."""

    def only(self, names: Collection[str]) -> DatasetReader:
        """Return a reader of these columns with the same batches and its own open files."""


@runtime_checkable
class LateColumnReader(DatasetReader, Protocol):
    """Reader whose columns are those of the first rows; later rows may have more."""

    def expect(self, names: Collection[str]) -> None:
        """Add these columns, if the first rows lack them, with LATE in their metadata."""


def with_late(schema: pa.Schema, fields: Mapping[str, pa.Field]) -> pa.Schema:
    """Return the schema with further fields that it lacks, marked as late."""
    late = [field for name, field in fields.items() if name not in schema.names]
    return pa.schema([*schema, *(one.with_metadata({**(one.metadata or {}), LATE: b""}) for one in late)])


def is_late(field: pa.Field) -> bool:
    """Return True for a column that the first rows lack."""
    return LATE in (field.metadata or {})


def with_reasons(table: pa.Table, reasons: Mapping[int, str]) -> pa.Table:
    """Return the table with further unreadable rows: reasons by row."""
    if not reasons:
        return table
    here = UNUSABLE in table.schema.names
    found = table.column(UNUSABLE).to_pylist() if here else [None] * table.num_rows
    for row, why in reasons.items():
        found[row] = found[row] or why
    column = pa.array(found, pa.string())
    if here:
        return table.set_column(table.schema.get_field_index(UNUSABLE), HIDDEN_FIELD, column)
    return table.append_column(HIDDEN_FIELD, column)


def rows_at_a_time(rows: int, size_bytes: int) -> int:
    """Return the number of rows of a batch, given the total rows and bytes."""
    return max(1, min(BATCH_ROWS_MAX, rows * BATCH_BYTES // max(size_bytes, 1)))


def normalized_schema(schema: pa.Schema) -> pa.Schema:
    """Return a schema without dictionary types, which vary by batch, and without pandas metadata."""
    types = [one.value_type if pa.types.is_dictionary(one) else one for one in schema.types]
    fields = [pa.field(one.name, type, metadata=one.metadata) for one, type in zip(schema, types, strict=True)]
    metadata = {key: text for key, text in (schema.metadata or {}).items() if key != b"pandas"}
    return pa.schema(fields, metadata or None)


def check_names(schema: pa.Schema, shown: str) -> None:
    """Refuse a file without columns or with duplicate column names."""
    twice = sorted({name for name in schema.names if schema.names.count(name) > 1})
    if twice:
        raise InputError(f"{shown}: several columns are called {listed(twice)}; names must differ")
    if not schema.names:
        raise InputError(f"{shown}: has no columns")


def check_columns(schema: pa.Schema, found: pa.Schema, shown: str, first: str) -> None:
    """Refuse a later file that lacks a column of the first file; additional columns are ignored."""
    missing = [name for name in schema.names if name not in found.names]
    if missing:
        raise InputError(f"{shown}: has no column {listed(missing)}, which {first} has\n    fix: run them as two jobs")


def cast_columns(table: pa.Table, schema: pa.Schema, shown: str) -> pa.Table:
    """Return the columns of `schema`, cast where types differ; InputError if that would change a value."""
    columns = []
    for field in schema:
        column = table.column(field.name)
        if column.type != field.type:
            expected = f"{shown}: column {field.name}: found {column.type}, expected {field.type} as before it"
            if not may_hold(field.type, column.type):
                raise InputError(f"{expected}\n    fix: run them as two jobs")
            try:
                column = column.cast(field.type)
            except (pa.ArrowInvalid, pa.ArrowNotImplementedError, pa.ArrowTypeError) as error:
                raise InputError(f"{expected} ({first_line(error):.200})") from None
        columns.append(column)
    return pa.table(columns, schema=schema) if columns else table.select([])
