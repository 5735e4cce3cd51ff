"""Sample-rate conversion by a polyphase Kaiser-windowed sinc, in numpy alone.

An output sample lies between two input samples, at one of `up` fractions (phases); each phase has its own short filter.
The filter is the ideal low-pass of the slower rate, cut off by a Kaiser window (A. V. Oppenheim and R. W. Schafer,
Discrete-Time Signal Processing, section 7.5): with these numbers aliases are more than 70 dB down.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from functools import lru_cache

import numpy as np

ZERO_CROSSINGS = 24
"""Half the filter's length, in zero crossings of the sinc: longer is steeper."""

KAISER_BETA = 8.0
"""Shape of the window; 8 puts side lobes near -80 dB."""

ROLL_OFF = 0.93
"""Where the filter starts to close, as a share of the slower rate's half."""

WINDOW_BYTES = 8 << 20
"""Gathered windows computed at a time, so that resampling takes little memory beside its input and its output."""


BLOCK_SAMPLES = 1 << 16
"""Most input samples that are taken in at a time."""


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


def resampled_samples(samples: int, rate_hz: int, to_hz: int) -> int:
    """Return how many samples at `to_hz` come of `samples` at `rate_hz`."""
    common = math.gcd(rate_hz, to_hz)
    return -(-samples * (to_hz // common) // (rate_hz // common))


def resample(samples: np.ndarray, rate_hz: int, to_hz: int) -> np.ndarray:
    """Return float32[n] `samples` at `rate_hz` as float32[ceil(n * to_hz / rate_hz)] at `to_hz`."""
    if rate_hz == to_hz or not len(samples):
        return samples
    out = np.empty(resampled_samples(len(samples), rate_hz, to_hz), np.float32)
    resample_into([samples], len(samples), rate_hz, to_hz, out)
    return out


def resample_into(blocks: Iterable[np.ndarray], samples: int, rate_hz: int, to_hz: int, out: np.ndarray) -> None:
    """Resample blocks that are float32[samples] together into `out`, float32[resampled_samples(...)].

    What is kept of the blocks meanwhile is a filter's length. ValueError when they are not as many samples as said.
    """
    if rate_hz == to_hz:
        _join(blocks, out)
        return
    common = math.gcd(rate_hz, to_hz)
    up, down = to_hz // common, rate_hz // common
    filters = _filters(up, down)
    taps = filters.shape[1]
    held, first = np.zeros(taps // 2 - 1, np.float32), 0  # samples with a margin in front; where they begin
    done = seen = 0
    for block in _with_margin(blocks, taps // 2 + 1):
        held = np.concatenate((held, block))
        seen += len(block)
        if seen > samples + taps // 2 + 1:
            raise ValueError(f"more than {samples} samples")
        # the outputs whose windows are whole by now: the last begins at first + len(held) - taps
        ready = min(((first + len(held) - taps) * up + up - 1) // down + 1, len(out))
        for start in range(done, ready, max(1, WINDOW_BYTES // (4 * taps))):
            end = min(start + max(1, WINDOW_BYTES // (4 * taps)), ready)
            base, phase = np.divmod(np.arange(start, end, dtype=np.int64) * down, up)
            windows = np.lib.stride_tricks.sliding_window_view(held, taps)
            np.einsum("ot,ot->o", windows[base - first], filters[phase], out=out[start:end])
        done = max(done, ready)
        passed = min(done * down // up - first, len(held))
        if passed > 0:
            held, first = held[passed:], first + passed
    if seen - (taps // 2 + 1) != samples:
        raise ValueError(f"{seen} samples, expected {samples}")


def _join(blocks: Iterable[np.ndarray], out: np.ndarray) -> None:
    at = 0
    for block in blocks:
        if at + len(block) > len(out):
            raise ValueError("more samples than were said")
        out[at : at + len(block)] = block
        at += len(block)
    if at < len(out):
        raise ValueError(f"{at} samples, expected {len(out)}")


def _with_margin(blocks: Iterable[np.ndarray], margin: int) -> Iterator[np.ndarray]:
    for block in blocks:
        for start in range(0, len(block), BLOCK_SAMPLES):
            yield block[start : start + BLOCK_SAMPLES]
    yield np.zeros(margin, np.float32)
