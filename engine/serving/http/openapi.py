"""OpenAPI 3.1 description of the HTTP server.

Bodies of OpenAI's and Anthropic's routes are described by their Structs, those of /run/MODEL by the model's ports
(`run_schema.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import msgspec

from weftline.engine.llm.params import SamplingParams
from weftline.engine.llm.template_options import TemplateOptions
from weftline.engine.serving.anthropic.bodies import BODIES as ANTHROPIC_BODIES
from weftline.engine.serving.http.run_schema import SCHEMAS, run_operation
from weftline.engine.serving.model_info import ModelInfo
from weftline.engine.serving.openai.bodies import (
    MESSAGES,
    SAMPLING_FIELDS,
    TEMPLATE_FIELDS,
    ChatBody,
    OpenAiBody,
    TranscriptionBody,
)
from weftline.engine.serving.openai.constraints import CONSTRAINT_FIELDS
from weftline.engine.serving.openai.responses_api.body import ResponsesBody
from weftline.engine.serving.openai.route_bodies import BODIES

_PARAMETERS = {
    "type": "object",
    "additionalProperties": {"type": ["boolean", "integer", "number", "string"]},
    "maxProperties": 8,
}
_TENSOR = {
    "type": "object",
    "required": ["name", "shape", "datatype"],
    "properties": {
        "name": {"type": "string"},
        "shape": {"type": "array", "items": {"type": "integer"}},
        "datatype": {"type": "string"},
        "data": {"type": "array"},
        "parameters": _PARAMETERS,
    },
}
_INFER = {
    "id": {"type": "string"},
    "parameters": _PARAMETERS,
    "inputs": {"type": "array", "items": _TENSOR},
    "outputs": {
        "type": "array",
        "items": {
            "type": "object",
            "required": ["name"],
            "properties": {"name": {"type": "string"}, "parameters": _PARAMETERS},
        },
    },
}
_REGION = {"key": {"type": "string"}, "offset": {"type": "integer"}, "byte_size": {"type": "integer"}}
_ANY: dict[str, Any] = {}

_GETS = {
    "/livez": "Whether the server lives.",
    "/readyz": "Whether the server can answer now.",
    "/healthz": "Whether the server lives; the same as /livez.",
    "/health": "Whether the server can answer now; the same as /readyz.",
    "/metrics": "All figures in Prometheus' text format.",
    "/openapi.json": "This document.",
    "/docs": "A page with the models and routes of this server.",
    "/v1/responses/{response}": "A stored response.",
    "/v1/responses/{response}/input_items": "The input items of a stored response.",
    "/v1/models": "Models that are ready.",
    "/v1/models/{model}": "One model.",
    "/version": "The version of the server.",
    "/deployments": "Nodes that are loaded, and the steps that share each.",
    "/ping": "Whether the server lives; the same as /livez.",
    "/v2": "What this server is.",
    "/v2/health/live": "Whether the server lives.",
    "/v2/health/ready": "Whether the server can answer now.",
    "/v2/models/stats": "Statistics of all models.",
    "/v2/trace/setting": "What is traced.",
    "/v2/models/{model}/trace/setting": "What is traced of a model.",
    "/v2/logging": "What is logged.",
    "/v2/systemsharedmemory/status": "Registered regions.",
    "/v2/systemsharedmemory/region/{region}/status": "One registered region.",
    "/v2/cudasharedmemory/status": "Registered CUDA regions: none.",
    "/v2/cudasharedmemory/region/{region}/status": "One CUDA region: none.",
}
_DELETES = {"/v1/responses/{response}": "Delete a stored response."}
_OPENAI = {
    "/v1/chat/completions": "Answer a conversation.",
    "/v1/responses": "Answer a conversation, with OpenAI's Responses API.",
    "/v1/completions": "Complete a text.",
    "/v1/messages": "Answer a conversation, in Anthropic's form.",
    "/v1/messages/count_tokens": "The number of tokens of a conversation.",
    "/v1/embeddings": "Embed texts.",
    **dict.fromkeys(("/rerank", "/v1/rerank", "/v2/rerank"), "Sort documents by a query."),
    **dict.fromkeys(("/score", "/v1/score"), "Score pairs of texts."),
    "/detokenize": "The text of tokens.",
    "/v1/audio/speech": "Speak a text.",
    "/v1/audio/transcriptions": "Transcribe a recording.",
    "/v1/audio/translations": "Translate one.",
}
_POSTS: dict[str, tuple[str, dict[str, Any], tuple[str, ...]]] = {
    "/run/{model}": ("Run a model on one request.", {}, ()),
    "/ping": ("Whether the server lives; the same as /livez.", {}, ()),
    "/v1/responses/{response}/cancel": ("Refused: no response is computed in the background.", {}, ()),
    "/tokenize": ("The tokens of a prompt or conversation.", {"prompt": {"type": "string"}, "messages": MESSAGES}, ()),
    "/v2/repository/index": ("All models with their states.", {"ready": {"type": "boolean"}}, ()),
    "/v2/repository/models/{model}/load": ("Load a configured pipeline.", {"parameters": {"type": "object"}}, ()),
    "/v2/repository/models/{model}/unload": ("Unload a pipeline.", {"parameters": {"type": "object"}}, ()),
    "/v2/trace/setting": ("Set what is traced.", {"trace_level": {"type": "array"}, "trace_rate": _ANY}, ()),
    "/v2/models/{model}/trace/setting": ("Set what is traced of a model.", {"trace_level": {"type": "array"}}, ()),
    "/v2/logging": ("Set what is logged.", {"log_info": {"type": "boolean"}, "log_verbose_level": _ANY}, ()),
    "/v2/systemsharedmemory/region/{region}/register": ("Register a region.", _REGION, ("key", "byte_size")),
    "/v2/systemsharedmemory/region/{region}/unregister": ("Forget a region.", {}, ()),
    "/v2/systemsharedmemory/unregister": ("Forget all regions.", {}, ()),
    "/v2/cudasharedmemory/region/{region}/register": ("Refused.", {"raw_handle": {"type": "object"}}, ()),
    "/v2/cudasharedmemory/region/{region}/unregister": ("Nothing to forget.", {}, ()),
    "/v2/cudasharedmemory/unregister": ("Nothing to forget.", {}, ()),
}


def document(models: Sequence[ModelInfo] = ()) -> dict[str, Any]:
    """Return the OpenAPI document. models: those with a typed /run/MODEL of their own."""
    paths: dict[str, dict[str, Any]] = {}
    for path, summary in _GETS.items():
        paths.setdefault(path, {})["get"] = _operation(path, summary)
    for path, (summary, properties, required) in _POSTS.items():
        paths.setdefault(path, {})["post"] = _operation(path, summary) | _body(properties, required)
    for path, summary in _DELETES.items():
        paths.setdefault(path, {})["delete"] = _operation(path, summary)
    paths |= {f"/run/{info.name}": {"post": run_operation(info)} for info in models}
    for path, of in {**BODIES, **ANTHROPIC_BODIES}.items():
        kind = "multipart/form-data" if of is TranscriptionBody else "application/json"
        paths[path] = {"post": _operation(path, _OPENAI[path]) | _body(*_fields_of(of), kind)}
    for model in ("/v2/models/{model}", "/v2/models/{model}/versions/{version}"):
        for what, summary in (("", "Metadata."), ("/ready", "Readiness."), ("/config", "Configuration.")):
            paths[f"{model}{what}"] = {"get": _operation(model, summary)}
        paths[f"{model}/stats"] = {"get": _operation(model, "Statistics.")}
        for what, summary in (("generate", "Infer with plain values."), ("generate_stream", "The same, in events.")):
            paths[f"{model}/{what}"] = {"post": _operation(model, summary) | _body({}, ())}
        paths[f"{model}/infer"] = {"post": _operation(model, "Infer.") | _body(_INFER, ("inputs",))}
    return {
        "openapi": "3.1.0",
        "info": {"title": "Weftline", "version": "1", "description": "Pipelines of models over HTTP."},
        "paths": paths,
        "components": {
            "schemas": SCHEMAS | _inner(ChatBody) | _inner(ResponsesBody),
            "securitySchemes": {
                "token": {"type": "http", "scheme": "bearer"},
                "key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
            },
        },
    }


def _operation(path: str, summary: str) -> dict[str, Any]:
    names = [name for name in ("model", "version", "region", "response") if f"{{{name}}}" in path]
    return {
        "summary": summary,
        "parameters": [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
            for name in names
        ],
        "responses": {"200": {"description": "done"}, "default": {"description": "refused, or failed"}},
    }


def _body(
    properties: dict[str, Any], required: tuple[str, ...], kind: str = "application/json"
) -> dict[str, dict[str, Any]]:
    schema: dict[str, Any] = {"type": "object", "properties": properties}
    if required:
        schema["required"] = list(required)
    return {"requestBody": {"required": bool(required), "content": {kind: {"schema": schema}}}}


@cache
def _components(of: type[Any]) -> dict[str, Any]:
    return msgspec.json.schema_components((of,), ref_template="#/components/schemas/{name}")[1]


def _inner(of: type[OpenAiBody]) -> dict[str, Any]:
    """Return the components that a body refers to."""
    return {name: one for name, one in _components(of).items() if name != of.__name__}


@cache
def _fields_of(of: type[OpenAiBody]) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Return the fields of a body as properties of a JSON Schema, and those that are required."""
    schema = _components(of)[of.__name__]
    properties = {name: _unless_null(one) for name, one in schema["properties"].items() if name != "given"}
    required = [name for name in schema["required"] if name != "given"]
    if "given" in schema["properties"]:
        keys = _components(SamplingParams)["SamplingParams"]["properties"]
        options = _components(TemplateOptions)["TemplateOptions"]["properties"]
        mapped = of.mapped()
        schemas = {field: keys[key] for field, key in SAMPLING_FIELDS.items()}
        schemas |= {field: options[key] for field, key in TEMPLATE_FIELDS.items()}
        properties |= {field: _unless_null(one, ("default",)) for field, one in schemas.items() if field in mapped}
        properties |= {field: _ANY for field in CONSTRAINT_FIELDS if field in mapped and field not in properties}
        properties["stop"] = {"oneOf": [{"type": "string"}, properties["stop"]]}
    if of is TranscriptionBody:
        properties["file"] = {"type": "string", "format": "binary"}
        required.append("file")
    return properties, tuple(required)


def _unless_null(schema: dict[str, Any], without: tuple[str, ...] = ()) -> dict[str, Any]:
    """Return the schema of a value that is not null: null is the same as an absent field."""
    first = schema.get("anyOf", [schema])[0]
    return {name: one for name, one in first.items() if one is not None and name not in without}
