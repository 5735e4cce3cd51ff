"""The Responses API through the stock `openai` client, against models that are functions."""

from __future__ import annotations

import asyncio
import hashlib
import json
import math
import time
from collections.abc import AsyncGenerator, Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from openai.types.responses import Response, ResponseItemList, ResponseStreamEvent
from pydantic import TypeAdapter

from tests.engine.serving.http.backends import Functions, chatting, info
from tests.engine.serving.http.hosted import Hosted, hosted
from weftline.engine.result import StreamedOutput
from weftline.engine.serving.auth.gate import Gate
from weftline.engine.serving.auth.tokens import TokenFile
from weftline.engine.serving.backend import Ask
from weftline.engine.serving.config import ServeLimits
from weftline.engine.serving.json_jobs import Write
from weftline.engine.serving.json_queue import JsonQueue
from weftline.engine.serving.openai.responses_api.items import encoded_reasoning
from weftline.errors import ContextOverflow, InputError, LimitReached, StepError

USAGE = {"prompt_tokens": 3, "completion_tokens": 5, "cached_tokens": 2, "reasoning_tokens": 4, "finish_reason": "stop"}
CALLS = [
    {"id": f"call_{name}", "type": "function", "function": {"name": name, "arguments": '{"city": "Bergen"}'}}
    for name in ("f", "g")
]
TOOLS: Any = [
    {"type": "function", "name": name, "parameters": {"type": "object"}, "strict": False} for name in ("f", "g")
]
SCHEMA: dict[str, Any] = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
PICTURE = "data:image/png;base64,iVBORw0KGgo="
ERRORS: dict[str, BaseException] = {
    "long": ContextOverflow("step answer: prompt: found 900 tokens, expected at most 511; shorten it", param="prompt"),
    "input": InputError("step answer: sampling.tokens_max: found 0, expected at least 1", param="tokens_max"),
    "busy": LimitReached("the queue is full", retry_after_s=0.25),
    "broken": StepError("0xdeadbeef at /secret/model.py", "answer"),
}


def token(text: str) -> dict[str, Any]:
    return {"id": 1, "token": text, "logprob": -0.5, "bytes": list(text.encode()), "top": [
        {"id": 2, "token": "x", "logprob": -math.inf, "bytes": None}
    ]}  # fmt: skip


def said(ask: Ask) -> dict[str, Any]:
    """Answer with the number of messages and the last one's text; 'think' and tools add reasoning and calls."""
    last = ask.inputs["messages"][-1]["content"]
    text = f"{len(ask.inputs['messages'])}: {last if isinstance(last, str) else 'picture'}"
    reasoning = "hm, hm" if last == "think" else ""
    calls = CALLS if "tools" in ask.inputs and last != "rain" else []
    usage = USAGE | ({"finish_reason": "length"} if last == "cut" else {})
    tokens = [token(one) for one in ("<think>", reasoning, "</think>", *text)] if reasoning else list(map(token, text))
    one = {"index": 0, "text": "" if calls else text, "reasoning": reasoning, "logprobs": tokens}
    one |= {"tool_calls": calls} if calls else {}
    return {"text": one["text"], "reasoning": reasoning, "tool_calls": calls, "usage": usage, "answers": [one]}


async def forever(ask: Ask) -> dict[str, Any]:
    await asyncio.sleep(60)
    return {}


def fail(ask: Ask) -> dict[str, Any]:
    raise ERRORS[ask.inputs["messages"][-1]["content"]]


INPUTS = {
    **dict.fromkeys(("tools", "tool_choice", "parallel_tool_calls", "sampling", "template"), "json?"),
    "messages": "json",
}
OUTPUTS = {"reasoning": "text", "text": "text", **dict.fromkeys(("tool_calls", "usage", "answers", "logprobs"), "json")}
MODELS = {
    "chat": (info("chat", INPUTS, OUTPUTS, "reasoning", "text"), said),
    "fail": chatting(fail, "fail"),
    "photo": (info("photo", {"messages": "json", "photo": "image?"}, {"text": "text"}), said),
    "slow": chatting(forever, "slow"),
    "breaks": chatting(lambda ask: {"text": "ab", "usage": StepError("it broke", "answer")}, "breaks"),
    "plain": (info("plain", {"question": "text"}, {"reply": "text"}), lambda ask: {"reply": ask.inputs["question"]}),
    "odd-calls": (
        info("odd-calls", {"messages": "json", "tools": "json"}, {"text": "text", "tool_calls": "json"}),
        lambda ask: {"text": "", "tool_calls": ["f()"]},
    ),
}
EVENTS: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)


