"""Arrow arrays from the values of one output, tensors included; vectorised, pure.

None becomes null. A value that does not fit its type raises ValueError, TypeError, KeyError or a pyarrow error;
values.py finds the row.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from weftline.engine.jobs.output.arrow import pa
from weftline.engine.jobs.output.columns import FOUND, MEDIA, WRITTEN_AS, is_nested
from weftline.engine.jobs.output.json_lines import json_text, valid_text
from weftline.nodes.detections import Detections
from weftline.nodes.exact_numbers import converted, from_bfloat16, inexact
from weftline.nodes.ports import PortType
from weftline.nodes.values import fits
from weftline.shm.spec import STAND_INS
from weftline.shm.view import dtype_name

OFFSET_MAX = (1 << 31) - 1
"""Most elements of all lists of an array: Arrow's offsets have 32 bits."""

_BOXES = FOUND.field("box").type


def array_of(type: PortType, values: Sequence[Any], arrow_type: pa.DataType) -> pa.Array:
    """Return the array of a port's values. Media are paths, or structs of bytes and path."""
    if type.kind == "list":
        return _lists(type.item or PortType("any"), values, arrow_type)
    if type.kind == "tensor":
        return tensors(type, values, arrow_type)
    if type.kind == "text":
        return texts(values)
    if type.kind == "detections":
        return _detections(values, arrow_type)
    if type.kind == "bytes":
        return _one_chunk(pa.array([_bytes(one) for one in values], arrow_type))
    if type.kind in MEDIA:
        return _one_chunk(pa.array(values, arrow_type))
    return _one_chunk(pa.array([None if one is None else json_text(one) for one in values], pa.string()))


def texts(values: Sequence[Any]) -> pa.Array:
    """Return texts as an array; a lone surrogate becomes U+FFFD."""
    try:
        return _one_chunk(pa.array(values, pa.string()))
    except UnicodeEncodeError:
        return _one_chunk(pa.array([valid_text(one) if isinstance(one, str) else one for one in values], pa.string()))


def _bytes(value: Any) -> Any:
    return bytes(value) if isinstance(value, bytearray | memoryview) else value


def _one_chunk(array: Any) -> pa.Array:
    """Raise ValueError for an array that pyarrow split into chunks."""
    if isinstance(array, pa.ChunkedArray):
        raise ValueError("more than 2 GiB in one block of rows\n    fix: lower --block-rows")
    return array


def _lists(item: PortType, values: Sequence[Any], arrow_type: pa.DataType) -> pa.Array:
    for one in values:
        if one is not None and not isinstance(one, list | tuple):
            raise TypeError("no list")
    inner = list(itertools.chain.from_iterable(one for one in values if one is not None))
    return cut(arrow_type, values, array_of(item, inner, arrow_type.value_type), len)


def _detections(values: Sequence[Any], arrow_type: pa.DataType) -> pa.Array:
    """Return lists of detections, from Detections or their JSON form (name, score, box), which has no class."""
    found = [_of_one_image(one) for one in values if one is not None]
    boxes = np.concatenate([one[0] for one in found]) if found else np.zeros((0, 4), np.float32)
    scores = np.concatenate([one[1] for one in found]) if found else np.zeros(0, np.float32)
    classes = list(itertools.chain.from_iterable(one[2] for one in found))
    labels = list(itertools.chain.from_iterable(one[3] for one in found))
    parts = [
        pa.FixedSizeListArray.from_arrays(pa.array(boxes.ravel(), pa.float32()), type=_BOXES),
        pa.array(scores, pa.float32()),
        pa.array(classes, pa.int32()),
        texts(labels),
    ]
    objects = pa.StructArray.from_arrays(parts, fields=list(FOUND))
    return cut(arrow_type, values, objects, len)


def _of_one_image(value: Any) -> tuple[np.ndarray, np.ndarray, Iterable[int | None], list[str]]:
    """Return boxes [objects, 4], scores [objects], classes and labels."""
    if isinstance(value, Detections):
        return value.boxes.reshape(len(value), 4), value.scores, value.classes.tolist(), value.labels
    boxes = np.array([one["box"] for one in value], np.float32).reshape(len(value), 4)
    scores = np.array([one["score"] for one in value], np.float32)
    return boxes, scores, [None] * len(value), [one["name"] for one in value]


