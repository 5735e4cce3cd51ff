"""Convert between Python values and sent values, for every kind of port.

`pack` converts a value to a Packed: kind, dtype, shape and a buffer, without a copy. The owner of the memory then
places the bytes: inline, or in a block. `unpack` converts a received Value to the Python value for a node or a caller.
Arrays are views of the shared memory or of the message.

A list is packed element by element. Its bytes are either all inline, or contiguous in one block.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np

from weftline.engine.protocol.messages import Value
from weftline.engine.protocol.packed import ENCODED_BYTES, Packed, PendingTensor
from weftline.errors import StepError
from weftline.nodes.detections import Detections
from weftline.nodes.exact_numbers import converted, inexact
from weftline.nodes.json_value import NotJson, encode_json, to_json
from weftline.nodes.ports import Dim, PortType
from weftline.nodes.values import fits
from weftline.shm.arena import HostArena
from weftline.shm.device.tensor import DeviceTensor
from weftline.shm.spec import ITEM_BYTES, STAND_INS, TensorSpec
from weftline.shm.view import bytes_view, dtype_name, numpy_dtype, numpy_view

__all__ = [
    "ARRAYS",
    "LIST_ITEMS_MAX",
    "Packed",
    "decoded_json",
    "encoded_json",
    "is_of",
    "live",
    "owned_json",
    "owned_packed",
    "pack",
    "pack_pending",
    "side_by_side",
    "stacked",
    "unpack",
]

ARRAYS: dict[str, tuple[str | None, int | None]] = {
    "tensor": (None, None),
    "image": ("uint8", 3),
    "audio": ("float32", 1),
}
"""Kinds that are arrays, with their dtype and rank (None: as in the port type)."""

LIST_ITEMS_MAX = 65_536
"""Longest list: each element needs some bytes in the message, even if its content is in shared memory."""

_HELD: dict[str, np.dtype[Any]] = {name: numpy_dtype(name) for name in ITEM_BYTES}
_NAMES: dict[str, str] = {held.char: name for name, held in _HELD.items() if name not in STAND_INS}

PAUSE_GC_BYTES = 64 << 10
"""Size from which garbage collection is paused while a json value is decoded: its objects would trigger many passes."""

Known = Callable[[Any, PortType], Packed | Value | None]
"""Returns the existing placement of a list element, which is then not packed again; None if there is none."""

OnDevice = Callable[[Any], DeviceTensor | None]
"""Returns a value as a DeviceTensor if it is a tensor on this worker's device, else None."""


class _Found(msgspec.Struct, array_like=True):
    """Wire format of Detections."""

    names: tuple[str, ...]
    boxes: bytes
    scores: bytes
    classes: bytes


def pack(
    value: Any, type: PortType, what: str, known: Known | None = None, on_device: OnDevice | None = None
) -> Packed:
    """Return `value` packed for a port of `type`; a StepError that names `what` if the type does not match.

    known:     finds list elements that are placed already.
    on_device: finds tensors on this worker's device; without it all tensors are copied to host memory.
    """
    kind = type.kind
    if kind in ARRAYS:
        if on_device is not None and value.__class__ is not np.ndarray:
            tensor = _seen(value, on_device, what)
            if tensor is not None:
                return _pack_device_tensor(tensor, type, what)
        return _pack_array(value, type, what)
    if kind == "text":
        if not isinstance(value, str):
            _expect(False, value, "a str", what)
        try:
            return Packed(kind, data=value.encode())
        except UnicodeEncodeError:
            raise StepError(f"{what}: found text with a lone surrogate, expected text that UTF-8 can hold") from None
    if kind == "bytes":
        _expect(isinstance(value, bytes | bytearray | memoryview), value, "bytes", what)
        return Packed(kind, data=bytes(value))
    if kind == "list":
        return _pack_list(value, type, what, known, on_device)
    if kind == "detections":
        _expect(isinstance(value, Detections), value, "Detections", what)
        return Packed(kind, data=_pack_detections(value, what))
    try:
        return Packed("json", data=encode_json(to_json(value)))
    except NotJson as error:
        raise StepError(error.at(what)) from None


def pack_pending(pending: PendingTensor, type: PortType, what: str) -> Packed:
    """Return a tensor with a deferred read, packed for a tensor port; StepError if the type does not match."""
    spec = pending.spec
    dtype_fits = type.dtype is None or type.dtype == spec.dtype
    if not dtype_fits or not _has_dims(spec.shape, type.dims):
        raise StepError(f"{what}: found {spec.dtype}{list(spec.shape)}, expected {type}")
    return Packed(type.kind, spec.dtype, spec.shape, pending=pending)


