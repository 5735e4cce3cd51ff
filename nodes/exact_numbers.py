"""Conversion of numbers to a dtype, with one rule for what the dtype holds exactly.

    from \\ to     bool      integers                    float, complex, bfloat16
    bool          itself    0 or 1                      0.0 or 1.0
    integers      0 or 1    in range                    if the very integer is representable
    floats        0 or 1    whole numbers in range      rounded to nearest; never from finite to infinite
    complex       as the real part, if the imaginary part is 0; to complex as floats

NaN and infinities stay what they are in floats, and fit no integer and no bool. Numbers too small for a float become 0
or subnormal, as IEEE 754 rounds. Every conversion of request values, columns and protocol elements uses this rule.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np

from weftline.errors import InputError
from weftline.shm.spec import STAND_INS

_FRACTION_BITS = {"bfloat16": 7}
_EXACT_IN_DOUBLE = 1 << 53


def inexact(dtype: str) -> str:
    """Return the description of numbers that `converted` marks as wrong: 'numbers that int8 does not hold exactly'."""
    return f"numbers that {dtype} does not hold exactly"


def converted(array: np.ndarray, dtype: str) -> tuple[np.ndarray, np.ndarray | None]:
    """Convert numbers to `dtype`: the new array, and a mask of the elements that it does not hold exactly.

    The mask is None if there are none. bfloat16 is returned as its bits, uint16. Converting to float8 is an InputError.
    """
    if array.dtype.kind not in "biufc":
        raise InputError(f"{array.dtype}, which are no numbers")
    if dtype == "bfloat16":
        held, wrong = _to_floats(array, "float32")
        return _checked_bfloat16(array, held, wrong)
    if dtype in STAND_INS:
        fix = f"pass its bits as an array of {STAND_INS[dtype]}"
        raise InputError(f"numbers, which are not converted to {dtype}\n    fix: {fix}")
    if array.dtype == dtype:
        return array, None
    with np.errstate(all="ignore"):
        held, wrong = (_to_floats if np.dtype(dtype).kind in "fc" else _to_integers)(array, dtype)
    return held, wrong if wrong.any() else None


def _to_integers(array: np.ndarray, dtype: str) -> tuple[np.ndarray, np.ndarray]:
    target, imaginary = np.dtype(dtype), None
    if array.dtype.kind == "c":
        array, imaginary = array.real, array.imag != 0
    low, high = (0, 1) if target.kind == "b" else (int(np.iinfo(target).min), int(np.iinfo(target).max))
    if array.dtype.kind == "f":
        wide = array.astype(np.float64) if array.dtype.itemsize < 8 else array
        wrong = ~((wide >= low) & (wide < float(high + 1)) & (np.trunc(wide) == wide))
        held = np.where(wrong, 0, wide).astype(target)
    elif array.dtype.kind == "b":
        return array.astype(target), np.zeros(array.shape, np.bool_)
    else:
        wrong = (array < low) | (array > high)
        held = array.astype(target)
    return held, wrong if imaginary is None else wrong | imaginary


def _to_floats(array: np.ndarray, dtype: str) -> tuple[np.ndarray, np.ndarray]:
    target, imaginary = np.dtype(dtype), None
    if array.dtype.kind == "c" and target.kind != "c":
        array, imaginary = array.real, array.imag != 0
    with np.errstate(all="ignore"):
        held = array.astype(target)
        wrong = _lost_integers(array, held) if array.dtype.kind in "iu" else np.isinf(held) & ~np.isinf(array)
    return held, wrong if imaginary is None else wrong | imaginary


def _lost_integers(array: np.ndarray, held: np.ndarray) -> np.ndarray:
    """Return where floats differ from the integers that they were made of."""
    info, wide = np.iinfo(array.dtype), held.real.astype(np.float64)
    inside = (wide >= float(info.min)) & (wide < float(int(info.max) + 1))
    back = np.where(inside, wide, 0).astype(array.dtype)
    different: np.ndarray = ~inside | (back != array)
    return different


def _checked_bfloat16(
    array: np.ndarray, rounded: np.ndarray, wrong: np.ndarray
) -> tuple[np.ndarray, np.ndarray | None]:
    bits = to_bfloat16(rounded)
    held = from_bfloat16(bits)
    if array.dtype.kind in "iu":
        wrong = wrong | (held != rounded)
    else:
        wrong = wrong | (np.isinf(held) & ~np.isinf(rounded))
    return bits, wrong if wrong.any() else None


def to_bfloat16(array: np.ndarray) -> np.ndarray:
    """Round float32 numbers to the bits of bfloat16, to nearest even: uint16 of the same shape."""
    bits = array.astype(np.float32).view(np.uint32)
    rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    found: np.ndarray = np.where(np.isnan(array), np.uint16(0x7FC0), rounded)
    return found


def from_bfloat16(array: np.ndarray) -> np.ndarray:
    """Convert the bits of bfloat16 (uint16) to float32 numbers."""
    return (array.astype(np.uint32) << 16).view(np.float32)


def numbers(raw: Any, dtype: str | None, name: str = "") -> np.ndarray:
    """Return a Python number, or nested lists of numbers, as an array of `dtype`; None: of numpy's choice.

    InputError: not numbers, lists of unequal lengths, or a number that the dtype does not hold exactly. The reason is
    worded to follow 'got', with `name` for the dtype.
    """
    try:
        array = np.asarray(raw)
    except (ValueError, TypeError, OverflowError):
        raise InputError("lists of unequal lengths, or something else than numbers") from None
    if array.dtype.kind == "O" and any(isinstance(one, int) and not _in_64_bits(one) for one in array.flat):
        raise InputError(inexact(name or dtype) if dtype is not None else "an integer of more than 64 bits")
    if array.dtype.kind not in "biufc":
        raise InputError("something else than numbers")
    if dtype is not None and _has_small_numbers(array, dtype):
        return array.astype(dtype)
    array = _as_integers(raw, array)
    held, wrong = converted(array, dtype) if dtype is not None else (array, None)
    if wrong is not None or _lost_among_floats(raw, array, dtype or array.dtype.name):
        raise InputError(inexact(name or dtype or array.dtype.name))
    return held


@cache
def _exact_max(dtype: str) -> int:
    """Return the largest N so that `dtype` and double hold each integer from -N to N, and no other rounds to one."""
    kind = np.dtype(STAND_INS.get(dtype, dtype)).kind
    bits = _FRACTION_BITS.get(dtype) or (np.finfo(dtype).nmant if kind in "fc" else 52)
    return min(2 << bits, _EXACT_IN_DOUBLE - 1)


def _has_small_numbers(array: np.ndarray, dtype: str) -> bool:
    """Return True if a float `dtype` surely holds all of these numbers, integers among them exactly."""
    if array.dtype.kind not in "iuf" or not array.size or dtype in STAND_INS or np.dtype(dtype).kind != "f":
        return False
    most = _exact_max(dtype)
    return bool(array.max() <= most and array.min() >= -most)


def _as_integers(raw: Any, array: np.ndarray) -> np.ndarray:
    """Return uint64 for integers of which numpy made doubles, since some of them do not fit int64."""
    if array.dtype != np.float64 or not array.ndim or not (array >= 2.0**63).any():
        return array
    exact = np.asarray(raw, object)
    fits = all(isinstance(one, int | np.integer) and 0 <= one < 1 << 64 for one in exact.flat)
    return exact.astype(np.uint64) if fits else array


def _lost_among_floats(raw: Any, array: np.ndarray, dtype: str) -> bool:
    """Return True if an integer beside floats is none that `dtype` holds; numpy made a double of it first."""
    if array.dtype.kind not in "fc" or isinstance(raw, float | complex):
        return False
    with np.errstate(invalid="ignore"):
        if not (np.abs(array) > _exact_max(dtype)).any():
            return False
    integers = [int(one) for one in np.asarray(raw, object).flat if isinstance(one, int | np.integer)]
    return any(not _in_64_bits(one) or int(float(one)) != one or _lost(one, dtype) for one in integers)


def _in_64_bits(integer: int) -> bool:
    return -(1 << 63) <= integer < 1 << 64


def _lost(integer: int, dtype: str) -> bool:
    """Return True if `dtype` does not hold an integer of 64 bits."""
    return converted(np.array(integer, np.int64 if integer < 1 << 63 else np.uint64), dtype)[1] is not None
