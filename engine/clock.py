"""Time, as a value that can be handed in.

Everything that decides takes `now_ms` as an argument; only the shell reads a clock, and it reads the monotonic one, so
a jump of the wall clock changes nothing.
"""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """Something that says how many milliseconds have passed since an arbitrary start."""

    def now_ms(self) -> float: ...


class MonotonicClock:
    """The machine's monotonic clock."""

    def now_ms(self) -> float:
        return time.monotonic_ns() / 1e6


class ManualClock:
    """A clock that stands still until told otherwise; for tests and simulations."""

    def __init__(self, now_ms: float = 0.0) -> None:
        self._now_ms = now_ms

    def now_ms(self) -> float:
        return self._now_ms

    def advance(self, by_ms: float) -> float:
        """Move forward and return the new time."""
        if by_ms < 0:
            raise ValueError(f"time moves forward only, not by {by_ms} ms")
        self._now_ms += by_ms
        return self._now_ms
