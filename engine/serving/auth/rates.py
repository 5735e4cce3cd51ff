"""Accounts of the tokens' request rates: one for a server, whatever number of processes it has.

The engine's process holds the account (`TokenRates`). Servers in other processes ask it for each request of a token
with a rate, over the connection that they have anyway (`RemoteBackend.take`; replicas on Ray: an actor). So the rate in
the token file is the rate that callers see, over all protocols and processes, and a restarted process resets nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

from weftline.engine.serving.auth.token_entries import Token
from weftline.engine.serving.auth.tokens import TokenFile
from weftline.engine.token_bucket import RateLimit

COST_MAX = 1e6
"""Most requests that one request counts as."""


class RateAccount(Protocol):
    """The account as a server sees it."""

    async def take(self, token: str) -> float:
        """Take a permit for one request of a token, by name; return 0.0, or the seconds until the next permit."""

    def spend(self, token: str, cost: float) -> None:
        """Charge `cost` requests beyond the first of an admitted one, which may be owed; no answer."""


class TokenRates:
    """The account itself. Not thread-safe.

    tokens: file with the rates; None: there are no tokens, and every request is allowed.
    clock:  seconds.
    """

    def __init__(self, tokens: TokenFile | None, clock: Callable[[], float] = time.monotonic) -> None:
        self._tokens = tokens
        self._clock = clock
        self._buckets: dict[str, tuple[Token, RateLimit]] = {}

    async def take(self, token: str) -> float:
        return self.take_now(token)

    def take_now(self, token: str) -> float:
        """`take`, at once. A name that is not in the file is allowed: its caller is refused where it is identified."""
        bucket = self._bucket(token)
        return bucket.try_take(self._clock()) if bucket is not None else 0.0

    def spend(self, token: str, cost: float) -> None:
        bucket = self._bucket(token)
        if bucket is not None and cost > 0:
            bucket.spend(self._clock(), min(cost, COST_MAX))

    def _bucket(self, token: str) -> RateLimit | None:
        entry = self._tokens.named(token) if self._tokens is not None else None
        if entry is None or entry.requests_per_s is None:
            return None
        held = self._buckets.get(token)
        if held is None or (held[0].requests_per_s, held[0].burst_calls) != (entry.requests_per_s, entry.burst_calls):
            held = self._buckets[token] = (entry, RateLimit(entry.requests_per_s, entry.burst_calls))
        return held[1]