def tensors(type: PortType, values: Sequence[Any], arrow_type: pa.DataType) -> pa.Array:
    """Return the array of tensors; ValueError or TypeError for a value that is no such tensor.

    values: arrays, or lists of numbers; or one array of all rows, for a port that holds one number.
    """
    if type.dims == () and type.dtype is not None:
        return _scalars(type.dtype, values, arrow_type)
    arrays = [None if one is None else np.asarray(one) for one in values]
    for one in arrays:
        if one is not None and type.dims is not None and not fits(type.dims, one.shape):
            raise ValueError(f"a tensor of shape {list(one.shape)}")
    if type.dtype is None:
        return pa.array([_any_tensor(one) for one in arrays], arrow_type)
    dtype = type.dtype
    if is_nested(type.dims):
        numbers = _numbers(dtype, arrays)
        levels = [arrow_type]
        while pa.types.is_list(levels[-1].value_type):
            levels.append(levels[-1].value_type)
        sizes = [size for size in (type.dims or ())[1:] if isinstance(size, int)] + ([2] if _is_pair(dtype) else [])
        for level, size in zip(reversed(levels[1:]), reversed(sizes), strict=True):
            numbers = rows_of(level, numbers, size)
        return cut(arrow_type, arrays, numbers, len)
    return _shaped(dtype, arrays, arrow_type)


def _scalars(dtype: str, values: Sequence[Any], arrow_type: pa.DataType) -> pa.Array:
    if not isinstance(values, np.ndarray) and any(one is None for one in values):
        absent = np.fromiter((one is None for one in values), bool, len(values))
        present = true_numbers(dtype, np.array([one for one in values if one is not None]))
        full = np.zeros((len(values), *present.shape[1:]), present.dtype)
        full[~absent] = _one_each(present, len(values) - int(absent.sum()))
    else:
        absent, full = None, _one_each(true_numbers(dtype, np.array(values)), len(values))
    if _is_pair(dtype):
        offsets = pa.array(np.arange(0, 2 * len(full) + 1, 2, dtype=np.int32))
        mask = None if absent is None else pa.array(absent)
        return pa.ListArray.from_arrays(offsets, pa.array(_real_and_imaginary(full)), type=arrow_type, mask=mask)
    return pa.array(full, arrow_type, mask=absent)


def _one_each(numbers: np.ndarray, rows: int) -> np.ndarray:
    if numbers.shape != (rows,):
        raise ValueError("more than one number in a row")
    return numbers


def _shaped(dtype: str, arrays: Sequence[np.ndarray | None], arrow_type: pa.DataType) -> pa.Array:
    """Return structs of shape and data. A null struct holds null lists."""
    shape, data = arrow_type.field("shape"), arrow_type.field("data")
    sizes = np.fromiter(itertools.chain.from_iterable(one.shape for one in arrays if one is not None), np.int64)
    numbers = _numbers(dtype, arrays)
    if _is_pair(dtype):
        numbers = rows_of(data.type.value_type, numbers, 2)
    both = [
        cut(shape.type, arrays, pa.array(sizes), lambda one: int(one.ndim)),
        cut(data.type, arrays, numbers, lambda one: int(one.size)),
    ]
    return pa.StructArray.from_arrays(both, fields=[shape, data], mask=missing(arrays))


def _any_tensor(array: np.ndarray | None) -> Mapping[str, Any] | None:
    if array is None:
        return None
    if array.dtype.hasobject:
        raise TypeError("no tensor")
    little = array.astype(array.dtype.newbyteorder("<"), copy=False)
    return {"dtype": dtype_name(array.dtype), "shape": list(array.shape), "data": little.tobytes()}


