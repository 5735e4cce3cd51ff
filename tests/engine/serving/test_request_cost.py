"""Test what one request counts in the rate of its token, wherever its number of answers and items comes from."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from tests.engine.serving.v2.held import info
from weftline.engine.protocol.packed import Packed
from weftline.engine.serving.config import ServeLimits
from weftline.engine.serving.model_info import ModelInfo, PortInfo, model_info
from weftline.engine.serving.v2.messages import InferRequest, Tensor
from weftline.engine.serving.v2.request import to_asks
from weftline.pipelines.placement.machine import Machine
from weftline.pipelines.placement.planner import make_plan
from weftline.pipelines.spec.loader import load_file

CHAT = Path(__file__).parents[3] / "examples" / "models" / "shapes-chat"
PIPELINE = """weftline: 1
name: chat
inputs: {question: text, settings: {type: json, optional: true}, other: json}
steps:
  say: {node: llm, model: MODEL, inputs: {prompt: question, sampling: settings}}
  show: {node: template, template: "{{ other }}", inputs: {other: other}}
outputs: {answer: say.text, other: show.text}
"""


def _model(*sampling: str, **inputs: str) -> ModelInfo:
    ports = tuple(PortInfo(name, type, sampling=name in sampling) for name, type in inputs.items())
    return ModelInfo("m", 1, ports, ())


def _packed(value: Any) -> Packed:
    return Packed("json", data=msgspec.msgpack.encode(value))


COSTS: list[tuple[Any, int]] = [
    ({}, 1),
    ({"n": 64}, 64),
    ({"n": 1, "pad": "x"}, 1),
    ({"n": -5}, 1),
    ({"n": "64"}, 1),
    ({"n": True}, 1),
    ([{"n": 3}, {"n": 4}, {}], 8),
    (_packed({"pad": "x" * 20_000, "n": 64}), 64),
    (_packed({"n": [1]}), 1),
    (_packed([1, 2]), 1),
    (Packed("json", data=b"\xc1"), 1),
    (Packed("list", items=(_packed({"n": 2}), _packed({}))), 3),
    (None, 1),
]


@pytest.mark.parametrize(("value", "cost"), COSTS)
def test_answers_of_sampling_options_are_counted(value: Any, cost: int) -> None:
    assert _model("settings", settings="json", x="text").cost({"settings": value, "x": "y"}) == cost
    assert _model(settings="json").cost({"settings": value}) == 1  # an input that no llm step reads as its options


def test_elements_of_lists_are_counted() -> None:
    model = _model("s", passages="list[text]", pictures="list[image]", s="json", x="float32[N]", t="text")
    assert model.cost({"passages": ["a"] * 100, "t": "abc", "x": np.zeros(50)}) == 100
    assert model.cost({"passages": [], "pictures": ["a", "b"], "s": {"n": 3}}) == 4
    assert model.cost({"passages": Packed("list", items=(Packed("text"),) * 7)}) == 7


def test_an_input_of_sampling_options_is_found_by_its_wire(tmp_path: Path) -> None:
    (tmp_path / "chat.yaml").write_text(PIPELINE.replace("MODEL", str(CHAT)))
    found = model_info("chat", 1, make_plan(load_file(tmp_path / "chat.yaml"), Machine(cores=2, memory_bytes=8 << 30)))
    assert [one.name for one in found.inputs if one.sampling] == ["settings"]


@pytest.mark.parametrize("batch", [None, 3])
def test_a_v2_request_counts_its_answers_and_its_batch(batch: int | None) -> None:
    model = msgspec.structs.replace(_model("s", s="json", x="text"), outputs=info({}).outputs)
    shape = (1,) if batch is None else (batch,)
    values = tuple([json.dumps({"n": 5}).encode()] * shape[0])
    tensors = (Tensor("s", "BYTES", shape, values=values), Tensor("x", "BYTES", shape, values=(b"hi",) * shape[0]))
    assert to_asks(InferRequest("m", inputs=tensors), model, ServeLimits()).cost(model) == 5 * (batch or 1)
