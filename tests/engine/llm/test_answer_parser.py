"""Answers are split into content, reasoning and calls, wherever their text is cut."""

from __future__ import annotations

import json
import re
import time
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weftline.engine.llm import answer_parser
from weftline.engine.llm.answer_parser import AnswerParser, AnswerParts
from weftline.engine.llm.answer_syntax import CALLS_MAX, AnswerSyntax, find_tool_format

LOOK = '{"name": "look", "arguments": {"at": "the <b> sky", "n": 2}}'
STOP = '{"name": "stop", "arguments": {}}'
LLAMA_LOOK, LLAMA_STOP = LOOK.replace("arguments", "parameters"), STOP.replace("arguments", "parameters")
SCHEMAS: dict[str, Any] = {
    "look": {"properties": {"at": {"type": "string"}, "n": {"type": "integer"}}},
    "stop": {"type": "object"},
}
CALLED = [("look", {"at": "the <b> sky", "n": 2}), ("stop", {})]


def whole(text: str, **syntax: Any) -> AnswerParts:
    parser = AnswerParser(AnswerSyntax(schemas=SCHEMAS, **syntax))
    parser.push(text, final=True)
    return parser.parts


def calls_of(parts: AnswerParts) -> list[tuple[str, Any]]:
    return [(call["function"]["name"], json.loads(call["function"]["arguments"])) for call in parts.calls]


FORCED = {
    "hermes": f"<tool_call>\n{LOOK}\n</tool_call>\n<tool_call>\n{STOP}\n</tool_call>",
    "llama3": f"{LLAMA_LOOK}; {LLAMA_STOP}",
    "mistral": f"[TOOL_CALLS][{LOOK}, {STOP}]",
}


@pytest.mark.parametrize("tools", FORCED)
def test_a_forced_call_that_is_cut_leaves_no_notation(tools: str) -> None:
    text = FORCED[tools]
    for end in range(len(text)):
        found = whole(text[:end], tools=tools, forced=True)
        assert found.content == ""
        for call, (name, arguments) in zip(found.calls, CALLED, strict=False):
            assert call["function"]["name"] == name
            assert json.dumps(arguments).startswith(call["function"]["arguments"])
    begun = whole(text[: text.index("sky")], tools=tools, forced=True)
    assert [call["function"]["arguments"] for call in begun.calls] == ['{"at": "the <b> ']
    assert calls_of(whole(text, tools=tools, forced=True)) == CALLED


