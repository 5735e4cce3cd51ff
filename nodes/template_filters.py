"""Template filters and conversion of values to text.

Each filter's result is bounded before it is made. Filters of Jinja2 are taken over where their result is no larger than
their input; those that pad, repeat or format are written anew or left out.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from jinja2 import Undefined
from jinja2.exceptions import FilterArgumentError
from jinja2.filters import FILTERS as JINJA

from weftline.nodes.detections import Detections
from weftline.nodes.values import describe as describe_value

TEXT_CHARS_MAX = 1 << 20
"""Longest text a filter makes, in characters."""

SHOWN_ELEMENTS_MAX = 4_096
"""Largest array a template sees as numbers; a larger one is shown as its dtype and shape."""

INDENT_MAX = 64

NUMBER_CHARS_MAX = 1_000
"""Longest text that becomes a number: more digits than a float has, fewer than make arithmetic slow."""


@dataclass(frozen=True, slots=True)
class Step:
    """The outputs of another step, `see` in {{ see.detections }}."""

    outputs: Mapping[str, Any]


class Objects(list[dict[str, Any]]):
    """Detections in a template: a list of name, score and box, printed as their description."""

    __slots__ = ("described",)

    def __init__(self, detections: Detections) -> None:
        super().__init__(detections.to_json())
        self.described = detections.describe()


def to_template(value: Any) -> Any:
    """Return `value` of any port as a template sees it."""
    if isinstance(value, Detections):
        return Objects(value)
    if isinstance(value, np.ndarray):
        return value.tolist() if value.size <= SHOWN_ELEMENTS_MAX else describe_value(value)
    if isinstance(value, bytes | bytearray | memoryview):
        return describe_value(bytes(value))
    return value


def to_text(value: Any) -> Any:
    """Return the text of `value` in the output: a str as it is, lists and dicts as JSON, None as nothing."""
    if isinstance(value, str | Undefined):
        return value  # an undefined value raises where Jinja prints it, with its name
    if value is None:
        return ""
    if isinstance(value, bool | int | float):
        return str(value)
    if isinstance(value, Objects):
        return value.described
    return to_json(value)


def to_json(value: Any, indent: int | None = None) -> str:
    """Return `value` as JSON, non-ASCII letters as they are."""
    if indent is not None and not 0 <= indent <= INDENT_MAX:
        raise FilterArgumentError(f"tojson: indent is {indent}; from 0 to {INDENT_MAX}")
    if isinstance(value, Undefined):
        return str(value)
    pieces, left = [], TEXT_CHARS_MAX
    for piece in json.JSONEncoder(ensure_ascii=False, indent=indent, default=_plain).iterencode(value):
        pieces.append(piece)
        left -= len(piece)
        if left < 0:
            raise FilterArgumentError(f"tojson: more than {TEXT_CHARS_MAX} characters")
    return "".join(pieces)


def _plain(value: Any) -> Any:
    if isinstance(value, list | tuple | set | range) or hasattr(value, "__iter__"):
        return list(value)
    raise FilterArgumentError(f"{describe_value(value)} has no text")


def describe(objects: Any) -> str:
    """Return '2 red circles, 1 blue star' for detections, or for any list of objects with a name or of names."""
    if isinstance(objects, Objects):
        return objects.described
    if not isinstance(objects, list | tuple):
        raise FilterArgumentError(f"describe: wants detections, got {describe_value(objects)}")
    names = [thing.get("name") if isinstance(thing, dict) else thing for thing in objects]
    if not all(isinstance(name, str) for name in names):
        raise FilterArgumentError("describe: wants detections, or a list of names")
    counts = sorted(Counter(names).items(), key=lambda item: (-item[1], item[0]))
    return ", ".join(f"{n} {name}{'s' if n != 1 else ''}" for name, n in counts) or "nothing"


def join(values: Any, separator: str = "", attribute: str | None = None) -> str:
    """Return the texts of `values` with `separator` between them."""
    rows = [value[attribute] for value in values] if attribute else list(values)
    texts = [str(to_text(value)) for value in rows]
    separator = str(separator)
    if sum(map(len, texts)) + len(separator) * len(texts) > TEXT_CHARS_MAX:
        raise FilterArgumentError(f"join: more than {TEXT_CHARS_MAX} characters")
    return separator.join(texts)


def replace(value: Any, old: str, new: str) -> str:
    """Return `value` with every `old` replaced by `new`."""
    text, old, new = str(to_text(value)), str(old), str(new)
    if len(text) + text.count(old) * len(new) > TEXT_CHARS_MAX:
        raise FilterArgumentError(f"replace: more than {TEXT_CHARS_MAX} characters")
    return text.replace(old, new)


def indent(value: Any, width: int = 4, first: bool = False) -> str:
    """Return `value` with `width` spaces before every line, before the first one too if `first`."""
    text = str(to_text(value))
    if not 0 <= width <= INDENT_MAX or len(text) + (text.count("\n") + 1) * width > TEXT_CHARS_MAX:
        raise FilterArgumentError(f"indent: a width from 0 to {INDENT_MAX}, and at most {TEXT_CHARS_MAX} characters")
    space = " " * width
    return (space if first else "") + text.replace("\n", "\n" + space)


def number_from(name: str) -> Callable[..., Any]:
    """Return Jinja's filter `name` (int or float) with a limit on the length of the texts it reads."""

    def bounded(value: Any, *args: Any, **kwargs: Any) -> Any:
        _check_digits(name, value)
        return JINJA[name](value, *args, **kwargs)

    return bounded


def _check_digits(name: str, value: Any) -> None:
    if isinstance(value, str) and len(value) > NUMBER_CHARS_MAX:
        raise FilterArgumentError(f"{name}: a text of {len(value)} characters; a number has {NUMBER_CHARS_MAX} at most")


def rounded(value: Any, precision: int = 0) -> float:
    """Return `value` rounded to `precision` places."""
    _check_digits("round", value)
    if not -20 <= precision <= 20:
        raise FilterArgumentError("round: a precision from -20 to 20")
    return round(float(value), precision)


def total(values: Any, attribute: str | None = None, start: float = 0) -> float:
    """Return the sum of numbers."""
    rows = [value[attribute] for value in values] if attribute else list(values)
    if not all(isinstance(row, int | float) for row in (*rows, start)):
        raise FilterArgumentError("sum: wants numbers")
    found: float = sum(rows, start)
    return found


_TAKEN = (
    "abs", "capitalize", "count", "d", "default", "dictsort", "first", "items", "last", "length",
    "list", "lower", "map", "max", "min", "reject", "rejectattr", "reverse", "select", "selectattr", "sort", "title",
    "trim", "truncate", "unique", "upper", "wordcount",
)  # fmt: skip
"""Filters of Jinja2's own whose result is no larger than their input, or three times that where upper and title change
letters that have no capital of their own."""

FILTERS: dict[str, Callable[..., Any]] = {
    **{name: JINJA[name] for name in _TAKEN},
    "describe": describe, "float": number_from("float"), "indent": indent, "int": number_from("int"), "join": join,
    "replace": replace, "round": rounded, "string": lambda value: str(to_text(value)), "sum": total, "tojson": to_json,
}  # fmt: skip
