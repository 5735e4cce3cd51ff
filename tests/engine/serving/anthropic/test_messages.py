"""The stock `anthropic` client against models that are functions."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import httpx
import pydantic
import pytest
from anthropic.types import Message, RawMessageStreamEvent

from tests.engine.serving.http.backends import Functions, info
from tests.engine.serving.http.hosted import Hosted, hosted
from weftline.engine.serving.auth.gate import Gate
from weftline.engine.serving.auth.tokens import TokenFile, digest
from weftline.engine.serving.backend import Ask
from weftline.engine.serving.config import ServeLimits
from weftline.errors import (
    ContextOverflow,
    DeadlineExceeded,
    InputError,
    LimitReached,
    ModelError,
    StepError,
    WorkerDied,
)

PATH = "/v1/messages"
HI: Any = [{"role": "user", "content": "hi"}]
TOOLS: Any = [{"name": "f", "input_schema": {"type": "object"}}]
CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a": [1, "é"]}'}}
CUT = {"id": "c2", "type": "function", "function": {"name": "f", "arguments": '{"a": 1, "b": "x'}}
INPUTS = {"messages": "json", "tools": "json?", "tool_choice": "json?", "parallel_tool_calls": "json?"}
INPUTS |= {"sampling": "json?", "template": "json?", "tenant": "text?"}
OUTPUTS = {"reasoning": "text", "text": "text", "tool_calls": "json", "usage": "json", "answers": "json"}
COUNTS = {"prompt_tokens": 9, "completion_tokens": 5, "cached_tokens": 4}
THOUGHT = COUNTS | {"reasoning_tokens": 4}
ERRORS: dict[str, BaseException] = {
    "long": ContextOverflow("step answer: prompt: found 900 tokens, expected at most 511; shorten it", param="prompt"),
    "input": InputError("step answer: sampling.tokens_max: found 0, expected at least 1", param="tokens_max"),
    "stops": InputError("step answer: sampling.stop: found 5", param="stop"),
    "place": InputError("step answer: messages[1].content[0]: found a wrong picture", param="messages"),
    "busy": LimitReached("the queue is full", retry_after_s=0.25),
    "late": DeadlineExceeded("out of time"),
    "broken": StepError("0xdeadbeef at /secret/model.py", "answer"),
    "dead": WorkerDied("step answer: its worker died"),
    "closed": ModelError("model shapes cannot be opened"),
    "bug": ValueError("Traceback (most recent call last): /secret/x.py 0xdeadbeef"),
}
SCENES: dict[str, dict[str, Any]] = {
    "hi": {"text": "hello", "usage": COUNTS | {"finish_reason": "stop"}},
    "long answer": {"text": "hel", "usage": COUNTS | {"finish_reason": "length"}},
    "stopped": {"text": "hel", "usage": COUNTS | {"finish_reason": "stop", "stop_string": "lo"}},
    "filtered": {"text": "", "usage": COUNTS | {"finish_reason": "content_filter"}},
    "empty": {"text": "", "usage": COUNTS | {"finish_reason": "stop"}},
    "thinks": {"text": "yes", "reasoning": "hm é", "usage": COUNTS | {"finish_reason": "stop"}},
    "thinks only": {"text": "", "reasoning": "hm", "usage": THOUGHT | {"finish_reason": "length"}},
    "calls": {"text": "", "tool_calls": [CALL, CALL | {"id": "c3"}], "usage": {"finish_reason": "tool_calls"}},
    "says and calls": {
        "text": "wait", "reasoning": "hm", "tool_calls": [CALL], "usage": COUNTS | {"finish_reason": "tool_calls"},
    },
    "cut call": {"text": "", "tool_calls": [CALL, CUT], "usage": COUNTS | {"finish_reason": "length"}},
    "no counts": {"text": "hello"},
}  # fmt: skip


def answer(ask: Ask) -> dict[str, Any]:
    said = ask.inputs["messages"][-1]["content"]
    if said in ERRORS:
        raise ERRORS[said]
    tokens = {"answers": [{"prompt_token_ids": [1, 2, 3]}]}
    return tokens | SCENES.get(said, SCENES["hi"])


async def forever(ask: Ask) -> dict[str, Any]:
    await asyncio.sleep(60)
    return {}


MODELS: dict[str, Any] = {
    "m": (info("m", INPUTS, OUTPUTS, "reasoning", "text"), answer),
    "late": (info("late", INPUTS, OUTPUTS), answer),  # nothing streams: all of it comes at the end
    "slow": (info("slow", INPUTS, OUTPUTS), forever),
    "breaks": (
        info("breaks", INPUTS, {"text": "text", "usage": "json"}, "text"),
        lambda ask: {"text": "ab", "usage": StepError("it broke", "answer")},
    ),
    "plain": (info("plain", {"question": "text"}, {"reply": "text"}), answer),
    "bare": (info("bare", {"messages": "json", "sampling": "json?"}, {"text": "text"}), answer),
    "secret": (info("secret", INPUTS, OUTPUTS), answer),
}


class ThinksFirst(Functions):
    """A backend that streams reasoning before text, as llm steps do."""

    async def _outputs(self, ask: Ask) -> dict[str, Any]:
        found = await super()._outputs(ask)
        return {name: found[name] for name in OUTPUTS if name in found}


@pytest.fixture(scope="module")
def backend() -> Functions:
    return ThinksFirst(MODELS)


@pytest.fixture(scope="module")
def endpoint(backend: Functions) -> Iterator[Hosted]:
    with hosted(backend) as endpoint:
        yield endpoint


def said(text: str) -> Any:
    return [{"role": "user", "content": text}]


def create(client: anthropic.Anthropic, scene: str = "hi", **fields: Any) -> Message:
    return client.messages.create(**{"model": "m", "max_tokens": 9, "messages": said(scene)} | fields)


def streamed(client: anthropic.Anthropic, scene: str = "hi", **fields: Any) -> Message:
    with client.messages.stream(**{"model": "m", "max_tokens": 9, "messages": said(scene)} | fields) as stream:
        return stream.get_final_message()


def unsigned(message: Message) -> dict[str, Any]:
    """Return a message without what is its own: its id, and the signatures that name it."""
    found = message.to_dict()
    assert str(found.pop("id")).startswith("msg_")
    for block in found["content"]:  # type: ignore[attr-defined]
        assert block.pop("signature", message.id).endswith(message.id)
        block.pop("parsed_output", None)
    return found


# answers


def test_an_answer_has_its_blocks_stop_reason_and_counts(client: anthropic.Anthropic, backend: Functions) -> None:
    more = {"temperature": 0.5, "top_k": 3}
    found = create(client, system="be short", metadata={"user_id": "u"}, stop_sequences=["x"], extra_body=more)
    assert [one.to_dict() for one in found.content] == [{"type": "text", "text": "hello"}]
    assert (found.stop_reason, found.stop_sequence, found.model, found.role) == ("end_turn", None, "m", "assistant")
    assert found.usage.to_dict() == {
        "input_tokens": 5, "cache_read_input_tokens": 4, "cache_creation_input_tokens": 0, "output_tokens": 5,
    }  # fmt: skip
    asked = backend.asked[-1].inputs
    assert asked["messages"] == [{"role": "system", "content": "be short"}, *HI]
    assert asked["sampling"] == {"tokens_max": 9, "temperature": 0.5, "top_k": 3, "stop": ["x"]}


@pytest.mark.parametrize(
    ("scene", "reason", "sequence"),
    [
        ("long answer", "max_tokens", None),
        ("stopped", "stop_sequence", "lo"),
        ("filtered", "refusal", None),
        ("calls", "tool_use", None),
        ("cut call", "max_tokens", None),
        ("no counts", "end_turn", None),
    ],
)
def test_a_finish_reason_is_a_stop_reason(
    client: anthropic.Anthropic, scene: str, reason: str, sequence: str | None
) -> None:
    found = create(client, scene, tools=TOOLS)
    assert (found.stop_reason, found.stop_sequence) == (reason, sequence)


def test_thinking_text_and_calls_are_blocks(client: anthropic.Anthropic) -> None:
    thinking, text, call = create(client, "says and calls", tools=TOOLS).content
    assert thinking.type == "thinking" and thinking.thinking == "hm" and thinking.signature
    assert text.type == "text" and text.text == "wait"
    assert call.type == "tool_use" and (call.id, call.name, call.input) == ("c1", "f", {"a": [1, "é"]})
    usage = create(client, "thinks only").usage
    assert usage.output_tokens_details and usage.output_tokens_details.thinking_tokens == 4
    assert [one.input for one in create(client, "cut call", tools=TOOLS).content] == [{"a": [1, "é"]}, {"a": 1}]


@pytest.mark.parametrize("model", ["m", "late"])
@pytest.mark.parametrize("scene", SCENES)
def test_a_stream_adds_up_to_the_whole_answer(client: anthropic.Anthropic, scene: str, model: str) -> None:
    whole = create(client, scene, model=model, tools=TOOLS)
    assert unsigned(streamed(client, scene, model=model, tools=TOOLS)) == unsigned(whole)


@pytest.mark.parametrize("stream", [False, True])
def test_thinking_that_is_omitted_has_a_signature_and_no_text(client: anthropic.Anthropic, stream: bool) -> None:
    thinking: Any = {"type": "adaptive", "display": "omitted"}
    found = (streamed if stream else create)(client, "thinks", thinking=thinking)
    block, text = found.content
    assert block.type == "thinking" and block.thinking == "" and block.signature
    assert text.type == "text" and text.text == "yes"


def events_of(endpoint: Hosted, **fields: Any) -> list[tuple[str, dict[str, Any]]]:
    body = {"model": "m", "max_tokens": 9, "messages": HI, "stream": True} | fields
    response = httpx.post(f"{endpoint.url}{PATH}", json=body)
    assert response.headers["content-type"].startswith("text/event-stream")
    frames = [frame.split("\n") for frame in response.text.split("\n\n") if frame]
    return [(name.removeprefix("event: "), json.loads(data.removeprefix("data: "))) for name, data in frames]


def test_the_events_of_a_stream_have_their_order(endpoint: Hosted) -> None:
    events = events_of(endpoint, messages=said("says and calls"), tools=TOOLS)
    assert all(name == data["type"] for name, data in events)
    kinds = [data.get("delta", {}).get("type") or name for name, data in events]
    assert kinds == [
        "message_start", "ping",
        "content_block_start", "thinking_delta", "thinking_delta", "signature_delta", "content_block_stop",
        "content_block_start", *["text_delta"] * 4, "content_block_stop",
        "content_block_start", "input_json_delta", "content_block_stop",
        "message_delta", "message_stop",
    ]  # fmt: skip
    assert [data["index"] for _, data in events if "index" in data] == [0] * 5 + [1] * 6 + [2] * 3


@pytest.mark.parametrize("scene", SCENES)
def test_responses_pass_the_strict_types_of_the_client(endpoint: Hosted, scene: str) -> None:
    body = {"model": "m", "max_tokens": 9, "messages": said(scene), "tools": TOOLS}
    found = Message.model_validate_json(httpx.post(f"{endpoint.url}{PATH}", json=body).text, strict=True)
    check_known(found)
    of: pydantic.TypeAdapter[Any] = pydantic.TypeAdapter(RawMessageStreamEvent)
    for name, data in events_of(endpoint, **body):
        if name != "ping":  # the client reads over it
            check_known(of.validate_json(json.dumps(data), strict=True))


def check_known(value: Any) -> None:
    """Check that a value of the client's types has no field that they lack."""
    if isinstance(value, pydantic.BaseModel):
        assert not value.model_extra
        for name in type(value).model_fields:
            check_known(getattr(value, name))
    for one in value if isinstance(value, list) else ():
        check_known(one)


