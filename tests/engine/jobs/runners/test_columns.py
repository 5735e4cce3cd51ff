"""Columns: what is written comes back, tensors without a copy."""

from itertools import pairwise
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from weftline.engine.jobs.runners.packing import ABSENT, FAILED, Column, PackedColumn, own, read
from weftline.engine.protocol.packed import Packed
from weftline.engine.protocol.values import pack
from weftline.nodes.detections import Detections
from weftline.nodes.ports import PortType
from weftline.shm.block import ALIGN_BYTES

JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(1 << 60), 1 << 60) | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)


def packed(values: list[Any], type: str) -> list[Packed | None]:
    return [None if value is ... else pack(value, PortType.parse(type), "x") for value in values]


def back(values: list[Any], type: str, marks: bytes = b"") -> list[Any]:
    column = read(PackedColumn(Column(packed(values, type), marks)).array())
    assert column.marks == marks
    return [... if value is None else own(value) for value in column.values]


@given(st.lists(st.text()))
def test_texts_come_back(values: list[str]) -> None:
    assert back([value.encode("utf-8", "replace").decode() for value in values], "text") == [
        value.encode("utf-8", "replace").decode() for value in values
    ]


@pytest.mark.slow
@given(st.lists(JSON))
def test_json_comes_back(values: list[Any]) -> None:
    assert back(values, "json") == values


@given(st.lists(st.lists(st.lists(st.binary(max_size=5), max_size=3), max_size=4), max_size=5))
def test_lists_come_back_at_any_depth(values: list[Any]) -> None:
    assert back(values, "list[list[bytes]]") == values


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), max_size=6), st.sampled_from(["float32", "int8"]))
def test_tensors_of_any_shapes_come_back(shapes: list[tuple[int, int]], dtype: str) -> None:
    values = [np.arange(a * b).reshape(a, b).astype(dtype) for a, b in shapes]
    for was, came in zip(values, back(values, f"{dtype}[?, ?]"), strict=True):
        assert came.dtype == was.dtype
        assert np.array_equal(came, was)


@given(st.lists(st.sampled_from([0, ABSENT, FAILED]), min_size=1, max_size=9))
def test_rows_without_a_value_come_back_as_such(marks: list[int]) -> None:
    values = [... if mark else f"row {row}" for row, mark in enumerate(marks)]
    written = bytes(marks) if any(marks) else b""
    assert back(values, "text", written) == values


def test_kinds_may_be_mixed() -> None:
    values = [*packed(["a"], "text"), *packed([{"b": 1}], "json"), *packed([np.int8(3)], "int8[]")]
    values += [*packed(["c"], "text"), *packed([np.float32(4)], "float32[]")]
    assert [own(value) for value in read(PackedColumn(Column(values)).array()).values] == ["a", {"b": 1}, 3, "c", 4.0]


def test_detections_come_back() -> None:
    one = Detections(np.ones((2, 4), np.float32), np.ones(2, np.float32), np.zeros(2, np.int32), ("star",))
    (came,) = back([one], "detections")
    assert came.to_json() == one.to_json()


def test_stand_ins_of_dtypes_that_numpy_lacks_keep_their_name() -> None:
    values = [pack(np.zeros(3, np.uint16), PortType.parse("bfloat16[3]"), "x")] * 2
    column = read(PackedColumn(Column(list(values))).array())
    assert [(value.dtype, value.array.dtype) for value in column.values if value] == [("bfloat16", np.uint16)] * 2


def test_what_is_the_same_in_every_row_is_written_once() -> None:
    (one,) = packed(["x" * 1000], "text")
    column = PackedColumn(Column([one] * 100))
    assert column.size_bytes < 2000
    assert [own(value) for value in read(column.array()).values if value] == ["x" * 1000] * 100


def test_tensors_are_views_and_neighbours_touch() -> None:
    blob = PackedColumn(Column(packed([np.full(5, row, np.float32) for row in range(4)], "float32[5]"))).array()
    arrays = [value.array for value in read(blob).values if value]
    assert all(np.shares_memory(blob, array) for array in arrays)
    starts = [array.__array_interface__["data"][0] for array in arrays]
    assert {later - earlier for earlier, later in pairwise(starts)} == {20}
    assert (starts[0] - blob.__array_interface__["data"][0]) % ALIGN_BYTES == 0


def test_lists_of_tensors_lie_behind_each_other() -> None:
    values = [[np.full((2, 2, 3), 9, np.uint8)], [], [np.zeros((1, 4, 3), np.uint8), np.ones((2, 2, 3), np.uint8)]]
    came = back(values, "list[image]")
    assert [[picture.tolist() for picture in row] for row in came] == [[p.tolist() for p in row] for row in values]


def test_bytes_of_something_else_are_refused() -> None:
    with pytest.raises(msgspec.DecodeError):
        read(np.arange(100, dtype=np.uint8))
