"""How many further attempts are allowed: a share of the first ones, so that trying again never becomes the load.

Every first attempt puts `share` of a token into the bucket and every further attempt takes a whole one. In the long run
attempts are at most 1 + share times the first ones; the bucket starts with a few tokens, so that a quiet system may try
again too.
"""

from __future__ import annotations

START_TOKENS = 10.0
"""Further attempts allowed before anything has run; in the long run they do not matter."""

SAVED_MAX = 100.0
"""Most tokens that are saved up; a quiet hour does not pay for a storm."""


class RetryBudget:
    """A token bucket. `share`: most further attempts for each first one, 0.1 for one in ten; 0 allows none at all."""

    def __init__(self, share: float) -> None:
        self.share = max(0.0, share)
        self._most = max(START_TOKENS, SAVED_MAX * min(self.share, 1.0))
        self._tokens = START_TOKENS if self.share else 0.0

    def first(self, count: int = 1) -> None:
        """Count first attempts."""
        self._tokens = min(self._most, self._tokens + count * self.share)

    def try_take(self) -> bool:
        """Allow one further attempt, or not."""
        if self._tokens < 1.0:
            return False
        self._tokens -= 1.0
        return True
