"""Problems: messages from validation errors, and the report that adds file and line to them."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import pydantic

from weftline.errors import Problem
from weftline.nodes.contract import ConfigError
from weftline.pipelines.placement.machine import bytes_of
from weftline.pipelines.spec.document import hide_secrets
from weftline.pipelines.spec.graph import Pipeline

_EXPECTED = {
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "int_parsing_size": "a smaller whole number",
    "float_type": "a number",
    "finite_number": "a finite number",
    "string_type": "text",
    "path_type": "a path, as text",
    "bool_type": "true or false",
    "none_required": "nothing (null)",
    "dict_type": "a mapping",
    "mapping_type": "a mapping",
    "model_type": "a mapping",
    "model_attributes_type": "a mapping",
    "dataclass_type": "a mapping",
    "list_type": "a list",
    "tuple_type": "a list",
    "set_type": "a list",
    "frozen_set_type": "a list",
    "literal_error": "{expected}",
    "enum": "{expected}",
    "greater_than": "more than {gt}",
    "greater_than_equal": "at least {ge}",
    "less_than": "less than {lt}",
    "less_than_equal": "at most {le}",
    "string_too_long": "at most {max_length} characters",
    "string_too_short": "at least {min_length} characters",
    "too_short": "at least {min_length} entries",
    "too_long": "at most {max_length} entries",
}
PATTERNS: dict[str, str] = {}
"""Descriptions in words of the patterns that dataclasses declare, by pattern; `validation` adds them."""

UNKNOWN_KEY = "unknown key"
_UNKNOWN = ("extra_forbidden", "unexpected_keyword_argument")
_NO_VALUE = ("missing", "missing_argument", "missing_keyword_only_argument")
_SWITCHES = ("yes", "no", "on", "off")  # booleans in YAML 1.1, text in 1.2


def nearest(word: str, known: Iterable[str]) -> str:
    """Return the known name most similar to `word`, or ''."""
    folded = {name.lower().replace("-", "_"): name for name in known}
    word = word.lower().replace("-", "_")
    close = difflib.get_close_matches(word, folded, n=3, cutoff=0.6)
    swapped = [
        name for name in close if sorted(name) == sorted(word)
    ]  # letters in the wrong order: the most common mistake
    return folded[(swapped or close)[0]] if close else ""


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return 'did you mean X?' for the nearest known name, or '' when none is near."""
    name = nearest(word, known)
    return f"did you mean {name}?" if name else ""


def listed(names: Iterable[str], none: str = "none") -> str:
    """Format names as 'a, b, c', shortened past sixteen; `none` when there are none."""
    shown = list(names)
    more = f" and {len(shown) - 16} more" if len(shown) > 16 else ""
    return ", ".join(shown[:16]) + more or none


def shown(value: Any) -> str:
    """Format a value for a message: short, and a container by its kind."""
    if isinstance(value, Mapping):
        return f"a mapping of {len(value)} keys" if value else "an empty mapping"
    if isinstance(value, list | tuple):
        return f"a list of {len(value)}" if value else "an empty list"
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def from_validation(
    error: pydantic.ValidationError,
    data: Any,
    prefix: str,
    known: Callable[[tuple[str | int, ...]], Iterable[str]],
) -> list[Problem]:
    """Return one Problem for each place in `data` that a pydantic model refused, without file or line.

    prefix: path of `data` in the pipeline.
    known:  returns the keys allowed in the mapping at a location, for unknown and missing keys.
    """
    found: dict[str, Problem] = {}
    for one in error.errors(include_url=False):
        loc, whole = _inside(one["loc"], data, one["type"])
        if one["type"] == "too_short" and len(whole) >= one["ctx"]["min_length"]:
            continue  # its wrong entries, which have problems of their own, were not counted
        problem = _problem(dict(one), loc, whole, prefix, known)
        earlier = found.get(problem.path)
        found[problem.path] = problem if earlier is None else _either(earlier, problem)
    return list(found.values())


def _inside(loc: tuple[str | int, ...], data: Any, kind: str) -> tuple[tuple[str | int, ...], Any]:
    """Return the part of `loc` that is a place in `data`, and the value there; pydantic adds names of union members."""
    place: list[str | int] = []
    for part in loc:
        in_list = isinstance(data, list | tuple) and isinstance(part, int) and part < len(data)
        if in_list or (isinstance(data, Mapping) and part in data):
            data = data[part]
        elif kind in _NO_VALUE and part == loc[-1]:
            return (*place, part), None
        else:
            continue
        place.append(part)
    return tuple(place), data


