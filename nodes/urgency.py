"""What an item brings along from its request: how urgent it is, and its place in a sequence of requests."""

from __future__ import annotations

from dataclasses import dataclass
from zlib import crc32

PRIORITY_MAX = 100
"""Priorities of requests go from -100 to 100; 0 is usual and the higher goes first."""

SEEDS = 1 << 62
"""Seeds of requests go from 0 to one less than this."""

_STEPS_APART, _ELEMENTS_APART = 0x9E3779B97F4A7C15, 0xD1B54A32D192ED03
"""Odd, and far from each other's multiples: seeds that people choose, 0, 1 and so on, do not meet."""

PRIORITY_STEP_MS = 200.0
"""What one level of priority is worth: -100 waits at most 40 s longer than +100, so nothing starves."""

PATIENCE_MS = 10_000.0
"""Work without a deadline is as urgent as work that has to start this long after it arrived."""


def seed_of(seed: int, step: str, element: int = -1) -> int:
    """Return what one step draws from, of a request with a seed: another one for each step, and each element of a list.

    element: of a `map:` step, which element; -1 otherwise.
    """
    return (seed + (crc32(step.encode()) + 1) * _STEPS_APART + (element + 1) * _ELEMENTS_APART) % SEEDS


@dataclass(frozen=True, slots=True)
class SequencePart:
    """Where an item stands in a sequence of requests: the sequence's id, and whether it is the first or last of it."""

    id: str
    start: bool = False
    end: bool = False


@dataclass(frozen=True, slots=True)
class Urgency:
    """What an item brings along from its request.

    priority: from -100 to 100; the higher goes first.
    left_ms:  milliseconds to the request's deadline when the item left for the worker; None without a deadline.
    sequence: where the item stands in a sequence of requests; None outside of one.
    seed:     what chance in it is to be drawn from, 0 to SEEDS - 1; None: draw anew.
    """

    priority: int = 0
    left_ms: float | None = None
    sequence: SequencePart | None = None
    seed: int | None = None


USUAL = Urgency()
"""The urgency of an item that brings nothing along."""
