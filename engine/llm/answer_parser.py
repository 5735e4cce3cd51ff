"""Split an answer into content, reasoning and tool calls while it is generated. Pure.

`AnswerParser` is a state machine over the text. Its states are methods: each consumes the settled part of the text and
returns True after a change of state, or False if it needs more text.

    opening    the answer may begin with <think>
    reasoning  until </think>
    content    until the mark that opens a call
    header     between the mark and the value
    value      the JSON value of a call, or of a list of calls; or the parameters of a call in XML
    after      separators between calls

Only unsettled text is kept: the beginning of a mark, a header, or the value of a call, each of limited length. The time
is linear in the answer's length, and the parts do not depend on how the text is cut into pieces. A call is complete
when its value closes. A value that is not a call stays content. White space around calls and at both ends of the
reasoning is dropped.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from weftline.engine.llm.answer_syntax import END_HERMES, END_THINK, HERMES, OPENING, THINK, AnswerSyntax
from weftline.engine.llm.detokenizer import overlap
from weftline.engine.llm.xml_call import END_FUNCTION, FUNCTION, read_arguments
from weftline.nodes.strict_json import ANSWERS, parse

CALL_CHARS_MAX = 1 << 18
"""Longest value of a call; a longer one stays content."""

HEADER_CHARS_MAX = 256
"""Longest text between the mark of a call and its value, which may hold the function's name."""

SPACE_CHARS_MAX = 64
"""Most white space before <think>."""

PUSH_CHARS = 1024
"""Longer pieces are cut, so that unsettled text stays short."""

ID_CHARS = 9
"""Length of a call's id: Mistral's templates accept no other."""

_MISTRAL_HEADER = re.compile(r'\s*([^\s\[\]{}"]+)\s*(?:\[CALL_ID\][\w-]*\s*)?(?:\[ARGS\]\s*)?')
_FUNCTION = "<function="
_CUT_CALL = re.compile(r'\{"name": ("(?:[^"\\]|\\.)*"), "(?:arguments|parameters)": (.*)', re.DOTALL)
_STRUCTURE = re.compile(r'[\\"{}\[\]]')


@dataclass(frozen=True, slots=True)
class AnswerParts:
    """Parts of an answer, or of a piece of it. calls: in OpenAI's shape."""

    content: str = ""
    reasoning: str = ""
    calls: tuple[dict[str, Any], ...] = ()