class Models(Functions):
    """Functions whose reasoning comes before their text, as that of an llm step does."""

    async def _outputs(self, ask: Ask) -> dict[str, Any]:
        found = await super()._outputs(ask)
        return dict(sorted(found.items(), key=lambda one: one[0] != "reasoning"))

    async def stream(self, ask: Ask) -> AsyncGenerator[StreamedOutput, None]:
        """Stream log-probabilities before the text of their tokens, where they are wanted."""
        scored, thinks = "logprobs" in (ask.outputs or ()), False
        async for one in super().stream(ask):
            if scored and thinks and one.output == "text":
                yield StreamedOutput("logprobs", [token("</think>")], False)
            thinks = one.output == "reasoning" and (thinks or not one.last)
            if scored and not one.last:
                yield StreamedOutput("logprobs", [token(one.value)], False)
            yield one


@pytest.fixture(scope="module")
def backend() -> Functions:
    return Models(MODELS)


@pytest.fixture(scope="module")
def endpoint(backend: Functions) -> Iterator[Hosted]:
    with hosted(backend) as endpoint:
        yield endpoint


def checked(value: dict[str, Any]) -> dict[str, Any]:
    """Return a response as the client's strict types accept it."""
    Response.model_validate(value, strict=True)
    return value


def create(endpoint: Hosted, path: str = "", code: int = 200, **fields: Any) -> dict[str, Any]:
    """Return a response, or the error, as JSON."""
    found = httpx.post(f"{endpoint.url}/v1/responses{path}", json={"model": "chat", **fields})
    assert found.status_code == code, found.text
    return checked(found.json()) if code == 200 else found.json()["error"]


def stream(endpoint: Hosted, **fields: Any) -> list[dict[str, Any]]:
    """Return the events of a streamed response, checked by the client's strict types."""
    body = {"model": "chat", "stream": True, **fields}
    text = httpx.post(f"{endpoint.url}/v1/responses", json=body).raise_for_status().text
    events = []
    for block in text.strip().split("\n\n"):
        name, data = block.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        EVENTS.validate_python(event, strict=True)
        events.append(event)
    assert [one["sequence_number"] for one in events] == list(range(len(events)))
    return events


def test_a_text_is_answered_with_every_field_of_a_response(client: openai.OpenAI, backend: Functions) -> None:
    found = client.responses.create(model="chat", input="hi", instructions="be kind", temperature=0.5, user="me")
    assert found.output_text == "2: hi" and found.status == "completed" and found.object == "response"
    assert backend.asked[-1].inputs == {
        "messages": [{"role": "system", "content": "be kind"}, {"role": "user", "content": "hi"}],
        "sampling": {"temperature": 0.5},
    }
    assert found.usage is not None
    assert found.usage.to_dict() == {
        "input_tokens": 3,
        "input_tokens_details": {"cached_tokens": 2, "cache_write_tokens": 0},
        "output_tokens": 5,
        "output_tokens_details": {"reasoning_tokens": 4},
        "total_tokens": 8,
    }
    assert (found.instructions, found.temperature, found.user, found.top_p) == ("be kind", 0.5, "me", None)
    assert found.incomplete_details is None and found.error is None and found.completed_at is not None
    checked(found.to_dict())


ASKED: dict[str, dict[str, Any]] = {
    "text": {"input": "hi"},
    "reasoning": {"input": "think"},
    "calls": {"input": "hi", "tools": TOOLS},
    "reasoning and calls": {"input": "think", "tools": TOOLS},
    "cut": {"input": "cut"},
    "cut call": {"input": "cut", "tools": TOOLS},
    "logprobs": {"input": "hi", "include": ["message.output_text.logprobs"], "top_logprobs": 1},
    "logprobs and reasoning": {"input": "think", "include": ["message.output_text.logprobs"]},
    "logprobs and tools": {"input": "rain", "tools": TOOLS, "include": ["message.output_text.logprobs"]},
    "encoded": {"input": "think", "include": ["reasoning.encrypted_content"], "store": False},
}


def without_ids(value: Any) -> Any:
    """Return a response without what two answers never share."""
    if isinstance(value, list):
        return list(map(without_ids, value))
    if not isinstance(value, dict):
        return value
    return {key: without_ids(one) for key, one in value.items() if key not in ("id", "created_at", "completed_at")}


