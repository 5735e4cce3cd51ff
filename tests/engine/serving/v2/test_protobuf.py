"""Messages as bytes: equal to protobuf's own encoding, with large tensors as views."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tritonclient.grpc import InferInput, InferResult, service_pb2
from tritonclient.grpc._utils import _get_inference_request

from weftline.engine.serving.config import ServeLimits
from weftline.engine.serving.v2 import protobuf
from weftline.engine.serving.v2.messages import InferRequest, InferResponse, Region, Tensor, WantedOutput
from weftline.engine.serving.v2.protobuf import FIELDS_MAX, field_prefix, split_field
from weftline.errors import InputError

LIMITS = ServeLimits()
pb: Any = service_pb2


def stock_request(**inputs: np.ndarray) -> bytes:
    """Return what the stock client sends."""
    sent = []
    for name, array in inputs.items():
        one = InferInput(name, list(array.shape), {"f": "FP32", "O": "BYTES", "i": "INT64"}[array.dtype.kind])
        one.set_data_from_numpy(array)
        sent.append(one)
    request = _get_inference_request("m", sent, "2", "id7", None, 9, True, False, 3, 5000, {"colour": "red"})
    return bytes(request.SerializeToString())


def test_a_stock_clients_request_is_read() -> None:
    request = protobuf.parse_request(stock_request(x=np.arange(6, dtype=np.float32).reshape(2, 3)), LIMITS)
    assert (request.model, request.version, request.id) == ("m", "2", "id7")
    (x,) = request.inputs
    assert (x.name, x.datatype, x.shape) == ("x", "FP32", (2, 3)) and x.raw is not None
    assert np.frombuffer(x.raw, np.float32).tolist() == [0, 1, 2, 3, 4, 5]
    assert request.parameters == {
        "sequence_id": 9, "sequence_start": True, "sequence_end": False, "priority": 3, "timeout": 5000,
        "colour": "red",
    }  # fmt: skip


def test_eight_megabytes_are_not_copied() -> None:
    data = stock_request(x=np.arange(2 << 20, dtype=np.float32), n=np.arange(3))
    request = protobuf.parse_request(data, LIMITS)
    raw = request.inputs[0].raw
    assert raw is not None and len(raw) == 8 << 20
    assert np.shares_memory(np.frombuffer(raw, np.uint8), np.frombuffer(data, np.uint8))
    assert np.array_equal(np.frombuffer(raw, np.float32), np.arange(2 << 20, dtype=np.float32))


def test_a_response_of_eight_megabytes_is_copied_by_one_join() -> None:
    array = np.arange(2 << 20, dtype=np.float32)
    raw = array.view(np.uint8).data
    response = InferResponse("m", "1", "id7", (Tensor("y", "FP32", (2 << 20,), raw),))
    assert any(part is raw for part in protobuf._response_parts(response))
    result = InferResult(pb.ModelInferResponse.FromString(protobuf.response_bytes(response)))
    assert np.array_equal(result.as_numpy("y"), array)


TYPED = {
    "BOOL": ("bool_contents", [True, False], "?"), "INT8": ("int_contents", [-128, 127], "i1"),
    "INT16": ("int_contents", [-32768, 1], "i2"), "INT32": ("int_contents", [-(2**31), 5], "i4"),
    "INT64": ("int64_contents", [-(2**63), 5], "i8"), "UINT8": ("uint_contents", [0, 255], "u1"),
    "UINT16": ("uint_contents", [0, 65535], "u2"), "UINT32": ("uint_contents", [0, 2**32 - 1], "u4"),
    "UINT64": ("uint64_contents", [0, 2**64 - 1], "u8"), "FP32": ("fp32_contents", [0.5, -2.0], "f4"),
    "FP64": ("fp64_contents", [0.1, 1e300], "f8"),
}  # fmt: skip


def typed(datatype: str, field: str, values: list[object], raws: tuple[bytes, ...] = ()) -> bytes:
    request = pb.ModelInferRequest(model_name="m", raw_input_contents=raws)
    one = request.inputs.add(name="x", datatype=datatype, shape=[len(values)])
    getattr(one.contents, field).extend(values)
    return bytes(request.SerializeToString())


@pytest.mark.parametrize(
    "more", [{"model_name": "../m"}, {"model_name": ""}, {"model_name": "m", "model_version": "/1"}]
)
def test_a_name_that_could_be_a_path_gets_no_further(more: dict[str, str]) -> None:
    with pytest.raises(InputError, match="expected 1 to 128 of"):
        protobuf.parse_request(pb.ModelInferRequest(**more).SerializeToString(), LIMITS)


@pytest.mark.parametrize("datatype", TYPED)
def test_typed_contents_become_raw_bytes(datatype: str) -> None:
    field, values, dtype = TYPED[datatype]
    (x,) = protobuf.parse_request(typed(datatype, field, values), LIMITS).inputs
    assert x.values is None and x.raw is not None
    assert np.frombuffer(x.raw, dtype).tolist() == values


def test_typed_bytes_stay_elements() -> None:
    (x,) = protobuf.parse_request(typed("BYTES", "bytes_contents", [b"a", b"", b"\0"]), LIMITS).inputs
    assert x.raw is None and x.values == (b"a", b"", b"\0")


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (typed("FP32", "fp32_contents", [1.0], (b"\0\0\0\0",)), "typed contents"),
        (typed("FP16", "fp32_contents", [1.0]), "has none"), (typed("BF16", "fp32_contents", [1.0]), "has none"),
        (typed("NOPE", "fp32_contents", [1.0]), "has none"), (typed("FP32", "int_contents", [1]), "fp32_contents"),
        (typed("INT8", "int_contents", [128]), "range"), (typed("UINT16", "uint_contents", [65536]), "range"),
        (typed("INT32", "int_contents", [1] * 11), "at most 10"),
        (pb.ModelInferRequest(raw_input_contents=[b"a"]).SerializeToString(), "1 raw contents"),
        (pb.ModelInferRequest(inputs=[{"name": "x"}], raw_input_contents=[b"a", b"b"]).SerializeToString(), "2 raw"),
        (pb.ModelInferRequest(inputs=[{"name": "x"}] * 2, raw_input_contents=[b"a"]).SerializeToString(), "1 raw"),
        (pb.ModelInferRequest(inputs=[{"name": "x"}] * 9).SerializeToString(), "9 inputs"),
        (pb.ModelInferRequest(outputs=[{"name": "x"}] * 9).SerializeToString(), "9 outputs"),
        (b"\x0a\xff", "not a ModelInferRequest"), (b"\x0a\x02\xff\xfe", "not a ModelInferRequest"),
        (b"\x0b" * 20000, "wire type 3"), (b"\x3a\x80\x80\x80\x80\x0f" + bytes(20000), "middle of a field"),
        (b"\x08\x01" * 10000, "more than 4096 fields"),
    ],
)  # fmt: skip
def test_messages_that_contradict_themselves_are_refused(data: bytes, why: str) -> None:
    with pytest.raises(InputError, match=why):
        protobuf.parse_request(data, ServeLimits(tensors_max=8, elements_max=10))


def test_every_truncation_of_a_message_is_refused_or_another_message() -> None:
    data = stock_request(x=np.zeros(5000, np.float32))
    assert len(data) > protobuf.SPLIT_BYTES_MIN
    for size in [*range(0, 200), *range(len(data) - 200, len(data))]:
        try:
            protobuf.parse_request(data[:size], LIMITS)
        except InputError:
            continue


def test_unknown_fields_are_skipped() -> None:
    for array in (np.zeros(1, np.float32), np.zeros(5000, np.float32)):
        data = stock_request(x=array)
        assert protobuf.parse_request(data + b"\xa2\x06\x03abc\x98\x06\x01", LIMITS) == protobuf.parse_request(
            data, LIMITS
        )


def test_a_request_survives_the_trip_through_our_own_writer() -> None:
    request = InferRequest(
        "m",
        (Tensor("x", "FP32", (2,), bytes(8)), Tensor("s", "BYTES", (1,), None, None, Region("r", 8, 16))),
        (WantedOutput("y", Region("q", 0, 64)), WantedOutput("z", None, {"classification": 0})),
        "3",
        "id",
        {"priority": 5, "big": 2**63, "flag": True, "half": 0.5, "word": "x"},
    )
    back = protobuf.parse_request(protobuf.request_bytes(request), LIMITS)
    assert (back.model, back.version, back.id, back.parameters) == ("m", "3", "id", request.parameters)
    assert [(one.name, one.shape, one.raw, one.region) for one in back.inputs] == [
        ("x", (2,), bytes(8), None), ("s", (1,), None, Region("r", 8, 16)),
    ]  # fmt: skip
    assert [(one.name, one.region) for one in back.outputs] == [("y", Region("q", 0, 64)), ("z", None)]


@pytest.mark.parametrize("size", [4, 40_000])
def test_a_response_survives_the_trip_alone_and_in_a_stream(size: int) -> None:
    tensors = (
        Tensor("a", "UINT8", (size,), bytes(size)),
        Tensor("b", "FP32", (1,), None, None, Region("r", 0, 4)),
        Tensor("c", "BYTES", (0,), b"", None, None, {"absent": True}),
    )
    response = InferResponse("m", "1", "id", tensors, {"triton_final_response": True})
    for wrong, back in (
        ("", protobuf.parse_response(protobuf.response_bytes(response))),
        protobuf.parse_stream_response(protobuf.stream_response_bytes(response)),
        protobuf.parse_stream_response(protobuf.stream_response_bytes(response, "")),
    ):
        assert wrong == "" and back.parameters == response.parameters
        assert [bytes(one.raw or b"") for one in back.outputs] == [bytes(size), b"", b""]
        assert [one.region for one in back.outputs] == [None, Region("r", 0, 4), None]


def test_an_error_in_a_stream_names_its_request() -> None:
    data = protobuf.stream_response_bytes(InferResponse("m", "", "id7", ()), "input x: wrong")
    stock = pb.ModelStreamInferResponse.FromString(data)
    assert stock.error_message == "input x: wrong" and stock.infer_response.id == "id7"
    wrong, response = protobuf.parse_stream_response(data)
    assert wrong == "input x: wrong" and response.id == "id7"


def test_the_stock_client_finds_an_output_behind_one_in_a_region() -> None:
    tensors = (Tensor("b", "FP32", (1,), None, None, Region("r", 0, 4)), Tensor("a", "INT64", (1,), b"\7" + bytes(7)))
    result = InferResult(
        pb.ModelInferResponse.FromString(protobuf.response_bytes(InferResponse("m", "1", "", tensors)))
    )
    assert result.as_numpy("a").tolist() == [7]


# Fuzz: only InputError ever comes out, and what upb reads is read the same.

NAMES = st.text(max_size=5)
MODELS = st.text("ab.-_9", min_size=1, max_size=5)
RAWS = st.one_of(st.binary(max_size=30), st.integers(16_000, 17_000).map(bytes))
REQUESTS = st.builds(
    lambda model, inputs, outputs, raws: pb.ModelInferRequest(
        model_name=model,
        inputs=[{"name": n, "datatype": d, "shape": s} for n, d, s in inputs],
        outputs=[{"name": n} for n in outputs],
        raw_input_contents=raws,
    ).SerializeToString(),
    MODELS,
    st.lists(st.tuples(NAMES, NAMES, st.lists(st.integers(-(2**63), 2**63 - 1), max_size=3)), max_size=3),
    st.lists(NAMES, max_size=2),
    st.lists(RAWS, max_size=3),
)


@settings(max_examples=150, deadline=None)
@given(REQUESTS)
def test_valid_messages_are_read_as_upb_reads_them(data: bytes) -> None:
    stock = pb.ModelInferRequest.FromString(data)
    raws = list(stock.raw_input_contents)
    try:
        request = protobuf.parse_request(data, LIMITS)
    except InputError:
        assert raws and len(raws) != len(stock.inputs)
        return
    assert (request.model, [one.name for one in request.outputs]) == (stock.model_name, [o.name for o in stock.outputs])
    assert [(one.name, one.datatype, one.shape) for one in request.inputs] == [
        (one.name, one.datatype, tuple(one.shape)) for one in stock.inputs
    ]
    assert [bytes(one.raw or b"") for one in request.inputs] == (raws or [b""] * len(stock.inputs))


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=100), st.sampled_from([b"", b"\x3a\x90\x7d" + bytes(16016)]))
def test_random_bytes_are_a_message_or_an_input_error(data: bytes, before: bytes) -> None:
    try:
        protobuf.parse_request(before + data, LIMITS)
    except InputError as error:
        assert "0x" not in str(error)


@settings(max_examples=200, deadline=None)
@given(st.data(), st.sampled_from([10, 5000]))
def test_a_corrupted_message_is_a_message_or_an_input_error(data: st.DataObject, size: int) -> None:
    message = bytearray(stock_request(x=np.zeros(size, np.float32), s=np.array([b"abc"], object)))
    for _ in range(data.draw(st.integers(1, 4))):
        front = data.draw(st.integers(0, min(len(message), 160) - 1))
        message[front if data.draw(st.booleans()) else -front - 1] = data.draw(st.integers(0, 255))
    try:
        protobuf.parse_request(bytes(message), LIMITS)
    except InputError:
        pass


def test_the_wanted_field_is_cut_out_and_the_rest_stays_in_order() -> None:
    first, large, last = field_prefix(1, 3) + b"abc", field_prefix(7, 5) + b"12345", b"\x40\x01"
    rest, found = split_field(first + large + last + large, 7)
    assert rest == first + last
    assert [bytes(one) for one in found] == [b"12345", b"12345"]


def test_what_was_cut_out_is_a_view_of_the_message() -> None:
    data = field_prefix(7, 1 << 20) + bytes(1 << 20)
    _, (found,) = split_field(data, 7)
    assert np.shares_memory(np.frombuffer(found, np.uint8), np.frombuffer(data, np.uint8))


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"\x3a\x05abc", "middle of a field"), (b"\x3a", "middle of a number"), (b"\x3a\xff\xff\xff\xff\x0f", "middle"),
        (b"\x3a" + b"\xff" * 9 + b"\x01", "middle of a field"), (b"\x08" + b"\x80" * 10 + b"\x01", "64 bits"),
        (b"\x08" + b"\xff" * 9 + b"\x02", "64 bits"), (b"\x08" + b"\x80" * 10 + b"\x00", "64 bits"),
        (b"\x08\x80", "middle of a number"), (b"\x0b\x0c", "wire type 3"),
        (b"\x0c", "wire type 4"), (b"\x0e", "wire type 6"), (b"\x0f", "wire type 7"), (b"\x02\x00", "field number"),
        (b"\x00", "field number"), (b"\x09\0\0\0\0", "middle of a field"), (b"\x0d\0\0", "middle of a field"),
        (b"\xff" * 9 + b"\x01", "field number"), (b"\x10\x01" * (FIELDS_MAX + 1), "more than"),
    ],
)  # fmt: skip
def test_what_is_no_message_is_refused(data: bytes, why: str) -> None:
    with pytest.raises(InputError, match=why):
        split_field(data, 7)


@given(st.binary(max_size=200), st.integers(1, 15))
def test_random_bytes_lose_nothing_or_are_refused(data: bytes, number: int) -> None:
    try:
        rest, found = split_field(data, number)
    except InputError:
        return
    assert len(rest) + sum(map(len, found)) <= len(data)
    assert split_field(rest, number) == (rest, [])


@pytest.mark.parametrize("size", [0, 1, 127, 128, 16383, 16384, 1 << 21, (1 << 32) + 5])
def test_a_prefix_is_read_back(size: int) -> None:
    data = field_prefix(6, size)
    if size:
        with pytest.raises(InputError, match="middle of a field"):
            split_field(data, 6)
    assert len(data) == 1 + max(1, -(-size.bit_length() // 7))
