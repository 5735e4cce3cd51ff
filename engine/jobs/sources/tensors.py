"""Conversion of numeric Arrow columns to numpy arrays, zero-copy where possible."""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from weftline.engine.jobs.rows import Unusable
from weftline.engine.jobs.sources.fitting import is_bytes, is_list, is_shaped, storage
from weftline.nodes.ports import PortType
from weftline.nodes.values import describe, fits


def tensors(array: pa.Array, port: PortType) -> list[Any]:
    """Return for each row an array of the port's dtype, None for null, or Unusable."""
    if isinstance(array.type, pa.FixedShapeTensorType):
        return _even(array.storage.flatten(), _valid(array.storage), tuple(array.type.shape), port)
    while isinstance(array.type, pa.BaseExtensionType):
        array = array.storage
    if is_bytes(array.type):
        return [_npy(data, port) for data in array.to_pylist()]
    if is_shaped(array.type):
        return _shaped(array, port)
    shape, inner = _fixed(array)
    if shape is not None:
        return _even(inner, _valid(array), shape, port)
    if is_list(array.type) and not is_list(storage(array.type.value_type)):
        return _lists(array, port)
    return [None if value is None else _array(value, port) for value in array.to_pylist()]


def _valid(array: pa.Array) -> np.ndarray:
    return np.asarray(array.is_valid())


def _fixed(array: pa.Array) -> tuple[tuple[int, ...] | None, pa.Array]:
    """Return the one shape that all rows have and their numbers in a row; None when they differ, or some are null."""
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
    """Return rows of one shape: numbers of null rows are left out of `numbers`, unless rows are numbers themselves."""
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


def _lists(array: pa.Array, port: PortType) -> list[Any]:
    """Return rows that are lists of numbers, of any lengths."""
    numbers, lengths = array.flatten(), np.asarray(array.value_lengths().fill_null(0)).astype(np.int64)
    holes = np.asarray(numbers.is_null()) if numbers.null_count else None
    values = _numpy(numbers.fill_null(0) if holes is not None else numbers)
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
    """Return rows that are a struct of shape and data, the numbers in row-major order."""
    rows = _lists(array.field("data"), PortType("tensor", port.dtype))
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
    """Return numbers in the port's dtype, and which of them it does not hold; None: it holds all of them.

    A number with a fraction may be rounded, as everywhere; a whole number may not.
    """
    if port.dtype is None or values.dtype == port.dtype:
        return values, None
    with np.errstate(all="ignore"):
        held = values.astype(port.dtype)
        wrong = held.astype(values.dtype) != values if values.dtype.kind in "iu" else None
    return held, wrong if wrong is not None and wrong.any() else None


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
    held, wrong = _converted(found, port)
    if port.dims is not None and not fits(port.dims, found.shape):
        return _unfit(port, describe(found))
    return _inexact(port) if wrong is not None else held


def _spread(found: Sequence[Any], valid: np.ndarray) -> list[Any]:
    """Return values put back among the nulls they came from between."""
    left = iter(found)
    return [next(left) if one else None for one in valid.tolist()]


def _unfit(port: PortType, got: str) -> Unusable:
    return Unusable(f"wants {port}, got {got}")


def _inexact(port: PortType) -> Unusable:
    return Unusable(f"wants {port}, got numbers that {port.dtype} does not hold exactly")