def _problem(one: dict[str, Any], loc: tuple[str | int, ...], value: Any, prefix: str, known: Any) -> Problem:
    kind, context = one["type"], one.get("ctx", {})
    path = ".".join(part for part in (prefix, *map(_cut, loc)) if part)
    if kind in _UNKNOWN:
        names = list(known(loc[:-1]))
        return Problem(
            path, UNKNOWN_KEY, f"one of {listed(names)}" if names else "no keys", did_you_mean(str(loc[-1]), names)
        )
    if kind in _NO_VALUE:
        return Problem(path, "missing", fix=f"add `{loc[-1]}:`")
    cause = context.get("error")
    if isinstance(cause, ConfigError):
        return Problem(f"{path}.{cause.option}".strip("."), cause.found, cause.expected, cause.fix)
    if isinstance(cause, Exception):
        return Problem(path, str(cause))
    expected = PATTERNS.get(context.get("pattern", "")) or one["msg"]
    if kind in _EXPECTED:
        expected = _EXPECTED[kind].format_map({name: _plain(bound) for name, bound in context.items()})
    if len(one["loc"]) and one["loc"][-1] == "[key]":
        return Problem(path, f"the key {shown(loc[-1])}", expected)
    return Problem(path, shown(value), expected, _as_written(kind, value, path))


def _plain(bound: Any) -> Any:
    """Format a bound: 0, not 0.0."""
    return int(bound) if isinstance(bound, float) and bound.is_integer() else bound


def _as_written(kind: str, value: Any, path: str) -> str:
    """Return the likely correction of a value of the wrong type, or ''."""
    if kind == "int_type" and "_bytes" in path and isinstance(value, str) and (size := bytes_of(value)):
        return f"write it in bytes, without a unit or quotes: {size}"
    if kind in ("string_type", "kind") and isinstance(value, bool | int | float):
        return "put it in quotes"
    if kind == "bool_type" and isinstance(value, str) and value.lower() in _SWITCHES:
        return "write true or false"
    if (
        kind in ("int_type", "float_type")
        and isinstance(value, str)
        and value.strip("+-").replace(".", "", 1).isdigit()
    ):
        return "write it without quotes"
    return ""


def _either(one: Problem, other: Problem) -> Problem:
    """Return one problem for a value that fits neither of two allowed types."""
    if not other.expected or other.expected in one.expected:
        return one
    expected = f"{one.expected}, or {other.expected}" if one.expected else other.expected
    return Problem(one.path, one.found, expected, one.fix or other.fix)


def _cut(part: str | int) -> str:
    text = str(part)
    return text if len(text) <= 80 else text[:77] + "..."


@dataclass(frozen=True, slots=True)
class Origin:
    """Source location of a generated step or wire.

    path:     path in the source, such as 'steps.answer.prompt'.
    pipeline: the pipeline of that source, if another one: a sub-pipeline with its own file and lines.
    whole:    all its problems are reported at `path`; otherwise at the corresponding place below `path`.
    """

    path: str
    pipeline: Pipeline | None = None
    whole: bool = True


@dataclass(slots=True)
class Report:
    """Collects problems of `pipeline`.

    origins: of generated steps and inputs: 'steps.answer_prompt' comes from 'steps.answer.prompt'.
    """

    pipeline: Pipeline
    origins: Mapping[str, Origin] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)

    def add(self, path: str, found: str, expected: str = "", fix: str = "", line: int = 0) -> None:
        self.take([Problem(path, found, expected, fix, line)])

    def take(self, problems: Iterable[Problem]) -> None:
        """Add problems, completing file and line and generated names; drop duplicates.

        A problem with a file is complete: it was found in that file.
        """
        for one in problems:
            placed = one if one.file else self._placed(one)
            if placed not in self.problems:
                self.problems.append(placed)

    def holds(self, path: str) -> bool:
        """Return True when a problem at `path` was reported already."""
        path, pipeline = self._written(path)
        return any(one.path == path and one.file == pipeline.file for one in self.problems)

    def _placed(self, problem: Problem) -> Problem:
        path, pipeline = self._written(problem.path)
        placed = dataclasses.replace(problem, path=path, file=pipeline.file, line=problem.line or pipeline.line(path))
        return hide_secrets(placed, pipeline.secrets)

    def _written(self, path: str) -> tuple[str, Pipeline]:
        """Return the source path of `path`, and its pipeline."""
        kind, _, rest = path.partition(".")
        name, dot, inside = rest.partition(".")
        origin = self.origins.get(f"{kind}.{name}")
        if origin is None:
            return path, self.pipeline
        return origin.path if origin.whole else f"{origin.path}{dot}{inside}", origin.pipeline or self.pipeline