def unpack(value: Value, arenas: Mapping[int, HostArena]) -> Any:
    """Return the Python value; arrays are read-only views, all else is a copy. KeyError: unknown arena.

    An absent value is None.
    """
    kind, place = value.kind, value.place
    if kind in ARRAYS:
        if place is not None:
            return numpy_view(arenas[place.arena], place, TensorSpec(value.dtype, value.shape))
        if value.data is None and value.device_place is not None:
            raise StepError(
                f"a {value.dtype}{list(value.shape)} is in device memory only, and this worker has no device\n"
                "    this is a mistake of Weftline's plan, not of the pipeline: please report it"
            )
        return _inline_array(value)
    if kind == "list":
        return [unpack(item, arenas) for item in value.items or ()]
    if kind == "absent":
        return None
    data = bytes_view(arenas[place.arena], place) if place is not None else value.data or b""
    return str(data, "utf-8") if kind == "text" else _decode(kind, data)


def encoded_json(
    value: Value, arenas: Mapping[int, HostArena], kinds: Sequence[str] = ("json", "detections")
) -> Packed | None:
    """Return a large value of kinds that are written as JSON as views of its encoded bytes; None for other values."""
    if value.size_bytes <= ENCODED_BYTES:
        return None
    if value.kind in kinds:
        return _encoded(value, arenas)
    found = {one.kind for one in value.items or ()}
    if value.kind == "list" and len(found) == 1 and found <= set(kinds):
        return Packed("list", items=tuple(_encoded(one, arenas) for one in value.items or ()))
    return None


def owned_json(value: Value, arenas: Mapping[int, HostArena], kinds: Sequence[str] = ("json", "detections")) -> Any:
    """Return a copy of what `encoded_json` returns."""
    return owned_packed(encoded_json(value, arenas, kinds))


def owned_packed(value: Any) -> Any:
    """Return a value with copies of its bytes if it is encoded, else the value itself."""
    if value.__class__ is not Packed:
        return value
    if value.items is None:
        return Packed(value.kind, data=bytes(value.data))
    return Packed(value.kind, items=tuple(map(owned_packed, value.items)))


def _encoded(value: Value, arenas: Mapping[int, HostArena]) -> Packed:
    data = bytes_view(arenas[value.place.arena], value.place) if value.place is not None else value.data or b""
    return Packed(value.kind, data=data)  # type: ignore[arg-type]


def decoded_json(value: Any) -> Any:
    """Return an output of a server as a Python value, also if it is encoded."""
    return live(value, {}) if value.__class__ is Packed else value


def live(source: Value | Packed, arenas: Mapping[int, HostArena]) -> Any:
    """Return the Python value of a received or locally packed value.

    Arrays are read-only views, all else is a copy.
    """
    if isinstance(source, Value):
        return unpack(source, arenas)
    if source.array is not None:
        view = source.array.view()
        view.flags.writeable = False
        return view
    if source.items is not None:
        return [live(item, arenas) for item in source.items]
    return _decode(source.kind, source.data)


def stacked(values: Sequence[Value], arenas: Mapping[int, HostArena]) -> np.ndarray | None:
    """Return one array [items, ...] if the tensors are contiguous in one arena, else None."""
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


def side_by_side(arrays: Sequence[np.ndarray]) -> np.ndarray | None:
    """Return one read-only array [items, ...] if the arrays are contiguous slices of one array, else None."""
    first = arrays[0]
    if first.base is None or not first.nbytes:
        return None
    at = _address(first)
    for index, array in enumerate(arrays):
        if array.base is not first.base or array.shape != first.shape or array.dtype != first.dtype:
            return None
        if not array.flags.c_contiguous or _address(array) != at + index * first.nbytes:
            return None
    whole = (len(arrays), *first.shape), (first.nbytes, *first.strides)
    return np.lib.stride_tricks.as_strided(first, *whole, writeable=False)


def is_of(value: Value | Packed, type: PortType) -> bool:
    """Return True if a received value matches the port type, so that it can be forwarded unchanged."""
    kind = type.kind
    if kind == "any":
        return True
    if kind != value.kind:
        return False
    if kind == "list":
        return type.item is None or all(is_of(item, type.item) for item in value.items or ())
    dtype_fits = type.dtype is None or type.dtype == value.dtype
    return dtype_fits and _has_dims(value.shape, type.dims)


def _has_dims(shape: tuple[int, ...], dims: tuple[Dim, ...] | None) -> bool:
    if dims is None or (len(dims) == 1 == len(shape) and dims[0].__class__ is str):  # fast path: most ports
        return True
    return fits(dims, shape)


def _address(array: np.ndarray) -> int:
    return int(array.__array_interface__["data"][0])


def _inline_array(value: Value) -> np.ndarray:
    data = value.data or b""
    array: np.ndarray = np.ndarray(value.shape, _HELD[value.dtype], data)
    if array.nbytes != len(data):
        raise ValueError(f"{value.dtype}{list(value.shape)} takes {array.nbytes} bytes, its message has {len(data)}")
    return array


def _decode(kind: str, data: bytes | memoryview) -> Any:
    if kind == "text":
        return str(data, "utf-8")
    if kind == "bytes":
        return bytes(data)
    if kind == "detections":
        return _unpack_detections(data)
    return _decode_json(data)


