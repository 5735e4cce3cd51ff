"""Completions, embeddings, transcriptions (with the stock `openai` client) and rerank; the models are functions."""

import asyncio
import io
import math
import tempfile
from collections.abc import Iterator
from typing import Any

import httpx
import numpy as np
import openai
import pytest
import soundfile

import weftline
from tests.engine.serving.http.backends import Functions, chatting, info
from tests.engine.serving.http.hosted import Hosted, hosted
from weftline.engine.serving.backend import Ask
from weftline.engine.serving.config import ServeLimits
from weftline.engine.serving.openai.completions import chat_logprobs_json, text_logprobs_json, usage_of
from weftline.errors import InputError, StepError

USAGE = {"prompt_tokens": 2, "completion_tokens": 3, "finish_reason": "stop"}


def echoes(ask: Ask) -> dict[str, Any]:
    said, n = ask.inputs["prompt"], ask.inputs.get("sampling", {}).get("n", 1)
    token = {"token": said, "logprob": -1.0, "top": []}
    choices = [{"text": f"{said}{at}", "finish_reason": "stop", "logprobs": [token]} for at in range(n)]
    return {"text": f"{said}0", "usage": USAGE, "answers": choices}


async def embeds(ask: Ask) -> dict[str, Any]:
    text = ask.inputs["text"]
    if text == "bad":
        await asyncio.sleep(0.05)
        raise InputError("this text cannot be embedded")
    if text == "slow":
        await asyncio.sleep(60)
    first = float(text) if text in ("nan", "-inf") else len(text)
    vector = np.array([first, 0.5, -1.0], np.float32)
    if "tokens" in ask.inputs:
        if max(ask.inputs["tokens"]) > 99:
            raise InputError("tokens: found 100 at 0", param="tokens")
        return {"embedding": np.array(ask.inputs["tokens"], np.float32), "usage": {"prompt_tokens": 3}}
    if "overflow" not in ask.inputs:
        return {"embedding": vector, "usage": {"prompt_tokens": 4}}
    if ask.inputs["overflow"] == "error":
        raise InputError("overflow: no", param="overflow")
    return {"embedding": vector, "usage": {"prompt_tokens": 4, "truncated_tokens": 3, "seen": ask.inputs["overflow"]}}


def ranks(ask: Ask) -> dict[str, Any]:
    if ask.inputs.get("overflow") == "start":
        return {"scores": np.zeros(2, np.float32), "usage": {"prompt_tokens": 7, "truncated_tokens": 9}}
    scores = [one.count(ask.inputs["query"]) / 4 for one in ask.inputs["passages"]]
    scores = [float("nan") if ask.inputs["query"] == "nan" else one for one in scores]
    short = scores[1:] if ask.inputs["query"] == "short" else scores
    return {"scores": np.array(short, np.float32), "usage": {"prompt_tokens": 7}}


TIMED = [
    {
        "start": 0.25, "end": 1.5, "text": "Good <morning>", "no_speech": 0.01, "logprob": -0.25,
        "words": [
            {"word": " Good", "start": 0.25, "end": 0.5, "probability": 0.9},
            {"word": " <morning>", "start": 0.5, "end": 1.5, "probability": 0.8},
        ],
    },
    {"start": 1.5, "end": 1.75, "text": "world", "words": [{"word": " world", "start": 1.5, "end": 1.75}]},
]  # fmt: skip


def hears(ask: Ask) -> dict[str, Any]:
    wanted = ask.inputs.get("language", "en")
    odd: Any = {
        "xx": "none", "yy": [{"start": "0"}], "zz": [{"start": 0, "end": 1, "text": "a"}],
        "nan": [TIMED[0] | {"logprob": math.nan}], "inf": [TIMED[0] | {"no_speech": math.inf}],
        "end": [TIMED[0] | {"end": math.nan}],
    }  # fmt: skip
    segments = odd.get(wanted, TIMED)
    return {"text": f"Good <morning> world, {ask.inputs['task']}", "segments": segments, "language": wanted}


