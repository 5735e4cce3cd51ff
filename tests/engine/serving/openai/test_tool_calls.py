"""Tool calls and reasoning of llm steps, through the stock `openai` client. Models are random, their calls forced."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import openai
import pytest
from transformers import AddedToken

from tests.engine.llm import tiny
from tests.engine.serving.http.hosted import Hosted, hosted_pipelines
from weftline.engine.serving.config import ServedPipeline

TEMPLATE = (Path(__file__).parents[2] / "llm/templates/qwen3.jinja").read_text()
CHAT = """
weftline: 1
name: {name}
inputs:
  messages: json
  tools: {{type: json, optional: true}}
  tool_choice: {{type: json, optional: true}}
  parallel_tool_calls: {{type: json, optional: true}}
  sampling: {{type: json, optional: true}}
  template: {{type: json, optional: true}}
steps:
  answer:
    node: llm
    model: {name}
    kv_bytes: 16777216
    sampling: {{tokens_max: 200, temperature: 1, seed: 3}}
    inputs: {{messages: messages, tools: tools, tool_choice: tool_choice, parallel_tool_calls: parallel_tool_calls,
              sampling: sampling, template: template}}
outputs: {{text: answer.text, reasoning: answer.reasoning, tool_calls: answer.tool_calls, usage: answer.usage,
           answers: answer.answers}}
