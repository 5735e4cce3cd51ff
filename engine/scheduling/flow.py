"""Who may come in: so many requests at a time, so many bytes; over a limit an immediate refusal that names it.

What a request holds beyond its inputs is bounded by the arenas, which have a fixed size.
"""

from __future__ import annotations

import math

from weftline.errors import LimitReached
from weftline.pipelines.policy import Limits

RETRY_AFTER_S_MIN, RETRY_AFTER_S_MAX = 0.01, 5.0
"""Bounds of what a refused caller is told to wait before trying again."""


JOBS_SHARE = 0.5
"""Rows of jobs have at most this share of the open requests, and of the room for inputs, so that usual ones find some
beside them."""


class Admission:
    """Counts what is inside one pipeline, and how quickly it leaves. Pure."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self.requests = 0
        self.jobs = 0
        alone = limits.job_batch_ms == math.inf
        self._jobs_max = limits.requests_max if alone else max(1, int(limits.requests_max * JOBS_SHARE))
        self.job_bytes_max = job_bytes_max(limits)
        self.size_bytes = 0
        self._gap_ms = 100.0  # between two that leave, as a moving average
        self._left_ms: float | None = None
        self._refused = 0  # since somebody last left

    def check(self, size_bytes: int, job: bool = False) -> None:
        """Raise LimitReached unless a request of `size_bytes` may come in."""
        limits = self._limits
        if size_bytes > limits.request_bytes_max:
            raise LimitReached(
                f"the request's inputs take {size_bytes} bytes; limits.request_bytes_max is {limits.request_bytes_max}"
            )
        if self.requests >= limits.requests_max:
            raise self._full(f"{self.requests} requests are open; limits.requests_max is {limits.requests_max}")
        if job and self.jobs >= self._jobs_max:
            most = f"they may be {self._jobs_max} of limits.requests_max, which is {limits.requests_max}"
            raise self._full(f"{self.jobs} rows of jobs are open; {most}")
        if self.size_bytes + size_bytes > limits.open_bytes_max:
            held = f"the inputs of open requests take {self.size_bytes} bytes"
            raise self._full(f"{held}; limits.open_bytes_max is {limits.open_bytes_max}")

    def enter(self, size_bytes: int, job: bool = False) -> None:
        """Count a request in; `check` said that it may."""
        self.requests += 1
        self.jobs += job
        self.size_bytes += size_bytes

    def leave(self, size_bytes: int, now_ms: float, job: bool = False) -> None:
        """Count a request out."""
        self.requests -= 1
        self.jobs -= job
        self.size_bytes -= size_bytes
        if self._left_ms is not None:
            self._gap_ms += 0.1 * (now_ms - self._left_ms - self._gap_ms)
        self._left_ms = now_ms
        self._refused = 0

    def retry_after_s(self) -> float:
        """Return when a place should be free for one who is refused now: each refused one stands behind the others."""
        self._refused += 1
        return min(max(self._gap_ms * self._refused / 1000, RETRY_AFTER_S_MIN), RETRY_AFTER_S_MAX)

    def _full(self, message: str) -> LimitReached:
        return LimitReached(message, self.retry_after_s())


def job_bytes_max(limits: Limits) -> int:
    """Return how many bytes of the ingress arena rows of jobs may have: all of it where a job is alone."""
    return limits.arena_bytes if limits.job_batch_ms == math.inf else int(limits.arena_bytes * JOBS_SHARE)
