"""Anthropic's messages as a chat request."""

from __future__ import annotations

import base64
import json
import time
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from tests.engine.llm import tiny
from tests.engine.serving.http.backends import info
from weftline.engine.llm.tokens import Tokens, check_messages
from weftline.engine.serving.anthropic.bodies import ConversationBody, MessagesBody
from weftline.engine.serving.anthropic.conversation import in_request, turns_of
from weftline.engine.serving.http.errors import HttpError
from weftline.engine.serving.openai.bodies import ChatBody
from weftline.engine.serving.openai.messages import chat_inputs
from weftline.engine.serving.openai.ports import ChatPorts, chat_ports
from weftline.errors import InputError

OPTIONS = {"tools": "json?", "tool_choice": "json?", "parallel_tool_calls": "json?", "sampling": "json?"}
LLM = chat_ports(info("m", {"messages": "json", "template": "json?", **OPTIONS}, {"text": "text"}))
PLAIN = chat_ports(info("m", {"messages": "json", "sampling": "json?"}, {"text": "text"}))
SEES = chat_ports(info("m", {"messages": "json", "images": "list[image]?", "sampling": "json?"}, {"text": "text"}))
MUTE = chat_ports(info("m", {"messages": "json"}, {"text": "text"}))
PNG = base64.b64encode(b"\x89PNG picture").decode()
PICTURE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": PNG}}
URL = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{PNG}"}}
SAID = [{"role": "user", "content": "hi"}]
TOOL = {"name": "f", "description": "d", "input_schema": {"type": "object"}}
FUNCTION = {"type": "function", "function": {"name": "f", "description": "d", "parameters": {"type": "object"}}}


def text(value: str) -> dict[str, Any]:
    return {"type": "text", "text": value}


def result(call: str, content: Any = "ok", **more: Any) -> dict[str, Any]:
    return {"type": "tool_result", "tool_use_id": call, "content": content, **more}


def use(call: str, **input: Any) -> dict[str, Any]:
    return {"type": "tool_use", "id": call, "name": "f", "input": input}


def chat(ports: ChatPorts = LLM, **fields: Any) -> ChatBody:
    return MessagesBody.parse({"model": "m", "max_tokens": 5, "messages": SAID} | fields).chat(ports).body


def messages_of(messages: Any, system: Any = None, ports: ChatPorts = LLM) -> Any:
    return chat_inputs(chat(ports, messages=messages, system=system), ports)["messages"]


# histories


