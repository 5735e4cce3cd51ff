"""Every kind of value survives the trip, inline and in shared memory, and nothing of another type gets on board."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from weftline.engine.messages import Value
from weftline.engine.values import pack, stacked, unpack
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
        placed = unpack(packed.at(place), {1: arena})
        return unpack(sent, {}), placed.copy() if isinstance(placed, np.ndarray) else placed


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
    ("value", "type", "told"),
    [
        (np.zeros(3, np.float64), "float32[3]", r"x: found float64\[3\], expected float32\[3\]"),
        (np.zeros((2, 2), np.float32), "float32[3]", r"found float32\[2, 2\]"),
        (np.zeros((2, 3), np.float32), "float32[N, N]", r"expected float32\[N, N\]"),
        (np.zeros((4, 4), np.uint8), "image", "expected image"),
        (np.zeros((4, 4, 3), np.float32), "image", "expected image"),
        ([1.0], "audio", "expected an array"),
        (b"a", "text", "expected a str"),
        ("a", "bytes", "expected bytes"),
        ("a", "detections", "expected Detections"),
        ({1, 2}.__class__, "json", "no json value"),
        ({(1, 2): "tuple key"}, "json", "no json value"),
        ([b"bytes"], "json", "no json value"),
    ],
)
def test_a_value_of_another_type_is_refused_by_name(value: Any, type: str, told: str) -> None:
    with pytest.raises(StepError, match=told):
        pack(value, PortType.parse(type), "x")


def test_items_side_by_side_are_one_array_and_others_are_not() -> None:
    with HostArena.create(1 << 16) as arena:
        block = Block(1, 0, 1024, 1)
        values = [Value("tensor", "float32", (4,), None, block.place(16 * i, 16)) for i in range(3)]
        view = stacked(values, {1: arena})
        assert view is not None and view.shape == (3, 4)
        assert stacked([values[0], values[2]], {1: arena}) is None
        assert stacked([values[0], Value("tensor", "float32", (4,), b"\0" * 16)], {1: arena}) is None
