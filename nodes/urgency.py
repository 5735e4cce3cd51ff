"""Request attributes of an item: priority, time left, sequence, random seed, caller."""

from __future__ import annotations

from dataclasses import dataclass
from zlib import crc32

PRIORITY_MAX = 100
"""Largest priority of a request; the range is -100 to 100, 0 is the default, the higher goes first."""

SEEDS = 1 << 62
"""Number of possible seeds; a seed is 0 to SEEDS - 1."""

_STEPS_APART, _ELEMENTS_APART = 0x9E3779B97F4A7C15, 0xD1B54A32D192ED03
"""Odd 64-bit multipliers, so that small seeds (0, 1, ...) of different steps and elements differ."""

PRIORITY_STEP_MS = 200.0
"""Milliseconds of waiting that one level of priority is worth; -100 waits at most 40 s longer than +100."""

PATIENCE_MS = 10_000.0
"""Latest start of work without a deadline, in milliseconds after its arrival."""


def seed_of(seed: int, step: str, element: int = -1) -> int:
    """Derive the seed of one step, and of one element of a `map:` step, from the seed of its request.

    element: index of the element; -1 outside `map:`.
    """
    return (seed + (crc32(step.encode()) + 1) * _STEPS_APART + (element + 1) * _ELEMENTS_APART) % SEEDS


@dataclass(frozen=True, slots=True)
class SequencePart:
    """Position of a request in a sequence of requests.

    id:    id of the sequence.
    start: the request is the first of the sequence.
    end:   the request is the last of the sequence.
    """

    id: str
    start: bool = False
    end: bool = False


@dataclass(frozen=True, slots=True)
class Urgency:
    """Attributes of an item's request.

    priority: -100 to 100; the higher goes first.
    left_ms:  milliseconds to the request's deadline or the end of the step's `timeout_ms` when the item was sent to the
              worker; None without either.
    sequence: position in a sequence of requests; None outside a sequence.
    seed:     seed for random numbers, 0 to 2**62 - 1; None: use a fresh one.
    caller:   authenticated identity of the client; '' without authentication.
    program:  number of the program that the request belongs to, where a stream node serves several; a node that keeps
              data of items keeps those of different programs apart.
    """

    priority: int = 0
    left_ms: float | None = None
    sequence: SequencePart | None = None
    seed: int | None = None
    caller: str = ""
    program: int = 0


USUAL = Urgency()
"""Default attributes: priority 0, no deadline, no sequence, no seed, no caller."""
