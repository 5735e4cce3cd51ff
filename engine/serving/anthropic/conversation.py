"""Conversion of Anthropic's messages to those of a chat request. Pure.

    system                                 -> a message of role system
    text, image                            -> text and image_url parts
    tool_use of an assistant               -> tool_calls
    thinking of an assistant               -> reasoning_content
    tool_result of a user                  -> a message of role tool before the user's other blocks, to which its
                                              pictures move

Consecutive messages of a user, and of an assistant, become one, as at Anthropic. `chat_inputs` of
`openai/messages.py` reads the result; `Turn` has the places of the request, for its errors.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from weftline.engine.serving.anthropic.blocks import BLOCKS, OPTIONS
from weftline.engine.serving.http.errors import HttpError
from weftline.engine.serving.openai.messages import MESSAGES_MAX, PLACE

BETWEEN_MESSAGES = "\n\n"
"""Text between the texts of consecutive messages of one role."""
ERROR_PREFIX = "Error: "
"""Text before a result with `is_error`: chat templates have no other form for it."""
PICTURE_TYPES = ("image/jpeg", "image/png", "image/gif", "image/webp")

_OF_USERS = ("text", "image", "tool_result")
_OF_ASSISTANTS = ("text", "thinking", "redacted_thinking", "tool_use")
_OF_RESULTS = ("text", "image")
_TEXTS = ("text",)

Block = tuple[str, dict[str, Any]]
"""A content block and its place."""


@dataclass(frozen=True, slots=True)
class Turn:
    """A message of a chat request. where: its place in Anthropic's form; parts: the places of its content's parts."""

    message: dict[str, Any]
    where: str
    parts: tuple[str, ...] = ()


def turns_of(messages: object, system: object = None) -> list[Turn]:
    """Return the messages of a chat request; HttpError names the wrong block."""
    if not isinstance(messages, list) or not 0 < len(messages) <= MESSAGES_MAX:
        raise HttpError(f"messages: expected a list of 1 to {MESSAGES_MAX} messages", param="messages")
    turns = [_turn("system", "system", _blocks("system", system, _TEXTS))] if system else []
    for place, message in enumerate(messages):
        turns += _turns(f"messages[{place}]", message)
    return _joined(turns)


def in_request(text: str, turns: Sequence[Turn]) -> str:
    """Return an error message with places of the chat request changed to those of Anthropic's form."""

    def place(found: re.Match[str]) -> str:
        if int(found[1]) >= len(turns):
            return found[0]
        turn = turns[int(found[1])]
        part = int(found[3]) if found[3] else len(turn.parts)
        return turn.parts[part] if part < len(turn.parts) else turn.where

    return PLACE.sub(place, text).replace(".image_url.url", ".source")


def _turns(where: str, message: object) -> list[Turn]:
    role = message.get("role") if isinstance(message, dict) else None
    if not isinstance(message, dict) or role not in ("user", "assistant", "system"):
        raise HttpError(f"{where}: expected an object with a role of user, assistant or system", param="messages")
    OPTIONS["messages"].check(where, message)
    at, content = f"{where}.content", message.get("content")
    if role == "user":
        return _user(where, _blocks(at, content, _OF_USERS))
    if role == "assistant":
        return [_assistant(where, _blocks(at, content, _OF_ASSISTANTS))]
    return [_turn(role, where, _blocks(at, content, _TEXTS))]


def _blocks(where: str, content: object, kinds: Sequence[str]) -> list[Block]:
    """Return the blocks of a content, which may be one text; HttpError for one of another type than `kinds`."""
    if isinstance(content, str):
        return [(where, {"type": "text", "text": content})]
    if not isinstance(content, list):
        raise HttpError(f"{where}: expected a text, or a list of blocks", param=where.partition("[")[0])
    return [(f"{where}[{place}]", _block(f"{where}[{place}]", one, kinds)) for place, one in enumerate(content)]


def _block(where: str, block: object, kinds: Sequence[str]) -> dict[str, Any]:
    param, expected = where.partition("[")[0], ", ".join(kinds)
    kind = block.get("type") if isinstance(block, dict) else None
    if not isinstance(block, dict) or not isinstance(kind, str):
        raise HttpError(f"{where}: expected a block of type {expected}", param=param)
    if kind not in kinds:
        why = " has no place here" if kind in BLOCKS else " is not supported by this server"
        raise HttpError(f"{where}.type: {kind!r:.60}{why}; expected {expected}", param=param)
    BLOCKS[kind].check(where, block)
    if kind in ("text", "thinking") and not isinstance(block.get(kind), str):
        raise HttpError(f"{where}.{kind}: expected a text", param=param)
    return block


def _turn(role: str, where: str, blocks: Sequence[Block]) -> Turn:
    """Return a message with parts for texts and pictures."""
    parts = [_part(at, block) for at, block in blocks]
    return Turn({"role": role, "content": parts}, where, tuple(at for at, _ in blocks))


