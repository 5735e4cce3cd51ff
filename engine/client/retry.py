"""Retry with exponential back-off and a retry budget.

Pure: time and random numbers are arguments. Retries help against short failures and amplify overload. So there is a
budget: over the life of a client, retries are at most a tenth of its requests, except for its first few. (gRFC A6 for
pushback; Finagle for the budget.)
"""

from __future__ import annotations

import threading
from dataclasses import dataclass

from weftline.engine.token_bucket import RetryBudget

SHARE = 0.1
"""Retries over requests, at most."""

LOAN = 3.0
"""Retries that a new client may make before it has earned any; earned ones pay it back first."""

FIRST_MS, LONGEST_MS, FACTOR = 50.0, 5_000.0, 2.0
"""Back-off: 50 ms, 100 ms, 200 ms ... up to 5 s, each with jitter."""

TRANSIENT = "UNAVAILABLE"
OVERLOAD = "RESOURCE_EXHAUSTED"


class SharedRetryBudget:
    """Retry budget of all requests of a client; thread-safe."""

    def __init__(self) -> None:
        self._budget = RetryBudget(SHARE, LOAN, loan=True)
        self._lock = threading.Lock()

    def first(self) -> None:
        """Count a request, however often it is sent."""
        with self._lock:
            self._budget.first()

    def try_take(self) -> bool:
        """Take one retry; False when the budget is used up."""
        with self._lock:
            return self._budget.try_take()


@dataclass(slots=True)
class RetryState:
    """Retries of one request.

    retries:  their limit.
    until_ms: the request's deadline, on the clock of `after`; None: without one.
    """

    budget: SharedRetryBudget
    retries: int
    until_ms: float | None = None
    _sent_again: int = 0

    def after(self, status: str, pushback_ms: float | None, now_ms: float, random: float) -> float | None:
        """Return the delay in ms before the next retry; None: do not retry.

        status:      gRPC status name of the refusal. UNAVAILABLE is retried, and RESOURCE_EXHAUSTED with a pushback:
                     without one, the limit is permanent.
        pushback_ms: delay that the server asks for; negative: do not retry; None: not set.
        random:      number from 0 to 1, for jitter.
        """
        if self._sent_again >= self.retries or (pushback_ms is not None and pushback_ms < 0):
            return None
        if status != TRANSIENT and not (status == OVERLOAD and pushback_ms is not None):
            return None
        if pushback_ms is None:
            wait_ms = min(LONGEST_MS, FIRST_MS * FACTOR**self._sent_again) * (0.5 + random)
        else:
            wait_ms = pushback_ms * (1.0 + random / 4)  # at least the server's pushback
        if self.until_ms is not None and now_ms + wait_ms >= self.until_ms:
            return None
        if not self.budget.try_take():
            return None
        self._sent_again += 1
        return wait_ms
