"""Named timers: a heap of (time, name) in which names can be cancelled.

Cancelled entries stay in the heap until they are due or outnumber the others. Each operation is logarithmic.
"""

from __future__ import annotations

from heapq import heapify, heappop, heappush

Name = tuple[str, int]
"""Name of a timer: a kind and an id."""

STALE_MAX = 256
"""The heap is rebuilt when its cancelled entries exceed the live ones by more than this."""


class Timers:
    """Named timers. Pure: time is an argument."""

    def __init__(self) -> None:
        self.at: dict[Name, float] = {}
        self._heap: list[tuple[float, Name]] = []

    @property
    def any(self) -> bool:
        return bool(self.at)

    def add(self, at_ms: float, name: Name) -> None:
        """Set a timer; it replaces one of the same name."""
        self.at[name] = at_ms
        heappush(self._heap, (at_ms, name))
        if len(self._heap) > 2 * len(self.at) + STALE_MAX:
            self._heap = [(at, name) for name, at in self.at.items()]
            heapify(self._heap)

    def __contains__(self, name: object) -> bool:
        """Return True if a timer of this name is set."""
        return name in self.at

    def discard(self, name: Name) -> None:
        """Cancel a timer; an unknown name is ignored."""
        self.at.pop(name, None)

    def due(self, now_ms: float) -> list[Name]:
        """Pop the due timers, earliest first."""
        found = []
        while self._heap and self._heap[0][0] <= now_ms:
            at_ms, name = heappop(self._heap)
            if self.at.get(name) == at_ms:
                del self.at[name]
                found.append(name)
        return found

    def wake_at_ms(self) -> float | None:
        """Return when the next timer is due; None if none is set."""
        while self._heap and self.at.get(self._heap[0][1]) != self._heap[0][0]:
            heappop(self._heap)
        return self._heap[0][0] if self._heap else None
