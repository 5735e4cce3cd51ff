"""Quarantine: digests of items that killed their worker, by step, for one hour.

A digest is the SHA-256 of an item's inputs; the bytes are not kept. Each step keeps the latest DIGESTS_MAX digests, so
that memory and comparisons stay bounded. Workers compare the digests; see engine/worker. Pure.
"""

from __future__ import annotations

DIGESTS_MAX = 256
"""Most digests of a step; the oldest is dropped first."""

KEPT_MS = 3_600_000.0
"""Lifetime of a digest in milliseconds: one hour. Its item then runs again."""


class Quarantine:
    """Quarantined digests by step, oldest first."""

    def __init__(self) -> None:
        self._steps: dict[int, dict[bytes, float]] = {}  # step -> digest -> expiry, in rising order

    def add(self, step: int, digest: bytes, now_ms: float) -> bool:
        """Quarantine a digest for an hour; False if it was in quarantine, and its hour restarts."""
        self.forget(now_ms)
        digests = self._steps.setdefault(step, {})
        new = digests.pop(digest, None) is None
        digests[digest] = now_ms + KEPT_MS
        if len(digests) > DIGESTS_MAX:
            del digests[next(iter(digests))]
        return new

    def digests(self, step: int) -> tuple[bytes, ...]:
        """Return the quarantined digests of a step, oldest first."""
        return tuple(self._steps.get(step, ()))

    def forget(self, now_ms: float) -> list[int]:
        """Drop expired digests; return the steps whose digests changed, to update their workers."""
        changed = []
        for step, digests in list(self._steps.items()):
            old = [digest for digest, until_ms in digests.items() if until_ms <= now_ms]
            for digest in old:
                del digests[digest]
            if old:
                changed.append(step)
            if not digests:
                del self._steps[step]
        return changed
