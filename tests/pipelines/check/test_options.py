"""A step's options become its node's Config: strictly typed, defaults filled in, every problem with its path."""

import dataclasses
import json
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any, Literal

import pytest
from msgspec import Meta

from weftline.errors import PipelineError
from weftline.fields import LOAD, REQUEST, plain
from weftline.nodes.catalog import CATALOG, engines_of, resolve
from weftline.nodes.contract import BatchNode, NoConfig
from weftline.nodes.ports import Ports
from weftline.pipelines.check.options import load_options, read_options, request_options, to_config, to_options
from weftline.pipelines.check.validation import json_schema_of


def node_with(config: type) -> type[BatchNode]:
    body = {
        "Config": config,
        "ports": classmethod(lambda cls, config, step: Ports((), ())),
        "run": lambda self, batch: {},
    }
    return type("Sample", (BatchNode,), body)


def test_options_become_a_config_with_its_defaults(samples) -> None:
    config = to_config(samples.Say, {"model": "m", "sampling": {"tokens_max": 3, "stop": ["."]}})
    assert config == samples.SayConfig("m", samples.Sampling(3, 1.0, (".",)))


def test_a_config_is_written_out_whole_and_read_back(samples) -> None:
    config = to_config(samples.Say, {"model": "m", "more": {"a": [1, None]}})
    options = to_options(config)
    assert options == {
        "model": "m", "mode": "fast", "more": {"a": [1, None]},
        "sampling": {"tokens_max": 128, "temperature": 1.0, "stop": []},
    }  # fmt: skip
    assert json.loads(json.dumps(options)) == options
    assert to_config(samples.Say, options) == config


def test_every_problem_has_its_path_and_a_fix(samples) -> None:
    written = {
        "modle": "m", "sampling": {"token_max": 1, "tokens_max": "5", "temperature": True, "stop": "."},
        "mode": "slow", "more": [], "quite_different": 1,
    }  # fmt: skip
    config, problems = read_options(samples.Say, written, "steps.answer")
    found = {one.path.removeprefix("steps.answer."): one for one in problems}
    assert config is None
    assert set(found) == {
        "model", "modle", "sampling.token_max", "sampling.tokens_max", "sampling.temperature", "sampling.stop", "mode",
        "more", "quite_different",
    }  # fmt: skip
    assert found["modle"].fix == "did you mean model?"
    assert found["sampling.token_max"].fix == "did you mean tokens_max?"
    assert found["sampling.token_max"].expected == "one of tokens_max, temperature, stop"
    assert found["sampling.tokens_max"].fix == "write it without quotes"
    assert found["mode"].expected == "'fast' or 'good'"
    assert found["quite_different"].fix == ""
    assert "node" in found["quite_different"].expected, "a step's own keys are known too"


def test_a_config_that_refuses_itself_is_a_problem_of_that_option(samples) -> None:
    _, problems = read_options(samples.See, {"model": "m", "confidence": 2}, "steps.see")
    assert [(one.path, one.expected, one.fix) for one in problems] == [("steps.see.confidence", "0 to 1", "write 0.25")]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), "0.5", None, True, [0.5]])
def test_types_are_strict(samples, value: object) -> None:
    assert read_options(samples.See, {"model": "m", "confidence": value}, "")[1]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_numbers_are_finite(samples, value: float) -> None:
    _, problems = read_options(samples.Say, {"model": "m", "sampling": {"temperature": value}}, "s")
    assert [(one.path, one.expected) for one in problems] == [("s.sampling.temperature", "a finite number")]


def test_a_whole_number_is_a_number(samples) -> None:
    assert to_config(samples.See, {"model": "m", "confidence": 1}).confidence == 1.0


class Form(Enum):
    A = "a"


@dataclass(frozen=True)
class Alike:
    text: str
    number: float = 1.0
    maybe: int | None = None
    form: Form = Form.A
    names: tuple[str, ...] = ()
    more: dict[str, Any] = dataclasses.field(default_factory=dict)
    counts: tuple[int, ...] | int = 1
    mode: Literal["fast", "good"] = "fast"


@dataclass(frozen=True)
class OtherBytes:
    data: bytes = b""


