"""Tool calls and roles of a conversation, in the form that a chat template renders. Pure.

Clients send one form, OpenAI's. Some templates raise on it, or leave parts out: Llama 3's renders one call for each
message, Mistral's wants ids of nine letters or digits, and most have no role `developer`.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping
from typing import Any

from weftline.engine.llm.answer_parser import ID_CHARS

_SINGLE_CALLS = re.compile(r"single tool-calls|tool_calls\s*\|\s*length\s*(==|!=|>)\s*1\b")
"""Of templates that raise on several calls of one message."""
_SHORT_IDS = re.compile(r"length\s*!=\s*9\b")

Turn = dict[str, Any]


def fitted(turns: list[Turn], template: str) -> list[Turn]:
    """Return a conversation as the text of `template` renders it. Calls are objects with `function` and `id`."""
    if "developer" not in template:
        turns = [one | {"role": "system"} if one["role"] == "developer" else one for one in turns]
    if _SINGLE_CALLS.search(template):
        turns = list(_with_single_calls(turns))
    return [_with_short_ids(one) for one in turns] if _SHORT_IDS.search(template) else turns


def _with_single_calls(turns: list[Turn]) -> Iterator[Turn]:
    """Yield a message for each call, followed by its result."""
    rest = list(turns)
    while rest:
        turn = rest.pop(0)
        calls = _calls_of(turn)
        if len(calls) < 2:
            yield turn
            continue
        count = next((at for at, one in enumerate(rest) if one["role"] != "tool"), len(rest))
        results, rest = rest[:count], rest[count:]
        for place, call in enumerate(calls):
            yield {**turn, "content": turn["content"] if place == 0 else "", "tool_calls": [call]}
            own = [one for one in results if one.get("tool_call_id") == call.get("id")] or results[:1]
            results = [one for one in results if not any(one is result for result in own)]
            yield from own
        yield from results


def _with_short_ids(turn: Turn) -> Turn:
    calls = [call | {"id": _short(call.get("id"))} for call in _calls_of(turn)]
    found: Turn = {"tool_calls": calls} if calls else {}
    if turn.get("tool_call_id") is not None:
        found["tool_call_id"] = _short(turn["tool_call_id"])
    return turn | found


def _short(id: object) -> str:
    """Return an id of nine letters or digits, the same for equal ids."""
    text = str(id or "")
    if len(text) == ID_CHARS and text.isascii() and text.isalnum():
        return text
    return hashlib.sha256(text.encode("utf-8", "replace")).hexdigest()[:ID_CHARS]


def _calls_of(turn: Turn) -> list[Turn]:
    calls = turn.get("tool_calls")
    return [dict(one) for one in calls if isinstance(one, Mapping)] if isinstance(calls, list) else []
