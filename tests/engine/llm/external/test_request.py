"""Bodies of chat completions, for each kind of server."""

from __future__ import annotations

import json
from typing import Any

import pytest

from weftline.engine.llm.external.options import ExternalLlmConfig
from weftline.engine.llm.external.request import chat_request
from weftline.engine.llm.external.servers import SERVERS
from weftline.errors import InputError

TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]


def body(
    inputs: dict[str, Any], server: str = "vllm", caller: str = "", seed: int | None = None, **options: Any
) -> Any:
    config = ExternalLlmConfig("m", "https://host/v1", server=server, **options)
    return json.loads(chat_request(config, inputs, b"secret", caller, seed).body)


def test_a_prompt_is_a_user_message_after_the_system_message() -> None:
    sent = body({"prompt": "hi"}, "openai", system="be brief")
    assert sent == {
        "model": "m",
        "messages": [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}],
        "stream": True,
        "stream_options": {"include_usage": True},
        "max_completion_tokens": 128,
        "temperature": 0.0,
    }


def test_messages_are_sent_as_they_are() -> None:
    messages = [{"role": "user", "content": [{"type": "text", "text": "a"}]}, {"role": "assistant", "content": "b"}]
    assert body({"messages": messages}, system="be brief")["messages"] == [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b"},
    ]


def test_openai_is_sent_only_what_differs_from_its_defaults() -> None:
    sent = body({"prompt": "hi", "sampling": {"temperature": 1, "stop": ["x"], "n": 2, "seed": 5}}, "openai")
    assert {key for key in sent if key not in ("model", "messages", "stream", "stream_options")} == {
        *("max_completion_tokens", "stop", "n", "seed"),
    }


@pytest.mark.parametrize(("server", "off"), [("vllm", -1), ("sglang", -1), ("tensorrt-llm", 0), ("weftline", 0)])
def test_servers_with_defaults_of_the_model_are_sent_every_number(server: str, off: int) -> None:
    sent = body({"prompt": "hi", "sampling": {"temperature": 1}}, server)
    wanted = {"temperature": 1, "top_p": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0, "max_tokens": 128}
    wanted |= {"top_k": off, "min_p": 0.0, "repetition_penalty": 1.0}
    assert {key: sent[key] for key in wanted} == wanted


def test_vllm_is_sent_its_own_fields() -> None:
    sampling = {
        "top_k": 5, "tokens_min": 2, "stop_token_ids": [7], "ignore_eos": True, "bad_words": ["x"],
        "allowed_token_ids": [1, 2], "skip_special_tokens": False, "logit_bias": {"3": 1.5}, "logprobs": 2,
    }  # fmt: skip
    sent = body({"prompt": "hi", "sampling": sampling})
    wanted = {"top_k": 5, "min_tokens": 2, "stop_token_ids": [7], "ignore_eos": True, "bad_words": ["x"]}
    wanted |= {"allowed_token_ids": [1, 2], "skip_special_tokens": False, "logit_bias": {"3": 1.5}}
    assert {key: sent[key] for key in wanted} == wanted
    assert (sent["logprobs"], sent["top_logprobs"]) == (True, 2)


@pytest.mark.parametrize("server", SERVERS)
def test_a_schema_is_a_response_format_everywhere(server: str) -> None:
    schema = {"type": "object", "properties": {"count": {"type": "integer"}}}
    format = body({"prompt": "hi", "sampling": {"json_schema": schema}}, server)["response_format"]
    assert format == {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, "strict": True}}
    assert body({"prompt": "hi", "sampling": {"json_object": True}}, server)["response_format"] == {
        "type": "json_object"
    }


def test_other_constraints_go_where_a_server_has_them() -> None:
    regex, choice = {"prompt": "hi", "sampling": {"regex": "a+"}}, {"prompt": "hi", "sampling": {"choice": ["a", "b"]}}
    assert body(regex)["structured_outputs"] == {"regex": "a+"}
    assert body(choice)["structured_outputs"] == {"choice": ["a", "b"]}
    assert body(regex, "sglang")["regex"] == "a+"
    assert body(regex, "tensorrt-llm")["response_format"] == {"type": "regex", "regex": "a+"}


@pytest.mark.parametrize(
    ("server", "sampling"),
    [
        *(("openai", {key: value}) for key, value in {"top_k": 3, "tokens_min": 1, "regex": "a", "echo": True}.items()),
        *((server, {"grammar": "start: x"}) for server in SERVERS),
        *((server, {"prompt_logprobs": 0}) for server in SERVERS),
        *(("ollama", {key: value}) for key, value in {"n": 2, "logprobs": 0, "logit_bias": {"1": 1}}.items()),
        ("sglang", {"choice": ["a"]}),
        ("weftline", {"regex": "a"}),
        ("vllm", {"typical_p": 0.5}),
    ],
)
def test_an_option_without_a_field_is_refused_by_name(server: str, sampling: dict[str, Any]) -> None:
    with pytest.raises(InputError, match=rf"sampling\.{next(iter(sampling))}: .* no such option") as refused:
        body({"prompt": "hi", "sampling": sampling}, server)
    assert refused.value.param == next(iter(sampling))


