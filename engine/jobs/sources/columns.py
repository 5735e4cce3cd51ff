"""Column types: compatibility with pipeline inputs, and conversion of numeric columns to arrays.

Conversion is zero-copy where possible.
"""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from weftline.engine.jobs.rows import CSV_CELL, JSON_CELL, Unusable
from weftline.engine.jobs.sources.arrow_types import innermost, is_bytes, is_list, is_number, is_text, storage
from weftline.engine.jobs.sources.cells import MIXED, cell_kind, may_hold_numbers
from weftline.engine.jobs.sources.reader import MEANS
from weftline.errors import InputError
from weftline.nodes import exact_numbers
from weftline.nodes.ports import PortType
from weftline.nodes.values import describe, fits
from weftline.shm.spec import STAND_INS

MEDIA = ("image", "audio", "bytes")


def misfit(field: pa.Field, port: PortType) -> str:
    """Return why a column's type does not fit a port; '' if its values may fit."""
    if _may_fit(field, port):
        return ""
    type = storage(field.type)
    if (why := _for_any(field.type)) or pa.types.is_null(type) or port.kind == "any":
        return why
    if port.kind == "list":
        if not is_list(type):
            return f"a column of {type} is no list"
        return misfit(pa.field(field.name, type.value_type, metadata=field.metadata), port.item or PortType("any"))
    if port.kind == "text":
        return _for_text(type)
    if port.kind in MEDIA:
        return _for_media(type, port.kind)
    if port.kind == "json":
        return _for_json(field.type)
    if port.kind == "tensor":
        return _for_tensor(pa.float64() if may_hold_numbers(field) else field.type, port)
    return f"{port.kind} cannot come from a column"


def _may_fit(field: pa.Field, port: PortType) -> bool:
    """Return True for cells that may fit whatever type the first rows have: each row has a value of its own."""
    kind = cell_kind(field)
    if kind == JSON_CELL:
        return bool(field.type == MIXED) and port.kind != "detections"
    return kind == CSV_CELL and port.kind in ("text", "json", *MEDIA)


def means(field: pa.Field) -> str:
    """Return the declared meaning of a text column: `path`, `json`, or ''."""
    return (field.metadata or {}).get(MEANS, b"").decode() if field.metadata else ""


def is_encoded(type: pa.DataType) -> bool:
    """Return True for Hugging Face's Image and Audio type: a struct of bytes and path."""
    return bool(pa.types.is_struct(type)) and {"bytes", "path"} <= {field.name for field in type}


def is_shaped(type: pa.DataType) -> bool:
    """Return True for tensors of any shape in job results: a struct of shape and data."""
    if not pa.types.is_struct(type) or {field.name for field in type} != {"shape", "data"}:
        return False
    shape, data = type.field("shape").type, type.field("data").type
    return bool(
        is_list(shape) and pa.types.is_integer(shape.value_type) and is_list(data) and is_number(data.value_type)
    )


def holds_bytes(type: pa.DataType) -> bool:
    """Return True for encoded media and other bytes, also in lists."""
    type = innermost(type)
    return is_bytes(type) or is_encoded(type)


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


def _for_any(type: pa.DataType) -> str:
    """Refuse an extension type that stores numbers with a meaning of their own, such as periods of pandas."""
    counts = type != storage(type) and pa.types.is_integer(storage(type)) and not isinstance(type, pa.Bool8Type)
    return (
        f"a column of {type.extension_name} has no values that Weftline reads; turn it into text first"
        if counts
        else ""
    )


def _for_json(type: pa.DataType) -> str:
    """Refuse types that contain bytes; times and decimals become text."""
    inner = storage(type)
    if is_bytes(inner):
        return f"a column of {type} is no json"
    if why := _for_any(type):
        return why
    if pa.types.is_struct(inner):
        return next((why for field in inner if (why := _for_json(field.type))), "")
    if is_list(inner):
        return _for_json(inner.value_type)
    if pa.types.is_map(inner):
        if not is_text(inner.key_type):
            return f"a column of {type} is no json; its keys are no text"
        return _for_json(inner.item_type)
    return ""


