"""Wire encoding of requests and answers between an ingress process and the engine.

No port types are known here: what a value is decides how it travels, and the engine judges it against the port later,
exactly as it would judge the value itself. A PendingTensor is read into the extent and arrives as one again.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from weftline.engine.protocol.messages import Value
from weftline.engine.protocol.packed import Packed, PendingTensor
from weftline.engine.protocol.values import pack, unpack
from weftline.engine.serving.v2.strict_json import INLINE_BYTES
from weftline.errors import InputError, StepError
from weftline.nodes.detections import Detections
from weftline.nodes.ports import PortType
from weftline.nodes.values import is_json
from weftline.shm.arena import HostArena
from weftline.shm.block import INLINE_BYTES_MAX
from weftline.shm.spec import TensorSpec
from weftline.shm.view import bytes_view

PENDING = "pending"
"""The kind of a PendingTensor's Value; all others are the engine's."""

DEPTH_MAX = 8
"""Deepest nesting of lists that hold more than json."""

_TENSOR, _TEXT, _BYTES = PortType("tensor"), PortType("text"), PortType("bytes")
_DETECTIONS, _JSON = PortType("detections"), PortType("json")


def packed_of(value: Any, name: str, depth: int = 0) -> Packed:
    """Return a value ready to travel, nothing copied yet; InputError when it is of no kind that travels."""
    try:
        if isinstance(value, np.ndarray | np.generic):
            return pack(value, _TENSOR, name)
        if isinstance(value, str):
            return pack(value, _TEXT, name)
        if isinstance(value, bytes | bytearray | memoryview):
            return _packed_bytes(value, name)
        if isinstance(value, PendingTensor):
            return Packed(PENDING, value.spec.dtype, value.spec.shape, pending=value)
        if isinstance(value, Packed):
            return value
        if isinstance(value, Detections):
            return pack(value, _DETECTIONS, name)
        if isinstance(value, list | tuple) and depth < DEPTH_MAX and not is_json(value):
            return Packed("list", items=tuple(packed_of(one, name, depth + 1) for one in value))
        return pack(value, _JSON, name)
    except StepError as error:
        raise InputError(f"input {error}") from None


def parcel_of(value: Value, arena: HostArena) -> Any:
    """Return what a received value stands for: arrays as read-only views of the extent or the message, the rest copied.

    ValueError, KeyError, TypeError or msgspec's errors for what its sender should not have sent.
    """
    if value.kind != PENDING:
        return unpack(value, {0: arena})
    spec = TensorSpec(value.dtype, value.shape)
    data = bytes_view(arena, value.place) if value.place is not None else memoryview(value.data or b"")
    if spec.size_bytes != len(data):
        raise ValueError(f"{spec} takes {spec.size_bytes} bytes, {len(data)} came")

    def read_into(buffer: memoryview) -> None:
        np.copyto(np.frombuffer(buffer, np.uint8), np.frombuffer(data, np.uint8))

    return PendingTensor(spec, read_into)


def parcels_of(values: Mapping[str, Value], arena: HostArena) -> dict[str, Any]:
    return {name: parcel_of(value, arena) for name, value in values.items()}


def inputs_of(values: Mapping[str, Value], arena: HostArena) -> dict[str, Any]:
    """Return what received inputs stand for; large json is copied and left as it travels, for `JsonParser.checked`."""
    return {name: _json_left(value, arena) or parcel_of(value, arena) for name, value in values.items()}


def _json_left(value: Value, arena: HostArena) -> Packed | None:
    if value.size_bytes <= INLINE_BYTES:
        return None
    if value.kind == "json":
        return _left(value, arena)
    if value.kind == "list" and value.items and all(one.kind == "json" for one in value.items):
        return Packed("list", items=tuple(_left(one, arena) for one in value.items))
    return None


def _left(value: Value, arena: HostArena) -> Packed:
    data = bytes_view(arena, value.place) if value.place is not None else value.data or b""
    return Packed(value.kind, data=bytes(data))


def _packed_bytes(value: bytes | bytearray | memoryview, name: str) -> Packed:
    """Return bytes ready to travel: large ones as they lie, since whoever writes them copies them once."""
    if isinstance(value, bytes) or len(value) <= INLINE_BYTES_MAX or not memoryview(value).c_contiguous:
        return pack(value, _BYTES, name)
    return Packed("bytes", data=memoryview(value).cast("B"))  # type: ignore[arg-type]
