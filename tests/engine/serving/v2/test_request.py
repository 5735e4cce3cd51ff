"""S1, S2: validation of v2 requests and their conversion."""

from __future__ import annotations

import math
import tracemalloc
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.engine.serving.v2.held import HeldRegions, info
from weftline.engine.protocol.packed import PendingTensor
from weftline.engine.serving.config import ServeLimits
from weftline.engine.serving.model_info import ModelInfo
from weftline.engine.serving.v2.datatypes import DTYPES, NUMPY, datatype_of
from weftline.engine.serving.v2.elements import encode_elements
from weftline.engine.serving.v2.messages import InferRequest, Region, Tensor, WantedOutput
from weftline.engine.serving.v2.request import ParsedRequest, to_asks
from weftline.errors import InputError, LimitReached
from weftline.nodes.detections import Detections
from weftline.nodes.urgency import SequencePart
from weftline.shm.spec import ITEM_BYTES, STAND_INS, TensorSpec

LIMITS = ServeLimits(tensors_max=8, batch_max=4, elements_max=64)


def dense(name: str, array: np.ndarray, datatype: str | None = None) -> Tensor:
    return Tensor(name, datatype or datatype_of(array.dtype.name), array.shape, array.tobytes())


def words(name: str, *elements: bytes, shape: tuple[int, ...] | None = None) -> Tensor:
    return Tensor(name, "BYTES", (len(elements),) if shape is None else shape, encode_elements(elements))


def ask(model: ModelInfo, *inputs: Tensor, regions: HeldRegions | None = None, **more: Any) -> ParsedRequest:
    return to_asks(InferRequest("m", inputs, **more), model, LIMITS, regions)


def value(type: str, sent: Tensor, regions: HeldRegions | None = None) -> Any:
    """Return what one item's input `x` of a type becomes."""
    asked = ask(info({"x": type}), sent, regions=regions)
    assert asked.batch is None and len(asked.asks) == 1
    return asked.asks[0].inputs["x"]


# values


@pytest.mark.parametrize("dtype", ITEM_BYTES)
def test_tensors_of_every_dtype_become_views_of_what_was_received(dtype: str) -> None:
    held = np.dtype(STAND_INS.get(dtype, dtype))
    array = np.arange(6).reshape(2, 3).astype(held)
    sent_dims = (2, 3, 2) if dtype == "complex64" else (2, 3)
    received = np.frombuffer(array.tobytes(), np.uint8)
    got = value(f"{dtype}[2, N]", Tensor("x", datatype_of(dtype), sent_dims, received.data))
    assert got.dtype == held and np.array_equal(got, array)
    assert np.shares_memory(got, received)


@pytest.mark.parametrize("dtype", DTYPES.values())
def test_numbers_sent_one_by_one_are_the_same_tensor(dtype: str) -> None:
    values = (True, False) if dtype == "bool" else (1, 2)
    got = value(f"{dtype}[2]", Tensor("x", datatype_of(dtype), (2,), None, values))
    assert got.dtype == np.dtype(STAND_INS.get(dtype, dtype)) and got.shape == (2,)


def test_a_number_without_dimensions_is_a_tensor_too() -> None:
    assert value("float32[]", dense("x", np.float32(2.5).reshape(()))).item() == 2.5
    assert value("int32[0]", dense("x", np.zeros(0, np.int32))).shape == (0,)
    assert value("tensor", dense("x", np.zeros((1, 2, 3), np.int8))).shape == (1, 2, 3)


ENCODED = [
    ("text", "grün".encode(), "grün"), ("text", b"", ""), ("bytes", b"\0\xff", b"\0\xff"), ("image", b"PNG", b"PNG"),
    ("audio", b"RIFF", b"RIFF"), ("json", b'{"a": [1, null]}', {"a": [1, None]}), ("json", b'"text"', "text"),
    ("any", b"text", "text"),
]  # fmt: skip


@pytest.mark.parametrize(("type", "element", "meant"), ENCODED)
@pytest.mark.parametrize("shape", [(), (1,)])
def test_one_element_is_one_value(type: str, element: bytes, meant: Any, shape: tuple[int, ...]) -> None:
    assert value(type, words("x", element, shape=shape)) == meant
    assert value(type, Tensor("x", "BYTES", shape, None, (element,))) == meant


