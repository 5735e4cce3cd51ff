"""One validator: dataclasses with bounds, written forms and unwritten fields, every problem with its path."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

import pytest
from msgspec import Meta

from weftline.fields import LOAD, REST, UNWRITTEN, Written
from weftline.nodes.contract import ConfigError
from weftline.pipelines.check.validation import json_schema_of, known_keys, read

Name = Annotated[str, Meta(pattern="^[a-z]+$", max_length=4, extra={"expected": "small letters"})]


@dataclass(frozen=True, slots=True)
class Wait:
    """A delay."""

    first_ms: Annotated[float, Meta(gt=0, le=10)] = 1.0
    """Delay before the first attempt."""
    rest: tuple[Annotated[int, Meta(ge=1)], ...] = ()


def _wait(value: Any) -> Wait:
    return value if isinstance(value, Wait) else Wait(value)


@dataclass(frozen=True, slots=True)
class Base:
    """Common options."""

    wait: Annotated[
        Annotated[Wait, Written(Annotated[float, Meta(gt=0)] | Wait, _wait, lambda one: one.first_ms)] | None, LOAD
    ] = None
    """Delays, or the first of them."""


@dataclass(frozen=True, slots=True)
class Whole(Base):
    """Options of a test."""

    count: Annotated[int | None, Meta(ge=1, le=8), LOAD] = None
    """Number of copies."""
    at: Mapping[Name, Wait] = field(default_factory=dict)
    inner: tuple[Whole, ...] = ()
    hidden: Annotated[str, UNWRITTEN] = "x"

    def __post_init__(self) -> None:
        if self.count == 7:
            raise ConfigError("count", "is 7", "any other number", "write 8")


@dataclass(frozen=True, slots=True)
class Open:
    own: int
    more: Annotated[Mapping[str, Any], REST] = field(default_factory=dict)


def found(data: Any, of: Any = Whole) -> dict[str, tuple[str, str, str]]:
    value, problems = read(of, data, "a")
    assert (value is None) == bool(problems)
    return {one.path.removeprefix("a."): (one.found, one.expected, one.fix) for one in problems}


def test_written_values_become_the_dataclasses() -> None:
    value, problems = read(Whole, {"wait": 3, "count": 2, "at": {"b": {"rest": [1, 2]}}})
    assert not problems
    assert value == Whole(wait=Wait(3.0), count=2, at={"b": Wait(rest=(1, 2))})
    assert read(Whole, {"wait": {"first_ms": 2.0}})[0] == Whole(wait=Wait(2.0))


def test_every_bound_is_reported_with_its_path_at_once() -> None:
    data = {"wait": {"first_ms": 20, "rest": [0]}, "count": 9, "at": {"B": {}, "b": {"first_ms": "1"}}, "hidden": "y"}
    assert found(data) == {
        "wait.first_ms": ("20", "at most 10", ""),
        "wait.rest.0": ("0", "at least 1", ""),
        "count": ("9", "at most 8", ""),
        "at.B": ("the key 'B'", "small letters", ""),
        "at.b.first_ms": ("'1'", "a number", "write it without quotes"),
        "hidden": ("unknown key", "one of count, at, inner, wait", ""),
    }
    assert found({"wait": -1}) == {"wait": ("-1", "more than 0", "")}, "a short form has one problem, not two"


def test_a_check_of_the_dataclass_has_path_and_remedy() -> None:
    assert found({"count": 7}) == {"count": ("is 7", "any other number", "write 8")}


def test_further_keys_are_kept_where_a_field_takes_them() -> None:
    assert read(Open, {"own": 1, "b": [1], "more": 2})[0] == Open(1, {"b": [1], "more": 2})


def test_a_value_that_json_cannot_hold_has_a_path() -> None:
    assert found({"own": 1, "deep": [object(), {1: 2}]}, Open) == {
        "deep.0": ("a value of type object, which a pipeline file cannot contain", "", ""),
        "deep.1": ("a mapping with a key that is not text", "", ""),
    }


@pytest.mark.parametrize("text", ["\ud800", "a\udfffb"])
def test_half_a_surrogate_pair_has_a_path(text: str) -> None:
    assert list(found({"own": 1, "deep": [{"x": text}]}, Open)) == ["deep.0.x"]


def test_the_schema_documents_inherited_and_nested_fields() -> None:
    schema = json_schema_of(Base)
    assert schema["description"] == "Common options."
    assert schema["properties"]["wait"]["description"] == "Delays, or the first of them."
    assert schema["$defs"]["Wait"]["properties"]["first_ms"] == {
        "default": 1.0, "exclusiveMinimum": 0, "maximum": 10, "title": "First Ms", "type": "number",
        "description": "Delay before the first attempt.",
    }  # fmt: skip
    assert known_keys(Base, ["wait"]) == ["first_ms", "rest"]
