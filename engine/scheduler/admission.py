"""Admission control: limit open requests and their bytes; refuse at once, naming the limit.

Memory beyond the inputs of a request is bounded by the arenas, which have a fixed size.
"""

from __future__ import annotations

import math

from weftline.errors import LimitReached
from weftline.pipelines.spec.policy import Limits

RETRY_AFTER_S_MIN, RETRY_AFTER_S_MAX = 0.01, 5.0
"""Bounds of retry_after_s, the suggested delay before a refused request is sent again."""


JOBS_SHARE = 0.5
"""Limit on rows of jobs, as a share of the open requests and of the memory for inputs. The rest stays available to
interactive requests."""


class Admission:
    """Counts the open requests of one pipeline and the rate at which they end. Pure."""

    def __init__(self, limits: Limits, arena_bytes: int | None = None) -> None:
        """arena_bytes: size of the arena for inputs; None: limits.arena_bytes."""
        self._limits = limits
        self.requests = 0
        self.jobs = 0
        alone = limits.job_batch_ms == math.inf
        self._jobs_max = limits.requests_max if alone else max(1, int(limits.requests_max * JOBS_SHARE))
        self.job_bytes_max = job_bytes_max(limits, limits.arena_bytes if arena_bytes is None else arena_bytes)
        self.size_bytes = 0
        self._gap_ms = 100.0  # moving average of the time between two ends
        self._left_ms: float | None = None
        self._refused = 0  # since the last end

    def check(self, size_bytes: int, job: bool = False) -> None:
        """Raise LimitReached unless a request of `size_bytes` can be admitted."""
        limits = self._limits
        if size_bytes > limits.request_bytes_max:
            raise LimitReached(
                f"the request's inputs take {size_bytes} bytes; limits.request_bytes_max is {limits.request_bytes_max}"
            )
        if self.requests >= limits.requests_max:
            raise self._full(f"{self.requests} requests are open; limits.requests_max is {limits.requests_max}")
        if job and self.jobs >= self._jobs_max:
            most = f"at most {self._jobs_max} may be, by limits.requests_max, which is {limits.requests_max}"
            raise self._full(f"{self.jobs} rows of jobs are open; {most}")
        if self.size_bytes + size_bytes > limits.open_bytes_max:
            held = f"the inputs of open requests take {self.size_bytes} bytes"
            raise self._full(f"{held}; limits.open_bytes_max is {limits.open_bytes_max}")

    def enter(self, size_bytes: int, job: bool = False) -> None:
        """Count an admitted request; call `check` first."""
        self.requests += 1
        self.jobs += job
        self.size_bytes += size_bytes

    def leave(self, size_bytes: int, now_ms: float, job: bool = False) -> None:
        """Count the end of a request."""
        self.requests -= 1
        self.jobs -= job
        self.size_bytes -= size_bytes
        if self._left_ms is not None:
            self._gap_ms += 0.1 * (now_ms - self._left_ms - self._gap_ms)
        self._left_ms = now_ms
        self._refused = 0

    def retry_after_s(self) -> float:
        """Return the delay after which a request refused now should retry; it grows with each refusal."""
        self._refused += 1
        return min(max(self._gap_ms * self._refused / 1000, RETRY_AFTER_S_MIN), RETRY_AFTER_S_MAX)

    def _full(self, message: str) -> LimitReached:
        return LimitReached(message, self.retry_after_s())


def job_bytes_max(limits: Limits, arena_bytes: int) -> int:
    """Return the limit on ingress arena bytes of rows of jobs: all of it where jobs do not share it."""
    return arena_bytes if limits.job_batch_ms == math.inf else int(arena_bytes * JOBS_SHARE)
