"""The published document has the fields and ranges that requests are checked with."""

from __future__ import annotations

from typing import Any

import pytest

from weftline.engine.llm.params import SamplingParams
from weftline.engine.serving.http.errors import HttpError
from weftline.engine.serving.http.openapi import document
from weftline.engine.serving.openai.bodies import ROLES, SAMPLING_FIELDS
from weftline.engine.serving.openai.constraints import constraint_of
from weftline.nodes.field_checks import field_names


def schema_of(path: str) -> dict[str, Any]:
    content = document()["paths"][path]["post"]["requestBody"]["content"]
    (schema,) = [one["schema"] for one in content.values()]
    assert isinstance(schema, dict)
    return schema


def test_every_sampling_option_has_a_field_in_chat_requests() -> None:
    fields = schema_of("/v1/chat/completions")["properties"]
    apart = {"json_schema", "json_object", "regex", "grammar", "choice", "echo", "prompt_logprobs"}
    assert set(SAMPLING_FIELDS) <= fields.keys()
    assert set(field_names(SamplingParams)) - apart - {"logprobs"} == set(SAMPLING_FIELDS.values())


def test_ranges_are_those_of_the_sampling_options() -> None:
    for path in ("/v1/chat/completions", "/v1/completions"):
        fields = schema_of(path)["properties"]
        assert fields["temperature"] == {"type": "number", "minimum": 0, "maximum": 100}
        assert fields["n"] == {"type": "integer", "minimum": 1, "maximum": 64}
        assert fields["max_tokens"] == fields["max_completion_tokens"]
        assert "given" not in fields and "default" not in fields["seed"]


def test_required_fields_and_forms_are_published() -> None:
    assert schema_of("/v1/chat/completions")["required"] == ["model", "messages"]
    assert schema_of("/v1/rerank")["required"] == ["model", "query", "documents"]
    form = schema_of("/v1/audio/transcriptions")
    assert form["required"] == ["model", "file"] and "timestamp_granularities[]" in form["properties"]


def test_published_roles_and_formats_are_those_that_are_read() -> None:
    fields = schema_of("/v1/chat/completions")["properties"]
    assert fields["messages"]["items"]["properties"]["role"]["enum"] == [*ROLES]
    with pytest.raises(
        HttpError, match=f"expected {', '.join(fields['response_format']['properties']['type']['enum'])}$"
    ):
        constraint_of({"response_format": {"type": "other"}})


def test_every_reference_has_its_component() -> None:
    found = document()
    assert schema_of("/v1/completions")["properties"]["stream_options"]["$ref"] == "#/components/schemas/StreamOptions"
    assert found["components"]["schemas"]["StreamOptions"]["properties"].keys() >= {"include_usage"}
