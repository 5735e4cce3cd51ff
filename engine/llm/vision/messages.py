"""Pictures in messages and prompts: each is taken out, and a mark is left in its place.

The mark is a private-use character that occurs in no text of the request. The conversation is then checked as one of
texts alone, and `with_parts` turns the marked texts into the parts that chat templates of vision-language models read:

    [{type: text, text: look}, {type: image_url, ...}]    as received
    "look\\ue000"                                          checked
    [{type: text, text: look}, {type: image}]              rendered

In a prompt, which is one text, U+FFFC (object replacement character) is the place of a picture.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from weftline.engine.llm.vision.families import listed
from weftline.errors import InputError
from weftline.nodes.image import IMAGES_MAX, MESSAGE_IMAGE_BYTES_MAX, PIXELS_MAX, decode_image
from weftline.nodes.template import PICTURE

REQUEST_PIXELS_MAX = 4 * PIXELS_MAX
"""Most pixels of all pictures in the messages of a request."""
_MARKS = range(0xE000, 0xF8FF)


def with_parts(turns: Sequence[Mapping[str, Any]], mark: str) -> list[dict[str, Any]]:
    """Return checked messages with contents as lists of parts, a picture at each mark; empty contents stay texts."""
    return [{**turn, "content": _parts(turn["content"], mark) if turn["content"] else ""} for turn in turns]


def _parts(text: str, mark: str) -> list[dict[str, str]]:
    parts: list[dict[str, str]] = []
    for place, piece in enumerate(text.split(mark) if mark else [text]):
        if place:
            parts.append({"type": "image"})
        if piece:
            parts.append({"type": "text", "text": piece})
    return parts


def free_mark(value: Any) -> str:
    """Return a private-use character that occurs in no text of a JSON value."""
    present = set().union(*_texts(value))
    return next((chr(code) for code in _MARKS if chr(code) not in present), "")


def _texts(value: Any, depth: int = 8) -> Iterator[str]:
    """Yield the texts of message contents, which are not nested deeper than `depth`."""
    if isinstance(value, str):
        yield value
    elif depth and isinstance(value, Mapping):
        for name, one in value.items():
            if name != "image_url":
                yield from _texts(one, depth - 1)
    elif depth and isinstance(value, list | tuple):
        for one in value:
            yield from _texts(one, depth - 1)


def mark_prompt(prompt: str, images: int, mark: str) -> str:
    """Return a prompt with a mark for each of its pictures: at U+FFFC, or before the text where there is none."""
    found = prompt.count(PICTURE)
    if not found:
        return mark * images + prompt
    if found != images:
        raise InputError(
            f"prompt: shows {found} pictures (U+FFFC), and input images has {images}; expected as many, or no U+FFFC",
            param="prompt",
        )
    return prompt.replace(PICTURE, mark)


def mark_messages(
    messages: Sequence[Any], given: Sequence[np.ndarray], mark: str
) -> tuple[list[Any], list[np.ndarray]]:
    """Return messages with marks for pictures, and the pictures in order.

    given: pictures of input `images`. Parts {type: image} show them in order; without such parts they are put before
    the text of the last user message.
    """
    reader = _Reader(list(given), mark)
    marked = [reader.message(f"messages[{place}]", message) for place, message in enumerate(messages)]
    if reader.shown == 0 and given:
        return _before_last_user(marked, reader.images, given, mark)
    if reader.shown != len(given):
        raise InputError(
            f"messages: parts of type image show {reader.shown} pictures, and input images has {len(given)}",
            param="messages",
        )
    return marked, reader.images


def _before_last_user(
    messages: list[Any], found: list[np.ndarray], given: Sequence[np.ndarray], mark: str
) -> tuple[list[Any], list[np.ndarray]]:
    users = [at for at, one in enumerate(messages) if isinstance(one, Mapping) and one.get("role") == "user"]
    if not users:
        raise InputError("messages: found no user message to show the pictures of input images in", param="messages")
    last = users[-1]
    before = sum(str(one.get("content")).count(mark) for one in messages[:last] if isinstance(one, Mapping))
    content, marks = messages[last].get("content"), mark * len(given)
    shown = [{"type": "text", "text": marks}, *content] if isinstance(content, list) else f"{marks}{content or ''}"
    changed = {**messages[last], "content": shown}
    return [*messages[:last], changed, *messages[last + 1 :]], [*found[:before], *given, *found[before:]]


class _Reader:
    """Reads messages in order. images: pictures so far. shown: those of input `images` among them."""

    def __init__(self, given: list[np.ndarray], mark: str) -> None:
        self.images: list[np.ndarray] = []
        self.shown = 0
        self._given = given
        self._mark = mark
        self._pixels = 0

    def message(self, where: str, message: Any) -> Any:
        """Return a message whose content is one text where it has pictures; other messages as they are."""
        content = message.get("content") if isinstance(message, Mapping) else None
        if not isinstance(content, list) or not any(map(_is_image, content)):
            return message
        texts = [self._part(f"{where}.content[{place}]", part) for place, part in enumerate(content)]
        return {**message, "content": "".join(texts)}

    def _part(self, where: str, part: Any) -> str:
        if _is_image(part):
            self._add(where, part)
            return self._mark
        if isinstance(part, Mapping) and part.get("type") == "text" and isinstance(part.get("text"), str):
            return str(part["text"])
        raise InputError(f"{where}: expected a part of type text, image_url or image", param="messages")

    def _add(self, where: str, part: Mapping[str, Any]) -> None:
        if part["type"] == "image":
            if self.shown < len(self._given):
                self.images.append(self._given[self.shown])
            self.shown += 1
        else:
            pixels_max = min(PIXELS_MAX, REQUEST_PIXELS_MAX - self._pixels)
            self.images.append(decoded(part, where, pixels_max))
            self._pixels += self.images[-1].size // 3
        check_count(len(self.images), "messages")


def _is_image(part: Any) -> bool:
    return isinstance(part, Mapping) and part.get("type") in ("image_url", "image")


def has_images(messages: object) -> bool:
    """Return whether a message has a part with a picture."""
    if not isinstance(messages, list):
        return False
    contents = [one.get("content") for one in messages if isinstance(one, Mapping)]
    return any(_is_image(part) for content in contents if isinstance(content, list) for part in content)


def shows_pictures(inputs: Mapping[str, Any]) -> bool:
    """Return whether a request has pictures."""
    found = inputs.get("images")
    return (found is not None and len(found) > 0) or has_images(inputs.get("messages"))


def refuse_images(inputs: Mapping[str, Any], shown: str) -> None:
    """Raise InputError for pictures in a request to a model of texts."""
    for param in ("images", "messages"):
        if shows_pictures({param: inputs.get(param)}):
            reads = f"{shown} reads texts only; pictures need one of {listed()}"
            raise InputError(f"{param}: found pictures, and model {reads}", param=param)


def check_count(found: int, param: str) -> None:
    """Raise InputError for more pictures than a request may have."""
    if found > IMAGES_MAX:
        raise InputError(f"{param}: found {found} pictures, expected at most {IMAGES_MAX}", param=param)


def decoded(part: Mapping[str, Any], where: str, pixels_max: int) -> np.ndarray:
    """Return the picture of an `image_url` part as uint8 [H, W, 3]; its URL holds the picture itself."""
    data = data_of_url(part, where)
    try:
        return decode_image(data, pixels_max)
    except InputError as error:
        raise InputError(f"{where}.image_url: {error}", param="messages") from None


def data_of_url(part: Mapping[str, Any], where: str) -> bytes:
    """Return the encoded picture of an `image_url` part with a `data:` URL; InputError names what is wrong."""
    inner = part.get("image_url")
    url = inner.get("url") if isinstance(inner, Mapping) else inner
    where = f"{where}.image_url.url"
    if not isinstance(url, str) or url[:5].lower() != "data:":
        found = "an address" if isinstance(url, str) else type(url).__name__
        fix = "no URL is fetched here; send the picture itself as data:image/png;base64,..."
        raise InputError(f"{where}: found {found}, expected a data: URL\n    fix: {fix}", param="messages")
    head, comma, data = url.partition(",")
    if not comma or not head.lower().endswith(";base64"):
        raise InputError(f"{where}: expected data:image/...;base64,...", param="messages")
    if len(data) * 3 // 4 > MESSAGE_IMAGE_BYTES_MAX:
        found = f"found a picture of about {len(data) * 3 // 4} bytes"
        raise InputError(f"{where}: {found}, expected at most {MESSAGE_IMAGE_BYTES_MAX}", param="messages")
    try:
        return base64.b64decode(data, validate=True)
    except (binascii.Error, ValueError):
        raise InputError(f"{where}: found no valid base64", param="messages") from None
