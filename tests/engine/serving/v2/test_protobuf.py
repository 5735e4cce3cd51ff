"""Messages as bytes: equal to protobuf's own encoding, with large tensors as views."""

from __future__ import annotations

import tracemalloc
from typing import Any

import numpy as np
import pytest
from google.protobuf.message import DecodeError
from hypothesis import given, settings
from hypothesis import strategies as st
from tritonclient.grpc import InferInput, InferResult, service_pb2
from tritonclient.grpc._utils import _get_inference_request

from weftline.engine.serving.config import ServeLimits
from weftline.engine.serving.v2 import protobuf
from weftline.engine.serving.v2.messages import InferRequest, InferResponse, Region, Tensor, WantedOutput
from weftline.engine.serving.v2.protobuf import (
    FIELDS_MAX,
    KNOWN_MAX,
    RAW_INPUTS,
    RequestSplitter,
    read_head,
    split_message,
)
from weftline.engine.serving.v2.protobuf_wire import field_prefix
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
    assert any(part is raw for part in protobuf.response_parts(response))
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
        (typed("INT8", "int_contents", [128]), "INT8 does not hold exactly"),
        (typed("UINT16", "uint_contents", [65536]), "UINT16 does not hold exactly"),
        (typed("INT32", "int_contents", [1] * 11), "at most 10"),
        (pb.ModelInferRequest(raw_input_contents=[b"a"]).SerializeToString(), "1 raw contents"),
        (pb.ModelInferRequest(inputs=[{"name": "x"}], raw_input_contents=[b"a", b"b"]).SerializeToString(), "2 raw"),
        (pb.ModelInferRequest(inputs=[{"name": "x"}] * 2, raw_input_contents=[b"a"]).SerializeToString(), "1 raw"),
        (pb.ModelInferRequest(inputs=[{"name": "x"}] * 9).SerializeToString(), "9 inputs"),
        (pb.ModelInferRequest(outputs=[{"name": "x"}] * 9).SerializeToString(), "9 outputs"),
        (b"\x0a\xff", "not a ModelInferRequest"), (b"\x0a\x02\xff\xfe", "not a ModelInferRequest"),
        (b"\x0b" * 20000, "nested deeper"), (b"\x3a\x80\x80\x80\x80\x0f" + bytes(20000), "middle of a field"),
        (b"\x08\x01" * (FIELDS_MAX + 1), "too many fields"),
        (b"\x0b" + b"\x10\x01" * 5000 + b"\x0c",
        "too many fields"),
        (field_prefix(5, 600_000) + b"\x48\x01" * 300_000, "too many fields"),
        (field_prefix(5, 1 << 20) + field_prefix(3, (1 << 20) - 4) + bytes((1 << 20) - 4), "too many fields"),
    ],
)  # fmt: skip
def test_messages_that_contradict_themselves_are_refused(data: bytes, why: str) -> None:
    with pytest.raises(InputError, match=why):
        protobuf.parse_request(data, ServeLimits(tensors_max=8, elements_max=10))


def test_every_truncation_of_a_message_is_refused_or_another_message() -> None:
    data = stock_request(x=np.zeros(5000, np.float32))
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


def test_the_id_and_raw_contents_are_cut_out_and_the_rest_stays_in_order() -> None:
    first, id, raw, last = (
        field_prefix(1, 1) + b"m",
        field_prefix(3, 2) + b"id",
        field_prefix(7, 2) + b"ab",
        b"\x40\x01",
    )
    head, model, found, raws = split_message(first + id + raw + last + raw, RAW_INPUTS)
    assert (head, model, found, raws) == (first + last, "m", "id", [b"ab", b"ab"])
    assert split_message(first + last, RAW_INPUTS) == (first + last, "m", "", [])


# All fields, against protobuf: a message is accepted and read, or rejected, as upb accepts and reads, or rejects it.

