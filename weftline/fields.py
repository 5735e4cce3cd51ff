"""Markers on the fields of option dataclasses: their class, and the form in which a file writes them.

    @dataclass(frozen=True, slots=True)
    class BatchPolicy:
        items_max: Annotated[int, Meta(ge=1, le=4096), LOAD] = 1
        '''Most items in one call of the node.'''

A field is written once: its annotation holds the type, the bounds (`msgspec.Meta`) and the markers of this module, its
default is the dataclass's, and its docstring is the documentation. Parsing, JSON Schema, reference pages,
serialisation, messages to workers and the fingerprint of jobs are derived from it. `extra={"expected": ...}` of a Meta
describes its pattern in words.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from functools import cache
from pathlib import PurePath
from types import UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, cast, get_args, get_origin, get_type_hints

from msgspec import Meta


@dataclass(frozen=True, slots=True)
class FieldClass:
    """Class of a field.

    part:    'load': part of what a worker loads. 'request': applies to single items. 'graph': wires, control flow, and
             how work is scheduled.
    results: its value changes results. A job with outputs refuses to continue after a change of it.
    """

    part: Literal["load", "request", "graph"]
    results: bool


LOAD = FieldClass("load", True)
"""Part of what is loaded, with an effect on results: models, number formats. The class of an unmarked option."""
RESOURCE = FieldClass("load", False)
"""Part of what is loaded, without an effect on results: devices, memory sizes."""
REQUEST = FieldClass("request", True)
"""Applies to single items, with an effect on results: prompts, languages."""
GRAPH = FieldClass("graph", True)
"""Wires and control flow."""
SCHEDULE = FieldClass("graph", False)
"""Scheduling, without an effect on results: times, retries, limits on open work."""
DERIVED = FieldClass("graph", False)
"""Follows from other fields, or is there for display."""


@dataclass(frozen=True, slots=True)
class Written:
    """Form of a value in a file, where it is not that of the annotated type.

    type:  type of the written form; a dataclass among its members is written as a mapping.
    read:  converts the validated written form. ValueError or ConfigError: it is wrong.
    write: converts back to plain values.
    """

    type: Any
    read: Callable[[Any], Any]
    write: Callable[[Any], Any]


@dataclass(frozen=True, slots=True)
class Unwritten:
    """Marker of a field that is no key of a file. rest: it holds all keys that are not fields."""

    rest: bool = False


UNWRITTEN, REST = Unwritten(), Unwritten(rest=True)


_Function = TypeVar("_Function", bound=Callable[..., Any])


def _cached(function: _Function) -> _Function:
    """Cache results by arguments; mypy takes no class for hashable, as `functools.cache` requires."""
    return cast(_Function, cache(function))


@_cached
def markers(cls: type[Any]) -> Mapping[str, tuple[Any, ...]]:
    """Return the metadata of each field's annotation, the outermost `Annotated` only."""
    return {name: get_args(hint)[1:] if get_origin(hint) is Annotated else () for name, hint in hints(cls).items()}


@_cached
def hints(cls: type[Any]) -> Mapping[str, Any]:
    """Return the annotations of a dataclass's fields by name, with their metadata. NameError: one is not defined."""
    found = get_type_hints(cls, include_extras=True)
    return {one.name: found[one.name] for one in dataclasses.fields(cls)}


@_cached
def classes(cls: type[Any]) -> Mapping[str, FieldClass | None]:
    """Return the class of each field; None for a field without one."""
    return {name: next(iter(_marks(cls, name, FieldClass)), None) for name in markers(cls)}


def fields_of_part(cls: type[Any], part: str) -> list[str]:
    """Return the fields of a part; one without a class is part of what is loaded, since it may be."""
    return [name for name, given in classes(cls).items() if (given or LOAD).part == part]


def result_fields(cls: type[Any], default: FieldClass | None = None) -> list[str]:
    """Return the fields that change results. TypeError: a field has no class, and there is no `default`."""
    found = []
    for name, given in classes(cls).items():
        of = given or default
        if of is None:
            raise TypeError(f"{cls.__name__}.{name} has no class")
        found += [name] if of.results else []
    return found


