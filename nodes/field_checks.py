"""Checks of option values, derived from the fields of a dataclass or msgspec Struct.

    @dataclass(frozen=True, slots=True)
    class SamplingParams:
        temperature: Annotated[float, Meta(ge=0, le=100)] = 0.0
        stop: Annotated[tuple[Stop, ...], Meta(max_length=32)] = ()

        def __post_init__(self) -> None:
            check_fields(self, "sampling.")

An annotation states type and bounds once. msgspec checks values against it, strictly: "5" is no number, 1 is not true,
a list may stand for a tuple. That takes a microsecond, so it fits into the path of a request. This module writes the
errors: `sampling.temperature: found 'x', expected a number from 0 to 100`. One error lists all wrong fields.
`Meta(extra={"expected": ...})` replaces the words after "expected".
"""

from __future__ import annotations

import difflib
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from functools import cache
from operator import attrgetter, is_
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import msgspec
from msgspec import Meta

from weftline.errors import InputError
from weftline.fields import hints

T = TypeVar("T", bound=msgspec.Struct)

SHOWN_CHARS_MAX = 40
"""Longest text that an error shows."""

_UNIONS = (Union, UnionType)


@dataclass(frozen=True, slots=True)
class _Fields:
    """Fields of a dataclass. lists: those that hold tuples.   struct: a Struct with the same fields."""

    names: tuple[str, ...]
    defaults: tuple[Any, ...]
    values: Callable[[Any], tuple[Any, ...]]
    lists: tuple[str, ...]
    struct: type[msgspec.Struct]


def check_fields(value: Any, prefix: str = "") -> bool:
    """Check a frozen dataclass from its `__post_init__`, and replace its lists by tuples.

    InputError lists all wrong fields; `param` is the first. Returns False where every field has its default.
    """
    own = _fields(type(value))
    if all(map(is_, own.values(value), own.defaults)):
        return False
    try:
        msgspec.convert(value, own.struct, from_attributes=True)
    except msgspec.ValidationError:
        if wrong := _wrong_fields(field_values(value), own.struct):
            raise _error(wrong, prefix) from None
    for name in own.lists:
        if type(one := getattr(value, name)) in (list, set, frozenset):
            object.__setattr__(value, name, tuple(one))
    return True


def read_fields(cls: type[T], values: Mapping[str, Any], **more: Any) -> T:
    """Return a Struct with the values of a JSON object; null is an absent value, and unknown keys are ignored.

    more: values of further fields, in place of those in the object.
    InputError lists all wrong fields; `param` is the first.
    """
    given = {name: one for name, one in values.items() if one is not None} | more
    try:
        return msgspec.convert(given, cls)
    except msgspec.ValidationError:
        raise _error(_wrong_fields(given, cls)) from None


def check_value(path: str, annotation: Any, value: Any) -> None:
    """Check one value against an annotation; InputError has its path."""
    if wrong := _mismatch(path, value, annotation):
        raise _error(wrong)


def field_names(cls: type[Any]) -> tuple[str, ...]:
    """Return the names of a dataclass's fields, in order."""
    return _fields(cls).names


def field_values(value: Any) -> dict[str, Any]:
    """Return the fields of a dataclass by name."""
    own = _fields(type(value))
    return dict(zip(own.names, own.values(value)))


def unknown_key(key: str, known: Collection[str]) -> str:
    """Return the problem of an unknown key, with the nearest known one."""
    near = difflib.get_close_matches(key, known, n=1)
    return f"unknown key; did you mean {near[0]}?" if near else f"unknown key; known here: {', '.join(known)}"


def shown(value: object) -> str:
    """Return a value as an error shows it: short, and a container, a long text or a huge number by its size."""
    if isinstance(value, Mapping):
        return f"an object of {len(value)} keys"
    if isinstance(value, list | tuple):
        return f"a list of {len(value)}"
    if isinstance(value, str) and len(value) > SHOWN_CHARS_MAX:
        return f"text of {len(value)} characters"
    if isinstance(value, int) and value.bit_length() > 128:  # Python does not write out thousands of digits
        return f"a whole number of {value.bit_length()} bits"
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return repr(value) if isinstance(value, str | int | float) else type(value).__name__


def _compiled(cls: Any) -> _Fields:
    own, hint = fields(cls), hints(cls)
    names = tuple(one.name for one in own)
    defaults = tuple(None if one.default is MISSING else one.default for one in own)
    lists = tuple(name for name in names if any(origin in (tuple, Sequence) for origin in _origins(hint[name])))
    struct = msgspec.defstruct(cls.__name__, [(name, hint[name], None) for name in names])
    return _Fields(names, defaults, attrgetter(*names), lists, struct)


_fields: Callable[[Any], _Fields] = cache(_compiled)


def _origins(annotation: Any) -> list[Any]:
    """Return the origin of an annotation, or those of a union's members."""
    _, origin, inner = _parts(annotation)
    return [_parts(one)[1] for one in inner] if origin in _UNIONS else [origin]


