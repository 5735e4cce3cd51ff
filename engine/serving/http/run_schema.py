"""OpenAPI operations of plain requests: POST /run/MODEL with the types of the model's inputs and outputs.

`plain_inputs.py` and `plain_outputs.py` have the forms that these schemas describe.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from weftline.engine.serving.http.plain_inputs import B64
from weftline.engine.serving.http.plain_outputs import EVENTS, JSON, OCTETS, offered
from weftline.engine.serving.model_info import ModelInfo, PortInfo
from weftline.nodes.ports import PortType

_TEXT: dict[str, Any] = {"type": "string"}
_FILE: dict[str, Any] = {"type": "string", "format": "binary"}
_NUMBERS: dict[str, Any] = {"type": "array", "items": {"type": "number"}}

SCHEMAS: dict[str, Any] = {
    "EncodedBytes": {
        "type": "object",
        "description": "Bytes in base64: an encoded picture or recording, or any others.",
        "required": [B64],
        "properties": {B64: {"type": "string", "contentEncoding": "base64"}, "content_type": _TEXT},
        "additionalProperties": False,
    },
    "Detection": {
        "type": "object",
        "description": "One object in a picture; box is [x1, y1, x2, y2] in pixels.",
        "required": ["name", "score", "box"],
        "properties": {"name": _TEXT, "score": {"type": "number"}, "box": _NUMBERS | {"minItems": 4, "maxItems": 4}},
        "additionalProperties": False,
    },
    "RunError": {"type": "object", "required": ["error"], "properties": {"error": _TEXT}},
}
"""Components that the operations refer to."""


def _component(name: str) -> dict[str, Any]:
    return {"$ref": f"#/components/schemas/{name}"}


_DATA_URL = {"type": "string", "pattern": "^data:", "description": "data:image/png;base64,..."}
_QUERY = [
    {"name": "output", "in": "query", "schema": {"type": "array", "items": _TEXT}, "description": "Selected outputs."},
    {"name": "seed", "in": "query", "schema": {"type": "integer", "minimum": 0}},
]
_MEDIA_TYPES = {"image": "image/*", "audio": "audio/*", "text": "text/plain", "bytes": OCTETS}


def run_operation(info: ModelInfo) -> dict[str, Any]:
    """Return the operation of one model."""
    contents: dict[str, Any] = {
        JSON: {"schema": _object(info.inputs, lambda port: _input(port.port_type))},
        "multipart/form-data": {"schema": _object(info.inputs, lambda port: _part(port.port_type))},
    }
    required = [port for port in info.inputs if not port.optional] or info.inputs
    if len(required) == 1 and (kind := required[0].port_type.kind) in _MEDIA_TYPES:
        contents[_MEDIA_TYPES[kind]] = {"schema": _TEXT if kind == "text" else _FILE}
    answers: dict[str, Any] = {JSON: {"schema": _object(info.outputs, _output)}, EVENTS: {"schema": _TEXT}}
    answers |= {type: {"schema": _TEXT if type.startswith("text/") else _FILE} for type in offered(info.outputs)}
    return {
        "summary": f"Run {info.name}.",
        "operationId": "run_" + re.sub(r"[^A-Za-z0-9]", "_", info.name),
        "tags": ["run"],
        "description": info.about or f"Run the pipeline {info.name} on one request.",
        "parameters": _QUERY,
        "requestBody": {"required": bool(required and not required[0].optional), "content": contents},
        "responses": {
            "200": {"description": "the outputs", "content": answers},
            "default": {"description": "refused, or failed", "content": {JSON: {"schema": _component("RunError")}}},
        },
    }


def _object(ports: Iterable[PortInfo], schema: Any) -> dict[str, Any]:
    ports = list(ports)
    about = {port.name: {"description": port.about} if port.about else {} for port in ports}
    found: dict[str, Any] = {
        "type": "object",
        "properties": {port.name: schema(port) | about[port.name] for port in ports},
        "additionalProperties": False,
    }
    if required := [port.name for port in ports if not port.optional]:
        found["required"] = required
    return found


def _input(type: PortType) -> dict[str, Any]:
    if type.kind in ("image", "audio", "bytes"):
        return {"anyOf": [_component("EncodedBytes"), _DATA_URL]}
    return _list(type, _input) or _plain(type)


def _output(port: PortInfo) -> dict[str, Any]:
    schema = _output_of(port.port_type)
    return {"anyOf": [schema, {"type": "null"}]} if port.optional and schema else schema


def _output_of(type: PortType) -> dict[str, Any]:
    if type.kind in ("image", "audio", "bytes"):
        return _component("EncodedBytes")
    return _list(type, _output_of) or _plain(type)


def _part(type: PortType) -> dict[str, Any]:
    if type.kind in ("image", "audio", "bytes"):
        return _FILE
    if type.kind == "tensor":
        return {"type": "string", "description": f"{type} as nested lists in JSON, or a .npy file"}
    if type.kind in ("json", "detections", "any"):
        return {"type": "string", "description": "a JSON document" if type.kind != "any" else "a text"}
    return _list(type, _part) or _plain(type)


def _list(type: PortType, schema: Any) -> dict[str, Any] | None:
    return {"type": "array", "items": schema(type.item or PortType("any"))} if type.kind == "list" else None


def _plain(type: PortType) -> dict[str, Any]:
    if type.kind == "text":
        return _TEXT
    if type.kind == "detections":
        return {"type": "array", "items": _component("Detection")}
    if type.kind == "tensor" and type.dims is not None:
        return _tensor(type)
    return {}


def _tensor(type: PortType) -> dict[str, Any]:
    dtype = type.dtype or ""
    schema: dict[str, Any] = {"type": "boolean" if dtype == "bool" else "integer" if "int" in dtype else "number"}
    if dtype == "complex64":
        schema = _NUMBERS | {"minItems": 2, "maxItems": 2}
    for dim in reversed(type.dims or ()):
        sizes = {"minItems": dim, "maxItems": dim} if isinstance(dim, int) else {}
        schema = {"type": "array", "items": schema} | sizes
    return schema
