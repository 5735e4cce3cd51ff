"""S8: strict JSON, and documents that are nearly JSON."""

from __future__ import annotations

import json
import math
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weftline.errors import InputError
from weftline.nodes.strict_json import VALUES, loads

DOCUMENTS = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_categories=("Cs",))),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=4),
    max_leaves=12,
)  # fmt: skip


@given(DOCUMENTS, st.booleans())
def test_every_json_value_is_read_as_the_standard_library_reads_it(value: Any, ascii: bool) -> None:
    try:
        text = json.dumps(value, ensure_ascii=ascii).encode()
    except UnicodeEncodeError:
        return  # a key with half a pair
    try:
        assert loads(text) == json.loads(text)
    except InputError as error:
        assert "surrogate" in str(error)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (b'{"a": 1, "a": 2}', "twice"), (b'[{"x": {"a": 1, "a": 1}}]', "twice"),
        (b"NaN", "NaN"), (b"[Infinity]", "Infinity"), (b"-Infinity", "Infinity"),
        (b"18446744073709551616", "64 bits"), (b"-9223372036854775809", "64 bits"), (b"1" * 5000, "64 bits"),
        (b"1e999", "no double"), (b"1" * 400 + b".0", "no double"), (b"[1.8e308]", "no double"),
        (b'"\\ud800"', "surrogate"), (b'{"\\udfff": 1}', "surrogate"), (b'"\\uDC00\\uD800"', "surrogate"),
        ("\"\ud800\"", "surrogate"),
        (b'"\xff"', "UTF-8"), ("[1]".encode("utf-16"), "UTF-8"), (b"\xef\xbb\xbf1", "not valid"),
        (b"", "not valid"), (b"[1,\n]", "line 2, column 1"), (b"[1,]", "character 4"),
        (b"{'a': 1}", "not valid"), (b"[1] 2", "not valid"),
        (b'"a\nb"', "not valid"), (b"01", "not valid"), (b"\0", "not valid"), (b"tru", "not valid"),
        (b"[" * 65 + b"]" * 65, "deeper than 64"), (b'{"a":' * 65 + b"1" + b"}" * 65, "deeper"),
        (b"[" * 100_000, "deeper"), (b"]" * 100_000 + b"[" * 100, "not valid"),
    ],
)  # fmt: skip
def test_what_is_no_strict_json_is_refused(text: bytes | str, why: str) -> None:
    with pytest.raises(InputError, match=why) as refused:
        loads(text, "input x")
    assert str(refused.value).startswith("input x") and len(str(refused.value)) < 260


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (b'{"a": [NaN, 1], "b": "NaN"}', {"a": [math.nan, 1], "b": "NaN"}), (b"-Infinity", -math.inf),
        (b"[Infinity]", [math.inf]),
    ],
)  # fmt: skip
def test_numbers_that_json_lacks_are_accepted_on_request(text: bytes, expected: object) -> None:
    assert repr(loads(text, rules=VALUES)) == repr(expected)


@pytest.mark.parametrize(
    "text", [b"[NaN, 1e999]", b'{"a": NaN, "a": 1}', b"[" * 65 + b"NaN" + b"]" * 65, b"nan", b"+Infinity", b"[NaN, ]"]
)
def test_nothing_else_is_accepted_with_them(text: bytes) -> None:
    with pytest.raises(InputError):
        loads(text, rules=VALUES)


@pytest.mark.parametrize("number", ["9223372036854775807", "-9223372036854775808", "18446744073709551615", "1e308"])
def test_the_largest_numbers_that_fit_are_kept(number: str) -> None:
    assert loads(number) == json.loads(number)


def test_sixty_four_levels_are_allowed_and_brackets_in_strings_not_counted() -> None:
    assert loads(b"[" * 64 + b"]" * 64)
    wide = json.dumps([[[i]] for i in range(100)] + ["[" * 99, '\\"[[{'])
    assert loads(wide) == json.loads(wide)


def test_a_string_that_never_ends_takes_no_longer_than_its_length() -> None:
    text = b"[" * 65 + b'"' + b'\\"' * 500_000
    began = time.perf_counter()
    with pytest.raises(InputError):
        loads(text)
    assert time.perf_counter() - began < 5  # from each quote to the end it would be days


@pytest.mark.parametrize(
    "document", [b"[" * 30_000 + b"]" * 30_000, b"[" * 60_000, b'{"a":' * 12_000, b"[" * 30_000 + b"}" * 30_000]
)
def test_deep_nesting_is_refused_in_a_moment(document: bytes) -> None:
    took_s = []
    for _ in range(5):
        started_s = time.thread_time()
        with pytest.raises(InputError, match="nested deeper than 64"):
            loads(document)
        took_s.append(time.thread_time() - started_s)
    assert min(took_s) < 0.008, took_s
