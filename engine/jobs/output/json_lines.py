"""JSON of values, and rows as JSON lines, in valid UTF-8.

NaN and infinities are NaN, Infinity and -Infinity, as Python's json module writes and most readers of tables read them.
Everything else is valid JSON: a lone surrogate becomes U+FFFD, integers of any size stay exact, bytes become base64.
Values of ports of type `any` can also hold arrays (lists in JSON) and detections. Keys keep their order.

In JSON lines, keys are in column order and columns of JSON text are JSON values. Times and dates are texts, such as
2026-03-01 12:00:00.000000, durations integers of their unit, decimals texts, maps lists of pairs.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec
import numpy as np

from weftline.engine.jobs.output.arrow import pa
from weftline.engine.jobs.output.columns import TYPE_KEY
from weftline.nodes import json_value
from weftline.nodes.detections import Detections


def json_text(value: Any) -> str:
    """Serialise a value as JSON text; TypeError or RecursionError if JSON cannot represent it."""
    try:
        return json_value.json_text(_plain(value), _other).decode()
    except UnicodeEncodeError:
        return json_value.json_text(valid_unicode(_plain(value)), _other).decode()


def valid_text(text: str) -> str:
    """Replace lone surrogates by U+FFFD and join surrogate pairs."""
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


def valid_unicode(value: Any) -> Any:
    """Replace lone surrogates in all texts and keys of a JSON value."""
    if isinstance(value, str):
        return valid_text(value)
    if isinstance(value, Mapping):
        return {valid_unicode(key): valid_unicode(one) for key, one in value.items()}
    return [valid_unicode(one) for one in value] if isinstance(value, list | tuple) else value


def _plain(value: Any) -> Any:
    """Convert detections to JSON values; msgspec would write their fields."""
    if isinstance(value, Detections):
        return value.to_json()
    if isinstance(value, dict):
        return {key: _plain(one) for key, one in value.items()}
    return [_plain(one) for one in value] if isinstance(value, list | tuple) else value


def _other(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return value.tolist()
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, complex):
        return [value.real, value.imag]
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"a value of type {type(value).__name__} has no JSON")


AT_ONCE = 4096
"""Rows converted to Python values at once."""

JSON_TYPES = (b"json", b"any")
"""Port types whose columns hold JSON text."""


def lines(schema: pa.Schema, batch: pa.RecordBatch) -> Iterator[bytes]:
    """Yield the lines of a batch, up to AT_ONCE together, each with its line end."""
    for start in range(0, len(batch), AT_ONCE):
        some = batch.slice(start, AT_ONCE)
        columns = [_values(field, some.column(place)) for place, field in enumerate(schema)]
        yield _LINE_ENCODER.encode_lines([dict(zip(schema.names, row)) for row in zip(*columns)])


def _values(field: pa.Field, array: pa.Array) -> list[Any]:
    shown = shown_as(field.type)
    array = array if shown == field.type else array.cast(shown)
    values: list[Any] = array.to_pylist()
    return _raw(field, values if _is_finite(array) else [_written(one) for one in values])


def _is_finite(array: pa.Array) -> bool:
    """Return False if an array holds NaN or infinities, nested ones included."""
    type = array.type
    if isinstance(type, pa.BaseExtensionType):
        return _is_finite(array.storage)
    if pa.types.is_dictionary(type):
        return _is_finite(array.dictionary)
    if pa.types.is_map(type):
        return _is_finite(array.keys) and _is_finite(array.items)
    if pa.types.is_struct(type):
        return all(map(_is_finite, array.flatten()))
    if type.num_fields:
        return _is_finite(array.flatten())
    if not pa.types.is_floating(type):
        return True
    return bool(np.isfinite(array.drop_null().to_numpy(zero_copy_only=False)).all())


def _written(value: Any) -> Any:
    """Replace NaN and infinities by their text in JSON, for which msgspec writes null."""
    if isinstance(value, float):
        return value if math.isfinite(value) else _NOT_FINITE[str(value)]
    if isinstance(value, dict):
        return {key: _written(one) for key, one in value.items()}
    return [_written(one) for one in value] if isinstance(value, list | tuple) else value


_NOT_FINITE = {"nan": msgspec.Raw(b"NaN"), "inf": msgspec.Raw(b"Infinity"), "-inf": msgspec.Raw(b"-Infinity")}


def _raw(field: pa.Field, values: list[Any]) -> list[Any]:
    """Wrap JSON texts in msgspec.Raw."""
    if (field.metadata or {}).get(TYPE_KEY) in JSON_TYPES:
        return [None if one is None else msgspec.Raw(one.encode()) for one in values]
    if pa.types.is_list(field.type) and _holds_json(field.type.value_field):
        return [None if one is None else _raw(field.type.value_field, one) for one in values]
    return values


def _holds_json(field: pa.Field) -> bool:
    if pa.types.is_list(field.type):
        return _holds_json(field.type.value_field)
    return (field.metadata or {}).get(TYPE_KEY) in JSON_TYPES


def shown_as(type: pa.DataType) -> pa.DataType:
    """Return the type to cast to before conversion to Python values."""
    is_ = pa.types
    if is_.is_float16(type):
        return pa.float32()
    if is_.is_duration(type):
        return pa.int64()
    if is_.is_timestamp(type) or is_.is_time(type) or is_.is_date(type) or is_.is_decimal(type):
        return pa.string()
    if is_.is_struct(type):
        return pa.struct([one.with_type(shown_as(one.type)) for one in type])
    if is_.is_list(type) or is_.is_large_list(type) or is_.is_fixed_size_list(type):
        inner = type.value_field.with_type(shown_as(type.value_type))
        return type if inner.type == type.value_type else pa.list_(inner)
    return type


def _line_value(value: Any) -> Any:
    if isinstance(value, np.generic):
        return value.item()
    isoformat = getattr(value, "isoformat", None)  # a time in a map
    return isoformat() if isoformat is not None else str(value)


_LINE_ENCODER = msgspec.json.Encoder(enc_hook=_line_value)
