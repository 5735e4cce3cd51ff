"""Decoded values equal those of Session.run, and inconsistent bytes are refused; streams."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.engine.client.model_infos import came_back, description_of
from tests.engine.client.test_encoder import DTYPES, FOUND
from weftline.engine.client.decoder import STATUS, InvalidResponse, StreamDecoder, value_of
from weftline.engine.client.model import DescribedPort
from weftline.engine.client.steps import Refused
from weftline.engine.result import StreamedOutput
from weftline.engine.serving.model_info import ModelInfo, PortInfo
from weftline.engine.serving.v2.messages import InferRequest, InferResponse, Tensor
from weftline.engine.serving.v2.protobuf import stream_response_bytes
from weftline.engine.serving.v2.response import to_chunk_response
from weftline.nodes.detections import Detections
from weftline.nodes.ports import PortType


@pytest.mark.parametrize(
    ("type", "value"),
    [
        ("text", "héllo\0"),
        ("json", {"a": [1, 2.5, None, "ü"]}),
        ("json", None),
        ("json", 5),
        ("bytes", b"\x00\xff"),
        ("list[text]", ["a", ""]),
        ("list[text]", []),
        ("list[json]", [{"a": 1}, [None]]),
        ("list[bytes]", [b"", b"\xff"]),
        ("list[list[text]]", [["a"], []]),
        ("any", "text"),
        ("any", "[1]"),
        ("any", [1, "a", None]),
        ("any", {"a": {}}),
        ("any", 5),
        ("any", []),
    ],
)
def test_plain_values_come_back(type: str, value: Any) -> None:
    assert came_back(type, value) == value


@pytest.mark.parametrize("dtype", DTYPES)
def test_arrays_of_every_dtype_come_back_as_the_callers_own(dtype: str) -> None:
    sent = np.arange(6).reshape(2, 3).astype(dtype)
    found = came_back(f"{dtype}[N, 3]", sent)
    assert found.dtype == sent.dtype and np.array_equal(found, sent) and found.flags.writeable and found.flags.aligned


def test_dtypes_that_numpy_or_v2_lack_come_back() -> None:
    bits = np.array([1, 2], np.uint16)
    assert np.array_equal(came_back("bfloat16[N]", bits), bits)
    waves = np.array([[1 + 2j, 3j]], np.complex64)
    assert came_back("complex64[A, B]", waves).dtype == np.complex64 and np.array_equal(
        came_back("complex64[A, B]", waves), waves
    )


def test_pictures_sounds_and_detections_come_back() -> None:
    picture = np.arange(12, dtype=np.uint8).reshape(2, 2, 3)
    assert np.array_equal(came_back("image", picture), picture)
    assert came_back("audio", np.zeros(5, np.float32)).shape == (5,)
    found = came_back("detections", FOUND)
    assert isinstance(found, Detections) and found.to_json() == FOUND.to_json()
    (one,) = came_back("list[detections]", [FOUND])
    assert isinstance(one, Detections)


def test_lists_of_arrays_come_back_whatever_their_shapes() -> None:
    same = came_back("list[float32[N]]", [np.ones(2, np.float32)] * 3)
    assert isinstance(same, list) and [one.tolist() for one in same] == [[1, 1]] * 3
    mixed = came_back("list[image]", [np.ones((1, 1, 3), np.uint8), np.ones((1, 2, 3), np.uint8)])
    assert [(one.dtype, one.shape) for one in mixed] == [(np.uint8, (1, 1, 3)), (np.uint8, (1, 2, 3))]
    assert came_back("list[float32[4]]", []) == []


@pytest.mark.parametrize("type", ["text", "image", "float32[N]", "list[text]", "detections"])
def test_what_is_absent_is_none(type: str) -> None:
    assert came_back(type, None, optional=True) is None


def test_without_a_type_numbers_are_arrays_and_bytes_an_array_of_bytes() -> None:
    port = DescribedPort("x", "BYTES", (-1,))
    found = value_of(Tensor("x", "BYTES", (1, 2), b"\x01\x00\x00\x00a\x00\x00\x00\x00"), port)
    assert found.tolist() == [[b"a", b""]]
    assert value_of(Tensor("x", "INT32", (2,), values=(1, 2)), None).tolist() == [1, 2]
    assert value_of(Tensor("x", "BYTES", (1,), values=(b"a",)), None).tolist() == [b"a"]


@pytest.mark.parametrize(
    "tensor",
    [
        Tensor("x", "FP32", (2,), b"123"),
        Tensor("x", "FP32", (-1,), b""),
        Tensor("x", "FP32", (1 << 60, 1 << 60), b""),
        Tensor("x", "FP32", (2,), values=(1.0,)),
        Tensor("x", "FP4", (2,), b"1"),
        Tensor("x", "BYTES", (1,), b"\x05\x00\x00\x00a"),
        Tensor("x", "BYTES", (2,), b"\x01\x00\x00\x00a"),
        Tensor("x", "BYTES", (2,), values=(b"a",)),
        Tensor("x", "BYTES", (0, -1), b""),
        Tensor("x", "BYTES", (1,), b"\x01\x00\x00\x00\xff"),
    ],
)
def test_an_answer_that_does_not_add_up_is_garbled(tensor: Tensor) -> None:
    with pytest.raises(InvalidResponse):
        value_of(tensor, DescribedPort("x", "BYTES", (1,), PortType("text")))


TYPES = ["text", "json", "detections", "float32[N]", "list[text]", "list[float32[N]]", "image", "complex64[N]"]


@pytest.mark.slow
@settings(max_examples=600)
@given(
    st.sampled_from(["FP32", "BYTES", "BOOL", "UINT8", "FP9"]),
    st.lists(st.integers(-2, 5), max_size=3),
    st.binary(max_size=40),
    st.sampled_from(TYPES),
)
def test_whatever_a_server_sends_is_a_value_or_garbled(datatype: str, shape: list[int], raw: bytes, type: str) -> None:
    try:
        value_of(Tensor("x", datatype, tuple(shape), raw), DescribedPort("x", "", (), PortType.parse(type)))
    except InvalidResponse:
        pass


FACE = ModelInfo("m", 2, (), (PortInfo("text", "text", pieces=True), PortInfo("facts", "json")))


def response(output: str, value: Any, **parameters: Any) -> bytes:
    piece = to_chunk_response(InferRequest("m", ()), FACE, StreamedOutput(output, value, False), 2)
    return stream_response_bytes(InferResponse("m", "2", "", piece.outputs, parameters))


def final(**parameters: Any) -> bytes:
    return stream_response_bytes(InferResponse("m", "2", "", (), {"triton_final_response": True, **parameters}))


def test_what_grows_comes_in_pieces_and_whole_at_the_end() -> None:
    decoder = StreamDecoder(description_of(FACE))
    assert list(decoder.feed(response("text", "a "))) == [StreamedOutput("text", "a ", False)]
    assert list(decoder.feed(response("facts", {"n": 1}))) == [StreamedOutput("facts", {"n": 1}, True)]
    assert list(decoder.feed(response("text", "b"))) == [StreamedOutput("text", "b", False)]
    assert list(decoder.feed(final())) == [StreamedOutput("text", "a b", True, True)]
    assert decoder.version == "2"


def test_the_last_piece_may_be_the_final_response() -> None:
    decoder = StreamDecoder(description_of(FACE))
    assert list(decoder.feed(response("text", "a", triton_final_response=True))) == [
        StreamedOutput("text", "a", False),
        StreamedOutput("text", "a", True, True),
    ]


@pytest.mark.parametrize(
    ("parameters", "status", "pushback_ms"),
    [
        ({}, "UNKNOWN", None),
        ({"retry_after_ms": 70}, "RESOURCE_EXHAUSTED", 70.0),
        ({STATUS: "INVALID_ARGUMENT"}, "INVALID_ARGUMENT", None),
        ({STATUS: "UNAVAILABLE", "retry_after_ms": 5}, "UNAVAILABLE", 5.0),
    ],
)
def test_an_error_is_a_refusal_with_the_servers_message(parameters: Any, status: str, pushback_ms: Any) -> None:
    data = stream_response_bytes(InferResponse("m", "", "", (), parameters), "it broke")
    with pytest.raises(Refused) as refused:
        list(StreamDecoder(description_of(FACE)).feed(data))
    found = refused.value.refusal
    assert (found.status, found.message, found.pushback_ms) == (status, "it broke", pushback_ms)


@given(st.binary(max_size=200))
def test_bytes_that_are_no_response_are_garbled_or_empty(data: bytes) -> None:
    try:
        list(StreamDecoder(description_of(FACE)).feed(data))
    except (InvalidResponse, Refused):
        pass
