"""Type checks of values between steps, without conversion."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from weftline.nodes.detections import Detections
from weftline.nodes.json_value import NotJson, to_json
from weftline.nodes.ports import Dim, PortType
from weftline.shm.spec import STAND_INS
from weftline.shm.view import dtype_name


def mismatch(type: PortType, value: Any) -> str:
    """Return why `value` is not of `type`, such as 'wants text (a str), got nothing'; '' if it is.

    A list is a Python list or tuple; its first wrong element is reported.

    Named sizes of a tensor are not compared with other ports.
    """
    if type.kind == "list":
        return _list_mismatch(type, value)
    if type.kind == "json":
        return _json_mismatch(value)
    right = _is_tensor(type, value) if type.kind == "tensor" else _CHECKS[type.kind](value)
    means = f"{type} (a numpy array)" if type.kind == "tensor" and array_dtype(value) is None else type
    return "" if right else f"wants {_MEANS.get(type.kind, means)}, got {describe(value)}"


def _list_mismatch(type: PortType, value: Any) -> str:
    if not isinstance(value, list | tuple):
        return f"wants {type} (a list), got {describe(value)}"
    for place, element in enumerate(value):
        wrong = mismatch(type.item or PortType("any"), element)
        if wrong:
            return f"is a list whose element {place} {wrong}"
    return ""


def _json_mismatch(value: Any) -> str:
    try:
        to_json(value)
    except NotJson as error:
        return f"wants json: {error.at('')}"
    return ""


def _is_tensor(type: PortType, value: Any) -> bool:
    dtype = array_dtype(value)
    if dtype is None or (type.dtype is not None and dtype not in (type.dtype, STAND_INS.get(type.dtype))):
        return False
    return type.dims is None or fits(type.dims, tuple(value.shape))


def fits(dims: tuple[Dim, ...], shape: tuple[int, ...]) -> bool:
    """Return True when `shape` has the rank and sizes of `dims`; repeated names have one size."""
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
    """Describe `value` without its contents, which may be private."""
    dtype = array_dtype(value)
    if dtype is not None:
        return f"{dtype}[{', '.join(map(str, value.shape))}]"
    if isinstance(value, str | bytes | list | tuple | dict):
        return f"a {type(value).__name__} of length {len(value)}"
    return "nothing" if value is None else f"a value of type {type(value).__name__}"


def is_json(value: Any) -> bool:
    """Return True for None, bool, int, float, str, lists and dicts with str keys."""
    try:
        return to_json(value) is value
    except NotJson:
        return False


def _is_image(value: Any) -> bool:
    return isinstance(value, np.ndarray) and value.dtype == np.uint8 and value.ndim == 3 and value.shape[2] == 3


def _is_audio(value: Any) -> bool:
    return isinstance(value, np.ndarray) and value.dtype == np.float32 and value.ndim == 1


_CHECKS: dict[str, Callable[[Any], bool]] = {
    "text": lambda value: isinstance(value, str),
    "bytes": lambda value: isinstance(value, bytes | bytearray | memoryview),
    "image": _is_image,
    "audio": _is_audio,
    "detections": lambda value: isinstance(value, Detections),
    "any": lambda value: True,
}
_MEANS = {
    "text": "text (a str)",
    "image": "image (uint8[H, W, 3])",
    "audio": "audio (float32[samples])",
}
