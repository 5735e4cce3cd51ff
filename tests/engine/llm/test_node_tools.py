"""Tool calls and reasoning of the llm node: forced calls of random models fit their schema, and parts are separated."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AddedToken

from tests.engine.llm import tiny
from tests.engine.llm.test_node import _finish
from weftline.engine.llm.grammar import matcher as grammar_matcher
from weftline.engine.llm.node import Llm
from weftline.engine.llm.options import LlmConfig
from weftline.errors import InputError
from weftline.nodes.contract import ConfigError, OpenContext, StepContext
from weftline.pipelines.check.options import read_options

SCHEMA = {
    "type": "object",
    "properties": {"unit": {"$ref": "#/$defs/unit"}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["unit", "days"],
    "additionalProperties": False,
    "$defs": {"unit": {"enum": ["C", "F"]}},
}
TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": "weather", "description": "forecast", "parameters": SCHEMA}},
    {"type": "function", "function": {"name": "stop"}},
]
MARKS = {"hermes": "<tool_call>", "llama3": "<|python_tag|>", "mistral": "[TOOL_CALLS]"}
TOKENS: dict[str, list[AddedToken]] = {
    "hermes": [AddedToken(name) for name in ("<tool_call>", "</tool_call>")],
    "llama3": [AddedToken("<|python_tag|>", special=True)],
    "mistral": [AddedToken("[TOOL_CALLS]", special=True)],
}
"""Tokens of the marks, with the flags that the families' tokenizers have."""
SAMPLING = {"tokens_max": 200, "temperature": 1.0, "seed": 3}
WEATHER = {"type": "function", "function": {"name": "weather"}}


def node_of(folder: Path, template: str, tokens: list[AddedToken] | None = None, **options: Any) -> Llm:
    """Return an open node whose chat template ends with `template`."""
    words = tiny.tokenizer(added=())
    words.add_tokens(tokens or [])
    words.chat_template = tiny.TEMPLATE + template
    tiny.save(folder / "m", words)
    node = Llm(LlmConfig(model="m", sampling=SAMPLING, **options))
    node.open(OpenContext(base_dir=folder))
    return node


def answer(node: Llm, **inputs: Any) -> dict[str, Any]:
    """Return the outputs of one request, whose pieces add up to them."""
    node.submit(1, {"prompt": "the user asks", **inputs})
    *pieces, last = _finish(node)[1]
    if last.error is not None:
        raise last.error
    if len(last.outputs["answers"]) == 1:
        for name in ("text", "reasoning"):
            assert "".join(piece.outputs.get(name, "") for piece in pieces) == last.outputs[name]
    return dict(last.outputs)


def arguments(call: dict[str, Any]) -> Any:
    return json.loads(call["function"]["arguments"])


@pytest.mark.parametrize("tokens", [True, False], ids=["tokens", "text"])
@pytest.mark.parametrize("format", MARKS)
def test_a_forced_call_fits_the_schema_of_its_tool(tmp_path: Path, format: str, tokens: bool) -> None:
    node = node_of(tmp_path, f"{{# {MARKS[format]} #}}", TOKENS[format] if tokens else None)
    forced: dict[str, Any] = {"tools": TOOLS, "tool_choice": WEATHER, "parallel_tool_calls": False}
    found = answer(node, **forced)
    (call,) = found["tool_calls"]
    assert call["function"]["name"] == "weather" and found["text"] == "" == found["reasoning"]
    assert arguments(call)["unit"] in ("C", "F") and 1 <= arguments(call)["days"] <= 9
    assert found["usage"]["finish_reason"] == "tool_calls" == found["answers"][0]["finish_reason"]
    assert answer(node, **forced)["tool_calls"] == [call]
    required = answer(node, tools=TOOLS, tool_choice="required")
    assert {one["function"]["name"] for one in required["tool_calls"]} in ({"weather"}, {"stop"}, {"weather", "stop"})
    assert all(arguments(one) == {} for one in required["tool_calls"] if one["function"]["name"] == "stop")
    several = answer(node, sampling={"n": 2, "seed": 4, "skip_special_tokens": True}, **forced)["answers"]
    assert [len(one["tool_calls"]) for one in several] == [1, 1]
    assert several[0]["tool_calls"][0]["id"] != several[1]["tool_calls"][0]["id"]
    node.close()


