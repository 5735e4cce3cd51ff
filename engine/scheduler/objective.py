"""The latency objective of a pipeline (`slo.latency_p99_ms`): measured and reported; no request fails by it."""

from __future__ import annotations

import math
from collections import deque
from typing import Any

RECENT_MAX = 1000
"""Answers that the current p99 covers: the 10 slowest of them lie above it."""


class LatencyObjective:
    """Measure the latency of answered requests against the objective; None: measure nothing.

    Latency counts from the call to the last output. Rows of jobs and requests that were not answered are left out.
    """

    def __init__(self, latency_p99_ms: float | None) -> None:
        self.latency_p99_ms = latency_p99_ms
        self._answers = 0
        self._over = 0
        self._recent_ms: deque[float] = deque(maxlen=RECENT_MAX)

    def add(self, latency_ms: float) -> None:
        """Count one answer."""
        if self.latency_p99_ms is None:
            return
        self._answers += 1
        self._over += latency_ms > self.latency_p99_ms
        self._recent_ms.append(latency_ms)

    def stats(self) -> dict[str, Any]:
        """Return the objective, the answers and those over it since the start, and the p99 of recent ones.

        The p99 is a latency that was seen (nearest rank). It and `met` are None before the first answer.
        """
        if self.latency_p99_ms is None:
            return {}
        recent = sorted(self._recent_ms)
        p99_ms = recent[math.ceil(0.99 * len(recent)) - 1] if recent else None
        return {
            "latency_p99_ms": self.latency_p99_ms,
            "answers": self._answers,
            "over": self._over,
            "recent": len(recent),
            "recent_p99_ms": p99_ms,
            "met": None if p99_ms is None else p99_ms <= self.latency_p99_ms,
        }