def test_the_beta_client_works_too(client: anthropic.Anthropic) -> None:
    edits: Any = {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}
    found = client.beta.messages.create(
        model="m", max_tokens=9, messages=HI, betas=["context-management-2025-06-27"], context_management=edits
    )
    assert found.content[0].type == "text"


def test_the_async_client_works_too(endpoint: Hosted) -> None:
    async def run() -> str:
        async with (
            anthropic.AsyncAnthropic(base_url=endpoint.url, api_key="none") as client,
            client.messages.stream(model="m", max_tokens=9, messages=HI) as stream,
        ):
            return "".join([text async for text in stream.text_stream])

    assert asyncio.run(run()) == "hello"


def test_tokens_of_a_prompt_are_counted(client: anthropic.Anthropic, backend: Functions) -> None:
    found = client.messages.count_tokens(model="m", messages=HI, system="s", tools=TOOLS, thinking={"type": "disabled"})
    assert found.input_tokens == 3
    asked = backend.asked[-1].inputs
    assert asked["template"] == {"generate": False, "reasoning_effort": "none"} and len(asked["messages"]) == 2
    with pytest.raises(anthropic.BadRequestError, match="needs an input `template: json`"):
        client.messages.count_tokens(model="breaks", messages=HI)
    with pytest.raises(anthropic.BadRequestError, match="max_tokens: unknown field"):
        client.messages.count_tokens(model="m", messages=HI, extra_body={"max_tokens": 5})


