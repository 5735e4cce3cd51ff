"""Conversion of Arrow columns to input values; null becomes None."""

from __future__ import annotations

import datetime
import decimal
import json
from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from weftline.engine.jobs.rows import Unusable
from weftline.engine.jobs.sources.fitting import MEDIA, is_bytes, is_encoded, is_list, is_text, means, storage
from weftline.engine.jobs.sources.loading import Loader
from weftline.engine.jobs.sources.tensors import tensors
from weftline.nodes.ports import PortType


def converted(
    column: pa.ChunkedArray | pa.Array,
    field: pa.Field,
    port: PortType,
    loader: Loader,
    folders: Sequence[str] | None = None,
) -> list[Any]:
    """Return a column's values for an input of type `port`.

    folders: what file names of each row are relative to; None: the loader's folder.
    """
    array = column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column
    if isinstance(array, pa.ChunkedArray):  # more than 2 GiB
        array = pa.concat_arrays([chunk.cast(_large(chunk.type)) for chunk in array.chunks])
    if port.kind == "tensor" and not pa.types.is_null(array.type):
        return tensors(array, port)
    while isinstance(array.type, pa.BaseExtensionType):
        array = array.storage
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
    """Return what files hold; None where there is no name."""
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
    values: list[Any] = array.to_pylist(maps_as_pydicts="lossy")
    return [_plain(value) for value in values] if _has_odd(array.type) else values


def _has_odd(type: pa.DataType) -> bool:
    """Whether values of a type are not made of what JSON has."""
    if pa.types.is_map(type):
        return _has_odd(type.item_type)
    if type.num_fields:
        return any(_has_odd(type.field(place).type) for place in range(type.num_fields))
    return bool(pa.types.is_temporal(type) or pa.types.is_decimal(type))


def _plain(value: Any) -> Any:
    if isinstance(value, list):
        return [_plain(one) for one in value]
    if isinstance(value, dict):
        return {key: _plain(one) for key, one in value.items()}
    if isinstance(value, datetime.date | datetime.time):
        return value.isoformat()
    return str(value) if isinstance(value, decimal.Decimal | datetime.timedelta) else value


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return Unusable("not valid JSON")


def _lists(
    array: pa.Array, field: pa.Field, item: PortType, loader: Loader, folders: Sequence[str] | None
) -> list[Any]:
    """Return lists, their elements converted together."""
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
            return Unusable(f"element {place} is empty")
    return elements
