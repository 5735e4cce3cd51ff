"""ManualClock: a clock for tests and simulations."""

from __future__ import annotations


class ManualClock:
    """A clock that advances only by `advance`; usable wherever the engine accepts a clock.

    now_ms: start time in milliseconds.
    """

    def __init__(self, now_ms: float = 0.0) -> None:
        self._now_ms = now_ms

    def now_ms(self) -> float:
        """Return the current time in milliseconds."""
        return self._now_ms

    def advance(self, by_ms: float) -> float:
        """Advance the clock and return the new time in milliseconds. ValueError: `by_ms` is negative."""
        if by_ms < 0:
            raise ValueError(f"time moves forward only, not by {by_ms} ms")
        self._now_ms += by_ms
        return self._now_ms