INT64 = st.integers(-(2**63), 2**63 - 1)
PARAMETER = st.one_of(
    st.just({}),
    st.builds(lambda one: {"bool_param": one}, st.booleans()),
    st.builds(lambda one: {"int64_param": one}, INT64),
    st.builds(lambda one: {"string_param": one}, NAMES),
    st.builds(lambda one: {"double_param": one}, st.floats(allow_nan=False)),
    st.builds(lambda one: {"uint64_param": one}, st.integers(0, 2**64 - 1)),
)
PARAMETERS = st.dictionaries(NAMES, PARAMETER, max_size=2)
ELEMENTS: dict[str, Any] = {
    "bool_contents": st.booleans(), "int_contents": st.integers(-(2**31), 2**31 - 1), "int64_contents": INT64,
    "uint_contents": st.integers(0, 2**32 - 1), "uint64_contents": st.integers(0, 2**64 - 1),
    "fp32_contents": st.floats(width=32, allow_nan=False), "fp64_contents": st.floats(allow_nan=False),
    "bytes_contents": st.binary(max_size=3),
}  # fmt: skip
TENSORS = st.fixed_dictionaries(
    {"name": NAMES, "datatype": NAMES, "shape": st.lists(INT64, max_size=3), "parameters": PARAMETERS},
    optional={
        "contents": st.fixed_dictionaries({}, optional={k: st.lists(one, max_size=3) for k, one in ELEMENTS.items()})
    },
)
MESSAGES = st.fixed_dictionaries(
    {
        "model_name": NAMES, "model_version": NAMES, "id": NAMES, "parameters": PARAMETERS,
        "inputs": st.lists(TENSORS, max_size=2), "raw_input_contents": st.lists(st.binary(max_size=4), max_size=2),
        "outputs": st.lists(st.fixed_dictionaries({"name": NAMES, "parameters": PARAMETERS}), max_size=2),
    }
)  # fmt: skip


def stock_parameters(parameters: Any) -> dict[str, Any]:
    chosen = {key: value.WhichOneof("parameter_choice") for key, value in parameters.items()}
    return {key: None if one is None else getattr(parameters[key], one) for key, one in chosen.items()}


def read_by_upb(data: bytes) -> object:
    try:
        m = pb.ModelInferRequest.FromString(data)
    except DecodeError:
        return None
    tensors = [
        (
            one.name, one.datatype, list(one.shape), stock_parameters(one.parameters),
            {field.name: list(values) for field, values in one.contents.ListFields()},
        )
        for one in m.inputs
    ]  # fmt: skip
    outputs = [(one.name, stock_parameters(one.parameters)) for one in m.outputs]
    raws = list(m.raw_input_contents)
    return m.model_name, m.model_version, m.id, stock_parameters(m.parameters), tensors, outputs, raws


def read_by_us(data: bytes) -> object:
    try:
        part, model, id, raws = split_message(data, RAW_INPUTS)
        head = read_head(part, "a ModelInferRequest", RAW_INPUTS, 1000)
    except InputError:
        return None
    assert head.model == model
    tensors = [
        (
            one.name, one.datatype, one.shape, one.parameters,
            {name: values if isinstance(values, list) else values.tolist() for name, values in one.contents.items()},
        )
        for one in head.tensors
    ]  # fmt: skip
    return head.model, head.version, id, head.parameters, tensors, head.outputs, [bytes(one) for one in raws]


@settings(max_examples=200, deadline=None)
@given(MESSAGES)
def test_every_field_is_read_as_upb_reads_it(fields: Any) -> None:
    data = pb.ModelInferRequest(**fields).SerializeToString()
    read = read_by_upb(data)
    assert read is not None and read_by_us(data) == read


@settings(max_examples=500, deadline=None)
@given(st.data(), MESSAGES, MESSAGES)
def test_a_mutated_message_is_read_or_rejected_as_by_upb(draw: st.DataObject, fields: Any, other: Any) -> None:
    data = bytearray(pb.ModelInferRequest(**fields).SerializeToString())
    for _ in range(draw.draw(st.integers(1, 3))):
        at = draw.draw(st.integers(0, len(data)))
        match draw.draw(st.sampled_from(["set", "delete", "insert", "merge"])):
            case "set":
                data[at : at + 1] = bytes([draw.draw(st.integers(0, 255))])
            case "delete":
                del data[at : at + 1]
            case "insert":
                data[at:at] = draw.draw(
                    st.sampled_from([b"\0", b"\x08", b"\x0b", b"\x0c", b"\x12\0", b"\x80", b"\x28\1"])
                )
            case _:
                data[at:at] = pb.ModelInferRequest(**other).SerializeToString()
    assert repr(read_by_us(bytes(data))).count("nan") or read_by_us(bytes(data)) == read_by_upb(bytes(data))


def nested(*numbers: int, inside: bytes) -> bytes:
    """Return contents inside fields of these numbers, the first outermost."""
    for number in reversed(numbers):
        inside = field_prefix(number, len(inside)) + inside
    return inside