@pytest.mark.parametrize(
    "options",
    [
        {"text": "t"},
        {"text": "t", "number": 3, "maybe": 4, "form": "a", "names": ["x", "y"], "more": {"a": [1, {"b": None}]}},
        {"text": "", "maybe": None, "counts": [1, 2], "mode": "good", "number": 1e300},
    ],
)
def test_a_worker_makes_the_config_that_was_checked(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    node = node_with(Alike)
    checked, problems = read_options(node, options, "")
    assert not problems
    monkeypatch.setattr("weftline.pipelines.check.options.read_options", None)  # it is not asked
    made = to_config(node, options)
    assert made == checked
    assert all(type(value) is type(getattr(checked, name)) for name, value in vars(made).items())


def test_a_type_that_is_read_in_two_ways_is_left_to_pydantic() -> None:
    assert to_config(node_with(OtherBytes), {"data": "YQ=="}) == OtherBytes(b"YQ==")


def test_a_node_without_options_refuses_any() -> None:
    assert to_config(node_with(NoConfig), {}) == NoConfig()
    with pytest.raises(PipelineError, match="unknown key"):
        to_config(node_with(NoConfig), {"a": 1})


def test_a_config_that_cannot_be_checked_says_so() -> None:
    @dataclass(frozen=True)
    class Taken:
        device: str = "cpu"

    for config, said in ((Taken, "device is a key of every step"), (dict, "no dataclass")):
        _, problems = read_options(node_with(config), {}, "steps.a")
        assert [one.path for one in problems] == ["steps.a"]
        assert said in problems[0].found


class Colour(Enum):
    RED = "red"


def test_plain_values_are_what_a_file_can_hold() -> None:
    value = {"path": Path("a/b"), "tuple": (1, 2), "colour": Colour.RED, "set": {"b", "a"}, "config": NoConfig()}
    assert plain(value) == {"path": "a/b", "tuple": [1, 2], "colour": "red", "set": ["a", "b"], "config": {}}
    for bad in (object(), {1: 2}, b"x", NoConfig):
        with pytest.raises(TypeError) as caught:
            plain(bad)
        assert "0x" not in str(caught.value), "a message never holds an address"


def test_paths_and_any_values_are_taken() -> None:
    @dataclass(frozen=True, slots=True)
    class Config:
        model: Path
        anything: Any = None

    Config.__module__ = __name__
    config = to_config(node_with(Config), {"model": "a/b.onnx", "anything": [{"x": 1}]})
    assert dataclasses.astuple(config) == (Path("a/b.onnx"), [{"x": 1}])


def test_the_schema_has_every_option_and_its_nested_keys(samples) -> None:
    schema = json_schema_of(samples.Say.Config)
    assert set(schema["properties"]) == {"model", "sampling", "mode", "more"}
    assert schema["required"] == ["model"]
    assert "tokens_max" in schema["$defs"]["Sampling"]["properties"]


BUILT_IN = {
    **CATALOG,
    **{f"{name}/{engine}": path for name in CATALOG for engine, path in engines_of(name).items()},
}
OF_ITEMS = {
    "llm": {"system", "prefix", "sampling", "tool_format", "reasoning"}, "llm/openai": {"system", "sampling"},
    "template": {"template", "output_chars_max", "render_max_ms", "images", "videos"},
    "embed": {"prompt", "prefix"}, "whisper": {"language", "task"},
}  # fmt: skip


@pytest.mark.parametrize("name", BUILT_IN)
def test_every_option_is_loaded_or_applies_to_items(name: str) -> None:
    node = resolve(BUILT_IN[name], Path())
    fields = {one.name: one.default for one in dataclasses.fields(node.Config)}
    load, request = (of(node, SimpleNamespace(**dict.fromkeys(fields))) for of in (load_options, request_options))
    assert load.keys() | request.keys() == fields.keys()
    assert not load.keys() & request.keys()
    assert request.keys() >= OF_ITEMS.get(name, set())


def test_an_option_of_a_users_node_is_loaded_unless_it_is_marked() -> None:
    config = dataclasses.make_dataclass(
        "Config", [("size", int, 1), ("label", Annotated[str, REQUEST], "a")], frozen=True
    )
    node = node_with(config)
    assert (load_options(node, config(2)), request_options(node, config(2))) == ({"size": 2}, {"label": "a"})


def test_bounds_of_a_users_option_are_checked_with_its_path() -> None:
    config = dataclasses.make_dataclass(
        "Config", [("radius_px", Annotated[int, Meta(ge=1, le=9), LOAD], 1)], frozen=True
    )
    _, problems = read_options(node_with(config), {"radius_px": 12}, "steps.blur")
    assert [(one.path, one.found, one.expected) for one in problems] == [("steps.blur.radius_px", "12", "at most 9")]
