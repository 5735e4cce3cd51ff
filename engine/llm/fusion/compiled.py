"""Fused element-wise operations for float32 on a CPU, compiled by numba.

For a few rows, torch spends more on starting these operations than on computing them: each is some loops here, on one
core. The compiled code is kept on disk beside this file, or in the user's cache where that cannot be written.
"""

# numba compiles what it is given: plain loops over arrays, no calls
from __future__ import annotations

from typing import Any

import numba
import numpy as np

_FAST = {"contract", "reassoc", "nsz", "arcp"}


@numba.njit(fastmath=_FAST, cache=True, nogil=True)  # type: ignore[untyped-decorator,unused-ignore]
def norm(values: Any, weight: Any, eps: float, out: Any) -> None:
    """Write weight * values / rms(values) to `out`; values, out: [rows, width], weight: [width]."""
    rows, width = values.shape
    for row in range(rows):
        total = np.float32(0.0)
        for at in range(width):
            total += values[row, at] * values[row, at]
        factor = np.float32(1.0 / np.sqrt(total / width + eps))
        for at in range(width):
            out[row, at] = weight[at] * (values[row, at] * factor)


@numba.njit(fastmath=_FAST, cache=True, nogil=True)  # type: ignore[untyped-decorator,unused-ignore]
def add_norm(values: Any, delta: Any, out: Any, weight: Any, eps: float) -> None:
    """Add `values` to `delta` in place, and write the norm of the sum to `out`; all [rows, width]."""
    rows, width = values.shape
    for row in range(rows):
        total = np.float32(0.0)
        for at in range(width):
            delta[row, at] += values[row, at]
            total += delta[row, at] * delta[row, at]
        factor = np.float32(1.0 / np.sqrt(total / width + eps))
        for at in range(width):
            out[row, at] = weight[at] * (delta[row, at] * factor)


@numba.njit(fastmath=_FAST, cache=True, nogil=True)  # type: ignore[untyped-decorator,unused-ignore]
def turn(heads: Any, cos: Any, sin: Any) -> None:
    """Turn `heads` [rows, heads, width] in place by `cos`, `sin` [rows, turned width]."""
    rows, count, _ = heads.shape
    half = cos.shape[1] // 2
    for row in range(rows):
        for head in range(count):
            for at in range(half):
                low = heads[row, head, at]
                high = heads[row, head, at + half]
                heads[row, head, at] = low * cos[row, at] - high * sin[row, at]
                heads[row, head, at + half] = high * cos[row, at + half] + low * sin[row, at + half]
