"""The stock `openai` client against models that are functions."""

import asyncio
import math
import time
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from tests.engine.serving.http.backends import Functions, chatting, info
from tests.engine.serving.http.hosted import Hosted, hosted
from weftline.engine.serving.backend import Ask
from weftline.errors import (
    ContextOverflow,
    DeadlineExceeded,
    InputError,
    LimitReached,
    ModelError,
    StepError,
    WorkerDied,
)

HI = [{"role": "user", "content": "hi"}]
USAGE = {"prompt_tokens": 3, "completion_tokens": 5, "cached_tokens": 2, "finish_reason": "length"}
CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
TOOLS: Any = [{"type": "function", "function": {"name": "f"}}]
TOKEN = {"id": 7, "token": "é", "logprob": -0.5, "top": [{"id": 8, "token": "e", "logprob": -0.7}]}
ERRORS: dict[str, BaseException] = {
    "long": ContextOverflow("step answer: prompt: found 900 tokens, expected at most 511; shorten it", param="prompt"),
    "input": InputError("step answer: sampling.tokens_max: found 0, expected at least 1", param="tokens_max"),
    "busy": LimitReached("the queue is full", retry_after_s=0.25),
    "late": DeadlineExceeded("out of time"),
    "broken": StepError("0xdeadbeef at /secret/model.py", "answer"),
    "dead": WorkerDied("step answer: its worker died"),
    "closed": ModelError("model shapes cannot be opened"),
    "bug": ValueError("Traceback (most recent call last): /secret/x.py 0xdeadbeef"),
}


def answer(ask: Ask) -> dict[str, Any]:
    n = ask.inputs.get("sampling", {}).get("n", 1)
    choices = [
        {"index": at, "text": f"hello{at or ''}", "finish_reason": "length", "logprobs": [TOKEN]} for at in range(n)
    ]
    return {"text": "hello", "usage": USAGE, "answers": choices}


def fail(ask: Ask) -> dict[str, Any]:
    raise ERRORS[ask.inputs["messages"][-1]["content"]]


async def forever(ask: Ask) -> dict[str, Any]:
    await asyncio.sleep(60)
    return {}


def thinking(count: int, calls: bool) -> dict[str, Any]:
    """Return outputs like those of an llm step whose answers have reasoning, and calls where there are tools."""
    finish = "tool_calls" if calls else "stop"
    one = {"text": "" if calls else "yes", "reasoning": "hm", "finish_reason": finish}
    answers = [{"index": at} | one | ({"tool_calls": [CALL, CALL]} if calls else {}) for at in range(count)]
    return {"reply": one["text"], "reasoning": "hm", "usage": {"finish_reason": finish}, "answers": answers}


MODELS = {
    "chat": chatting(answer),
    "fail": chatting(fail, "fail"),
    "slow": chatting(forever, "slow"),
    "breaks": chatting(lambda ask: {"text": "ab", "usage": StepError("it broke", "answer")}, "breaks"),
    "plain": (info("plain", {"question": "text"}, {"reply": "text"}), lambda ask: {"reply": ask.inputs["question"]}),
    "calls": (
        info("calls", {"messages": "json", "tools": "json"}, {"text": "text", "tool_calls": "json"}),
        lambda ask: {"text": "", "tool_calls": [CALL]},
    ),
    "nan-calls": (
        info("nan-calls", {"messages": "json", "tools": "json"}, {"text": "text", "tool_calls": "json"}),
        lambda ask: {"text": "ab", "tool_calls": [CALL | {"more": [{"score": math.nan}]}]},
    ),
    "thinks": (
        info(
            "thinks",
            {"messages": "json", "tools": "json?", "sampling": "json?"},
            {"reasoning": "text", "reply": "text", "usage": "json", "answers": "json"},
            "reasoning",
            "reply",
        ),
        lambda ask: thinking(ask.inputs.get("sampling", {}).get("n", 1), "tools" in ask.inputs),
    ),
    "numbers": (info("numbers", {"x": "float32[3]"}, {"y": "float32[3]"}), lambda ask: {}),
}


@pytest.fixture(scope="module")
def backend() -> Functions:
    return Functions(MODELS)


@pytest.fixture(scope="module")
def endpoint(backend: Functions) -> Iterator[Hosted]:
    with hosted(backend) as endpoint:
        yield endpoint


def wait_until(true: Any, timeout_s: float = 10) -> None:
    until = time.monotonic() + timeout_s
    while not true():
        assert time.monotonic() < until
        time.sleep(0.005)


