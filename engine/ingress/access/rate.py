"""How many requests a token may still make: a bucket that fills at a rate, told the time."""

from __future__ import annotations


class Bucket:
    """Holds up to `burst` permits, and gains `per_s` of them each second; full at first.

    It owns no clock: `now_s` is any clock's time in seconds, and one that runs backwards gains nothing.
    """

    __slots__ = ("_at_s", "_held", "burst", "per_s")

    def __init__(self, per_s: float, burst: float) -> None:
        self.per_s = per_s
        self.burst = burst
        self._held = burst
        self._at_s: float | None = None

    def try_take(self, now_s: float) -> float:
        """Take one permit and return 0.0; or take none and return the seconds until there will be one."""
        if self._at_s is not None and now_s > self._at_s:
            self._held = min(self.burst, self._held + (now_s - self._at_s) * self.per_s)
        if self._at_s is None or now_s > self._at_s:
            self._at_s = now_s
        if self._held >= 1.0:
            self._held -= 1.0
            return 0.0
        return (1.0 - self._held) / self.per_s
