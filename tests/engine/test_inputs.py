"""What requests bring becomes values, and what they leave out has its default or is absent."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from weftline.engine.inputs import RequestInputs
from weftline.engine.protocol.messages import ABSENT, Value
from weftline.errors import InputError, LimitReached
from weftline.nodes.ports import PortType
from weftline.pipelines.placement.plan import Plan
from weftline.pipelines.spec.graph import Input
from weftline.pipelines.spec.policy import Limits, Slo

INPUTS = (
    Input("q", "text"),
    Input("lang", "text", default="en"),
    Input("size", "float32[2]", default=[1, 2]),
    Input("note", "json", optional=True),
    Input("mark", "json", default=1, optional=True),
    Input("words", "list[text]", optional=True),
    Input("a/size", "json", default=None, hidden=True),
    Input("read/more", "text", optional=True, hidden=True),
)


class NoArena:
    """Nothing here is large enough for shared memory."""

    def reserve(self, sizes: list[int]) -> list[Any]:
        raise NotImplementedError(f"{sizes} bytes")


def intake(limits: Limits = Limits(), inputs: tuple[Input, ...] = INPUTS) -> RequestInputs:
    types = {one.name: PortType.parse(one.type) for one in inputs}
    return RequestInputs(Plan("p", inputs, types, {}, (), (), (), limits, Slo(), 1, Path()))


def taken(**given: Any) -> dict[str, Value]:
    inputs_ = intake()
    return inputs_.place(inputs_.pack(given), NoArena())


def test_what_is_left_out_has_its_default_or_is_absent() -> None:
    values = taken(q="hello")
    assert {name: values[name].data for name in ("q", "lang")} == {"q": b"hello", "lang": b"en"}
    assert np.frombuffer(values["size"].data, np.float32).tolist() == [1, 2]
    assert [values[name] for name in ("note", "words", "read/more")] == [ABSENT] * 3
    assert values["a/size"] == Value("json", data=b"\xc0"), "a constant null is a value"
    assert list(values) != [] and set(values) == {one.name for one in INPUTS}


def test_what_is_brought_goes_before_the_default() -> None:
    values = taken(q="hello", lang="de", note={"a": 1}, words=["x", "yz"])
    assert (values["lang"].data, values["note"].kind) == (b"de", "json")
    assert [item.data for item in values["words"].items] == [b"x", b"yz"]


def test_none_for_an_optional_input_leaves_it_out() -> None:
    values = taken(q="hello", note=None, mark=None)
    assert (values["note"], values["mark"].data) == (ABSENT, b"\x01")
    with pytest.raises(InputError, match="input lang: wants text"):
        taken(q="hello", lang=None)


def test_a_constant_is_not_asked_for_and_not_taken() -> None:
    with pytest.raises(InputError, match="unknown: a/size; missing: q") as caught:
        intake().pack({"a/size": 3})
    assert "q (text), lang (text, may be left out)" in str(caught.value)
    assert str(caught.value).count("a/size") == 1


def test_defaults_are_packed_once() -> None:
    inputs_ = intake()
    first, second = (inputs_.place(inputs_.pack({"q": "x"}), NoArena()) for _ in range(2))
    assert first["size"] is second["size"]
    assert first["q"] is not second["q"]


def test_only_what_is_brought_counts_towards_the_limit() -> None:
    inputs_ = intake(Limits(request_bytes_max=4))
    assert list(inputs_.pack({"q": "four"})) == ["q"]
    with pytest.raises(LimitReached, match="request_bytes_max is 4"):
        inputs_.pack({"q": "four", "lang": "de"})


def test_an_element_that_is_wrong_is_named() -> None:
    with pytest.raises(InputError, match="input words: element 1"):
        intake().pack({"q": "x", "words": ["a", 3]})


@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e5m2", "float8_e4m3fn"])
def test_a_dtype_that_numpy_lacks_is_not_forgotten_where_any_is_taken(dtype: str) -> None:
    brought = torch.tensor([1.0, 2.0]).to(getattr(torch, dtype))
    packed = intake(inputs=(Input("x", "tensor"),)).pack({"x": brought})["x"]
    assert (packed.dtype, packed.array.tobytes()) == (dtype, brought.view(torch.uint8).numpy().tobytes())


@pytest.mark.parametrize("raw", ["", "hello", "grüße", "x" * 16_384])
def test_plain_small_inputs_yield_the_same_values_in_one_pass(raw: str) -> None:
    inputs = intake()
    assert inputs.try_inline({"q": raw}) == inputs.place(inputs.pack({"q": raw}), NoArena())


def test_scalars_of_json_inputs_are_encoded_in_one_pass() -> None:
    inputs = intake()
    for mark in ("a", 1, True, -(2**63), 2**64 - 1):
        given = {"q": "a", "mark": mark}
        assert inputs.try_inline(given) == inputs.place(inputs.pack(given), NoArena()) is not None


@pytest.mark.parametrize(
    "array",
    [
        np.arange(6, dtype=np.uint8),
        np.zeros(0, np.uint8),
        np.zeros(16_384, np.uint8),
        np.arange(12, dtype=np.uint8)[::2],
        np.frombuffer(b"abc", np.uint8),
    ],
    ids=["usual", "empty", "largest", "strided", "read-only"],
)
def test_small_arrays_yield_the_same_values_in_one_pass(array: np.ndarray) -> None:
    inputs = intake(inputs=(Input("x", "uint8[N]"),))
    assert inputs.try_inline({"x": array}) == inputs.place(inputs.pack({"x": array}), NoArena())


@pytest.mark.parametrize(
    "array",
    [np.zeros(2, np.int32), np.zeros((2, 2), np.uint8), np.zeros(16_385, np.uint8), np.array(["a"]), [1, 2]],
    ids=["dtype", "rank", "large", "text", "list"],
)
def test_all_other_arrays_take_the_general_path(array: Any) -> None:
    assert intake(inputs=(Input("x", "uint8[N]"),)).try_inline({"x": array}) is None


def test_the_limit_of_an_array_in_bytes_holds_in_one_pass() -> None:
    inputs = intake(inputs=(Input("x", "uint8[N]", bytes_max=4),))
    assert inputs.try_inline({"x": np.zeros(4, np.uint8)}) is not None
    assert inputs.try_inline({"x": np.zeros(5, np.uint8)}) is None


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"q": "a", "x": "unknown"},
        {"q": b"bytes"},
        {"q": Path("file")},
        {"q": 1},
        {"q": "half a pair \ud800"},
        {"q": "x" * 16_385},
        {"q": "a", "mark": 2**64},
        {"q": "a", "mark": {"a": 1}},
        {"q": "a", "note": None},
        {"q": "a", "words": ["b"]},
        {"q": "a", "a/size": 1},
    ],
)
def test_all_other_inputs_take_the_general_path(given: dict[str, Any]) -> None:
    assert intake().try_inline(given) is None


def test_limits_hold_for_inputs_that_are_converted_in_one_pass() -> None:
    assert intake(Limits(request_bytes_max=3)).try_inline({"q": "abc"}) is not None
    assert intake(Limits(request_bytes_max=3)).try_inline({"q": "abcd"}) is None
    own = (Input("q", "text", bytes_max=2), Input("r", "text"))
    assert intake(inputs=own).try_inline({"q": "abc", "r": "abc"}) is None