SPOKEN = np.sin(np.arange(8000, dtype=np.float32) / 9)
RANK_INPUTS = {"query": "text", "passages": "list[text]"}
MODELS = {
    "text": chatting(echoes, "text"),
    "embed": (info("embed", {"text": "text"}, {"embedding": "float32[3]", "usage": "json"}), embeds),
    "ids": (
        info("ids", {"text": "text", "tokens": "json?"}, {"embedding": "float32[3]", "usage": "json"}),
        embeds,
    ),
    "cutting": (
        info("cutting", {"text": "text", "overflow": "json?"}, {"embedding": "float32[3]", "usage": "json"}),
        embeds,
    ),
    "rank-cutting": (
        info("rank-cutting", RANK_INPUTS | {"overflow": "json?"}, {"scores": "float32[N]", "usage": "json"}),
        ranks,
    ),
    "any-length": (info("any-length", {"text": "text"}, {"embedding": "float32[D]"}), embeds),
    "rank": (info("rank", RANK_INPUTS | {"tenant": "text?"}, {"scores": "float32[N]", "usage": "json"}), ranks),
    "no-rank": (info("no-rank", RANK_INPUTS, {"scores": "float32[N]?"}), lambda ask: {"scores": None}),
    "voice": (
        info("voice", {"text": "text", "speed": "json?"}, {"audio": "audio"}),
        lambda ask: {"audio": SPOKEN / ask.inputs.get("speed", 1)},
    ),
    "plain-voice": (info("plain-voice", {"text": "text"}, {"audio": "audio"}), lambda ask: {"audio": SPOKEN}),
    "ears": (
        info("ears", {"speech": "audio", "language": "text?"}, {"text": "text"}, "text"),
        lambda ask: {"text": f"{len(ask.inputs['speech'])} bytes of {ask.inputs.get('language', 'speech')}"},
    ),
    "timed-ears": (
        info(
            "timed-ears",
            {"speech": "audio", "language": "text?", "task": "text?"},
            {"text": "text", "segments": "json", "language": "text", "srt": "text"},
        ),
        hears,
    ),
}


ALIASES = {"org/embedder": "embed", "org/ranker:v1": "rank", "gone": "no-such-model"}


@pytest.fixture(scope="module")
def backend() -> Functions:
    return Functions(MODELS)


@pytest.fixture(scope="module")
def endpoint(backend: Functions) -> Iterator[Hosted]:
    with hosted(backend, limits=ServeLimits(batch_max=8), aliases=ALIASES) as endpoint:
        yield endpoint


def test_a_prompt_is_completed_and_counted(client: openai.OpenAI) -> None:
    response = client.completions.create(model="text", prompt="a", max_tokens=3)
    assert (response.choices[0].text, response.choices[0].finish_reason) == ("a0", "stop")
    assert response.usage is not None
    assert response.usage.total_tokens == 5


def test_several_prompts_have_their_answers_side_by_side(client: openai.OpenAI) -> None:
    response = client.completions.create(model="text", prompt=["a", "b"], n=2, logprobs=0)
    assert [(one.index, one.text) for one in response.choices] == [(0, "a0"), (1, "a1"), (2, "b0"), (3, "b1")]
    assert response.choices[2].logprobs is not None
    assert response.choices[2].logprobs.tokens == ["b"]
    assert response.choices[2].logprobs.text_offset == [0]
    assert response.usage is not None
    assert response.usage.total_tokens == 10


def test_a_completion_streams(client: openai.OpenAI) -> None:
    chunks = list(
        client.completions.create(model="text", prompt="ab", stream=True, stream_options={"include_usage": True})
    )
    assert "".join(chunk.choices[0].text for chunk in chunks if chunk.choices) == "ab0"
    assert len(chunks) == 5
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.total_tokens == 5


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"prompt": [1, 2, 3]}, "prompt"),
        ({"prompt": [[1, 2], []]}, "prompt"),
        ({"prompt": [1, "a"]}, "prompt"),
        ({"prompt": [[1, True]]}, "prompt"),
        ({"prompt": [[1, 2]]}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": None}, "prompt"),
        ({"prompt": ["a"] * 9}, "prompt"),
        ({"prompt": ["a", "b"], "stream": True}, "prompt"),
        ({"prompt": "a", "suffix": "z"}, "suffix"),
        ({"prompt": "a", "logprobs": 21}, "logprobs"),
        ({"prompt": "a", "stream": "yes"}, "stream"),
    ],
)
def test_completions_refuse_by_name(endpoint: Hosted, body: dict[str, Any], param: str) -> None:
    response = httpx.post(f"{endpoint.url}/v1/completions", json={"model": "text"} | body)
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)