def test_an_answer_comes_whole_with_its_usage(client: openai.OpenAI, backend: Functions) -> None:
    response = client.chat.completions.create(model="chat", messages=HI, max_tokens=5, temperature=0.5, user="me")
    assert response.choices[0].message.content == "hello"
    assert response.choices[0].finish_reason == "length"
    assert response.usage is not None
    assert (response.usage.prompt_tokens, response.usage.completion_tokens, response.usage.total_tokens) == (3, 5, 8)
    assert response.usage.prompt_tokens_details is not None
    assert response.usage.prompt_tokens_details.cached_tokens == 2
    assert response.id.startswith("chatcmpl-")
    ask = backend.asked[-1]
    assert ask.inputs == {"messages": HI, "sampling": {"tokens_max": 5, "temperature": 0.5}}
    assert (ask.model, ask.outputs, ask.protocol) == ("chat", ("text", "usage"), "http")


def test_an_answer_streams_piece_by_piece_and_counts_at_the_end(client: openai.OpenAI) -> None:
    stream = client.chat.completions.create(
        model="chat", messages=HI, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    texts = [chunk.choices[0].delta.content for chunk in chunks if chunk.choices and chunk.choices[0].delta.content]
    assert texts == list("hello")
    assert chunks[0].choices[0].delta.role == "assistant"
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1] == "length"
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.total_tokens == 8
    assert len({chunk.id for chunk in chunks}) == 1


def test_a_stream_without_usage_has_none(client: openai.OpenAI) -> None:
    assert all(chunk.choices for chunk in client.chat.completions.create(model="chat", messages=HI, stream=True))


def test_several_answers_are_choices_whole_and_streamed(client: openai.OpenAI) -> None:
    response = client.chat.completions.create(model="chat", messages=HI, n=2)
    assert [(one.index, one.message.content) for one in response.choices] == [(0, "hello"), (1, "hello1")]
    texts = {0: "", 1: ""}
    for chunk in client.chat.completions.create(model="chat", messages=HI, n=2, stream=True):
        for one in chunk.choices:
            texts[one.index] += one.delta.content or ""
    assert texts == {0: "hello", 1: "hello1"}


def test_log_probabilities_have_the_token_its_bytes_and_its_rivals(client: openai.OpenAI) -> None:
    response = client.chat.completions.create(model="chat", messages=HI, logprobs=True, top_logprobs=1)
    assert response.choices[0].logprobs is not None
    assert response.choices[0].logprobs.content is not None
    token = response.choices[0].logprobs.content[0]
    assert (token.token, token.logprob, token.bytes) == ("é", -0.5, [0xC3, 0xA9])
    assert token.top_logprobs[0].token == "e"
    stream = client.chat.completions.create(model="chat", messages=HI, logprobs=True, stream=True)
    assert [chunk.choices[0].logprobs.content for chunk in stream if chunk.choices[0].logprobs]


def test_a_model_that_takes_only_text_gets_the_question(client: openai.OpenAI) -> None:
    response = client.chat.completions.create(model="plain", messages=HI)
    assert response.choices[0].message.content == "hi"
    assert response.usage is not None
    assert response.usage.total_tokens == 0
    text = [c.choices[0].delta.content for c in client.chat.completions.create(model="plain", messages=HI, stream=True)]
    assert "".join(one or "" for one in text) == "hi"


def test_tool_calls_that_a_pipeline_gives_are_passed_through(client: openai.OpenAI) -> None:
    tools: Any = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    response = client.chat.completions.create(model="calls", messages=HI, tools=tools)
    assert response.choices[0].finish_reason == "tool_calls"
    assert response.choices[0].message.tool_calls is not None
    assert response.choices[0].message.tool_calls[0].id == "c1"
    chunks = list(client.chat.completions.create(model="calls", messages=HI, tools=tools, stream=True))
    pieces = [c.choices[0].delta.tool_calls[0] for c in chunks if c.choices[0].delta.tool_calls]
    assert [(one.index, one.id, one.function and one.function.name) for one in pieces] == [
        (0, "c1", "f"),
        (0, None, None),
    ]
    assert chunks[-1].choices[0].finish_reason == "tool_calls"


@pytest.mark.parametrize("stream", [False, True])
def test_tool_calls_with_a_number_that_json_lacks_are_an_error(client: openai.OpenAI, stream: bool) -> None:
    tools: Any = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    with pytest.raises(openai.APIError, match="tool calls with NaN or an infinite number, which JSON lacks"):
        list(client.chat.completions.create(model="nan-calls", messages=HI, tools=tools, stream=stream))


