import json

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.engine.jobs.output.answers import EVERY, columns, one_column
from weftline.engine.jobs.output.arrays import tensors, true_numbers
from weftline.nodes.ports import PortType

texts = st.text(st.characters(exclude_categories=[]))  # halves of surrogate pairs too
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@pytest.mark.parametrize("type", EVERY)
def test_values_of_every_port_type_become_what_the_schema_says(type):
    values, expected = EVERY[type]
    array = one_column(type, values)
    array.validate(full=True)
    assert array.type == columns({"x": type}).schema.field("x").type
    assert expected is None or array.to_pylist() == expected


@pytest.mark.parametrize("type", EVERY)
def test_what_is_absent_is_null_and_no_rows_are_an_empty_array(type):
    values, expected = EVERY[type]
    array = one_column(type, [None, values[0], None, values[1]])
    array.validate(full=True)
    assert [one is None for one in array.to_pylist()] == [True, False, True, False]
    assert expected is None or [one for one in array.to_pylist() if one is not None] == expected[:2]
    assert one_column(type, [None, None]).null_count == 2
    assert len(one_column(type, [])) == 0


@given(st.lists(st.none() | texts))
def test_texts_come_back_but_for_halves_of_surrogate_pairs(values):
    found = one_column("text", values).to_pylist()
    for value, read in zip(values, found, strict=True):
        assert (value is None) == (read is None)
        if value is not None and not any("\ud800" <= letter <= "\udfff" for letter in value):
            assert read == value
        elif value is not None:
            assert not any("\ud800" <= letter <= "\udfff" for letter in read)


def test_half_of_a_surrogate_pair_is_replaced_and_two_halves_are_joined():
    assert one_column("text", ["a\ud800b", "\ud83d\ude00", None]).to_pylist() == ["a\ufffdb", "\U0001f600", None]
    assert one_column("json", [{"\ud800": "\udfff"}]).to_pylist() == ['{"\ufffd":"\ufffd"}']


@settings(max_examples=40)
@given(st.lists(json_values, min_size=1, max_size=4))
def test_json_comes_back(values):
    found = one_column("json", values).to_pylist()
    assert [None if one is None else json.loads(one) for one in found] == values


def test_json_keeps_nan_and_large_numbers_and_the_order_of_keys():
    value = {"b": float("nan"), "a": [float("inf"), -float("inf")], "n": -(2**100)}
    assert one_column("json", [value]).to_pylist() == [f'{{"b":NaN,"a":[Infinity,-Infinity],"n":{-(2**100)}}}']


def test_what_is_no_json_becomes_json_where_any_value_may_come():
    detections, array, data = one_column("any", EVERY["any"][0]).to_pylist()
    assert json.loads(detections)[0] == {"name": "star", "score": 0.5, "box": [1.0, 2.0, 3.0, 4.0]}
    assert (array, data) == ("[0,1,2]", '{"a":"YWI="}')
    deep = [{"a": [EVERY["detections"][0][0]]}, np.float32(0.5), np.complex64(1j)]
    assert json.loads(one_column("any", deep).to_pylist()[0])["a"][0][0]["name"] == "star"
    assert one_column("any", deep).to_pylist()[1:] == ["0.5", "[0.0,1.0]"]


@given(st.lists(st.none() | st.lists(st.floats(width=32), max_size=4), max_size=6))
def test_lists_of_numbers_come_back_nan_too(rows):
    found = one_column("float32[N]", [None if one is None else np.array(one, np.float32) for one in rows]).to_pylist()
    np.testing.assert_equal(found, rows)


def test_numbers_of_all_rows_may_come_as_one_array():
    assert one_column("float32[]", np.array([1, 2, np.nan], np.float32)).to_pylist()[:2] == [1.0, 2.0]
    assert one_column("int32[2]", np.arange(4, dtype=np.int32).reshape(2, 2)).to_pylist() == [[0, 1], [2, 3]]


def test_nan_is_a_number_and_not_null():
    assert one_column("float32[]", [np.float32("nan"), None]).null_count == 1


@pytest.mark.parametrize(
    ("name", "known"),
    [
        ("float8_e4m3fn", {0x00: 0.0, 0x01: 2**-9, 0x08: 2**-6, 0x38: 1.0, 0x7E: 448.0, 0x7F: np.nan, 0xB8: -1.0}),
        ("float8_e5m2", {0x01: 2**-16, 0x04: 2**-14, 0x3C: 1.0, 0x7B: 57344.0, 0x7C: np.inf, 0x7D: np.nan}),
    ],
)
def test_eight_bit_floats_are_worked_out_from_their_bits(name, known):
    found = true_numbers(name, np.arange(256, dtype=np.uint8))
    np.testing.assert_array_equal(found[list(known)], np.array(list(known.values()), np.float32))
    np.testing.assert_array_equal(found[128:], -found[:128])
    finite = found[:128][np.isfinite(found[:128])]
    assert (np.diff(finite) > 0).all()


@given(st.lists(st.floats(width=32), min_size=1))
def test_bfloat16_is_the_upper_half_of_a_float(numbers):
    bits = (np.array(numbers, np.float32).view(np.uint32) >> 16).astype(np.uint16)
    found = true_numbers("bfloat16", bits)
    np.testing.assert_array_equal((found.view(np.uint32) >> 16).astype(np.uint16), bits)


def test_a_number_that_its_dtype_cannot_hold_is_refused():
    with pytest.raises(ValueError, match="uint8 does not hold"):
        true_numbers("uint8", np.array([256]))
    with pytest.raises(ValueError, match="more than one number"):
        tensors(PortType.parse("complex64[]"), np.ones((2, 2), np.complex64), pa.list_(pa.float32()))
    with pytest.raises(ValueError, match="int32 does not hold"):
        true_numbers("int32", np.array([0.5]))
    with pytest.raises(TypeError):
        true_numbers("float32", np.array(["1"]))
