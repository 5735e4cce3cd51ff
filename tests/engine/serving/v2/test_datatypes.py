"""Datatype conversions in both directions, and numbers as single elements."""

from __future__ import annotations

import numpy as np
import pytest

from weftline.engine.serving.v2.datatypes import (
    DTYPES,
    NUMPY,
    SIZES,
    array_of,
    datatype_of,
    number_of,
    trailing_dims,
)  # fmt: skip
from weftline.errors import InputError
from weftline.nodes.exact_numbers import from_bfloat16, to_bfloat16
from weftline.shm.spec import ITEM_BYTES


def test_every_dtype_of_ours_travels_as_some_datatype_of_the_same_bits() -> None:
    for dtype, size in ITEM_BYTES.items():
        datatype = datatype_of(dtype)
        assert SIZES[datatype] * (trailing_dims(dtype) or (1,))[0] == size


def test_every_datatype_comes_back_as_itself() -> None:
    for datatype, dtype in DTYPES.items():
        assert datatype_of(dtype) == datatype
        assert NUMPY[datatype].itemsize == SIZES[datatype]


@pytest.mark.parametrize("datatype", [name for name in DTYPES if name not in ("BOOL",)])
def test_numbers_one_by_one_become_an_array(datatype: str) -> None:
    array = array_of(datatype, (0, 1, 100))
    assert array.dtype == NUMPY[datatype]
    numbers = from_bfloat16(array) if datatype == "BF16" else array
    assert numbers.tolist() == [0, 1, 100]


def test_booleans_are_booleans() -> None:
    assert array_of("BOOL", (True, False)).tolist() == [True, False]


@pytest.mark.parametrize(
    ("datatype", "values"),
    [
        ("BOOL", (1,)), ("INT32", (True,)), ("INT32", (1.0,)), ("INT8", (128,)), ("UINT8", (-1,)),
        ("UINT64", (1 << 64,)),
        ("INT64", (-(1 << 63) - 1,)), ("FP32", ("1",)), ("FP32", (None,)), ("FP32", (1e300,)), ("FP16", (70000,)),
        ("INT64", (2**53 + 1, 0.5)), ("FP64", (2**53 + 1,)), ("FP32", (2**24 + 1,)), ("BF16", (257,)),
        ("FP64", (10**19 + 1, 0.5)), ("FP32", ([1],)), ("INT8", (b"1",)),
    ],
)  # fmt: skip
def test_what_a_datatype_does_not_hold_is_refused(datatype: str, values: tuple[object, ...]) -> None:
    with pytest.raises(InputError, match=datatype):
        array_of(datatype, values)


def test_bfloat16_rounds_to_nearest_even() -> None:
    numbers = np.array([1.0, 1.00390625, 1.01171875, -3.5, 0.0], np.float32)
    assert from_bfloat16(to_bfloat16(numbers)).tolist() == [1.0, 1.0, 1.015625, -3.5, 0.0]


def test_one_number_is_a_python_number() -> None:
    assert number_of("BF16", np.array([0x3FC0], np.uint16)) == 1.5
    assert np.isnan(number_of("FP32", np.array([np.nan], np.float32)))


def test_nan_and_infinities_are_floats() -> None:
    for datatype in ("FP16", "FP32", "FP64"):
        found = array_of(datatype, (float("nan"), float("-inf")))
        assert np.isnan(found[0]) and found[1] == -np.inf
