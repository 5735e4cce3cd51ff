"""Made-up inputs: of the type of their port, within its limits, the same from the same seed."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from weftline.engine.bench.sample_inputs import sample_input, sample_text
from weftline.nodes.detections import Detections
from weftline.nodes.media import MediaLimits, to_value
from weftline.nodes.ports import PortType
from weftline.pipelines.placement.place import Machine
from weftline.pipelines.placement.plan import Plan
from weftline.pipelines.placement.planner import make_plan
from weftline.pipelines.spec.loader import load_yaml

TYPES = ("text", "json", "bytes", "image", "audio", "float32[3, N, ?]", "int64[N]", "bool[2]", "float16", "uint8[H, W]")


def plan_for(type: str, more: str = "") -> Plan:
    text = f"""
weftline: 1
name: one
inputs: {{x: {{type: "{type}"{more}}}}}
steps:
  a: {{node: echo, type: "{type}", inputs: {{value: x}}}}
outputs: {{y: a.value}}
"""
    return make_plan(load_yaml(text, "one.yaml", Path()), Machine(2, 8 << 30))


def make(type: str, seed: int = 0, more: str = ""):
    plan = plan_for(type, more)
    return sample_input(plan, plan.inputs[0], seed)


@pytest.mark.parametrize("type", TYPES)
def test_a_pipeline_takes_what_is_made_up_for_it(type: str) -> None:
    value = to_value(PortType.parse(type), make(type), MediaLimits(16_000_000, 120.0, 64 << 20))
    assert value is not None


@pytest.mark.parametrize("type", TYPES)
def test_the_same_seed_makes_the_same_and_another_seed_another(type: str) -> None:
    assert np.array_equal(make(type, 1), make(type, 1))
    if type not in ("json", "bool[2]"):
        assert not np.array_equal(make(type, 1), make(type, 2))


def test_sizes_match_their_description() -> None:
    assert make("image").shape == (480, 640, 3)
    assert make("audio").shape == (48_000,)
    assert make("float32[3, N, ?]").shape == (3, 16, 16)
    assert make("int64[N]").max() < 10
    assert len(make("text").split()) == 12
    assert sample_text(PortType.parse("image")) == "noise of 640x480"
    assert sample_text(PortType.parse("float32[3, N]")) == "numbers at random, float32[3, 16]"
    assert sample_text(PortType.parse("list[image]")) == "lists of 3: noise of 640x480"


def test_limits_of_an_input_are_kept() -> None:
    picture = make("image", more=", pixels_max: 10000")
    assert picture.shape[0] * picture.shape[1] <= 10_000
    assert make("audio", more=", seconds_max: 0.5").shape == (8_000,)


def test_lists_and_detections_are_made_of_their_elements() -> None:
    plan = plan_for("text")
    types = {**plan.input_types, "x": PortType.parse("list[audio]")}
    listed = sample_input(replace(plan, input_types=types), plan.inputs[0], 0)
    assert [one.shape for one in listed] == [(48_000,)] * 3
    found = make("detections")
    assert isinstance(found, Detections) and len(found) == 3
    assert (found.boxes[:, 2:] > found.boxes[:, :2]).all()
