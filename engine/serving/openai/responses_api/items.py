"""Items of the Responses API: input items of a request, and their conversion to chat messages. Pure.

`read_items` checks the input of a request and returns items in one form, as `GET /v1/responses/{id}/input_items` lists
them. `messages_of` converts such items, and output items of earlier responses, to messages of a chat. Reasoning, text
and function calls of one answer are one assistant message, as in a chat.
"""

from __future__ import annotations

import base64
import binascii
import json
import re
import secrets
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

from weftline.engine.serving.http.errors import HttpError, unsupported
from weftline.engine.serving.openai.messages import MESSAGES_MAX, PLACE, check_data_url

PARAM = "input"
ITEM_TYPES = ("message", "function_call", "function_call_output", "reasoning", "item_reference")
ROLES = ("user", "system", "developer", "assistant")
ITEMS_MAX = 4 * MESSAGES_MAX
ID_CHARS_MAX = 256

ENCODED = "weftline:"
"""Begin of `encrypted_content` of a reasoning item: base64 of its text follows, which is no secret of the server."""

_TEXTS = ("input_text", "output_text", "text")
_PREFIXES = {"message": "msg", "function_call": "fc", "function_call_output": "fco", "reasoning": "rs"}


def new_id(prefix: str) -> str:
    """Return a new id of an item or response."""
    return f"{prefix}_{secrets.token_hex(24)}"


def references_in(value: object) -> list[str]:
    """Return the ids that `input` refers to."""
    items = value if isinstance(value, list) else []
    found = [one.get("id") for one in items if isinstance(one, dict) and _type_of(one) == "item_reference"]
    return [id for id in found if isinstance(id, str)]


