"""Schema of a job's results: column names and Arrow types.

The row id, the kept input columns, and the outputs, in this order. Types depend on ports alone, never on values, so
that every part of a job has the same columns:

    text, json           string; json is JSON text, and so is `any`
    bytes                binary
    detections           list<struct<box: fixed_size_list<float>[4], score: float, class: int32, label: string>>
    tensor, no dims      one number
    tensor, one dim      list<T>
    tensor, known dims   lists in lists; list<list<T>> for [3, 4]
    tensor, other dims   struct<shape: list<int64>, data: list<T>>, row-major
    tensor, any dtype    struct<dtype: string, shape: list<int64>, data: binary>, row-major, little-endian
    image, audio         string, a file's path; or struct<bytes: binary, path: string>, as in Hugging Face data sets
    list[T]              list of the type of T

Lists of known size are variable-size lists: many Parquet readers fail on null fixed-size lists, and any output can be
null. Dtypes that Arrow lacks are converted: bfloat16 and float8 to float, complex64 to a list of real and imaginary
part. Each output's field has its port type as metadata `weftline`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from weftline.engine.jobs.output.arrow import pa
from weftline.engine.jobs.rows import JSON_CELL
from weftline.errors import InputError
from weftline.nodes.ports import AUDIO_HZ, PortType
from weftline.nodes.strict_json import FILES, parse

MEDIA = ("image", "audio")
"""Kinds that are written as files, or as the bytes of a file."""

MEDIA_STORAGE = ("files", "inline")
"""Storage of media: files beside the table, or bytes in it."""

TYPE_KEY = b"weftline"
"""Metadata key of the port type of a field."""

HF_KEY = b"huggingface"
"""Metadata key of a schema for the features of the `datasets` library."""

WRITTEN_AS = {"bfloat16": "float32", "float8_e4m3fn": "float32", "float8_e5m2": "float32", "complex64": "float32"}
"""Dtypes that Arrow lacks, and the dtypes they are converted to."""

INLINE = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
FOUND = pa.struct(
    [("box", pa.list_(pa.float32(), 4)), ("score", pa.float32()), ("class", pa.int32()), ("label", pa.string())]
)
"""One detection; the box is x0, y0, x1, y1 in pixels. `class` is null if only names are known."""


@dataclass(frozen=True, slots=True)
class ResultColumn:
    """One column of the results.

    name:   column name in the results.
    origin: 'id', 'kept' or 'output'.
    of:     name of the input column or of the output.
    type:   port type of an output.
    """

    name: str
    origin: str
    of: str
    type: PortType | None = None


@dataclass(frozen=True, slots=True)
class Columns:
    """All columns in order, their schema, and the storage of media."""

    each: tuple[ResultColumn, ...]
    schema: pa.Schema
    media: str

    @property
    def media_outputs(self) -> tuple[str, ...]:
        """Outputs that hold images or audio."""
        return tuple(one.of for one in self.each if one.type is not None and media_kind(one.type))


def columns_of(outputs: Mapping[str, PortType], kept: pa.Schema, id_name: str = "id", media: str = "files") -> Columns:
    """Return the columns for these outputs and kept input columns.

    Outputs keep their names. On a name conflict a kept column becomes input_NAME, and the id row_id, numbered if that
    name exists too. InputError for duplicate columns, and for a `media` other than 'files' and 'inline'.
    """
    if media not in MEDIA_STORAGE:
        raise InputError(f"media: found {media!r:.40}, expected {' or '.join(MEDIA_STORAGE)}")
    twice = sorted({name for name in kept.names if kept.names.count(name) > 1})
    if twice:
        fix = "rename them in the data, or choose the columns to keep (--keep)"
        raise InputError(f"columns that occur more than once: {', '.join(twice)}\n    fix: {fix}")
    taken = {*outputs, *(name for name in kept.names if name not in outputs)}
    id_is = _unused_name(id_name, "row_id", taken)
    taken.add(id_is)
    columns, fields = [ResultColumn(id_is, "id", "")], [pa.field(id_is, pa.string())]
    for one in kept:
        name = one.name
        if name in outputs:
            name = _unused_name(f"input_{name}", f"input_{name}", taken)
            taken.add(name)
        columns.append(ResultColumn(name, "kept", one.name))
        fields.append(_foreign(one).with_name(name))
    for name, type in outputs.items():
        columns.append(ResultColumn(name, "output", name, type))
        fields.append(field_of(name, type, media))
    return Columns(tuple(columns), pa.schema(fields, _metadata(columns, kept, media)), media)


def field_of(name: str, type: PortType, media: str) -> pa.Field:
    """Return the field of one output, or of the elements of a list."""
    return pa.field(name, arrow_type(type, media), metadata={TYPE_KEY: str(type).encode()})


def arrow_type(type: PortType, media: str) -> pa.DataType:
    """Return the Arrow type of a port type."""
    if type.kind == "list":
        return pa.list_(field_of("item", type.item or PortType("any"), media))
    if type.kind == "tensor":
        return _tensor_type(type)
    if type.kind in MEDIA:
        return INLINE if media == "inline" else pa.string()
    return {"bytes": pa.binary(), "detections": pa.list_(FOUND)}.get(type.kind, pa.string())


def is_nested(dims: Iterable[Any] | None) -> bool:
    """Return True if tensors of these dims are nested lists; otherwise they are structs of shape and data."""
    if dims is None:
        return False
    sizes = tuple(dims)
    return len(sizes) < 2 or all(isinstance(size, int) and size > 0 for size in sizes)


def media_kind(type: PortType) -> str:
    """Return 'image' or 'audio' for media types and lists of them; else ''."""
    while type.item is not None:
        type = type.item
    return type.kind if type.kind in MEDIA else ""


def plain(type: pa.DataType) -> pa.DataType:
    """Return a type without dictionaries, runs and views, whose bytes depend on the read batches."""
    if pa.types.is_dictionary(type) or pa.types.is_run_end_encoded(type):
        return plain(type.value_type)
    if pa.types.is_string_view(type):
        return pa.string()
    if pa.types.is_binary_view(type):
        return pa.binary()
    if pa.types.is_struct(type):
        return pa.struct([_foreign(one) for one in type])
    if pa.types.is_fixed_size_list(type):
        return pa.list_(_foreign(type.value_field), type.list_size)
    if pa.types.is_large_list(type):
        return pa.large_list(_foreign(type.value_field))
    if pa.types.is_list(type):
        return pa.list_(_foreign(type.value_field))
    return type


def _foreign(field: pa.Field) -> pa.Field:
    """Return a kept field: nullable, plain, and without metadata of its file or of another job.

    A column of JSON cells has the metadata of an output of type json.
    """
    given = field.metadata or {}
    metadata = {key: value for key, value in given.items() if key not in (TYPE_KEY, b"PARQUET:field_id")}
    if given.get(TYPE_KEY) == JSON_CELL:
        metadata[TYPE_KEY] = b"json"
    return pa.field(field.name, plain(field.type), metadata=metadata or None)


def _tensor_type(type: PortType) -> pa.DataType:
    if type.dtype is None:
        return pa.struct([("dtype", pa.string()), ("shape", pa.list_(pa.int64())), ("data", pa.binary())])
    one = pa.from_numpy_dtype(WRITTEN_AS.get(type.dtype, type.dtype))
    if type.dtype == "complex64":
        one = pa.list_(one)
    if not is_nested(type.dims):
        return pa.struct([("shape", pa.list_(pa.int64())), ("data", pa.list_(one))])
    for _ in type.dims or ():
        one = pa.list_(one)
    return one


def _unused_name(wanted: str, otherwise: str, taken: set[str]) -> str:
    if wanted not in taken:
        return wanted
    name, number = otherwise, 2
    while name in taken:
        name, number = f"{otherwise}_{number}", number + 1
    return name


def _metadata(columns: Iterable[ResultColumn], kept: pa.Schema, media: str) -> dict[bytes, bytes] | None:
    """Return the `datasets` features of kept columns and of inline media."""
    known = _hf_features(kept)
    features: dict[str, Any] = {}
    for one in columns:
        if one.origin == "kept" and one.of in known:
            features[one.name] = known[one.of]
        elif one.type is not None and media == "inline" and media_kind(one.type):
            features[one.name] = _hf_media(one.type)
    if not features:
        return None
    return {HF_KEY: json.dumps({"info": {"features": features}}, sort_keys=True).encode()}


def _hf_features(kept: pa.Schema) -> Mapping[str, Any]:
    try:
        metadata = parse((kept.metadata or {}).get(HF_KEY, b"{}"), FILES)
        features = (metadata.get("info") or {}).get("features")
    except (ValueError, AttributeError):
        return {}  # unreadable metadata of another library is ignored
    return features if isinstance(features, dict) else {}


def _hf_media(type: PortType) -> dict[str, Any]:
    if type.item is not None:
        return {"feature": _hf_media(type.item), "_type": "List"}
    return {"_type": "Image"} if type.kind == "image" else {"sampling_rate": AUDIO_HZ, "_type": "Audio"}
