"""However an answer is cut into pieces, its events add up to the response that is returned whole."""

from __future__ import annotations

from typing import Any

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from weftline.engine.serving.openai.completions import Choice, Usage
from weftline.engine.serving.openai.responses_api.answer import FunctionCall, GeneratedAnswer, message_tokens
from weftline.engine.serving.openai.responses_api.output import REASONING, TEXT, ResponseHeader, ResponseWriter

EVENTS: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
ECHO = {"model": "m", "parallel_tool_calls": True, "tool_choice": "auto", "tools": []}
HEADER = ResponseHeader(ECHO, 1, True)


def plain(value: Any) -> Any:
    return msgspec.json.decode(msgspec.json.encode(value))


def without_ids(response: Any) -> Any:
    return {**response, "output": [{**item, "id": ""} for item in response["output"]]}


def collected(events: list[Any]) -> list[Any]:
    """Return the items that a client puts together from deltas."""
    items: list[Any] = []
    for event in events:
        kind = event["type"].removeprefix("response.")
        if kind == "output_item.added":
            assert event["output_index"] == len(items)
            items.append({"type": event["item"]["type"], "text": "", "logprobs": []})
        elif kind.endswith(".delta"):
            items[event["output_index"]]["text"] += event["delta"]
            items[event["output_index"]]["logprobs"] += event.get("logprobs", ())
    return items


def token(name: str) -> bytes:
    return msgspec.json.encode({"token": name, "logprob": -1.0, "bytes": [1], "top_logprobs": []})


ANSWERS = st.builds(
    GeneratedAnswer,
    text=st.text("ab é", max_size=12),
    reasoning=st.text("xy", max_size=6),
    calls=st.lists(st.builds(FunctionCall, st.just("c"), st.just("f"), st.sampled_from(("{}", "{"))), max_size=2),
    finish=st.sampled_from(("stop", "length", "content_filter", "tool_calls")),
    usage=st.just(Usage(3, 5, 2)),
    logprobs=st.none() | st.lists(st.sampled_from("abc").map(token), max_size=5),
)


@settings(max_examples=200, deadline=None)
@given(ANSWERS, st.lists(st.integers(1, 4), max_size=12), st.booleans(), st.booleans())
def test_streamed_in_any_pieces_it_is_the_whole_response(
    answer: GeneratedAnswer, sizes: list[int], late: bool, encoded: bool
) -> None:
    whole = ResponseWriter(HEADER, encoded)
    whole.finish(answer, 2)
    streamed = ResponseWriter(HEADER, encoded)
    events = streamed.opening()
    cuts = iter(sizes)
    for kind, text in ((REASONING, answer.reasoning), (TEXT, answer.text)):
        while text and (late or kind == REASONING) and (size := next(cuts, 0)):
            events += streamed.add(kind, text[:size])
            text = text[size:]
        if text and kind == REASONING:
            events += streamed.add(kind, text)
    events += streamed.finish(answer, 2)
    assert without_ids(plain(streamed.response)) == without_ids(plain(whole.response))
    Response.model_validate(plain(streamed.response), strict=True)
    for place, event in enumerate(map(plain, events)):
        EVENTS.validate_python(event, strict=True)
        assert event["sequence_number"] == place
    items = collected(plain(events))
    for item, found in zip(plain(streamed.response)["output"], items, strict=True):
        content = item.get("content") or [{"text": item.get("arguments"), "logprobs": []}]
        assert (item["type"], content[0]["text"]) == (found["type"], found["text"])
        assert content[0].get("logprobs", []) == found["logprobs"]


def test_reasoning_that_comes_late_is_an_item_of_its_own() -> None:
    answer = GeneratedAnswer("yes", "hm, so", [], "stop", Usage())
    writer = ResponseWriter(HEADER)
    for kind, text in ((REASONING, "hm"), (TEXT, "yes"), (REASONING, ", so")):
        writer.add(kind, text)
    writer.finish(answer, 2)
    shapes = [(one["type"], one["content"][0]["text"]) for one in writer.response["output"]]
    assert shapes == [("reasoning", "hm"), ("message", "yes"), ("reasoning", ", so")]


def test_the_last_item_of_a_response_that_was_cut_is_incomplete() -> None:
    calls = [FunctionCall("c1", "f", "{}"), FunctionCall("c2", "f", '{"a')]
    for found, statuses in (([], ["incomplete"]), (calls, ["completed", "completed", "incomplete"])):
        writer = ResponseWriter(HEADER)
        writer.finish(GeneratedAnswer("yes", "", found, "length", Usage()), 2)
        assert [one["status"] for one in writer.response["output"]] == statuses
        assert writer.response["incomplete_details"] == {"reason": "max_output_tokens"}


def test_tokens_of_a_text_are_found_among_those_of_reasoning_and_calls() -> None:
    def tokens(*texts: str) -> list[dict[str, Any]]:
        return [{"token": one, "logprob": -1.0} for one in texts]

    def found(*texts: str, **fields: Any) -> list[Any]:
        return [one["token"] for one in message_tokens(Choice(0, logprobs=tokens(*texts), **fields))]

    assert found("a", "b", "<end>", text="ab") == ["a", "b"]
    assert found("<think>", "a", "b", "</think>", "\n\n", "a", "b", text="ab", reasoning="ab") == ["a", "b"]
    assert found("a", "b", "<tool_call>", "{}", text="ab", tool_calls=[{}]) == ["a", "b"]
    assert found("<tool_call>", "{}", text="", tool_calls=[{}]) == []