@pytest.mark.parametrize("name", ASKED)
def test_a_streamed_response_is_the_whole_one_and_its_events(endpoint: Hosted, name: str) -> None:
    whole, events = create(endpoint, **ASKED[name]), stream(endpoint, **ASKED[name])
    last = events[-1]["response"]
    assert without_ids(whole) == without_ids(last) and checked(last)
    assert [one["type"] for one in events[:2]] == ["response.created", "response.in_progress"]
    assert events[-1]["type"] == f"response.{'incomplete' if name.startswith('cut') else 'completed'}"
    assert {one["response"]["id"] for one in events if "response" in one} == {last["id"]}
    for at, item in enumerate(last["output"]):
        own = [one for one in events if one.get("output_index") == at]
        assert own[0]["type"] == "response.output_item.added" and own[-1]["type"] == "response.output_item.done"
        assert own[-1]["item"] == item and own[0]["item"]["id"] == item["id"]
        assert {one["item_id"] for one in own if "item_id" in one} == {item["id"]}
        deltas = "".join(one["delta"] for one in own if one["type"].endswith(".delta"))
        assert deltas == (item["arguments"] if item["type"] == "function_call" else item["content"][0]["text"])
        scored = [token for one in own for token in one.get("logprobs", ()) if one["type"].endswith(".delta")]
        assert scored == (item["content"][0].get("logprobs", []) if item["type"] == "message" else [])


def test_items_of_a_response_are_reasoning_text_and_calls(endpoint: Hosted) -> None:
    reasoning, message = create(endpoint, input="think")["output"]
    assert reasoning["type"] == "reasoning" and reasoning["summary"] == []
    assert reasoning["content"] == [{"type": "reasoning_text", "text": "hm, hm"}]
    assert message["content"][0]["text"] == "1: think" and message["status"] == "completed"
    calls = create(endpoint, input="hi", tools=TOOLS)["output"]
    assert [(one["name"], one["call_id"], one["arguments"]) for one in calls] == [
        ("f", "call_f", '{"city": "Bergen"}'),
        ("g", "call_g", '{"city": "Bergen"}'),
    ]
    cut = create(endpoint, input="cut")
    assert cut["status"] == "incomplete" and cut["incomplete_details"] == {"reason": "max_output_tokens"}
    assert cut["output"][-1]["status"] == "incomplete" and cut["completed_at"] is None


def test_log_probabilities_are_those_of_the_text_alone(endpoint: Hosted) -> None:
    for text, begin in (("hi", "1: hi"), ("think", "1: think")):
        found = create(endpoint, input=text, include=["message.output_text.logprobs"], top_logprobs=1)
        tokens = found["output"][-1]["content"][0]["logprobs"]
        assert "".join(one["token"] for one in tokens) == begin
        assert tokens[0]["top_logprobs"] == [{"token": "x", "logprob": -9999.0, "bytes": []}]


def test_log_probabilities_come_with_their_text_if_they_are_surely_of_it(endpoint: Hosted) -> None:
    for fields, counts in (({"input": "hi"}, [1, 1, 1, 1, 1]), ({"input": "rain", "tools": TOOLS}, [0] * 7 + [7])):
        events = stream(endpoint, include=["message.output_text.logprobs"], **fields)
        found = [len(one["logprobs"]) for one in events if one["type"] == "response.output_text.delta"]
        assert found == counts


def test_a_conversation_goes_on_after_many_log_probabilities(endpoint: Hosted) -> None:
    long = "a" * 3000
    fields = {"input": long, "include": ["message.output_text.logprobs"], "top_logprobs": 1}
    found = create(endpoint, **fields)
    assert len(found["output"][0]["content"][0]["logprobs"]) == 3003
    again = create(endpoint, input="hi", previous_response_id=found["id"])
    assert again["output"][0]["content"][0]["text"] == "3: hi"


def test_options_reach_the_model_as_those_of_a_chat(endpoint: Hosted, backend: Functions) -> None:
    text = {"format": {"type": "json_schema", "name": "n", "schema": SCHEMA, "strict": True}, "verbosity": "medium"}
    create(endpoint, input="hi", text=text, max_output_tokens=9, top_p=0.5, top_k=3, reasoning={"effort": "low"})
    assert backend.asked[-1].inputs == {
        "messages": [{"role": "user", "content": "hi"}],
        "sampling": {"json_schema": SCHEMA, "tokens_max": 9, "top_p": 0.5, "top_k": 3},
        "template": {"reasoning_effort": "low"},
    }
    create(endpoint, input="hi", text={"format": {"type": "json_object"}})
    assert backend.asked[-1].inputs["sampling"] == {"json_object": True}


