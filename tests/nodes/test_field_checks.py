"""Values are checked against the annotations of their fields, and errors say where, what and what instead."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import Meta, Struct

from weftline.errors import InputError
from weftline.nodes.field_checks import check_fields, expected, field_values, read_fields, shown

Count = Annotated[int, Meta(ge=1, le=9)]
Word = Annotated[str, Meta(min_length=1, max_length=5)]


@dataclass(frozen=True, slots=True)
class Options:
    count: Count = 1
    share: Annotated[float, Meta(gt=0, le=1)] | None = None
    words: Annotated[tuple[Word, ...], Meta(max_length=3)] = ()
    weights: dict[Word, Annotated[float, Meta(ge=0, le=1)]] = field(default_factory=dict)
    loud: bool = False

    def __post_init__(self) -> None:
        check_fields(self, "say.")


class Inner(Struct, frozen=True):
    flag: bool | None = None


class Body(Struct, frozen=True, kw_only=True, rename={"parts": "parts[]"}):
    model: Word
    kind: Literal["a", "b", "c"] = "a"
    inner: Inner | None = None
    parts: tuple[Count, ...] = ()


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"count": 0}, "say.count: found 0, expected a whole number from 1 to 9"),
        ({"count": True}, "say.count: found true, expected a whole number from 1 to 9"),
        ({"share": math.nan}, "say.share: found nan, expected a number above 0 to 1"),
        ({"words": ["a", ""]}, "say.words.1: found '', expected text of 1 to 5 characters"),
        ({"words": ["a"] * 4}, "say.words: found a list of 4, expected at most 3 entries"),
        ({"words": "a"}, "say.words: found 'a', expected a list"),
        ({"weights": {"a": 1, "b": 2}}, "say.weights.b: found 2, expected a number from 0 to 1"),
        ({"weights": {"too long": 1}}, "say.weights: found the key 'too long', expected text of 1 to 5 characters"),
        ({"loud": 1, "count": "1"}, "say.count: found '1', expected .*; say.loud: found 1, expected true or false"),
    ],
)
def test_an_error_has_place_finding_and_expectation(values: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=f"^{message}$") as refused:
        Options(**values)
    assert refused.value.param == message.removeprefix("say.").partition(":")[0].partition(".")[0]


def test_lists_become_tuples_and_other_values_stay() -> None:
    options = Options(3, 1, ["a", "b"], {"a": 1})  # type: ignore[arg-type]
    assert field_values(options) == {"count": 3, "share": 1, "words": ("a", "b"), "weights": {"a": 1}, "loud": False}


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({}, "model: found nothing, expected text of 1 to 5 characters"),
        ({"model": "m", "kind": "x"}, "kind: found 'x', expected a, b or c"),
        ({"model": "m", "inner": {"flag": 1}}, "inner.flag: found 1, expected true or false"),
        ({"model": "m", "inner": 5}, "inner: found 5, expected an object"),
        ({"model": "m", "parts[]": [1, 10]}, r"parts\[\].1: found 10, expected a whole number from 1 to 9"),
    ],
)
def test_a_json_object_is_read_by_its_keys(values: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=f"^{message}$"):
        read_fields(Body, values)


def test_null_is_absent_and_unknown_keys_are_ignored() -> None:
    assert read_fields(Body, {"model": "m", "kind": None, "more": 1}) == Body(model="m")


def test_a_wrong_entry_of_a_long_list_is_found_quickly() -> None:
    started = time.process_time()
    for place in (0, 2048, 4095):
        with pytest.raises(InputError, match=f"words: found a list|weights.k{place}: found 2"):
            Options(weights={f"k{at}": 2.0 if at == place else 1.0 for at in range(4096)})
    assert time.process_time() - started < 0.5


_values = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8)
_json = st.recursive(_values, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=6), inner))


@given(st.dictionaries(st.sampled_from(["model", "kind", "inner", "parts[]"]), _json))
def test_any_object_is_read_or_refused_with_a_field(values: dict[str, Any]) -> None:
    try:
        read_fields(Body, values)
    except InputError as error:
        assert error.param in ("model", "kind", "inner", "parts[]")


def test_values_are_shown_short() -> None:
    assert [shown(one) for one in (None, True, 1 << 40_000, "x" * 99, [1], {"a": 1}, 1.5, object())] == [
        "null",
        "true",
        "a whole number of 40001 bits",
        "text of 99 characters",
        "a list of 1",
        "an object of 1 keys",
        "1.5",
        "object",
    ]


def test_words_of_a_field_replace_the_derived_ones() -> None:
    assert expected(Annotated[int, Meta(ge=1, extra={"expected": "a count"})] | str | None) == "a count, or text"
