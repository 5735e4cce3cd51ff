"""Who may come in: so many requests at a time, each of so many bytes; over a limit an immediate refusal that names it.

What all of them hold together is bounded by the arenas, which have a fixed size.
"""

from __future__ import annotations

from weftline.errors import LimitReached
from weftline.pipelines.policy import Limits

RETRY_AFTER_S = 0.1
"""What a refused caller is told to wait before trying again."""


class Admission:
    """Counts what is inside one pipeline. Pure: it decides and remembers one number."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self.requests = 0

    def admit(self, size_bytes: int) -> None:
        """Count a request of `size_bytes` in, or raise LimitReached."""
        limits = self._limits
        if size_bytes > limits.request_bytes_max:
            raise LimitReached(
                f"the request's inputs take {size_bytes} bytes; limits.request_bytes_max is {limits.request_bytes_max}"
            )
        if self.requests >= limits.requests_max:
            raise LimitReached(
                f"{self.requests} requests are open; limits.requests_max is {limits.requests_max}",
                RETRY_AFTER_S,
            )
        self.requests += 1

    def leave(self) -> None:
        """Count a request out."""
        self.requests -= 1