# errors


@pytest.mark.parametrize(
    ("scene", "status", "kind", "message"),
    [
        ("long", 400, "invalid_request_error", "messages: step answer: prompt: found 900 tokens"),
        ("input", 400, "invalid_request_error", "max_tokens: step answer: sampling.tokens_max: found 0"),
        ("stops", 400, "invalid_request_error", "stop_sequences: step answer: sampling.stop: found 5"),
        ("place", 400, "invalid_request_error", "messages: step answer: messages[0].content: found a wrong"),
        ("busy", 429, "rate_limit_error", "the queue is full"),
        ("late", 504, "timeout_error", "out of time"),
        ("broken", 500, "api_error", ""),
        ("dead", 503, "overloaded_error", "its worker died"),
        ("closed", 409, "api_error", "cannot be opened"),
        ("bug", 500, "api_error", "internal error"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_errors_have_the_form_and_types_of_anthropic(
    client: anthropic.Anthropic, scene: str, status: int, kind: str, message: str, stream: bool
) -> None:
    with pytest.raises(anthropic.APIStatusError) as refused:
        (streamed if stream else create)(client, scene, system="s")
    error, headers = refused.value, refused.value.response.headers
    assert (error.status_code, error.type) == (status, kind) and message in (error.api_message or "")
    assert "/secret" not in str(error.body) and "0xdead" not in str(error.body)
    body: Any = error.body
    assert body["type"] == "error" and body["request_id"] == error.request_id == headers["x-request-id"]
    assert headers["x-should-retry"] == ("true" if status in (429, 503) else "false")
    assert headers.get("retry-after") == ("1" if scene == "busy" else None)


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "kind"),
    [
        ("GET", PATH, None, 405, "invalid_request_error"),
        ("POST", f"{PATH}/batches", {}, 404, "not_found_error"),
        ("POST", PATH, {"model": "nope", "max_tokens": 5, "messages": HI}, 404, "not_found_error"),
        ("POST", PATH, b"{", 400, "invalid_request_error"),
        ("POST", PATH, {"model": "m", "messages": HI}, 400, "invalid_request_error"),
        ("POST", PATH, {"model": "m", "messages": HI, "max_tokens": 0}, 400, "invalid_request_error"),
        ("POST", PATH, {"model": "plain", "messages": HI, "max_tokens": 5}, 400, "invalid_request_error"),
        ("POST", PATH, {"pad": "x" * 2_000_000}, 413, "request_too_large"),
        ("POST", f"{PATH}/count_tokens", {"pad": "x" * 2_000_000}, 413, "request_too_large"),
    ],
    ids=str,
)
def test_errors_before_the_model_have_that_form_too(
    backend: Functions, method: str, path: str, body: Any, status: int, kind: str
) -> None:
    with hosted(backend, limits=ServeLimits(message_bytes_max=1 << 20)) as endpoint:
        content = body if isinstance(body, bytes | None) else json.dumps(body).encode()
        response = httpx.request(method, f"{endpoint.url}{path}", content=content, headers={"x-request-id": "mine"})
    found = response.json()
    assert (response.status_code, found["type"], found["error"]["type"]) == (status, "error", kind)
    assert found["request_id"] == response.headers["request-id"] == response.headers["x-request-id"] == "mine"
    assert set(found["error"]) == {"type", "message"} and found["error"]["message"]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"container": "c"}, "container: no tools run on this server; leave it out"),
        ({"mcp_servers": [{}]}, "mcp_servers: this server calls no other server"),
        ({"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}}, "context_management: no messages"),
        ({"thread": {"type": "create"}}, "thread: no conversation is stored"),
        ({"max_token": 5}, "max_token: unknown field; did you mean max_tokens?"),
        ({"stop": ["x"]}, "stop: unknown field"),
        ({"tools": [{"type": "web_search_20250305"}]}, "tools[0].type: found 'web_search_20250305', expected custom"),
        ({"tool_choice": {"type": "tool", "name": "g"}, "tools": TOOLS}, "tool_choice: found 'g', expected a name"),
        ({"tool_choice": {"type": "any"}}, "tool_choice: a call is required, but the request has no tools"),
        (
            {"model": "bare", "thinking": {"type": "enabled", "budget_tokens": 1024}},
            "thinking: model bare has no input `template: json`",
        ),
        ({"model": "bare", "messages": [*HI, {"role": "assistant", "content": "a"}]}, "messages: model bare has no"),
        ({"model": "bare", "tools": TOOLS}, "tools: the model has no tools; add an input `tools: json`"),
    ],
)  # fmt: skip
def test_a_field_that_would_change_the_answer_is_refused_by_name(
    client: anthropic.Anthropic, fields: Any, message: str
) -> None:
    with pytest.raises(anthropic.BadRequestError) as refused:
        create(client, extra_body=fields)
    assert message in refused.value.api_message


