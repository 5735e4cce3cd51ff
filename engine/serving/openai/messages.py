"""Conversion of OpenAI messages to model inputs.

A model with an input `messages` gets the whole conversation, texts only: system, developer, user, assistant and tool
messages, with the tool calls that were made. One with a text input gets the text of the last user message. Pictures and
recordings go to inputs of their own: those of the last message that has any, since earlier ones were answered. Where a
model with `messages` has no input for pictures, they stay in the conversation, for a vision-language model.
"""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from weftline.engine.serving.http.errors import HttpError
from weftline.engine.serving.model_info import PortInfo
from weftline.engine.serving.openai.bodies import ROLES, ChatBody
from weftline.engine.serving.openai.ports import ChatPorts
from weftline.engine.serving.openai.tools import tool_inputs
from weftline.nodes.image import IMAGES_MAX, MESSAGE_IMAGE_BYTES_MAX

AUDIO_FORMATS = ("wav", "mp3", "flac", "ogg")

KEPT = ("role", "content", "name", "tool_calls", "tool_call_id", "reasoning_content")
"""Keys of a message that are passed to the model; other keys of answers (refusal, annotations) are dropped."""
MESSAGES_MAX = 1024

PLACE = re.compile(r"messages\[(\d{1,6})\](\.content(?:\[(\d{1,6})\])?)?")
"""Place in an error: number of a message, its content, number of a part. Other protocols change it to their own."""


@dataclass(frozen=True, slots=True)
class Conversation:
    """messages: with plain texts, or with parts where pictures stay. images, audio: encoded, of the last with any."""

    messages: tuple[dict[str, Any], ...]
    images: tuple[bytes, ...]
    audio: tuple[bytes, ...]

    @property
    def question(self) -> str | None:
        """The last user message's text; None without one."""
        users = [one["content"] for one in self.messages if one["role"] == "user"]
        return users[-1] if users else None


def read_conversation(messages: object, pictures_stay: bool = False) -> Conversation:
    """Read `messages`; HttpError names the invalid message. pictures_stay: they stay in the messages."""
    if not isinstance(messages, list) or not 0 < len(messages) <= MESSAGES_MAX:
        raise HttpError(f"messages: expected a list of 1 to {MESSAGES_MAX} messages", param="messages")
    read: list[dict[str, Any]] = []
    images: tuple[bytes, ...] = ()
    audio: tuple[bytes, ...] = ()
    for place, message in enumerate(messages):
        where = f"messages[{place}]"
        one, pictures, recordings = _read_message(where, message, pictures_stay)
        read.append(one)
        images, audio = pictures or images, recordings or audio
    if pictures_stay:
        _check_pictures(read)
    return Conversation(tuple(read), images, audio)


def chat_inputs(body: ChatBody, ports: ChatPorts) -> dict[str, Any]:
    """Return the model's inputs for a chat request, all but `sampling`."""
    conversation = read_conversation(body.messages, ports.pictures_stay)
    inputs: dict[str, Any] = {}
    if ports.messages is not None:
        inputs[ports.messages] = list(conversation.messages)
    elif ports.prompt is not None:
        if conversation.question is None:
            raise HttpError(
                "messages: found no user message, and its text is the only input of the model", param="messages"
            )
        inputs[ports.prompt] = conversation.question
    inputs |= media_inputs(conversation.images, ports.images, "picture")
    inputs |= media_inputs(conversation.audio, ports.audio, "recording")
    return inputs | tool_inputs(body, ports)


def _read_message(
    where: str, message: object, pictures_stay: bool
) -> tuple[dict[str, Any], tuple[bytes, ...], tuple[bytes, ...]]:
    if not isinstance(message, dict) or message.get("role") not in ROLES:
        raise HttpError(f"{where}: expected an object with a role of {', '.join(ROLES)}", param="messages")
    message = _renamed(message)
    kept = {key: message[key] for key in KEPT if message.get(key) is not None}
    if "tool_calls" in kept:
        _check_calls(f"{where}.tool_calls", kept["tool_calls"])
    content = message.get("content")
    if content is None and message["role"] != "assistant":
        raise HttpError(f"{where}.content: expected a text, or a list of parts", param="messages")
    if pictures_stay and isinstance(content, list) and any(map(_is_picture, content)):
        return kept | {"content": _shown(f"{where}.content", content)}, (), ()
    text, images, audio = _read_content(f"{where}.content", content)
    return kept | {"content": text}, images, audio


def _renamed(message: dict[str, Any]) -> dict[str, Any]:
    """Return a message with the newer names of calls, results and reasoning."""
    call = message.get("function_call")
    if message["role"] == "function":  # the result of a function_call, whose id is the function's name
        return message | {"role": "tool", "tool_call_id": message.get("name")}
    if isinstance(call, dict) and not message.get("tool_calls"):
        return message | {"tool_calls": [{"id": call.get("name"), "type": "function", "function": call}]}
    if message.get("reasoning_content") is None and isinstance(message.get("reasoning"), str):
        return message | {"reasoning_content": message["reasoning"]}
    return message


def _check_calls(where: str, calls: object) -> None:
    """Refuse tool calls that no client produces."""
    if not isinstance(calls, list):
        raise HttpError(f"{where}: expected a list of calls", param="messages")
    for place, call in enumerate(calls):
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            expected = '{"id": ..., "type": "function", "function": {"name": ..., "arguments": ...}}'
            raise HttpError(f"{where}[{place}]: expected {expected}", param="messages")


