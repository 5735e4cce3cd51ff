"""One rule for what a dtype holds exactly: numbers, lists, columns and protocol elements."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from weftline.engine.protocol.values import live, pack
from weftline.errors import InputError, StepError
from weftline.nodes.detections import Detections
from weftline.nodes.exact_numbers import converted, from_bfloat16, numbers, to_bfloat16
from weftline.nodes.media import to_value
from weftline.nodes.ports import PortType

NAN, INFINITE = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("values", "source", "dtype"),
    [
        ([2**64 - 1], "uint64", "int64"), ([2**63], "uint64", "int64"), ([-1], "int64", "uint64"),
        ([70_000], "int64", "float16"), ([70_000.0], "float64", "float16"), ([65_520.0], "float32", "float16"),
        ([2**24 + 1], "int64", "float32"), ([2**53 + 1], "int64", "float64"), ([2**63 - 1], "int64", "float64"),
        ([2**64 - 1], "uint64", "float32"), ([1e300], "float64", "float32"), ([1e300], "float64", "complex64"),
        ([256], "int64", "uint8"), ([-1], "int64", "uint8"), ([1.5], "float64", "int32"),
        ([2.0**63], "float64", "int64"),
        ([NAN], "float64", "int64"), ([INFINITE], "float16", "int64"), ([2], "int64", "bool"),
        ([0.5], "float64", "bool"),
        ([257], "int64", "bfloat16"), ([3.4e38], "float64", "bfloat16"), ([1j], "complex128", "float32"),
        ([1j], "complex64", "int8"),
    ],
)  # fmt: skip
def test_numbers_that_a_dtype_does_not_hold_are_marked(values: list[Any], source: str, dtype: str) -> None:
    array = np.array([0, *values, 1], source)
    wrong = converted(array, dtype)[1]
    assert wrong is not None and wrong.tolist() == [False, True, False]


@pytest.mark.parametrize(
    ("values", "source", "dtype", "expected"),
    [
        ([0.1], "float64", "float32", [float(np.float32(0.1))]),
        ([NAN, INFINITE], "float64", "float16", [NAN, INFINITE]),
        ([2.0**63], "float64", "uint64", [2**63]), ([-0.0, 3.0], "float32", "uint8", [0, 3]),
        ([True, False], "bool", "int8", [1, 0]), ([1, 0], "int64", "bool", [True, False]),
        ([2**24], "int64", "float32", [2.0**24]), ([65_519.0], "float64", "float16", [65_504.0]),
        ([2 + 0j], "complex128", "int8", [2]), ([1e-60], "float64", "float32", [0.0]),
    ],
)  # fmt: skip
def test_numbers_that_a_dtype_holds_are_converted(
    values: list[Any], source: str, dtype: str, expected: list[Any]
) -> None:
    held, wrong = converted(np.array(values, source), dtype)
    assert wrong is None and held.dtype == dtype
    np.testing.assert_array_equal(held, np.array(expected, dtype))


DTYPES = ("bool", "uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64",
          "float16", "float32", "float64", "bfloat16")  # fmt: skip


@given(st.integers(-(1 << 63), (1 << 64) - 1), st.sampled_from(DTYPES))
def test_an_integer_is_kept_as_itself_or_refused(value: int, dtype: str) -> None:
    try:
        held = numbers([value], dtype)
    except InputError:
        return
    kept = from_bfloat16(held) if dtype == "bfloat16" else held
    assert int(kept[0]) == value


@given(st.lists(st.integers(-(1 << 63), (1 << 64) - 1) | st.floats(), min_size=1, max_size=4))
def test_integers_beside_floats_are_kept_or_refused(values: list[float]) -> None:
    for dtype in (None, "float64", "float32", "int64"):
        try:
            held = numbers(values, dtype)
        except InputError:
            continue
        whole = [(one, kept) for one, kept in zip(values, held.tolist(), strict=True) if isinstance(one, int)]
        assert all(int(kept) == one for one, kept in whole)


@given(st.lists(st.floats(width=32), min_size=1))
def test_bfloat16_bits_keep_nan_and_the_nearest_number(values: list[float]) -> None:
    array = np.array(values, np.float32)
    kept = from_bfloat16(to_bfloat16(array))
    assert np.isnan(kept).tolist() == np.isnan(array).tolist()
    near = np.isfinite(array) & np.isfinite(kept) & (np.abs(array) > 1e-30)
    assert (np.abs(kept[near] - array[near]) <= np.abs(array[near]) * 2.0**-8).all()


def test_nan_of_any_payload_stays_nan_in_bfloat16() -> None:
    payloads = np.array([0x7FFFFFFF, 0xFFFFFFFF, 0x7F800001], np.uint32).view(np.float32)
    assert np.isnan(from_bfloat16(to_bfloat16(payloads))).all()


@pytest.mark.parametrize(
    ("type", "raw"),
    [
        ("int64[N]", [2**64 - 1]), ("int64[]", 2**63), ("float16[N]", [70_000.0]), ("float16[]", 70_000),
        ("float32[N]", [1e39]), ("float32[N]", [2**24 + 1]), ("float32[N]", [2**24 + 1, 0.5]),
        ("float64[N]", [2**53 + 1, 0.5]), ("tensor", [2**64 - 1, -1]), ("uint8[H, W, 3]", [[[256, 0, 0]]]),
        ("uint8[H, W, 3]", [[[-1, 0, 0]]]), ("int32[N]", [1.5]), ("int32[N]", [NAN]), ("bool[N]", [2]),
        ("bfloat16[N]", [257]), ("list[int8[]]", [1, 200]), ("uint64[N]", [-1]),
        ("int64[N]", [2**70]), ("float64[N]", [2**70, 0.5]),
    ],
)  # fmt: skip
def test_lists_that_a_port_does_not_hold_are_refused(type: str, raw: Any) -> None:
    with pytest.raises(InputError, match="does not hold exactly"):
        to_value(PortType.parse(type), raw)


def test_numpy_scalars_are_numbers_without_a_dtype() -> None:
    assert to_value(PortType.parse("float32[]"), np.float64(0.1)) == np.float32(0.1)
    assert to_value(PortType.parse("int8[]"), np.int64(5)).dtype == np.int8
    for type, raw in (("int8[]", np.int64(200)), ("float16[]", np.float64(70_000)), ("int64[]", np.uint64(2**64 - 1))):
        with pytest.raises(InputError, match="does not hold exactly"):
            to_value(PortType.parse(type), raw)


def test_detections_keep_their_classes_or_are_refused() -> None:
    for boxes, classes in ((np.ones((1, 4)), np.array([2**40])), (np.full((1, 4), 1e300), np.array([1]))):
        with pytest.raises(StepError, match="found: found detections with numbers that"):
            pack(Detections(boxes, np.ones(1), classes, ("a",)), PortType("detections"), "found")
    right = pack(Detections(np.ones((1, 4)), np.ones(1), np.array([0]), ("a",)), PortType("detections"), "found")
    assert live(right, {}).classes.dtype == np.int32


@pytest.mark.parametrize("raw", [[2**64 - 1, 1], [[0], [2**63 + 1]], (2**63, 0, True), [np.uint64(2**64 - 1), 7]])
def test_lists_of_large_and_small_integers_are_uint64(raw: Any) -> None:
    expected = np.asarray(raw, object).astype(np.uint64)
    assert numbers(raw, "uint64").tolist() == expected.tolist()
    assert numbers(raw, None).dtype == np.uint64
    for odd in ([2**64 - 1, -1], [2**64 - 1, 0.5], [2**64, 1]):
        with pytest.raises(InputError):
            numbers(odd, "uint64")


def test_lists_become_bfloat16_by_value() -> None:
    held = to_value(PortType.parse("bfloat16[N]"), [np.uint16(1), np.uint16(256)])
    assert from_bfloat16(held).tolist() == [1.0, 256.0]


def test_values_that_are_no_numbers_are_refused_as_such() -> None:
    for raw, why in ((2**70, "more than 64 bits"), ([[1], [1, 2]], "unequal"), (["a"], "else than numbers")):
        with pytest.raises(InputError, match=why):
            to_value(PortType.parse("tensor"), raw)
    with pytest.raises(InputError, match=r"float8_e5m2\n.*uint8"):
        to_value(PortType.parse("float8_e5m2[N]"), [1.0])
