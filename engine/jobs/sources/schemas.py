"""Schema consistency across batches and files."""

from __future__ import annotations

import pyarrow as pa

from weftline.errors import InputError
from weftline.pipelines.check.problems import listed


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
