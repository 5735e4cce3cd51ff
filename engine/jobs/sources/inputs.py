"""Pipeline inputs from columns: mapping of columns to inputs, and conversion of values; null becomes None.

Values of typed columns are converted column by column. Cells (cells.py) are values of their row alone, and become what
`Session.run` gets for that row.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa

from weftline.engine.jobs.rows import CSV_CELL, JSON_CELL, Unusable
from weftline.engine.jobs.sources.arrow_types import is_bytes, is_list, is_text, storage
from weftline.engine.jobs.sources.cells import cell_kind, csv_numbers, csv_value, json_values
from weftline.engine.jobs.sources.columns import MEDIA, holds_bytes, is_encoded, means, misfit, tensors
from weftline.engine.jobs.sources.formats import alternatives
from weftline.engine.jobs.sources.media import Loader
from weftline.engine.jobs.sources.reader import FOLDER, HIDDEN, UNUSABLE, is_late
from weftline.errors import InputError
from weftline.nodes.json_value import NotJson, to_json
from weftline.nodes.media import MediaLimits, to_value
from weftline.nodes.ports import PortType
from weftline.nodes.strict_json import FILES, parse
from weftline.pipelines.check.problems import did_you_mean, listed


@dataclass(frozen=True, slots=True)
class Binding:
    """Columns by pipeline input, without inputs that have no column.

    columns: names, or alternatives such as `jpg;png`.
    schema: schema of the data set.
    ports:  types of the inputs in `columns`.
    needed: inputs that require a value in every row.
    """

    columns: Mapping[str, str]
    schema: pa.Schema
    ports: Mapping[str, PortType]
    needed: Collection[str]

    @property
    def used(self) -> list[str]:
        """Columns that inputs read, alternatives one by one."""
        return [one for column in self.columns.values() for one in alternatives(column, self.schema.names)]

    @property
    def media(self) -> set[str]:
        """Columns of encoded media and other bytes, bound or not.

        Columns of file names are not among them: they are short and identify the row.
        """
        return {field.name for field in self.schema if holds_bytes(field.type)}

    @property
    def kept(self) -> list[str]:
        """Columns that are kept in outputs by default: all but media, and those that the first rows lack."""
        left_out = self.media | set(HIDDEN)
        return [field.name for field in self.schema if field.name not in left_out and not is_late(field)]

    def inputs(self, table: pa.Table, loader: Loader) -> dict[str, list[Any]]:
        """Return the values of each bound input: one per row, None, or Unusable.

        Reads all files that rows name: a table should be no larger than one block.
        """
        folders = table.column(FOLDER).to_pylist() if FOLDER in table.schema.names else None
        found = {name: self._values(name, table, loader, folders) for name in self.columns}
        for name in self.columns:
            if name in self.needed:
                empty = Unusable(f"column {self.columns[name]} is null")
                found[name] = [empty if value is None else value for value in found[name]]
        return _with_broken(found, table)

    def _values(self, name: str, table: pa.Table, loader: Loader, folders: Sequence[str] | None) -> list[Any]:
        """Return the values of an input, each from the first of its alternative columns that has one."""
        fields = [self.schema.field(column) for column in alternatives(self.columns[name], self.schema.names)]
        each = [converted(table.column(one.name), one, self.ports[name], loader, folders) for one in fields]
        if len(each) == 1:
            return each[0]
        return [
            next((value for value, field in zip(row, fields) if not _is_absent(value, field)), row[-1])
            for row in zip(*each, strict=True)
        ]


def _is_absent(value: Any, field: pa.Field) -> bool:
    """Return True for no value, and for an empty cell of CSV, where a row may have another column's value."""
    return value is None or (cell_kind(field) == CSV_CELL and isinstance(value, str) and not value)