def test_text_from_json_is_text() -> None:
    assert value("text", Tensor("x", "BYTES", (1,), None, ("grün",))) == "grün"


def test_detections_are_read_from_json() -> None:
    assert isinstance(value("detections", words("x", b"[]")), Detections)


def test_pictures_and_recordings_may_come_as_numbers() -> None:
    assert value("image", dense("x", np.zeros((4, 5, 3), np.uint8))).shape == (4, 5, 3)
    assert value("audio", dense("x", np.zeros(7, np.float32))).shape == (7,)


@pytest.mark.parametrize(("datatype", "array"), [("FP32", np.float32([1.5])), ("BF16", np.uint16([0x3FC0]))])
def test_json_may_come_as_one_number(datatype: str, array: np.ndarray) -> None:
    assert value("json", dense("x", array, datatype)) == 1.5
    assert value("json", dense("x", np.array(True))) is True
    assert value("json", dense("x", np.array([7], np.int64))) == 7


def test_lists_have_one_dimension_more() -> None:
    assert value("list[text]", words("x", b"a", b"b")) == ["a", "b"]
    assert value("list[text]", words("x")) == []
    assert value("list[json]", words("x", b"1", b"[2]")) == [1, [2]]
    assert value("list[image]", words("x", b"PNG", b"GIF")) == [b"PNG", b"GIF"]
    assert value("list[list[text]]", words("x", b'["a"]', b"[]")) == [["a"], []]
    rows = value("list[float32[3]]", dense("x", np.arange(6, dtype=np.float32).reshape(2, 3)))
    assert [row.tolist() for row in rows] == [[0, 1, 2], [3, 4, 5]]
    assert len(value("list[image]", dense("x", np.zeros((2, 4, 5, 3), np.uint8)))) == 2


@pytest.mark.parametrize("type", ["list[list[image]]", "list[list[bytes]]", "list[list[list[audio]]]"])
def test_no_text_from_json_ever_stands_where_a_file_could_be_named(type: str) -> None:
    with pytest.raises(InputError):
        value(type, words("x", b'["/etc/passwd"]'))


def test_optional_inputs_may_be_left_out() -> None:
    assert ask(info({"x?": "text"})).asks[0].inputs == {}
    assert ask(info({"x": "text", "n?": "json"}), words("x", b"a")).asks[0].inputs == {"x": "a"}


# what is refused


SHAPES = [
    (2, -3), (-1, -4), (-1, -6), (0, 1 << 62), (1 << 32, 1 << 32), (2**63 - 1, 2), (1,) * 33, (2, 2), (3, 2), (6,), (),
    (2, 3, 1), (True, 3), (2.0, 3), ("2", 3), (1 << 70, 0),
]  # fmt: skip


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("type", ["float32[2, 3]", "tensor"])
def test_shapes_that_lie_are_refused_before_anything_is_allocated(type: str, shape: tuple[Any, ...]) -> None:
    raw = bytes(25)
    tracemalloc.start()
    try:
        with pytest.raises(InputError, match=r"^input x: "):
            value(type, Tensor("x", "FP32", shape, raw))
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("shape", [*SHAPES, (1 << 31,), (65,)])
def test_so_are_shapes_of_bytes(shape: tuple[Any, ...]) -> None:
    with pytest.raises(InputError, match=r"^input x: "):
        value("list[text]", Tensor("x", "BYTES", shape, encode_elements([b"a"])))


