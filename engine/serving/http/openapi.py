"""OpenAPI 3.1 description of the HTTP server."""

from __future__ import annotations

from typing import Any

_TEXTS = {"oneOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}, "minItems": 1, "maxItems": 8}]}
_PARAMETERS = {
    "type": "object",
    "additionalProperties": {"type": ["boolean", "integer", "number", "string"]},
    "maxProperties": 8,
}
_FORMATS = ["text", "json_object", "json_schema"]
_SAMPLING: dict[str, Any] = {
    "temperature": {"type": "number", "minimum": 0, "maximum": 2},
    "top_p": {"type": "number", "exclusiveMinimum": 0, "maximum": 1},
    "n": {"type": "integer", "minimum": 1, "maximum": 64},
    "stop": _TEXTS,
    "seed": {"type": "integer"},
    "max_tokens": {"type": "integer", "minimum": 1},
    "presence_penalty": {"type": "number", "minimum": -2, "maximum": 2},
    "frequency_penalty": {"type": "number", "minimum": -2, "maximum": 2},
    "logit_bias": {"type": "object", "additionalProperties": {"type": "number"}},
    "response_format": {"type": "object", "required": ["type"], "properties": {"type": {"enum": _FORMATS}}},
    "stream": {"type": "boolean"},
    "stream_options": {"type": "object", "properties": {"include_usage": {"type": "boolean"}}},
    "user": {"type": "string"},
}
_MODEL = {"type": "string", "description": "a name that GET /v1/models lists"}
_PART = {
    "type": "object",
    "required": ["type", "text"],
    "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
}
_CHAT = {
    "model": _MODEL,
    "messages": {
        "type": "array",
        "minItems": 1,
        "items": {
            "type": "object",
            "required": ["role", "content"],
            "properties": {
                "role": {"enum": ["system", "developer", "user", "assistant", "tool"]},
                "content": {"oneOf": [{"type": "string"}, {"type": "array", "items": _PART}]},
            },
        },
    },
    "tools": {"type": "array", "items": {"type": "object"}},
    "tool_choice": {"enum": ["none", "auto"]},
    "max_completion_tokens": {"type": "integer", "minimum": 1},
    "logprobs": {"type": "boolean"},
    "top_logprobs": {"type": "integer", "minimum": 0, "maximum": 20},
    **_SAMPLING,
}
_COMPLETION = {
    "model": _MODEL,
    "prompt": _TEXTS,
    "echo": {"type": "boolean"},
    "logprobs": {"type": "integer", "minimum": 0, "maximum": 20},
    **_SAMPLING,
}
_EMBEDDING = {
    "model": _MODEL,
    "input": _TEXTS,
    "encoding_format": {"enum": ["float", "base64"]},
    "dimensions": {"type": "integer", "minimum": 1, "description": "the length of the model's vectors"},
}
_DOCUMENT = {
    "oneOf": [
        {"type": "string"},
        {"type": "object", "required": ["text"], "properties": {"text": {"type": "string"}}},
    ]
}
_RERANK = {
    "model": _MODEL,
    "query": {"type": "string"},
    "documents": {"type": "array", "items": _DOCUMENT, "minItems": 1, "maxItems": 8},
    "top_n": {"type": "integer", "minimum": 1},
    "return_documents": {"type": "boolean"},
}
_SPEECH = {
    "model": _MODEL,
    "input": {"type": "string", "minLength": 1, "maxLength": 4096},
    "voice": {"type": "string"},
    "response_format": {"enum": ["mp3", "opus", "flac", "wav", "pcm"]},
    "speed": {"type": "number", "minimum": 0.25, "maximum": 4},
}
_TRANSCRIPTION = {
    "model": _MODEL,
    "file": {"type": "string", "format": "binary"},
    "response_format": {"enum": ["json", "text", "verbose_json", "srt", "vtt"]},
    "timestamp_granularities[]": {"type": "array", "items": {"enum": ["segment", "word"]}},
    "language": {"type": "string"},
    "prompt": {"type": "string"},
    "stream": {"type": "boolean"},
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
    "/readyz": "Whether all models are ready and new work is taken.",
    "/healthz": "Whether the server lives; the same as /livez.",
    "/health": "Whether all models are ready and new work is taken; the same as /readyz.",
    "/metrics": "All figures in Prometheus' text format.",
    "/openapi.json": "This document.",
    "/v1/models": "Models that are ready.",
    "/v1/models/{model}": "One model.",
    "/v2": "What this server is.",
    "/v2/health/live": "Whether the server lives.",
    "/v2/health/ready": "Whether all models are ready and new work is taken.",
    "/v2/models/stats": "Statistics of all models.",
    "/v2/trace/setting": "What is traced.",
    "/v2/models/{model}/trace/setting": "What is traced of a model.",
    "/v2/logging": "What is logged.",
    "/v2/systemsharedmemory/status": "Registered regions.",
    "/v2/systemsharedmemory/region/{region}/status": "One registered region.",
    "/v2/cudasharedmemory/status": "Registered CUDA regions: none.",
    "/v2/cudasharedmemory/region/{region}/status": "One CUDA region: none.",
}
_POSTS: dict[str, tuple[str, dict[str, Any], tuple[str, ...]]] = {
    "/v1/chat/completions": ("Answer a conversation.", _CHAT, ("model", "messages")),
    "/v1/completions": ("Complete a text.", _COMPLETION, ("model", "prompt")),
    "/v1/embeddings": ("Embed texts.", _EMBEDDING, ("model", "input")),
    "/v1/rerank": ("Score documents against a query.", _RERANK, ("model", "query", "documents")),
    "/v1/audio/speech": ("Speak a text.", _SPEECH, ("model", "input")),
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


def document() -> dict[str, Any]:
    """Return the OpenAPI document."""
    paths: dict[str, dict[str, Any]] = {}
    for path, summary in _GETS.items():
        paths.setdefault(path, {})["get"] = _operation(path, summary)
    for path, (summary, properties, required) in _POSTS.items():
        body = _body("application/json", properties, required)
        paths.setdefault(path, {})["post"] = _operation(path, summary) | {"requestBody": body}
    form = _body("multipart/form-data", _TRANSCRIPTION, ("model", "file"))
    for path, summary in (("transcriptions", "Transcribe a recording."), ("translations", "Translate one.")):
        paths[f"/v1/audio/{path}"] = {"post": _operation(path, summary) | {"requestBody": form}}
    for model in ("/v2/models/{model}", "/v2/models/{model}/versions/{version}"):
        for what, summary in (("", "Metadata."), ("/ready", "Readiness."), ("/config", "Configuration.")):
            paths[f"{model}{what}"] = {"get": _operation(model, summary)}
        paths[f"{model}/stats"] = {"get": _operation(model, "Statistics.")}
        infer = _body("application/json", _INFER, ("inputs",))
        paths[f"{model}/infer"] = {"post": _operation(model, "Infer.") | {"requestBody": infer}}
    return {
        "openapi": "3.1.0",
        "info": {"title": "Weftline", "version": "1", "description": "Pipelines of models over HTTP."},
        "paths": paths,
        "components": {"securitySchemes": {"token": {"type": "http", "scheme": "bearer"}}},
    }


def _operation(path: str, summary: str) -> dict[str, Any]:
    names = [name for name in ("model", "version", "region") if f"{{{name}}}" in path]
    return {
        "summary": summary,
        "parameters": [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
            for name in names
        ],
        "responses": {"200": {"description": "done"}, "default": {"description": "refused, or failed"}},
    }


def _body(kind: str, properties: dict[str, Any], required: tuple[str, ...]) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "object", "properties": properties}
    if required:
        schema["required"] = list(required)
    return {"required": bool(required), "content": {kind: {"schema": schema}}}