def _decode_json(data: bytes | memoryview) -> Any:
    """Decode a json value with garbage collection paused, which would take longer and block all other threads."""
    pauses = len(data) >= PAUSE_GC_BYTES and gc.isenabled()
    if pauses:
        gc.disable()
    try:
        return msgspec.msgpack.decode(data)
    finally:
        if pauses:
            gc.enable()


def _pack_array(value: Any, type: PortType, what: str) -> Packed:
    dtype, rank = ARRAYS[type.kind] if type.kind != "tensor" else (type.dtype, None)
    if value.__class__ is not np.ndarray:
        if isinstance(value, DeviceTensor):
            value = value.torch()
        if not isinstance(value, np.ndarray) and hasattr(value, "detach"):
            value, torch_dtype = _from_torch(value)
            dtype = dtype or torch_dtype
        _expect(isinstance(value, np.ndarray | np.generic), value, "an array", what)
    array: np.ndarray = np.ascontiguousarray(value) if value.ndim else np.asarray(value)
    if not array.dtype.isnative:
        array = array.astype(array.dtype.newbyteorder("="))
    if dtype in STAND_INS and array.dtype == _HELD[dtype]:
        held = dtype
    else:
        held = _NAMES.get(array.dtype.char) or dtype_name(array.dtype)
    shape = array.shape
    if held not in ITEM_BYTES or (dtype is not None and held != dtype):
        raise StepError(f"{what}: found {held}{list(shape)}, expected {type}")
    right = _has_dims(shape, type.dims) and (rank is None or array.ndim == rank)
    if not right or (type.kind == "image" and shape[-1] != 3):
        raise StepError(f"{what}: found {held}{list(shape)}, expected {type}")
    return Packed(type.kind, held, shape, array)


def _seen(value: Any, on_device: OnDevice, what: str) -> DeviceTensor | None:
    try:
        return on_device(value)
    except ValueError as error:
        raise StepError(f"{what}: {error}") from None


def _pack_device_tensor(tensor: DeviceTensor, type: PortType, what: str) -> Packed:
    """Return a packed device tensor, after the same type checks as for an array."""
    dtype, rank = ARRAYS[type.kind] if type.kind != "tensor" else (type.dtype, None)
    if dtype in STAND_INS and tensor.dtype == STAND_INS[dtype]:
        spec = TensorSpec(dtype, tensor.shape)
        tensor = DeviceTensor(spec, tensor.device, tensor.address, tensor.owner, tensor.writable)
    shape = tensor.shape
    right = (dtype is None or tensor.dtype == dtype) and _has_dims(shape, type.dims)
    if not right or (rank is not None and len(shape) != rank) or (type.kind == "image" and shape[-1] != 3):
        raise StepError(f"{what}: found {tensor.dtype}{list(shape)}, expected {type}")
    return Packed(type.kind, tensor.dtype, shape, tensor=tensor)


def _pack_list(value: Any, type: PortType, what: str, known: Known | None, on_device: OnDevice | None = None) -> Packed:
    of_arrays = type.item is None or type.item.kind in ARRAYS
    if of_arrays and on_device is not None and not isinstance(value, list | tuple | np.ndarray):
        whole = _seen(value, on_device, what)
        value = value if whole is None else whole  # its elements then keep their common base
    if isinstance(value, DeviceTensor):
        value = [value[at] for at in range(len(value))] if of_arrays else value.torch().tolist()
    elif hasattr(value, "detach") or (isinstance(value, np.ndarray) and value.ndim):
        value = list(value) if of_arrays else value.tolist()
    _expect(isinstance(value, list | tuple), value, f"a {type}", what)
    if len(value) > LIST_ITEMS_MAX:
        raise StepError(f"{what}: found a list of {len(value)} elements; the most is {LIST_ITEMS_MAX}")
    item = type.item or PortType("json")
    packed: list[Packed | Value] = []
    for index, one in enumerate(value):
        held = known(one, item) if known is not None else None
        packed.append(pack(one, item, f"{what}[{index}]", known, on_device) if held is None else held)
    return Packed("list", items=tuple(packed))


def _from_torch(tensor: Any) -> tuple[np.ndarray, str]:
    """Return a torch tensor as a numpy array of the same bytes, and its true dtype."""
    dtype = str(tensor.dtype).removeprefix("torch.")
    tensor = tensor.detach().cpu().contiguous()
    if dtype in STAND_INS:
        import torch

        tensor = tensor.view(getattr(torch, STAND_INS[dtype]))
    return tensor.numpy(), dtype


def _pack_detections(found: Detections, what: str) -> bytes:
    columns = ((found.boxes, "float32"), (found.scores, "float32"), (found.classes, "int32"))
    return msgspec.msgpack.encode(_Found(found.names, *(_exact_bytes(*one, what) for one in columns)))


def _exact_bytes(values: Any, dtype: str, what: str) -> bytes:
    held, wrong = converted(np.asarray(values), dtype)
    if wrong is not None:
        raise StepError(f"{what}: found detections with {inexact(dtype)}")
    return held.tobytes()


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
