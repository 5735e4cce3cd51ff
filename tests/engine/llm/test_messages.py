"""Conversations as callers send them."""

from __future__ import annotations

import pytest

from weftline.engine.llm.tokens import check_messages, check_tools, mapped
from weftline.errors import InputError


def test_text_parts_become_one_text_and_absent_keys_are_left_out():
    said = [
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "name": None},
        {"role": "assistant", "content": None, "tool_calls": [{"id": "1"}]},
    ]
    assert check_messages(said) == [
        {"role": "user", "content": "ab"},
        {"role": "assistant", "content": "", "tool_calls": [{"id": "1"}]},
    ]


@pytest.mark.parametrize(
    ("text", "arguments"),
    [('{"a": [1]}', {"a": [1]}), ("", {}), (" ", {}), ("[1]", "[1]"), ("{", "{"), ("[" * 9999, "[" * 9999), ({}, {})],
)
def test_arguments_of_calls_become_objects(text, arguments):
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": text}}
    (checked,) = check_messages([{"role": "assistant", "tool_calls": [call]}])
    assert checked["tool_calls"] == [{**call, "function": {"name": "f", "arguments": arguments}}]


@pytest.mark.parametrize(
    ("messages", "found"),
    [
        (None, "NoneType"),
        ([], "a list of 0"),
        ([{"role": "user"}], r"messages\[0\].content"),
        ([{"role": "user", "content": "x"}, {"content": "x"}], r"messages\[1\]"),
        ([{"role": "user", "content": None}], r"content"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], r"content\[0\]"),
        ([{"role": 5, "content": "x"}], "role"),
        ([{"role": "user", "content": "x"}] * 1025, "a list of 1025"),
    ],
)
def test_what_is_no_conversation_is_refused_with_its_place(messages, found):
    with pytest.raises(InputError, match=found):
        check_messages(messages)


@pytest.mark.parametrize("tools", ["x", [5], [{}] * 129])
def test_what_are_no_tools_is_refused(tools):
    with pytest.raises(InputError, match="tools"):
        check_tools(tools)


def test_every_text_is_changed_keys_included():
    value = {"a": ["b", {"c": "d", "e": 5, "f": None, "g": True}]}
    assert mapped(value, str.upper) == {"A": ["B", {"C": "D", "E": 5, "F": None, "G": True}]}


@pytest.mark.parametrize("value", [["x"] * 100_001, {"x": object()}, b"bytes"])
def test_what_is_too_much_or_no_json_is_refused(value):
    with pytest.raises(InputError, match="messages"):
        mapped(value, str.upper)