@pytest.mark.parametrize(
    ("type", "sent", "why"),
    [
        ("float32[2]", dense("x", np.zeros(2, np.float64)), r"found FP64, expected FP32 \[2\]"),
        ("float32[2]", Tensor("x", "FP99", (2,), bytes(8)), "unknown datatype 'FP99'"),
        ("float32[2]", words("x", b"a"), r"found BYTES, expected FP32 \[2\]"),
        ("float32[2]", Tensor("x", "FP32", (2,), bytes(9)), "found 9 bytes, expected 8"),
        ("float32[2]", Tensor("x", "FP32", (2,), b""), "found 0 bytes, expected 8"),
        ("float32[N, N]", dense("x", np.zeros((2, 3), np.float32)), "expected FP32"),
        ("float32[2]", Tensor("x", "FP32", (2,), bytes(8), (1.0, 2.0)), "in one way"),
        ("float32[2]", Tensor("x", "FP32", (2,)), "in one way"),
        ("float32[2]", Tensor("x", "FP32", (2,), None, (1.0,)), "found 1 elements, expected 2"),
        ("float32[2]", Tensor("x", "FP32", (2,), None, (1.0, "a")), "expected numbers"),
        ("float32[2]", Tensor("x", "FP32", (2,), None, (1.0, 2**24 + 1)), "FP32 does not hold exactly"),
        ("float32[N]", Tensor("x", "FP32", (65,), None, (1.0,) * 65), "at most 64"),
        ("bool[2]", Tensor("x", "BOOL", (2,), b"\1\2"), "other than 0 and 1"),
        ("text", dense("x", np.zeros(1, np.float32)), r"found FP32, expected BYTES \[1\]"),
        ("text", Tensor("x", "BYTES", (1,), encode_elements([b"a", b"b"])), "after the \\d+ elements"),
        ("text", Tensor("x", "BYTES", (1,), b"\xff\xff\xff\xff"), "past the end"),
        ("text", words("x", b"\xff"), "UTF-8"), ("text", words("x", b"a\0"), "NUL"),
        ("text", words("x", b"a", b"b", b"c", b"d", shape=(2, 2)), "BYTES"),
        ("text", Tensor("x", "BYTES", (2,), None, ("a",)), "found 1 elements"),
        ("text", Tensor("x", "BYTES", (1,), None, ("\ud800",)), "surrogate"),
        ("text", Tensor("x", "BYTES", (1,), None, (7,)), "neither text nor bytes"),
        ("json", words("x", b'{"a":1,"a":2}'), "twice"), ("json", words("x", b"nan"), "not valid"),
        ("json", words("x", b"[" * 65 + b"]" * 65), "deeper"),
        ("json", dense("x", np.zeros((2, 2), np.float32)), "expected BYTES"),
        ("detections", words("x", b"{}"), "expected a list"), ("bytes", dense("x", np.zeros(3, np.uint8)), "BYTES"),
        ("image", dense("x", np.zeros((4, 5, 4), np.uint8)), "UINT8"),
        ("image", dense("x", np.zeros((4, 5, 3))), "FP64"),
        ("audio", dense("x", np.zeros((2, 3, 4), np.float32)), "FP32"),
        ("list[text]", words("x", b"a", shape=()), "BYTES"),
        ("list[float32[3]]", words("x", b"a"), "BYTES"), ("complex64[2]", dense("x", np.zeros(2, np.float32)), "FP32"),
    ],
)  # fmt: skip
def test_a_tensor_that_does_not_fit_its_port_is_refused_by_name(type: str, sent: Tensor, why: str) -> None:
    with pytest.raises(InputError, match=why) as refused:
        value(type, sent)
    assert str(refused.value).startswith("input x: ") and str(refused.value).count("input x") == 1


def test_more_elements_than_a_list_may_have_are_not_taken_apart() -> None:
    sent = Tensor("x", "BYTES", (65_537,), bytes(4 * 65_537))
    with pytest.raises(InputError, match="at most 65536"):
        to_asks(InferRequest("m", (sent,)), info({"x": "list[text]"}), ServeLimits())


@pytest.mark.parametrize(
    ("inputs", "why"),
    [
        ([], "missing: x"), (["x", "x"], "twice: 'x'"), (["x", "z"], "unknown: 'z'"), (["../x"], "missing: x"),
        (["x", "n", "n"], "twice: 'n'"), (["x"] * 9, "at most 8"), (["y" * 10_000], "unknown"),
    ],
)  # fmt: skip
def test_inputs_are_looked_up_and_each_comes_once(inputs: list[str], why: str) -> None:
    with pytest.raises(InputError, match=why) as refused:
        ask(info({"x": "text", "n?": "text"}), *(words(name, b"a") for name in inputs))
    assert len(str(refused.value)) < 300


