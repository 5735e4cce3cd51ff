"""Moments at which something is due: a heap of (time, name), where names can be taken back.

Taken-back entries stay in the heap until their time comes or they outnumber the others; cost is logarithmic.
"""

from __future__ import annotations

from heapq import heapify, heappop, heappush

Name = tuple[str, int]
"""What is due: a kind and an id."""

STALE_MAX = 256
"""How many entries that nobody waits for any more may lie in the heap, beyond as many as there are live ones."""


class Timers:
    """Named moments. Pure: it is told the time."""

    def __init__(self) -> None:
        self._at: dict[Name, float] = {}
        self._heap: list[tuple[float, Name]] = []

    @property
    def any(self) -> bool:
        return bool(self._at)

    def add(self, at_ms: float, name: Name) -> None:
        """Set a moment; one of the same name is replaced."""
        self._at[name] = at_ms
        heappush(self._heap, (at_ms, name))
        if len(self._heap) > 2 * len(self._at) + STALE_MAX:
            self._heap = [(at, name) for name, at in self._at.items()]
            heapify(self._heap)

    def __contains__(self, name: object) -> bool:
        """Whether a moment of this name is still to come."""
        return name in self._at

    def discard(self, name: Name) -> None:
        """Take a moment back; an unknown name is ignored."""
        self._at.pop(name, None)

    def due(self, now_ms: float) -> list[Name]:
        """Return and forget what is due, earliest first."""
        found = []
        while self._heap and self._heap[0][0] <= now_ms:
            at_ms, name = heappop(self._heap)
            if self._at.get(name) == at_ms:
                del self._at[name]
                found.append(name)
        return found

    def wake_at_ms(self) -> float | None:
        """Return when the next is due; None when there is none."""
        while self._heap and self._at.get(self._heap[0][1]) != self._heap[0][0]:
            heappop(self._heap)
        return self._heap[0][0] if self._heap else None
