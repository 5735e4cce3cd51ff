"""Type compatibility of columns and pipeline inputs."""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from weftline.engine.jobs.sources.piece import MEANS
from weftline.nodes.ports import PortType
from weftline.shm.spec import STAND_INS

MEDIA = ("image", "audio", "bytes")


def misfit(field: pa.Field, port: PortType) -> str:
    """Return why no value of a column can be one of `port`, with what to do; '' when values may fit."""
    type = storage(field.type)
    if pa.types.is_null(type) or port.kind == "any":
        return ""
    if port.kind == "list":
        if not is_list(type):
            return f"a column of {type} is no list"
        return misfit(pa.field(field.name, type.value_type, metadata=field.metadata), port.item or PortType("any"))
    if port.kind == "text":
        return _for_text(type)
    if port.kind in MEDIA:
        return _for_media(type, port.kind)
    if port.kind == "json":
        return _for_json(type)
    if port.kind == "tensor":
        return _for_tensor(field.type, port)
    return f"{port.kind} cannot come from a column"


def means(field: pa.Field) -> str:
    """Return what a column says of its text: `path`, `json`, or ''."""
    return (field.metadata or {}).get(MEANS, b"").decode() if field.metadata else ""


def storage(type: pa.DataType) -> pa.DataType:
    """Return what a type is kept as, extensions taken off."""
    while isinstance(type, pa.BaseExtensionType):
        type = type.storage_type
    return type


def is_text(type: pa.DataType) -> bool:
    return bool(pa.types.is_string(type) or pa.types.is_large_string(type) or pa.types.is_string_view(type))


def is_bytes(type: pa.DataType) -> bool:
    fixed = pa.types.is_fixed_size_binary(type) or pa.types.is_binary_view(type)
    return bool(fixed or pa.types.is_binary(type) or pa.types.is_large_binary(type))


def is_list(type: pa.DataType) -> bool:
    return bool(pa.types.is_list(type) or pa.types.is_large_list(type) or pa.types.is_fixed_size_list(type))


def is_encoded(type: pa.DataType) -> bool:
    """Whether a type is that of Hugging Face's pictures and recordings: a struct of bytes and path."""
    return bool(pa.types.is_struct(type)) and {"bytes", "path"} <= {field.name for field in type}


def is_shaped(type: pa.DataType) -> bool:
    """Whether a type is that of a job's tensors of any shape: a struct of shape and data."""
    if not pa.types.is_struct(type) or {field.name for field in type} != {"shape", "data"}:
        return False
    shape, data = type.field("shape").type, type.field("data").type
    return bool(
        is_list(shape) and pa.types.is_integer(shape.value_type) and is_list(data) and is_number(data.value_type)
    )


def holds_bytes(type: pa.DataType) -> bool:
    """Whether values of a type are pictures, recordings or other bytes, alone or in lists."""
    type = storage(type)
    while is_list(type):
        type = storage(type.value_type)
    return is_bytes(type) or is_encoded(type)


def is_number(type: pa.DataType) -> bool:
    return bool(pa.types.is_integer(type) or pa.types.is_floating(type) or pa.types.is_boolean(type))


def _for_text(type: pa.DataType) -> str:
    if is_text(type) or is_bytes(type):
        return ""
    fix = "; turn the numbers into text first" if is_number(type) else ""
    return f"a column of {type} is no text{fix}"


def _for_media(type: pa.DataType, kind: str) -> str:
    if is_text(type) or is_bytes(type) or is_encoded(type):
        return ""
    if kind == "audio" and is_list(type) and pa.types.is_floating(type.value_type):
        return ""
    return f"a column of {type} is no {kind}; expected bytes, file names, or a struct of bytes and path"


def _for_json(type: pa.DataType) -> str:
    """Bytes are no JSON, wherever they stand; times and decimals are written as text."""
    if is_bytes(type):
        return f"a column of {type} is no json"
    if pa.types.is_struct(type):
        return next((why for field in type if (why := _for_json(storage(field.type)))), "")
    if is_list(type):
        return _for_json(storage(type.value_type))
    if pa.types.is_map(type):
        if not is_text(type.key_type):
            return f"a column of {type} is no json; its keys are no text"
        return _for_json(storage(type.item_type))
    return ""


def _for_tensor(type: pa.DataType, port: PortType) -> str:
    shaped = isinstance(type, pa.FixedShapeTensorType)
    depth, fixed, inner = 0, list[int](), storage(type)
    if shaped:
        fixed, inner, depth = list(type.shape), storage(type.value_type), len(type.shape)
    elif is_bytes(inner):
        return ""
    elif is_shaped(inner):
        return _for_dtype(storage(inner.field("data").type.value_type), port)
    while is_list(inner):
        fixed.append(inner.list_size if pa.types.is_fixed_size_list(inner) else -1)
        depth, inner = depth + 1, storage(inner.value_type)
    if not is_number(inner):
        return f"a column of {type} has no numbers for {port}"
    if port.dtype in STAND_INS:
        return f"{port.dtype} cannot come from a column"
    if port.dims is not None and len(port.dims) != depth:
        return f"a column of {type} has {depth} dimensions, {port} has {len(port.dims)}"
    for size, dim in zip(fixed, port.dims or ()):
        if size >= 0 and isinstance(dim, int) and dim != size:
            return f"a column of {type} has lists of {size}, {port} wants {dim}"
    return _for_dtype(inner, port)


def _for_dtype(type: pa.DataType, port: PortType) -> str:
    if port.dtype is None:
        return ""
    wanted, found = np.dtype(port.dtype).kind, "b" if pa.types.is_boolean(type) else "i"
    found = "f" if pa.types.is_floating(type) else found
    fits = {"b": "b", "i": "iufc", "f": "fc"}[found]
    return "" if wanted in fits else f"a column of {type} does not hold {port.dtype}"