def _error(wrong: list[tuple[str, str, str]], prefix: str = "") -> InputError:
    lines = (f"{prefix}{path}: found {found}, expected {wanted}" for path, found, wanted in wrong)
    return InputError("; ".join(lines), param=wrong[0][0].partition(".")[0])


def _wrong_fields(given: Mapping[str, Any], cls: type[msgspec.Struct]) -> list[tuple[str, str, str]]:
    """Return path, found and expected of every wrong field."""
    hints, wrong = get_type_hints(cls, include_extras=True), []
    for one in msgspec.structs.fields(cls):
        if one.encode_name in given:
            wrong += _mismatch(one.encode_name, given[one.encode_name], hints[one.name])
        elif one.required:
            wrong.append((one.encode_name, "nothing", expected(hints[one.name])))
    return wrong


def _mismatch(path: str, value: Any, annotation: Any) -> list[tuple[str, str, str]]:
    """Return path, found and expected of the innermost part of a value that does not fit; [] if it fits."""
    if _fits(float(value) if isinstance(value, float) else value, annotation):  # numpy's floats are floats
        return []
    _, origin, inner = _parts(annotation)
    for kind in inner if origin in _UNIONS else [annotation]:
        if deeper := list(_inside(path, value, kind)):
            return deeper
    return [(path, shown(value), expected(annotation))]


def _inside(path: str, value: Any, annotation: Any) -> Iterator[tuple[str, str, str]]:
    """Yield the mismatch of an entry or field of a value of the right kind."""
    meta, origin, inner = _parts(annotation)
    if not isinstance(value, _KINDS.get(origin, Mapping if _has_fields(origin) else ())):
        return
    if len(value) > (sys.maxsize if meta.max_length is None else meta.max_length):
        yield path, shown(value), f"at most {meta.max_length} entries"
    elif _has_fields(origin):
        yield from ((f"{path}.{name}", found, wanted) for name, found, wanted in _wrong_fields(value, origin))
    elif isinstance(value, Mapping):
        entries = list(value.items())
        for key, one in entries[_first(entries, lambda some: _fits(dict(some), dict[inner[0], inner[1]])) :][:1]:  # type: ignore[valid-type]
            if not _fits(key, inner[0]):
                yield path, f"the key {shown(key)}", expected(inner[0])
            else:
                yield from _mismatch(f"{path}.{key}", one, inner[1])
    else:
        at = _first(list(value), lambda some: _fits(some, list[inner[0]]))  # type: ignore[valid-type]
        for one in value[at : at + 1]:
            yield from _mismatch(f"{path}.{at}", one, inner[0])


_KINDS: Mapping[Any, Any] = {**dict.fromkeys((tuple, list, Sequence), (list, tuple)), dict: Mapping, Mapping: Mapping}
"""Python types of the values that stand for lists and mappings."""


def _has_fields(origin: Any) -> bool:
    return isinstance(origin, type) and issubclass(origin, msgspec.Struct)


def _first(entries: list[Any], fit: Callable[[list[Any]], bool]) -> int:
    """Return the index of the first entry that does not fit, by halves; `fit` checks several."""
    low, high = 0, len(entries)
    while low < high:
        middle = (low + high) // 2
        low, high = (middle + 1, high) if fit(entries[low : middle + 1]) else (low, middle)
    return low


def _fits(value: Any, annotation: Any) -> bool:
    try:
        msgspec.convert(value, annotation)
    except msgspec.ValidationError:
        return False
    return True


def _parts(annotation: Any) -> tuple[Meta, Any, tuple[Any, ...]]:
    """Return bounds, origin and arguments of an annotation."""
    meta = Meta()
    while get_origin(annotation) is Annotated:
        annotation, *marks = get_args(annotation)
        meta = next((one for one in marks if isinstance(one, Meta)), meta)
    return meta, get_origin(annotation) or annotation, get_args(annotation)


def expected(annotation: Any) -> str:
    """Return in words what an annotation expects: 'a whole number from 1 to 64'."""
    meta, origin, inner = _parts(annotation)
    if meta.extra and "expected" in meta.extra:
        return str(meta.extra["expected"])
    if origin in _UNIONS:
        return ", or ".join(dict.fromkeys(expected(one) for one in inner if one is not NoneType))
    if origin is Literal:
        *first, last = map(str, inner)
        return f"{', '.join(first)} or {last}" if first else last
    if origin in (int, float):
        limits = (("above", meta.gt), ("from", meta.ge), ("below", meta.lt), ("to", meta.le))
        number = "a whole number" if origin is int else "a number"
        return " ".join(
            [number, *(f"{word} {bound:,}".replace(",", "") for word, bound in limits if bound is not None)]
        )
    if origin is str:
        size = f" of {meta.min_length or 0} to {meta.max_length} characters" if meta.max_length is not None else ""
        return "text" + (size or (" that is not empty" if meta.min_length else ""))
    if origin in (tuple, list, Sequence):
        return "a list" + (" that is not empty" if meta.min_length else "")
    named = {bool: "true or false", Any: "a value"}
    if origin in named or not isinstance(origin, type) or issubclass(origin, Mapping | msgspec.Struct):
        return named.get(origin, "an object")
    return f"a {origin.__name__}"