GROUP = {depth: b"\x7b" * depth + b"\x7c" * depth for depth in (97, 98, 99, 100, 101)}
CORNERS = {
    "tenth byte": nested(4, 2, inside=b"\x10" + b"\xff" * 9 + b"\x02"),
    "bits beyond 64": b"\x78" + b"\x80" * 9 + b"\x7f",
    "eleven bytes": b"\x78" + b"\x80" * 10 + b"\0", "long key": b"\x8a\x80\x80\x80\x00\x01a",
    "longer key": b"\x8a\x80\x80\x80\x80\x00\x01a", "key of 33 bits": b"\xfa\xff\xff\xff\x1f\x00",
    "key of 32 bits": b"\xfa\xff\xff\xff\x0f\x00", "long length": b"\x0a\x81" + b"\x80" * 8 + b"\x02a",
    "number 0": b"\x02\x00", "number 0, varint": b"\0\0", "end of no group": b"\x7c", "wire type 6": b"\x7e",
    "wire type 7": b"\x7f", "open group": b"\x7b", "another group's end": b"\x7b\x84\x01",
    "a string as group": b"\x0b\x0c",
    "a string as varint": b"\x08\x05", "a large bool": nested(4, 2, inside=b"\x08\x80\x80\x80\x80\x10"),
    "a bool beyond 64 bits": nested(4, 2, inside=b"\x08" + b"\x80" * 9 + b"\x02"),
    "int32 of 35 bits": nested(5, 5, inside=b"\x10\xff\xff\xff\xff\x1f"),
    "uint32 of 35 bits": nested(5, 5, inside=b"\x22\x05\xff\xff\xff\xff\x1f"),
    "packed, cut": nested(5, 5, inside=b"\x12\1\x80"),
    "packed, eleven bytes": nested(5, 5, 2, inside=b"\x80" * 10 + b"\0"),
    "packed bools": nested(5, 5, 1, inside=b"\2\0"),
    "floats, cut": nested(5, 5, 6, inside=bytes(5)), "a float": nested(5, 5, inside=b"\x35" + bytes(4)),
    "doubles both ways": nested(5, 5, inside=b"\x39" + bytes(8) + b"\x3a\x08" + bytes(8) + b"\x39" + bytes(7) + b"\1"),
    "float as fixed64": nested(5, 5, inside=b"\x31" + bytes(8)), "surrogate": nested(1, inside=b"\xed\xa0\x80"),
    "invalid, overwritten": nested(1, inside=b"\xff") + nested(1, inside=b"a"),
    "overlong": nested(1, inside=b"\xc0\x80"),
    "entry with an unknown field": nested(4, inside=b"\x0a\1a\x78\1"),
    "entry with a group": nested(4, inside=b"\x0a\1a\x7b\x7c"),
    "entry with a group first": nested(4, inside=b"\x7b\x7c\x0a\1a"),
    "value with an unknown field": nested(4, 2, inside=b"\x78\1"),
    "empty entry": nested(4, inside=b""), "entry with two values": nested(4, inside=b"\x12\2\x08\1\x12\2\x10\2"),
    "key of another type": nested(4, inside=b"\x08\1"),
    "one key twice": nested(4, inside=b"\x12\2\x08\1") + nested(4, inside=b""),
    "value that is empty after one": nested(4, inside=b"\x12\2\x08\1\x12\0"),
    "contents in two": nested(5, inside=nested(5, 2, inside=b"\1") * 2),
    "shape both ways": nested(5, inside=b"\x18\1\x1a\2\2\3\x18\4"), "input in a wrong group": nested(5, inside=b"\x7c"),
    **{f"groups {n}": one for n, one in GROUP.items()},
    **{f"groups in an input {n}": nested(5, inside=one) for n, one in GROUP.items()},
    **{f"groups in a value {n}": nested(4, 2, inside=one) for n, one in GROUP.items()},
    **{f"groups in contents {n}": nested(5, 5, inside=one) for n, one in GROUP.items()},
    **{f"groups in a tensor's value {n}": nested(5, 4, 2, inside=one) for n, one in GROUP.items()},
}  # fmt: skip


@pytest.mark.parametrize("corner", CORNERS)
def test_a_corner_of_the_wire_format_is_as_in_upb(corner: str) -> None:
    assert read_by_us(CORNERS[corner]) == read_by_upb(CORNERS[corner])


def test_typed_elements_are_counted_before_they_take_memory() -> None:
    data = typed("INT64", "int64_contents", [1] * 1_000_000)
    tracemalloc.start()
    try:
        with pytest.raises(InputError, match="more than 10 typed elements"):
            protobuf.parse_request(data, ServeLimits(elements_max=10))
        assert tracemalloc.get_traced_memory()[1] < 4_000_000
    finally:
        tracemalloc.stop()