@st.composite
def histories(draw: st.DrawFn) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return a conversation in Anthropic's form, and the same in OpenAI's."""
    words = st.text("ab <>\n{}é", min_size=1, max_size=8)
    inputs = st.dictionaries(st.sampled_from("ab"), st.integers(0, 9) | words | st.lists(words, max_size=2), max_size=2)
    system = draw(st.none() | st.lists(words, min_size=1, max_size=2))
    ours: list[dict[str, Any]] = []
    theirs = [] if system is None else [{"role": "system", "content": "".join(system)}]
    pending: list[str] = []
    for turn in range(draw(st.integers(1, 4))):
        said = draw(st.lists(words, min_size=0 if pending else 1, max_size=2))
        results = [(id, draw(words), draw(st.booleans())) for id in pending]
        blocks = [result(id, draw(st.sampled_from([one, [text(one)]])), is_error=bad) for id, one, bad in results]
        plain = not results and len(said) == 1 and draw(st.booleans())
        ours.append({"role": "user", "content": said[0] if plain else [*blocks, *map(text, said)]})
        for id, one, bad in results:
            theirs.append({"role": "tool", "tool_call_id": id, "content": f"Error: {one}" if bad else one})
        if said:
            theirs.append({"role": "user", "content": "".join(said)})
        answer, thought = draw(st.text("xyz", max_size=4)), draw(st.text("hm", max_size=3))
        pending = [f"c{turn}{place}" for place in range(draw(st.integers(0, 2)))]
        if not answer and not pending:
            answer = "x"
        called = [(id, draw(inputs)) for id in pending]
        thinking = [{"type": "thinking", "thinking": thought, "signature": "s"}] if thought else []
        answered = [text(answer)] if answer else []
        ours.append({"role": "assistant", "content": [*thinking, *answered, *(use(id, **one) for id, one in called)]})
        message: dict[str, Any] = {"role": "assistant", "content": answer or None}
        if thought:
            message["reasoning_content"] = thought
        if called:
            message["tool_calls"] = [
                {"id": id, "type": "function", "function": {"name": "f", "arguments": json.dumps(one)}}
                for id, one in called
            ]
        theirs.append(message)
    ours.append({"role": "user", "content": [*(result(id) for id in pending), text("on")]})
    theirs += [{"role": "tool", "tool_call_id": id, "content": "ok"} for id in pending]
    theirs.append({"role": "user", "content": "on"})
    return {"system": [text(one) for one in system] if system else None, "messages": ours}, theirs


@pytest.fixture(scope="module")
def rendering() -> list[Tokens]:
    """Return tokenizers with the chat templates of several models."""
    folder = Path(__file__).parents[2] / "llm/templates"
    found = []
    for name in ("qwen3", "hermes", "glm"):
        tokenizer = tiny.tokenizer()
        tokenizer.chat_template = (folder / f"{name}.jinja").read_text()
        found.append(Tokens(tokenizer, 1 << 20))
    return found


@settings(max_examples=60, deadline=None)
@given(both=histories())
def test_a_history_renders_the_same_prompt_as_in_openais_form(rendering: list[Tokens], both: Any) -> None:
    anthropic, openai = both
    ours = chat_inputs(chat(tools=[TOOL], **anthropic), LLM)
    theirs = chat_inputs(ChatBody.parse({"model": "m", "messages": openai, "tools": [FUNCTION]}), LLM)
    assert check_messages(ours["messages"]) == check_messages(theirs["messages"]) and ours["tools"] == theirs["tools"]
    for tokens in rendering:
        assert tokens.chat(ours["messages"], ours["tools"]) == tokens.chat(theirs["messages"], theirs["tools"])


def test_consecutive_messages_of_a_role_are_one() -> None:
    said = [
        {"role": "user", "content": "a"},
        {"role": "user", "content": [PICTURE, text("b")]},
        {"role": "user", "content": "c"},
        {"role": "assistant", "content": [text("d"), use("1", a=1)]},
        {"role": "assistant", "content": [{"type": "thinking", "thinking": "hm"}, use("2", a=2)]},
        {"role": "user", "content": [result("1"), result("2")]},
        {"role": "user", "content": "e"},
        {"role": "user", "content": "f"},
    ]
    user, assistant, *results, last = messages_of(said, ports=SEES)
    assert user["content"] == [text("a"), URL, text("b"), text("\n\n"), text("c")]
    assert assistant["content"] == "d" and assistant["reasoning_content"] == "hm"
    assert [one["id"] for one in assistant["tool_calls"]] == ["1", "2"]
    assert [one["tool_call_id"] for one in results] == ["1", "2"]
    assert last == {"role": "user", "content": "e\n\nf"}


def test_a_long_message_before_many_is_copied_once() -> None:
    thought, parts = "x" * 10_000_000, [text("a")] * 20_000
    long = [{"type": "thinking", "thinking": thought}, *parts]
    more = [{"role": "assistant", "content": [{"type": "thinking", "thinking": "b"}, text("c")]}] * 1000
    began = time.process_time()
    [turn] = turns_of([{"role": "assistant", "content": long}, *more])
    assert time.process_time() - began < 0.5
    assert turn.message["reasoning_content"] == thought + "b" * 1000
    assert len(turn.message["content"]) == len(turn.parts) == 22_000


def test_pictures_of_a_result_move_to_the_next_user_message() -> None:
    said = [{"role": "user", "content": [text("look"), result("1", [text("a"), PICTURE])]}]
    assert messages_of(said, ports=SEES) == [
        {"role": "tool", "tool_call_id": "1", "content": "a"},
        {"role": "user", "content": [URL, text("look")]},
    ]


def test_keys_without_effect_are_accepted() -> None:
    mark = {"type": "ephemeral", "ttl": "1h"}
    said = [
        {"role": "user", "content": [text("hi") | {"cache_control": mark, "citations": None}]},
        {"role": "assistant", "content": [{"type": "redacted_thinking", "data": "x"}, text("a") | {"citations": []}]},
        {"role": "assistant", "content": [use("1") | {"caller": {"type": "direct"}, "toolset_name": None}]},
        {"role": "user", "content": [result("1", None, cache_control=mark)]},
        {"role": "system", "content": "be short"},
        {"role": "user", "content": [PICTURE | {"transformations": {"oversized_image": "downsize"}}]},
    ]
    found = messages_of(said, [text("s") | {"cache_control": mark}], SEES)
    assert [one["role"] for one in found] == ["system", "user", "assistant", "tool", "system", "user"]
    assert found[3]["content"] == "" and found[2]["content"] == "a"
    assert messages_of(SAID, "") == messages_of(SAID, []) == SAID


def user(*blocks: Any) -> Any:
    return [{"role": "user", "content": list(blocks)}]


def assistant(*blocks: Any) -> Any:
    return [*SAID, {"role": "assistant", "content": list(blocks)}]


SOURCE = PICTURE["source"]


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([], "messages: expected a list of 1 to"),
        ("hi", "messages: expected a list"),
        (["hi"], "messages[0]: expected an object with a role of user, assistant or system"),
        ([{"role": "tool", "content": "x"}], "messages[0]: expected an object with a role"),
        ([{"role": "user", "content": "x", "name": "n"}], "messages[0].name: unknown field"),
        ([{"role": "user"}], "messages[0].content: expected a text, or a list of blocks"),
        (user("x"), "messages[0].content[0]: expected a block of type text, image, tool_result"),
        (user({"type": "document"}), "messages[0].content[0].type: 'document' is not supported by this server"),
        (user({"type": "search_result"}), "'search_result' is not supported"),
        (user({"type": "container_upload"}), "'container_upload' is not supported"),
        (user(use("1")), "messages[0].content[0].type: 'tool_use' has no place here"),
        (assistant(result("1")), "messages[1].content[0].type: 'tool_result' has no place here"),
        (assistant({"type": "server_tool_use"}), "'server_tool_use' is not supported"),
        (user(text("a") | {"citations": [{}]}), "content[0].citations: not supported by this server; leave it out"),
        (user(text("a") | {"citation": []}), "content[0].citation: unknown field; did you mean citations?"),
        (user({"type": "text", "text": 5}), "messages[0].content[0].text: expected a text"),
        (assistant({"type": "thinking"}), "messages[1].content[0].thinking: expected a text"),
        (assistant({"type": "tool_use", "id": "1", "name": "f"}), "messages[1].content[0].input: expected an object"),
        (assistant({"type": "tool_use", "name": "f", "input": {}}), "content[0].id: expected a text"),
        (assistant(use("1") | {"caller": {"type": "code_execution_20250825"}}), "content[0].caller: not supported"),
        (user({"type": "tool_result"}), "content[0].tool_use_id: expected a text"),
        (user(result("1", is_error="yes")), "content[0].is_error: expected true or false"),
        (user(result("1", [{"type": "document"}])), "messages[0].content[0].content[0].type: 'document'"),
        (user(result("1", [{"type": "tool_reference"}])), "'tool_reference' is not supported"),
        (
            user(PICTURE | {"source": {"type": "url", "url": "https://a.org/b.png"}}),
            "[0].source.url: this server fetch",
        ),
        (user(PICTURE | {"source": {"type": "file", "file_id": "f"}}), "this server keeps no files"),
        (user(PICTURE | {"source": SOURCE | {"media_type": "image/tiff"}}), "content[0].source: expected data"),
        (user(PICTURE | {"source": "x"}), "content[0].source: expected an object of type base64"),
        (
            user(PICTURE | {"transformations": {"oversized_image": "error"}}),
            "content[0].transformations: not supported",
        ),
        (assistant(use("1")), "messages[1]: found tool_use without a tool_result after it"),
    ],
)
def test_a_wrong_block_is_refused_with_its_place(messages: Any, message: str) -> None:
    with pytest.raises(HttpError) as refused:
        chat(messages=messages)
    assert message in str(refused.value) and str(refused.value).startswith("messages")
    assert refused.value.param == "messages"


def test_errors_of_the_chat_have_the_places_of_the_request() -> None:
    said = [
        {"role": "user", "content": [result("1"), result("2", [text("x"), PICTURE]), text("y"), PICTURE]},
        {"role": "user", "content": "z"},
    ]
    turns = turns_of(said, "s")
    for found, place in (
        ("messages[0].content", "system"),
        ("messages[1].content", "messages[0].content[0]"),
        ("messages[2]", "messages[0].content[1]"),
        ("messages[3].content[0].image_url.url", "messages[0].content[1].content[1].source"),
        ("messages[3].content[2].image_url.url", "messages[0].content[3].source"),
        ("messages[3].content[3]", "messages[1].content"),
        ("messages[3]", "messages[0]"),
        ("messages[9]", "messages[9]"),
    ):
        assert in_request(f"a {found}: b", turns) == f"a {place}: b"
    ports = chat_ports(info("m", {"messages": "json", "photo": "image?", **OPTIONS}, {"text": "text"}))
    broken = PICTURE | {"source": SOURCE | {"data": "%%%"}}
    fields = {"model": "m", "max_tokens": 1, "messages": user(result("1"), broken)}
    read = MessagesBody.parse(fields).chat(ports)
    named = r"^messages\[0\].content\[1\].source: found no valid base64"
    with pytest.raises(InputError, match=named), read.naming_fields():
        chat_inputs(read.body, ports)


# fields


@pytest.mark.parametrize(
    ("fields", "inputs"),
    [
        ({}, {"tools": [FUNCTION]}),
        ({"tool_choice": {"type": "auto"}}, {"tools": [FUNCTION]}),
        ({"tool_choice": {"type": "any"}}, {"tools": [FUNCTION], "tool_choice": "required"}),
        (
            {"tool_choice": {"type": "tool", "name": "f", "disable_parallel_tool_use": True}},
            {
                "tools": [FUNCTION],
                "tool_choice": {"type": "function", "function": {"name": "f"}},
                "parallel_tool_calls": False,
            },
        ),
        ({"tool_choice": {"type": "none"}}, {}),
        ({"tools": []}, {}),
        (
            {"tools": [TOOL | {"type": "custom", "strict": True, "cache_control": {}, "eager_input_streaming": True}]},
            {"tools": [{"type": "function", "function": FUNCTION["function"] | {"strict": True}}]},
        ),
    ],
)
def test_tools_become_functions(fields: Any, inputs: Any) -> None:
    assert chat_inputs(chat(**{"tools": [TOOL]} | fields), LLM) == {"messages": SAID} | inputs


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"tools": "x"}, "tools: expected a list of at most 128"),
        ({"tools": ["x"]}, "tools[0]: expected an object"),
        ({"tools": [{"type": "web_search_20260209"}]}, "tools[0].type: found 'web_search_20260209', expected custom"),
        ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "tools[0].type: found 'bash_20250124'"),
        ({"tools": [TOOL | {"name": ""}]}, "tools[0].name: expected a text of 1 to 256"),
        ({"tools": [{"name": "f"}]}, "tools[0].input_schema: expected an object"),
        ({"tools": [TOOL | {"description": 5}]}, "tools[0].description: expected a text"),
        ({"tools": [TOOL | {"defer_loading": True}]}, "tools[0].defer_loading: not supported by this server"),
        ({"tools": [TOOL | {"parameters": {}}]}, "tools[0].parameters: unknown field"),
        ({"tool_choice": "any"}, "tool_choice: expected an object with a type of auto"),
        ({"tool_choice": {"type": "tool"}}, "tool_choice.name: expected a text"),
        ({"tool_choice": {"type": "any", "disable_parallel_tool_use": 1}}, "disable_parallel_tool_use: expected true"),
        ({"tool_choice": {"type": "any", "names": []}}, "tool_choice.names: unknown field"),
        ({"system": 5}, "system: expected a text, or a list of blocks"),
        ({"system": [PICTURE]}, "system[0].type: 'image' has no place here; expected text"),
        ({"thinking": True}, "thinking: found None, expected an object of type enabled"),
        ({"thinking": {"type": "between_tools"}}, "thinking: found 'between_tools'"),
        ({"thinking": {"type": "enabled"}}, "thinking.budget_tokens: expected a whole number"),
        ({"thinking": {"type": "adaptive", "display": "all"}}, "thinking.display: expected summarized or omitted"),
        ({"output_config": 5}, "output_config: expected an object"),
        ({"output_config": {"effort": "extreme"}}, "output_config.effort: expected low"),
        ({"output_config": {"task_budget": {}}}, "output_config.task_budget: not supported"),
        ({"output_config": {"format": {"type": "text"}}}, "output_config.format: expected an object of type"),
        ({"output_format": {"type": "json_schema"}}, "output_format.schema: expected an object"),
        (
            {"output_format": {"type": "json_schema", "schema": {}}, "output_config": {"format": {}}},
            "output_format: found output_config.format too",
        ),
    ],
)  # fmt: skip
def test_a_wrong_value_is_refused_by_the_name_of_its_field(fields: Any, message: str) -> None:
    with pytest.raises(HttpError) as refused:
        chat(**fields)
    assert message in str(refused.value)
    assert refused.value.param == next(iter(fields))


ON, OFF = {"enable_thinking": True, "thinking": True}, {"enable_thinking": False, "thinking": False}


@pytest.mark.parametrize(
    ("fields", "template"),
    [
        ({}, {}),
        ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, {"variables": ON}),
        ({"thinking": {"type": "adaptive", "display": "omitted"}}, {"variables": ON}),
        ({"thinking": {"type": "disabled"}}, {"reasoning_effort": "none"}),
        ({"output_config": {"effort": "high"}}, {"variables": {"reasoning_effort": "high"}}),
        ({"output_config": {"effort": "low"}}, {"reasoning_effort": "low"}),
        (
            {"thinking": {"type": "adaptive"}, "output_config": {"effort": "max"}},
            {"variables": ON, "reasoning_effort": "max"},
        ),
        (
            {"thinking": {"type": "disabled"}, "output_config": {"effort": "low"}},
            {"variables": OFF, "reasoning_effort": "low"},
        ),
        ({"thinking": {"type": "disabled"}, "output_config": {"effort": "high"}}, {"reasoning_effort": "none"}),
        ({"chat_template_kwargs": {"a": 1}, "thinking": {"type": "adaptive"}}, {"variables": ON | {"a": 1}}),
        (
            {"messages": [*SAID, {"role": "assistant", "content": "The"}]},
            {"continue_final_message": True, "add_generation_prompt": False},
        ),
    ],
)
def test_thinking_effort_and_a_begun_answer_reach_the_template(fields: Any, template: Any) -> None:
    assert chat(**fields).template() == template


@pytest.mark.parametrize("kind", ["adaptive", "disabled"])
@pytest.mark.parametrize("effort", [None, "high"])
def test_defaults_of_anthropic_need_no_input_for_the_template(kind: str, effort: str | None) -> None:
    found = chat(PLAIN, thinking={"type": kind}, output_config={"effort": effort}).template()
    assert found == ({"reasoning_effort": "none"} if kind == "disabled" else {})


def test_sampling_and_formats_become_options_of_the_step() -> None:
    schema = {"type": "object"}
    fields = {"temperature": 0.5, "top_p": 0.9, "top_k": 3, "stop_sequences": ["END"], "priority": 2}
    for format in ({"output_config": {"format": {"type": "json_schema", "schema": schema}}},
                   {"output_format": {"type": "json_schema", "schema": schema}}):  # fmt: skip
        body = chat(**fields, **format)
        options = {"temperature": 0.5, "top_p": 0.9, "top_k": 3, "stop": ["END"], "tokens_max": 5}
        assert body.sampling() == options | {"json_schema": schema}
        assert body.priority == 2


def test_a_model_without_sampling_is_refused_with_the_remedy() -> None:
    with pytest.raises(HttpError, match=r"max_tokens: model m has no sampling options.*adds an input `sampling: json`"):
        chat(MUTE)
    assert ConversationBody.parse({"model": "m", "messages": SAID}).chat(MUTE)
