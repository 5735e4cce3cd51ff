"""Whether a request that was refused is sent again, and when. Pure: time and chance come in as arguments.

Sending again helps against a moment of trouble and feeds a storm. So there is a budget: over the life of a client,
retries are at most a tenth of its requests, but for the first few of a short life. (gRFC A6 for pushback; Finagle for
the budget.)
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

SHARE = 0.1
"""Retries over requests, at most."""

LOAN = 3.0
"""Retries that a new client may make before it has earned any; earned ones pay it back first."""

SAVED_MAX = 10.0
"""Most retries that can be saved up: a long quiet time must not pay for a storm."""

FIRST_MS, LONGEST_MS, FACTOR = 50.0, 5_000.0, 2.0
"""Back-off: 50 ms, 100 ms, 200 ms ... up to 5 s, each with jitter."""

TRANSIENT = "UNAVAILABLE"
OVERLOAD = "RESOURCE_EXHAUSTED"


@dataclass(slots=True)
class Budget:
    """How many retries there may be: after n requests at most max(LOAN, n * SHARE). Thread-safe."""

    _saved: float = LOAN
    _owed: float = LOAN
    _guard: threading.Lock = field(default_factory=threading.Lock)

    def earn(self) -> None:
        """Count a request, however often it is sent."""
        with self._guard:
            if self._owed > 0:
                self._owed -= SHARE
            else:
                self._saved = min(SAVED_MAX, self._saved + SHARE)

    def try_spend(self) -> bool:
        """Take one retry; False when there is none."""
        with self._guard:
            if self._saved < 1.0:
                return False
            self._saved -= 1.0
            return True


@dataclass(slots=True)
class Patience:
    """One request's retries.

    retries:     most of them.
    until_ms:    when the request's time is up; None: never. On the clock that `after` is given.
    """

    budget: Budget
    retries: int
    until_ms: float | None = None
    _sent_again: int = 0

    def after(self, status: str, pushback_ms: float | None, now_ms: float, chance: float) -> float | None:
        """Return in how many ms to send again; None: do not.

        status:      gRPC status name of the refusal. Only UNAVAILABLE, and RESOURCE_EXHAUSTED with a pushback: a limit
                     that says nothing about later is no better later.
        pushback_ms: when the server wants to see the request again; negative: never; None: it did not say.
        chance:      from 0 to 1, spreads callers that were refused together.
        """
        if self._sent_again >= self.retries or (pushback_ms is not None and pushback_ms < 0):
            return None
        if status != TRANSIENT and not (status == OVERLOAD and pushback_ms is not None):
            return None
        if pushback_ms is None:
            wait_ms = min(LONGEST_MS, FIRST_MS * FACTOR**self._sent_again) * (0.5 + chance)
        else:
            wait_ms = pushback_ms * (1.0 + chance / 4)  # never sooner than it was asked for
        if self.until_ms is not None and now_ms + wait_ms >= self.until_ms:
            return None
        if not self.budget.try_spend():
            return None
        self._sent_again += 1
        return wait_ms
