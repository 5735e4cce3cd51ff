"""When a step stops waiting and runs a batch.

A Batcher holds the items that wait for one step and, told the time, says which of them leave together. It owns no
clock, no thread and no tensor: time comes in as an argument and the decision goes out as a return value, so a test of
it reads like a script.
"""

from __future__ import annotations

from itertools import islice

from weftline.pipelines.policy import BatchPolicy


class Batcher:
    """Items waiting for one step, oldest first. Adding, discarding and asking cost the same however many wait."""

    def __init__(self, policy: BatchPolicy) -> None:
        self.policy = policy
        self._waiting: dict[int, float] = {}  # item -> arrived_ms; a dict keeps arrival order

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, item: int, now_ms: float) -> None:
        self._waiting[item] = now_ms

    def discard(self, item: int) -> bool:
        """Take an item out, wherever it stands; False when it was not waiting."""
        return self._waiting.pop(item, None) is not None

    def take(self, now_ms: float, batches: int = 1) -> list[tuple[int, float]]:
        """Return the items that leave now as (item, arrived_ms), oldest first. Empty: waiting is still worth it.

        At most `batches` full batches leave; more than one is for steps so quick that messages would cost more than
        they do.
        """
        full = len(self._waiting) >= self.policy.items_max
        if not full and not self._overdue(now_ms):
            return []
        count = min(len(self._waiting), self.policy.items_max * batches)
        taken = list(islice(self._waiting.items(), count))
        for item, _ in taken:
            del self._waiting[item]
        return taken

    def oldest_ms(self) -> float | None:
        """When the oldest item arrived; None when empty."""
        return next(iter(self._waiting.values()), None)

    def wake_at_ms(self) -> float | None:
        """When `take` would next return something if nothing arrives; None when empty."""
        oldest = self.oldest_ms()
        if oldest is None:
            return None
        return oldest if len(self._waiting) >= self.policy.items_max else oldest + self.policy.wait_max_ms

    def _overdue(self, now_ms: float) -> bool:
        wake = self.wake_at_ms()
        return wake is not None and now_ms >= wake
