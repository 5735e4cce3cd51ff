"""Between Python values and what travels: every kind of port, in both directions.

`pack` turns a value into a Packed: kind, dtype, shape and a buffer, with nothing copied yet. Whoever owns memory then
decides where the bytes go: inline, or into a block. `unpack` turns a received Value into what a node or a caller sees;
arrays are views of the shared memory or of the message.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from weftline.engine.messages import Value
from weftline.errors import StepError
from weftline.nodes.detections import Detections
from weftline.nodes.ports import PortType
from weftline.nodes.values import fits, is_json
from weftline.shm.arena import HostArena
from weftline.shm.block import INLINE_BYTES_MAX, Place
from weftline.shm.spec import ITEM_BYTES, STAND_INS, TensorSpec
from weftline.shm.view import bytes_view, dtype_name, numpy_dtype, numpy_view

ARRAYS: dict[str, tuple[str | None, int | None]] = {
    "tensor": (None, None),
    "image": ("uint8", 3),
    "audio": ("float32", 1),
}
"""Kinds that are arrays, with the dtype and rank they have (None: whatever the port says)."""


class _Found(msgspec.Struct, array_like=True):
    """Detections on the wire."""

    names: tuple[str, ...]
    boxes: bytes
    scores: bytes
    classes: bytes


@dataclass(frozen=True, slots=True)
class Packed:
    """A value ready to travel. `array` is set for tensors: contiguous, not copied; `data` for all other kinds."""

    kind: str
    dtype: str = ""
    shape: tuple[int, ...] = ()
    array: np.ndarray | None = None
    data: bytes = b""

    @property
    def size_bytes(self) -> int:
        return int(self.array.nbytes) if self.array is not None else len(self.data)

    @property
    def travels_inline(self) -> bool:
        return self.size_bytes <= INLINE_BYTES_MAX

    def inline(self) -> Value:
        """Return the value with its bytes inside."""
        data = self.array.tobytes() if self.array is not None else self.data
        return Value(self.kind, self.dtype, self.shape, data)

    def at(self, place: Place) -> Value:
        """Return the value whose bytes lie at `place`."""
        return Value(self.kind, self.dtype, self.shape, None, place)

    def write(self, buffer: memoryview) -> None:
        """Copy the bytes into `buffer`, which is exactly `size_bytes` long."""
        if self.array is not None:
            np.copyto(np.frombuffer(buffer, self.array.dtype).reshape(self.array.shape), self.array)
        else:
            buffer[:] = self.data


def pack(value: Any, type: PortType, what: str) -> Packed:
    """Return `value` ready to travel on a port of `type`; StepError names `what` when it is not of that type."""
    kind = type.kind
    if kind in ARRAYS:
        return _pack_array(value, type, what)
    if kind == "text":
        _expect(isinstance(value, str), value, "a str", what)
        try:
            return Packed(kind, data=value.encode())
        except UnicodeEncodeError:
            raise StepError(f"{what}: found text with a lone surrogate, expected text that UTF-8 can hold") from None
    if kind == "bytes":
        _expect(isinstance(value, bytes | bytearray | memoryview), value, "bytes", what)
        return Packed(kind, data=bytes(value))
    if kind == "detections":
        _expect(isinstance(value, Detections), value, "Detections", what)
        return Packed(kind, data=_pack_detections(value))
    if isinstance(value, Detections):
        value = value.to_json()
    if not is_json(value):
        raise StepError(
            f"{what}: {_name(value)} is no json value (None, bool, numbers, text, lists, dicts with text keys)"
        )
    try:
        return Packed("json", data=msgspec.msgpack.encode(value))
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise StepError(f"{what}: {_name(value)} is no json value ({error})") from None


def unpack(value: Value, arenas: Mapping[int, HostArena]) -> Any:
    """Return the Python value; arrays are read-only views, everything else is a copy. KeyError: unknown arena."""
    if value.kind in ARRAYS:
        spec = TensorSpec(value.dtype, value.shape)
        if value.place is not None:
            return numpy_view(arenas[value.place.arena], value.place, spec)
        return np.frombuffer(value.data or b"", numpy_dtype(value.dtype)).reshape(value.shape)
    data = bytes_view(arenas[value.place.arena], value.place) if value.place is not None else value.data or b""
    if value.kind == "text":
        return str(data, "utf-8")
    if value.kind == "bytes":
        return bytes(data)
    if value.kind == "detections":
        return _unpack_detections(data)
    return msgspec.msgpack.decode(data)


def stacked(values: list[Value], arenas: Mapping[int, HostArena]) -> np.ndarray | None:
    """Return one array [items, ...] when the tensors lie side by side in one arena, else None."""
    first = values[0]
    if first.place is None:
        return None
    size = first.place.size_bytes
    for index, value in enumerate(values):
        place = value.place
        if place is None or value.shape != first.shape or value.dtype != first.dtype:
            return None
        if place.arena != first.place.arena or place.offset != first.place.offset + index * size:
            return None
    shape = (len(values), *first.shape)
    whole = first.place._replace(size_bytes=size * len(values))
    return numpy_view(arenas[whole.arena], whole, TensorSpec(first.dtype, shape))


def is_of(value: Value, type: PortType) -> bool:
    """Whether a value that travelled here may go on, as it is, on a port of `type`."""
    if type.kind == "any":
        return True
    dtype_fits = type.dtype is None or type.dtype == value.dtype
    return type.kind == value.kind and dtype_fits and (type.dims is None or fits(type.dims, value.shape))


def _pack_array(value: Any, type: PortType, what: str) -> Packed:
    dtype, rank = ARRAYS[type.kind] if type.kind != "tensor" else (type.dtype, None)
    if not isinstance(value, np.ndarray) and hasattr(value, "detach"):
        value, torch_dtype = _from_torch(value)
        dtype = dtype or torch_dtype
    _expect(isinstance(value, np.ndarray | np.generic), value, "an array", what)
    array = np.ascontiguousarray(value) if np.ndim(value) else np.asarray(value)
    if not array.dtype.isnative:
        array = array.astype(array.dtype.newbyteorder("="))
    held = dtype if dtype in STAND_INS and array.dtype == numpy_dtype(dtype) else dtype_name(array.dtype)
    if held not in ITEM_BYTES or (dtype is not None and held != dtype):
        raise StepError(f"{what}: found {held}{list(array.shape)}, expected {type}")
    right = type.dims is None or fits(type.dims, array.shape)
    if not right or (rank is not None and array.ndim != rank) or (type.kind == "image" and array.shape[-1] != 3):
        raise StepError(f"{what}: found {held}{list(array.shape)}, expected {type}")
    return Packed(type.kind, held, tuple(array.shape), array)


def _from_torch(tensor: Any) -> tuple[np.ndarray, str]:
    """Return a torch tensor's bytes as numpy sees them, and its true dtype."""
    dtype = str(tensor.dtype).removeprefix("torch.")
    tensor = tensor.detach().cpu().contiguous()
    if dtype in STAND_INS:
        import torch

        tensor = tensor.view(getattr(torch, STAND_INS[dtype]))
    return tensor.numpy(), dtype


def _pack_detections(found: Detections) -> bytes:
    return msgspec.msgpack.encode(
        _Found(
            found.names,
            np.ascontiguousarray(found.boxes, np.float32).tobytes(),
            np.ascontiguousarray(found.scores, np.float32).tobytes(),
            np.ascontiguousarray(found.classes, np.int32).tobytes(),
        )
    )


_decode_found = msgspec.msgpack.Decoder(_Found).decode


def _unpack_detections(data: bytes | memoryview) -> Detections:
    found = _decode_found(data)
    boxes = np.frombuffer(found.boxes, np.float32).reshape(-1, 4)
    return Detections(
        boxes, np.frombuffer(found.scores, np.float32), np.frombuffer(found.classes, np.int32), found.names
    )


def _expect(ok: bool, value: Any, expected: str, what: str) -> None:
    if not ok:
        raise StepError(f"{what}: found {_name(value)}, expected {expected}")


def _name(value: Any) -> str:
    return f"a value of type {type(value).__name__}"
