"""Table of v2 datatypes, Weftline dtypes and numpy dtypes.

    BOOL UINT8 ... UINT64 INT8 ... INT64 FP32 FP64    the same in numpy
    FP16                                              float16
    BF16                                              bfloat16: numpy sees its bits as uint16, as everywhere here
    BYTES                                             elements of any length; see `bytes_tensor.py`

v2 lacks three of ours. float8_e4m3fn and float8_e5m2 travel as UINT8, their bits; complex64 as FP32 with one more
dimension of 2, the last, for the real and the imaginary part. Everything is little-endian and row-major.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence

import numpy as np

from weftline.errors import InputError
from weftline.shm.spec import ITEM_BYTES, STAND_INS

BYTES = "BYTES"

DTYPES: dict[str, str] = {
    "BOOL": "bool",
    "UINT8": "uint8", "UINT16": "uint16", "UINT32": "uint32", "UINT64": "uint64",
    "INT8": "int8", "INT16": "int16", "INT32": "int32", "INT64": "int64",
    "FP16": "float16", "BF16": "bfloat16", "FP32": "float32", "FP64": "float64",
}  # fmt: skip
"""Our dtype for each of v2's datatypes but BYTES."""

NUMPY: dict[str, np.dtype] = {name: np.dtype(STAND_INS.get(dtype, dtype)) for name, dtype in DTYPES.items()}
"""What numpy sees for each of v2's datatypes but BYTES."""

SIZES: dict[str, int] = {name: ITEM_BYTES[dtype] for name, dtype in DTYPES.items()}
"""Bytes of one element of each of v2's datatypes but BYTES."""

_SENT_AS: dict[str, str] = {dtype: name for name, dtype in DTYPES.items()} | {
    "float8_e4m3fn": "UINT8", "float8_e5m2": "UINT8", "complex64": "FP32",
}  # fmt: skip

if sys.byteorder != "little":
    raise ImportError("weftline serves little-endian machines only: v2's tensors are little-endian")


def datatype_of(dtype: str) -> str:
    """Return the datatype that carries our `dtype`; KeyError for a name that is none of ours."""
    return _SENT_AS[dtype]


def trailing_dims(dtype: str | None) -> tuple[int, ...]:
    """Return the dimensions that a tensor of our `dtype` has in v2 after its own: (2,) for complex64."""
    return (2,) if dtype == "complex64" else ()


def array_of(datatype: str, values: Sequence[object]) -> np.ndarray:
    """Return elements sent one by one as a flat array; InputError when one does not fit the datatype.

    BOOL takes booleans, integers take integers in range, floats take finite integers and floats they can hold.
    """
    kinds = set(map(type, values))
    held = NUMPY[datatype]
    if datatype == "BOOL":
        _expect(kinds <= {bool}, datatype, "true and false")
        return np.array(values, held)
    try:
        if held.kind in "iu" and datatype != "BF16":
            _expect(kinds <= {int}, datatype, "integers")
            info = np.iinfo(held)
            _expect(not values or (info.min <= min(values) and max(values) <= info.max), datatype, "numbers in range")  # type: ignore[type-var, operator]
            return np.array(values, held)
        _expect(kinds <= {int, float}, datatype, "numbers")
        wide = np.array(values, np.float64)
        with np.errstate(over="ignore"):
            array = wide.astype(np.float32) if datatype == "BF16" else wide.astype(held)
        _expect(bool(np.isfinite(array).all()), datatype, "finite numbers in range")
    except OverflowError:
        raise InputError(f"found elements that {datatype} cannot hold, expected numbers in range") from None
    return to_bfloat16(array) if datatype == "BF16" else array


def to_bfloat16(array: np.ndarray) -> np.ndarray:
    """Return float32 numbers as the bits of bfloat16, rounded to nearest even: uint16 of the same shape."""
    bits = array.astype(np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def from_bfloat16(array: np.ndarray) -> np.ndarray:
    """Return the bits of bfloat16 (uint16) as the float32 numbers they stand for."""
    return (array.astype(np.uint32) << 16).view(np.float32)


def number_of(datatype: str, element: np.ndarray) -> bool | int | float:
    """Return one element as a Python number; InputError for NaN and infinities, which json does not have."""
    number: bool | int | float = (from_bfloat16(element) if datatype == "BF16" else element).item()
    _expect(math.isfinite(number), datatype, "a finite number")
    return number


def _expect(right: bool, datatype: str, expected: str) -> None:
    if not right:
        raise InputError(f"found elements that {datatype} cannot hold, expected {expected}")