def _for_tensor(type: pa.DataType, port: PortType) -> str:
    shaped = isinstance(type, pa.FixedShapeTensorType)
    depth, fixed, inner = 0, list[int](), storage(type)
    if shaped:
        fixed, inner, depth = list(type.shape), storage(type.value_type), len(type.shape)
    elif is_bytes(inner) or is_shaped(inner):
        return ""
    while is_list(inner):
        fixed.append(inner.list_size if pa.types.is_fixed_size_list(inner) else -1)
        depth, inner = depth + 1, storage(inner.value_type)
    if pa.types.is_null(inner):
        return ""  # empty lists
    if not is_number(inner):
        return f"a column of {type} has no numbers for {port}"
    if port.dtype in STAND_INS and port.dtype != "bfloat16":
        return f"{port.dtype} cannot come from a column"
    if port.dims is not None and len(port.dims) != depth:
        return f"a column of {type} has {depth} dimensions, {port} has {len(port.dims)}"
    for size, dim in zip(fixed, port.dims or ()):
        if size >= 0 and isinstance(dim, int) and dim != size:
            return f"a column of {type} has lists of {size}, {port} expects {dim}"
    return ""


def tensors(array: pa.Array, port: PortType) -> list[Any]:
    """Return one array of the port's dtype for each row, None for null, or Unusable."""
    if isinstance(array.type, pa.FixedShapeTensorType):
        return _even(array.storage.flatten(), _valid(array.storage), tuple(array.type.shape), port)
    while isinstance(array.type, pa.BaseExtensionType):
        array = array.storage
    if is_bytes(array.type):
        return [_npy(data, port) for data in array.to_pylist()]
    if is_shaped(array.type):
        return _shaped(array, port)
    shape, inner = _fixed(array)
    if shape is not None and not pa.types.is_null(innermost(array.type)):
        return _even(inner, _valid(array), shape, port)
    if is_list(array.type) and is_number(storage(array.type.value_type)):
        return _number_lists(array, port)
    return [None if value is None else _array(value, port) for value in array.to_pylist()]


def _valid(array: pa.Array) -> np.ndarray:
    return np.asarray(array.is_valid())


def _fixed(array: pa.Array) -> tuple[tuple[int, ...] | None, pa.Array]:
    """Return the shape common to all rows and the flat numbers; None if shapes differ or inner values are null."""
    shape: list[int] = []
    while pa.types.is_fixed_size_list(array.type):
        if shape and array.null_count:
            return None, array
        shape.append(array.type.list_size)
        array = array.flatten()
    if is_list(array.type) or (shape and array.null_count):
        return None, array
    return tuple(shape), array


def _even(numbers: pa.Array, valid: np.ndarray, shape: tuple[int, ...], port: PortType) -> list[Any]:
    """Return rows of one shape. `numbers` has none of null rows, unless rows are scalars."""
    if not shape:
        numbers = numbers.drop_null()
    values = _numpy(numbers)
    held, wrong = _converted(values, port)
    rows = held.reshape((int(valid.sum()), *shape))
    bad = wrong.reshape((len(rows), -1)).any(axis=1) if wrong is not None else None
    if port.dims is not None and not fits(port.dims, shape):
        return [_unfit(port, f"{values.dtype}{list(shape)}") if one else None for one in valid.tolist()]
    found: list[Any] = [row if shape else np.asarray(row) for row in rows]
    for place in np.flatnonzero(bad) if bad is not None else ():
        found[place] = _inexact(port)
    return found if len(found) == len(valid) else _spread(found, valid)


