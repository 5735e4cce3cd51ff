"""CPU kernels for float32, compiled by numba: norms, rotary embedding and paged attention of decode rows.

For a few rows, torch's overhead per operation exceeds the computation, so norms and rotary embedding are plain loops on
one core. Paged attention takes all decode rows of a round in one parallel call: each pair of a row and a key head is
one job, keys are read in place, and query heads that share a key head read it once.

The compiled code is cached beside this file, or in the user's cache directory if that is not writable.
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
def rotate(heads: Any, cos: Any, sin: Any) -> None:
    """Apply the rotary embedding `cos`, `sin` [rows, rotary width] to `heads` [rows, heads, width] in place."""
    rows, count, _ = heads.shape
    half = cos.shape[1] // 2
    for row in range(rows):
        for head in range(count):
            for at in range(half):
                low = heads[row, head, at]
                high = heads[row, head, at + half]
                heads[row, head, at] = low * cos[row, at] - high * sin[row, at]
                heads[row, head, at + half] = high * cos[row, at + half] + low * sin[row, at + half]


@numba.njit(fastmath={"contract", "reassoc", "nsz", "arcp"}, parallel=True, cache=True, nogil=True)
def attend_rows(
    query: Any,
    keys: Any,
    values: Any,
    pages: Any,
    page_tokens: int,
    owner: Any,
    first: Any,
    stop: Any,
    scale: float,
    softcap: float,
    out: Any,
) -> None:
    """Write softmax(q k' scale) v of each row to `out` [rows, heads, value width]; all arrays are float32.

    query: [rows, heads, width].   keys, values: [kv_heads, slots, width], the pages of a layer.
    pages: int32 [sequences, pages].   owner: int32 [rows], each row's line in it.
    first, stop: int64 [rows], the tokens that a row sees.
    softcap: scores become softcap * tanh(score / softcap); 0 is off.
    """
    rows, heads, width = query.shape
    kv_heads = keys.shape[0]
    group = heads // kv_heads
    width_out = values.shape[2]
    for job in numba.prange(rows * kv_heads):
        row = job // kv_heads
        head = job - row * kv_heads
        table = pages[owner[row]]
        begin = first[row]
        count = stop[row] - begin
        scores = np.empty((group, count), np.float32)
        best = np.full(group, -np.inf, np.float32)
        for token in range(count):
            place = begin + token
            slot = table[place // page_tokens] * page_tokens + place % page_tokens
            for member in range(group):
                score = np.float32(0.0)
                for at in range(width):
                    score += query[row, head * group + member, at] * keys[head, slot, at]
                score *= scale
                if softcap > 0:
                    score = softcap * np.tanh(score / softcap)
                scores[member, token] = score
                if score > best[member]:
                    best[member] = score
        answer = np.zeros((group, width_out), np.float32)
        total = np.zeros(group, np.float32)
        for member in range(group):
            for token in range(count):
                weight = np.exp(scores[member, token] - best[member])
                scores[member, token] = weight
                total[member] += weight
        for token in range(count):
            place = begin + token
            slot = table[place // page_tokens] * page_tokens + place % page_tokens
            for member in range(group):
                weight = scores[member, token]
                for at in range(width_out):
                    answer[member, at] += weight * values[head, slot, at]
        for member in range(group):
            for at in range(width_out):
                out[row, head * group + member, at] = answer[member, at] / total[member]
