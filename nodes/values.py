"""Whether a value is what its port says: the checks that hold between steps, where nothing is converted."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from weftline.nodes.detections import Detections
from weftline.nodes.ports import Dim, PortType
from weftline.shm.spec import STAND_INS
from weftline.shm.view import dtype_name

JSON_DEPTH_MAX = 64
"""Deepest nesting of a json value: beyond it encoders recurse without need."""


def mismatch(type: PortType, value: Any) -> str:
    """Return why `value` is no value of `type`, such as 'wants text (a str), got nothing'; '' when it is one.

    A list is a Python list or tuple, and the first of its elements that is wrong is named.

    Named sizes of a tensor are not compared with other ports: one value is looked at, alone.
    """
    if type.kind == "list":
        return _list_mismatch(type, value)
    right = _is_tensor(type, value) if type.kind == "tensor" else _CHECKS[type.kind](value)
    return "" if right else f"wants {_MEANS.get(type.kind, type)}, got {describe(value)}"


def _list_mismatch(type: PortType, value: Any) -> str:
    if not isinstance(value, list | tuple):
        return f"wants {type} (a list), got {describe(value)}"
    for place, element in enumerate(value):
        wrong = mismatch(type.item or PortType("any"), element)
        if wrong:
            return f"is a list whose element {place} {wrong}"
    return ""


def _is_tensor(type: PortType, value: Any) -> bool:
    dtype = array_dtype(value)
    if dtype is None or (type.dtype is not None and dtype not in (type.dtype, STAND_INS.get(type.dtype))):
        return False
    return type.dims is None or fits(type.dims, tuple(value.shape))


def fits(dims: tuple[Dim, ...], shape: tuple[int, ...]) -> bool:
    """Whether `shape` has the rank and sizes of `dims`; a name that occurs twice is one size."""
    if len(dims) != len(shape):
        return False
    named: dict[str, int] = {}
    for dim, size in zip(dims, shape, strict=True):
        wanted = dim if isinstance(dim, int) else size if dim == "?" else named.setdefault(dim, size)
        if wanted != size:
            return False
    return True


def array_dtype(value: Any) -> str | None:
    """Return the dtype name of a numpy array or torch tensor, None for anything else."""
    if isinstance(value, np.ndarray):
        return dtype_name(value.dtype)
    dtype = getattr(value, "dtype", None)
    return str(dtype).removeprefix("torch.") if dtype is not None and hasattr(value, "shape") else None


def describe(value: Any) -> str:
    """Return a short phrase for what `value` is, without showing its contents: they may be private."""
    dtype = array_dtype(value)
    if dtype is not None:
        return f"{dtype}[{', '.join(map(str, value.shape))}]"
    if isinstance(value, str | bytes | list | tuple | dict):
        return f"a {type(value).__name__} of length {len(value)}"
    return "nothing" if value is None else f"a value of type {type(value).__name__}"


def is_json(value: Any, depth: int = 0) -> bool:
    """Whether `value` is made of None, bool, int, float, str, lists and dicts with str keys, not too deep."""
    if value is None or isinstance(value, bool | int | float | str):
        return True
    if depth >= JSON_DEPTH_MAX:
        return False
    if isinstance(value, list | tuple):
        return all(is_json(part, depth + 1) for part in value)
    if isinstance(value, Mapping):
        return all(isinstance(key, str) and is_json(part, depth + 1) for key, part in value.items())
    return False


def _is_image(value: Any) -> bool:
    return isinstance(value, np.ndarray) and value.dtype == np.uint8 and value.ndim == 3 and value.shape[2] == 3


def _is_audio(value: Any) -> bool:
    return isinstance(value, np.ndarray) and value.dtype == np.float32 and value.ndim == 1


_CHECKS: dict[str, Callable[[Any], bool]] = {
    "text": lambda value: isinstance(value, str),
    "bytes": lambda value: isinstance(value, bytes | bytearray | memoryview),
    "json": is_json,
    "image": _is_image,
    "audio": _is_audio,
    "detections": lambda value: isinstance(value, Detections),
    "any": lambda value: True,
}
_MEANS = {
    "text": "text (a str)",
    "json": f"json (None, bool, int, float, str, list, dict; at most {JSON_DEPTH_MAX} deep)",
    "image": "image (uint8[H, W, 3])",
    "audio": "audio (float32[samples])",
}