def bind(schema: pa.Schema, ports: Mapping[str, PortType], needed: Collection[str], maps: Mapping[str, str]) -> Binding:
    """Map columns to the inputs of a pipeline; InputError lists all problems.

    ports:  types of all inputs; an input without a mapping or a column of its name is left out.
    needed: inputs that must have a column.
    maps:   columns by input, where names differ; `a;b` is the first of both that has a value in a row. The only media
            column of a kind is mapped automatically if only one input of that kind lacks a column.
    """
    names = [name for name in schema.names if name not in HIDDEN]
    problems = []
    columns: dict[str, str] = {}
    for name, column in maps.items():
        if name not in ports:
            problems.append(f"--map {name}={column}: the pipeline has no input {name}{_near(name, ports)}")
        for one in alternatives(column, names):
            if name in ports and one not in names:
                problems.append(f"--map {name}={column}: there is no column {one}{_near(one, names)}")
    maps = {**_only_media(schema, names, ports, needed, maps), **maps}
    for name, port in ports.items():
        column = maps.get(name, name)
        parts = alternatives(column, names)
        if all(one in names for one in parts):
            columns[name] = column
            problems += [
                f"input {name} ({port}) from column {one}: {why}"
                for one in parts
                if (why := misfit(schema.field(one), port))
            ]
        elif name in needed and name not in maps:
            alike = [one for one in names if _is_of_kind(schema.field(one), port.kind)]
            hint = f'; --map "{name}={";".join(alike[:4])}" takes the first that a row has' if len(alike) > 1 else ""
            problems.append(f"input {name} ({port}): there is no column {name}{_near(name, names) or hint}")
    binding = Binding(columns, schema, {name: ports[name] for name in columns}, frozenset(needed))
    if not problems and all(is_late(schema.field(column)) for column in binding.used):
        problems.append("no input gets a column")
    if problems:
        inputs = ", ".join(f"{name} ({port})" for name, port in ports.items()) or "none"
        problems += [f"    inputs: {inputs}", f"    columns: {listed(names)}", "    fix: --map INPUT=COLUMN"]
        raise InputError("\n".join(problems))
    return binding


def _only_media(
    schema: pa.Schema,
    names: Collection[str],
    ports: Mapping[str, PortType],
    needed: Collection[str],
    maps: Mapping[str, str],
) -> dict[str, str]:
    """Map inputs without a column where only one column of their kind is left."""
    taken = {one for name in ports for one in alternatives(maps.get(name, name), names)}
    lacking = [name for name in ports if name in needed and name not in maps and name not in names]
    found: dict[str, str] = {}
    for name in lacking:
        kind = ports[name].kind
        alike = [one for one in lacking if ports[one].kind == kind]
        columns = [one for one in names if one not in taken and _is_of_kind(schema.field(one), kind)]
        if len(alike) == len(columns) == 1:
            found[name] = columns[0]
    return found


def _is_of_kind(field: pa.Field, kind: str) -> bool:
    """Return True if a column holds files of a port's kind, by its name for paths, else by its type."""
    if means(field) == "path":
        return bool(field.name == kind)
    return kind in MEDIA and holds_bytes(field.type)


def _near(name: str, known: Collection[str]) -> str:
    hint = did_you_mean(name, known)
    return f"; {hint}" if hint else ""


def _with_broken(found: dict[str, list[Any]], table: pa.Table) -> dict[str, list[Any]]:
    """Set the reason in every input of unreadable rows."""
    if UNUSABLE not in table.schema.names:
        return found
    column = table.column(UNUSABLE)
    if column.null_count == len(column):
        return found
    for row, reason in enumerate(column.to_pylist()):
        if reason is not None:
            for values in found.values():
                values[row] = Unusable(reason)
    return found


def converted(
    column: pa.ChunkedArray | pa.Array,
    field: pa.Field,
    port: PortType,
    loader: Loader,
    folders: Sequence[str] | None = None,
) -> list[Any]:
    """Return a column's values for an input of type `port`.

    folders: folder that file names of each row are relative to; None: the loader's folder.
    """
    if kind := cell_kind(field):
        values = json_values(column.to_pylist()) if kind == JSON_CELL else _csv_values(column, field, port)
        return _own_values(values, port, loader, folders)
    array = column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column
    if isinstance(array, pa.ChunkedArray):  # more than 2 GiB
        array = pa.concat_arrays([chunk.cast(_large(chunk.type)) for chunk in array.chunks])
    if port.kind == "tensor" and not pa.types.is_null(array.type):
        return tensors(array, port)
    while isinstance(array.type, pa.BaseExtensionType):
        array = array.storage.cast(pa.bool_()) if isinstance(array.type, pa.Bool8Type) else array.storage
    type = array.type
    if port.kind == "list" and is_list(type):
        return _lists(array, field, port.item or PortType("any"), loader, folders)
    if port.kind == "text":
        return _texts(array, field, loader, folders)
    if port.kind == "audio" and is_list(type):
        return tensors(array, PortType("tensor", "float32", ("samples",)))
    if port.kind in MEDIA:
        return _media(array, loader, folders)
    if port.kind == "any" and means(field) == "path":
        return _files(array.to_pylist(), loader, folders)
    return _json(array, field)


def _csv_values(column: pa.ChunkedArray | pa.Array, field: pa.Field, port: PortType) -> list[Any]:
    """Return what CSV cells mean to a port. An empty cell is an empty text, and no value for any other kind."""
    if port.kind == "tensor":
        return csv_numbers(column, field)
    cells: list[str | None] = column.to_pylist()
    if port.kind == "json":
        return [None if cell is None else csv_value(cell) for cell in cells]
    return [cell or None for cell in cells] if port.kind in MEDIA else cells


