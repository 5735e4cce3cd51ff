"""Splitting of long recordings into windows at quiet positions."""

from __future__ import annotations

import numpy as np

LOOK_BACK = 0.25
"""Share of a window, at its end, in which the cut may lie: a word is rarely longer than that."""

SPOT = 800
"""Samples over which loudness is measured, 50 ms at 16 kHz: shorter than the pause between two words."""


def cut(samples: np.ndarray, window: int) -> list[tuple[int, int]]:
    """Return (start, end) of consecutive pieces of at most `window` samples that cover `samples` without gaps."""
    pieces = []
    start = 0
    while len(samples) - start > window:
        end = start + _quietest(samples[start : start + window])
        pieces.append((start, end))
        start = end
    return [*pieces, (start, len(samples))]


def _quietest(window: np.ndarray) -> int:
    """Return the middle of the quietest spot in the last part of `window`, always after its start."""
    tail = window[int(len(window) * (1 - LOOK_BACK)) :]
    spots = len(tail) // SPOT
    if spots == 0:
        return len(window)
    loudness = np.square(tail[: spots * SPOT].reshape(spots, SPOT), dtype=np.float32).sum(axis=1)
    return len(window) - len(tail) + int(loudness.argmin()) * SPOT + SPOT // 2