class AnswerParser:
    """Parser of one answer. index: of the answer among those to one prompt."""

    def __init__(self, syntax: AnswerSyntax, index: int = 0) -> None:
        self._syntax = syntax
        self._index = index
        self._mark = OPENING.get(syntax.tools, "")
        self._rest = ""
        self._content, self._reasoning = _PartText(), _PartText(trimmed=True)
        self._calls: list[dict[str, Any]] = []
        self._pushed_calls = 0
        self._xml = syntax.tools == "qwen3_coder"
        self._at_start = syntax.tools == "llama3"  # JSON here is a call without a mark
        self._held: list[str] = []  # mark, header and value of the call
        self._value_text: list[str] = []
        self._value_chars = 0
        self._value_end: _JsonEnd | _XmlEnd = _JsonEnd()
        self._state: Callable[[bool], bool] = self._content_state
        if syntax.reasoning:
            self._state = self._reasoning_state if syntax.thinking else self._opening_state

    @property
    def parts(self) -> AnswerParts:
        """Return the parts so far."""
        content = "" if self._syntax.forced else self._content.whole()
        return AnswerParts(content, self._reasoning.whole(), tuple(self._calls))

    @property
    def has_calls(self) -> bool:
        return bool(self._calls)

    @property
    def in_reasoning(self) -> bool:
        """True while the text that comes next is reasoning."""
        return self._state == self._reasoning_state

    def push(self, text: str, final: bool = False) -> AnswerParts:
        """Add text; return the parts that it completes. final: the answer ends with it."""
        done = 0
        while len(text) - done > PUSH_CHARS:
            self._advance(text[done : done + PUSH_CHARS], False)
            done += PUSH_CHARS
        self._advance(text[done:], final)
        if final and not self._calls:
            self._content.flush_space()
        calls = tuple(self._calls[self._pushed_calls :]) if len(self._calls) > self._pushed_calls else ()
        self._pushed_calls = len(self._calls)
        content = self._content.pop()  # of a forced call it is notation that was cut
        return AnswerParts("" if self._syntax.forced else content, self._reasoning.pop(), calls)

    def _advance(self, text: str, final: bool) -> None:
        self._rest = self._rest + text if self._rest else text
        while self._state(final):
            pass

    def _opening_state(self, final: bool) -> bool:
        start = self._rest.lstrip()
        if len(self._rest) - len(start) <= SPACE_CHARS_MAX:
            if start.startswith(THINK):
                self._rest, self._state = start[len(THINK) :], self._reasoning_state
                return True
            if THINK.startswith(start) and not final:
                return False
        self._state = self._content_state
        return True

    def _reasoning_state(self, final: bool) -> bool:
        if self._pass_until(END_THINK, self._reasoning, final):
            self._state = self._content_state
            self._content.trim_start()
            return True
        return False

    def _content_state(self, final: bool) -> bool:
        if self._at_start and self._begin_unmarked(self._rest.lstrip()):
            return True
        if self._pass_until(self._mark, self._content, final):
            self._held, self._state = [self._mark], self._header_state
            return True
        return False

    def _begin_unmarked(self, start: str) -> bool:
        """Begin a value if JSON comes next, without a mark."""
        self._content.add(self._rest[: len(self._rest) - len(start)])
        self._rest = start
        if start.startswith("{"):
            self._held = []
            self._begin_value("")
            return True
        self._at_start = not start or self._mark.startswith(start)
        return False

    def _header_state(self, final: bool) -> bool:
        at = self._value_start()
        if at == -1 and not final:
            return False
        if at is None or at == -1:
            self._end_as_content()
            return True
        header, self._rest = self._rest[:at], self._rest[at:]
        self._begin_value(header)
        return True

    def _value_start(self) -> int | None:
        """Return the index of the value; -1 where it is not known yet; None if no call begins here."""
        text, mistral = self._rest, self._syntax.tools == "mistral"
        start = text.lstrip()
        if self._xml:
            at = text.find(">") + 1 or -1
            if FUNCTION.fullmatch(text[:at] if at > 0 else f"{start}f>") is None and not _FUNCTION.startswith(start):
                return None
        elif start.startswith("{" if self._syntax.tools == "llama3" else ("{", "[")):
            at = len(text) - len(start)
        elif mistral or not start:
            at = text.find("{")
            if at > 0 and _MISTRAL_HEADER.fullmatch(text[:at]) is None:
                return None
        else:
            return None
        return None if at > HEADER_CHARS_MAX or (at < 0 and len(text) > HEADER_CHARS_MAX) else at

    def _begin_value(self, header: str) -> None:
        self._held.append(header)
        self._value_text, self._value_chars = [], 0
        self._value_end = _XmlEnd() if self._xml else _JsonEnd()
        self._state = self._value_state

    def _value_state(self, final: bool) -> bool:
        text = self._rest[: CALL_CHARS_MAX - self._value_chars]
        end = self._value_end.find(text)
        text = text[:end] if end else text
        self._rest = self._rest[len(text) :]
        self._value_text.append(text)
        self._value_chars += len(text)
        if end and self._add_calls():
            self._content.drop_space()
            self._at_start, self._state = False, self._after_state
            return True
        if end or final or self._value_chars == CALL_CHARS_MAX:
            if self._syntax.forced:
                self._add_cut_calls()
            self._held += self._value_text
            self._end_as_content()
            return True
        return False

    def _after_state(self, final: bool) -> bool:
        llama3 = self._syntax.tools == "llama3"
        start = self._rest.lstrip("; \t\r\n" if llama3 else None)
        self._content.add(self._rest[: len(self._rest) - len(start)].replace(";", ""))
        self._rest = start
        if llama3 and start.startswith("{"):
            self._held = []
            self._begin_value("")
            return True
        if not start and not final:
            return False
        if self._mark == HERMES:
            if start.startswith(END_HERMES):
                self._content.drop_space()
                self._rest = start[len(END_HERMES) :]
            elif END_HERMES.startswith(start) and not final:
                return False
        self._state = self._content_state
        return True

    def _pass_until(self, mark: str, part: _PartText, final: bool) -> bool:
        """Move text to `part` up to `mark`, which is removed; return whether it was found."""
        at = self._rest.find(mark) if mark else -1
        if at >= 0:
            part.add(self._rest[:at])
            self._rest = self._rest[at + len(mark) :]
            return True
        keep = 0 if final or not mark else overlap(self._rest, mark)
        end = len(self._rest) - keep
        part.add(self._rest[:end])
        self._rest = self._rest[end:]
        return False

    def _end_as_content(self) -> None:
        """Add the held text to the content: it is not a call."""
        self._content.add("".join(self._held))
        self._at_start, self._state = False, self._content_state

    def _add_calls(self) -> bool:
        """Add the calls of a complete value; return False if it is not made of calls."""
        try:
            found = [_call_of(one) for one in self._objects("".join(self._value_text))]
        except (ValueError, RecursionError):
            return False
        if not found or (self._syntax.tools == "llama3" and any(name not in self._syntax.schemas for name, _ in found)):
            return False
        for name, arguments in found[: self._syntax.calls_max - len(self._calls)]:
            self._calls.append(self._call(name, arguments))
        return True

    def _add_cut_calls(self) -> None:
        """Add the calls of a value that was cut, the last one with the arguments so far. The grammar fixed its form."""
        text, decoder = "".join(self._value_text).removeprefix("["), json.JSONDecoder()
        with contextlib.suppress(ValueError, RecursionError):
            while text:
                value, end = decoder.raw_decode(text)
                self._calls.append(self._call(*_call_of(value)))
                text = text[end:].lstrip(", ")
        if (cut := _CUT_CALL.match(text)) is not None:
            self._calls.append(self._call(json.loads(cut[1]), cut[2]))
        del self._calls[self._syntax.calls_max :]

    def _objects(self, text: str) -> list[Any]:
        """Return the objects that describe calls; the header may hold the name of a single one."""
        header = self._held[-1]
        if self._xml and (match := FUNCTION.fullmatch(header)) is not None:
            schema = self._syntax.schemas.get(match[1], {})
            return [{"name": match[1], "arguments": read_arguments(text.removesuffix(END_FUNCTION), schema)}]
        value = parse(text, ANSWERS)
        if (match := _MISTRAL_HEADER.fullmatch(header)) is not None:
            return [{"name": match[1], "arguments": value}]
        return value if isinstance(value, list) else [value]

    def _call(self, name: str, arguments: str) -> dict[str, Any]:
        """Return a call in OpenAI's shape. Equal answers to equal prompts have calls with equal ids."""
        place = len(self._calls)
        id = hashlib.sha256(b"%b %d %d" % (self._syntax.key, self._index, place))
        id.update(f"{name} {arguments}".encode())
        function = {"name": name, "arguments": arguments}
        return {"id": id.hexdigest()[:ID_CHARS], "type": "function", "function": function}


