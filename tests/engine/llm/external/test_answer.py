"""Chunks of a chat completion as outputs of the step."""

from __future__ import annotations

import json
from typing import Any

import pytest

from weftline.engine.llm.external.answer import TOOL_CALLS_MAX, ExternalAnswer, InvalidAnswer


def chunk(index: int = 0, finish: str | None = None, logprobs: Any = None, **delta: Any) -> bytes:
    choice = {"index": index, "delta": delta, "finish_reason": finish, "logprobs": logprobs, "stop_reason": None}
    return json.dumps({"id": "x", "object": "chat.completion.chunk", "choices": [choice], "new": [1]}).encode()


def test_texts_are_streamed_and_add_up() -> None:
    answer = ExternalAnswer(1, False)
    assert answer.add(chunk(role="assistant", content="")) == {}
    assert answer.add(chunk(content="a b")) == {"text": "a b"}
    assert not answer.finished
    assert answer.add(chunk(content=" c", finish="length")) == {"text": " c"}
    assert answer.finished
    assert answer.outputs() == {
        "text": "a b c",
        "reasoning": "",
        "tool_calls": [],
        "usage": {"prompt_tokens": None, "completion_tokens": None, "cached_tokens": None, "finish_reason": "length"},
        "logprobs": [],
        "answers": [{"index": 0, "text": "a b c", "finish_reason": "length"}],
    }


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning"])
def test_reasoning_has_two_names_and_is_an_output_of_its_own(name: str) -> None:
    answer = ExternalAnswer(1, False)
    assert answer.add(chunk(**{name: "hm"})) == {"reasoning": "hm"}
    answer.add(chunk(content="yes", finish="stop"))
    assert answer.outputs()["reasoning"] == "hm" and answer.outputs()["text"] == "yes"
    assert answer.outputs()["answers"][0]["reasoning"] == "hm"


def test_several_answers_are_collected_and_not_streamed() -> None:
    answer = ExternalAnswer(2, False)
    assert answer.add(chunk(1, content="two")) == {}
    answer.add(chunk(0, "stop", content="one"))
    assert not answer.finished
    answer.add(chunk(1, "stop"))
    assert [one["text"] for one in answer.outputs()["answers"]] == ["one", "two"]
    assert answer.outputs()["text"] == "one"


def test_tool_calls_are_put_together_from_their_parts() -> None:
    answer = ExternalAnswer(1, False)
    answer.add(chunk(tool_calls=[{"index": 0, "id": "c1", "function": {"name": "look", "arguments": ""}}]))
    answer.add(chunk(tool_calls=[{"index": 0, "function": {"arguments": '{"at":'}}]))
    answer.add(chunk(tool_calls=[{"index": 0, "function": {"arguments": "1}"}}]))
    answer.add(chunk(tool_calls=[{"index": 1, "id": "c2", "function": {"name": "go", "arguments": "{}"}}]))
    answer.add(chunk(finish="tool_calls"))
    calls = [
        {"id": "c1", "type": "function", "function": {"name": "look", "arguments": '{"at":1}'}},
        {"id": "c2", "type": "function", "function": {"name": "go", "arguments": "{}"}},
    ]
    outputs = answer.outputs()
    assert outputs["tool_calls"] == calls == outputs["answers"][0]["tool_calls"]
    assert outputs["usage"]["finish_reason"] == "tool_calls"


def test_log_probabilities_have_the_form_of_our_own_but_for_the_ids() -> None:
    answer = ExternalAnswer(1, True)
    top = [{"token": "a", "logprob": -0.5, "bytes": [97]}, {"token": "b", "logprob": -1.5, "bytes": [98]}]
    answer.add(chunk(logprobs={"content": [{"token": "a", "logprob": -0.5, "top_logprobs": top}]}, content="a"))
    answer.add(chunk(finish="stop"))
    expected = {
        "token": "a",
        "bytes": None,
        "logprob": -0.5,
        "top": top,
    }
    assert answer.outputs()["answers"][0]["logprobs"] == [expected]


@pytest.mark.parametrize(
    ("sent", "found"),
    [("stop", "stop"), ("length", "length"), ("function_call", "tool_calls"), ("content_filter",) * 2, ("eos", "stop")],
)
def test_finish_reasons_are_mapped(sent: str, found: str) -> None:
    answer = ExternalAnswer(1, False)
    answer.add(chunk(finish=sent))
    assert answer.outputs()["usage"]["finish_reason"] == found


@pytest.mark.parametrize("key", ["stop_reason", "matched_stop"])
@pytest.mark.parametrize(("value", "found"), [("END", "END"), (2, None), (None, None), ({}, None)])
def test_the_stop_string_of_a_server_is_reported(key: str, value: Any, found: str | None) -> None:
    answer = ExternalAnswer(1, False)
    answer.add(json.dumps({"choices": [{"index": 0, "finish_reason": "stop", key: value}]}).encode())
    for part in (answer.outputs()["usage"], answer.outputs()["answers"][0]):
        assert part.get("stop_string") == found


@pytest.mark.parametrize(
    ("event", "reason"),
    [
        (b"garbage", "no chunk"),
        (b"[1, 2]", "no chunk"),
        (b'{"choices": [{"delta": {"content": 5}}]}', "content"),
        (b'{"choices": [{"delta": {"content": "\xff"}}]}', "no chunk"),
        (b'{"choices": ' + b"[" * 5000, "no chunk"),
        (b'{"usage": {"prompt_tokens": "many"}}', "prompt_tokens"),
        (b'{"error": {"message": "out of memory", "code": 500}}', "out of memory"),
        (chunk(logprobs={"content": [{"token": "a", "logprob": -1, "bytes": [256]}]}), "bytes"),
        (chunk(1, content="x"), "index 1 of 1"),
        (chunk(-1, content="x"), "index -1 of 1"),
        (chunk(finish="abort"), "abort"),
    ],
)
def test_an_invalid_event_is_refused(event: bytes, reason: str) -> None:
    with pytest.raises(InvalidAnswer, match=reason):
        ExternalAnswer(1, False).add(event)


def test_the_number_of_tool_calls_is_limited() -> None:
    answer = ExternalAnswer(1, False)
    answer.add(chunk(tool_calls=[{"index": at, "id": "x"} for at in range(TOOL_CALLS_MAX)]))
    with pytest.raises(InvalidAnswer, match="tool calls"):
        answer.add(chunk(tool_calls=[{"index": TOOL_CALLS_MAX, "id": "x"}]))
