"""Validation of written values (files, options) against dataclasses: the one validator of options.

A dataclass is the only declaration: annotations are the types, `msgspec.Meta` the bounds, `weftline.fields.Written` the
forms. Types are strict: "5" is no number and 1 is not true. Values are read as JSON: a list stands for a tuple, a
mapping for a nested dataclass. Unknown keys are refused, numbers are finite. Every problem is reported at once.

pydantic validates types that are derived from the dataclasses, and the values that it returns are the dataclasses.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache, partial, reduce
from operator import or_
from types import NoneType, UnionType
from typing import Annotated, Any, Union, get_args, get_origin

import msgspec
from pydantic import AfterValidator, ConfigDict, Discriminator, Field, Tag, TypeAdapter, ValidationError

from weftline.errors import InputError, Problem
from weftline.fields import (
    FieldClass,
    Unwritten,
    Written,
    default_of,
    hints,
    markers,
    plain,
    written_fields,
    written_form,
)
from weftline.pipelines.check.problems import PATTERNS, from_validation
from weftline.pipelines.render.field_docs import field_docs, summary

_CONSTRAINTS = ("gt", "ge", "lt", "le", "multiple_of", "pattern", "min_length", "max_length")
_GENERIC = (list, tuple, dict, set, frozenset, Mapping, Sequence)


def read(of: Any, data: Any, path: str = "", beside: Iterable[str] = ()) -> tuple[Any, list[Problem]]:
    """Return `data` as a value of type `of`, or None and every problem in it, without file or line.

    PydanticUserError, NameError: `of` has a type that cannot be validated.

    path:   path of `data` in its file.
    beside: keys that are known beside those of `of`, for the message about an unknown key.
    """
    try:
        written = json.dumps(plain(data))
    except TypeError:
        return None, list(_unwritable(data, path))
    try:
        return _adapter(of).validate_json(written), []
    except InputError as error:  # raised by a dataclass's own check as 'key: what is wrong'
        key, _, found = str(error).partition(": ")
        return None, [Problem(f"{path}.{key}" if path else key, found)]
    except ValidationError as error:
        if wrong := list(_unwritable(data, path)):
            return None, wrong
        known = partial(known_keys, of)
        return None, from_validation(
            error, data, path, lambda loc: [*known(loc), *beside] if len(loc) == 0 else known(loc)
        )


def json_schema_of(of: Any) -> dict[str, Any]:
    """Return the JSON Schema of the written form of type `of`, with the documentation of its fields."""
    return _adapter(of).json_schema()


def known_keys(of: Any, loc: Sequence[str | int]) -> list[str]:
    """Return the keys allowed in the mapping at `loc` of a value of type `of`."""
    schema = json_schema_of(of)
    defs, found = schema.get("$defs", {}), [schema]
    for part in loc:
        found = [inner for one in _flat(found, defs) for inner in _inside(one, part)]
    return [key for one in _flat(found, defs) for key in one.get("properties", {})]


def pydantic_type(of: Any) -> Any:
    """Return the type with its bounds, written forms and dataclasses in pydantic's terms."""
    if get_origin(of) is Annotated:
        inner, *marks = get_args(of)
        form = next((one for one in marks if isinstance(one, Written)), None)
        whole = pydantic_type(inner)
        if form is not None:
            whole = Annotated[pydantic_type(form.type), AfterValidator(form.read)]
        own = (msgspec.Meta, Written, FieldClass, Unwritten)
        more = [one for one in marks if not isinstance(one, own)]
        more += [field for one in marks if isinstance(one, msgspec.Meta) and (field := _bounds(one)) is not None]
        return Annotated[(whole, *more)] if more else whole
    if get_origin(of) in (Union, UnionType):
        return _union([one for one in get_args(of) if one is not NoneType], NoneType in get_args(of))
    if get_origin(of) in _GENERIC:
        return get_origin(of)[tuple(map(pydantic_type, get_args(of)))]
    if _is_declared(of) and of not in _being_made:
        return Annotated[_mirror(of), AfterValidator(partial(_built, of))]
    return of


def _is_declared(of: Any) -> bool:
    """Return True for a dataclass of the standard library; pydantic's own validate themselves."""
    return isinstance(of, type) and dataclasses.is_dataclass(of) and not hasattr(of, "__pydantic_validator__")


def _bounds(meta: msgspec.Meta) -> Any:
    """Return the bounds of a Meta as pydantic's Field; None if there are none."""
    if meta.pattern is not None and meta.extra and "expected" in meta.extra:
        PATTERNS[meta.pattern] = meta.extra["expected"]
    given = {name: bound for name in _CONSTRAINTS if (bound := getattr(meta, name)) is not None}
    return Field(**given) if given else None


def _union(members: Sequence[Any], nullable: bool) -> Any:
    """Return the union. Only the alternative for the kind of value (text, mapping, list, other) has problems."""
    groups: dict[str, list[Any]] = {}
    for one in members:
        groups.setdefault(_kind(one), []).append(pydantic_type(one))
    whole = reduce(or_, map(pydantic_type, members))
    if len(groups) > 1 and "" not in groups and not {"text", "other"} <= groups.keys():
        tagged = [Annotated[reduce(or_, types), Tag(kind)] for kind, types in groups.items()]
        expected = ", or ".join(_expected(kind, types) for kind, types in groups.items())
        choose = Discriminator(
            lambda value: _tag(groups, value), custom_error_type="kind", custom_error_message=expected
        )
        whole = Annotated[reduce(or_, tagged), choose]
    return whole | None if nullable else whole


