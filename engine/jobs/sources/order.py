"""Row order: seeded shuffle, shards and limits; pure.

The order of a shuffle is made twice: pieces change places, and then rows inside windows of WINDOW_ROWS selected rows.
It is the same wherever and whenever the same seed is used, and needs no more room than one window. It is no draw from
all orders of all rows: rows end up near rows of pieces that came near to theirs.

Only streams of numbers that numpy promises never to change are used: the raw bits of PCG64, and a stable sort.
"""

from __future__ import annotations

import numpy as np

WINDOW_ROWS = 10_000
"""Rows that change places with each other."""

WINDOW_BYTES = 64 << 20
"""A window is closed early when its rows take so much room."""

_MASK = (1 << 64) - 1


def permutation(count: int, seed: int, turn: int) -> np.ndarray:
    """Return int64[count]: the numbers from 0 in an order made from the seed; turn 0 orders pieces, others windows."""
    bits = np.random.PCG64(np.random.SeedSequence([seed & _MASK, turn]))
    return np.argsort(bits.random_raw(count), kind="stable") if count else np.zeros(0, np.int64)


def share(count: int, seen: int, shard: tuple[int, int] | None) -> np.ndarray | None:
    """Return int64: which of `count` rows belong to a share, when `seen` came before them; None: all do.

    Row k, from 0, belongs to share k % n + 1 of n.
    """
    if shard is None:
        return None
    which, of = shard
    return np.arange((which - 1 - seen) % of, count, of)


def left(rows: int, shard: tuple[int, int] | None, limit: int | None) -> int:
    """Return how many of `rows` selected rows a job has after shares and limit."""
    if shard is not None:
        which, of = shard
        rows = max(0, -(-(rows - which + 1) // of))
    return rows if limit is None else min(rows, limit)