def _own_values(values: Sequence[Any], port: PortType, loader: Loader, folders: Sequence[str] | None) -> list[Any]:
    """Return values for a port, each from its row alone."""
    item = port
    while item.item is not None:
        item = item.item
    if item.kind in MEDIA:
        values = _with_files([_each(value, port, _path) for value in values], port, loader, folders)
    convert = _tensor if item.kind == "tensor" else _samples if item.kind == "audio" else None
    if convert is not None:
        values = [_each(value, port, partial(convert, port=item)) for value in values]
    return [_usable(value, port) for value in values] if port.item is not None else list(values)


def _each(value: Any, port: PortType, use: Callable[[Any], Any]) -> Any:
    """Apply a function to a value, or to all elements of a list port's value; a value that is no list is left."""
    if port.item is None:
        return use(value)
    return [_each(one, port.item, use) for one in value] if isinstance(value, list) else value


def _path(value: Any) -> Any:
    """Return the path of a Hugging Face feature, any other value unchanged."""
    named = isinstance(value, dict) and {"bytes", "path"} <= value.keys() and value["bytes"] is None
    return value["path"] if named else value


def _with_files(values: Sequence[Any], port: PortType, loader: Loader, folders: Sequence[str] | None) -> list[Any]:
    """Replace file names by the content of the files, which are read in one call."""
    names: list[tuple[str, int]] = []

    def note(value: Any, row: int) -> None:
        if isinstance(value, str):
            names.append((value, row))

    for row, value in enumerate(values):
        _each(value, port, partial(note, row=row))
    homes = None if folders is None else [folders[row] for _, row in names]
    files = iter(loader.read_all([name for name, _ in names], homes))
    return [_each(value, port, lambda one: next(files) if isinstance(one, str) else one) for value in values]


def _tensor(value: Any, port: PortType) -> Any:
    """Return nested lists, or the shape and data of a job's results, as an array; other values unchanged."""
    if not isinstance(value, list | dict):
        return value
    try:
        return to_value(port, _shaped(value, port) if isinstance(value, dict) else value, _UNLIMITED)
    except InputError as error:
        return Unusable(str(error))


def _shaped(value: Mapping[str, Any], port: PortType) -> Any:
    """Return the array of a mapping of shape and data; InputError if they do not match."""
    shape, data = value.get("shape"), value.get("data")
    if not isinstance(shape, list) or not isinstance(data, list):
        return value
    numbers = to_value(PortType("tensor", port.dtype), data, _UNLIMITED)
    if any(size.__class__ is not int or size < 0 for size in shape) or math.prod(shape) != numbers.size:
        raise InputError(f"wants {port}, got {numbers.size} numbers for the shape {shape}")
    return numbers.reshape(shape)


def _samples(value: Any, port: PortType) -> Any:
    return _tensor(value, _SAMPLES) if isinstance(value, list) else value


_SAMPLES = PortType("tensor", "float32", ("samples",))
_UNLIMITED = MediaLimits(bytes_max=sys.maxsize)
"""The limits of a request are checked where it is submitted."""


def _usable(value: Any, port: PortType) -> Any:
    """Return a value, or Unusable for a list with an unusable element."""
    if port.item is None or not isinstance(value, list):
        return value
    return _whole([_usable(one, port.item) for one in value], port.item)


def _large(type: pa.DataType) -> pa.DataType:
    large = {pa.string(): pa.large_string(), pa.binary(): pa.large_binary()}
    return large.get(type, type)


def _texts(array: pa.Array, field: pa.Field, loader: Loader, folders: Sequence[str] | None) -> list[Any]:
    values: list[Any] = array.to_pylist()
    if means(field) == "path":
        values = _files(values, loader, folders)
    elif not is_bytes(array.type):
        return values
    return [_decoded(value) if isinstance(value, bytes) else value for value in values]


def _decoded(data: bytes) -> str | Unusable:
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        return Unusable(f"text that is not UTF-8 (byte {error.start})")


def _media(array: pa.Array, loader: Loader, folders: Sequence[str] | None) -> list[Any]:
    if is_text(array.type):
        return _files(array.to_pylist(), loader, folders)
    if not is_encoded(array.type):
        found: list[Any] = array.to_pylist()
        return found
    there = array.is_valid().to_pylist()
    data, paths = array.field("bytes").to_pylist(), array.field("path").to_pylist()
    values = [one if whole else None for one, whole in zip(data, there, strict=True)]
    names = [path if whole and one is None else None for path, one, whole in zip(paths, data, there, strict=True)]
    for place, got in enumerate(_files(names, loader, folders)):
        if got is not None:
            values[place] = got
    return values