@pytest.mark.parametrize("text", ["nan", "-inf"])
def test_a_vector_that_json_lacks_comes_as_base64_alone(client: openai.OpenAI, endpoint: Hosted, text: str) -> None:
    exact = client.embeddings.create(model="embed", input=text)  # the client asks for base64
    assert repr(exact.data[0].embedding) == repr([float(text), 0.5, -1.0])
    body = {"model": "embed", "input": ["a", text]}
    response = httpx.post(f"{endpoint.url}/v1/embeddings", json=body)
    assert response.status_code == 500 and "base64" in response.json()["error"]["message"]


def test_a_log_probability_is_a_number_of_json_or_an_error() -> None:
    token = {"token": "a", "logprob": -math.inf, "top": [{"token": "b", "logprob": -math.inf}]}
    for found in (chat_logprobs_json([token]), text_logprobs_json([token], [0])):
        assert str(found).count("-9999.0") >= 2 and "inf" not in str(found)
    for wrong in (math.nan, math.inf):
        for one in (token | {"logprob": wrong}, token | {"top": [{"token": "b", "logprob": wrong}]}):
            for form in (chat_logprobs_json, lambda tokens: text_logprobs_json(tokens, [0])):
                with pytest.raises(StepError, match=f"the model gave {wrong} as a log-probability"):
                    form([one])
    assert usage_of({"prompt_tokens": math.nan, "completion_tokens": math.inf, "cached_tokens": 2}).prompt == 0


def test_scores_that_json_lacks_are_an_error(endpoint: Hosted) -> None:
    body = {"model": "rank", "query": "nan", "documents": ["a", "b"]}
    response = httpx.post(f"{endpoint.url}/v1/rerank", json=body)
    assert response.status_code == 500 and "NaN" in response.json()["error"]["message"]


def test_embeddings_come_in_order_in_both_encodings(client: openai.OpenAI, endpoint: Hosted) -> None:
    response = client.embeddings.create(model="embed", input=["a", "bcd"])  # the client asks for base64
    assert [one.embedding for one in response.data] == [[1.0, 0.5, -1.0], [3.0, 0.5, -1.0]]
    assert (response.usage.prompt_tokens, response.usage.total_tokens) == (8, 8)
    plain = client.embeddings.create(model="embed", input="bcd", encoding_format="float")
    assert plain.data[0].embedding == [3.0, 0.5, -1.0]


def test_token_ids_are_embedded_beside_texts(client: openai.OpenAI, backend: Functions) -> None:
    for given, found in (([7, 8, 9], [[7, 8, 9]]), ([[7, 8, 9], [1, 2, 3]], [[7, 8, 9], [1, 2, 3]])):
        response = client.embeddings.create(model="ids", input=given)
        assert [one.embedding for one in response.data] == found
        assert backend.asked[-1].inputs == {"text": "", "tokens": found[-1]}
    mixed: Any = ["ab", [7, 8, 9]]
    assert [one.embedding[0] for one in client.embeddings.create(model="ids", input=mixed).data] == [2, 7]
    with pytest.raises(openai.BadRequestError, match=r"input\[1\]: tokens: found 100") as caught:
        client.embeddings.create(model="ids", input=[[1, 2, 3], [100, 2, 3]])
    assert caught.value.param == "input"
    with pytest.raises(openai.BadRequestError, match="token ids need an input `tokens: json` of the model"):
        client.embeddings.create(model="embed", input=[[1, 2, 3]])


