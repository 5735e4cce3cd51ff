"""Restart policy of a worker: exponential back-off, and when to give up.

Deaths in service and deaths before a worker was ever ready are different: the second kind is a crash loop, and only a
crash loop makes a step unavailable. A worker that was stopped because its steps were idle is not restarted but started
on demand: see workers.py and idle.py.
"""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RestartPolicy:
    """Restart policy of a worker: exponential back-off and a crash limit.

    first_ms, longest_ms: back-off doubles from the first to the longest; jitter takes up to half of it away.
    crashes_max:          more deaths before ready than this within window_ms, and the worker is given up.
    """

    first_ms: float = 100.0
    longest_ms: float = 30_000.0
    crashes_max: int = 5
    window_ms: float = 60_000.0


class Restarts:
    """The death history of one worker."""

    def __init__(self, policy: RestartPolicy, seed: int) -> None:
        self._policy = policy
        self._random = random.Random(seed)
        self._crashes: deque[float] = deque()
        self._in_a_row = 0

    def ready(self) -> None:
        """The worker came up; the back-off starts over."""
        self._in_a_row = 0
        self._crashes.clear()

    def died(self, now_ms: float, *, was_ready: bool) -> float | None:
        """Return in how many milliseconds to start it again, or None to give it up."""
        policy = self._policy
        if not was_ready:
            self._crashes.append(now_ms)
            while self._crashes[0] < now_ms - policy.window_ms:
                self._crashes.popleft()
            if len(self._crashes) > policy.crashes_max:
                return None
        delay = min(policy.first_ms * 2**self._in_a_row, policy.longest_ms)
        self._in_a_row += 1
        return float(delay * (1 - self._random.random() / 2))
