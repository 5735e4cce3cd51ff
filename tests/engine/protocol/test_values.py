"""Every kind of value survives the trip, inline and in shared memory, and nothing of another type gets on board."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from weftline.engine.protocol.messages import ABSENT, Value
from weftline.engine.protocol.packed import Layout
from weftline.engine.protocol.values import LIST_ITEMS_MAX, is_of, live, pack, side_by_side, stacked, unpack
from weftline.errors import StepError
from weftline.nodes.detections import Detections
from weftline.nodes.ports import PortType
from weftline.shm.arena import HostArena
from weftline.shm.block import Block
from weftline.shm.view import bytes_view

FOUND = Detections(
    np.array([[1, 2, 3, 4]], np.float32), np.array([0.5], np.float32), np.array([1], np.int32), ("red circle", "star")
)


def trip(value: Any, type: str) -> tuple[Any, Any]:
    """Return the value after travelling inline, and after travelling through an arena."""
    packed = pack(value, PortType.parse(type), "x")
    sent = msgspec.msgpack.decode(msgspec.msgpack.encode(packed.inline()), type=Value)
    with HostArena.create(1 << 16) as arena:
        place = Block(1, 64, max(packed.size_bytes, 1), 1).place(0, packed.size_bytes)
        packed.write(bytes_view(arena, place))
        return unpack(sent, {}), copied(unpack(packed.at(place), {1: arena}))


def copied(value: Any) -> Any:
    if isinstance(value, list):
        return [copied(one) for one in value]
    return value.copy() if isinstance(value, np.ndarray) else value


@given(
    st.text()
    | st.none()
    | st.lists(st.integers(-(2**63), 2**63 - 1))
    | st.dictionaries(st.text(), st.floats(allow_nan=False))
)
def test_json_values_survive(value: Any) -> None:
    assert trip(value, "json") == (value, value)


@pytest.mark.parametrize(("value", "type"), [("grüße ☃", "text"), ("", "text"), (b"\x00\xff", "bytes"), (b"", "bytes")])
def test_texts_and_bytes_survive(value: Any, type: str) -> None:
    assert trip(value, type) == (value, value)


@pytest.mark.parametrize("dtype", ["bool", "uint8", "int64", "float16", "float32", "complex64"])
@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 3, 4)])
def test_tensors_survive(dtype: str, shape: tuple[int, ...]) -> None:
    array = np.ones(shape, dtype)
    for got in trip(array, "tensor"):
        assert got.dtype == array.dtype and got.shape == array.shape
        np.testing.assert_array_equal(got, array)


def test_detections_survive() -> None:
    for got in trip(FOUND, "detections"):
        assert got.labels == ["star"] and got.describe() == "1 star"
        np.testing.assert_array_equal(got.boxes, FOUND.boxes)


def test_torch_tensors_travel_as_what_they_are() -> None:
    torch = pytest.importorskip("torch")
    packed = pack(torch.tensor([1.0, 2.0], dtype=torch.bfloat16), PortType.parse("bfloat16[2]"), "x")
    assert (packed.dtype, packed.shape, packed.size_bytes) == ("bfloat16", (2,), 4)


@pytest.mark.parametrize(
    ("value", "type", "message"),
    [
        (np.zeros(3, np.float64), "float32[3]", r"x: found float64\[3\], expected float32\[3\]"),
        (np.zeros(4, np.float32), "float32[3]", r"found float32\[4\], expected float32\[3\]"),
        (np.zeros((2, 2), np.float32), "float32[3]", r"found float32\[2, 2\]"),
        (np.zeros((2, 3), np.float32), "float32[N, N]", r"expected float32\[N, N\]"),
        (np.zeros((4, 4), np.uint8), "image", "expected image"),
        (np.zeros((4, 4, 3), np.float32), "image", "expected image"),
        ([1.0], "audio", "expected an array"),
        (b"a", "text", "expected a str"),
        ("a", "bytes", "expected bytes"),
        ("a", "detections", "expected Detections"),
        ({1, 2}.__class__, "json", "the class set is not JSON"),
        ({(1, 2): "tuple key"}, "json", "a key is a tuple"),
        ([b"bytes"], "json", "a bytes is not JSON"),
    ],
)
def test_a_value_of_another_type_is_refused_by_name(value: Any, type: str, message: str) -> None:
    with pytest.raises(StepError, match=message):
        pack(value, PortType.parse(type), "x")


def test_items_side_by_side_are_one_array_and_others_are_not() -> None:
    with HostArena.create(1 << 16) as arena:
        block = Block(1, 0, 1024, 1)
        values = [Value("tensor", "float32", (4,), None, block.place(16 * i, 16)) for i in range(3)]
        view = stacked(values, {1: arena})
        assert view is not None and view.shape == (3, 4)
        assert stacked([values[0], values[2]], {1: arena}) is None
        assert stacked([values[0], Value("tensor", "float32", (4,), b"\0" * 16)], {1: arena}) is None


def image(value: int, height: int = 80) -> np.ndarray:
    return np.full((height, 90, 3), value, np.uint8)


def test_lists_survive_inline_and_in_one_block() -> None:
    texts = ["a", "", "grüße"]
    assert trip(texts, "list[text]") == (texts, texts)
    assert trip([[1, {"a": None}], []], "list[list[json]]") == ([[1, {"a": None}], []], [[1, {"a": None}], []])
    images = [image(1), image(2)]
    for got in trip(tuple(images), "list[image]"):
        np.testing.assert_array_equal(got, images)
    for got in trip(np.arange(6, dtype=np.float32).reshape(3, 2), "list[float32[2]]"):
        np.testing.assert_array_equal(got, [[0, 1], [2, 3], [4, 5]])
    assert trip(np.array([0.5, 1.5]), "list[json]") == ([0.5, 1.5], [0.5, 1.5])
    assert trip([], "list[image]") == ([], [])


def test_a_list_is_inline_as_a_whole_or_not_at_all() -> None:
    small = pack(["x" * 8000] * 2, PortType.parse("list[text]"), "x")
    assert small.travels_inline and small.inline().keys == ()
    large = pack(["x" * 8000] * 3, PortType.parse("list[text]"), "x")
    assert not large.travels_inline and large.size_bytes == 24_000
    value = large.at(Block(1, 0, 24_000, 1).place(0, 24_000))
    assert [item.place is not None for item in value.items or ()] == [True] * 3 and value.keys == ((1, 0, 1),)


def test_elements_of_equal_size_touch_and_others_start_at_a_cache_line() -> None:
    equal = pack([image(1), image(2), image(3)], PortType.parse("list[image]"), "x")
    with HostArena.create(1 << 20) as arena:
        place = Block(1, 0, equal.size_bytes, 1).place(0, equal.size_bytes)
        equal.write(bytes_view(arena, place))
        view = stacked(list(equal.at(place).items or ()), {1: arena})
        assert view is not None and view.shape == (3, 80, 90, 3) and view[2, 0, 0, 0] == 3
    unequal = pack([image(1, 81), image(2, 83)], PortType.parse("list[image]"), "x")
    offsets = [item.place.offset for item in unequal.at(place).items or () if item.place]
    assert offsets[0] == 0 and offsets[1] % 64 == 0 and offsets[1] >= 81 * 90 * 3


def test_several_lists_in_one_block_are_one_array_too() -> None:
    both = [pack([image(value), image(value + 1)], PortType.parse("list[image]"), "x") for value in (1, 3)]
    layout = Layout(both)
    with HostArena.create(1 << 20) as arena:
        place = Block(1, 0, layout.size_bytes, 1).place(0, layout.size_bytes)
        layout.write(bytes_view(arena, place))
        elements = [item for value in layout.at(place) for item in value.items or ()]
        view = stacked(elements, {1: arena})
        assert view is not None and view[:, 0, 0, 0].tolist() == [1, 2, 3, 4]


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (["a", 3], r"x\[1\]: found a value of type int, expected a str"),
        ("abc", r"x: found a value of type str, expected a list\[text\]"),
        ({"a": 1}, r"expected a list\[text\]"),
        (["a"] * (LIST_ITEMS_MAX + 1), r"a list of 65537 elements; the most is 65536"),
    ],
)
def test_a_list_of_something_else_is_refused(value: Any, message: str) -> None:
    with pytest.raises(StepError, match=message):
        pack(value, PortType.parse("list[text]"), "x")


def test_an_absent_value_is_none() -> None:
    assert unpack(msgspec.msgpack.decode(msgspec.msgpack.encode(ABSENT), type=Value), {}) is None


def test_a_list_fits_a_port_when_all_its_elements_do() -> None:
    value = pack([image(1), image(2, 81)], PortType.parse("list[image]"), "x").inline()
    assert is_of(value, PortType.parse("list[image]")) and is_of(value, PortType("any"))
    assert not is_of(value, PortType.parse("list[text]")) and not is_of(value, PortType("image"))


def test_what_is_handed_over_in_this_process_is_read_only_and_not_copied() -> None:
    array = image(1)
    [seen] = live(pack([array], PortType.parse("list[image]"), "x"), {})
    assert np.shares_memory(seen, array) and not seen.flags.writeable and array.flags.writeable
    box = {"at": [1]}
    handed = live(pack(box, PortType("json"), "x"), {})
    assert handed == box and handed is not box


def test_neighbours_in_one_array_are_one_array_again() -> None:
    whole = np.arange(12, dtype=np.float32).reshape(4, 3)
    rows = [live(pack(row, PortType("tensor"), "x"), {}) for row in whole]
    together = side_by_side(rows)
    assert together is not None and np.shares_memory(together, whole)
    np.testing.assert_array_equal(together, whole)
    assert side_by_side([rows[0], rows[2]]) is None
    assert side_by_side([rows[0], np.zeros(3, np.float32)[:]]) is None


def test_bytes_that_are_not_those_of_the_shape_are_refused() -> None:
    with pytest.raises((ValueError, TypeError)):
        unpack(Value("tensor", "float32", (3,), b"\0" * 16), {})
    with pytest.raises((ValueError, TypeError)):
        unpack(Value("tensor", "float32", (3,), b"\0" * 8), {})
    with pytest.raises(KeyError):
        unpack(Value("tensor", "object", (1,), b"\0" * 8), {})
