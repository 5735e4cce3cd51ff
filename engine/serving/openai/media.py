"""Inline pictures and recordings of a conversation; URLs are never fetched."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping, Sequence
from typing import Any

from weftline.engine.serving.face import PortFace
from weftline.engine.serving.http.refusal import HttpError

AUDIO_FORMATS = ("wav", "mp3", "flac", "ogg")


def picture_of(part: Mapping[str, Any], where: str) -> bytes:
    """Return the encoded picture of an `image_url` part, which must be a `data:` URL; Refusal otherwise."""
    inner = part.get("image_url")
    url = inner.get("url") if isinstance(inner, dict) else inner
    if not isinstance(url, str):
        raise HttpError(f"{where}.image_url.url: expected a data: URL", param="messages")
    if not url[:5].lower() == "data:":
        raise HttpError(
            f"{where}.image_url.url: this server fetches nothing; send the picture itself as data:image/png;base64,...",
            param="messages",
        )
    head, comma, data = url.partition(",")
    if not comma or not head.lower().endswith(";base64"):
        raise HttpError(f"{where}.image_url.url: expected data:image/...;base64,...", param="messages")
    return _decoded(data, f"{where}.image_url.url")


def recording_of(part: Mapping[str, Any], where: str) -> bytes:
    """Return the encoded recording of an `input_audio` part."""
    inner = part.get("input_audio")
    data = inner.get("data") if isinstance(inner, dict) else None
    if not isinstance(data, str) or (isinstance(inner, dict) and inner.get("format", "wav") not in AUDIO_FORMATS):
        formats = ", ".join(AUDIO_FORMATS)
        raise HttpError(f"{where}.input_audio: expected data in base64, and a format of {formats}", param="messages")
    return _decoded(data, f"{where}.input_audio.data")


def placed(found: Sequence[bytes], ports: Sequence[PortFace], what: str) -> dict[str, Any]:
    """Return the inputs that pictures, or recordings, go to: in order, and all that are left to the first list."""
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
            f"found {len(found)} {what}s in the last message with any; the model takes {took}", param="messages"
        )
    return inputs


def _decoded(data: str, where: str) -> bytes:
    try:
        return base64.b64decode(data, validate=True)
    except (binascii.Error, ValueError):
        raise HttpError(f"{where}: found no valid base64", param="messages") from None