SKY = '{"at": "the <b> sky", "n": 2}'
QUOTED = '<tool_call>{"name": "look", "arguments": {"at": "a \\"</tool_call>\\" {\n \\\\"}}</tool_call>'
INFINITE = '{"name": "look", "arguments": {"n": 1e999}}'
NAN = '{"name": "look", "arguments": {"n": NaN}}'
LONE = '{"name": "look", "arguments": {"at": "\\ud800"}}'
TEXTS_AS_ARGUMENTS = '{"name": "look", "arguments": "{}"}'
NUMBER, PLACE = "<parameter=n>\n2\n</parameter>\n", "<parameter=at>\n5\n</parameter>\n"
XML = f"<tool_call>\n<function=look>\n{NUMBER}{PLACE}</function>\n</tool_call>"
XML_CALLED: list[tuple[str, Any]] = [("look", {"n": 2, "at": "5"}), ("stop", {})]
XML_STOP = "<tool_call><function=stop></function></tool_call>"
CASES: list[tuple[dict[str, Any], str, str, str, list[tuple[str, Any]]]] = [
    ({"tools": "hermes"}, f"<tool_call>\n{LOOK}\n</tool_call>", "", "", CALLED[:1]),
    (
        {"tools": "hermes"}, f"I look.\n<tool_call>{LOOK}</tool_call>\n<tool_call>{STOP}</tool_call>\n",
        "I look.", "", CALLED,
    ),
    ({"tools": "hermes"}, f"<tool_call>{LOOK}</tool_call>\nThen I wait. ", "Then I wait.", "", CALLED[:1]),
    ({"tools": "hermes"}, f"Hm. <tool_call>{LOOK}</tool_call>\nYes.", "Hm.\nYes.", "", CALLED[:1]),
    ({"tools": "hermes"}, f"<tool_call>{LOOK}", "", "", CALLED[:1]),
    ({"tools": "hermes"}, f"<tool_call>[{LOOK}, {STOP}]</tool_call>", "", "", CALLED),
    ({"tools": "hermes"}, f"<tool_call><tool_call>{LOOK}</tool_call>", "<tool_call>", "", CALLED[:1]),
    ({"tools": "hermes"}, "a <tool_call>{x}</tool_call> b ", "a <tool_call>{x}</tool_call> b ", "", []),
    ({"tools": "hermes"}, 'a <tool_call>{"name"', 'a <tool_call>{"name"', "", []),
    ({"tools": "hermes"}, f"<tool_call>{LOOK[:-1]}", f"<tool_call>{LOOK[:-1]}", "", []),
    ({"tools": "hermes"}, "1 <tool 2 ", "1 <tool 2 ", "", []),
    ({"tools": "hermes"}, QUOTED, "", "", [("look", {"at": 'a "</tool_call>" {\n \\'})]),
    ({"tools": "hermes"}, f"<tool_call>{NAN}</tool_call>", f"<tool_call>{NAN}</tool_call>", "", []),
    ({"tools": "hermes"}, f"<tool_call>{INFINITE}</tool_call>", f"<tool_call>{INFINITE}</tool_call>", "", []),
    ({"tools": "hermes"}, f"<tool_call>{LONE}</tool_call>", f"<tool_call>{LONE}</tool_call>", "", []),
    ({"tools": "hermes"}, f"<tool_call>{TEXTS_AS_ARGUMENTS}", f"<tool_call>{TEXTS_AS_ARGUMENTS}", "", []),
    ({"tools": "hermes"}, XML, XML, "", []),
    ({"tools": "qwen3_coder"}, XML, "", "", XML_CALLED[:1]),
    ({"tools": "qwen3_coder"}, f"I look.\n{XML}\n{XML_STOP}\n", "I look.", "", XML_CALLED),
    ({"tools": "qwen3_coder"}, XML_STOP.replace("</tool_call>", ""), "", "", CALLED[1:]),
    ({"tools": "qwen3_coder"}, XML.replace("</function>", ""), XML.replace("</function>", ""), "", []),
    ({"tools": "qwen3_coder"}, XML.replace("</parameter>", ""), XML.replace("</parameter>", ""), "", []),
    ({"tools": "qwen3_coder"}, f"<tool_call>{LOOK}</tool_call>", f"<tool_call>{LOOK}</tool_call>", "", []),
    ({"tools": "qwen3_coder"}, "<tool_call>\n<function=", "<tool_call>\n<function=", "", []),
    ({"tools": "qwen3_coder"}, f"<tool_call><function=a b>{XML_STOP}", "<tool_call><function=a b>", "", CALLED[1:]),
    ({"tools": "mistral"}, f"[TOOL_CALLS][{LOOK}, {STOP}]", "", "", CALLED),
    ({"tools": "mistral"}, f"Well. [TOOL_CALLS] [{LOOK}]", "Well.", "", CALLED[:1]),
    ({"tools": "mistral"}, f"[TOOL_CALLS]look[ARGS]{SKY}[TOOL_CALLS]stop[ARGS]{{}}", "", "", CALLED),
    ({"tools": "mistral"}, f"[TOOL_CALLS]look[CALL_ID]a1b2c3d4e[ARGS]{SKY}", "", "", CALLED[:1]),
    ({"tools": "mistral"}, f"[TOOL_CALLS]look{SKY}", "", "", CALLED[:1]),
    ({"tools": "mistral"}, f"[TOOL_CALLS]{LOOK}", "", "", CALLED[:1]),
    ({"tools": "mistral"}, "[TOOL_CALLS]look[ARGS]{", "[TOOL_CALLS]look[ARGS]{", "", []),
    ({"tools": "mistral"}, "[TOOL_CALLS]look at {}", "[TOOL_CALLS]look at {}", "", []),
    ({"tools": "mistral"}, "[TOOL_CALLS]look", "[TOOL_CALLS]look", "", []),
    ({"tools": "mistral"}, "[TOOL_CALLS][]", "[TOOL_CALLS][]", "", []),
    ({"tools": "llama3"}, LLAMA_LOOK, "", "", CALLED[:1]),
    ({"tools": "llama3"}, f"\n{LLAMA_LOOK}; {LLAMA_STOP}", "", "", CALLED),
    ({"tools": "llama3"}, f"{LLAMA_LOOK}\n{LLAMA_STOP};", "", "", CALLED),
    ({"tools": "llama3"}, f"{LLAMA_LOOK}; {LLAMA_STOP[:-1]}", LLAMA_STOP[:-1], "", CALLED[:1]),
    ({"tools": "llama3"}, f"<|python_tag|>{LLAMA_LOOK}", "", "", CALLED[:1]),
    ({"tools": "llama3"}, f"Hm. <|python_tag|>{LLAMA_LOOK}<|python_tag|>{LLAMA_STOP}", "Hm.", "", CALLED),
    ({"tools": "llama3"}, "<|python_tag|>print(1)", "<|python_tag|>print(1)", "", []),
    ({"tools": "llama3"}, '{"name": "unknown", "parameters": {}}', '{"name": "unknown", "parameters": {}}', "", []),
    ({"tools": "llama3"}, '{"a": 1} is JSON', '{"a": 1} is JSON', "", []),
    ({"tools": "llama3"}, f"{{}}\n{LLAMA_LOOK}", f"{{}}\n{LLAMA_LOOK}", "", []),
    ({"tools": "llama3"}, f"See {LLAMA_LOOK}", f"See {LLAMA_LOOK}", "", []),
    ({"tools": "llama3"}, " plain {} text ", " plain {} text ", "", []),
    ({"tools": "llama3"}, "  ", "  ", "", []),
    ({"reasoning": True}, "<think>\nHm.\n\nYes.\n</think>\n\nYes.", "Yes.", "Hm.\n\nYes.", []),
    ({"reasoning": True, "thinking": True}, "Hm.\n</think>\nYes.", "Yes.", "Hm.", []),
    ({"reasoning": True}, "\n<think></think>", "", "", []),
    ({"reasoning": True}, "<think>never ends", "", "never ends", []),
    ({"reasoning": True}, " " * 64 + "<think>a", "", "a", []),
    ({"reasoning": True}, " " * 65 + "<think>a", " " * 65 + "<think>a", "", []),
    ({"reasoning": True}, " <thin", " <thin", "", []),
    ({"reasoning": True}, "Yes. <think>no</think>", "Yes. <think>no</think>", "", []),
    (
        {"reasoning": True, "tools": "hermes"}, f"<think>a <tool_call> b</think>\n\n<tool_call>{LOOK}</tool_call>",
        "", "a <tool_call> b", CALLED[:1],
    ),
    ({"reasoning": True, "tools": "llama3"}, f"<think>a</think>\n{LLAMA_STOP}", "", "a", CALLED[1:]),
    ({}, "<think>a</think><tool_call>", "<think>a</think><tool_call>", "", []),
]  # fmt: skip