def test_several_calls_are_forced_at_once(tmp_path: Path) -> None:
    node = node_of(tmp_path, "{# <tool_call> #}", TOKENS["hermes"])
    sampling = {"logit_bias": {"2": -100}, "tokens_max": 300}  # no end of text
    found = answer(node, tools=TOOLS, tool_choice=WEATHER, sampling=sampling)
    assert len(found["tool_calls"]) > 1 and len({one["id"] for one in found["tool_calls"]}) > 1
    assert all(1 <= arguments(one)["days"] <= 9 for one in found["tool_calls"][:-1])  # the last one may be cut
    assert found["usage"]["finish_reason"] == "length"
    node.close()


def test_an_answer_that_is_cut_keeps_its_finish_reason(tmp_path: Path) -> None:
    node = node_of(tmp_path, "{# <tool_call> #}", TOKENS["hermes"])
    found = answer(node, tools=TOOLS, tool_choice=WEATHER, sampling={"tokens_max": 4})
    assert found["usage"]["finish_reason"] == "length" and found["tool_calls"] == []
    assert found["text"] == ""
    node.close()


@pytest.mark.parametrize("token", [True, False])
def test_a_forced_call_follows_the_reasoning(tmp_path: Path, token: bool) -> None:
    tokens = [*TOKENS["hermes"], AddedToken("</think>")] if token else []
    node = node_of(tmp_path, "{{ '<think>\\n' }}{# <tool_call> </think> #}", tokens)
    _, words = node._opened()
    end = words.tokenizer.encode("</think>", add_special_tokens=False)
    sampling = {"logit_bias": {str(end[0]): 100 if token else 0}, "tokens_max": 100}
    found = answer(node, tools=TOOLS, tool_choice=WEATHER, parallel_tool_calls=False, sampling=sampling)
    if token:  # the bias ends the reasoning at once
        assert (found["reasoning"], found["text"], len(found["tool_calls"])) == ("", "", 1)
    else:
        assert found["reasoning"] != "" and (found["text"], found["tool_calls"]) == ("", [])
    text = answer(node, sampling={"regex": "[a-z]{4}"})
    assert len(text["text"]) == 4 and text["reasoning"] == ""
    assert answer(node)["reasoning"] != "" == answer(node)["text"]
    node.close()


CALL = (
    '<think>\n[a-z]{5}\n</think>\n\n[a-z]{3}\n<tool_call>\n\\{"name": "f", "arguments": \\{"n": 1\\}\\}\n</tool_call>'
)


def test_reasoning_and_calls_are_found_in_free_answers(tmp_path: Path) -> None:
    node = node_of(tmp_path, "{# <tool_call> </think> #}")
    call = CALL
    found = answer(node, tools=TOOLS, sampling={"regex": call})
    assert (len(found["reasoning"]), len(found["text"])) == (5, 3)
    assert [arguments(one) for one in found["tool_calls"]] == [{"n": 1}]
    (one,) = answer(node, tools=TOOLS, sampling={"regex": call})["answers"]
    assert (one["reasoning"], one["text"], one["tool_calls"]) == (
        found["reasoning"],
        found["text"],
        found["tool_calls"],
    )
    inputs: dict[str, Any]
    for inputs in ({"tools": TOOLS, "tool_choice": "none"}, {}):
        plain = answer(node, sampling={"regex": call}, **inputs)
        assert plain["text"].endswith("</tool_call>") and plain["tool_calls"] == []
        assert plain["usage"]["finish_reason"] == "stop"
    node.close()