def test_a_seed_of_the_request_is_small_and_the_callers_own_is_kept() -> None:
    assert body({"prompt": "hi"}, seed=(1 << 61) + 5)["seed"] == 5
    assert body({"prompt": "hi", "sampling": {"seed": 1 << 40}}, seed=7)["seed"] == 1 << 40
    assert "seed" not in body({"prompt": "hi"})


def test_callers_and_tenants_share_no_cached_prefix_and_no_name_is_sent() -> None:
    salts = [
        body({"prompt": "hi"}, caller="ann")["cache_salt"],
        body({"prompt": "hi"}, caller="bob")["cache_salt"],
        body({"prompt": "hi", "tenant": "x"}, caller="ann")["cache_salt"],
        body({"prompt": "hi", "tenant": "nn"}, caller="a")["cache_salt"],
    ]
    assert len(set(salts)) == 4 and all(len(salt) == 64 for salt in salts)
    assert body({"prompt": "hi"}, caller="ann")["cache_salt"] == salts[0]
    assert "cache_salt" not in body({"prompt": "hi"})
    assert "cache_salt" not in body({"prompt": "hi"}, "openai", caller="ann")


def test_calls_in_a_conversation_keep_their_arguments_as_text() -> None:
    function = {"name": "look", "arguments": '{"at": "the sky"}'}
    call = {"id": "a", "type": "function", "function": function}
    said = [
        {"role": "user", "content": "look"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "a", "content": "blue"},
    ]
    assert body({"messages": said})["messages"][1]["tool_calls"] == [call]
    as_object = {**call, "function": {**function, "arguments": {"at": "the sky"}}}
    said[1]["tool_calls"] = [as_object]
    assert body({"messages": said})["messages"][1]["tool_calls"] == [call]


def test_tools_and_their_choice() -> None:
    named = {"type": "function", "function": {"name": "look"}}
    assert body({"prompt": "hi", "tools": TOOLS})["tools"] == TOOLS
    assert "tool_choice" not in body({"prompt": "hi", "tools": TOOLS, "tool_choice": "auto"})
    assert "tools" not in body({"prompt": "hi", "tools": TOOLS, "tool_choice": "none"})
    for choice in ("required", named):
        assert body({"prompt": "hi", "tools": TOOLS, "tool_choice": choice})["tool_choice"] == choice


def test_the_number_of_calls_is_limited_where_a_server_enforces_it() -> None:
    inputs = {"prompt": "hi", "tools": TOOLS, "parallel_tool_calls": False}
    for server in ("openai", "vllm", "sglang", "weftline"):
        assert body(inputs, server)["parallel_tool_calls"] is False
        assert "parallel_tool_calls" not in body({**inputs, "parallel_tool_calls": True}, server)
    for server in ("tensorrt-llm", "ollama"):
        with pytest.raises(InputError, match="parallel_tool_calls: the engine"):
            body(inputs, server)


@pytest.mark.parametrize(
    ("inputs", "reason"),
    [
        ({}, "neither of prompt and messages"),
        ({"prompt": "a", "messages": []}, "both of prompt and messages"),
        ({"prompt": ""}, "empty text"),
        ({"prompt": "\ud800"}, "surrogate"),
        ({"messages": [{"role": "king", "content": "a"}]}, "role"),
        ({"prompt": "a", "tools": {"a": 1}}, "tools: expected a list"),
        ({"prompt": "a", "tools": TOOLS, "tool_choice": "some"}, "tool_choice: found .some., expected auto"),
        ({"prompt": "a", "tools": [{"a": [b""]}]}, "tools: found a bytes, expected JSON"),
        ({"prompt": "a", "tool_choice": "required"}, "no tools were sent"),
        ({"prompt": "a", "tools": TOOLS, "parallel_tool_calls": 0}, "parallel_tool_calls: found 0, expected"),
        ({"prompt": "a", "tenant": "x" * 300}, "tenant: expected"),
        ({"prompt": "a", "sampling": {"top_p": 2}}, "sampling.top_p"),
    ],
)
def test_invalid_inputs_are_refused(inputs: dict[str, Any], reason: str) -> None:
    with pytest.raises(InputError, match=reason):
        body(inputs)


def test_ollama_cannot_be_made_to_call_a_tool() -> None:
    with pytest.raises(InputError, match="tool_choice: the engine"):
        body({"prompt": "hi", "tools": TOOLS, "tool_choice": "required"}, "ollama")