@pytest.mark.parametrize(
    ("fields", "overflow"),
    [
        ({"truncate": True}, "end"), ({"truncate": "END"}, "end"), ({"truncate": "Start"}, "start"),
        ({"truncation": True}, "end"), ({"truncate_prompt_tokens": -1}, "end"),
        ({"truncate_prompt_tokens": 5}, {"side": "end", "tokens": 5}),
        ({"truncate_prompt_tokens": 5, "truncation_side": "left"}, {"side": "start", "tokens": 5}),
        ({"truncate": True, "truncation_direction": "Left"}, "start"),
    ],
)  # fmt: skip
def test_a_request_states_how_long_texts_are_cut(
    client: openai.OpenAI, backend: Functions, fields: dict[str, Any], overflow: Any
) -> None:
    answer = client.embeddings.create(model="cutting", input=["abc", "d"], extra_body=fields)
    assert [ask.inputs["overflow"] for ask in backend.asked[-2:]] == [overflow] * 2
    assert answer.usage.prompt_tokens == 8 and answer.usage.model_extra == {"truncated_tokens": 6}


def test_a_request_that_forbids_cuts_has_the_error_of_its_field(client: openai.OpenAI, endpoint: Hosted) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.embeddings.create(model="cutting", input="abc", extra_body={"truncate": "NONE"})
    assert caught.value.param == "truncate" and "overflow: no" in str(caught.value)
    with pytest.raises(openai.BadRequestError, match=r"input\[1\]: this text cannot be embedded"):
        client.embeddings.create(model="embed", input=["good", "bad"])
    ranked = httpx.post(
        f"{endpoint.url}/v1/rerank",
        json={"model": "rank-cutting", "query": "a", "documents": ["b", "c"], "truncate": "START"},
    )
    assert ranked.json()["usage"] == {"prompt_tokens": 7, "total_tokens": 7, "truncated_tokens": 9}


def test_one_bad_text_fails_the_request_and_stops_the_others(client: openai.OpenAI, backend: Functions) -> None:
    with pytest.raises(openai.BadRequestError, match="cannot be embedded"):
        client.embeddings.create(model="embed", input=["bad", "slow"], extra_headers={"x-request-id": "together"})
    assert backend.withdrawn == ["together"]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"input": [1]}, "input"),
        ({"input": [1, "a"]}, "input"),
        ({"input": [[]]}, "input"),
        ({"input": []}, "input"),
        ({"input": "a", "dimensions": 2}, "dimensions"),
        ({"input": "a", "dimensions": 2, "model": "any-length"}, "dimensions"),
        ({"input": "a", "dimensions": 0}, "dimensions"),
        ({"input": "a", "dimensions": "3"}, "dimensions"),
        ({"input": "a", "encoding_format": "hex"}, "encoding_format"),
        ({"input": "a", "model": "text"}, "model"),
    ],
)
def test_embeddings_refuse_by_name(endpoint: Hosted, body: dict[str, Any], param: str) -> None:
    response = httpx.post(f"{endpoint.url}/v1/embeddings", json={"model": "embed"} | body)
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)


@pytest.mark.parametrize("model", ["embed", "any-length"])
def test_dimensions_are_accepted_where_they_are_the_vectors_own(client: openai.OpenAI, model: str) -> None:
    response = client.embeddings.create(model=model, input="bcd", dimensions=3, encoding_format="float")
    assert response.data[0].embedding == [3.0, 0.5, -1.0]
    with pytest.raises(openai.BadRequestError, match=f"model {model} returns vectors of 3 numbers, not 4; leave it"):
        client.embeddings.create(model=model, input="bcd", dimensions=4)


def test_dimensions_are_refused_before_the_model_runs(client: openai.OpenAI, backend: Functions) -> None:
    backend.asked.clear()
    with pytest.raises(openai.BadRequestError):
        client.embeddings.create(model="embed", input="bcd", dimensions=4)
    assert backend.asked == []


def rerank(endpoint: Hosted, **body: Any) -> httpx.Response:
    fields = {"model": "rank", "query": "a", "documents": ["b", "aa", {"text": "a"}, "c"]} | body
    return httpx.post(f"{endpoint.url}/v1/rerank", json=fields)