def _part(where: str, block: Mapping[str, Any]) -> dict[str, Any]:
    if block["type"] == "text":
        return {"type": "text", "text": block["text"]}
    return {"type": "image_url", "image_url": {"url": _picture_url(f"{where}.source", block.get("source"))}}


def _picture_url(where: str, source: object) -> str:
    """Return a picture as a `data:` URL."""
    kind = source.get("type") if isinstance(source, dict) else None
    if isinstance(source, dict) and kind == "base64":
        media, data = source.get("media_type"), source.get("data")
        if media not in PICTURE_TYPES or not isinstance(data, str):
            types = ", ".join(PICTURE_TYPES)
            raise HttpError(f"{where}: expected data in base64, and a media_type of {types}", param="messages")
        return f"data:{media};base64,{data}"
    url = source.get("url") if isinstance(source, dict) and kind == "url" else None
    if isinstance(url, str) and url[:5].lower() == "data:":
        return url
    if isinstance(url, str):
        fix = "this server fetches no URLs; expected a source of type base64, with the picture itself"
        raise HttpError(f"{where}.url: {fix}", param="messages")
    if kind == "file":
        raise HttpError(f"{where}.type: this server keeps no files; send a source of type base64", param="messages")
    raise HttpError(f"{where}: expected an object of type base64 with media_type and data", param="messages")


def _user(where: str, blocks: Sequence[Block]) -> list[Turn]:
    results: list[Turn] = []
    pictures: list[Block] = []
    for at, block in blocks:
        if block["type"] == "tool_result":
            result, found = _result(at, block)
            results.append(result)
            pictures += found
    rest = [*pictures, *(one for one in blocks if one[1]["type"] != "tool_result")]
    return [*results, _turn("user", where, rest)] if rest or not results else results


def _result(where: str, block: Mapping[str, Any]) -> tuple[Turn, list[Block]]:
    """Return the result of a tool, and the pictures in it."""
    call, failed = block.get("tool_use_id"), block.get("is_error")
    if not isinstance(call, str) or not call:
        raise HttpError(f"{where}.tool_use_id: expected a text, the id of a tool_use", param="messages")
    if failed is not None and not isinstance(failed, bool):
        raise HttpError(f"{where}.is_error: expected true or false", param="messages")
    content = block.get("content")
    blocks = [] if content is None else _blocks(f"{where}.content", content, _OF_RESULTS)
    text = "".join(one["text"] for _, one in blocks if one["type"] == "text")
    message = {"role": "tool", "tool_call_id": call, "content": ERROR_PREFIX + text if failed else text}
    return Turn(message, where), [one for one in blocks if one[1]["type"] == "image"]


def _assistant(where: str, blocks: Sequence[Block]) -> Turn:
    turn = _turn("assistant", where, [one for one in blocks if one[1]["type"] == "text"])
    thoughts = [block["thinking"] for _, block in blocks if block["type"] == "thinking"]
    calls = [_call(at, block) for at, block in blocks if block["type"] == "tool_use"]
    if any(thoughts):
        turn.message["reasoning_content"] = "".join(thoughts)
    if calls:
        turn.message["tool_calls"] = calls
    return turn


def _call(where: str, block: Mapping[str, Any]) -> dict[str, Any]:
    for key in ("id", "name"):
        if not isinstance(block.get(key), str) or not block[key]:
            raise HttpError(f"{where}.{key}: expected a text", param="messages")
    arguments = block.get("input")
    if not isinstance(arguments, dict):
        raise HttpError(f"{where}.input: expected an object", param="messages")
    return {"id": block["id"], "type": "function", "function": {"name": block["name"], "arguments": arguments}}


def _joined(turns: Sequence[Turn]) -> list[Turn]:
    """Return turns in which consecutive messages of a user, or of an assistant, are one."""
    joined: list[Turn] = []
    for role, group in groupby(turns, key=lambda turn: turn.message["role"]):
        same = list(group)
        joined += [_merged(same)] if len(same) > 1 and role in ("user", "assistant") else same
    return joined


def _merged(turns: Sequence[Turn]) -> Turn:
    """Return messages of one role as one. Each text is copied once: there may be many messages after a long one."""
    content: list[dict[str, Any]] = []
    parts: list[str] = []
    for turn in turns:
        more = turn.message["content"]
        if content and more and content[-1]["type"] == more[0]["type"] == "text":
            content.append({"type": "text", "text": BETWEEN_MESSAGES})
            parts.append(turns[0].where)
        content += more
        parts += turn.parts
    message = turns[0].message | {"content": content}
    if calls := [call for turn in turns for call in turn.message.get("tool_calls", ())]:
        message["tool_calls"] = calls
    if thoughts := "".join(turn.message.get("reasoning_content", "") for turn in turns):
        message["reasoning_content"] = thoughts
    return Turn(message, turns[0].where, tuple(parts))
