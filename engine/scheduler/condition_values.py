"""Decode the values that a condition may read: small, inline, without a framework."""

from __future__ import annotations

import struct
from typing import Any

import msgspec

from weftline.engine.protocol.messages import Value
from weftline.shm.block import INLINE_BYTES_MAX

_FORMATS = {
    "bool": "?", "uint8": "B", "int8": "b", "uint16": "H", "int16": "h", "uint32": "I", "int32": "i",
    "uint64": "Q", "int64": "q", "float16": "e", "float32": "f", "float64": "d",
}  # fmt: skip
"""Formats of struct for the dtypes that conditions know."""


def peek(value: Value) -> Any:
    """Return what a condition sees of `value`; ValueError when it is too large or of a kind that conditions cannot see.

    json: as it is; text: a str; detections: the list of their labels; a tensor of one element: a number; a tensor of
    one axis: the list of its numbers; list: the list of what is seen of its elements, None for those that are not seen;
    absent: None.
    """
    if value.kind == "absent":
        return None
    if value.items is not None:
        return [_seen(one) for one in value.items]
    if value.data is None:
        raise ValueError(
            f"a condition reads a {value.kind} of {value.size_bytes} bytes; the most is {INLINE_BYTES_MAX}"
        )
    flat = len(value.shape) == 1 or all(size == 1 for size in value.shape)
    number = value.kind == "tensor" and value.dtype in _FORMATS and flat
    if not number and value.kind not in ("text", "json", "detections"):
        raise ValueError(f"a condition cannot read {value.dtype or value.kind}{list(value.shape) or ''}")
    try:
        return _decoded(value, value.data)
    except (struct.error, msgspec.MsgspecError, ValueError, LookupError, TypeError, RecursionError):
        raise ValueError(f"{value.size_bytes} bytes that hold no {value.kind}") from None


def _seen(value: Value) -> Any:
    try:
        return peek(value)
    except ValueError:
        return None


def _decoded(value: Value, data: bytes) -> Any:
    if value.kind == "text":
        return data.decode()
    if value.kind == "json":
        return msgspec.msgpack.decode(data)
    if value.kind == "detections":
        return _labels(data)
    count = value.shape[0] if value.shape and value.shape != (1,) * len(value.shape) else 1
    found = struct.unpack(f"={count}{_FORMATS[value.dtype]}", data)
    return found[0] if count == 1 and all(size == 1 for size in value.shape) else list(found)


def _labels(data: bytes) -> list[str]:
    """Return the label of each detection; the layout is that of engine.values."""
    names, _, _, classes = msgspec.msgpack.decode(data)
    return [names[place] for (place,) in struct.iter_unpack("=i", classes)]
