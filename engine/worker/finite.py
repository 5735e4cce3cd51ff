"""Whether every number of an output is finite: what a step with `finite: true` promises to those that read it.

Looked at are tensors of floating-point types, wherever they lie and whatever library they are of, elements of lists,
detections, and numbers in JSON. Integers, text and bytes are finite as they are. A tensor on a GPU is looked at there,
in its turn on the stream of the work that made it, and waited for.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from weftline.nodes.detections import Detections
from weftline.nodes.ports import PortType
from weftline.shm.device.tensor import DeviceTensor

_EXPONENTS = {"bfloat16": 0x7F80, "float8_e5m2": 0x7C, "float8_e4m3fn": 0x7F}
"""Of types that numpy lacks and holds as unsigned integers: the bits that are all set in what is not finite."""


def is_finite(value: Any, type: PortType) -> bool:
    """Whether neither NaN nor an infinite number is in a value of a port's type."""
    if value is None or isinstance(value, bool | int | str | bytes | bytearray | memoryview):
        return True
    if isinstance(value, float):
        return math.isfinite(value)
    if isinstance(value, dict):
        return all(is_finite(one, type) for one in value.values())
    if isinstance(value, list | tuple):
        return all(is_finite(one, type.item or type) for one in value)
    if isinstance(value, Detections):
        return bool(np.isfinite(value.boxes).all() and np.isfinite(value.scores).all())
    if isinstance(value, np.ndarray | np.generic):
        return _is_finite_array(np.asarray(value), type)
    tensor = value.torch() if isinstance(value, DeviceTensor) else value
    if not hasattr(tensor, "isfinite"):  # nothing that could be packed
        return True
    if not (tensor.is_floating_point() or tensor.is_complex()):
        return True
    return bool((tensor.float() if tensor.element_size() == 1 else tensor).isfinite().all())


def _is_finite_array(array: np.ndarray, type: PortType) -> bool:
    bits = _EXPONENTS.get(type.dtype or "")
    if bits is not None and array.dtype.kind == "u":
        return not bool(((array & bits) == bits).any())
    return array.dtype.kind not in "fc" or bool(np.isfinite(array).all())