@pytest.mark.parametrize(("syntax", "text", "content", "reasoning", "calls"), CASES)
def test_parts_of_an_answer(syntax: Any, text: str, content: str, reasoning: str, calls: Any) -> None:
    found = whole(text, **syntax)
    assert (found.content, found.reasoning, calls_of(found)) == (content, reasoning, calls)
    assert all(len(call["id"]) == 9 and call["type"] == "function" for call in found.calls)
    assert in_pieces([*text], AnswerSyntax(schemas=SCHEMAS, **syntax)) == found


def in_pieces(pieces: list[str], syntax: AnswerSyntax) -> AnswerParts:
    """Return the parts of an answer that comes in pieces; what is streamed adds up to them."""
    parser = AnswerParser(syntax)
    pushed = [*map(parser.push, pieces), parser.push("", final=True)]
    assert parser.parts == AnswerParts(
        "".join(one.content for one in pushed),
        "".join(one.reasoning for one in pushed),
        tuple(call for one in pushed for call in one.calls),
    )
    return parser.parts


TEXTS = st.lists(
    st.sampled_from(
        ["<think>", "</think>", "<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", "<|python_tag|>", LOOK, STOP,
         LLAMA_LOOK, f"[{LOOK}]", "look", "\n", " ", "a", "<", "</", "[", "]", "{", "}", ";", '"', "\\",
         "<function=look>", "<function=", NUMBER, "</function>", ">"]
    ),
    max_size=9,
).map("".join)  # fmt: skip
SYNTAXES = st.builds(
    lambda tools, reasoning, thinking: AnswerSyntax(tools, SCHEMAS, reasoning, reasoning and thinking),
    st.sampled_from(["", "hermes", "llama3", "mistral", "qwen3_coder"]),
    st.booleans(),
    st.booleans(),
)


