"""What a step must not be given again: digests of items that killed its worker, for an hour.

An item is known by the SHA-256 of its inputs, never by its bytes. Each step remembers a limited number, the latest, so
that a stream of killers costs a bounded amount of memory and of comparing.
"""

from __future__ import annotations

DIGESTS_MAX = 256
"""Most digests a step remembers; the oldest goes first."""

KEPT_MS = 3_600_000.0
"""How long a digest is remembered, in milliseconds: an hour, after which its item gets another chance."""


class Quarantine:
    """Digests by step, oldest first."""

    def __init__(self) -> None:
        self._steps: dict[int, dict[bytes, float]] = {}  # step -> digest -> when it is forgotten, in rising order

    def add(self, step: int, digest: bytes, now_ms: float) -> bool:
        """Shut an item out of a step for an hour from now; False when it was already, and its hour begins anew."""
        self.forget(now_ms)
        digests = self._steps.setdefault(step, {})
        new = digests.pop(digest, None) is None
        digests[digest] = now_ms + KEPT_MS
        if len(digests) > DIGESTS_MAX:
            del digests[next(iter(digests))]
        return new

    def digests(self, step: int) -> tuple[bytes, ...]:
        """Return what the step must not be given, oldest first."""
        return tuple(self._steps.get(step, ()))

    def forget(self, now_ms: float) -> list[int]:
        """Drop what has been kept for an hour; return the steps whose digests changed, for workers to be told."""
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