def test_documents_are_ranked_and_equal_ones_keep_their_order(endpoint: Hosted, backend: Functions) -> None:
    backend.asked.clear()
    response = rerank(endpoint, priority=3, truncate_prompt_tokens=None)
    body = response.json()
    assert (response.status_code, body["model"], body["usage"]) == (
        200,
        "rank",
        {"prompt_tokens": 7, "total_tokens": 7},
    )
    assert body["id"].startswith("rerank-") and body["id"] != rerank(endpoint).json()["id"]
    assert body["results"] == [
        {"index": 1, "relevance_score": 0.5}, {"index": 2, "relevance_score": 0.25},
        {"index": 0, "relevance_score": 0.0}, {"index": 3, "relevance_score": 0.0},
    ]  # fmt: skip
    assert dict(backend.asked[0].inputs) == {"query": "a", "passages": ["b", "aa", "a", "c"]}
    assert backend.asked[0].priority == -3


def test_the_best_documents_are_returned_with_their_texts(endpoint: Hosted) -> None:
    results = rerank(endpoint, top_n=2, return_documents=True).json()["results"]
    assert results == [
        {"index": 1, "relevance_score": 0.5, "document": {"text": "aa"}},
        {"index": 2, "relevance_score": 0.25, "document": {"text": "a"}},
    ]
    assert len(rerank(endpoint, top_n=100).json()["results"]) == 4


def test_a_ranking_of_other_documents_is_a_failure_of_the_model(endpoint: Hosted) -> None:
    response = rerank(endpoint, query="short")
    assert response.status_code == 500 and "3 scores for 4 documents" in response.json()["error"]["message"]
    assert rerank(endpoint, model="no-rank").json()["results"] == []


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"query": None}, "query"),
        ({"query": ["a"]}, "query"),
        ({"documents": []}, "documents"),
        ({"documents": "a"}, "documents"),
        ({"documents": ["a", 1]}, "documents"),
        ({"documents": [{"image": "a"}]}, "documents"),
        ({"documents": {"text": "a"}}, "documents"),
        ({"documents": ["a"] * 9}, "documents"),
        ({"top_n": 0}, "top_n"),
        ({"top_n": True}, "top_n"),
        ({"top_n": "3"}, "top_n"),
        ({"return_documents": "yes"}, "return_documents"),
        ({"truncate_prompt_tokens": 5}, "truncate_prompt_tokens"),
        ({"rank_fields": ["text"]}, "rank_fields"),
        ({"model": "embed"}, "model"),
        ({"model": ""}, "model"),
    ],
)
def test_rerank_refuses_by_name(endpoint: Hosted, body: dict[str, Any], param: str) -> None:
    response = rerank(endpoint, **body)
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)


@pytest.mark.parametrize("path", ["/rerank", "/v2/rerank"])
def test_documents_are_ranked_at_every_path(endpoint: Hosted, path: str) -> None:
    body = {"model": "org/ranker:v1", "query": "red", "documents": ["a", "red b", "c"], "top_n": 2}
    found = httpx.post(f"{endpoint.url}{path}", json=body).json()
    assert found["results"] == rerank(endpoint, **body).json()["results"]
    refused = httpx.post(f"{endpoint.url}{path}", json=body | {"top_n": 0})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "top_n")


