"""Grammars of forced calls permit exactly the answers that the parser reads as calls."""

from __future__ import annotations

import json
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer

from weftline.engine.llm.answer_parser import AnswerParser
from weftline.engine.llm.answer_syntax import MARKED_FORMATS, AnswerSyntax
from weftline.engine.llm.grammar.compiler import _translated, _without_token_ids
from weftline.engine.llm.grammar.constraint import Constraint
from weftline.engine.llm.tool_choice import ToolRequest
from weftline.errors import InputError

BYTES = LLTokenizer("byte")
LOOK = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"], "additionalProperties": False}
TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": 'lo"ok', "parameters": LOOK}},
    {"type": "function", "function": {"name": "stop"}},
]
CALLS = {
    "hermes": '<tool_call>\n{"name": "lo\\"ok", "arguments": {"n": 5}}\n</tool_call>',
    "llama3": '{"name": "lo\\"ok", "parameters": {"n": 5}}',
    "mistral": '[TOOL_CALLS][{"name": "lo\\"ok", "arguments": {"n": 5}}]',
}
TWO = {
    "hermes": CALLS["hermes"] + '\n<tool_call>\n{"name": "stop", "arguments": {}}\n</tool_call>',
    "llama3": CALLS["llama3"] + '; {"name": "stop", "parameters": {}}',
    "mistral": CALLS["mistral"][:-1] + ', {"name": "stop", "arguments": {}}]',
}
NAMED = {"type": "function", "function": {"name": 'lo"ok'}}


def permits(text: str, format: str, thinking: bool = False, answer: Any = None, **inputs: Any) -> bool:
    grammar = ToolRequest.read({"tools": TOOLS, **inputs}).grammar(format, {}, thinking, answer)
    matcher = LLMatcher(BYTES, json.dumps({"grammars": [{"lark_grammar": grammar}]}), log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    tokens = BYTES.tokenize_str(text)
    return bool(matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting())


@pytest.mark.parametrize("format", CALLS)
def test_forced_answers_are_calls(format: str) -> None:
    one, two = CALLS[format], TWO[format]
    assert permits(one, format, tool_choice="required") and permits(one, format, tool_choice=NAMED)
    assert permits(two, format, tool_choice="required") and not permits(two, format, tool_choice=NAMED)
    assert not permits(two, format, tool_choice="required", parallel_tool_calls=False)
    assert not permits("", format, tool_choice="required")
    assert not permits(one.replace("5", '"5"'), format, tool_choice="required")
    assert not permits(one.replace('": 5', '":  5'), format, tool_choice="required")
    for text, count in ((one, 1), (two, 2)):
        parser = AnswerParser(AnswerSyntax(format, ToolRequest.read({"tools": TOOLS}).schemas()))
        assert len(parser.push(text, final=True).calls) == count and parser.parts.content == ""


@pytest.mark.parametrize("format", MARKED_FORMATS)
def test_an_answer_is_calls_or_json_where_both_are_permitted(format: str) -> None:
    answer = LOOK | {"$defs": {"a": {"type": "integer"}}, "properties": {"n": {"$ref": "#/$defs/a"}}}
    for text in (CALLS[format], TWO[format], '{"n": 5}'):
        assert permits(text, format, answer=answer)
    for text in ("", "yes", '{"n": "5"}', CALLS[format] + '{"n": 5}', CALLS[format].replace("5", '"5"')):
        assert not permits(text, format, answer=answer)
    assert not permits(TWO[format], format, answer=answer, parallel_tool_calls=False)


def test_reasoning_comes_before_forced_calls() -> None:
    text = f"Hm.\nI look.\n</think>\n\n{CALLS['hermes']}"
    assert permits(text, "hermes", True, tool_choice="required")
    assert not permits(text, "hermes", False, tool_choice="required")
    assert not permits("Hm.\n</think>\n\nYes.", "hermes", True, tool_choice="required")


def test_marks_are_written_as_their_tokens() -> None:
    request = ToolRequest.read({"tools": TOOLS, "tool_choice": "required"})
    ids = {"<tool_call>": 7, "</tool_call>": 8, "</think>": 9, "[TOOL_CALLS]": 10}
    for format, marks in (("hermes", {"<[7]>", "<[8]>", "<[9]>"}), ("mistral", {"<[9]>", "<[10]>"})):
        grammar = request.grammar(format, ids, thinking=True)
        assert {mark for mark in ("<[7]>", "<[8]>", "<[9]>", "<[10]>") if mark in grammar} == marks
        assert "tool_call>" not in grammar and "TOOL_CALLS" not in grammar


ODD = 'a"b\\\n\t\x01 <[5]> ::= é\u2028\U0001f600 %json {} /x/ # y'


def test_names_and_values_of_any_characters_are_permitted() -> None:
    schema = {
        "$schema": "http://json-schema.org/draft-07/schema#", "title": "Args", "type": "object",
        "properties": {ODD: {"enum": [ODD], "description": f"x {ODD}"}, "on": {"type": "string", "format": "date"}},
        "required": [ODD, "on"], "additionalProperties": False,
    }  # fmt: skip
    tools = [{"type": "function", "function": {"name": ODD, "parameters": schema, "strict": True}}]
    call = {"name": ODD, "arguments": {ODD: ODD, "on": "2026-11-25"}}
    text = f"[TOOL_CALLS][{json.dumps(call, ensure_ascii=False)}]"
    assert permits(text, "mistral", tools=tools, tool_choice="required")
    constraint = Constraint(
        "grammar", ToolRequest.read({"tools": tools, "tool_choice": "required"}).grammar("mistral", {}, False)
    )
    assert _without_token_ids(constraint) == constraint and _translated(constraint)
    parser = AnswerParser(AnswerSyntax("mistral"))
    [found] = parser.push(text, final=True).calls
    assert found["function"]["name"] == ODD and json.loads(found["function"]["arguments"]) == call["arguments"]


def test_large_schemas_are_refused_by_name() -> None:
    schema = {"type": "object", "properties": {"a": {"enum": ["x" * 66_000]}}}
    tools = [{"type": "function", "function": {"name": "f", "parameters": schema}}]
    with pytest.raises(InputError, match="at most 65536 bytes") as refused:
        ToolRequest.read({"tools": tools, "tool_choice": "required"}).grammar("hermes", {}, False)
    assert refused.value.param == "tools"


def test_no_tools_are_offered_with_choice_none() -> None:
    assert ToolRequest.read({"tools": TOOLS, "tool_choice": "none"}).offered == ()
    assert ToolRequest.read({}) == ToolRequest()
    assert ToolRequest.read({"tools": TOOLS}).schemas() == {'lo"ok': LOOK, "stop": {}}
