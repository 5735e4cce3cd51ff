"""Every field of the requests of OpenAI's and Anthropic's clients, vLLM and SGLang is mapped, refused, or idle."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from anthropic.types import message_count_tokens_params, message_create_params
from anthropic.types.beta import message_count_tokens_params as beta_count_tokens_params
from anthropic.types.beta import message_create_params as beta_create_params
from openai.types import completion_create_params, embedding_create_params
from openai.types.audio import speech_create_params, transcription_create_params, translation_create_params
from openai.types.chat import completion_create_params as chat_create_params
from openai.types.responses import response_create_params

from weftline.engine.llm.params import SamplingParams
from weftline.engine.llm.template_options import TemplateOptions
from weftline.engine.serving.anthropic import reference as anthropic_reference
from weftline.engine.serving.anthropic.bodies import ConversationBody, MessagesBody
from weftline.engine.serving.http.errors import HttpError
from weftline.engine.serving.openai.bodies import (
    ChatBody,
    CompletionBody,
    EmbeddingBody,
    OpenAiBody,
    RerankBody,
    ScoreBody,
    SpeechBody,
    TranscriptionBody,
)
from weftline.engine.serving.openai.constraints import CONSTRAINT_FIELDS
from weftline.engine.serving.openai.reference import PAGE, fields_reference
from weftline.engine.serving.openai.responses_api.body import ResponsesBody

OTHERS = json.loads((Path(__file__).parent / "request_fields.json").read_text())
"""Names of the fields of other servers' request models, by repository and version, and by route."""
BODIES: dict[str, type[OpenAiBody]] = {
    "chat": ChatBody,
    "responses": ResponsesBody,
    "completions": CompletionBody,
    "embeddings": EmbeddingBody,
    "rerank": RerankBody,
    "score": ScoreBody,
    "speech": SpeechBody,
    "transcriptions": TranscriptionBody,
    "translations": TranscriptionBody,
    "messages": MessagesBody,
    "count_tokens": ConversationBody,
}


def names_of(*models: Any) -> set[str]:
    return {name for model in models for name in model.__annotations__}


CLIENTS = {
    "chat": names_of(
        chat_create_params.CompletionCreateParamsNonStreaming, chat_create_params.CompletionCreateParamsStreaming
    ),
    "responses": names_of(
        response_create_params.ResponseCreateParamsNonStreaming, response_create_params.ResponseCreateParamsStreaming
    ),
    "completions": names_of(
        completion_create_params.CompletionCreateParamsNonStreaming,
        completion_create_params.CompletionCreateParamsStreaming,
    ),
    "embeddings": names_of(embedding_create_params.EmbeddingCreateParams),
    "speech": names_of(speech_create_params.SpeechCreateParams),
    "transcriptions": names_of(
        transcription_create_params.TranscriptionCreateParamsNonStreaming,
        transcription_create_params.TranscriptionCreateParamsStreaming,
    ),
    "translations": names_of(translation_create_params.TranslationCreateParams),
    "messages": names_of(
        message_create_params.MessageCreateParamsNonStreaming,
        message_create_params.MessageCreateParamsStreaming,
        beta_create_params.MessageCreateParamsNonStreaming,
        beta_create_params.MessageCreateParamsStreaming,
    ),
    "count_tokens": names_of(
        message_count_tokens_params.MessageCountTokensParams, beta_count_tokens_params.MessageCountTokensParams
    ),
}
"""Those of the installed clients: a newer one with a new field fails the test."""


@pytest.mark.parametrize("route", BODIES)
def test_every_field_of_every_protocol_is_in_the_table(route: str) -> None:
    wanted = CLIENTS.get(route, set()) | {name for one in OTHERS.values() for name in one.get(route, ())}
    body = BODIES[route]
    known = {name.removesuffix("[]") for name in body.mapped()} | {*body.refused, *body.without_effect, "file"}
    assert sorted(wanted - known) == []


@pytest.mark.parametrize("body", sorted(set(BODIES.values()), key=lambda one: one.__name__))
def test_a_field_has_one_effect(body: type[OpenAiBody]) -> None:
    mapped, refused, without = set(body.mapped()), set(body.refused), set(body.without_effect)
    assert not mapped & refused and not mapped & without and not refused & without


def test_mapped_fields_name_keys_that_the_llm_step_has() -> None:
    for body in (ChatBody, CompletionBody, ResponsesBody):
        for field, key in body.mapped().items():
            port, _, name = key.partition(".")
            if port == "sampling" and field not in CONSTRAINT_FIELDS:
                assert name in SamplingParams.__dataclass_fields__
            if port == "template":
                assert name in TemplateOptions.__struct_fields__


REFUSED = [(body, field) for body in dict.fromkeys(BODIES.values()) for field in sorted(body.refused)]


@pytest.mark.parametrize(("body", "field"), REFUSED)
def test_a_refused_field_is_refused_by_its_name(body: type[OpenAiBody], field: str) -> None:
    with pytest.raises(HttpError, match=f"{field}: .*; leave it out") as refused:
        body.parse({"model": "m", field: {"another": "value"}})
    assert refused.value.param == field


