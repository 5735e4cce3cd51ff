"""Columns of rows from the paths of their files: hive folders `KEY=VALUE`, and partition columns of Delta tables.

    sales/year=2024/country=S%C3%A3o%20Tom%C3%A9/a.parquet  ->  year "2024", country "São Tomé"

Folders below the argument count, and those at its end. Keys and values are percent-decoded, and
`__HIVE_DEFAULT_PARTITION__` is null. Values of hive folders are CSV cells (cells.py): text, and a number where one is
needed. A column replaces one of the same name in the files.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from urllib.parse import unquote

import pyarrow as pa

from weftline.engine.jobs.rows import CSV_CELL
from weftline.engine.jobs.sources.cells import cell_field, csv_field
from weftline.engine.jobs.sources.formats import without_query
from weftline.engine.jobs.sources.locations import SourceFile
from weftline.engine.jobs.sources.reader import (
    HIDDEN,
    Batch,
    ColumnReader,
    DatasetReader,
    LateColumnReader,
    Mark,
    Origin,
    RowRange,
)
from weftline.engine.jobs.sources.where import possible
from weftline.errors import InputError

NULL = "__HIVE_DEFAULT_PARTITION__"
_FOLDER = re.compile(r"([^=/]+)=([^/]*)")


@dataclass(frozen=True, slots=True)
class FileColumns:
    """Columns that are constant in each file.

    values: one row for each file.
    schema: their fields in a reader's schema, which differ from those of `values` for cells.
    """

    values: pa.Table
    schema: pa.Schema

    def __bool__(self) -> bool:
        return bool(self.schema.names)


def hive_columns(files: Sequence[SourceFile]) -> FileColumns:
    """Return the columns in the paths of files; null where a path lacks one."""
    found = [_pairs(file) for file in files]
    names = dict.fromkeys(name for pairs in found for name in pairs)
    columns = {name: pa.array([pairs.get(name) for pairs in found], pa.string()) for name in names}
    fields = [cell_field(name, pa.string(), CSV_CELL) for name in names]
    learned = [csv_field(name, values) for name, values in columns.items()]
    return FileColumns(pa.table(list(columns.values()), schema=pa.schema(fields)), pa.schema(learned))


def _pairs(file: SourceFile) -> dict[str, str | None]:
    """Return key and value of each folder `KEY=VALUE` below the argument of a file, or at its end."""
    path, base = without_query(file.path), file.base.rstrip("/")
    above = base.split("/")
    start = len(above)
    while start and _FOLDER.fullmatch(above[start - 1]):
        start -= 1
    inside = path.removeprefix(base + "/").split("/")[:-1]
    pairs = [match for part in [*above[start:], *inside] if (match := _FOLDER.fullmatch(part))]
    found: dict[str, str | None] = {}
    for match in pairs:
        name, value = unquote(match[1]), None if match[2] == NULL else unquote(match[2])
        if found.setdefault(name, value) != value:
            raise InputError(
                f"{file.shown}: two folders give {name}: {found[name]!r:.80} and {value!r:.80}\n"
                "    fix: rename or remove one of them"
            )
    return found


def pruned(
    files: Sequence[SourceFile], columns: FileColumns, where: Sequence[str]
) -> tuple[Sequence[SourceFile], FileColumns]:
    """Leave out files none of whose rows can match `where`; the first file stays if none can, for its schema."""
    if not columns or not where:
        return files, columns
    mask = possible(where, columns.values, columns.schema).to_pylist()
    kept = [place for place, may in enumerate(mask) if may] or [0]
    return [files[place] for place in kept], FileColumns(columns.values.take(pa.array(kept)), columns.schema)


class PartitionedReader:
    """Reader of files with further columns that are constant in each file.

    columns: a row for each file of the inner reader.
    by_row:  each row of the inner reader is a file; else each of its origins is one.
    order:   names of all columns in their order; (): those of the inner reader, then new ones.
    """

    def __init__(
        self, inner: DatasetReader, columns: FileColumns, by_row: bool = False, order: Sequence[str] = ()
    ) -> None:
        rest = [name for name in inner.schema.names if name not in columns.schema.names]
        if rest and len(rest) < len(inner.schema) and isinstance(inner, ColumnReader):
            inner = inner.only(rest)  # the types of columns that are replaced may differ between files
        self._inner, self._columns, self._by_row, self._order = inner, columns, by_row, order
        self.origins: Sequence[Origin] = inner.origins
        self.roots: Sequence[str] | None = getattr(inner, "roots", None)
        self.schema: pa.Schema = self._joined()

    def _joined(self) -> pa.Schema:
        """Return the columns of the inner reader and of the files, in their order."""
        own, inner = {field.name: field for field in self._columns.schema}, self._inner.schema
        fields = [own.get(field.name, field) for field in inner]
        fields += [field for name, field in own.items() if name not in inner.names]
        fields.sort(key=lambda field: self._order.index(field.name) if self._order else 0)
        return pa.schema(fields, inner.metadata)

    @property
    def rows(self) -> int | None:
        return self._inner.rows

    def pieces(self, fine: bool) -> Sequence[RowRange]:
        return self._inner.pieces(fine)

    def read(self, piece: RowRange, at: Mark | None = None) -> Iterator[Batch]:
        for batch in self._inner.read(piece, at):
            yield Batch(batch.at, batch.row, self._extended(batch, piece.origin), batch.names)

    def only(self, names: Collection[str]) -> PartitionedReader:
        other = copy(self)
        if isinstance(self._inner, ColumnReader):
            inner = self._inner.schema.names
            read = [name for name in inner if name in names and name not in self._columns.schema.names]
            other._inner = self._inner.only(read or inner[:1])  # a reader needs a column to count its rows
        other.schema = pa.schema([field for field in self.schema if field.name in names])
        return other

    def expect(self, names: Collection[str]) -> None:
        if isinstance(self._inner, LateColumnReader):
            self._inner.expect([name for name in names if name not in self._columns.schema.names])
            self.schema = self._joined()

    def fingerprint(self) -> Mapping[str, str]:
        return self._inner.fingerprint()

    def close(self) -> None:
        self._inner.close()

    def _extended(self, batch: Batch, origin: int) -> pa.Table:
        """Return a batch in the order of the schema, with the columns of its file; hidden columns last."""
        table, own = batch.table, self._columns.values
        hidden = [name for name in table.column_names if name in HIDDEN]
        fields, arrays = [], []
        for name in [*self.schema.names, *hidden]:
            if name not in own.column_names:
                fields.append(table.schema.field(name))
                arrays.append(table.column(name))
                continue
            fields.append(own.schema.field(name))
            column = own.column(name)
            here = column.slice(batch.row, len(table)) if self._by_row else pa.repeat(column[origin], len(table))
            arrays.append(here)
        return pa.table(arrays, schema=pa.schema(fields, table.schema.metadata))