class _PartText:
    """Text of one part, added in pieces. White space at the end is held back until text follows.

    trimmed: without white space at the start.
    """

    def __init__(self, trimmed: bool = False) -> None:
        self._pieces: list[str] = []
        self._space: list[str] = []
        self._popped = 0
        self._trimmed = trimmed

    def add(self, text: str) -> None:
        body = text.rstrip()
        if not body:
            if text:
                self._space.append(text)
            return
        joined = "".join([*self._space, body]) if self._space else body
        self._pieces.append(joined.lstrip() if self._trimmed and not self._pieces else joined)
        self._space = [text[len(body) :]] if len(body) < len(text) else []

    def trim_start(self) -> None:
        """Drop white space at the start."""
        self._trimmed = True

    def drop_space(self) -> None:
        """Drop white space at the end, and at the start if there is no text yet."""
        self._space.clear()
        self._trimmed = True

    def flush_space(self) -> None:
        """Add the white space at the end."""
        if self._pieces or not self._trimmed:
            self._pieces += self._space
        self._space.clear()

    def pop(self) -> str:
        """Return the text since the last call."""
        if self._popped == len(self._pieces):
            return ""
        new = "".join(self._pieces[self._popped :])
        self._popped = len(self._pieces)
        return new

    def whole(self) -> str:
        return "".join(self._pieces)


class _JsonEnd:
    """Finder of the end of a JSON object or list in a text that comes in pieces."""

    def __init__(self) -> None:
        self._depth = 0
        self._quoted = False
        self._escaped = False  # the next character follows a backslash

    def find(self, text: str) -> int:
        """Return the index after the closing bracket; 0 if it is not in this piece."""
        skipped = 0 if self._escaped else -1
        for match in _STRUCTURE.finditer(text):
            at, char = match.start(), match[0]
            if at == skipped:
                continue
            if self._quoted:
                if char == "\\":
                    skipped = at + 1
                self._quoted = char != '"'
            elif char == '"':
                self._quoted = True
            elif char != "\\":
                self._depth += 1 if char in "{[" else -1
                if self._depth == 0:
                    return match.end()
        self._escaped = skipped == len(text)
        return 0


class _XmlEnd:
    """Finder of the end of a function in XML, in a text that comes in pieces."""

    def __init__(self) -> None:
        self._before = ""

    def find(self, text: str) -> int:
        """Return the index after the closing mark; 0 if it is not in this piece."""
        joined = self._before + text
        at = joined.find(END_FUNCTION)
        if at >= 0:
            return at + len(END_FUNCTION) - len(self._before)
        self._before = joined[1 - len(END_FUNCTION) :]
        return 0


def _call_of(value: Any) -> tuple[str, str]:
    """Return name and arguments of a call; ValueError if `value` is none."""
    if not isinstance(value, dict) or not isinstance(value.get("name"), str) or not value["name"]:
        raise ValueError("not a call")
    arguments = value.get("arguments", value.get("parameters", {}))
    if not isinstance(arguments, dict):
        raise ValueError("the arguments are not an object")
    text = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
    f"{value['name']}{text}".encode()  # a lone surrogate is a ValueError
    return value["name"], text
