from typing import Any

import pytest

from weftline.engine.llm.params import SamplingParams
from weftline.engine.serving.http.errors import HttpError
from weftline.engine.serving.openai.bodies import ChatBody, CompletionBody, EmbeddingBody


def chat(fields: dict[str, Any]) -> ChatBody:
    return ChatBody.parse({"model": "m", "messages": []} | fields)


@pytest.mark.parametrize(
    ("body", "sampling"),
    [
        ({}, {}),
        ({"temperature": 0.5, "top_p": 0.9, "seed": 7}, {"temperature": 0.5, "top_p": 0.9, "seed": 7}),
        ({"max_tokens": 5}, {"tokens_max": 5}),
        ({"max_completion_tokens": 6, "max_tokens": 5}, {"tokens_max": 6}),
        ({"stop": "end"}, {"stop": ["end"]}),
        ({"stop": ["a", "b"]}, {"stop": ["a", "b"]}),
        ({"top_k": 3, "min_tokens": 2}, {"top_k": 3, "tokens_min": 2}),
        ({"response_format": {"type": "text"}}, {}),
        ({"response_format": {"type": "json_object"}}, {"json_object": True}),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}}}},
            {"json_schema": {"type": "object"}},
        ),
        ({"temperature": None, "stop": None}, {}),
        ({"user": "me", "store": True, "metadata": {}, "service_tier": "auto"}, {}),
    ],
)
def test_fields_become_sampling_options_that_the_llm_step_takes(body: dict[str, Any], sampling: dict[str, Any]) -> None:
    assert chat(body).sampling() == sampling
    SamplingParams.read(sampling)


@pytest.mark.parametrize(
    "format", [1, "json", {}, {"type": "xml"}, {"type": "json_schema"}, {"type": "json_schema", "json_schema": []}]
)
def test_a_response_format_that_is_none_is_refused_by_name(format: Any) -> None:
    with pytest.raises(HttpError) as refused:
        chat({"response_format": format}).sampling()
    assert refused.value.param == "response_format"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("functions", [{}]),
        ("audio", {"voice": "x"}),
        ("best_of", 3),
        ("suffix", "x"),
        ("temperatur", 1),
        ("include_reasoning", False),
        ("chat_template", "{{ x }}"),
        ("modalities", ["audio"]),
    ],
)
def test_a_field_that_would_change_the_answer_is_refused_by_name(field: str, value: Any) -> None:
    with pytest.raises(HttpError) as refused:
        chat({field: value})
    assert refused.value.param == field


def test_fields_that_ask_for_what_happens_anyway_are_no_reason_to_refuse() -> None:
    chat({"best_of": 1, "suffix": "", "modalities": ["text"], "functions": None})


def test_a_model_without_sampling_options_takes_only_what_asks_for_nothing() -> None:
    body = chat({"temperature": 1.0, "top_p": 1, "n": 1, "presence_penalty": 0, "stop": []})
    body.check_no_sampling(body.sampling())
    for field, value in {"temperature": 0.5, "max_completion_tokens": 4, "stop": "x"}.items():
        with pytest.raises(HttpError) as refused:
            chat({field: value}).check_no_sampling(chat({field: value}).sampling())
        assert refused.value.param == field


def test_true_is_not_one_and_one_is_not_true() -> None:
    with pytest.raises(HttpError):
        chat({}).check_no_sampling({"temperature": True})


def test_log_probabilities_are_asked_for_by_two_fields() -> None:
    assert chat({}).top_logprobs_count is None
    assert chat({"logprobs": False}).top_logprobs_count is None
    assert chat({"logprobs": True}).top_logprobs_count == 0
    assert chat({"logprobs": True, "top_logprobs": 4}).sampling() == {"logprobs": 4}
    for wrong in ({"logprobs": 1}, {"top_logprobs": 2}, {"logprobs": True, "top_logprobs": 21}):
        with pytest.raises(HttpError) as refused:
            chat(wrong)
        assert refused.value.param == next(reversed(wrong))
    assert CompletionBody.parse({"model": "m", "prompt": "a", "logprobs": 0}).top_logprobs_count == 0


def test_counts_names_and_options_of_streams_are_checked() -> None:
    assert (chat({}).n, chat({"n": 3}).n) == (1, 3)
    assert chat({"stream_options": {"include_usage": True}}).usage_in_stream
    assert not chat({"stream_options": {}}).usage_in_stream
    for wrong in (0, 65, True, 1.5, "2"):
        with pytest.raises(HttpError, match=r"n: found .*, expected a whole number from 1 to 64"):
            chat({"n": wrong})
    for wrong in (None, "", 3, ["a"]):
        with pytest.raises(HttpError, match=r"model: found .*, expected the name of a model"):
            chat({"model": wrong})
    with pytest.raises(HttpError, match="stream_options: found true, expected an object"):
        chat({"stream_options": True})


def test_all_wrong_fields_are_named_at_once_and_param_is_the_first() -> None:
    with pytest.raises(HttpError) as refused:
        chat({"priority": 101, "stream": "yes", "stream_options": {"include_usage": 1}})
    assert str(refused.value) == (
        "priority: found 101, expected a whole number from -100 (first) to 100; "
        "stream: found 'yes', expected true or false; "
        "stream_options.include_usage: found 1, expected true or false"
    )
    assert refused.value.param == "priority"


@pytest.mark.parametrize("field", ["encoding_format", "dimensions", "priority", "input"])
def test_embedding_fields_are_refused_by_name(field: str) -> None:
    with pytest.raises(HttpError, match=f"^{field}: .*expected ") as refused:
        EmbeddingBody.parse({"model": "m", "input": "a"} | {field: -101})
    assert refused.value.param == field