@pytest.mark.parametrize("body", sorted(set(BODIES.values()), key=lambda one: one.__name__))
def test_an_unknown_field_is_refused_with_the_nearest(body: type[OpenAiBody]) -> None:
    with pytest.raises(HttpError, match=r"no_such_field: unknown field; leave it out; modle: .* did you mean model\?"):
        body.parse({"no_such_field": 1, "modle": "m"})


def test_the_reference_pages_are_current() -> None:
    assert PAGE.read_text() == fields_reference()
    assert anthropic_reference.PAGE.read_text() == anthropic_reference.fields_reference()


SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}


@pytest.mark.parametrize(
    ("body", "sampling"),
    [
        ({"guided_json": SCHEMA}, {"json_schema": SCHEMA}),
        ({"guided_json": json.dumps(SCHEMA)}, {"json_schema": SCHEMA}),
        ({"json_schema": json.dumps(SCHEMA)}, {"json_schema": SCHEMA}),
        ({"guided_regex": "a+"}, {"regex": "a+"}),
        ({"regex": "a+"}, {"regex": "a+"}),
        ({"guided_choice": ["a", "b"]}, {"choice": ["a", "b"]}),
        ({"guided_grammar": 'start: "a"'}, {"grammar": 'start: "a"'}),
        ({"ebnf": 'root ::= "a"'}, {"grammar": 'root ::= "a"'}),
        ({"structured_outputs": {"json": SCHEMA, "regex": None}}, {"json_schema": SCHEMA}),
        ({"structured_outputs": {"json_object": True}}, {"json_object": True}),
        ({"structured_outputs": {"choice": ["a"], "disable_any_whitespace": False}}, {"choice": ["a"]}),
        ({"response_format": {"type": "json_object", "schema": SCHEMA}}, {"json_schema": SCHEMA}),
        ({"response_format": {"type": "json_schema", "schema": SCHEMA}}, {"json_schema": SCHEMA}),
        ({"response_format": {"type": "regex", "regex": "a+"}}, {"regex": "a+"}),
        ({"response_format": {"type": "grammar", "grammar": 'start: "a"'}}, {"grammar": 'start: "a"'}),
        ({"response_format": {"type": "text"}, "regex": "a"}, {"regex": "a"}),
        ({"top_k": -1}, {"top_k": 0}),
    ],
)
@pytest.mark.parametrize("route", [ChatBody, CompletionBody])
def test_a_constraint_is_an_option_of_sampling(route: Any, body: dict[str, Any], sampling: dict[str, Any]) -> None:
    read = route.parse({"model": "m", "messages" if route is ChatBody else "prompt": "a"} | body)
    assert read.sampling() == sampling
    SamplingParams.read(sampling)
    for key in sampling:
        assert read.field_of(key) in body


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"guided_json": "{"}, "guided_json"),
        ({"guided_json": True}, "guided_json"),
        ({"guided_regex": ""}, "guided_regex"),
        ({"regex": 5}, "regex"),
        ({"guided_choice": []}, "guided_choice"),
        ({"guided_choice": "ab"}, "guided_choice"),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"structured_outputs": "json"}, "structured_outputs"),
        ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "a", "structural_tag": "{}"}}, "structured_outputs"),
        ({"structured_outputs": {"json": SCHEMA, "whitespace_pattern": " "}}, "structured_outputs"),
        ({"response_format": {"type": "structural_tag", "format": {}}}, "response_format"),
        ({"response_format": {"type": "json_object", "schema": "x"}}, "response_format"),
        ({"response_format": {"type": "json_object"}, "guided_regex": "a"}, "guided_regex"),
        ({"regex": "a", "ebnf": 'root ::= "a"'}, "ebnf"),
    ],
)
def test_a_constraint_that_is_none_is_refused_by_name(body: dict[str, Any], param: str) -> None:
    with pytest.raises(HttpError) as refused:
        chat(body).sampling()
    assert refused.value.param == param


def chat(body: dict[str, Any]) -> ChatBody:
    return ChatBody.parse({"model": "m", "messages": []} | body)


def test_fields_of_the_template_are_its_options() -> None:
    given = {
        "chat_template_kwargs": {"enable_thinking": False},
        "reasoning_effort": "low",
        "documents": [{"text": "a"}],
    }
    assert chat(given).template() == {"variables": {"enable_thinking": False}} | dict(list(given.items())[1:])
    assert chat({"continue_final_message": True, "add_generation_prompt": False}).template() == {
        "continue_final_message": True,
        "add_generation_prompt": False,
    }
    unchanged = {"chat_template_kwargs": {}, "add_generation_prompt": True, "continue_final_message": False}
    assert chat(unchanged).template() == {}
    with pytest.raises(HttpError) as refused:
        chat({"continue_final_message": True, "add_generation_prompt": True}).template()
    assert refused.value.param == "continue_final_message"