@pytest.mark.parametrize("path", ["/score", "/v1/score"])
def test_pairs_of_texts_are_scored_in_their_order(endpoint: Hosted, path: str) -> None:
    def scores(**body: Any) -> list[float]:
        found = httpx.post(f"{endpoint.url}{path}", json={"model": "rank"} | body).json()
        assert [one["index"] for one in found["data"]] == list(range(len(found["data"])))
        return [one["score"] for one in found["data"]]

    documents = ["a", "red red", "red"]
    ranked = rerank(endpoint, query="red", documents=documents).json()["results"]
    wanted = {one["index"]: one["relevance_score"] for one in ranked}
    assert len(set(wanted.values())) > 1
    assert scores(text_1="red", text_2=documents) == [wanted[at] for at in range(3)]
    assert scores(queries="red", documents=documents[1]) == [wanted[1]]
    assert scores(data_1=["red"] * 3, data_2=documents) == [wanted[at] for at in range(3)]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"text_1": "a"}, "text_1"),
        ({"text_1": ["a", "b"], "text_2": ["a", "b", "c"]}, "text_1"),
        ({"text_1": 5, "text_2": "a"}, "text_1"),
        ({"queries": "a", "items": []}, "items"),
        ({"text_1": "a", "text_2": ["a"] * 9}, "text_2"),
        ({"text_1": "a", "text_2": "b", "use_activation": False}, "use_activation"),
    ],
)
def test_score_refuses_by_name(endpoint: Hosted, body: dict[str, Any], param: str) -> None:
    response = httpx.post(f"{endpoint.url}/v1/score", json={"model": "rank"} | body)
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)


def test_a_call_embeds_up_to_2048_texts(client: openai.OpenAI, backend: Functions) -> None:
    found = client.embeddings.create(model="embed", input=[f"text {at}" for at in range(2048)])
    assert [one.index for one in found.data] == list(range(2048)) and len(backend.asked) >= 2048
    with pytest.raises(openai.BadRequestError, match="expected at most 2048") as refused:
        client.embeddings.create(model="embed", input=["a"] * 2049)
    assert refused.value.param == "input"


def test_a_model_has_further_names_also_with_a_slash(client: openai.OpenAI) -> None:
    found = client.embeddings.create(model="org/embedder", input="a")
    assert found.model == "org/embedder"
    assert found.data[0].embedding == client.embeddings.create(model="embed", input="a").data[0].embedding
    listed = {one.id: one for one in client.models.list()}
    assert listed["org/embedder"].root == "embed" and "gone" not in listed
    assert client.models.retrieve("org/embedder").id == "org/embedder"
    for unknown in ("gone", "org/other"):
        with pytest.raises(openai.NotFoundError) as refused:
            client.embeddings.create(model=unknown, input="a")
        assert refused.value.code == "model_not_found"


def test_the_version_and_a_ping_are_answered(endpoint: Hosted) -> None:
    assert httpx.get(f"{endpoint.url}/version").json() == {"version": weftline.__version__}
    assert [httpx.request(one, f"{endpoint.url}/ping").status_code for one in ("GET", "POST")] == [200, 200]


def test_an_unknown_model_has_no_ranking(endpoint: Hosted) -> None:
    response = rerank(endpoint, model="unknown")
    assert (response.status_code, response.json()["error"]["code"]) == (404, "model_not_found")


@pytest.mark.parametrize(
    ("format", "media_type", "error"),
    [("wav", "audio/wav", 1e-4), ("flac", "audio/flac", 1e-4), ("mp3", "audio/mpeg", 0.1), ("opus", "audio/ogg", 0.2)],
)
def test_a_text_is_spoken(client: openai.OpenAI, format: Any, media_type: str, error: float) -> None:
    response = client.audio.speech.create(model="voice", voice="-", input="a", response_format=format, speed=2.0)
    assert response.response.headers["content-type"] == media_type
    samples, rate = soundfile.read(io.BytesIO(response.content), dtype="float32")
    assert rate == 16_000 and np.abs(samples[1000:7000] - SPOKEN[1000:7000] / 2).max() < error


def test_recordings_and_speech_have_the_priority_of_the_request(endpoint: Hosted, backend: Functions) -> None:
    backend.asked.clear()
    spoken = httpx.post(f"{endpoint.url}/v1/audio/speech", json={"model": "voice", "input": "a", "priority": 3})
    form = {"model": "ears", "priority": "3"}
    transcribed = httpx.post(f"{endpoint.url}/v1/audio/transcriptions", data=form, files={"file": b"RIFF"})
    assert (spoken.status_code, transcribed.status_code) == (200, 200)
    assert [one.priority for one in backend.asked] == [-3, -3]
    form["priority"] = "high"
    refused = httpx.post(f"{endpoint.url}/v1/audio/transcriptions", data=form, files={"file": b"RIFF"})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "priority")


