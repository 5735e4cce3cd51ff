"""Constraints of an answer: `response_format`, and the fields of vLLM and SGLang, as an option of `sampling`. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from weftline.engine.serving.http.errors import HttpError, unsupported
from weftline.nodes.json_value import NotJson
from weftline.nodes.strict_json import FILES, parse

_DIRECT = {
    "guided_json": "json_schema",
    "json_schema": "json_schema",
    "guided_regex": "regex",
    "regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
    "ebnf": "grammar",
}
CONSTRAINT_FIELDS: Mapping[str, str] = {
    "response_format": "json_schema, json_object, regex or grammar",
    "structured_outputs": "json_schema, json_object, regex, choice or grammar",
    **_DIRECT,
}
"""Fields with a constraint, and the keys of `sampling` that they set."""

_STRUCTURED = {"json": "json_schema", "json_object": "json_object", **{k: k for k in ("regex", "choice", "grammar")}}
"""Keys of `structured_outputs`; any other must be off."""
_FORMATS = {"regex": ("regex", "regex"), "grammar": ("grammar", "grammar"), "ebnf": ("ebnf", "grammar")}
"""Types of `response_format` beyond OpenAI's: the key with the constraint, and the option that it becomes."""
RESPONSE_FORMATS = ("text", "json_object", "json_schema", *_FORMATS)


def constraint_of(fields: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """Return the field with the constraint of a request, and the option of `sampling`; '' and {} without one.

    HttpError for a constraint that is malformed, and for a second one.
    """
    read = [(field, _read(field, fields[field])) for field in CONSTRAINT_FIELDS if fields.get(field) is not None]
    found = [(field, option) for field, option in read if option]
    if len(found) > 1:
        names = " and ".join(field for field, _ in found)
        raise HttpError(f"{found[1][0]}: found {names}, expected at most one constraint", param=found[1][0])
    return found[0] if found else ("", {})


def _read(field: str, value: Any) -> dict[str, Any]:
    if field == "response_format":
        return _response_format(value)
    if field == "structured_outputs":
        return _structured(value)
    return {_DIRECT[field]: _checked(field, field, _DIRECT[field], value)}


def _response_format(format: Any) -> dict[str, Any]:
    field = "response_format"
    kind = format.get("type") if isinstance(format, dict) else None
    if kind == "text":
        return {}
    if kind == "json_object" and format.get("schema") is None:
        return {"json_object": True}
    if kind in ("json_object", "json_schema"):
        inner = format.get("json_schema")
        where = "schema" if format.get("schema") is not None else "json_schema.schema"
        schema = format.get("schema", inner.get("schema") if isinstance(inner, dict) else None)
        return {"json_schema": _checked(field, f"{field}.{where}", "json_schema", schema)}
    if isinstance(kind, str) and kind in _FORMATS:
        key, option = _FORMATS[kind]
        return {option: _checked(field, f"{field}.{key}", option, format.get(key))}
    raise HttpError(f"{field}.type: expected {', '.join(RESPONSE_FORMATS)}", param=field)


def _structured(value: Any) -> dict[str, Any]:
    field = "structured_outputs"
    if not isinstance(value, dict):
        raise HttpError(f"{field}: expected an object with one of {', '.join(_STRUCTURED)}", param=field)
    for key, one in value.items():
        if key not in _STRUCTURED and one not in (None, False):
            raise unsupported(field, f"{field}.{key} is not supported by this server; leave it out")
    given = [key for key in _STRUCTURED if value.get(key) not in (None, False)]
    if len(given) != 1:
        raise HttpError(
            f"{field}: found {' and '.join(given) or 'none'}, expected one of {', '.join(_STRUCTURED)}", param=field
        )
    [key] = given
    return {_STRUCTURED[key]: _checked(field, f"{field}.{key}", _STRUCTURED[key], value[key])}


def _checked(field: str, where: str, option: str, value: Any) -> Any:
    """Return the value of an option; HttpError where it is of another kind. The llm step checks what is in it."""
    if option == "json_schema" and isinstance(value, str):
        try:
            value = parse(value, FILES)
        except NotJson:
            value = None
    fits = {
        "json_schema": isinstance(value, dict),
        "json_object": value is True,
        "choice": isinstance(value, list) and bool(value) and all(isinstance(one, str) for one in value),
    }
    if not fits.get(option, isinstance(value, str) and bool(value)):
        raise HttpError(f"{where}: expected {_EXPECTED[option]}", param=field)
    return value


_EXPECTED = {
    "json_schema": "an object, a JSON schema",
    "json_object": "true",
    "choice": "a list of texts, at least one",
    "regex": "a regular expression as text",
    "grammar": "a grammar as text, in Lark's syntax or GBNF's",
}
