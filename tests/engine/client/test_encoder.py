"""Encoded values arrive equal in the engine, and invalid ones are refused before sending."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tests.engine.client.model_infos import arrived
from weftline.engine.client.encoder import tensor_of
from weftline.engine.client.model import DescribedPort
from weftline.errors import InputError
from weftline.nodes.detections import Detections
from weftline.nodes.media import to_value
from weftline.nodes.ports import PortType

PNG = Path(__file__).parents[3] / "examples/data/photo.png"
WAV = Path(__file__).parents[3] / "examples/data/question.wav"
FOUND = Detections(np.ones((1, 4), np.float32), np.ones(1, np.float32), np.zeros(1, np.int32), ("cup",))


@pytest.mark.parametrize(
    ("type", "value", "expected"),
    [
        ("text", "héllo", "héllo"),
        ("text", b"bytes", "bytes"),
        ("text", "", ""),
        ("json", {"a": [1, 2.5, None, "ü"]}, {"a": [1, 2.5, None, "ü"]}),
        ("json", "a text", "a text"),
        ("bytes", b"\x00\xff", b"\x00\xff"),
        ("bytes", memoryview(b"ab"), b"ab"),
        ("any", "text", "text"),
        ("any", [1, "a", None], [1, "a", None]),
        ("any", {"a": [math.inf]}, {"a": [math.inf]}),
        ("any", [], []),
        ("list[text]", ["a", "", "c"], ["a", "", "c"]),
        ("list[text]", [], []),
        ("list[json]", [{"a": 1}, None], [{"a": 1}, None]),
        ("list[bytes]", [b"a", b"\x00"], [b"a", b"\x00"]),
        ("list[list[text]]", [["a"], []], [["a"], []]),
    ],
)
def test_plain_values_arrive_as_they_are(type: str, value: Any, expected: Any) -> None:
    assert arrived(type, value) == expected


DTYPES = [
    "bool",
    "uint8",
    "int8",
    "uint16",
    "int16",
    "float16",
    "uint32",
    "int32",
    "float32",
    "uint64",
    "int64",
    "float64",
]


@pytest.mark.parametrize("dtype", DTYPES)
def test_arrays_of_every_dtype_arrive_bit_by_bit(dtype: str) -> None:
    sent = np.arange(6).reshape(2, 3).astype(dtype)
    found = arrived(f"{dtype}[N, 3]", sent)
    assert found.dtype == sent.dtype and np.array_equal(found, sent)


@pytest.mark.parametrize(("dtype", "held"), [("bfloat16", "uint16"), ("float8_e4m3fn", "uint8")])
def test_dtypes_that_numpy_lacks_travel_as_their_bits(dtype: str, held: str) -> None:
    sent = np.array([1, 2, 250], held)
    assert np.array_equal(arrived(f"{dtype}[N]", sent), sent)


def test_complex_numbers_arrive() -> None:
    sent = np.array([1 + 2j, 3 - 1j], np.complex64)
    assert np.array_equal(arrived("complex64[N]", sent).reshape(-1).view(np.complex64), sent)


def test_numbers_and_nested_lists_take_the_dtype_of_the_port() -> None:
    assert arrived("float32[N]", [1, 2]).dtype == np.float32
    assert arrived("float32[]", 0.5).shape == ()


def test_arrays_in_any_order_of_memory_arrive() -> None:
    sent = np.arange(6, dtype=np.int32).reshape(2, 3).T
    assert np.array_equal(arrived("int32[A, B]", sent), sent)


def test_encoded_pictures_and_recordings_travel_as_they_are() -> None:
    assert arrived("image", PNG) == arrived("image", str(PNG)) == arrived("image", PNG.read_bytes()) == PNG.read_bytes()
    assert arrived("audio", WAV) == WAV.read_bytes()


def test_pictures_and_samples_travel_as_arrays() -> None:
    with Image.open(PNG) as picture:
        assert np.array_equal(arrived("image", picture), np.asarray(picture.convert("RGB")))
    assert np.array_equal(arrived("audio", np.array([0, 16384], np.int16)), np.array([0, 0.5], np.float32))


def test_arrays_are_stacked_and_pictures_of_several_sizes_become_files() -> None:
    same = [np.full((2, 2, 3), 7, np.uint8)] * 2
    assert np.array_equal(arrived("list[image]", same), same)
    mixed = [np.full((2, 2, 3), 7, np.uint8), np.full((4, 1, 3), 9, np.uint8)]
    for sent, found in zip(mixed, arrived("list[image]", mixed), strict=True):
        assert np.array_equal(to_value(PortType("image"), found), sent)
    sounds = [np.linspace(-1, 1, n, dtype=np.float32) for n in (10, 20)]
    for sent, found in zip(sounds, arrived("list[audio]", sounds), strict=True):
        assert np.array_equal(to_value(PortType("audio"), found), sent)


def test_lists_without_arrays_in_them_arrive() -> None:
    assert len(arrived("list[image]", [])) == len(arrived("list[float32[4]]", [])) == 0


def test_arrays_of_several_shapes_are_refused_with_a_remedy() -> None:
    with pytest.raises(InputError, match=r"input x: a list of arrays of different shapes .*\n    fix: pad them"):
        arrived("list[float32[N]]", [np.zeros(1, np.float32), np.zeros(2, np.float32)])


def test_detections_arrive() -> None:
    assert arrived("detections", FOUND).to_json() == FOUND.to_json()
    assert arrived("detections", FOUND.to_json()).to_json() == FOUND.to_json()


def test_numbers_that_json_lacks_arrive() -> None:
    found = arrived("json", {"a": [float("nan"), float("inf"), -float("inf")]})["a"]
    assert np.isnan(found[0]) and found[1:] == [float("inf"), -float("inf")]


@pytest.mark.parametrize(
    ("type", "value"),
    [
        ("text", 5),
        ("text", "\ud800"),
        ("json", object()),
        ("bytes", "text"),
        ("float32[3]", np.zeros(4, np.float32)),
        ("float32[3]", np.zeros(3, np.float64)),
        ("float32[3]", [1, 2, 2**24 + 1]),
        ("int64[]", 2**64 - 1),
        ("tensor", [2**64 - 1, -1]),
        ("image", np.zeros((2, 2), np.float32)),
        ("image", Path("/nowhere/photo.png")),
        ("list[text]", "abc"),
        ("list[text]", ["a", 1]),
        ("detections", object()),
    ],
)
def test_what_is_wrong_is_said_with_the_name_of_the_input(type: str, value: Any) -> None:
    with pytest.raises(InputError, match=r"^input x: "):
        arrived(type, value)


@pytest.mark.parametrize(
    ("datatype", "shape", "value", "sent"),
    [
        ("FP32", (2,), [1, 2], ("FP32", (2,), np.array([1, 2], np.float32).tobytes())),
        ("BF16", (-1,), np.array([5], np.uint16), ("BF16", (1,), b"\x05\x00")),
        ("BYTES", (1,), "é", ("BYTES", (1,), b"\x02\x00\x00\x00\xc3\xa9")),
        ("BYTES", (-1, 1), "a", ("BYTES", (1, 1), b"\x01\x00\x00\x00a")),
        ("BYTES", (2,), ["a", b"b"], ("BYTES", (2,), b"\x01\x00\x00\x00a\x01\x00\x00\x00b")),
        ("BYTES", (-1, 2), np.array([["a", "b"]], object), ("BYTES", (1, 2), b"\x01\x00\x00\x00a\x01\x00\x00\x00b")),
    ],
)
def test_without_a_type_the_datatype_decides(datatype: str, shape: Any, value: Any, sent: Any) -> None:
    tensor = tensor_of(DescribedPort("x", datatype, shape), value)
    assert (tensor.datatype, tensor.shape, bytes(tensor.raw or b"")) == sent


def test_an_unknown_datatype_is_refused() -> None:
    with pytest.raises(InputError, match="input x: has datatype FP4"):
        tensor_of(DescribedPort("x", "FP4", (1,)), [1])


def test_large_arrays_are_not_copied() -> None:
    sent = np.zeros(1 << 20, np.uint8)
    tensor = tensor_of(DescribedPort("x", "UINT8", (-1,), PortType.parse("uint8[N]")), sent)
    assert np.shares_memory(np.frombuffer(tensor.raw or b"", np.uint8), sent)
