"""The stock `anthropic` client against llm steps. Models are random, their calls forced."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import httpx
import pytest

from tests.engine.serving.anthropic.test_messages import unsigned
from tests.engine.serving.http.hosted import Hosted
from tests.engine.serving.openai.test_tool_calls import SCHEMA, hosted_callers

WEATHER: Any = {"name": "weather", "input_schema": SCHEMA, "strict": True}
TOOLS: Any = [WEATHER, {"name": "stop", "input_schema": {"type": "object"}}]
NAMED: Any = {"type": "tool", "name": "weather", "disable_parallel_tool_use": True}
SAID: Any = [{"role": "user", "content": "Will it rain?"}]
FRAMEWORKS = Path(__file__).parents[4] / "build/frameworks/bin/python"

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def endpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosted]:
    with hosted_callers(tmp_path_factory.mktemp("pipelines")) as endpoint:
        yield endpoint


def create(client: anthropic.Anthropic, **fields: Any) -> Any:
    return client.messages.create(**{"model": "calls", "max_tokens": 200, "messages": SAID} | fields)


def streamed(client: anthropic.Anthropic, **fields: Any) -> Any:
    with client.messages.stream(**{"model": "calls", "max_tokens": 200, "messages": SAID} | fields) as stream:
        return stream.get_final_message()


def alike(one: Any, other: Any) -> bool:
    """Return True for messages that differ only in ids and in what the prefix cache had."""
    found = []
    for message in (one, other):
        body = unsigned(message)
        for block in body["content"]:
            block.pop("id", None)
        usage = body["usage"]
        body["usage"] = (usage["input_tokens"] + usage["cache_read_input_tokens"], usage["output_tokens"])
        found.append(body)
    return found[0] == found[1]


@pytest.mark.parametrize("choice", [NAMED, {"type": "any", "disable_parallel_tool_use": True}])
def test_a_forced_call_is_returned_whole_and_streamed(client: anthropic.Anthropic, choice: Any) -> None:
    whole = create(client, tools=[WEATHER], tool_choice=choice)
    [call] = whole.content
    assert (whole.stop_reason, call.type, call.name) == ("tool_use", "tool_use", "weather") and call.id
    assert call.input["unit"] in ("C", "F") and 1 <= call.input["days"] <= 9
    assert alike(streamed(client, tools=[WEATHER], tool_choice=choice), whole)


@pytest.mark.parametrize("max_tokens", [1, 20, 40, 55, 60])
def test_a_forced_call_that_is_cut_leaves_no_notation(client: anthropic.Anthropic, max_tokens: int) -> None:
    asked: Any = {"tools": TOOLS, "tool_choice": NAMED, "max_tokens": max_tokens}
    whole = create(client, **asked)
    assert whole.stop_reason == "max_tokens" and whole.usage.output_tokens == max_tokens
    assert [one.type for one in whole.content] == ["text" if max_tokens < 40 else "tool_use"]
    for block in whole.content:
        assert block.type == "tool_use" or block.text == ""
        assert block.type == "text" or set(block.input) <= {"unit", "days"}
    assert alike(streamed(client, **asked), whole)


def test_a_conversation_goes_on_with_the_result_of_a_call(client: anthropic.Anthropic) -> None:
    first = create(client, tools=TOOLS, tool_choice=NAMED)
    result = {"type": "tool_result", "tool_use_id": first.content[0].id, "content": "rain", "is_error": False}
    messages = [*SAID, first.to_param(), {"role": "user", "content": [result, {"type": "text", "text": "And?"}]}]
    second = create(client, messages=messages, tools=TOOLS, tool_choice={"type": "none"}, max_tokens=4)
    assert second.stop_reason == "max_tokens" and [one.type for one in second.content] == ["text"]


def test_thinking_is_a_block_and_is_switched_in_the_prompt(client: anthropic.Anthropic) -> None:
    asked: Any = {"model": "thinks", "max_tokens": 8}
    whole = create(client, **asked)
    [block] = whole.content
    assert block.type == "thinking" and block.thinking and block.signature
    assert alike(streamed(client, **asked), whole)
    omitted = streamed(client, thinking={"type": "adaptive", "display": "omitted"}, **asked)
    assert [(one.type, one.thinking) for one in omitted.content] == [("thinking", "")]
    counts = [
        client.messages.count_tokens(model="calls", messages=SAID, thinking=one).input_tokens
        for one in ({"type": "adaptive"}, {"type": "disabled"})
    ]
    assert counts[0] < counts[1]


def test_a_prompt_has_the_tokens_of_its_chat(client: anthropic.Anthropic, endpoint: Hosted) -> None:
    counted = client.messages.count_tokens(model="calls", messages=SAID, system="Be short.", tools=TOOLS).input_tokens
    functions = [
        {"type": "function", "function": {"name": "weather", "strict": True, "parameters": SCHEMA}},
        {"type": "function", "function": {"name": "stop", "parameters": {"type": "object"}}},
    ]
    chat = {"messages": [{"role": "system", "content": "Be short."}, *SAID], "tools": functions}
    found = httpx.post(f"{endpoint.url}/tokenize", json={"model": "calls", **chat}).json()
    usage = create(client, system="Be short.", tools=TOOLS, max_tokens=1).usage
    assert counted == found["count"] == usage.input_tokens + usage.cache_read_input_tokens
    again = create(client, system="Be short.", tools=TOOLS, max_tokens=1).usage
    assert again.cache_read_input_tokens > 0 and again.input_tokens < counted


@pytest.mark.parametrize("stream", [False, True])
def test_the_stop_sequence_that_ended_the_answer_is_named(client: anthropic.Anthropic, stream: bool) -> None:
    ask = streamed if stream else create
    text = create(client, max_tokens=12).content[0].text
    word = text[4:6]
    found = ask(client, max_tokens=12, stop_sequences=["no such text", word])
    assert (found.stop_reason, found.stop_sequence) == ("stop_sequence", word)
    assert found.content[0].text == text[: text.index(word)]


def test_an_answer_has_the_json_of_a_schema_and_continues_one(client: anthropic.Anthropic) -> None:
    format: Any = {"format": {"type": "json_schema", "schema": SCHEMA}}
    found = json.loads(create(client, output_config=format).content[0].text)
    assert found["unit"] in ("C", "F") and 1 <= found["days"] <= 9
    begun = [*SAID, {"role": "assistant", "content": "It will"}]
    plain = client.messages.count_tokens(model="calls", messages=SAID).input_tokens
    assert create(client, messages=begun, max_tokens=2).stop_reason == "max_tokens"
    assert client.messages.count_tokens(model="calls", messages=begun).input_tokens > plain


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"temperature": -1}, "temperature: "),
        ({"stop_sequences": [5]}, "stop_sequences: "),
        ({"output_config": {"format": {"type": "json_schema", "schema": {"type": "no type"}}}}, "output_config: "),
        ({"output_format": {"type": "json_schema", "schema": {"type": "no type"}}}, "output_format: "),
        ({"output_config": {"effort": "low"}, "model": "thinks"}, "output_config: "),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs: "),
        ({"messages": [{"role": "user", "content": "x " * 600}]}, "messages: "),
        ({"tools": [{"name": "f", "input_schema": {"properties": {"a": {"pattern": "("}}}}],
          "tool_choice": {"type": "any"}}, "tools: "),
    ],
)  # fmt: skip
@pytest.mark.parametrize("stream", [False, True])
def test_the_field_that_the_step_refuses_is_named(
    client: anthropic.Anthropic, fields: Any, named: str, stream: bool
) -> None:
    with pytest.raises(anthropic.BadRequestError) as refused:
        (streamed if stream else create)(client, extra_body=fields)
    assert str(refused.value.api_message).startswith(named)


def test_langchain_chats_streams_calls_and_thinks(endpoint: Hosted) -> None:
    if not FRAMEWORKS.exists():
        pytest.skip("build/frameworks is not installed: make setup-slow")
    script = Path(__file__).parent / "langchain_script.py"
    settings = os.environ | {"LANGSMITH_TRACING": "false"}
    ended = subprocess.run(
        [FRAMEWORKS, script, endpoint.url], env=settings, capture_output=True, text=True, timeout=100, check=False
    )
    assert ended.returncode == 0, ended.stderr[-2000:]
    found = json.loads(ended.stdout)
    assert found["whole"] == found["streamed"] != "" and found["stop"] == "max_tokens"
    assert found["usage"]["output_tokens"] == 40 and found["usage"]["input_tokens"] > 10
    [call] = found["calls"]
    assert call["name"] == "weather" and call["args"]["unit"] in ("C", "F")
    assert found["shaped"]["unit"] in ("C", "F")  # the client sends no bounds of numbers
    assert found["after"] and found["again"]
    assert found["thinking"] == ["thinking"]
