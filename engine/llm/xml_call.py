"""Read a tool call in Qwen3-Coder's XML. Pure.

    <function=f>
    <parameter=city>
    Bergen
    </parameter>
    </function>

Values are plain text. One that is no string by the function's schema is read as JSON, if it is JSON.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from weftline.nodes.json_value import NotJson
from weftline.nodes.strict_json import parse

FUNCTION = re.compile(r"\s*<function=([^\s<>=]+)>")
"""Beginning of a call, with the function's name."""
END_FUNCTION = "</function>"
_PARAMETER, _END_PARAMETER = "<parameter=", "</parameter>"


def read_arguments(body: str, schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments between FUNCTION and END_FUNCTION; ValueError if other text is there.

    schema: of the function's parameters; empty if it is not known.
    """
    properties = schema.get("properties")
    properties = properties if isinstance(properties, Mapping) else {}
    arguments: dict[str, Any] = {}
    position = 0
    while (at := body.find(_PARAMETER, position)) >= 0:
        name_end = body.find(">", at)
        end = body.find(_END_PARAMETER, name_end)
        if body[position:at].strip() or name_end < 0 or end < 0:
            raise ValueError("not a parameter")
        name = body[at + len(_PARAMETER) : name_end]
        arguments[name] = _read_value(body[name_end + 1 : end], properties.get(name))
        position = end + len(_END_PARAMETER)
    if body[position:].strip():
        raise ValueError("text after the parameters")
    return arguments


def _read_value(text: str, schema: object) -> Any:
    text = text.removeprefix("\n").removesuffix("\n")
    if isinstance(schema, Mapping) and schema.get("type") == "string":
        return text
    try:
        value = parse(text)
    except NotJson:
        return text
    return text if value is not None and _permits_text(schema) else value


def _permits_text(schema: object) -> bool:
    """Return whether a schema permits a string beside other types."""
    if not isinstance(schema, Mapping):
        return False
    types, enum = schema.get("type"), schema.get("enum")
    options = [one for key in ("anyOf", "oneOf") if isinstance(schema.get(key), list) for one in schema[key]]
    strings = isinstance(enum, list) and bool(enum) and all(isinstance(one, str) for one in enum)
    return (
        types == "string"
        or (isinstance(types, list) and "string" in types)
        or strings
        or any(map(_permits_text, options))
    )
