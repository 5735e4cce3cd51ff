"""Tools of a request, and the grammar of a forced call, or of a call or JSON. Pure.

The inputs have the values of OpenAI's fields: `tools` is a list of {"type": "function", "function": {"name",
"description", "parameters"}}; `tool_choice` is auto, none, required, or {"type": "function", "function": {"name"}};
`parallel_tool_calls` is true or false.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from weftline.engine.llm.answer_syntax import CALLS_MAX, END_HERMES, END_THINK, HERMES, MISTRAL
from weftline.engine.llm.grammar.constraint import TEXT_BYTES_MAX
from weftline.engine.llm.tokens import check_tools
from weftline.errors import InputError
from weftline.nodes.field_checks import shown

KINDS = ("auto", "none", "required", "function")
NAME_CHARS_MAX = 256
"""Longest name of a function."""
NO_PARAMETERS = {"type": "object", "properties": {}, "additionalProperties": False}

_SPACES = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""White space in a call's JSON is fixed: with a choice, a model could continue with spaces without end."""

_SPECIAL = ("::=", "<[")
"""Characters with a meaning in a grammar, which are escaped in a schema."""


@dataclass(frozen=True, slots=True)
class ToolRequest:
    """Tools of one request, and whether the model must call one.

    offered:  definitions, as the chat template gets them; empty with tool_choice none.
    kind:     one of KINDS.
    name:     of the function for kind function.
    parallel: True to allow several calls in an answer.
    """

    offered: tuple[dict[str, Any], ...] = ()
    kind: str = "auto"
    name: str = ""
    parallel: bool = True

    @property
    def forced(self) -> bool:
        """Return True if the answer must be a call."""
        return self.kind in ("required", "function")

    @property
    def calls_max(self) -> int:
        return CALLS_MAX if self.parallel else 1

    @classmethod
    def read(cls, inputs: Mapping[str, Any]) -> ToolRequest:
        """Parse the inputs tools, tool_choice and parallel_tool_calls; each may be absent."""
        kind, name = _read_choice(inputs.get("tool_choice"))
        parallel = inputs.get("parallel_tool_calls")
        if parallel is not None and not isinstance(parallel, bool):
            message = f"parallel_tool_calls: found {shown(parallel)}, expected true or false"
            raise InputError(message, param="parallel_tool_calls")
        tools = inputs.get("tools")
        offered = () if tools is None or kind == "none" else tuple(check_tools(tools))
        read = cls(offered, kind, name, parallel is not False)
        if read.forced and not offered:
            raise InputError("tool_choice: a call is required, but no tools were sent", param="tool_choice")
        return read

    def schemas(self) -> dict[str, Mapping[str, Any]]:
        """Return the parameters of the functions, by name; tools in another form than OpenAI's are left out."""
        functions = [_function_of(tool) for tool in self.offered]
        named = [(one.get("name"), one.get("parameters")) for one in functions]
        return {
            name: schema if isinstance(schema, Mapping) else {}
            for name, schema in named
            if isinstance(name, str) and name
        }

    def grammar(
        self, format: str, ids: Mapping[str, int], thinking: bool, answer: Mapping[str, Any] | None = None
    ) -> str:
        """Return the Lark grammar of an answer that consists of calls; InputError for an unsuitable tool.

        format:   one of FORCED_FORMATS.
        ids:      tokens of those MARKS that are single tokens.
        thinking: True if the prompt ends within the reasoning, which comes before the calls then.
        answer:   JSON schema of an answer that may come instead of the calls, for MARKED_FORMATS; None: there is none.
        """
        functions = [_read_function(place, tool) for place, tool in enumerate(self.offered)]
        chosen = [one for one in functions if self.kind != "function" or one[0] == self.name]
        if not chosen:
            raise InputError(f"tool_choice: found {self.name!r:.80}, expected a name in tools", param="tool_choice")
        key = "parameters" if format == "llama3" else "arguments"
        rules = [_rules(place, *one, key) for place, one in enumerate(chosen)]
        call = " | ".join(f"call{place}" for place in range(len(chosen)))
        either = "" if answer is None else " | answer"
        think = f"think {_literal(chr(10) * 2)} " if thinking else ""
        start = f"start: {think}({_calls(format, self.parallel, ids)}{either})"
        more = [] if answer is None else [f"answer: {_json(answer, 'the answer')}"]
        more += [_think(ids)] if thinking else []
        grammar = "\n".join([start, *more, f"call: {call}", *rules])
        if len(grammar.encode("utf-8", "replace")) > TEXT_BYTES_MAX:
            expected = f"at most {TEXT_BYTES_MAX} bytes together where answers are constrained"
            raise InputError(f"tools: found larger schemas, expected {expected}", param="tools")
        return grammar