def _files(names: Sequence[str | None], loader: Loader, folders: Sequence[str] | None) -> list[Any]:
    """Return the content of files; None without a name."""
    places = [place for place, name in enumerate(names) if name is not None]
    found = loader.read_all(
        [name for name in names if name is not None], None if folders is None else [folders[place] for place in places]
    )
    values: list[Any] = [None] * len(names)
    for place, data in zip(places, found, strict=True):
        values[place] = data
    return values


def _json(array: pa.Array, field: pa.Field) -> list[Any]:
    values = _pylist(array)
    if is_text(array.type) and (means(field) == "json" or isinstance(field.type, pa.JsonType)):
        return [None if value is None else _parsed(value) for value in values]
    return values


def _pylist(array: pa.Array) -> list[Any]:
    type = array.type
    has_nanoseconds = _has_nanoseconds(type)
    if has_nanoseconds:
        array = array.cast(_with_integers(type))
    try:
        values: list[Any] = array.to_pylist(maps_as_pydicts="strict")
    except KeyError:
        values = [_mapping(one) for one in array]
    if has_nanoseconds:
        values = [_with_times(value, type) for value in values]
    return [_plain(value) for value in values] if _is_beyond_json(type) else values


def _mapping(value: pa.Scalar) -> Any:
    try:
        return value.as_py(maps_as_pydicts="strict")
    except KeyError:
        return Unusable("a map with a key twice")


def _has_nanoseconds(type: pa.DataType) -> bool:
    """Return True for times of day that Python cannot hold: it has microseconds."""
    if type.num_fields:
        return any(_has_nanoseconds(type.field(place).type) for place in range(type.num_fields))
    return bool(type == _TIME_NS)


def _with_integers(type: pa.DataType) -> pa.DataType:
    """Return a type with integers for times of day in nanoseconds."""
    if pa.types.is_struct(type):
        return pa.struct([field.with_type(_with_integers(field.type)) for field in type])
    if pa.types.is_map(type):
        return pa.map_(type.key_type, _with_integers(type.item_type))
    if is_list(type):
        return pa.list_(type.value_field.with_type(_with_integers(type.value_type)))
    return pa.int64() if type == _TIME_NS else type


def _with_times(value: Any, type: pa.DataType) -> Any:
    """Return a value of `_with_integers` with texts for the times, in the form of Python's times where it has them."""
    if value is None or isinstance(value, Unusable):
        return value
    if pa.types.is_struct(type):
        return {field.name: _with_times(value[field.name], field.type) for field in type}
    if pa.types.is_map(type):
        return {key: _with_times(one, type.item_type) for key, one in value.items()}
    if is_list(type):
        return [_with_times(one, type.value_type) for one in value]
    if type != _TIME_NS:
        return value
    seconds, ns = divmod(value, 10**9)
    text = f"{seconds // 3600:02}:{seconds // 60 % 60:02}:{seconds % 60:02}"
    return text + (f".{ns:09}" if ns % 1000 else f".{ns // 1000:06}" if ns else "")


_TIME_NS = pa.time64("ns")


def _is_beyond_json(type: pa.DataType) -> bool:
    """Return True if values of a type contain times or decimals, which JSON lacks."""
    if pa.types.is_map(type):
        return _is_beyond_json(type.item_type)
    if type.num_fields:
        return any(_is_beyond_json(type.field(place).type) for place in range(type.num_fields))
    return bool(pa.types.is_temporal(type) or pa.types.is_decimal(type))


def _plain(value: Any) -> Any:
    return value if isinstance(value, Unusable) else to_json(value)


def _parsed(text: str) -> Any:
    try:
        return parse(text, FILES)
    except NotJson as error:
        return Unusable(error.at("").partition("\n")[0])


def _lists(
    array: pa.Array, field: pa.Field, item: PortType, loader: Loader, folders: Sequence[str] | None
) -> list[Any]:
    """Return lists; all elements are converted in one call."""
    lengths = np.asarray(array.value_lengths().fill_null(0)).astype(np.int64)
    there = array.is_valid().to_pylist()
    each = None if folders is None else [folders[row] for row in np.repeat(np.arange(len(lengths)), lengths).tolist()]
    inner = pa.field(field.name, storage(array.type).value_type, metadata=field.metadata)
    elements = converted(array.flatten(), inner, item, loader, each)
    ends = np.cumsum(lengths)
    values: list[Any] = []
    for start, end, whole in zip((ends - lengths).tolist(), ends.tolist(), there, strict=True):
        values.append(_whole(elements[start:end], item) if whole else None)
    return values


def _whole(elements: list[Any], item: PortType) -> list[Any] | Unusable:
    for place, one in enumerate(elements):
        if isinstance(one, Unusable):
            return Unusable(f"element {place}: {one.reason}")
        if one is None and item.kind not in ("json", "any"):
            return Unusable(f"element {place} is null")
    return elements
