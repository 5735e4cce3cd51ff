"""Token bucket, and the rate limit that refills one with time.

A bucket saves permits up to a capacity; they are taken one at a time. First attempts refill that of the retry budget
(`engine/scheduler/retry_budget.py`). Pure, and not thread-safe.
"""

from __future__ import annotations


class TokenBucket:
    """A token bucket. capacity: most tokens it holds; tokens: what it holds now, fractions included."""

    __slots__ = ("capacity", "tokens")

    def __init__(self, capacity: float, tokens: float) -> None:
        self.capacity = capacity
        self.tokens = tokens

    def add(self, tokens: float) -> None:
        """Add tokens; those above the capacity are dropped."""
        self.tokens = min(self.capacity, self.tokens + tokens)

    def try_take(self) -> bool:
        """Take one token; False, and nothing taken, if there is no whole one."""
        if self.tokens < 1.0:
            return False
        self.tokens -= 1.0
        return True


class RateLimit:
    """Allow `per_s` permits each second, and up to `burst` at once; full at first.

    now_s is the time of any one clock in seconds. A clock that runs backwards adds no permits.
    """

    __slots__ = ("_at_s", "_bucket", "per_s")

    def __init__(self, per_s: float, burst: float) -> None:
        self.per_s = per_s
        self._bucket = TokenBucket(burst, burst)
        self._at_s: float | None = None

    def try_take(self, now_s: float) -> float:
        """Take one permit and return 0.0; without one, return the seconds until the next."""
        if self._at_s is None or now_s > self._at_s:
            self._bucket.add((now_s - self._at_s) * self.per_s if self._at_s is not None else 0.0)
            self._at_s = now_s
        if self._bucket.try_take():
            return 0.0
        return (1.0 - self._bucket.tokens) / self.per_s
