"""Whether every number of an output is finite: what a step with `finite: true` promises to those that read it.

Looked at are tensors of floating-point types, wherever they lie and whatever library they are of, elements of lists,
detections, and numbers in JSON. Integers, text and bytes are finite as they are. A tensor on a GPU is looked at there,
in its turn on the stream of the work that made it, and waited for; in a worker without torch it is copied down for it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from weftline.engine.packed import Source
from weftline.engine.values import ARRAYS
from weftline.nodes.detections import Detections

Look = Callable[[Any], Any]
"""Returns a tensor as numpy or torch sees it, whatever library it is of."""

_EXPONENTS = {"bfloat16": 0x7F80, "float8_e5m2": 0x7C, "float8_e4m3fn": 0x7F}
"""Of types that numpy lacks and holds as unsigned integers: the bits that are all set in what is not finite."""


def is_finite(value: Any, made: Source, look: Look | None = None) -> bool:
    """Whether neither NaN nor an infinite number is in what a node gave.

    made: the same as it travels, which knows the dtype of what numpy holds as integers.
    look: at tensors; None: they are numpy's or torch's as they are given.
    """
    if made.items is not None:
        return all(is_finite(one, item, look) for one, item in zip(value, made.items, strict=True))
    if made.kind in ARRAYS:
        return _is_finite_tensor(value if look is None else look(value), made.dtype)
    return _is_finite_plain(value)


def _is_finite_plain(value: Any) -> bool:
    if isinstance(value, float):
        return math.isfinite(value)
    if isinstance(value, dict):
        return all(map(_is_finite_plain, value.values()))
    if isinstance(value, list | tuple):
        return all(map(_is_finite_plain, value))
    if isinstance(value, Detections):
        return bool(np.isfinite(value.boxes).all() and np.isfinite(value.scores).all())
    return True


def _is_finite_tensor(value: Any, dtype: str) -> bool:
    if isinstance(value, np.ndarray | np.generic):
        array, bits = np.asarray(value), _EXPONENTS.get(dtype)
        if bits is not None:
            return not bool(((array & bits) == bits).any())
        return array.dtype.kind not in "fc" or bool(np.isfinite(array).all())
    if not (value.is_floating_point() or value.is_complex()):
        return True
    return bool((value.float() if value.element_size() == 1 else value).isfinite().all())
