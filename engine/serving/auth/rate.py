"""Rate limit: a token bucket that refills with time, which the caller passes in."""

from __future__ import annotations

from weftline.engine.token_bucket import TokenBucket


class RateLimit:
    """Allow `per_s` permits each second, and up to `burst` at once; full at first.

    now_s is the time of any one clock in seconds. A clock that runs backwards adds no permits.
    """

    __slots__ = ("_at_s", "_bucket", "per_s")

    def __init__(self, per_s: float, burst: float) -> None:
        self.per_s = per_s
        self._bucket = TokenBucket(burst, burst)
        self._at_s: float | None = None

    @property
    def burst(self) -> float:
        return self._bucket.capacity

    def try_take(self, now_s: float) -> float:
        """Take one permit and return 0.0; without one, return the seconds until the next."""
        if self._at_s is None or now_s > self._at_s:
            self._bucket.add((now_s - self._at_s) * self.per_s if self._at_s is not None else 0.0)
            self._at_s = now_s
        if self._bucket.try_take():
            return 0.0
        return (1.0 - self._bucket.tokens) / self.per_s