def test_an_error_in_the_middle_of_a_stream_is_its_last_event(client: anthropic.Anthropic, endpoint: Hosted) -> None:
    events = events_of(endpoint, model="breaks")
    assert [name for name, _ in events][-2:] == ["content_block_delta", "error"]
    _, error = events[-1]
    assert error["error"] == {"type": "api_error", "message": error["error"]["message"]} and error["request_id"]
    with pytest.raises(anthropic.APIStatusError, match="it broke") as broken:
        streamed(client, model="breaks")
    assert broken.value.type == "api_error"


# the connection


def wait_until(true: Any, timeout_s: float = 10) -> None:
    until = time.monotonic() + timeout_s
    while not true():
        assert time.monotonic() < until
        time.sleep(0.005)


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_withdraws_its_request(endpoint: Hosted, backend: Functions, stream: bool) -> None:
    body = {"model": "slow", "max_tokens": 9, "messages": HI, "stream": stream}
    headers = {"x-request-id": f"leaves-{stream}"}
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{endpoint.url}{PATH}", json=body, headers=headers, timeout=0.3)
    wait_until(lambda: f"leaves-{stream}" in backend.withdrawn)


USER, RARE = "wl_user-token-of-a-test", "wl_rare-token-of-a-test"


@pytest.fixture(scope="module")
def closed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosted]:
    """A server that asks for tokens."""
    file: Path = tmp_path_factory.mktemp("tokens") / "tokens.yaml"
    entries = f"  - {{name: web, sha256: {digest(USER)}, models: [m]}}\n"
    entries += f"  - {{name: rare, sha256: {digest(RARE)}, requests_per_s: 0.01, burst: 1}}\n"
    file.write_text(f"tokens:\n{entries}")
    file.chmod(0o600)
    with hosted(Functions(MODELS), Gate(TokenFile(file), ServeLimits())) as endpoint:
        yield endpoint


