"""Controls have the ports of what is wired to them, and refuse what could never be chosen."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from weftline.nodes.contract import ConfigError, NoConfig, StepContext
from weftline.nodes.control import First, Passes, Switch, SwitchConfig
from weftline.nodes.ports import Ports, PortType


def context(**wired: str) -> StepContext:
    types = {name: PortType.parse(type) for name, type in wired.items() if type}
    return StepContext(Path(), tuple(wired), types)


def shown(ports: Ports) -> tuple[list[str], list[str]]:
    return [f"{one.name}: {one.type}" for one in ports.inputs], [f"{one.name}: {one.type}" for one in ports.outputs]


@pytest.mark.parametrize(
    ("types", "common"),
    [
        (["text", "text"], "text"), (["image", "image"], "image"), (["text", "json"], "json"),
        (["text", "detections"], "json"), (["text", "list[json]"], "json"), (["list[text]", "list[json]"], "json"),
        (["float32[3, 4]", "float32[3, 7]"], "float32[3, ?]"), (["float32[3]", "float32"], "float32"),
        (["tensor", "float32[3]"], "tensor"), (["list[float32[3]]", "list[float32[4]]"], "list[float32[?]]"),
        (["image", "any"], "any"), (["", "text"], "text"), (["", ""], "any"),
    ],
)  # fmt: skip
def test_what_is_chosen_has_the_type_that_fits_all_it_is_chosen_from(types: list[str], common: str) -> None:
    wired = {f"x{place}": type for place, type in enumerate(types)}
    ports = First.ports(NoConfig(), context(**wired))
    assert shown(ports) == ([f"{name}: {common}" for name in wired], [f"value: {common}"])
    assert all(one.optional for one in ports.inputs)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("text", "image"), ("float32[3]", "float64[3]"), ("float32[3]", "float32[3, 4]"), ("list[text]", "list[image]"),
        ("list[detections]", "text"), ("bytes", "json"),
    ],
)  # fmt: skip
def test_inputs_of_different_types_are_named(one: str, other: str) -> None:
    with pytest.raises(ConfigError) as caught:
        First.ports(NoConfig(), context(a=one, b=other))
    assert caught.value.option == "inputs"
    assert caught.value.found == f"its inputs have different types: a gives {one}, b gives {other}"


def test_a_switch_has_its_decision_first_and_its_default_last() -> None:
    ports = Switch.ports(SwitchConfig(), context(default="text", b="text", by="json", a="text"))
    inputs, outputs = shown(ports)
    assert inputs == ["by: json", "b: text", "a: text", "default: text"]
    assert outputs == ["value: text"]
    assert [one.optional for one in ports.inputs] == [False, True, True, True]


@pytest.mark.parametrize(
    ("cases", "wired", "option", "said"),
    [
        ({}, {"by": "text"}, "inputs", "no case to choose"),
        ({}, {"by": "text", "default": "text"}, "inputs", "no case to choose"),
        ({"c": 1}, {"by": "json", "a": "text"}, "cases", "no input c"),
        ({"default": 1}, {"by": "json", "a": "text", "default": "text"}, "cases", "fits when no case does"),
        ({"a": None}, {"by": "json", "a": "text"}, "cases", "a stands for something else"),
        ({"a": [1]}, {"by": "json", "a": "text"}, "cases", "a stands for something else"),
        ({"a": 3}, {"by": "text", "a": "text"}, "cases", "a stands for a number, and `by` is text"),
        ({}, {"by": "float32[]", "a": "text"}, "cases", "a stands for text, and `by` is a number"),
        ({"a": 1}, {"by": "bool[1]", "a": "text"}, "cases", "a stands for a number, and `by` is true or false"),
        ({"a": "b"}, {"by": "text", "a": "text", "b": "text"}, "cases", "a and b stand for the same"),
        ({}, {"by": "image", "a": "text"}, "inputs.by", "nothing can be decided by image"),
        ({}, {"by": "float32[3]", "a": "text"}, "inputs.by", "nothing can be decided by float32[3]"),
        ({}, {"by": "float32[?]", "a": "text"}, "inputs.by", "nothing can be decided by float32[?]"),
    ],
)  # fmt: skip
def test_a_switch_that_could_never_choose_is_refused(
    cases: dict[str, Any], wired: dict[str, str], option: str, said: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        Switch.ports(SwitchConfig(cases), context(**wired))
    assert caught.value.option == option
    assert said in caught.value.found


def test_true_and_one_are_two_cases() -> None:
    ports = Switch.ports(SwitchConfig({"a": True, "b": 1}), context(by="json", a="text", b="text"))
    assert [one.name for one in ports.inputs] == ["by", "a", "b"]


def test_a_first_without_inputs_is_refused() -> None:
    with pytest.raises(ConfigError, match="no inputs to choose from"):
        First.ports(NoConfig(), context())


def test_what_passes_has_the_ports_that_are_wired() -> None:
    assert shown(Passes.ports(NoConfig(), context(text="text", n="json"))) == (
        ["text: text", "n: json"], ["text: text", "n: json"],
    )  # fmt: skip