def _expected(kind: str, types: Sequence[Any]) -> str:
    number = "a whole number" if types[0] is int or int in get_args(types[0]) else "a number"
    return {"mapping": "a mapping", "list": "a list", "text": "text"}.get(kind, number)


def _tag(kinds: Iterable[str], value: Any) -> str:
    """Return the kind of a written value; text counts as any other value where no text is allowed."""
    if isinstance(value, Mapping):
        return "mapping"
    if isinstance(value, list | tuple):
        return "list"
    return "text" if isinstance(value, str) and "text" in kinds else "other"


def _kind(of: Any) -> str:
    """Return 'mapping', 'list', 'text' or 'other' (numbers), as a type is written; '' if that is not known."""
    if get_origin(of) is Annotated:
        form = next((one for one in get_args(of)[1:] if isinstance(one, Written)), None)
        return _kind(get_args(of)[0] if form is None else form.type)
    base = get_origin(of) or of
    if base in (dict, Mapping) or _is_declared(of):
        return "mapping"
    if base in (list, tuple, set, frozenset, Sequence):
        return "list"
    return "text" if base is str else "other" if base in (bool, int, float) else ""


@cache
def _adapter(of: Any) -> TypeAdapter[Any]:
    return TypeAdapter(pydantic_type(of))


_being_made: set[type[Any]] = set()
"""Dataclasses whose mirror is being made; one that contains itself is left to pydantic."""


@cache
def _mirror(of: Any) -> type[Any]:
    """Return a dataclass with the written keys of `of`, in pydantic's terms."""
    _being_made.add(of)
    try:
        made = [(one.name, pydantic_type(hints(of)[one.name]), _default(one)) for one in written_fields(of)]
    finally:
        _being_made.discard(of)
    config = ConfigDict(
        extra="allow" if _rest(of) else "forbid",
        strict=True,
        allow_inf_nan=False,
        arbitrary_types_allowed=True,
        json_schema_extra=partial(_describe, of),
    )
    mirror = dataclasses.make_dataclass(of.__name__, made, kw_only=True, namespace={"__pydantic_config__": config})
    mirror.__module__ = of.__module__
    return mirror


def _default(one: dataclasses.Field[Any]) -> Any:
    if one.default_factory is not dataclasses.MISSING:
        return dataclasses.field(default_factory=one.default_factory)
    return dataclasses.field(default=one.default)


def _rest(of: type[Any]) -> str:
    """Return the field that holds all other keys; '' for none."""
    return next((name for name, marks in markers(of).items() if any(getattr(one, "rest", False) for one in marks)), "")


def _built(of: type[Any], mirror: Any) -> Any:
    """Return the dataclass of validated keys. Required fields that files do not contain are ''."""
    written = {one.name for one in written_fields(of)}
    values = {name: value for name, value in vars(mirror).items() if name in written}
    if rest := _rest(of):
        values[rest] = {name: value for name, value in vars(mirror).items() if name not in written}
    for one in dataclasses.fields(of):
        if one.init and one.default is one.default_factory is dataclasses.MISSING:
            values.setdefault(one.name, "")
    return of(**values)


def _describe(of: type[Any], schema: dict[str, Any]) -> None:
    """Add the documentation of a dataclass and its fields to its JSON Schema."""
    if about := summary(of):
        schema["description"] = about
    docs = field_docs(of)
    for one in written_fields(of):
        entry = schema["properties"][one.name]
        if one.name in docs:
            entry["description"] = docs[one.name]
        form, default = written_form(hints(of)[one.name]), entry.get("default")
        if form is not None and default is not None:
            entry["default"] = form.write(default_of(one))


def _unwritable(value: Any, path: str) -> Iterator[Problem]:
    """Yield a problem for each value that JSON cannot hold: objects, keys of other types, halves of surrogate pairs."""
    if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
        for key, one in value.items():
            yield from _unwritable(one, f"{path}.{key}" if path else key)
    elif isinstance(value, list | tuple):
        for index, one in enumerate(value):
            yield from _unwritable(one, f"{path}.{index}")
    elif isinstance(value, str) and any("\ud800" <= one <= "\udfff" for one in value):
        yield Problem(path, ascii(value)[:60], "Unicode text; this has one half of a surrogate pair")
    else:
        try:
            plain(value)
        except TypeError as error:
            yield Problem(path, str(error))


def _flat(schemas: Iterable[Any], defs: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the schemas with references followed and alternatives spread out."""
    flat: list[dict[str, Any]] = []
    for one in schemas:
        if not isinstance(one, dict):
            continue
        if "$ref" in one:
            flat += _flat([defs[one["$ref"].rpartition("/")[2]]], defs)
        elif "anyOf" in one or "oneOf" in one or "allOf" in one:
            flat += _flat([*one.get("anyOf", ()), *one.get("oneOf", ()), *one.get("allOf", ())], defs)
        else:
            flat.append(one)
    return flat


def _inside(schema: Mapping[str, Any], part: str | int) -> list[Any]:
    if isinstance(part, int):
        prefix = schema.get("prefixItems", [])
        return [prefix[part] if part < len(prefix) else schema.get("items")]
    known = schema.get("properties", {})
    return (
        [known[part]]
        if part in known
        else [schema.get("additionalProperties"), *schema.get("patternProperties", {}).values()]
    )