"""
SWITCH = "{%- if enable_thinking is defined and not enable_thinking %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}"
SCHEMA = {
    "type": "object",
    "properties": {"unit": {"enum": ["C", "F"]}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["unit", "days"],
    "additionalProperties": False,
}
WEATHER: Any = {"type": "function", "function": {"name": "weather", "parameters": SCHEMA, "strict": True}}
TOOLS: Any = [WEATHER, {"type": "function", "function": {"name": "stop", "strict": True}}]
NAMED: Any = {"type": "function", "function": {"name": "weather"}}
SAID: Any = [{"role": "user", "content": "Will it rain?"}]

pytestmark = pytest.mark.slow


def tokenizer() -> Any:
    words = tiny.tokenizer(added=())
    words.add_tokens([AddedToken(name) for name in ("<tool_call>", "</tool_call>", "<think>", "</think>")])
    return words


@contextmanager
def hosted_callers(folder: Path, **config: Any) -> Iterator[Hosted]:
    """Serve `calls`, and `thinks`, whose template begins a thought. config: changes of their configuration."""
    words = tokenizer()
    for name, end in (("calls", SWITCH), ("thinks", "{{- '<think>\\n' }}")):
        words.chat_template = TEMPLATE + end
        file = tiny.save(folder / name, words) / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | config))
        (folder / f"{name}.yaml").write_text(CHAT.format(name=name))
    served = {name: ServedPipeline(folder / f"{name}.yaml") for name in ("calls", "thinks")}
    with hosted_pipelines(served) as endpoint:
        yield endpoint


@pytest.fixture(scope="module")
def endpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosted]:
    with hosted_callers(tmp_path_factory.mktemp("pipelines")) as endpoint:
        yield endpoint


@pytest.mark.parametrize(
    "body", [{"chat_template_kwargs": {"enable_thinking": False}}, {"reasoning_effort": "none"}], ids=str
)
def test_reasoning_is_switched_off_in_the_prompt(client: openai.OpenAI, body: Any) -> None:
    asked: Any = {"model": "calls", "messages": SAID, "max_tokens": 1}
    plain, off = (client.chat.completions.create(extra_body=one, **asked).usage for one in ({}, body))
    assert plain is not None and off is not None
    assert off.prompt_tokens > plain.prompt_tokens


def check_weather(message: Any) -> None:
    """Check that a message is one call of `weather` that fits its schema."""
    assert not message.content and len(message.tool_calls) == 1
    [call] = message.tool_calls
    assert (call.type, call.function.name) == ("function", "weather") and call.id
    arguments = json.loads(call.function.arguments)
    assert arguments["unit"] in ("C", "F") and 1 <= arguments["days"] <= 9


@pytest.mark.parametrize("choice", [NAMED, "required"])
def test_a_forced_call_is_returned_whole_and_streamed(client: openai.OpenAI, choice: Any) -> None:
    asked: dict[str, Any] = {"model": "calls", "messages": SAID, "tool_choice": choice, "parallel_tool_calls": False}
    tools = TOOLS if choice == NAMED else [WEATHER]
    whole = client.chat.completions.create(tools=tools, **asked)
    assert whole.choices[0].finish_reason == "tool_calls" and whole.choices[0].message.content is None
    check_weather(whole.choices[0].message)
    with client.chat.completions.stream(tools=tools, **asked) as stream:
        streamed = stream.get_final_completion()
    assert streamed.choices[0].finish_reason == "tool_calls"
    check_weather(streamed.choices[0].message)
    calls = [
        [
            (one.id, one.function.arguments)
            for one in answer.choices[0].message.tool_calls or ()
            if one.type == "function"
        ]
        for answer in (whole, streamed)
    ]
    assert calls[0] == calls[1]


@pytest.mark.parametrize("stream", [False, True])
def test_each_of_several_answers_has_its_calls(client: openai.OpenAI, stream: bool) -> None:
    asked: dict[str, Any] = {"model": "calls", "messages": SAID, "tools": TOOLS, "tool_choice": NAMED, "n": 3}
    asked["parallel_tool_calls"] = False
    if stream:
        with client.chat.completions.stream(**asked) as found:
            choices: Any = found.get_final_completion().choices
    else:
        choices = client.chat.completions.create(**asked).choices
    assert [one.index for one in choices] == [0, 1, 2]
    for one in choices:
        check_weather(one.message)
        assert one.finish_reason == "tool_calls"
    assert len({one.message.tool_calls[0].id for one in choices}) == 3


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_is_a_call_or_json_of_the_schema(client: openai.OpenAI, stream: bool) -> None:
    schema = {"type": "object", "properties": {"n": {"enum": [7]}}, "required": ["n"], "additionalProperties": False}
    asked: dict[str, Any] = {"model": "calls", "messages": SAID, "tools": TOOLS, "parallel_tool_calls": False}
    asked["response_format"] = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}
    asked["temperature"] = 100
    kinds = set()
    for seed in range(12):
        if stream:
            with client.chat.completions.stream(seed=seed, **asked) as found:
                message: Any = found.get_final_completion().choices[0].message
        else:
            message = client.chat.completions.create(seed=seed, **asked).choices[0].message
        kinds.add(bool(message.tool_calls))
        assert message.tool_calls or json.loads(message.content) == {"n": 7}
    assert kinds == {True, False}


def test_the_conversation_goes_on_with_the_result_of_a_call(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": "calls", "tools": TOOLS}
    first = client.chat.completions.create(messages=SAID, tool_choice=NAMED, parallel_tool_calls=False, **asked)
    message = first.choices[0].message
    result = {"role": "tool", "tool_call_id": (message.tool_calls or [])[0].id, "content": "rain"}
    messages = [*SAID, message.model_dump(exclude_none=True), result]
    second = client.chat.completions.create(messages=messages, tool_choice="none", max_tokens=4, **asked)
    assert second.choices[0].finish_reason == "length" and second.choices[0].message.tool_calls is None
    assert second.usage and first.usage and second.usage.prompt_tokens > 20


@pytest.mark.parametrize("stream", [False, True])
def test_reasoning_comes_apart_and_before_a_forced_call(client: openai.OpenAI, stream: bool) -> None:
    end = tokenizer().convert_tokens_to_ids("</think>")
    asked: dict[str, Any] = {"model": "thinks", "messages": SAID, "tools": TOOLS, "tool_choice": NAMED}
    asked |= {"parallel_tool_calls": False, "logit_bias": {str(end): 4}, "stream": stream}
    message = client.chat.completions.create(**asked)
    if not stream:
        check_weather(message.choices[0].message)
        assert message.choices[0].message.model_extra["reasoning_content"]
        return
    deltas = [chunk.choices[0].delta for chunk in message]
    kinds = [
        "reasoning" if (one.model_extra or {}).get("reasoning_content") else "call" if one.tool_calls else ""
        for one in deltas
    ]
    assert kinds.count("reasoning") > 1 and kinds.count("call") == 2
    assert kinds.index("call") > len(kinds) - 1 - kinds[::-1].index("reasoning")


def test_an_answer_that_never_ends_its_reasoning_has_no_content(client: openai.OpenAI) -> None:
    found = client.chat.completions.create(model="thinks", messages=SAID, max_tokens=8).choices[0]
    assert found.message.content == "" and found.finish_reason == "length"
    assert found.message.model_extra["reasoning_content"]
    plain = client.chat.completions.create(model="calls", messages=SAID, max_tokens=8).choices[0]
    assert plain.message.content and not plain.message.model_extra


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tool_choice": {"type": "function", "function": {"name": "g"}}}, "tool_choice"),
        ({"tool_choice": "required", "response_format": {"type": "json_object"}}, "tool_choice"),
        (
            {
                "tool_choice": "required",
                "tools": [
                    {
                        "type": "function",
                        "function": {"name": "f", "parameters": {"properties": {"a": {"pattern": "("}}}},
                    }
                ],
            },
            "tools",
        ),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_the_field_that_the_step_refuses_is_named(
    client: openai.OpenAI, fields: dict[str, Any], param: str, stream: bool
) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(model="calls", messages=SAID, stream=stream, **{"tools": TOOLS, **fields})
    assert refused.value.param == param and "sampling.grammar" not in str(refused.value)
