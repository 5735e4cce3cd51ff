"""Token bucket, and its uses: a rate limit, refilled by time, and a retry budget, refilled by first attempts.

RetryBudget limits retries to a share of first attempts, so that retries never become the load. Each first attempt adds
`share` of a token, and each retry takes a whole token. The bucket starts with a few tokens, so that an idle system can
retry too; as a loan, the first attempts that follow pay these back. (Finagle's RetryBudget; gRFC A6.) The scheduler has
one budget for steps and workers that fail, and each client one for refused requests.

Pure, and not thread-safe.
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

    def try_take(self, now_s: float, cost: float = 1.0) -> float:
        """Take `cost` permits and return 0.0; without a whole one, take none and return the seconds until the next.

        Permits that are not there are owed: a request that costs more than the burst passes, and later ones wait.
        """
        self._refill(now_s)
        if self._bucket.tokens < 1.0:
            return (1.0 - self._bucket.tokens) / self.per_s
        self._bucket.tokens -= cost
        return 0.0

    def spend(self, now_s: float, cost: float) -> None:
        """Take `cost` permits, which may be owed: what an admitted request costs beyond its first permit."""
        self._refill(now_s)
        self._bucket.tokens -= cost

    def _refill(self, now_s: float) -> None:
        if self._at_s is None or now_s > self._at_s:
            self._bucket.add((now_s - self._at_s) * self.per_s if self._at_s is not None else 0.0)
            self._at_s = now_s


START_TOKENS = 10.0
"""Retries allowed before the first attempt; insignificant in the long run."""

SAVED_MAX = 100.0
"""Most tokens that are saved, for a share of one: a long idle time does not pay for a retry storm."""


class RetryBudget:
    """Token bucket for retries.

    share: retries for each first attempt in the long run, 0.1 for one in ten; 0 allows none at all.
    start: retries allowed before the first attempt.
    loan:  first attempts add nothing until they have paid for these: after n of them there were at most
           max(start, n * share) retries.
    """

    def __init__(self, share: float, start: float = START_TOKENS, loan: bool = False) -> None:
        self.share = max(0.0, share)
        most = max(start, SAVED_MAX * min(self.share, 1.0))
        self._bucket = TokenBucket(most, start if self.share else 0.0)
        self._owed = start if loan else 0.0

    def first(self, count: int = 1) -> None:
        """Count first attempts."""
        earned = count * self.share
        if self._owed:
            paid = min(self._owed, earned)
            self._owed -= paid
            earned -= paid
        if self._bucket.tokens < self._bucket.capacity:
            self._bucket.add(earned)

    def try_take(self) -> bool:
        """Take one retry; False when the budget is used up."""
        return self._bucket.try_take()
