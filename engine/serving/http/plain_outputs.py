"""Plain answers: outputs as JSON, or one output by itself in a format that the Accept header names.

Port type        in JSON                                              by itself
text             a text                                               text/plain
json             its value                                            application/json (the whole answer)
detections       a list of {name, score, box}                         application/json (the whole answer)
image            {"b64": "...", "content_type": "image/png"}          image/png, image/jpeg, image/webp
audio            {"b64": "...", "content_type": "audio/wav"}          audio/wav, audio/flac, audio/mpeg, audio/ogg
bytes            {"b64": "...", "content_type": "application/..."}    application/octet-stream
tensor           nested lists of numbers                              application/x-npy (bfloat16 as float32)
list[T]          a list                                               -
absent           null                                                 an empty answer, 204

Numbers that JSON lacks are NaN, Infinity and -Infinity, as in v2 over HTTP. Pure; encoding a picture takes a while.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from weftline.engine.serving.http.plain_inputs import B64
from weftline.engine.serving.model_info import PortInfo
from weftline.engine.serving.openai.recordings import encode_recording
from weftline.engine.serving.v2.elements import Written, decode_elements
from weftline.engine.serving.v2.response import json_element, nested
from weftline.nodes.exact_numbers import from_bfloat16
from weftline.nodes.json_value import json_text
from weftline.nodes.ports import PortType

NPY, OCTETS, TEXT, JSON, EVENTS = (
    "application/x-npy",
    "application/octet-stream",
    "text/plain",
    "application/json",
    "text/event-stream",
)


def _picture(format: str, **options: Any) -> Callable[[Any], bytes]:
    def encode(pixels: np.ndarray) -> bytes:
        from PIL import Image

        file = io.BytesIO()
        Image.fromarray(np.ascontiguousarray(pixels)).save(file, format, **options)
        return file.getvalue()

    return encode


def _npy(array: Any) -> bytes:
    file = io.BytesIO()
    np.save(file, np.asarray(array), allow_pickle=False)
    return file.getvalue()


FORMATS: Mapping[str, Mapping[str, Callable[[Any], bytes]]] = {
    "text": {TEXT: lambda value: str(value).encode()},
    "image": {
        "image/png": _picture("PNG", compress_level=1),
        "image/jpeg": _picture("JPEG", quality=92),
        "image/webp": _picture("WEBP"),
    },
    "audio": {
        "audio/wav": partial(encode_recording, format="wav"),
        "audio/flac": partial(encode_recording, format="flac"),
        "audio/mpeg": partial(encode_recording, format="mp3"),
        "audio/ogg": partial(encode_recording, format="opus"),
    },
    "bytes": {OCTETS: bytes},
    "tensor": {NPY: _npy},
}
"""Formats of one output by itself, by the kind of its port; the first is the one in JSON."""


def is_media(port: PortInfo) -> bool:
    """Return True if values of a port are pictures or recordings, whose encoding takes long."""
    return any(kind in port.type for kind in ("image", "audio"))


def media_ranges(accept: str) -> list[str]:
    """Return the media ranges of an Accept header, the preferred ones first; without those of weight 0."""
    found: list[tuple[float, str]] = []
    for one in accept.split(","):
        range, *parameters = [part.strip().lower() for part in one.split(";")]
        weight = next((part[2:].strip() for part in parameters if part.startswith("q=")), "1")
        try:
            found.append((float(weight), range))
        except ValueError:
            found.append((0.0, range))
    ordered = sorted(found, key=lambda pair: -pair[0])
    return [range for weight, range in ordered if range and weight > 0]


def offered(ports: Sequence[PortInfo]) -> dict[str, list[PortInfo]]:
    """Return the media types of single outputs, with the ports that have each."""
    types: dict[str, list[PortInfo]] = {}
    for port in ports:
        for type in FORMATS.get(port.port_type.kind, ()):
            types.setdefault(type, []).append(port)
    return types


def matches(range: str, type: str) -> bool:
    """Return True if a media range such as `image/*` includes a media type."""
    return range in ("*/*", type) or (range.endswith("/*") and type.startswith(range[:-1]))


def raw_output(port: PortInfo, value: Any, type: str) -> bytes:
    """Return one output in a media type of `offered`."""
    return FORMATS[port.port_type.kind][type](_numpy(port.port_type, value))


def json_answer(
    ports: Sequence[PortInfo],
    outputs: Mapping[str, Any],
    written: Mapping[str, bytes],
    head: Mapping[str, str] | None = None,
) -> bytes:
    """Return the JSON object of an answer. written: outputs that are JSON text already. head: members before them."""
    members = [b"%b:%b" % (json_text(name), json_text(text)) for name, text in (head or {}).items()]
    members += [
        b"%b:%b" % (json_text(port.name), written.get(port.name) or json_output(port.type, outputs.get(port.name)))
        for port in ports
    ]
    return b"{%b}" % b",".join(members)


def json_output(type: str, value: Any) -> bytes:
    """Return the JSON text of one output, or of one piece of it."""
    return _json(PortType.parse(type), value)


def _json(type: PortType, value: Any) -> bytes:
    if value is None:
        return b"null"
    if isinstance(value, Written):
        elements = [bytes(one) for one in decode_elements(value.raw, value.count)]
        return b"[%b]" % b",".join(elements) if type.kind == "list" else elements[0]
    if type.kind == "list" and isinstance(value, list | tuple):
        item = type.item or PortType("any")
        return b"[%b]" % b",".join([_json(item, one) for one in value])
    if isinstance(value, np.ndarray) and type.kind in ("tensor", "any"):
        return json_text(nested(_numpy(type, value)))
    if isinstance(value, bytes | bytearray | memoryview) or type.kind in ("image", "audio"):
        content_type, encode = next(iter(FORMATS[type.kind if type.kind in FORMATS else "bytes"].items()))
        text = base64.b64encode(encode(value)).decode("ascii")
        return json_text({B64: text, "content_type": content_type})
    return json_text(value) if isinstance(value, str) else json_element(value)


def _numpy(type: PortType, value: Any) -> Any:
    is_bits = type.dtype == "bfloat16" and isinstance(value, np.ndarray) and value.dtype == np.uint16
    return from_bfloat16(value) if is_bits else value
