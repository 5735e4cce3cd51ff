"""Encode Python values as v2 tensors, for both clients. Pure, except for the files that it reads.

A port accepts the values that `Session.run` accepts for it. Encoded images and audio are sent unchanged; the server
decodes them. Without a Weftline type, as from Triton, the datatype decides: numbers become arrays of it, BYTES are made
of text, bytes and files.
"""

from __future__ import annotations

import io
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from weftline.engine.client.model import DescribedPort
from weftline.engine.serving.v2.datatypes import BYTES, DTYPES, datatype_of, trailing_dims
from weftline.engine.serving.v2.elements import JSON, encode_elements
from weftline.engine.serving.v2.messages import Parameter, Tensor
from weftline.errors import InputError
from weftline.nodes.detections import Detections
from weftline.nodes.media import MediaLimits, converted_elements, to_value
from weftline.nodes.ports import AUDIO_HZ, PortType
from weftline.nodes.values import array_dtype, describe
from weftline.shm.view import dtype_name, numpy_dtype

LIMITS = MediaLimits(pixels_max=1 << 40, seconds_max=1e9, bytes_max=(1 << 31) - 1, paths=True)
"""Limits for files read here; those of the server decide."""

ENCODED = ("image", "audio")
"""Kinds that may be sent as the bytes of a file."""

ARRAYS = ("tensor", "image", "audio")
"""Kinds that are arrays."""


def tensor_of(port: DescribedPort, value: Any) -> Tensor:
    """Encode `value` as the tensor of `port`; InputError names the port."""
    try:
        return _typed(port.name, port.type, value) if port.type is not None else _untyped(port, value)
    except InputError as error:
        raise InputError(f"input {port.name}: {error}") from None


def _typed(name: str, type: PortType, value: Any) -> Tensor:
    if type.kind == "list":
        return _list(name, type, value)
    is_any = type.kind == "any"
    type = _apparent(value) if is_any else type
    one = _element(type, value)
    if isinstance(one, np.ndarray):
        return _array(name, one, type.dtype)
    return _bytes(name, (1,), (one,), {JSON: True} if is_any and type.kind == "json" else {})


def _element(type: PortType, value: Any) -> bytes | np.ndarray:
    """Return one value as the bytes of a BYTES element, or as an array."""
    if type.kind == "list":
        return _json(to_value(PortType("json"), _plain(value), LIMITS))
    if type.kind == "any":
        return _element(_apparent(value), value)
    if type.kind in ENCODED:
        value = Path(value) if isinstance(value, str) else value
        if isinstance(value, Path | bytes | bytearray | memoryview):
            encoded: bytes = to_value(PortType("bytes"), value, LIMITS)
            return encoded
    if type.kind == "detections" and not isinstance(value, Detections):
        type = PortType("json")
    found = to_value(type, value, LIMITS)
    if isinstance(found, Detections):
        found = found.to_json()
    if type.kind == "text":
        return str(found).encode()
    if type.kind in ("json", "detections"):
        return _json(found)
    return found if isinstance(found, np.ndarray) else bytes(found)


def _json(value: Any) -> bytes:
    try:
        return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()
    except (ValueError, TypeError, RecursionError):
        raise InputError("no json value: text is UTF-8, keys are text, nesting is shallow") from None


def _list(name: str, type: PortType, value: Any) -> Tensor:
    item = type.item or PortType("json")
    if item.kind in ARRAYS and array_dtype(value) is not None and len(value.shape) > 0:
        value = list(value)
    if not isinstance(value, list | tuple):
        raise InputError(f"wants {type} (a list), got {describe(value)}")
    found = converted_elements(value, lambda one: _element(item, one))
    if not found and item.kind in ARRAYS:
        return _array(name, _no_elements(item), item.dtype)
    arrays = [one for one in found if isinstance(one, np.ndarray)]
    if len(arrays) == len(found) and len({one.shape for one in arrays}) == 1:
        return _array(name, np.stack(arrays), item.dtype)
    if item.kind == "tensor":
        shapes = ", ".join(sorted({describe(one) for one in found}))
        fix = "pad them to one shape"
        raise InputError(f"a list of arrays of different shapes ({shapes}) cannot be sent\n    fix: {fix}")
    return _bytes(name, (len(found),), [_as_file(one, item) for one in found])


def _no_elements(item: PortType) -> np.ndarray:
    known = {"image": ("uint8", (0, 1, 1, 3)), "audio": ("float32", (0, 1))}.get(item.kind)
    dtype, shape = known or (item.dtype or "float32", (0, *(one if type(one) is int else 1 for one in item.dims or ())))
    return np.zeros(shape, numpy_dtype(dtype))


def _as_file(one: bytes | np.ndarray, type: PortType) -> bytes:
    """Return an element as bytes: an image as PNG, audio as WAV, both lossless."""
    if isinstance(one, bytes):
        return one
    out = io.BytesIO()
    if type.kind == "image":
        from PIL import Image

        Image.fromarray(one).save(out, "PNG", compress_level=1)
    else:
        import soundfile

        soundfile.write(out, one, AUDIO_HZ, format="WAV", subtype="FLOAT")
    return out.getvalue()


def _plain(value: Any) -> Any:
    """Return nested lists without arrays and detections in them."""
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    if isinstance(value, Detections):
        return value.to_json()
    return value.tolist() if isinstance(value, np.ndarray | np.generic) else value


def _apparent(value: Any) -> PortType:
    """Return the type of a value for a port that accepts every type."""
    if array_dtype(value) is not None or isinstance(value, bool | int | float):
        return PortType("tensor")
    return PortType("text" if isinstance(value, str | bytes | bytearray | Path) else "json")


def _untyped(port: DescribedPort, value: Any) -> Tensor:
    """Encode a value by datatype alone; the caller adds a batch dimension."""
    if port.datatype == BYTES:
        if array_dtype(value) is None and not isinstance(value, list | tuple):
            shape = (1,) * max(1, len(port.shape))
            return _bytes(port.name, shape, (_loose(value),))
        array = np.asarray(value, object)
        return _bytes(port.name, array.shape, [_loose(one) for one in array.reshape(-1)])
    dtype = DTYPES.get(port.datatype)
    if dtype is None:
        raise InputError(f"has datatype {port.datatype:.20}, which this client does not know")
    array = to_value(PortType("tensor", dtype), value, LIMITS)
    return _array(port.name, array, dtype)


def _loose(value: Any) -> bytes:
    kind = "text" if isinstance(value, str) else "bytes"
    if not isinstance(value, str | bytes | bytearray | memoryview | Path):
        kind = "json"
    found = _element(PortType(kind), value)
    return found if isinstance(found, bytes) else found.tobytes()


def _bytes(
    name: str, shape: tuple[int, ...], elements: Sequence[bytes], parameters: Mapping[str, Parameter] = {}
) -> Tensor:
    return Tensor(name, BYTES, shape, encode_elements(elements), parameters=parameters)


def _array(name: str, array: np.ndarray, dtype: str | None) -> Tensor:
    held = dtype or dtype_name(array.dtype)
    array = np.ascontiguousarray(array) if array.ndim else array  # which would make one dimension of none
    raw = array.reshape(-1).view(np.uint8).data if array.nbytes else b""
    return Tensor(name, datatype_of(held), (*array.shape, *trailing_dims(held)), raw)