@pytest.mark.parametrize("n", [1, 2])
def test_reasoning_is_apart_from_the_content(client: openai.OpenAI, n: int) -> None:
    for one in client.chat.completions.create(model="thinks", messages=HI, n=n).choices:
        assert one.message.content == "yes" and one.finish_reason == "stop" and one.message.tool_calls is None
        assert one.message.model_extra == {"reasoning_content": "hm"}
    texts = [["", ""] for _ in range(n)]
    for chunk in client.chat.completions.create(model="thinks", messages=HI, n=n, stream=True):
        [choice] = chunk.choices
        texts[choice.index][0] += (choice.delta.model_extra or {}).get("reasoning_content", "")
        texts[choice.index][1] += choice.delta.content or ""
    assert texts == [["hm", "yes"]] * n


@pytest.mark.parametrize("n", [1, 2])
def test_calls_are_found_in_the_answers_without_an_output(client: openai.OpenAI, n: int) -> None:
    tools: Any = [{"type": "function", "function": {"name": "f", "parameters": {}, "strict": True}}]
    response = client.chat.completions.create(model="thinks", messages=HI, tools=tools, n=n)
    assert len(response.choices) == n
    for one in response.choices:
        assert one.message.content is None and one.finish_reason == "tool_calls"
        assert [call.model_dump() for call in one.message.tool_calls or ()] == [CALL, CALL]
    with client.chat.completions.stream(model="thinks", messages=HI, tools=tools, n=n) as stream:
        streamed = stream.get_final_completion()
    for one in streamed.choices:
        assert [call.function.name for call in one.message.tool_calls or ()] == ["f", "f"]
        assert [call.function.arguments for call in one.message.tool_calls or ()] == ["{}", "{}"]
        assert one.finish_reason == "tool_calls" and not one.message.content


