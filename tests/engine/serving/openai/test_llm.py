"""The stock `openai` client against the bundled language model."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import openai
import pytest

from tests.engine.serving.http.hosted import Hosted, hosted_pipelines
from weftline.engine.serving.config import ServedPipeline

MODEL = Path(__file__).resolve().parents[4] / "examples/models/shapes-chat"
CHAT = f"""
weftline: 1
name: chat
inputs:
  prompt: {{type: text, optional: true}}
  messages: {{type: json, optional: true}}
  tools: {{type: json, optional: true}}
  sampling: {{type: json, optional: true}}
  template: {{type: json, optional: true}}
  tenant: {{type: text, optional: true}}
steps:
  answer:
    node: llm
    model: {MODEL}
    fuse: false
    kv_bytes: 16777216
    sampling: {{tokens_max: 24}}
    inputs: {{prompt: prompt, messages: messages, tools: tools, sampling: sampling, template: template, tenant: tenant}}
outputs: {{text: answer.text, usage: answer.usage, answers: answer.answers, logprobs: answer.logprobs}}
"""
ASKED: Any = [
    {"role": "system", "content": "You are a helpful assistant. Answer in one sentence."},
    {"role": "user", "content": "The photo shows: 2 red circles. Question: how many circles are there?"},
]


pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def endpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosted]:
    folder = tmp_path_factory.mktemp("pipelines")
    (folder / "chat.yaml").write_text(CHAT)
    served = {"chat": ServedPipeline(folder / "chat.yaml")}
    with hosted_pipelines(served) as endpoint:
        yield endpoint


def test_it_answers_the_same_whole_and_streamed(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(model="chat", messages=ASKED, temperature=0)
    text = whole.choices[0].message.content
    assert text
    chunks = list(
        client.chat.completions.create(
            model="chat", messages=ASKED, temperature=0, stream=True, stream_options={"include_usage": True}
        )
    )
    pieces = [chunk.choices[0].delta.content for chunk in chunks if chunk.choices and chunk.choices[0].delta.content]
    assert "".join(pieces) == text
    assert len(pieces) > 1
    assert whole.usage is not None
    assert chunks[-1].usage is not None
    assert whole.usage.completion_tokens == chunks[-1].usage.completion_tokens > 0
    assert whole.usage.prompt_tokens > 10


def test_a_length_is_kept_and_reported(client: openai.OpenAI) -> None:
    response = client.chat.completions.create(model="chat", messages=ASKED, max_completion_tokens=2)
    assert response.choices[0].finish_reason == "length"
    assert response.usage is not None
    assert response.usage.completion_tokens == 2


def test_an_answer_has_the_json_that_was_asked_for(client: openai.OpenAI) -> None:
    schema = {"type": "string", "enum": ["seven", "eleven"]}
    response = client.chat.completions.create(
        model="chat",
        messages=ASKED,
        response_format={"type": "json_schema", "json_schema": {"name": "count", "schema": schema}},  # type: ignore
    )
    assert msgspec.json.decode(response.choices[0].message.content or "") in ("seven", "eleven")


def test_several_answers_and_their_log_probabilities(client: openai.OpenAI) -> None:
    response = client.chat.completions.create(
        model="chat", messages=ASKED, n=2, temperature=1.0, seed=3, logprobs=True, top_logprobs=2, max_tokens=4
    )
    assert [one.index for one in response.choices] == [0, 1]
    for one in response.choices:
        assert one.logprobs is not None
        assert one.logprobs.content is not None
        assert [len(token.top_logprobs) for token in one.logprobs.content] == [2] * len(one.logprobs.content)


def test_stop_ends_the_answer_before_the_word(client: openai.OpenAI) -> None:
    text = client.completions.create(model="chat", prompt="hello", temperature=0).choices[0].text
    word = text.split()[1]
    cut = client.completions.create(model="chat", prompt="hello", temperature=0, stop=[word]).choices[0]
    assert (cut.text, cut.finish_reason) == (text[: text.index(word)], "stop")


JSON = {
    "type": "object",
    "properties": {"count": {"enum": [7, 11]}},
    "required": ["count"],
    "additionalProperties": False,
}


@pytest.mark.parametrize(
    "body",
    [
        {"structured_outputs": {"choice": ["zebra", "gnu"]}},
        {"structured_outputs": {"regex": "zebra|gnu"}},
        {"structured_outputs": {"grammar": 'start: "zebra" | "gnu"'}},
        {"guided_choice": ["zebra", "gnu"]},
        {"guided_regex": "zebra|gnu"},
        {"guided_grammar": 'root ::= "zebra" | "gnu"'},
        {"regex": "zebra|gnu"},
        {"ebnf": 'root ::= animal\nanimal ::= "zebra" | "gnu"'},
        {"response_format": {"type": "regex", "regex": "zebra|gnu"}},
        {"structured_outputs": {"json": JSON}},
        {"guided_json": JSON},
        {"guided_json": msgspec.json.encode(JSON).decode()},
        {"response_format": {"type": "json_object", "schema": JSON}},
    ],
    ids=lambda body: f"{next(iter(body))}",
)
@pytest.mark.parametrize("stream", [False, True])
def test_a_constraint_of_any_client_holds(client: openai.OpenAI, body: dict[str, Any], stream: bool) -> None:
    asked: dict[str, Any] = {"model": "chat", "extra_body": body, "stream": stream, "max_tokens": 60}
    answers = [client.chat.completions.create(messages=ASKED, **asked), client.completions.create(prompt="hi", **asked)]
    if stream:
        chat = "".join(one.choices[0].delta.content or "" for one in answers[0])
        text = "".join(one.choices[0].text for one in answers[1])
    else:
        chat, text = answers[0].choices[0].message.content, answers[1].choices[0].text
    for found in (chat, text):
        assert found in ("zebra", "gnu") or msgspec.json.decode(found)["count"] in (7, 11)


def test_an_answer_goes_on_from_the_last_message(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(model="chat", messages=ASKED).choices[0].message.content or ""
    first = whole.split()[0]
    begun: Any = [*ASKED, {"role": "assistant", "content": first}]
    more = client.chat.completions.create(model="chat", messages=begun, extra_body={"continue_final_message": True})
    assert first + (more.choices[0].message.content or "") == whole


def test_a_prompt_is_completed_without_the_chat_template(client: openai.OpenAI) -> None:
    plain = client.completions.create(model="chat", prompt="There are 2 red", max_tokens=1)
    asked = client.chat.completions.create(
        model="chat", messages=[{"role": "user", "content": "There are 2 red"}], max_tokens=1
    )
    assert plain.usage is not None and asked.usage is not None
    assert plain.usage.prompt_tokens < asked.usage.prompt_tokens


@pytest.mark.parametrize(
    "body",
    [
        {"reasoning_effort": "high"},
        {"chat_template_kwargs": {"messages": []}},
        {"guided_regex": "("},
        {"structured_outputs": {"grammar": "start: nothing"}},
        {"ebnf": "root ::= nothing"},
    ],
)
def test_a_field_that_the_template_or_grammar_refuses_is_named(client: openai.OpenAI, body: dict[str, Any]) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(model="chat", messages=ASKED, extra_body=body)
    assert refused.value.param == next(iter(body))


@pytest.mark.parametrize("stop", [None, " the"])
def test_tokens_of_a_chat_are_its_content(client: openai.OpenAI, stop: str | None) -> None:
    asked: Any = {"model": "chat", "messages": ASKED, "logprobs": True, "top_logprobs": 2, "stop": stop}
    whole = client.chat.completions.create(**asked).choices[0]
    chunks = [one.choices[0] for one in client.chat.completions.create(stream=True, **asked)]
    tokens = whole.logprobs.content
    assert bytes(byte for one in tokens for byte in one.bytes).decode() == whole.message.content
    assert all(one.top_logprobs[0].logprob >= one.logprob for one in tokens)
    streamed = [one for chunk in chunks if chunk.logprobs for one in chunk.logprobs.content]
    assert [(one.token, one.bytes) for one in streamed] == [(one.token, one.bytes) for one in tokens]
    for chunk in [one for one in chunks if one.delta.content]:
        assert "".join(one.token for one in chunk.logprobs.content) == chunk.delta.content
    assert len([one for one in chunks if one.logprobs]) > 3


def test_tokens_of_a_completion_have_their_offsets(client: openai.OpenAI) -> None:
    asked: Any = {"model": "chat", "prompt": "The photo shows: 2 red é", "logprobs": 2, "max_tokens": 6}
    ignoring: Any = {"extra_body": {"ignore_eos": True}}
    whole = client.completions.create(**asked, **ignoring).choices[0]
    for token, offset in zip(whole.logprobs.tokens, whole.logprobs.text_offset, strict=True):
        assert whole.text[offset : offset + len(token)] == token or token.startswith(("<", "bytes:"))
    chunks = [one.choices[0].logprobs for one in client.completions.create(stream=True, **asked, **ignoring)]
    for column in ("tokens", "text_offset"):
        parts = [getattr(one, column) for one in chunks if one is not None]
        assert [one for part in parts for one in part] == getattr(whole.logprobs, column) and len(parts) > 2


@pytest.mark.parametrize("tokens", [0, 1])
@pytest.mark.parametrize("stream", [False, True])
def test_a_text_is_scored(client: openai.OpenAI, tokens: int, stream: bool) -> None:
    text = "The photo shows: 2 red circles."
    asked: Any = {"model": "chat", "prompt": text, "echo": True, "logprobs": 1, "max_tokens": tokens}
    if stream:
        events = list(client.completions.create(stream=True, stream_options={"include_usage": True}, **asked))
        answer, usage = "".join(one.choices[0].text for one in events if one.choices), events[-1].usage
        [scores] = [one.choices[0].logprobs for one in events if one.choices and one.choices[0].logprobs]
    else:
        found = client.completions.create(**asked)
        answer, usage, scores = found.choices[0].text, found.usage, found.choices[0].logprobs
    assert answer.startswith(text) and (answer == text or tokens)
    assert usage is not None and usage.completion_tokens == tokens
    assert scores.token_logprobs[0] is None and scores.top_logprobs[0] is None
    assert all(one <= 0 for one in scores.token_logprobs[1:])
    assert len(scores.tokens) == usage.prompt_tokens + tokens
    assert "".join(scores.tokens[: usage.prompt_tokens]).endswith(text)
    assert scores.text_offset[-1] == len(text) - (0 if tokens else len(scores.tokens[-1]))


def test_a_prompt_of_token_ids_is_that_of_its_text(client: openai.OpenAI, endpoint: Hosted) -> None:
    def post(path: str, **body: Any) -> Any:
        response = httpx.post(f"{endpoint.url}{path}", json={"model": "chat"} | body)
        assert response.status_code == 200, response.text
        return response.json()

    text = "There are 2 red"
    read = post("/tokenize", prompt=text, return_token_strs=True)
    assert read["count"] == len(read["tokens"]) == len(read["token_strs"])
    assert read["max_model_len"] == client.models.retrieve("chat").max_model_len == 1024  # type: ignore[attr-defined]
    assert post("/detokenize", tokens=read["tokens"])["prompt"].endswith(text)
    asked: Any = {"model": "chat", "max_tokens": 5, "temperature": 0}
    whole = client.completions.create(prompt=text, **asked)
    several = client.completions.create(prompt=[read["tokens"], read["tokens"]], **asked)
    assert [one.text for one in several.choices] == [whole.choices[0].text] * 2
    assert client.completions.create(prompt=read["tokens"], **asked).usage == whole.usage
    chat = post("/tokenize", messages=ASKED)
    spoken = client.chat.completions.create(model="chat", messages=ASKED, max_tokens=1).usage
    assert spoken is not None and spoken.prompt_tokens == chat["count"]


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/completions", {"prompt": [99_999_999]}, "prompt"),
        ("/tokenize", {"prompt": ["a", "b"]}, "prompt"),
        ("/tokenize", {"prompt": "a", "no_such": 1}, "no_such"),
        ("/tokenize", {"messages": ASKED, "chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
        ("/detokenize", {"tokens": []}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "prompt"),
        ("/detokenize", {"tokens": ["1"]}, "tokens"),
    ],
)
def test_wrong_token_ids_are_refused_by_name(endpoint: Hosted, path: str, body: Any, param: str) -> None:
    response = httpx.post(f"{endpoint.url}{path}", json={"model": "chat"} | body)
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)


def test_a_length_of_zero_needs_an_echo(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        client.completions.create(model="chat", prompt="hi", max_tokens=0)
    assert refused.value.param == "max_tokens"


def schema(value: dict[str, Any]) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "count", "schema": value}}}


@pytest.mark.parametrize(
    "body",
    [
        {"temperature": -1},
        {"max_tokens": 0},
        {"max_completion_tokens": -5},
        {"min_tokens": "1"},
        {"logit_bias": {"x": 1}},
        {"logit_bias": {"5": 1000}},
        {"logit_bias": {"99999999": 1}},
        {"top_k": -2},
        {"stop": 5},
        {"stop": ["", "end"]},
        {"bad_words": ["x"] * 10_000},
        schema({"type": "no such type"}),
        schema({"type": "string", "pattern": "("}),
    ],
    ids=lambda body: f"{next(iter(body))}",
)
@pytest.mark.parametrize("stream", [False, True])
def test_the_field_that_the_step_refuses_is_named(client: openai.OpenAI, body: dict[str, Any], stream: bool) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(model="chat", messages=ASKED, stream=stream, extra_body=body)
    assert refused.value.param == next(iter(body))


def test_the_field_is_named_when_it_asks_for_too_many_log_probabilities(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(model="chat", messages=ASKED, logprobs=True, top_logprobs=21)
    assert refused.value.param == "top_logprobs"
    with pytest.raises(openai.BadRequestError) as refused:
        client.completions.create(model="chat", prompt="hello", logprobs=21)
    assert refused.value.param == "logprobs"
    with pytest.raises(openai.BadRequestError) as refused:
        client.completions.create(model="chat", prompt="hello", temperature=-1)
    assert refused.value.param == "temperature"


def test_the_prompt_is_named_when_it_does_not_fit_the_context(client: openai.OpenAI) -> None:
    long = "red circle " * 4000
    with pytest.raises(openai.BadRequestError, match="tokens") as refused:
        client.chat.completions.create(model="chat", messages=[{"role": "user", "content": long}])
    assert refused.value.param == "messages"
    with pytest.raises(openai.BadRequestError, match="tokens") as refused:
        client.completions.create(model="chat", prompt=long)
    assert refused.value.param == "prompt"


def test_a_stream_that_is_left_frees_the_pages(client: openai.OpenAI, endpoint: Hosted) -> None:
    stream = client.chat.completions.create(
        model="chat", messages=ASKED, stream=True, max_tokens=400, extra_body={"ignore_eos": True}
    )
    next(iter(stream))
    stream.close()
    response = client.chat.completions.create(model="chat", messages=ASKED, max_tokens=2)
    assert response.choices