@pytest.mark.parametrize(
    ("outputs", "why"),
    [(["q"], "unknown: 'q'"), (["y", "y"], "twice"), (["y"] * 9, "at most 8"), (["y", "z", "w"], "unknown: 'w'")],
)
def test_outputs_are_looked_up_and_each_is_wanted_once(outputs: list[str], why: str) -> None:
    with pytest.raises(InputError, match=why):
        ask(info({}, {"y": "text", "z": "text"}), outputs=tuple(map(WantedOutput, outputs)))


def test_a_million_outputs_are_refused_before_they_are_looked_at() -> None:
    with pytest.raises(InputError, match="1000000 outputs"):
        ask(info({}), outputs=(WantedOutput("y"),) * 1_000_000)


def test_what_is_wanted_is_asked_for() -> None:
    model = info({}, {"y": "text", "z": "text"})
    assert ask(model).asks[0].outputs is None
    assert ask(model, outputs=(WantedOutput("z"),)).asks[0].outputs == ("z",)
    with pytest.raises(InputError, match="classification"):
        ask(model, outputs=(WantedOutput("z", None, {"classification": 3}),))


@pytest.mark.parametrize("more", [{"version": "../1"}, {"version": "x" * 129}, {"id": "x" * 257}])
def test_names_that_are_none_are_refused(more: dict[str, str]) -> None:
    with pytest.raises(InputError):
        ask(info({}), **more)


def test_a_request_for_another_model_is_refused() -> None:
    with pytest.raises(InputError, match="another model"):
        to_asks(InferRequest("other", ()), info({}), LIMITS)


# everything else of an ask


def test_an_ask_has_the_fields_of_the_request_and_its_call() -> None:
    parameters = {"sequence_id": 4, "sequence_start": True, "priority": 2, "timeout": 7000, "job": True, "seed": 5}
    request = InferRequest("m", (words("x", b"a"),), (), "3", "id7", parameters)
    asked = to_asks(
        request,
        info({"x": "text"}),
        LIMITS,
        deadline_ms=50,
        caller="ann",
        protocol="grpc",
        traceparent="00-1",
        size_bytes=9,
    )
    (one,) = asked.asks
    assert (one.model, one.inputs, one.outputs, one.deadline_ms, one.priority) == ("m", {"x": "a"}, None, 7.0, 99)
    assert (one.sequence, one.version, one.id) == (SequencePart("4", True), "3", "id7")
    assert (one.job, one.seed) == (True, 5)
    assert (one.caller, one.protocol, one.traceparent, one.size_bytes) == ("ann", "grpc", "00-1", 9)
    assert not asked.empty_final


# batches


def test_one_dimension_more_everywhere_is_a_batch() -> None:
    rows = np.arange(6, dtype=np.float32).reshape(2, 3)
    asked = ask(info({"x": "float32[3]", "t": "text"}), dense("x", rows), words("t", b"a", b"b"), id="7")
    assert asked.batch == 2
    assert [(one.inputs["x"].tolist(), one.inputs["t"], one.id) for one in asked.asks] == [
        ([0, 1, 2], "a", "7"), ([3, 4, 5], "b", "7"),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("type", "shape", "batch"),
    [
        ("text", (1,), None), ("text", (), None), ("text", (2,), 2), ("text", (2, 1), 2), ("text", (1, 1), 1),
        ("list[text]", (2,), None), ("list[text]", (2, 2), 2), ("list[text]", (1, 2), 1), ("any", (2,), None),
    ],
)  # fmt: skip
def test_text_is_a_batch_by_its_shape(type: str, shape: tuple[int, ...], batch: int | None) -> None:
    asked = ask(info({"x": type}), words("x", *[b"a"] * math.prod(shape), shape=shape))
    assert asked.batch == batch and len(asked.asks) == (batch or 1)