@pytest.mark.parametrize(
    ("said", "error", "code"),
    [
        ("input", openai.BadRequestError, 400),
        ("long", openai.BadRequestError, 400),
        ("busy", openai.RateLimitError, 429),
        ("late", openai.InternalServerError, 504),
        ("broken", openai.InternalServerError, 500),
        ("dead", openai.InternalServerError, 503),
        ("closed", openai.ConflictError, 409),
        ("bug", openai.InternalServerError, 500),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_errors_are_typed_and_say_nothing_of_the_inside(
    client: openai.OpenAI, said: str, error: type[openai.APIStatusError], code: int, stream: bool
) -> None:
    with pytest.raises(error) as refused:
        client.chat.completions.create(model="fail", messages=[{"role": "user", "content": said}], stream=stream)
    assert refused.value.status_code == code
    for secret in ("0xdead", "Traceback", "/secret"):
        assert secret not in refused.value.response.text
    body: Any = refused.value.body
    assert set(body) == {"message", "type", "param", "code"}
    if said == "input":
        assert body["param"] == "max_tokens"
    if said == "busy":
        assert refused.value.response.headers["retry-after"] == "1"
        assert refused.value.response.headers["retry-after-ms"] == "250"
    retry = "true" if code in (429, 503) else "false"
    assert refused.value.response.headers["x-should-retry"] == retry


CHAT = "/v1/chat/completions"
CODES: list[tuple[str, str, Any, int, str]] = [
    ("GET", CHAT, {}, 405, "method_not_supported"),
    ("POST", "/v1/nothing", {}, 404, "unknown_url"),
    ("POST", CHAT, {"model": "nope", "messages": HI}, 404, "model_not_found"),
    ("POST", CHAT, {"model": "chat", "messages": HI, "best_of": 2}, 400, "unsupported_parameter"),
    ("POST", CHAT, {"model": "chat", "messages": HI, "typo": 2}, 400, "unknown_parameter"),
]


@pytest.mark.parametrize(("method", "path", "body", "status", "code"), CODES)
def test_errors_have_the_types_and_codes_of_openai(
    endpoint: Hosted, method: str, path: str, body: Any, status: int, code: str
) -> None:
    response = httpx.request(method, f"{endpoint.url}{path}", json=body)
    error = response.json()["error"]
    assert (response.status_code, error["type"], error["code"]) == (status, "invalid_request_error", code)
    assert response.headers["x-request-id"].startswith("req_")
    assert (response.headers.get("allow") == "POST") == (status == 405)


def test_an_overflow_has_the_code_and_words_that_clients_act_on(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="This model's maximum context length is") as refused:
        client.chat.completions.create(model="fail", messages=[{"role": "user", "content": "long"}])
    assert (refused.value.code, refused.value.param) == ("context_length_exceeded", "messages")


def test_every_response_has_the_id_of_its_request(client: openai.OpenAI, backend: Functions) -> None:
    found = client.chat.completions.create(model="chat", messages=HI)
    assert found._request_id is not None and found._request_id == backend.asked[-1].id
    stream = client.chat.completions.create(model="chat", messages=HI, stream=True)
    assert stream.response.headers["x-request-id"].startswith("req_")


@pytest.mark.parametrize("stream", [False, True])
def test_responses_pass_the_strict_models_of_the_client(endpoint: Hosted, stream: bool) -> None:
    body: Any = {"model": "chat", "messages": HI, "n": 2, "logprobs": True, "top_logprobs": 1, "stream": stream}
    for name, more in (("chat", {}), ("thinks", {"logprobs": None, "top_logprobs": None, "tools": TOOLS})):
        with httpx.stream(
            "POST", f"{endpoint.url}/v1/chat/completions", json=body | {"model": name} | more
        ) as response:
            response.read()
            lines = [line.removeprefix("data: ") for line in response.text.splitlines() if line.startswith("data: {")]
            for text in lines if stream else [response.text]:
                (ChatCompletionChunk if stream else ChatCompletion).model_validate_json(text, strict=True)


def test_an_unknown_model_is_not_found(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as refused:
        client.chat.completions.create(model="nope", messages=HI)
    assert refused.value.code == "model_not_found"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("nope")


def test_a_model_that_cannot_chat_says_so(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="cannot chat"):
        client.chat.completions.create(model="numbers", messages=HI)


@pytest.mark.parametrize(
    ("field", "value"), [("temperature", 0.3), ("n", 2), ("logprobs", True), ("tools", [{"type": "function"}])]
)
def test_what_a_model_cannot_do_is_refused_by_name(client: openai.OpenAI, field: str, value: Any) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(model="plain", messages=HI, extra_body={field: value})
    assert refused.value.param == field


def test_an_error_in_the_middle_of_a_stream_ends_it(client: openai.OpenAI) -> None:
    texts = []
    with pytest.raises(openai.APIError, match="it broke"):
        for chunk in client.chat.completions.create(model="breaks", messages=HI, stream=True):
            texts.append(chunk.choices[0].delta.content)
    assert texts == ["", "a", "b"]


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_before_the_answer_withdraws_its_request(
    endpoint: Hosted, backend: Functions, stream: bool
) -> None:
    body = {"model": "slow", "messages": HI, "stream": stream}
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(
            f"{endpoint.url}/v1/chat/completions", json=body, headers={"x-request-id": f"leaves-{stream}"}, timeout=0.3
        )
    wait_until(lambda: f"leaves-{stream}" in backend.withdrawn)


def test_a_client_that_leaves_a_stream_withdraws_its_request(
    client: openai.OpenAI, backend: Functions, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backend, "piece_s", 0.05)
    stream = client.chat.completions.create(
        model="chat", messages=HI, stream=True, extra_headers={"x-request-id": "midway"}
    )
    next(iter(stream))
    stream.close()
    wait_until(lambda: "midway" in backend.withdrawn)


def test_headers_name_limit_and_trace_a_request(client: openai.OpenAI, backend: Functions) -> None:
    trace = "00-" + "a" * 32 + "-" + "b" * 16 + "-01"
    headers = {"x-request-id": "r-1", "x-request-timeout-ms": "1500", "traceparent": trace}
    response = client.chat.completions.with_raw_response.create(
        model="chat", messages=HI, extra_headers=headers, extra_body={"priority": -3}
    )
    ask = backend.asked[-1]
    assert (ask.id, ask.deadline_ms, ask.traceparent, ask.priority) == ("r-1", 1500, trace, 3)
    assert response.headers["x-request-id"] == "r-1"
    assert response.headers["traceparent"] == trace.replace("b", "c")
    with pytest.raises(openai.BadRequestError):
        client.chat.completions.create(model="chat", messages=HI, extra_headers={"x-request-timeout-ms": "soon"})


def test_models_are_listed_while_they_are_ready(client: openai.OpenAI, backend: Functions) -> None:
    assert [one.id for one in client.models.list()] == sorted(MODELS)
    backend.states["slow"] = "loading"
    assert "slow" not in [one.id for one in client.models.list()]
    del backend.states["slow"]
    assert client.models.retrieve("chat").owned_by == "weftline"


def test_the_async_client_works_too(endpoint: Hosted) -> None:
    async def chat() -> str:
        async with openai.AsyncOpenAI(base_url=f"{endpoint.url}/v1", api_key="none") as client:
            stream = await client.chat.completions.create(model="chat", messages=HI, stream=True)
            return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

    assert asyncio.run(chat()) == "hello"


def test_every_answer_gives_its_memory_back(client: openai.OpenAI, backend: Functions) -> None:
    before = backend.released
    client.chat.completions.create(model="chat", messages=HI)
    assert backend.released == before + 1
