"""Outputs as tensors: whole, batched, streamed, in shared memory, and sent back as inputs."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from tritonclient.grpc import InferResult, service_pb2

from tests.engine.serving.v2.held import HeldRegions, info
from weftline.engine.result import StreamedOutput
from weftline.engine.serving.backend import Answer
from weftline.engine.serving.config import ServeLimits
from weftline.engine.serving.v2.datatypes import datatype_of
from weftline.engine.serving.v2.elements import decode_elements, encode_elements
from weftline.engine.serving.v2.messages import InferRequest, Region, Tensor, WantedOutput
from weftline.engine.serving.v2.protobuf import response_bytes
from weftline.engine.serving.v2.request import to_asks
from weftline.engine.serving.v2.response import empty_response, to_chunk_response, to_response
from weftline.errors import InputError
from weftline.nodes.detections import Detections
from weftline.shm.spec import ITEM_BYTES, STAND_INS

ALL = InferRequest("m", (), id="id7")
FOUND = Detections(np.float32([[1, 2, 3, 4]]), np.float32([0.5]), np.int32([0]), ("star",))


def answered(type: str, *values: Any, batch: int | None = None, name: str = "y") -> Tensor:
    """Return the tensor of output `y` of a type; several values are a batch."""
    answers = [Answer({"y": value}, version=3) for value in values]
    (tensor,) = to_response(ALL, info({}, {name: type}), answers, batch).outputs
    return tensor


def elements(tensor: Tensor) -> list[bytes]:
    assert tensor.datatype == "BYTES" and tensor.raw is not None
    return [bytes(one) for one in decode_elements(tensor.raw, int(np.prod(tensor.shape)))]


@pytest.mark.parametrize(
    ("type", "value", "element"),
    [
        ("text", "grün", "grün".encode()), ("text", "", b""), ("bytes", b"\0\xff", b"\0\xff"),
        ("json", {"a": [1, None, 0.5]}, b'{"a":[1,null,0.5]}'), ("json", "a", b'"a"'), ("json", None, b"null"),
        ("json", float("nan"), b"NaN"), ("json", [{"a": -float("inf")}, None], b'[{"a":-Infinity},null]'),
        ("json", 10**30, b"1000000000000000000000000000000"),
        ("detections", FOUND, b'[{"name":"star","score":0.5,"box":[1.0,2.0,3.0,4.0]}]'),
        ("any", "a", b"a"), ("any", {"a": 1}, b'{"a":1}'),
        ("any", [FOUND], b'[[{"name":"star","score":0.5,"box":[1.0,2.0,3.0,4.0]}]]'),
    ],
)  # fmt: skip
def test_single_values_are_one_element(type: str, value: Any, element: bytes) -> None:
    tensor = answered(type, value)
    marked = type == "any" and not isinstance(value, str)
    assert tensor.shape == (1,) and elements(tensor) == [element]
    assert tensor.parameters == ({"json": True} if marked else {})


@pytest.mark.parametrize("dtype", ITEM_BYTES)
def test_tensors_keep_their_bits_and_their_place(dtype: str) -> None:
    array = np.arange(6).reshape(2, 3).astype(STAND_INS.get(dtype, dtype))
    tensor = answered(f"{dtype}[2, 3]", array)
    assert tensor.datatype == datatype_of(dtype)
    assert tensor.shape == ((2, 3, 2) if dtype == "complex64" else (2, 3))
    assert tensor.raw is not None and np.shares_memory(np.frombuffer(tensor.raw, np.uint8), array)
    sent_back = Tensor("x", tensor.datatype, tensor.shape, tensor.raw)
    asked = to_asks(InferRequest("m", (sent_back,)), info({"x": f"{dtype}[2, 3]"}), ServeLimits())
    assert np.array_equal(asked.asks[0].inputs["x"], array)


def test_arrays_in_another_order_and_without_elements_are_right_too() -> None:
    turned = answered("float32[?, ?]", np.arange(6, dtype=np.float32).reshape(2, 3).T)
    assert np.frombuffer(turned.raw or b"", np.float32).tolist() == [0, 3, 1, 4, 2, 5]
    assert bytes(answered("float32[0, 3]", np.zeros((0, 3), np.float32)).raw or b"") == b""
    assert answered("float32[]", np.array(2.0, np.float32)).shape == ()
    assert answered("image", np.zeros((4, 5, 3), np.uint8)).datatype == "UINT8"
    assert answered("audio", np.zeros(7, np.float32)).shape == (7,)
    assert answered("any", np.zeros(7, np.int16)).datatype == "INT16"


def test_lists_are_side_by_side() -> None:
    assert elements(answered("list[text]", ["a", "b"])) == [b"a", b"b"]
    assert elements(answered("list[json]", ["a", 1])) == [b'"a"', b"1"]
    assert elements(answered("list[detections]", [FOUND]))[0].startswith(b'[{"name"')
    assert answered("list[text]", []).shape == (0,)
    assert answered("list[list[text]]", [["a"], []]).shape == (2,)
    rows = answered("list[float32[2]]", [np.float32([1, 2]), np.float32([3, 4])])
    assert rows.shape == (2, 2) and np.frombuffer(rows.raw or b"", np.float32).tolist() == [1, 2, 3, 4]
    assert answered("list[float32[2]]", []).shape == (0, 2)
    assert answered("list[image]", []).datatype == "UINT8"
    assert answered("list[bfloat16[1]]", [np.uint16([1])]).datatype == "BF16"


def test_lists_of_several_shapes_are_json() -> None:
    (text,) = elements(answered("list[float32[N]]", [np.float32([1, 2]), np.float32([3])]))
    assert json.loads(text) == [[1, 2], [3]]


@pytest.mark.parametrize(("type", "datatype"), [("text", "BYTES"), ("float32[3]", "FP32"), ("json", "BYTES")])
def test_an_absent_output_says_so(type: str, datatype: str) -> None:
    tensor = answered(type, None, name="y?")
    assert (tensor.datatype, tensor.shape, bytes(tensor.raw or b"")) == (datatype, (0,), b"")
    assert tensor.parameters == {"absent": True}


def test_a_batch_has_its_number_in_front() -> None:
    text = answered("text", "a", "b", batch=2)
    assert text.shape == (2, 1) and elements(text) == [b"a", b"b"]
    rows = answered("float32[2]", np.float32([1, 2]), np.float32([3, 4]), batch=2)
    assert rows.shape == (2, 2) and np.frombuffer(rows.raw or b"", np.float32).tolist() == [1, 2, 3, 4]
    assert answered("text", None, None, batch=2, name="y?").shape == (0,)


def test_a_batch_of_one_is_not_copied() -> None:
    row = np.float32([1, 2])
    tensor = answered("float32[2]", row, batch=1)
    assert tensor.shape == (1, 2) and np.shares_memory(np.frombuffer(tensor.raw or b"", np.uint8), row)


@pytest.mark.parametrize(
    "values", [(np.zeros(2, np.float32), np.zeros(3, np.float32)), (np.zeros(2, np.float32), None)]
)
def test_outputs_that_do_not_stack_are_to_be_asked_for_one_at_a_time(values: tuple[Any, ...]) -> None:
    with pytest.raises(InputError, match="send the items one at a time"):
        answered("float32[N]", *values, batch=2, name="y?")


def test_a_response_says_who_answered_what() -> None:
    model = info({}, {"y": "text", "z": "text"})
    answer = Answer({"y": "a", "z": "b"}, version=5)
    response = to_response(ALL, model, [answer], None)
    assert (response.model, response.version, response.id) == ("m", "5", "id7")
    assert [one.name for one in response.outputs] == ["y", "z"]
    wanted = InferRequest("m", (), (WantedOutput("z"),))
    assert [one.name for one in to_response(wanted, model, [answer], None).outputs] == ["z"]


def test_outputs_are_written_into_regions() -> None:
    regions = HeldRegions(r=bytes(16))
    wanted = InferRequest("m", (), (WantedOutput("y", Region("r", 4, 12)), WantedOutput("t", Region("r", 12, 4))))
    model = info({}, {"y": "float32[2]", "t?": "text"})
    answer = Answer({"y": np.float32([1, 2]), "t": None}, version=1)
    first, second = to_response(wanted, model, [answer], None, regions).outputs
    assert first.raw is None and first.region == Region("r", 4, 8)
    assert regions.held["r"] == bytes(4) + np.float32([1, 2]).tobytes() + bytes(4)
    assert second.region == Region("r", 12, 0) and second.parameters == {"absent": True}


def test_a_place_too_small_says_how_large_it_should_be_and_is_not_written() -> None:
    regions = HeldRegions(r=bytes(16))
    wanted = InferRequest("m", (), (WantedOutput("y", Region("r", 0, 8)),))
    with pytest.raises(InputError, match="takes 9 bytes, its place in the region has 8"):
        to_response(wanted, info({}, {"y": "text"}), [Answer({"y": "abcde"})], None, regions)
    assert regions.held["r"] == bytes(16)


def test_a_piece_carries_what_is_new_and_nothing_else() -> None:
    model = info({}, {"y+": "text", "z": "text"})
    response = to_chunk_response(ALL, model, StreamedOutput("y", "new", False), 5)
    assert [(one.name, elements(one)) for one in response.outputs] == [("y", [b"new"])]
    assert (response.version, response.id) == ("5", "id7")


def test_a_stream_writes_whole_outputs_into_regions_and_no_pieces() -> None:
    regions = HeldRegions(r=bytes(16))
    wanted = InferRequest("m", (), (WantedOutput("y", Region("r", 0, 16)),))
    model = info({}, {"y+": "text"})
    piece = to_chunk_response(wanted, model, StreamedOutput("y", "new", False), 5, regions)
    assert piece.outputs[0].region is None and regions.held["r"] == bytes(16)
    whole = to_chunk_response(wanted, model, StreamedOutput("y", "news", True), 5, regions)
    assert whole.outputs[0].region == Region("r", 0, 8) and regions.held["r"][:8] == encode_elements([b"news"])


def test_the_stock_client_reads_text_and_numbers() -> None:
    model = info({}, {"y": "list[text]", "z": "float16[2]", "a?": "text"})
    answer = Answer({"y": ["a", "grün"], "z": np.float16([1, 2]), "a": None})
    data = response_bytes(to_response(ALL, model, [answer], None))
    result = InferResult(service_pb2.ModelInferResponse.FromString(data))  # type: ignore[attr-defined]
    assert [one.decode() for one in result.as_numpy("y")] == ["a", "grün"]
    assert result.as_numpy("z").tolist() == [1, 2] and result.as_numpy("a").shape == (0,)


@pytest.mark.parametrize(
    ("type", "datatype", "shape"),
    [("text", "BYTES", (1,)), ("json", "BYTES", (1,)), ("int32[?, 4]", "INT32", (0, 4)), ("audio", "FP32", (0,))],
)
def test_the_last_response_of_a_stream_is_empty(type: str, datatype: str, shape: tuple[int, ...]) -> None:
    (tensor,) = empty_response(ALL, info({}, {"y": type}), "y").outputs
    assert (tensor.datatype, tensor.shape) == (datatype, shape)
    assert tensor.raw == (encode_elements((b"",)) if datatype == "BYTES" else b"")