@pytest.mark.parametrize(
    ("type", "shape", "batch"),
    [
        ("float32[3]", (3,), None), ("float32[3]", (1, 3), 1), ("float32[3]", (4, 3), 4),
        ("float32[?, 3]", (4, 3), None),
        ("float32[]", (), None), ("float32[]", (4,), 4), ("tensor", (2, 3), None), ("audio", (2, 3), 2),
        ("list[float32[3]]", (2, 3), None), ("list[float32[3]]", (1, 2, 3), 1),
    ],
)  # fmt: skip
def test_numbers_are_a_batch_by_their_shape(type: str, shape: tuple[int, ...], batch: int | None) -> None:
    asked = ask(info({"x": type}), dense("x", np.zeros(shape, np.float32)))
    assert asked.batch == batch and len(asked.asks) == (batch or 1)


def test_text_that_could_be_both_follows_its_companions() -> None:
    model = info({"t": "text", "x": "float32[3]", "a?": "tensor"})
    one, row = np.zeros(3, np.float32), np.zeros((1, 3), np.float32)
    assert ask(model, words("t", b"a"), dense("x", one)).batch is None
    assert ask(model, words("t", b"a"), dense("x", row)).batch == 1
    assert ask(model, words("t", b"a"), dense("x", row), dense("a", np.zeros(1, np.int8))).batch == 1


@pytest.mark.parametrize("rows", [0, 5])
def test_a_batch_has_one_item_at_least_and_not_too_many(rows: int) -> None:
    with pytest.raises(InputError, match=f"a batch of {rows}, expected 1 to 4"):
        ask(info({"x": "float32[3]"}), dense("x", np.zeros((rows, 3), np.float32)))


def test_inputs_that_disagree_on_the_batch_are_refused() -> None:
    model = info({"t": "text", "x": "float32[3]"})
    with pytest.raises(InputError, match="x has a batch of 2"):
        ask(model, words("t", b"a"), dense("x", np.zeros((2, 3), np.float32)))
    with pytest.raises(InputError, match="t has a batch of 3"):
        ask(model, words("t", b"a", b"b", b"c"), dense("x", np.zeros(3, np.float32)))


def test_a_sequence_goes_one_item_at_a_time() -> None:
    model, parameters = info({"t": "text"}), {"sequence_id": 1}
    assert ask(model, words("t", b"a", shape=(1, 1)), parameters=parameters).batch == 1
    with pytest.raises(InputError, match="one item at a time"):
        ask(model, words("t", b"a", b"b"), parameters=parameters)


# shared memory


def test_a_large_tensor_in_a_region_is_read_when_it_has_a_place() -> None:
    array = np.arange(8192, dtype=np.float32)
    regions = HeldRegions(r=bytes(16) + array.tobytes())
    got = value("float32[N]", Tensor("x", "FP32", (8192,), region=Region("r", 16, array.nbytes)), regions)
    assert isinstance(got, PendingTensor) and got.spec == TensorSpec("float32", (8192,)) and regions.reads == []
    place = bytearray(array.nbytes)
    got.read_into(memoryview(place))
    assert np.array_equal(np.frombuffer(place, np.float32), array)


def test_each_item_of_a_batch_in_a_region_is_read_on_its_own() -> None:
    rows = np.arange(3 * 4096, dtype=np.uint16).reshape(3, 4096)
    regions = HeldRegions(r=rows.tobytes())
    sent = Tensor("x", "BF16", rows.shape, region=Region("r", 0, rows.nbytes))
    asked = ask(info({"x": "bfloat16[4096]"}), sent, regions=regions)
    for row, one in zip(rows, asked.asks, strict=True):
        pending = one.inputs["x"]
        assert pending.spec == TensorSpec("bfloat16", (4096,))
        place = bytearray(pending.spec.size_bytes)
        pending.read_into(memoryview(place))
        assert np.array_equal(np.frombuffer(place, np.uint16), row)


def test_what_must_be_looked_at_is_copied_out_of_its_region_once() -> None:
    regions = HeldRegions(r=encode_elements([b"before"]))
    asked = ask(info({"x": "text"}), Tensor("x", "BYTES", (1,), region=Region("r", 0, 10)), regions=regions)
    regions.held["r"][:] = encode_elements([b"after!"])
    assert asked.asks[0].inputs["x"] == "before" and len(regions.reads) == 1
    booleans = HeldRegions(r=b"\2" * 20000)
    with pytest.raises(InputError, match="other than 0 and 1"):
        value("bool[N]", Tensor("x", "BOOL", (20000,), region=Region("r", 0, 20000)), booleans)