# Responses, byte for byte.

VALUES = st.one_of(st.booleans(), st.integers(-(2**63), 2**64 - 1), NAMES, st.floats(allow_nan=False))
OUTPUTS = st.builds(
    lambda name, datatype, shape, raw, parameters: Tensor(name, datatype, tuple(shape), raw, None, None, parameters),
    NAMES, NAMES, st.lists(st.integers(-3, 2**40), max_size=3), st.binary(max_size=200),
    st.dictionaries(NAMES, VALUES, max_size=3),
)  # fmt: skip
RESPONSES = st.builds(
    lambda model, version, id, outputs, parameters: InferResponse(model, version, id, tuple(outputs), parameters),
    NAMES, NAMES, NAMES, st.lists(OUTPUTS, max_size=3), st.dictionaries(NAMES, VALUES, max_size=3),
)  # fmt: skip


SPLITTER = RequestSplitter()


def float_request(size: int, value: float, id: str = "") -> bytes:
    one = pb.ModelInferRequest.FromString(stock_request(x=np.full(size, value, np.float32)))
    one.id = id
    return bytes(one.SerializeToString())


@settings(max_examples=300)
@given(st.data(), st.integers(0, 300), st.sampled_from(["", "an id"]))
def test_requests_like_an_earlier_one_are_split_as_by_parsing(draw: st.DataObject, size: int, id: str) -> None:
    first = float_request(size, 0.0, id)
    SPLITTER.split(first)
    second = bytearray(first)
    for _ in range(draw.draw(st.integers(0, 2))):
        second[draw.draw(st.integers(0, len(first) - 1))] = draw.draw(st.integers(0, 255))
    for data in (bytes(second), memoryview(second)):
        try:
            expected = split_message(data, RAW_INPUTS)
        except InputError:
            with pytest.raises(InputError):
                SPLITTER.split(data)
        else:
            assert SPLITTER.split(data) == expected


def test_few_requests_are_kept_and_a_kept_one_is_not_parsed(monkeypatch: pytest.MonkeyPatch) -> None:
    splitter = RequestSplitter()
    for size in range(2 * KNOWN_MAX):
        splitter.split(float_request(size, 0.0))
        assert len(splitter._known) <= KNOWN_MAX
    monkeypatch.setattr(protobuf, "split_message", lambda *_: pytest.fail("it is parsed"))
    _, model, _, [raw] = splitter.split(float_request(size, 7.0))
    assert (model, bytes(raw)) == ("m", np.full(size, 7, np.float32).tobytes())


def set_parameters(field: Any, parameters: Any) -> None:
    for key, value in parameters.items():
        kind = {bool: "bool_param", str: "string_param", float: "double_param"}.get(type(value))
        setattr(field[key], kind or ("int64_param" if value < 2**63 else "uint64_param"), value)


@settings(max_examples=300, deadline=None)
@given(RESPONSES)
def test_responses_are_the_bytes_that_protobuf_writes(response: InferResponse) -> None:
    stock = pb.ModelInferResponse(model_name=response.model, model_version=response.version, id=response.id)
    set_parameters(stock.parameters, response.parameters)
    for tensor in response.outputs:
        one = stock.outputs.add(name=tensor.name, datatype=tensor.datatype, shape=tensor.shape)
        set_parameters(one.parameters, tensor.parameters)
        stock.raw_output_contents.append(bytes(tensor.raw or b""))
    assert protobuf.response_bytes(response) == stock.SerializeToString(deterministic=True)
    back = protobuf.parse_response(protobuf.response_bytes(response))
    assert (back.id, back.parameters) == (response.id, response.parameters)
    framed = pb.ModelStreamInferResponse(error_message="e", infer_response=stock)
    assert protobuf.stream_response_bytes(response, "e") == framed.SerializeToString(deterministic=True)


def test_a_parameter_beyond_64_bits_is_refused() -> None:
    for number in (1 << 64, -(1 << 63) - 1):
        with pytest.raises(InputError, match="beyond 64 bits"):
            protobuf.response_bytes(InferResponse("m", "1", "", (), {"n": number}))


@pytest.mark.parametrize("size", [0, 1, 127, 128, 16383, 16384, 1 << 21, (1 << 32) + 5])
def test_a_prefix_has_a_length_of_as_many_bytes_as_it_needs(size: int) -> None:
    data = field_prefix(6, size)
    if size:
        with pytest.raises(InputError, match="middle of a field"):
            split_message(data, 6)
    assert len(data) == 1 + max(1, -(-size.bit_length() // 7))
