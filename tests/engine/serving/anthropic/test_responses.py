"""Messages and events of a stream, as values."""

from __future__ import annotations

import json
import time
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings
from jiter import from_json

from weftline.engine.serving.anthropic.responses import read_arguments

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-99, 9999) | st.text('ab"\\{}[],: é', max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text('ab"\\,', max_size=3), inner, max_size=3),
    max_leaves=8,
)


def call(arguments: Any) -> dict[str, Any]:
    return {"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}


@settings(max_examples=200, deadline=None)
@given(st.dictionaries(st.text("abc", max_size=3), VALUES, max_size=4), st.data())
def test_arguments_that_were_cut_keep_their_whole_members(value: dict[str, Any], data: st.DataObject) -> None:
    text = json.dumps(value, ensure_ascii=False)
    assert read_arguments(call(text)) == (text, value)
    kept, read = read_arguments(call(text[: data.draw(st.integers(1, len(text)))]))
    assert text.startswith(kept)
    assert from_json(kept.encode(), partial_mode=True) == read, "as the stock client reads a stream"


def test_arguments_of_many_brackets_are_read_in_one_pass() -> None:
    text = '{"a": ' + "[" * 20_000
    began = time.process_time()
    assert read_arguments(call(text))[1] == {"arguments": text}
    assert time.process_time() - began < 0.3


@pytest.mark.parametrize(
    ("arguments", "read"),
    [
        ("", {}),
        (None, {}),
        ({"a": 1}, {"a": 1}),
        ("[1, 2]", {"arguments": "[1, 2]"}),
        ("{'a': 1}", {"arguments": "{'a': 1}"}),
        ('{"a": 1} and more', {"arguments": '{"a": 1} and more'}),
        ('{"a": NaN}', {"arguments": '{"a": NaN}'}),
        ("7", {"arguments": "7"}),
    ],
)
def test_arguments_are_always_an_object(arguments: Any, read: dict[str, Any]) -> None:
    text, found = read_arguments(call(arguments))
    assert found == read == json.loads(text)
    assert read_arguments("no call") == ("{}", {})