def post(endpoint: Hosted, headers: Any, model: str = "m") -> tuple[int, str]:
    body = {"model": model, "max_tokens": 9, "messages": HI}
    response = httpx.post(f"{endpoint.url}{PATH}", json=body, headers=headers)
    return response.status_code, response.json().get("error", {}).get("type", "")


@pytest.mark.parametrize(
    ("headers", "expected"),
    [
        ({"x-api-key": USER}, (200, "")),
        ({"authorization": f"Bearer {USER}"}, (200, "")),
        ({"authorization": f"Bearer {USER}", "x-api-key": USER}, (200, "")),
        ({}, (401, "authentication_error")),
        ({"x-api-key": "wl_other"}, (401, "authentication_error")),
        ({"x-api-key": ""}, (401, "authentication_error")),
        ({"authorization": f"Bearer {USER}", "x-api-key": RARE}, (401, "authentication_error")),
        ([("x-api-key", USER), ("x-api-key", USER)], (401, "authentication_error")),
    ],
)
def test_the_token_comes_in_either_header(closed: Hosted, headers: Any, expected: tuple[int, str]) -> None:
    assert post(closed, headers) == expected


def test_a_key_has_the_rights_and_the_rate_of_its_token(closed: Hosted, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    assert post(closed, {"x-api-key": USER}, "secret") == (403, "permission_error")
    assert post(closed, {"x-api-key": "wl_wrong-token-of-a-test"}) == (401, "authentication_error")
    assert [post(closed, {"x-api-key": RARE})[0] for _ in range(2)] == [200, 429]
    rare = anthropic.Anthropic(base_url=closed.url, api_key=RARE, max_retries=0)
    with rare, pytest.raises(anthropic.RateLimitError) as refused:
        create(rare)
    assert refused.value.type == "rate_limit_error" and float(refused.value.response.headers["retry-after"]) > 1
    assert "denied" in caplog.text and "of-a-test" not in caplog.text
    with anthropic.Anthropic(base_url=closed.url, auth_token=USER, max_retries=0) as client:
        assert create(client).stop_reason == "end_turn"