def test_raw_samples_have_the_rate_of_openai(client: openai.OpenAI) -> None:
    response = client.audio.speech.create(model="plain-voice", voice="-", input="a", response_format="pcm")
    samples = np.frombuffer(response.content, "<i2") / 32767
    assert len(samples) == 12_000 and np.abs(samples[::3][10:-10] - SPOKEN[::2][10:-10]).max() < 0.01


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"speed": 2.0}, "speed"),
        ({"speed": 9.0}, "speed"),
        ({"response_format": "aac"}, "response_format"),
        ({"instructions": "sing"}, "instructions"),
        ({"stream_format": "sse"}, "stream_format"),
        ({"input": ""}, "input"),
        ({"input": "a" * 4097}, "input"),
        ({"model": "text"}, "model"),
    ],
)
def test_speech_refuses_by_name(endpoint: Hosted, fields: dict[str, Any], param: str) -> None:
    body = {"model": "plain-voice", "input": "a", "voice": "-"} | fields
    response = httpx.post(f"{endpoint.url}/v1/audio/speech", json=body)
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)


def test_a_recording_is_transcribed(client: openai.OpenAI) -> None:
    assert client.audio.transcriptions.create(model="ears", file=("../x.wav", b"RIFF1234")).text == "8 bytes of speech"
    response = client.audio.transcriptions.create(model="ears", file=b"RIFF", language="en", response_format="text")
    assert response == "4 bytes of en\n"


def test_a_large_recording_is_read_in_memory(client: openai.OpenAI, monkeypatch: pytest.MonkeyPatch) -> None:
    def written(file: Any) -> None:
        raise AssertionError("a client's file was put on a disk")

    monkeypatch.setattr(tempfile.SpooledTemporaryFile, "rollover", written)
    response = client.audio.transcriptions.create(model="ears", file=("x.wav", bytes(3 << 20)))
    assert response.text == f"{3 << 20} bytes of speech"


def test_a_transcription_streams(client: openai.OpenAI) -> None:
    events = list(client.audio.transcriptions.create(model="ears", file=b"RIFF", stream=True))
    assert [one.type for one in events[:-1]] == ["transcript.text.delta"] * (len(events) - 1)
    assert len(events) > 2
    assert events[-1].type == "transcript.text.done"
    assert events[-1].text == "4 bytes of speech"


VERBOSE = {"model": "timed-ears", "response_format": "verbose_json"}


def wav(seconds: float) -> bytes:
    out = io.BytesIO()
    soundfile.write(out, np.zeros(int(seconds * 8000), np.float32), 8000, format="WAV")
    return out.getvalue()


def test_segments_and_words_of_a_transcription(client: openai.OpenAI) -> None:
    create = client.audio.transcriptions.create
    found = create(model="timed-ears", file=wav(2.5), language="de", response_format="verbose_json")
    assert (found.text, found.language, found.duration) == ("Good <morning> world, transcribe", "de", 2.5)
    assert found.segments is not None and found.words is None
    assert [(one.id, one.start, one.end, one.text) for one in found.segments] == [
        (0, 0.25, 1.5, "Good <morning>"),
        (1, 1.5, 1.75, "world"),
    ]
    assert (found.segments[0].no_speech_prob, found.segments[0].avg_logprob) == (0.01, -0.25)
    words = create(model="timed-ears", file=wav(1), response_format="verbose_json", timestamp_granularities=["word"])
    assert words.segments is None and words.words is not None
    assert [(one.word, one.start, one.end) for one in words.words] == [
        ("Good", 0.25, 0.5), ("<morning>", 0.5, 1.5), ("world", 1.5, 1.75),
    ]  # fmt: skip
    both = create(
        model="timed-ears", file=wav(1), response_format="verbose_json", timestamp_granularities=["word", "segment"]
    )
    assert len(both.segments or []) == 2 and len(both.words or []) == 3