def _numbers(dtype: str, arrays: Iterable[np.ndarray | None]) -> pa.Array:
    """Return the concatenated numbers of all arrays."""
    present = [one.ravel() for one in arrays if one is not None and one.size]
    flat = true_numbers(dtype, np.concatenate(present)) if present else np.zeros(0, WRITTEN_AS.get(dtype, dtype))
    return pa.array(_real_and_imaginary(flat) if _is_pair(dtype) else flat)


def _is_pair(dtype: str) -> bool:
    return dtype == "complex64"


def _real_and_imaginary(numbers: np.ndarray) -> np.ndarray:
    """Return alternating real and imaginary parts."""
    return np.ascontiguousarray(numbers, np.complex64).view(np.float32)


def true_numbers(dtype: str, numbers: np.ndarray) -> np.ndarray:
    """Cast numbers to the dtype written for `dtype`; dtypes that numpy lacks are decoded from their bits.

    TypeError for values that are no numbers; ValueError for numbers that the dtype does not hold exactly.
    """
    if dtype in STAND_INS and numbers.dtype.name == STAND_INS[dtype]:
        return _FROM_BITS[dtype](numbers)
    wanted = dtype if _is_pair(dtype) else WRITTEN_AS.get(dtype, dtype)
    if numbers.size and numbers.dtype.kind not in "biufc":
        raise TypeError(f"{numbers.dtype}, expected {dtype}")
    if not numbers.size:
        return numbers.astype(wanted)
    cast, wrong = converted(numbers, wanted)
    if wrong is not None:
        raise ValueError(inexact(dtype))
    return cast


def _float8(exponent_bits: int, bias: int, infinities: bool) -> np.ndarray:
    """Return the 256 values of an 8-bit float (Micikevicius et al. 2022, "FP8 formats for deep learning")."""
    bits, fraction_bits = np.arange(256), 7 - exponent_bits
    sign = np.where(bits & 0x80, -1.0, 1.0)
    exponent = (bits & 0x7F) >> fraction_bits
    fraction = (bits & ((1 << fraction_bits) - 1)) / (1 << fraction_bits)
    found = sign * np.where(exponent > 0, (1 + fraction) * 2.0 ** (exponent - bias), fraction * 2.0 ** (1 - bias))
    top = exponent == (1 << exponent_bits) - 1
    if infinities:
        found = np.where(top, np.where(fraction == 0, sign * np.inf, np.nan), found)
    else:
        found = np.where((bits & 0x7F) == 0x7F, np.nan, found)
    return found.astype(np.float32)


_E4M3, _E5M2 = _float8(4, 7, infinities=False), _float8(5, 15, infinities=True)
_FROM_BITS: Mapping[str, Callable[[np.ndarray], np.ndarray]] = {
    "bfloat16": from_bfloat16,
    "float8_e4m3fn": lambda bits: _E4M3[bits],
    "float8_e5m2": lambda bits: _E5M2[bits],
}


def cut(arrow_type: pa.DataType, values: Sequence[Any], inner: pa.Array, size: Callable[[Any], int]) -> pa.Array:
    """Split `inner` into one list for each value, null where a value is None."""
    sizes = np.fromiter((0 if one is None else size(one) for one in values), np.int64, len(values))
    offsets = np.concatenate(([0], np.cumsum(sizes)))
    if offsets[-1] > OFFSET_MAX:
        raise ValueError(f"{offsets[-1]} numbers in one block of rows\n    fix: lower --block-rows")
    where = pa.array(offsets.astype(np.int32))
    return pa.ListArray.from_arrays(where, inner, type=arrow_type, mask=missing(values))


def missing(values: Sequence[Any]) -> pa.Array | None:
    """Return the null mask; None without nulls, so that the array has no bitmap."""
    absent = [one is None for one in values]
    return pa.array(absent, pa.bool_()) if any(absent) else None


def rows_of(arrow_type: pa.DataType, inner: pa.Array, size: int) -> pa.Array:
    """Split `inner` into lists of `size` elements each."""
    offsets = pa.array(np.arange(0, len(inner) + 1, size, dtype=np.int32))
    return pa.ListArray.from_arrays(offsets, inner, type=arrow_type)