def test_stop_strings_and_log_probabilities_see_the_whole_answer(tmp_path: Path) -> None:
    node = node_of(tmp_path, "{# <tool_call> </think> #}")
    found = answer(node, tools=TOOLS, sampling={"regex": CALL, "stop": ["</tool_call>"], "logprobs": 0})
    assert len(found["tool_calls"]) == 1 and found["usage"]["finish_reason"] == "tool_calls"
    assert len(found["answers"][0]["logprobs"]) == found["usage"]["completion_tokens"]
    stopped = answer(node, tools=TOOLS, sampling={"regex": CALL, "stop": ["</think>"]})
    assert (len(stopped["reasoning"]), stopped["text"], stopped["tool_calls"]) == (5, "", [])
    node.close()


def test_options_leave_calls_and_reasoning_in_the_text(tmp_path: Path) -> None:
    node = node_of(tmp_path, "{# <tool_call> </think> #}", tool_format="none", reasoning="none")
    found = answer(node, tools=TOOLS, sampling={"regex": CALL})
    assert found["text"].endswith("</tool_call>") and found["tool_calls"] == [] and found["reasoning"] == ""
    node.close()


def test_a_conversation_with_calls_reaches_the_template_as_objects(tmp_path: Path) -> None:
    node = node_of(tmp_path, "{% for m in messages %}{{ m.tool_calls[0].function.arguments | tojson }}{% endfor %}")
    calls = [{"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"n": [1]}'}}]
    _, words = node._opened()
    ids = words.chat([{"role": "assistant", "content": None, "tool_calls": calls}])
    assert words.decode(ids).endswith('{"n": [1]}')
    node.close()


@pytest.mark.parametrize(
    ("inputs", "param", "message"),
    [
        ({"tools": TOOLS, "tool_choice": "maybe"}, "tool_choice", "expected auto, none, required"),
        ({"tools": TOOLS, "tool_choice": 10**5000}, "tool_choice", "expected auto, none, required"),
        ({"tools": TOOLS, "tool_choice": {"type": "function"}}, "tool_choice", "expected auto, none, required"),
        ({"tools": TOOLS, "tool_choice": {**WEATHER, "function": {"name": "g"}}}, "tool_choice", "found 'g'"),
        ({"tool_choice": "required"}, "tool_choice", "no tools were sent"),
        ({"tools": TOOLS, "parallel_tool_calls": 10**5000}, "parallel_tool_calls", "expected true or false"),
        ({"tools": [{"type": "function"}], "tool_choice": "required"}, "tools", r"tools\[0\].function.name"),
        ({"tools": [{}] * 129}, "tools", "at most 128"),
        ({"tools": TOOLS, "tool_choice": "required", "sampling": {"regex": "a"}}, "tool_choice", "sampling.regex"),
        ({"tools": TOOLS, "tool_choice": "required", "sampling": {"echo": True}}, "tool_choice", "sampling.echo"),
    ],
)
def test_wrong_choices_are_refused(hermes: Llm, inputs: Any, param: str, message: str) -> None:
    with pytest.raises(InputError, match=message) as refused:
        answer(hermes, **inputs)
    assert refused.value.param == param


@pytest.fixture(scope="module")
def hermes(tmp_path_factory: pytest.TempPathFactory) -> Llm:
    return node_of(tmp_path_factory.mktemp("model"), "{# <tool_call> #}", TOKENS["hermes"])


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"type": "array"}, "expected a JSON schema of an object"),
        ("text", "expected a JSON schema of an object"),
        ({"properties": {"a": {"type": "no such type"}}}, "no such type"),
        ({"properties": {"a": {"type": "string", "pattern": "("}}}, "tools: "),
        ({"properties": {"a": {"not": {"type": "string"}}}, "required": ["a"]}, "tools: "),
    ],
)
def test_schemas_that_cannot_be_forced_are_refused(hermes: Llm, parameters: Any, message: str) -> None:
    tools = [{"type": "function", "function": {"name": "f", "parameters": parameters}}]
    with pytest.raises(InputError, match=message) as refused:
        answer(hermes, tools=tools, tool_choice="required")
    assert refused.value.param == "tools" and "sampling" not in str(refused.value)