@settings(max_examples=200)
@given(text=TEXTS, cuts=st.lists(st.integers(0, 200), max_size=12), syntax=SYNTAXES)
def test_cuts_of_the_text_make_no_difference(text: str, cuts: list[int], syntax: AnswerSyntax) -> None:
    once = AnswerParser(syntax)
    once.push(text, final=True)
    places = [0, *sorted(cut for cut in cuts if cut < len(text)), len(text)]
    assert in_pieces([text[a:b] for a, b in pairwise(places)], syntax) == once.parts


@settings(max_examples=200)
@given(text=TEXTS, syntax=SYNTAXES)
def test_parts_equal_those_of_a_reader_of_the_whole_text(text: str, syntax: AnswerSyntax) -> None:
    found = in_pieces([*text], syntax)
    assert (found.content, found.reasoning, calls_of(found)) == read_whole(text, syntax)


def read_whole(text: str, syntax: AnswerSyntax) -> tuple[str, str, list[tuple[str, Any]]]:
    """Return the parts of a whole answer, by regular expressions and recursion."""
    reasoning, inside = "", syntax.thinking
    if syntax.reasoning and not inside and (match := re.match(r"\s*<think>", text)):
        text, inside = text[match.end() :], True
    if inside:
        thought, _, text = text.partition("</think>")
        reasoning = thought.strip()
    found = _pieces(text, syntax, start=True)
    calls = [one for one in found if not isinstance(one, str)]
    content = ""
    for one in found:
        before = content
        content = content + one if isinstance(one, str) else content.rstrip()
        inside = inside or not isinstance(one, str)
        starts = inside and not before.strip()
        content = content.lstrip() if starts else content
    return (content.rstrip() if calls else content), reasoning, calls


def _pieces(text: str, syntax: AnswerSyntax, start: bool) -> list[Any]:
    """Return content and calls in order."""
    patterns = {
        "hermes": r"<tool_call>\s*(?=[{\[])",
        "qwen3_coder": r"<tool_call>(?=\s*<function=[^\s<>=]+>)",
        "mistral": r"\[TOOL_CALLS\](?=[^{]*{|\s*\[)",
        "llama3": r"<\|python_tag\|>\s*(?={)",
    }
    if not syntax.tools:
        return [text]
    match = re.match(r"\s*(?={)", text) if start and syntax.tools == "llama3" else None
    match = match or re.search(patterns[syntax.tools], text)
    if match is None:
        return [text]
    after = match.end()
    if syntax.tools == "qwen3_coder":
        return _xml_pieces(text, match.start(), after, syntax)
    name = re.match(r"\s*([^\s\[\]{}\"]+)\s*(\[ARGS\]\s*)?(?={)|\s*(?=[{\[])", text[after:])
    if syntax.tools == "mistral" and name is None:
        return [text[:after], *_pieces(text[after:], syntax, False)]
    begin = after + (name.end() if name and syntax.tools == "mistral" else 0)
    end = _end_of_value(text, begin)
    before = text[: match.start()]
    calls = _read_calls(text[begin:end], name[1] if name and syntax.tools == "mistral" else None, syntax)
    if not calls:
        return [text[:end], *_pieces(text[end:], syntax, False)]
    rest = text[end:]
    if syntax.tools == "hermes":
        rest = re.sub(r"^\s*</tool_call>", "", rest)
    if syntax.tools == "llama3":
        separator = re.match(r"[; \t\r\n]*", rest)
        assert separator is not None
        following = rest[separator.end() :]
        if following.startswith("{"):
            return [before, *calls, *_pieces(following, syntax, True)]
        rest = separator[0].replace(";", "") + following
    return [before, *calls, *_pieces(rest, syntax, False)]


def _xml_pieces(text: str, start: int, after: int, syntax: AnswerSyntax) -> list[Any]:
    whole = re.compile(r"\s*<function=([^\s<>=]+)>(.*?)</function>", re.DOTALL).match(text, after)
    if whole is None:
        return [text]
    parameter = r"\s*<parameter=n>\n2\n</parameter>"  # the only one in these texts
    rest = text[whole.end() :]
    if re.fullmatch(rf"({parameter})*\s*", whole[2]) is None:
        return [text[: whole.end()], *_pieces(rest, syntax, False)]
    call = (whole[1], {"n": 2} if "<" in whole[2] else {})
    return [text[:start], call, *_pieces(re.sub(r"^\s*</tool_call>", "", rest), syntax, False)]


def _end_of_value(text: str, begin: int) -> int:
    depth, at = 0, begin
    while at < len(text):
        if text[at] == '"':
            string = re.compile(r'"(\\.|[^"\\])*("|\\?$)', re.DOTALL).match(text, at)
            assert string is not None
            at = string.end()
            continue
        depth += {"{": 1, "[": 1, "}": -1, "]": -1}.get(text[at], 0)
        at += 1
        if depth == 0:
            return at
    return len(text)