@pytest.mark.parametrize(
    ("region", "why"),
    [
        (Region("q", 0, 8), "no region"), (Region("r", 4, 8), "no region"), (Region("r", 0, 4), "expected 8"),
        (Region("r", 1 << 62, 8), "no region"),
    ],
)  # fmt: skip
def test_a_range_that_is_not_there_is_refused(region: Region, why: str) -> None:
    with pytest.raises(InputError, match=why):
        value("float32[2]", Tensor("x", "FP32", (2,), region=region), HeldRegions(r=bytes(8)))


def test_a_large_range_that_is_not_there_is_refused_at_once() -> None:
    sent = Tensor("x", "FP32", (8192,), region=Region("r", 4, 32768))
    with pytest.raises(InputError, match="no region"):
        value("float32[N]", sent, HeldRegions(r=bytes(32768)))


def test_one_region_named_often_does_not_multiply() -> None:
    model = info({"a": "text", "b": "text"}, request_bytes_max=100)
    sent = [Tensor(name, "BYTES", (1,), region=Region("r", 0, 60)) for name in "ab"]
    regions = HeldRegions(r=bytes(60))
    with pytest.raises(LimitReached, match="120 bytes"):
        ask(model, *sent, regions=regions)
    assert regions.reads == []


def test_regions_are_refused_where_there_are_none() -> None:
    with pytest.raises(InputError, match="shares no memory"):
        value("float32[2]", Tensor("x", "FP32", (2,), region=Region("r", 0, 8)))
    with pytest.raises(InputError, match="shares no memory"):
        ask(info({}), outputs=(WantedOutput("y", Region("r", 0, 8)),))
    with pytest.raises(InputError, match="no region"):
        ask(info({}), outputs=(WantedOutput("y", Region("r", 0, 9)),), regions=HeldRegions(r=bytes(8)))


# fuzz

DIMS = st.one_of(st.integers(-2, 4), st.sampled_from([1 << 31, 1 << 32, 1 << 62, 1 << 63, -(1 << 63)]))
TYPES = [
    "float32[3]",
    "bfloat16[?, N]",
    "tensor",
    "bool[2]",
    "int64[]",
    "text",
    "json",
    "bytes",
    "image",
    "audio",
    "any",
]
TYPES += ["detections", "list[text]", "list[float32[2]]", "list[list[json]]", "complex64[N]", "float8_e5m2[N]"]


@settings(max_examples=400, deadline=None)
@given(
    st.sampled_from(TYPES), st.sampled_from([*DTYPES, "BYTES", "", "fp32"]), st.lists(DIMS, max_size=4), st.data(),
)  # fmt: skip
def test_random_tensors_are_values_of_their_bytes_or_an_input_error(
    type: str, datatype: str, shape: list[int], data: st.DataObject
) -> None:
    count = math.prod(shape)
    fitting = count * NUMPY[datatype].itemsize if datatype in NUMPY and 0 <= count < 100 else 8
    raw = data.draw(st.one_of(st.binary(min_size=fitting, max_size=fitting), st.binary(max_size=40)))
    if datatype == "BYTES" and data.draw(st.booleans()):
        raw = encode_elements(data.draw(st.lists(st.sampled_from([b"", b"a", b"[]", b"\xff", b"1"]), max_size=6)))
    regions = HeldRegions(r=raw) if data.draw(st.booleans()) else None
    region = Region("r", 0, len(raw)) if regions else None
    sent = Tensor("x", datatype, tuple(shape), None if regions else raw, None, region)
    tracemalloc.start()
    try:
        asked = ask(info({"x": type}), sent, regions=regions)
    except (InputError, LimitReached):
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
        return
    finally:
        tracemalloc.stop()
    assert len(asked.asks) == (asked.batch or 1) <= LIMITS.batch_max
    values = [one.inputs["x"] for one in asked.asks]
    if type in ("tensor", "float32[3]", "bfloat16[?, N]", "bool[2]", "int64[]"):
        assert b"".join(array.tobytes() for array in values) == raw