@pytest.mark.parametrize(
    ("name", "parameters", "message"),
    [
        ("f\ud800", {}, "tools: found a lone surrogate at 1"),
        ("f", {"properties": {"a": {"enum": ["\ud800"]}}}, "tools: found a lone surrogate at 0"),
        (
            "f",
            {"a": [[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]},
            "tools: nested deeper than 32",
        ),
    ],
)
@pytest.mark.parametrize("choice", ["auto", "required"])
def test_tools_that_no_template_can_show_are_refused(
    hermes: Llm, name: str, parameters: Any, message: str, choice: str
) -> None:
    tools = [{"type": "function", "function": {"name": name, "parameters": parameters}}]
    with pytest.raises(InputError, match=message) as refused:
        answer(hermes, tools=tools, tool_choice=choice)
    assert refused.value.param == "tools"


def test_a_forced_call_that_takes_too_long_names_the_tools(hermes: Llm, monkeypatch: pytest.MonkeyPatch) -> None:
    answer(hermes, tools=TOOLS, tool_choice="required")  # its grammar is compiled now
    monkeypatch.setattr(grammar_matcher, "MOVE_MAX_MS", -1.0)
    with pytest.raises(InputError, match=r"^tools: a token took") as refused:
        answer(hermes, tools=TOOLS, tool_choice="required")
    assert refused.value.param == "tools"


def test_a_call_cannot_be_forced_in_other_formats(tmp_path: Path) -> None:
    node = node_of(tmp_path, "")
    with pytest.raises(InputError, match="if the notation of the model's calls is not known"):
        answer(node, tools=TOOLS, tool_choice="required")
    node.close()
    xml = node_of(tmp_path / "xml", "{# <tool_call> <function= <parameter= #}")
    with pytest.raises(InputError, match="cannot be required in the notation qwen3_coder") as refused:
        answer(xml, tools=TOOLS, tool_choice="required")
    assert refused.value.param == "tool_choice"
    text = "<tool_call>\n<function=weather>\n<parameter=unit>\n[CF]\n</parameter>\n</function>\n</tool_call>"
    (call,) = answer(xml, tools=TOOLS, sampling={"regex": text})["tool_calls"]
    assert arguments(call)["unit"] in ("C", "F")
    xml.close()


def test_wrong_options_are_refused_by_name(tmp_path: Path) -> None:
    _, problems = read_options(Llm, {"model": "m", "reasoning": "qwen"}, "")
    assert [one.path for one in problems] == ["reasoning"]
    with pytest.raises(ConfigError, match="tool_format"):
        Llm.ports(LlmConfig(model="m", tool_format="xml"), StepContext(tmp_path))
    for option in ("tool_format", "reasoning"):
        with pytest.raises(ConfigError, match=option):
            Llm.ports(LlmConfig(model="m", task="embed", **{option: "none"}), StepContext(tmp_path))


def test_the_plan_names_the_notation_of_the_model(tmp_path: Path) -> None:
    node_of(tmp_path, "{# <tool_call> </think> #}").close()
    notes = Llm.plan_notes(LlmConfig(model="m"), StepContext(tmp_path))
    assert [note.partition(" (")[0] for note in notes] == [
        "tool calls are read in the notation hermes",
        "text up to </think> is the output reasoning",
    ]
    (tmp_path / "m/chat_template.jinja").unlink()
    several = [{"name": "default", "template": "{}"}, {"name": "tool_use", "template": "[TOOL_CALLS]"}]
    for template, format in (("<|python_tag|>", "llama3"), (several, "mistral"), (None, None)):
        (tmp_path / "m/tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
        notes = Llm.plan_notes(LlmConfig(model="m"), StepContext(tmp_path))
        assert notes == [f"tool calls are read in the notation {format} (tool_format)"] * (format is not None)
    assert Llm.plan_notes(LlmConfig(model="m", tool_format="none", reasoning="none"), StepContext(tmp_path)) == []
    (note,) = Llm.plan_notes(LlmConfig(model="some/model"), StepContext(tmp_path))
    assert note.startswith("some/model is not on this machine: ")
