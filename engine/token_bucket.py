"""Token bucket: permits that are saved up to a capacity and taken one at a time.

What refills it is left to the users: time for a rate limit (engine/serving/auth/rate.py), first attempts for a retry
budget (engine/scheduler/retry_budget.py). Pure, and not thread-safe.
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