@pytest.mark.parametrize(
    ("choice", "expected", "names"),
    [
        ("required", "required", ["f", "g"]),
        ({"type": "function", "name": "g"}, {"type": "function", "function": {"name": "g"}}, ["f", "g"]),
        ({"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "g"}]}, None, ["g"]),
        ({"type": "allowed_tools", "mode": "required", "tools": [TOOLS[0]]}, "required", ["f"]),
        ("none", None, []),
    ],
)
def test_a_choice_of_tools_is_that_of_a_chat(
    endpoint: Hosted, backend: Functions, choice: Any, expected: Any, names: list[str]
) -> None:
    found = create(endpoint, input="hi", tools=TOOLS, tool_choice=choice, parallel_tool_calls=False)
    asked = backend.asked[-1].inputs
    assert [one["function"]["name"] for one in asked.get("tools", ())] == names
    assert asked.get("tool_choice") == expected and asked.get("parallel_tool_calls") == (False if names else None)
    assert (found["tools"], found["tool_choice"], found["parallel_tool_calls"]) == (TOOLS, choice, False)


CONVERSATION: list[dict[str, Any]] = [
    {"role": "developer", "content": "be kind"},
    {"type": "message", "role": "user", "content": [{"type": "input_text", "text": one} for one in "ab"]},
    {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
    {"type": "message", "id": "msg_1", "role": "assistant", "status": "completed",
     "content": [{"type": "output_text", "text": "c", "annotations": []}]},
    {"type": "function_call", "id": "fc_1", "call_id": "1", "name": "f", "arguments": "{}"},
    {"type": "function_call", "call_id": "2", "name": "g", "arguments": "{}"},
    {"type": "function_call_output", "call_id": "1", "output": "rain"},
    {"type": "function_call_output", "call_id": "2", "output": [{"type": "input_text", "text": "sun"}]},
    {"type": "reasoning", "id": "rs_2", "summary": [], "encrypted_content": encoded_reasoning("so")},
    {"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]},
    {"role": "user", "content": [{"type": "input_image", "image_url": PICTURE}, {"type": "input_text", "text": "d"}]},
]  # fmt: skip
FUNCTIONS = [{"id": id, "type": "function", "function": {"name": name, "arguments": "{}"}} for id, name in ("1f", "2g")]
MESSAGES = [
    {"role": "developer", "content": "be kind"},
    {"role": "user", "content": "ab"},
    {"role": "assistant", "content": "c", "reasoning_content": "hm", "tool_calls": FUNCTIONS},
    {"role": "tool", "tool_call_id": "1", "content": "rain"},
    {"role": "tool", "tool_call_id": "2", "content": "sun"},
    {"role": "assistant", "content": "no", "reasoning_content": "so"},
    {
        "role": "user",
        "content": [{"type": "image_url", "image_url": {"url": PICTURE}}, {"type": "text", "text": "d"}],
    },
]


def test_a_list_of_items_is_the_conversation_of_a_chat(endpoint: Hosted, backend: Functions) -> None:
    found = create(endpoint, input=CONVERSATION)
    assert backend.asked[-1].inputs["messages"] == MESSAGES
    items = httpx.get(f"{endpoint.url}/v1/responses/{found['id']}/input_items", params={"order": "asc"}).json()
    ResponseItemList.model_validate(items, strict=True)
    assert [one["type"] for one in items["data"]] == [one.get("type", "message") for one in CONVERSATION]
    assert all(one["id"] for one in items["data"]) and items["data"][2]["id"] == "rs_1"
    create(endpoint, input=items["data"])
    assert backend.asked[-1].inputs["messages"] == MESSAGES


def test_a_conversation_goes_on_by_the_id_of_a_response(client: openai.OpenAI, backend: Functions) -> None:
    first = client.responses.create(model="chat", input="think", instructions="be kind", tools=TOOLS)
    result: Any = [{"type": "function_call_output", "call_id": "call_f", "output": "rain"}]
    second = client.responses.create(model="chat", input=result, previous_response_id=first.id, tools=TOOLS)
    assert second.previous_response_id == first.id and second.output_text == "3: rain"
    calls = {"role": "assistant", "content": "", "reasoning_content": "hm, hm", "tool_calls": CALLS}
    messages = [
        {"role": "user", "content": "think"},
        calls,
        {"role": "tool", "tool_call_id": "call_f", "content": "rain"},
    ]
    assert backend.asked[-1].inputs["messages"] == messages
    with client.responses.stream(model="chat", input="on", previous_response_id=second.id) as streamed:
        third = streamed.get_final_response()
    assert third.output_text == "5: on"
    assert backend.asked[-1].inputs["messages"][3] == {"role": "assistant", "content": "3: rain"}


def test_a_reference_stands_for_an_item_of_an_earlier_response(endpoint: Hosted, backend: Functions) -> None:
    output = create(endpoint, input="think", tools=TOOLS)["output"]
    references = [{"type": "item_reference", "id": output[0]["id"]}, *({"id": one["id"]} for one in output[1:])]
    results = [{"type": "function_call_output", "call_id": call["call_id"], "output": "rain"} for call in output[1:]]
    found = create(endpoint, input=["not an item"], code=400)
    assert found["message"] == "input[0]: expected an item, such as {role, content}"
    found = create(endpoint, input=[{"role": "user", "content": "think"}, *references, *results])
    turn = {"role": "assistant", "content": "", "reasoning_content": "hm, hm", "tool_calls": CALLS}
    assert backend.asked[-1].inputs["messages"][1] == turn
    assert create(endpoint, input="rain", previous_response_id=found["id"])["status"] == "completed"
    error = create(endpoint, input=[{"role": "user", "content": "hi", "id": "\u00e9"}], code=400)
    assert error["message"] == "input[0].id: expected a text of 1 to 256 ASCII characters"
    error = create(endpoint, input=[{"type": "item_reference", "id": "fc_0"}], code=404)
    assert error["param"] == "input" and "Item with id 'fc_0' not found" in error["message"]


def test_an_error_of_the_chat_has_the_place_of_the_item(endpoint: Hosted, backend: Functions) -> None:
    broken = {"type": "input_image", "image_url": PICTURE + "%"}
    call = {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"}
    result = {"type": "function_call_output", "call_id": "1", "output": [broken]}
    picture = {"role": "user", "content": [{"type": "input_text", "text": "a"}, broken]}
    audio = {"role": "user", "content": [{"type": "input_audio", "input_audio": 1}]}
    first = create(endpoint, input="hi")["id"]
    for item, place in ((picture, "content[1].image_url"), (result, "output[0].image_url"), (audio, "content[0]")):
        for more in ({}, {"instructions": "short"}, {"previous_response_id": first}):
            items = [{"type": "reasoning", "summary": []}, call, call, item]
            error = create(endpoint, model="photo", input=items, code=400, **more)
            assert error["message"].startswith(f"input[3].{place}") and error["param"] == "input", error


def test_an_item_is_referred_to_once_in_a_request(endpoint: Hosted) -> None:
    item = create(endpoint, input="a" * 100_000)["output"][0]["id"]
    references = [{"type": "item_reference", "id": item}, {"role": "user", "content": "hi"}, {"id": item}]
    error = create(endpoint, input=references, code=400)
    message = f"input[2]: found item {item!r} a second time, expected each item once; leave it out"
    assert (error["message"], error["param"]) == (message, "input")


def test_a_stored_response_is_returned_listed_and_deleted(client: openai.OpenAI, endpoint: Hosted) -> None:
    found = client.responses.create(model="chat", input="hi", metadata={"a": "b"})
    assert client.responses.retrieve(found.id) == found
    items = client.responses.input_items.list(found.id)
    assert [one.to_dict()["content"] for one in items] == [[{"type": "input_text", "text": "hi"}]]
    with pytest.raises(openai.BadRequestError, match="cannot be cancelled: only responses with background"):
        client.responses.cancel(found.id)
    with pytest.raises(openai.BadRequestError, match="stream: a stored response is returned whole"):
        client.responses.retrieve(found.id, stream=True)
    client.responses.delete(found.id)
    for call in (client.responses.retrieve, client.responses.delete, client.responses.cancel):
        with pytest.raises(openai.NotFoundError, match=f"Response with id '{found.id}' not found"):
            call(found.id)
    with pytest.raises(openai.NotFoundError) as refused:
        client.responses.create(model="chat", input="hi", previous_response_id=found.id)
    assert (refused.value.code, refused.value.param) == ("previous_response_not_found", "previous_response_id")


def test_long_items_are_escaped_outside_the_event_loop(backend: Functions, monkeypatch: pytest.MonkeyPatch) -> None:
    """Escapes take 1.5 s for each 100 MB of quotes; without them the text fits in the store."""
    jobs: list[object] = []
    run = JsonQueue.run
    monkeypatch.setattr(JsonQueue, "run", lambda queue, job, *rest: (jobs.append(job), run(queue, job, *rest))[1])
    text = '"\n' * 100_000
    with hosted(backend, limits=ServeLimits(responses_bytes_max=300_000)) as server:
        found = create(server, input=[{"role": "user", "content": text}, {"role": "user", "content": "hi"}])
        jobs.clear()
        listed = httpx.get(f"{server.url}/v1/responses/{found['id']}/input_items?order=asc").json()
        assert jobs == [Write(whole=False)]
        assert [one["content"][0]["text"] for one in listed["data"]] == [text, "hi"]
        assert (
            create(server, input="on", previous_response_id=found["id"])["output"][0]["content"][0]["text"] == "4: on"
        )


_LIMITS = [{"limit": limit} for limit in (0, 101, "0000000011", "1" * 5000, "000000001" + "9" * 5000, "\u0661", "-1")]


def test_input_items_come_in_pages(client: openai.OpenAI) -> None:
    texts: Any = [{"role": "user", "content": str(n)} for n in range(5)]
    id = client.responses.create(model="chat", input=texts).id
    page = client.responses.input_items.list(id, limit=2)
    assert [one.to_dict()["content"][0]["text"] for one in page] == list("43210")  # type: ignore[index]
    assert [one.to_dict()["content"][0]["text"] for one in client.responses.input_items.list(id, order="asc")] == list(  # type: ignore[index]
        "01234"
    )
    for query in (*_LIMITS, {"after": "msg_0"}, {"order": "up"}):
        with pytest.raises(openai.BadRequestError) as refused:
            client.responses.input_items.list(id, **query)  # type: ignore[arg-type]
        assert refused.value.param == next(iter(query))


def test_a_response_that_is_not_stored_is_unknown(client: openai.OpenAI, endpoint: Hosted) -> None:
    found = create(endpoint, input="hi", store=False)
    assert found["store"] is False
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(found["id"])


def test_a_response_belongs_to_the_token_that_made_it(tmp_path: Path, backend: Functions) -> None:
    tokens = {name: f"{name}-" + "x" * 40 for name in ("ann", "bob")}
    entries = [
        f"- {{name: {name}, sha256: {hashlib.sha256(one.encode()).hexdigest()}}}" for name, one in tokens.items()
    ]
    (tmp_path / "tokens.yaml").write_text("tokens:\n" + "\n".join(entries) + "\n")
    (tmp_path / "tokens.yaml").chmod(0o600)
    with hosted(backend, Gate(TokenFile(tmp_path / "tokens.yaml"))) as server:
        ann, bob = (openai.OpenAI(base_url=f"{server.url}/v1", api_key=one, max_retries=0) for one in tokens.values())
        id = ann.responses.create(model="chat", input="hi").id
        item = ann.responses.retrieve(id).output[0].id
        problems = []
        for other in (id, "resp_unknown"):
            for call in (
                bob.responses.retrieve,
                bob.responses.delete,
                bob.responses.cancel,
                bob.responses.input_items.list,
            ):
                with pytest.raises(openai.NotFoundError) as refused:
                    call(other)
                problems.append(str(refused.value).replace(other, "ID"))
            with pytest.raises(openai.NotFoundError) as refused:
                bob.responses.create(model="chat", input="hi", previous_response_id=other)
            problems.append(str(refused.value).replace(other, "ID"))
        assert problems[:5] == problems[5:]
        with pytest.raises(openai.NotFoundError):
            bob.responses.create(model="chat", input=[{"type": "item_reference", "id": str(item)}])
        assert ann.responses.create(model="chat", input="hi", previous_response_id=id).output_text == "3: hi"


def test_the_operator_sizes_the_store_or_switches_it_off(backend: Functions) -> None:
    with hosted(backend, limits=ServeLimits(responses_bytes_max=0)) as server:
        found = create(server, input="hi", store=True)
        assert found["store"] is False
        error = create(server, input="hi", store=True, previous_response_id=found["id"], code=400)
        assert error["param"] == "previous_response_id"
        assert "keeps no responses, limits.responses_bytes_max is 0; send the conversation as input" in error["message"]
    with hosted(backend, limits=ServeLimits(responses_max=2)) as server:
        ids = [create(server, input="hi")["id"] for _ in range(3)]
        codes = [httpx.get(f"{server.url}/v1/responses/{id}").status_code for id in ids]
        assert codes == [404, 200, 200]
        create(server, input="hi", previous_response_id=ids[2])
    with hosted(backend, limits=ServeLimits(responses_bytes_max=10_000)) as server:
        found = create(server, input="a" * 10_000)
        assert found["store"] is False
        assert httpx.get(f"{server.url}/v1/responses/{found['id']}").status_code == 404


def test_a_conversation_has_the_limit_of_a_message(backend: Functions) -> None:
    with hosted(backend, limits=ServeLimits(message_bytes_max=20_000)) as server:
        first = create(server, input="a" * 9000)["id"]
        error = create(server, input="a" * 9000, previous_response_id=first, code=200)
        error = create(server, input="hi", previous_response_id=error["id"], code=413)
        assert error["param"] == "previous_response_id" and "limits.message_bytes_max is 20000" in error["message"]


def test_a_conversation_has_the_messages_of_a_chat_at_most(endpoint: Hosted) -> None:
    first = create(endpoint, input=[{"role": "user", "content": "a"}] * 1023)["id"]
    error = create(endpoint, input="hi", previous_response_id=first, code=400)
    found = "found a conversation of 1025 messages, expected at most 1024; begin a new one"
    assert (error["message"], error["param"]) == (f"previous_response_id: {found}", "previous_response_id")


def test_errors_have_the_codes_and_names_of_the_protocol(client: openai.OpenAI) -> None:
    for stream in (False, True):
        with pytest.raises(openai.BadRequestError) as refused:
            client.responses.create(model="fail", input="long", stream=stream)
        assert (refused.value.code, refused.value.param) == ("context_length_exceeded", "input")
        with pytest.raises(openai.BadRequestError) as refused:
            client.responses.create(model="fail", input="input", max_output_tokens=1, stream=stream)
        assert refused.value.param == "max_output_tokens"
        with pytest.raises(openai.RateLimitError):
            client.responses.create(model="fail", input="busy", stream=stream)
        with pytest.raises(openai.InternalServerError, match="step answer") as broken:
            client.responses.create(model="fail", input="broken", stream=stream)
        assert "secret" not in str(broken.value)
    with pytest.raises(openai.NotFoundError) as unknown:
        client.responses.create(model="none", input="hi")
    assert unknown.value.code == "model_not_found"


def test_a_failure_after_the_first_text_is_the_end_of_the_stream(client: openai.OpenAI) -> None:
    found: list[Any] = []
    with pytest.raises(openai.APIError, match="it broke"):
        for one in client.responses.create(model="breaks", input="hi", stream=True):
            found.append(one)
    assert [one.type for one in found][-2:] == ["response.output_text.delta", "response.failed"]
    assert found[-1].response.status == "failed" and found[-1].response.error.code == "server_error"
    checked(found[-1].response.to_dict())


def test_a_model_of_another_form_answers_or_says_what_it_lacks(endpoint: Hosted, client: openai.OpenAI) -> None:
    assert create(endpoint, model="plain", input="hi")["output"][0]["content"][0]["text"] == "hi"
    assert stream(endpoint, model="plain", input="hi")[-1]["response"]["output"][0]["content"][0]["text"] == "hi"
    for field, one in (
        *(("temperature", 0.5), ("tools", TOOLS), ("text.format", None), ("include", None)),
        *(("instructions", "be kind"), ("previous_response_id", "resp_1")),
    ):
        fields = {
            "text.format": {"text": {"format": {"type": "json_object"}}},
            "include": {"include": ["message.output_text.logprobs"]},
        }.get(field, {field: one})
        error = create(endpoint, model="plain", input="hi", code=400, **fields)
        assert (error["code"], error["param"]) == ("unsupported_parameter", field)
    assert create(endpoint, model="odd-calls", input="hi", tools=TOOLS, code=500)["type"] == "server_error"


@pytest.mark.parametrize("streamed", [False, True])
def test_a_client_that_leaves_withdraws_its_request(endpoint: Hosted, backend: Functions, streamed: bool) -> None:
    count = len(backend.withdrawn)
    body = {"model": "slow", "input": "hi", "stream": streamed}
    with pytest.raises(httpx.TimeoutException):
        httpx.post(f"{endpoint.url}/v1/responses", json=body, timeout=0.3)
    until = time.monotonic() + 10
    while len(backend.withdrawn) == count:
        assert time.monotonic() < until
        time.sleep(0.01)


def test_a_response_is_removed_when_its_time_is_over(backend: Functions) -> None:
    with hosted(backend, limits=ServeLimits(responses_s=1)) as server:
        found = create(server, input="hi")
        create_endpoint = server.server.app.routes.find("/v1/responses").endpoints["POST"]
        store = create_endpoint.__self__.store  # type: ignore[attr-defined]
        assert len(store) == 1
        until = time.monotonic() + 10
        while len(store):
            assert time.monotonic() < until
            time.sleep(0.05)
        assert httpx.get(f"{server.url}/v1/responses/{found['id']}").status_code == 404


REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"background": True}, "background", "wait for the response"),
    ({"conversation": "conv_1"}, "conversation", "use previous_response_id"),
    ({"prompt": {"id": "pmpt_1"}}, "prompt", "send instructions and input"),
    ({"truncation": "auto"}, "truncation", "never cut"),
    ({"messages": []}, "messages", "use input; leave"),
    ({"max_tokens": 3}, "max_tokens", "use max_output_tokens"),
    ({"n": 2}, "n", "has one answer"),
    ({"tools": [{"type": "web_search"}]}, "tools", "found 'web_search', only function is supported"),
    ({"tools": [{"type": "mcp", "server_label": "a"}]}, "tools", "found 'mcp'"),
    ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools", r"tools\[0\].name: expected a text"),
    ({"tools": [TOOLS[0] | {"defer_loading": True}]}, "tools", "defer_loading: not supported"),
    ({"tools": [TOOLS[0] | {"parameters": "x"}]}, "tools", r"tools\[0\].parameters: expected an object"),
    ({"tool_choice": {"type": "web_search_preview"}}, "tool_choice", "expected none, auto, required"),
    ({"tool_choice": "required"}, "tool_choice", "the request has no tools"),
    (
        {
            "tools": TOOLS,
            "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "h"}]},
        },
        "tool_choice",
        "found 'h', expected names in tools",
    ),
    ({"text": {"verbosity": "low"}}, "text", "text.verbosity: not supported"),
    ({"text": {"other": 1}}, "text", "text.other: unknown key"),
    ({"text": {"format": {"type": "grammar"}}}, "text.format", "text.format.type: expected text, json_object"),
    (
        {"text": {"format": {"type": "json_schema", "name": "n"}}},
        "text.format",
        "text.format.schema: expected an object",
    ),
    ({"text": {"format": {"type": "json_object"}}, "regex": "a"}, "regex", "text.format and regex"),
    ({"reasoning": {"summary": "detailed"}}, "reasoning", "reasoning.summary: not supported"),
    ({"reasoning": {"effort": 5}}, "reasoning", "reasoning.effort: found 5, expected text"),
    ({"top_logprobs": 2}, "top_logprobs", "requires include"),
    ({"include": ["other"]}, "include", r"include.0: found 'other'"),
    ({"metadata": {"a": 1}}, "metadata", "metadata.a: found 1, expected text"),
    ({"input": None}, "input", "input: expected a text, or a list of items"),
    ({"input": 5}, "input", "input: expected a text, or a list of at most"),
    ({"input": []}, "input", "input: expected a list of 1 to 1024"),
    ({"input": [{"role": "king", "content": "hi"}]}, "input", r"input\[0\].role: expected one of user"),
    ({"input": [{"type": "computer_call"}]}, "input", r"input\[0\].type: found 'computer_call', supported are message"),
    ({"input": [{"role": "user", "content": [{"type": "input_file", "file_id": "f"}]}]}, "input", "found 'input_file'"),
    (
        {"input": [{"role": "user", "content": [{"type": "input_image", "file_id": "f"}]}]},
        "input",
        r"input\[0\].content\[0\].file_id: this server keeps no files",
    ),
    (
        {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "https://a.b/c.png"}]}]},
        "input",
        r"input\[0\].content\[0\].image_url: this server fetches no URLs",
    ),
    ({"input": [{"type": "function_call", "name": "f"}]}, "input", r"input\[0\].call_id: expected a text"),
    ({"input": [{"type": "function_call_output", "call_id": "1"}]}, "input", r"input\[0\].output: expected a text"),
    (
        {"input": [{"type": "reasoning", "summary": [], "encrypted_content": "gAAAA"}]},
        "input",
        r"input\[0\].encrypted_content: not written by this server",
    ),
    ({"stream_options": {"include_usage": True}}, "stream_options", "include_usage: unknown key"),
    ({"inputs": "hi"}, "inputs", "did you mean input"),
]


@pytest.mark.parametrize(
    ("fields", "param", "message"), REFUSED, ids=[f"{one[1]}-{n}" for n, one in enumerate(REFUSED)]
)
def test_a_field_that_would_change_the_answer_is_refused_by_name(
    client: openai.OpenAI, fields: dict[str, Any], param: str, message: str
) -> None:
    with pytest.raises(openai.BadRequestError, match=message) as refused:
        client.post("/responses", body={"model": "chat", "input": "hi", **fields}, cast_to=object)
    assert refused.value.param == param
