"""Sample-rate conversion by a polyphase Kaiser-windowed sinc, in numpy alone.

An output sample lies between two input samples, at one of `up` fractions (phases); each phase has its own short filter.
The filter is the ideal low-pass of the slower rate, cut off by a Kaiser window (A. V. Oppenheim and R. W. Schafer,
Discrete-Time Signal Processing, section 7.5): with these numbers aliases are more than 70 dB down.
"""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np

ZERO_CROSSINGS = 24
"""Half the filter's length, in zero crossings of the sinc: longer is steeper."""

KAISER_BETA = 8.0
"""Shape of the window; 8 puts side lobes near -80 dB."""

ROLL_OFF = 0.93
"""Where the filter starts to close, as a share of the slower rate's half."""

_CHUNK = 1 << 15
"""Output samples computed at a time, so that the gathered windows stay in cache-sized memory."""


@lru_cache(maxsize=16)
def _filters(up: int, down: int) -> np.ndarray:
    """Return float32 [up, taps]: the filter of each phase, each summing to one."""
    cutoff = min(1.0, up / down) * ROLL_OFF
    reach = math.ceil(ZERO_CROSSINGS / cutoff)
    offsets = np.arange(-reach + 1, reach + 1)[None, :] - (np.arange(up) / up)[:, None]
    window = np.i0(KAISER_BETA * np.sqrt(np.clip(1 - (offsets / reach) ** 2, 0, 1)))
    taps = np.sinc(cutoff * offsets) * window
    filters: np.ndarray = (taps / taps.sum(axis=1, keepdims=True)).astype(np.float32)
    return filters


def resample(samples: np.ndarray, rate_hz: int, to_hz: int) -> np.ndarray:
    """Return float32[n] `samples` at `rate_hz` as float32[ceil(n * to_hz / rate_hz)] at `to_hz`."""
    if rate_hz == to_hz or not len(samples):
        return samples
    common = math.gcd(rate_hz, to_hz)
    up, down = to_hz // common, rate_hz // common
    filters = _filters(up, down)
    taps = filters.shape[1]
    padded = np.pad(samples.astype(np.float32, copy=False), (taps // 2 - 1, taps // 2 + 1))
    windows = np.lib.stride_tricks.sliding_window_view(padded, taps)
    count = -(-len(samples) * up // down)
    out = np.empty(count, np.float32)
    for start in range(0, count, _CHUNK):
        base, phase = np.divmod(np.arange(start, min(start + _CHUNK, count), dtype=np.int64) * down, up)
        np.einsum("ot,ot->o", windows[base], filters[phase], out=out[start : start + len(base)])
    return out