def _read_content(where: str, content: object) -> tuple[str, tuple[bytes, ...], tuple[bytes, ...]]:
    if content is None or isinstance(content, str):
        return content or "", (), ()
    if not isinstance(content, list):
        raise HttpError(f"{where}: expected a text, or a list of parts", param="messages")
    texts: list[str] = []
    images: list[bytes] = []
    audio: list[bytes] = []
    for place, part in enumerate(content):
        at = f"{where}[{place}]"
        kind = part.get("type") if isinstance(part, dict) else None
        if kind == "text" and isinstance(part.get("text"), str):
            texts.append(part["text"])
        elif kind == "refusal" and isinstance(part.get("refusal"), str):
            texts.append(part["refusal"])
        elif kind == "image_url":
            images.append(picture_of(part, at))
        elif kind == "input_audio":
            audio.append(recording_of(part, at))
        else:
            raise HttpError(f"{at}: expected a part of type text, image_url or input_audio", param="messages")
    return "".join(texts), tuple(images), tuple(audio)


def _is_picture(part: object) -> bool:
    return isinstance(part, dict) and part.get("type") == "image_url"


def _shown(where: str, content: list[Any]) -> list[dict[str, Any]]:
    """Return the parts of a message with pictures, which stay encoded."""
    parts: list[dict[str, Any]] = []
    for place, part in enumerate(content):
        at = f"{where}[{place}]"
        if _is_picture(part):
            url, data = _data_url(part, at)
            if len(data) * 3 // 4 > MESSAGE_IMAGE_BYTES_MAX:
                size = f"about {len(data) * 3 // 4} bytes, expected at most {MESSAGE_IMAGE_BYTES_MAX}"
                raise HttpError(f"{at}.image_url.url: found a picture of {size}", param="messages")
            parts.append({"type": "image_url", "image_url": {"url": url}})
        elif isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str):
            parts.append({"type": "text", "text": part["text"]})
        else:
            raise HttpError(f"{at}: expected a part of type text or image_url", param="messages")
    return parts


def _check_pictures(messages: Sequence[Mapping[str, Any]]) -> None:
    """Refuse more pictures than a vision-language model accepts."""
    contents = [one["content"] for one in messages if isinstance(one["content"], list)]
    found = sum(_is_picture(part) for content in contents for part in content)
    if found > IMAGES_MAX:
        raise HttpError(f"messages: found {found} pictures, expected at most {IMAGES_MAX}", param="messages")


def picture_of(part: Mapping[str, Any], where: str) -> bytes:
    """Return the encoded picture of an `image_url` part, which must be a `data:` URL; HttpError otherwise."""
    return _decoded(_data_url(part, where)[1], f"{where}.image_url.url")


def _data_url(part: Mapping[str, Any], where: str) -> tuple[str, str]:
    """Return the `data:` URL of an `image_url` part, and the base64 in it; HttpError otherwise."""
    inner = part.get("image_url")
    url = inner.get("url") if isinstance(inner, dict) else inner
    return check_data_url(url, f"{where}.image_url.url")


def check_data_url(url: object, where: str, param: str = "messages") -> tuple[str, str]:
    """Return a `data:` URL of a picture, and the base64 in it; HttpError otherwise."""
    if not isinstance(url, str):
        raise HttpError(f"{where}: expected a data: URL", param=param)
    if not url[:5].lower() == "data:":
        raise HttpError(
            f"{where}: this server fetches no URLs; send the picture itself as data:image/png;base64,...", param=param
        )
    head, comma, data = url.partition(",")
    if not comma or not head.lower().endswith(";base64"):
        raise HttpError(f"{where}: expected data:image/...;base64,...", param=param)
    return url, data


def recording_of(part: Mapping[str, Any], where: str) -> bytes:
    """Return the encoded recording of an `input_audio` part."""
    inner = part.get("input_audio")
    data = inner.get("data") if isinstance(inner, dict) else None
    if not isinstance(data, str) or (isinstance(inner, dict) and inner.get("format", "wav") not in AUDIO_FORMATS):
        formats = ", ".join(AUDIO_FORMATS)
        raise HttpError(f"{where}.input_audio: expected data in base64, and a format of {formats}", param="messages")
    return _decoded(data, f"{where}.input_audio.data")


def media_inputs(found: Sequence[bytes], ports: Sequence[PortInfo], what: str) -> dict[str, Any]:
    """Assign pictures or recordings to input ports in order; the first list port gets all that remain."""
    inputs: dict[str, Any] = {}
    rest = list(found)
    for port in ports:
        if port.type.startswith("list["):
            inputs[port.name], rest = rest, []
        elif rest:
            inputs[port.name] = rest.pop(0)
        elif not port.optional:
            raise HttpError(f"the model wants {what}s: its input {port.name} got none", param="messages")
    if rest:
        took = len(found) - len(rest)
        raise HttpError(
            f"found {len(found)} {what}s in the last message with any; the model accepts {took}", param="messages"
        )
    return inputs


def _decoded(data: str, where: str) -> bytes:
    try:
        return base64.b64decode(data, validate=True)
    except (binascii.Error, ValueError):
        raise HttpError(f"{where}: found no valid base64", param="messages") from None