def read_items(value: object, known: Mapping[str, Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the items of `input`; HttpError names the invalid item. known: those of `references_in`, by id."""
    if isinstance(value, str):
        value = [{"role": "user", "content": value}]
    if not isinstance(value, list) or len(value) > ITEMS_MAX:
        raise HttpError(f"input: expected a text, or a list of at most {ITEMS_MAX} items", param=PARAM)
    referenced: set[str] = set()
    return [_read_item(f"input[{place}]", one, known, referenced) for place, one in enumerate(value)]


def _read_item(
    where: str, item: object, known: Mapping[str, Mapping[str, Any]], referenced: set[str]
) -> dict[str, Any]:
    if not isinstance(item, dict):
        raise _wrong(where, "an item, such as {role, content}")
    kind = _type_of(item)
    if kind not in ITEM_TYPES:
        found = f"found {kind!r:.60}" if isinstance(kind, str) else "found none"
        raise unsupported(PARAM, f"{where}.type: {found}, supported are {', '.join(ITEM_TYPES)}")
    if kind == "item_reference":
        return _referenced(where, item.get("id"), known, referenced)
    read = _READERS[kind](where, item)
    id = item.get("id")
    if id is not None and not (isinstance(id, str) and id.isascii() and 0 < len(id) <= ID_CHARS_MAX):
        raise _wrong(f"{where}.id", f"a text of 1 to {ID_CHARS_MAX} ASCII characters")
    return {"id": id or new_id(_PREFIXES[kind]), "type": kind, **read}


def _type_of(item: Mapping[str, Any]) -> object:
    """Return the type of an item; messages and references may leave it out."""
    if item.get("type") is not None:
        return item["type"]
    return "message" if "role" in item else "item_reference" if isinstance(item.get("id"), str) else None


def _referenced(where: str, id: object, known: Mapping[str, Mapping[str, Any]], referenced: set[str]) -> dict[str, Any]:
    """Return the item of an id. referenced: ids so far: a large item that is repeated would become a huge request."""
    found = known.get(id) if isinstance(id, str) else None
    if not isinstance(id, str) or found is None:
        message = f"{where}: Item with id {id!r:.80} not found; send the item itself, or keep its response with store"
        raise HttpError(message, code=404, param=PARAM)
    if id in referenced:
        twice = f"{where}: found item {id!r:.80} a second time, expected each item once; leave it out"
        raise HttpError(twice, param=PARAM)
    referenced.add(id)
    return dict(found)


def _read_message(where: str, item: Mapping[str, Any]) -> dict[str, Any]:
    role = item.get("role")
    if role not in ROLES:
        raise _wrong(f"{where}.role", f"one of {', '.join(ROLES)}")
    content = item.get("content")
    if isinstance(content, str):
        content = [{"type": "input_text", "text": content}]
    if not isinstance(content, list):
        raise _wrong(f"{where}.content", "a text, or a list of parts")
    read = _read_answer_part if role == "assistant" else _read_part
    parts = [read(f"{where}.content[{place}]", part) for place, part in enumerate(content)]
    return {"role": role, "content": parts, "status": "completed"}


def _read_part(where: str, part: object) -> dict[str, Any]:
    """Return a part of a message of the caller, or of the result of a function."""
    kind = part.get("type") if isinstance(part, dict) else None
    if not isinstance(part, dict) or not isinstance(kind, str):
        raise _wrong(where, "a part of type input_text, input_image or input_audio")
    if kind in _TEXTS:
        return {"type": "input_text", "text": _text(f"{where}.text", part.get("text"))}
    if kind == "input_image":
        if part.get("file_id") is not None:
            raise unsupported(PARAM, f"{where}.file_id: this server keeps no files; send image_url with a data: URL")
        check_data_url(part.get("image_url"), f"{where}.image_url", PARAM)
        return {"type": kind, "image_url": part["image_url"], "detail": part.get("detail") or "auto"}
    if kind == "input_audio":
        return {"type": kind, "input_audio": part.get("input_audio")}
    raise unsupported(PARAM, f"{where}.type: found {kind!r:.60}, supported are input_text, input_image and input_audio")


def _read_answer_part(where: str, part: object) -> dict[str, Any]:
    """Return a part of an earlier answer."""
    kind = part.get("type") if isinstance(part, dict) else None
    if isinstance(part, dict) and kind == "refusal":
        return {"type": "refusal", "refusal": _text(f"{where}.refusal", part.get("refusal"))}
    if not isinstance(part, dict) or kind not in _TEXTS:
        raise _wrong(where, "a part of type output_text or refusal")
    return {"type": "output_text", "text": _text(f"{where}.text", part.get("text")), "annotations": []}


def _read_call(where: str, item: Mapping[str, Any]) -> dict[str, Any]:
    texts = {key: _text(f"{where}.{key}", item.get(key)) for key in ("call_id", "name", "arguments")}
    return {**texts, "status": "completed"}


def _read_result(where: str, item: Mapping[str, Any]) -> dict[str, Any]:
    output = item.get("output")
    if not isinstance(output, str | list):
        raise _wrong(f"{where}.output", "a text, or a list of parts")
    if isinstance(output, list):
        output = [_read_part(f"{where}.output[{place}]", part) for place, part in enumerate(output)]
    call_id = _text(f"{where}.call_id", item.get("call_id"))
    return {"call_id": call_id, "output": output, "status": "completed"}


def _read_reasoning(where: str, item: Mapping[str, Any]) -> dict[str, Any]:
    parts = {key: item.get(key) or [] for key in ("summary", "content")}
    for key, kind in (("summary", "summary_text"), ("content", "reasoning_text")):
        if not isinstance(parts[key], list):
            raise _wrong(f"{where}.{key}", "a list of parts")
        for place, part in enumerate(parts[key]):
            at = f"{where}.{key}[{place}]"
            if not isinstance(part, dict) or part.get("type") != kind:
                raise _wrong(at, f"a part of type {kind}")
            _text(f"{at}.text", part.get("text"))
    encoded = item.get("encrypted_content")
    if encoded is not None and not parts["content"]:
        parts["content"] = [{"type": "reasoning_text", "text": decoded_reasoning(encoded, where)}]
    return parts


_READERS = {
    "message": _read_message,
    "function_call": _read_call,
    "function_call_output": _read_result,
    "reasoning": _read_reasoning,
}


def encoded_reasoning(text: str) -> str:
    """Return a reasoning text as `encrypted_content`, for clients that send back only that."""
    return ENCODED + base64.b64encode(text.encode("utf-8", "replace")).decode()


def decoded_reasoning(encoded: object, where: str) -> str:
    """Return the text in `encrypted_content`; HttpError for that of another server."""
    try:
        if isinstance(encoded, str) and encoded.startswith(ENCODED):
            return base64.b64decode(encoded.removeprefix(ENCODED), validate=True).decode()
    except (binascii.Error, ValueError):
        pass
    raise unsupported(PARAM, f"{where}.encrypted_content: not written by this server; leave the item out")


def _text(where: str, value: object) -> str:
    if not isinstance(value, str):
        raise _wrong(where, "a text")
    return value


def _wrong(where: str, expected: str) -> HttpError:
    return HttpError(f"{where}: expected {expected}", param=PARAM)


class _OutputPart(msgspec.Struct):
    """A part of an output item, without log-probabilities, which are not read."""

    type: str
    text: str
    annotations: list[Any] | msgspec.UnsetType = msgspec.UNSET


class _OutputItem(msgspec.Struct):
    """An output item of any type."""

    id: str
    type: str
    status: str
    role: str | msgspec.UnsetType = msgspec.UNSET
    content: list[_OutputPart] | msgspec.UnsetType = msgspec.UNSET
    summary: list[Any] | msgspec.UnsetType = msgspec.UNSET
    call_id: str | msgspec.UnsetType = msgspec.UNSET
    name: str | msgspec.UnsetType = msgspec.UNSET
    arguments: str | msgspec.UnsetType = msgspec.UNSET


class _Output(msgspec.Struct):
    """A response, of which only the output is read."""

    output: list[_OutputItem]


_decode_output = msgspec.json.Decoder(_Output).decode


def output_items(response: bytes) -> list[dict[str, Any]]:
    """Return the output items of a response of this server, without log-probabilities."""
    items: list[dict[str, Any]] = msgspec.to_builtins(_decode_output(response).output)
    return items


def messages_of(items: Iterable[Mapping[str, Any]], wheres: Iterable[str]) -> tuple[list[dict[str, Any]], list[str]]:
    """Return items, as `read_items` returns them, as messages of a chat, and the place of the content of each message.

    wheres: the place of each item in the request.
    """
    messages: list[dict[str, Any]] = []
    places: list[str] = []
    for item, where in zip(items, wheres, strict=True):
        kind = item["type"]
        if kind == "reasoning":
            _add_reasoning(messages, item)
        elif kind == "function_call":
            _add_call(messages, item)
        elif kind == "function_call_output":
            content = _content_of(item["output"])
            messages.append({"role": "tool", "tool_call_id": item["call_id"], "content": content})
        elif item["role"] == "assistant":
            _add_answer(messages, item)
        else:
            messages.append({"role": item["role"], "content": _content_of(item["content"])})
        content_key = "output" if kind == "function_call_output" else "content"
        places += [f"{where}.{content_key}"] * (len(messages) - len(places))
    return messages, places


def in_input(text: str, places: Sequence[str]) -> str:
    """Return an error message with places of the chat request changed to those of `input`. places: as `messages_of`."""

    def place(found: re.Match[str]) -> str:
        if int(found[1]) >= len(places):
            return found[0]
        item, _, key = places[int(found[1])].partition(".")
        part = f"[{found[3]}]" if found[3] else ""
        return f"{item}.{key}{part}" if key and found[2] else item

    return PLACE.sub(place, text).replace(".image_url.url", ".image_url")


def _turn(messages: list[dict[str, Any]], *without: str) -> dict[str, Any]:
    """Return the assistant message that the items of an answer are added to, which has none of the keys `without`."""
    last = messages[-1] if messages else {}
    if last.get("role") != "assistant" or any(last.get(key) for key in without):
        messages.append({"role": "assistant", "content": None})
    return messages[-1]


def _add_reasoning(messages: list[dict[str, Any]], item: Mapping[str, Any]) -> None:
    texts = [part["text"] for part in item.get("content") or item.get("summary") or ()]
    if texts:
        _turn(messages, "reasoning_content", "content", "tool_calls")["reasoning_content"] = "\n".join(texts)


def _add_answer(messages: list[dict[str, Any]], item: Mapping[str, Any]) -> None:
    texts = [part.get("text") or part.get("refusal") or "" for part in item["content"]]
    _turn(messages, "content", "tool_calls")["content"] = "".join(texts)


def _add_call(messages: list[dict[str, Any]], item: Mapping[str, Any]) -> None:
    function = {"name": item["name"], "arguments": item["arguments"]}
    call = {"id": item["call_id"], "type": "function", "function": function}
    _turn(messages).setdefault("tool_calls", []).append(call)


def _content_of(content: str | list[dict[str, Any]]) -> str | list[dict[str, Any]]:
    """Return parts as those of a chat message; one text where there are only texts."""
    if isinstance(content, str):
        return content
    if all(part["type"] == "input_text" for part in content):
        return "".join(part["text"] for part in content)
    return [_part_of(part) for part in content]


def _part_of(part: Mapping[str, Any]) -> dict[str, Any]:
    if part["type"] == "input_text":
        return {"type": "text", "text": part["text"]}
    if part["type"] == "input_image":
        return {"type": "image_url", "image_url": {"url": part["image_url"]}}
    return {"type": "input_audio", "input_audio": part["input_audio"]}


def arguments_of(value: object) -> str:
    """Return the arguments of a call as text."""
    return value if isinstance(value, str) else json.dumps({} if value is None else value)
