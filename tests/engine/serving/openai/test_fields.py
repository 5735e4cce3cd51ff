from typing import Any

import pytest

from weftline.engine.llm.params import SamplingParams
from weftline.engine.serving.http.refusal import HttpError
from weftline.engine.serving.openai.fields import (
    chat_logprobs,
    check_no_sampling,
    check_refused,
    count_of,
    model_of,
    sampling_of,
    wants_usage,
)


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
        ({"user": "me", "store": True, "metadata": {}, "service_tier": "auto", "no_such_field": 1}, {}),
    ],
)
def test_fields_become_sampling_options_that_the_llm_step_takes(body: dict[str, Any], sampling: dict[str, Any]) -> None:
    assert sampling_of(body, None) == sampling
    SamplingParams.read(sampling)


@pytest.mark.parametrize(
    "format", [1, "json", {}, {"type": "xml"}, {"type": "json_schema"}, {"type": "json_schema", "json_schema": []}]
)
def test_a_response_format_that_is_none_is_refused_by_name(format: Any) -> None:
    with pytest.raises(HttpError) as refused:
        sampling_of({"response_format": format}, None)
    assert refused.value.param == "response_format"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("functions", [{}]),
        ("audio", {"voice": "x"}),
        ("best_of", 3),
        ("suffix", "x"),
        ("reasoning_effort", "high"),
        ("parallel_tool_calls", False),
        ("chat_template", "{{ x }}"),
        ("modalities", ["audio"]),
    ],
)
def test_a_field_that_would_change_the_answer_is_refused_by_name(field: str, value: Any) -> None:
    with pytest.raises(HttpError) as refused:
        check_refused({field: value})
    assert refused.value.param == field


def test_fields_that_ask_for_what_happens_anyway_are_no_reason_to_refuse() -> None:
    check_refused({"best_of": 1, "suffix": "", "modalities": ["text"], "functions": None, "parallel_tool_calls": True})


def test_a_model_without_sampling_options_takes_only_what_asks_for_nothing() -> None:
    body = {"temperature": 1.0, "top_p": 1, "n": 1, "presence_penalty": 0, "stop": []}
    check_no_sampling(body, sampling_of(body, None), "m")
    for field, value in {"temperature": 0.5, "max_completion_tokens": 4, "stop": "x"}.items():
        with pytest.raises(HttpError) as refused:
            check_no_sampling({field: value}, sampling_of({field: value}, None), "m")
        assert refused.value.param == field


def test_true_is_not_one_and_one_is_not_true() -> None:
    with pytest.raises(HttpError):
        check_no_sampling({}, {"temperature": True}, "m")


def test_log_probabilities_are_asked_for_by_two_fields() -> None:
    assert chat_logprobs({}) is None
    assert chat_logprobs({"logprobs": False}) is None
    assert chat_logprobs({"logprobs": True}) == 0
    assert chat_logprobs({"logprobs": True, "top_logprobs": 4}) == 4
    for wrong in ({"logprobs": 1}, {"top_logprobs": 2}, {"logprobs": True, "top_logprobs": 21}):
        with pytest.raises(HttpError):
            chat_logprobs(wrong)


def test_counts_names_and_options_of_streams_are_checked() -> None:
    assert (count_of({}), count_of({"n": 3})) == (1, 3)
    assert wants_usage({"stream_options": {"include_usage": True}})
    assert not wants_usage({"stream_options": {}})
    for wrong in (0, 65, True, 1.5, "2"):
        with pytest.raises(HttpError):
            count_of({"n": wrong})
    for wrong in (None, "", 3, ["a"]):
        with pytest.raises(HttpError):
            model_of({"model": wrong})
    with pytest.raises(HttpError):
        wants_usage({"stream_options": True})