def _read_choice(value: object) -> tuple[str, str]:
    """Return kind and name of a `tool_choice`; None is auto."""
    if value is None or value in ("auto", "none", "required"):
        return str(value or "auto"), ""
    name = None
    if isinstance(value, Mapping) and value.get("type") == "function":
        name = _function_of(value).get("name")
    if not isinstance(name, str) or not name:
        form = '{"type": "function", "function": {"name": ...}}'
        message = f"tool_choice: found {shown(value)}, expected auto, none, required or {form}"
        raise InputError(message, param="tool_choice")
    return "function", name


def _function_of(tool: Mapping[str, Any]) -> Mapping[str, Any]:
    function = tool.get("function", tool)
    return function if isinstance(function, Mapping) else {}


def _read_function(place: int, tool: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """Return the name of a tool, and the JSON schema of its arguments; InputError where a call cannot be forced."""
    function = _function_of(tool)
    name, schema = function.get("name"), function.get("parameters")
    if not isinstance(name, str) or not 0 < len(name) <= NAME_CHARS_MAX:
        raise InputError(f"tools[{place}].function.name: expected 1 to {NAME_CHARS_MAX} characters", param="tools")
    schema = NO_PARAMETERS if schema is None else schema
    if not isinstance(schema, Mapping) or schema.get("type", "object") != "object":
        raise InputError(f"tools[{place}].function.parameters: expected a JSON schema of an object", param="tools")
    return name, {"type": "object", **schema}


def _rules(place: int, name: str, schema: Mapping[str, Any], key: str) -> str:
    begin, between, end = map(_literal, ('{"name": ', f', "{key}": ', "}"))
    call = f"call{place}: {begin} name{place} {between} args{place} {end}"
    const, args = _json({"const": name}, "a name"), _json(schema, f"the parameters of {name!r:.80}")
    return "\n".join([call, f"name{place}: {const}", f"args{place}: {args}"])


def _json(schema: Mapping[str, Any], what: str) -> str:
    """Return the expression of JSON with a schema. what: the schema's place in an error."""
    try:
        text = json.dumps({**schema, "x-guidance": _SPACES}, ensure_ascii=False, allow_nan=False)
    except (ValueError, TypeError, RecursionError):  # NaN, numbers of thousands of digits
        raise InputError(f"tools: {what} cannot be written as JSON", param="tools") from None
    for special in _SPECIAL:  # these can only be parts of strings
        text = text.replace(special, f"\\u{ord(special[0]):04x}{special[1:]}")
    return f"%json {text}"


def _calls(format: str, parallel: bool, ids: Mapping[str, int]) -> str:
    """Return the expression of one call, or of one or more."""
    newline = _literal("\n")
    one = {
        "hermes": f"{_mark(HERMES, ids)} {newline} call {newline} {_mark(END_HERMES, ids)}",
        "llama3": "call",
        "mistral": "call",
    }[format]
    separator = {"hermes": "\n", "llama3": "; ", "mistral": ", "}[format]
    several = f"{one} ({_literal(separator)} {one})*" if parallel else one
    return f"{_mark(MISTRAL, ids)} {_literal('[')} {several} {_literal(']')}" if format == "mistral" else several


def _think(ids: Mapping[str, int]) -> str:
    """Return the rule of the reasoning, whose end mark is part of it."""
    if END_THINK in ids:
        return f"think: thought {_mark(END_THINK, ids)}\nthought: /(.|\\n)*/"
    end = END_THINK.replace("/", "\\/")
    return f"think[lazy]: /(.|\\n)*{end}/"


def _mark(mark: str, ids: Mapping[str, int]) -> str:
    """Return a reference to the token of a mark, since a control token cannot be spelled; its text if it has none."""
    return f"<[{ids[mark]}]>" if mark in ids else _literal(mark)


def _literal(text: str) -> str:
    return json.dumps(text)