@_cached
def written_fields(cls: type[Any]) -> tuple[dataclasses.Field[Any], ...]:
    """Return the fields of a dataclass that are keys of a file, its own before inherited ones."""

    def depth(one: dataclasses.Field[Any]) -> int:
        return next(at for at, base in enumerate(cls.__mro__) if one.name in inspect.get_annotations(base))

    written = [one for one in dataclasses.fields(cls) if one.init and not _marks(cls, one.name, Unwritten)]
    return tuple(sorted(written, key=depth))


def _marks(cls: type[Any], name: str, of: type[Any]) -> list[Any]:
    return [one for one in markers(cls)[name] if isinstance(one, of)]


def worded(expected: str, **bounds: Any) -> Meta:
    """Return bounds that errors describe as `expected`."""
    return Meta(extra={"expected": expected}, **bounds)


def written_form(hint: Any) -> Written | None:
    """Return the `Written` of an annotation or of the alternative to None in it; None if there is none."""
    if get_origin(hint) is Annotated:
        inner, *marks = get_args(hint)
        return next((one for one in marks if isinstance(one, Written)), None) or written_form(inner)
    parts = get_args(hint) if get_origin(hint) in (Union, UnionType) else ()
    return next((one for part in parts if (one := written_form(part))), None)


def shorthand(of: type[Any], key: str, **unwritten: Any) -> Written:
    """Return the form of a dataclass of which a file may write the value of one key instead of a mapping.

    unwritten: required fields that a file does not contain.
    """

    def write(value: Any) -> Any:
        changed = changed_fields(value)
        return plain(getattr(value, key)) if changed.keys() <= {key} else changed

    return Written(
        hints(of)[key] | of, lambda value: value if isinstance(value, of) else of(**{key: value, **unwritten}), write
    )


def changed_fields(value: Any) -> dict[str, Any]:
    """Return the keys of a dataclass value that differ from their defaults, as a file writes them."""
    changed = {}
    for one in written_fields(type(value)):
        current, default = getattr(value, one.name), default_of(one)
        if current != default or type(current) is not type(default):
            changed[one.name] = _as_written(hints(type(value))[one.name], current)
    return changed


def default_of(one: dataclasses.Field[Any]) -> Any:
    """Return the default of a field; dataclasses.MISSING if it has none."""
    return one.default if one.default_factory is dataclasses.MISSING else one.default_factory()


def _as_written(hint: Any, value: Any) -> Any:
    if value is not None and (form := written_form(hint)) is not None:
        return form.write(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):  # equal to its defaults: one key is written
        return changed_fields(value) or dict([*plain(value).items()][:1])
    return plain(value)


def annotation_text(annotation: Any) -> str:
    """Return an annotation as written, without its metadata."""
    text = annotation if isinstance(annotation, str) else getattr(annotation, "__name__", str(annotation))
    match ast.parse(text, mode="eval").body if text.startswith("Annotated[") else None:
        case ast.Subscript(slice=ast.Tuple(elts=[inner, *_])):
            return ast.unparse(inner)
    return text


def copied(of: type[Any], source: Any) -> dict[str, Any]:
    """Return the values that `source` has for the fields of dataclass `of`."""
    return {one.name: getattr(source, one.name) for one in dataclasses.fields(of)}


def plain(value: Any) -> Any:
    """Convert `value` to None, bool, int, float, str, list and dict only. TypeError: not possible."""
    if value is None or (isinstance(value, bool | int | float | str) and not isinstance(value, Enum)):
        return value
    if isinstance(value, Enum):
        return plain(value.value)
    if isinstance(value, PurePath):
        return value.as_posix()
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        if not all(isinstance(key, str) for key in value):
            raise TypeError("a mapping with a key that is not text")
        return {key: plain(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [plain(one) for one in value]
    if isinstance(value, set | frozenset):
        return sorted(plain(one) for one in value)
    raise TypeError(f"a value of type {type(value).__name__}, which a pipeline file cannot contain")
