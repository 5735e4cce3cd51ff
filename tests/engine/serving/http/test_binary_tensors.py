import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weftline.engine.serving.config import ServeLimits
from weftline.engine.serving.http.binary_tensors import BinaryOutputs, read_request, response_body
from weftline.engine.serving.v2.messages import InferResponse, Region, Tensor
from weftline.errors import InputError

LIMITS = ServeLimits(elements_max=100, tensors_max=4)
RAW = np.arange(4, dtype=np.float32).tobytes()
HEAD = msgspec.json.encode(
    {
        "id": "r1",
        "parameters": {"binary_data_output": True, "priority": 2},
        "inputs": [
            {"name": "a", "datatype": "FP32", "shape": [2, 2], "parameters": {"binary_data_size": 16}},
            {"name": "b", "datatype": "INT64", "shape": [2, 2], "data": [[1, 2], [3, 4]]},
        ],
        "outputs": [{"name": "y", "parameters": {"binary_data": False}}, {"name": "z"}],
    }
)


def test_a_request_is_read_and_its_bytes_are_not_copied() -> None:
    body = HEAD + RAW
    request, wanted = read_request(body, str(len(HEAD)), "m", "1", LIMITS)
    first, second = request.inputs
    assert first.raw is not None
    assert np.shares_memory(np.frombuffer(first.raw, np.uint8), np.frombuffer(body, np.uint8))
    assert bytes(first.raw) == RAW
    assert (second.values, second.shape) == ((1, 2, 3, 4), (2, 2))
    assert (request.model, request.version, request.id, request.parameters) == ("m", "1", "r1", {"priority": 2})
    assert (wanted.binary("y"), wanted.binary("z"), wanted.binary("other")) == (False, True, True)


def test_a_response_has_bytes_behind_its_json_and_says_how_many() -> None:
    tensors = (
        Tensor("y", "FP32", (4,), memoryview(RAW)),
        Tensor("t", "BYTES", (1,), b"\x02\0\0\0hi"),
        Tensor("s", "FP32", (4,), region=Region("r", 8, 16)),
    )
    body, length = response_body(InferResponse("m", "1", "r1", tensors), BinaryOutputs({"t": False}, True))
    assert length is not None
    assert body[length:] == RAW
    y, t, s = msgspec.json.decode(body[:length])["outputs"]
    assert y["parameters"] == {"binary_data_size": 16}
    assert t["data"] == ["hi"]
    assert s == {"name": "s", "datatype": "FP32", "shape": [4]}
    assert response_body(InferResponse("m", "1", "", tensors[1:2]), BinaryOutputs())[1] is None


def test_text_that_is_none_goes_out_as_bytes_only() -> None:
    response = InferResponse("m", "1", "", (Tensor("t", "BYTES", (1,), b"\x01\0\0\0\xff"),))
    with pytest.raises(InputError, match="binary_data"):
        response_body(response, BinaryOutputs())


def test_a_body_of_another_form_is_refused_with_the_form_of_inputs() -> None:
    with pytest.raises(InputError, match=r"found 'words' and no inputs; expected .*datatype"):
        read_request(b'{"words": "hello"}', None, "m", "", LIMITS)
    request, _ = read_request(b'{"id": "a"}', None, "m", "", LIMITS)  # of a model whose inputs are optional
    assert request.inputs == ()


def test_elements_and_tensors_are_counted() -> None:
    many = {"inputs": [{"name": "a", "datatype": "FP32", "shape": [101], "data": [[0] * 50, [0] * 51]}]}
    with pytest.raises(InputError, match="elements_max"):
        read_request(msgspec.json.encode(many), None, "m", "", LIMITS)
    with pytest.raises(InputError, match="at most 4"):
        read_request(msgspec.json.encode({"inputs": [{}] * 5}), None, "m", "", LIMITS)


@settings(max_examples=300, deadline=None, derandomize=True, database=None)
@given(st.data())
def test_whatever_comes_is_a_request_or_an_input_error(data: st.DataObject) -> None:
    body = bytearray(HEAD + RAW)
    for _ in range(data.draw(st.integers(0, 4))):
        at = data.draw(st.integers(0, len(body) - 1))
        body[at : at + data.draw(st.integers(0, 3))] = data.draw(st.binary(max_size=3))
    length = data.draw(
        st.one_of(st.none(), st.just(str(len(HEAD))), st.integers(-1, 400).map(str), st.text(max_size=3))
    )
    try:
        read_request(bytes(body), length, "m", "", LIMITS)
    except InputError as error:
        assert str(error)


@settings(max_examples=200, deadline=None, derandomize=True, database=None)
@given(
    st.recursive(
        st.none() | st.booleans() | st.integers(-(2**63), 2**63) | st.floats(allow_nan=False) | st.text(max_size=5),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(
                st.sampled_from(["inputs", "outputs", "name", "shape", "datatype", "data", "parameters", "id"]), inner
            )
        ),
        max_leaves=20,
    )
)
def test_whatever_json_comes_is_a_request_or_an_input_error(value: object) -> None:
    try:
        read_request(msgspec.json.encode(value), None, "m", "", LIMITS)
    except InputError as error:
        assert str(error)