def _read_calls(text: str, name: str | None, syntax: AnswerSyntax) -> list[tuple[str, Any]]:
    try:
        value = json.loads(text)
    except ValueError:
        return []
    if name is not None:
        return [(name, value)] if isinstance(value, dict) else []
    values = value if isinstance(value, list) else [value]
    if not all(isinstance(one, dict) and "name" in one for one in values):
        return []
    calls = [(one["name"], one.get("arguments", one.get("parameters"))) for one in values]
    return calls if syntax.tools != "llama3" or all(name in SCHEMAS for name, _ in calls) else []


def test_content_streams_before_the_answer_ends() -> None:
    parser = AnswerParser(AnswerSyntax("hermes", SCHEMAS, reasoning=True))
    assert parser.push("<think>Hm").reasoning == "Hm"
    assert parser.push(" yes</think>\n\nI").content == "I"
    assert parser.push(" look").content == " look"
    assert parser.push("\n<tool").content == ""
    assert parser.push(f"_call>{LOOK}").calls != ()
    assert parser.push("</tool_call>").calls == ()


def test_ids_depend_on_the_prompt_and_the_place() -> None:
    def ids(key: bytes, index: int = 0) -> list[str]:
        parser = AnswerParser(AnswerSyntax("mistral", key=key), index)
        parser.push(f"[TOOL_CALLS][{STOP}, {STOP}]", final=True)
        return [call["id"] for call in parser.parts.calls]

    assert ids(b"a") == ids(b"a") and len(set(ids(b"a"))) == 2
    assert not set(ids(b"a")) & (set(ids(b"b")) | set(ids(b"a", 1)))


def test_calls_are_limited() -> None:
    text = f"<tool_call>{STOP}</tool_call>" * (CALLS_MAX + 1)
    assert len(whole(text, tools="hermes").calls) == CALLS_MAX and whole(text, tools="hermes").content == ""
    both = f"<tool_call>{LOOK}</tool_call><tool_call>{STOP}</tool_call>"
    assert calls_of(whole(both, tools="hermes", calls_max=1)) == CALLED[:1]
    deep = '<tool_call>{"name": "look", "arguments": ' + "[" * 100_000 + "]" * 100_000 + "}"
    assert whole(deep, tools="hermes") == AnswerParts(deep)


@pytest.mark.parametrize("size", [100, 1000])
def test_long_values_are_content(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    monkeypatch.setattr(answer_parser, "CALL_CHARS_MAX", len(LOOK))
    long = f"<tool_call>{LOOK[:-1]} }} "
    text = f"{long}{'x' * size}<tool_call>{LOOK}</tool_call>"
    found = whole(text, tools="hermes")
    assert (found.content, calls_of(found)) == (long + "x" * size, CALLED[:1])
    assert in_pieces([*text], AnswerSyntax("hermes")) == found
    for header in (" " * 255, " " * 256):
        parts = whole(f"[TOOL_CALLS]{header}x{{}}", tools="mistral")
        assert len(parts.calls) == (len(header) < 256)


@pytest.mark.slow
def test_time_is_linear_in_the_length_of_the_answer() -> None:
    """Long answers in single letters: each takes about a second if the time per letter is constant."""
    for text in ("a" * 100_000, " " * 100_000, "<tool_call>{" + "[" * 100_000, "<tool_call>" * 10_000, "<" * 100_000):
        started_s = time.process_time()
        syntax = AnswerSyntax("hermes", reasoning=True, thinking=text[0] == "a")
        in_pieces([*text], syntax)
        whole(text, tools="hermes")
        assert time.process_time() - started_s < 5


@pytest.mark.parametrize(
    ("template", "format"),
    [
        ("{{ '<tool_call>' }}", "hermes"),
        ("{{ '[TOOL_CALLS]' }}", "mistral"),
        ("{{ '<|python_tag|>' }}", "llama3"),
        ("{{ '<tool_call><function=' }}", ""),
        ("{{ '<tool_call><function=f><parameter=a>' }}", "qwen3_coder"),
        ("{{ '<tool_call>f<arg_key>' }}", ""),
        ("{{ messages }}", ""),
    ],
)
def test_the_format_is_found_in_the_template(template: str, format: str) -> None:
    assert find_tool_format(template) == format