def _number_lists(array: pa.Array, port: PortType) -> list[Any]:
    """Return rows that are lists of numbers of any length."""
    numbers, lengths = array.flatten(), np.asarray(array.value_lengths().fill_null(0)).astype(np.int64)
    holes = np.asarray(numbers.is_null()) if numbers.null_count else None
    filled = False if pa.types.is_boolean(numbers.type) else 0
    values = _numpy(numbers.fill_null(filled) if holes is not None else numbers)
    held, wrong = _converted(values, port)
    ends = np.cumsum(lengths)
    found: list[Any] = []
    for start, end, there in zip((ends - lengths).tolist(), ends.tolist(), _valid(array).tolist(), strict=True):
        if not there:
            found.append(None)
        elif holes is not None and holes[start:end].any():
            found.append(Unusable(f"wants {port}, got a list with null in it"))
        elif port.dims is not None and not fits(port.dims, (end - start,)):
            found.append(_unfit(port, f"{values.dtype}[{end - start}]"))
        elif wrong is not None and wrong[start:end].any():
            found.append(_inexact(port))
        else:
            found.append(held[start:end])
    return found


def _shaped(array: pa.Array, port: PortType) -> list[Any]:
    """Return rows that are structs of shape and row-major data."""
    rows = _number_lists(array.field("data"), PortType("tensor", port.dtype))
    found: list[Any] = []
    for there, row, shape in zip(array.is_valid().to_pylist(), rows, array.field("shape").to_pylist(), strict=True):
        if not there or row is None or isinstance(row, Unusable):
            found.append(row if there else None)
        elif shape is None or None in shape or min(shape, default=0) < 0 or math.prod(shape) != len(row):
            found.append(Unusable(f"wants {port}, got {len(row)} numbers for the shape {shape}"))
        elif port.dims is not None and not fits(port.dims, tuple(shape)):
            found.append(_unfit(port, f"{row.dtype}{shape}"))
        else:
            found.append(row.reshape(shape))
    return found


def _numpy(numbers: pa.Array) -> np.ndarray:
    found: np.ndarray = numbers.to_numpy(zero_copy_only=False)
    return found


def _converted(values: np.ndarray, port: PortType) -> tuple[np.ndarray, np.ndarray | None]:
    """Cast numbers to the port's dtype; return a mask of those that it does not hold exactly, None without any."""
    return (values, None) if port.dtype is None else exact_numbers.converted(values, port.dtype)


def _array(value: Any, port: PortType) -> Any:
    try:
        found = np.asarray(value)
    except ValueError:
        return Unusable(f"wants {port}, got lists of unequal lengths")
    if found.dtype.kind not in "biuf":
        return Unusable(f"wants {port}, got lists with null in them, or of nothing")
    return _checked(found, port)


def _npy(data: bytes | None, port: PortType) -> Any:
    if data is None:
        return None
    try:
        return _checked(np.load(io.BytesIO(data), allow_pickle=False), port)
    except (ValueError, OSError, EOFError):
        return Unusable(f"wants {port}, got bytes that are not in NumPy's .npy format")


def _checked(found: Any, port: PortType) -> Any:
    if port.dims is not None and not fits(port.dims, found.shape):
        return _unfit(port, describe(found))
    if found.dtype.name == STAND_INS.get(port.dtype or ""):
        return found  # the bits of a dtype that NumPy lacks
    try:
        held, wrong = _converted(found, port)
    except InputError as error:
        return _unfit(port, str(error))
    return _inexact(port) if wrong is not None else held


def _spread(found: Sequence[Any], valid: np.ndarray) -> list[Any]:
    """Insert None for the null rows."""
    left = iter(found)
    return [next(left) if one else None for one in valid.tolist()]


def _unfit(port: PortType, got: str) -> Unusable:
    return Unusable(f"wants {port}, got {got}")


def _inexact(port: PortType) -> Unusable:
    return Unusable(f"wants {port}, got {exact_numbers.inexact(str(port.dtype))}")