def test_subtitles_of_a_transcription(client: openai.OpenAI) -> None:
    create = client.audio.transcriptions.create
    assert create(model="timed-ears", file=b"RIFF", response_format="srt") == (
        "1\n00:00:00,250 --> 00:00:01,500\nGood <morning>\n\n2\n00:00:01,500 --> 00:00:01,750\nworld\n"
    )
    assert create(model="timed-ears", file=b"RIFF", response_format="vtt").startswith(
        "WEBVTT\n\n00:00:00.250 --> 00:00:01.500\nGood &lt;morning&gt;\n"
    )


@pytest.mark.filterwarnings("ignore:deprecated:DeprecationWarning")
def test_a_recording_is_translated(client: openai.OpenAI, endpoint: Hosted) -> None:
    create = client.audio.translations.create
    assert create(model="timed-ears", file=b"RIFF").text == "Good <morning> world, translate"
    verbose = create(model="timed-ears", file=wav(1.5), response_format="verbose_json")
    assert (verbose.duration, len(verbose.segments or [])) == (1.5, 2)
    assert " --> " in create(model="timed-ears", file=b"RIFF", response_format="srt")
    response = httpx.post(
        f"{endpoint.url}/v1/audio/translations", data={"model": "ears"}, files={"file": ("x", b"RIFF")}
    )
    assert (response.status_code, response.json()["error"]["param"]) == (400, "model")
    assert "no input `task` (text)" in response.json()["error"]["message"]


@pytest.mark.parametrize(("language", "format"), [
    ("xx", "srt"), ("yy", "srt"), ("end", "srt"), ("end", "verbose_json"), ("nan", "verbose_json"),
    ("inf", "verbose_json"),
])  # fmt: skip
def test_segments_without_times_are_a_fault_of_the_pipeline(endpoint: Hosted, language: str, format: str) -> None:
    fields = {"model": "timed-ears", "response_format": format, "language": language}
    response = httpx.post(f"{endpoint.url}/v1/audio/transcriptions", data=fields, files={"file": ("x", wav(1))})
    assert response.status_code == 500


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": "names"}, "prompt"),
        ({"response_format": "srt"}, "response_format"),
        ({"response_format": "aac", "model": "timed-ears"}, "response_format"),
        ({"temperature": "0.7"}, "temperature"),
        ({"timestamp_granularities[]": "word"}, "timestamp_granularities[]"),
        (VERBOSE | {"timestamp_granularities[]": "letter"}, "timestamp_granularities[]"),
        (VERBOSE | {"timestamp_granularities[]": "word", "language": "zz"}, "timestamp_granularities[]"),
        (VERBOSE | {"stream": "true"}, "stream"),
        (VERBOSE | {"prompt": "names"}, "prompt"),
        ({"include[]": "logprobs"}, "include[]"),
        ({"model": "embed"}, "model"),
        ({"model": ""}, "model"),
    ],
)
def test_transcriptions_refuse_by_name(endpoint: Hosted, fields: dict[str, str], param: str) -> None:
    response = httpx.post(
        f"{endpoint.url}/v1/audio/transcriptions", data={"model": "ears"} | fields, files={"file": ("x", wav(1))}
    )
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)


@pytest.mark.parametrize(
    ("content", "kind", "code"),
    [
        (b"{}", "application/json", 415),
        (b"--x", "multipart/form-data", 400),
        (b"--x\r\nnonsense", "multipart/form-data; boundary=x", 400),
        (b"--y\r\n\r\n--y--", "multipart/form-data; boundary=x", 400),
        (
            b'--x\r\nContent-Disposition: form-data; name="model"\r\n\r\nears\r\n--x--',
            "multipart/form-data; boundary=x",
            400,
        ),
        (b"--x\r\nContent-Disposition: form-data\r\n\r\nears\r\n--x--", "multipart/form-data; boundary=x", 400),
    ],
)
def test_forms_that_are_none_are_refused(endpoint: Hosted, content: bytes, kind: str, code: int) -> None:
    response = httpx.post(f"{endpoint.url}/v1/audio/transcriptions", content=content, headers={"content-type": kind})
    assert response.status_code == code
