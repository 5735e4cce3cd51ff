"""Items that may share a batch and wait for it: by urgency, by arrival and by deadline.

A Line finds the most urgent item, the oldest and the one that is due first. Items that come in order of all three, as
most do, stand in a plain queue; the others in heaps. An item that is taken out is only forgotten by the `alive` map
that its Line was given; what is left of it in queue and heaps is passed over later, and swept when it gets much.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Hashable
from heapq import heapify, heappop, heappush
from typing import NamedTuple

SWEEP_MIN = 32
"""Entries of items that are gone are swept when there are more than this beyond twice those that wait."""


class Waiting(NamedTuple):
    """One item that waits, in the order of its urgency: the smaller key first, then the earlier serial number."""

    key: float
    serial: int
    item: int
    arrived_ms: float
    due_ms: float
    line: Line


class Line:
    """The waiting items of one group.

    group:    what they have in common.
    size:     how many wait.
    leave_ms: kept by the Batcher: when its next batch leaves; None when that has to be worked out again.
    """

    __slots__ = ("_alive", "_arrivals", "_dues", "_heap", "_queue", "group", "leave_ms", "size")

    def __init__(self, group: Hashable, alive: dict[int, Waiting]) -> None:
        self.group = group
        self.size = 0
        self.leave_ms: float | None = None
        self._alive = alive
        self._queue: deque[Waiting] = deque()  # rising in key, arrived_ms and due_ms
        self._heap: list[Waiting] = []
        self._arrivals: list[tuple[float, int, Waiting]] = []  # of those in the heap
        self._dues: list[tuple[float, int, Waiting]] = []  # of those in the heap that are ever due

    def add(self, entry: Waiting) -> None:
        """Take in an item that the `alive` map holds already."""
        self.size += 1
        queue = self._queue
        if queue:
            last = queue[-1]
            if entry.key < last.key or entry.arrived_ms < last.arrived_ms or entry.due_ms < last.due_ms:
                heappush(self._heap, entry)
                heappush(self._arrivals, (entry.arrived_ms, entry.serial, entry))
                if entry.due_ms < math.inf:
                    heappush(self._dues, (entry.due_ms, entry.serial, entry))
                return
        queue.append(entry)

    def removed(self) -> None:
        """Take note that one item was removed from the `alive` map."""
        self.size -= 1
        self.sweep()

    def pop(self, count: int) -> list[int]:
        """Remove the most urgent items, from the `alive` map too, and return them; there must be so many."""
        taken: list[int] = []
        queue, heap, alive = self._queue, self._heap, self._alive
        while len(taken) < count:
            if heap and (not queue or heap[0] < queue[0]):
                entry = heappop(heap)
            else:
                entry = queue.popleft()
            if alive.get(entry.item) is entry:
                del alive[entry.item]
                taken.append(entry.item)
        self.size -= count
        if self._arrivals:
            self.sweep()
        return taken

    def first(self) -> Waiting | None:
        """Return the most urgent item."""
        front, heap, alive = self._front(), self._heap, self._alive
        while heap and alive.get(heap[0].item) is not heap[0]:
            heappop(heap)
        return heap[0] if heap and (front is None or heap[0] < front) else front

    def oldest_ms(self) -> float:
        """Return when the oldest item arrived; infinity when nothing waits."""
        front = self._front()
        oldest = front.arrived_ms if front is not None else math.inf
        return min(oldest, self._soonest(self._arrivals)) if self._arrivals else oldest

    def due_ms(self) -> float:
        """Return when the first item is due; infinity when none ever is."""
        front = self._front()
        due = front.due_ms if front is not None else math.inf
        return min(due, self._soonest(self._dues)) if self._dues else due

    def due_first(self) -> Waiting | None:
        """Return the item that is due first; None when nothing waits or nothing is ever due."""
        front = self._front()
        if self._soonest(self._dues) < (front.due_ms if front is not None else math.inf):
            return self._dues[0][2]
        return front if front is not None and front.due_ms < math.inf else None

    def sweep(self) -> None:
        """Forget entries of items that are gone, when there are many."""
        most = 2 * self.size + SWEEP_MIN
        alive = self._alive
        if not self.size or len(self._queue) > most:
            self._queue = deque(entry for entry in self._queue if alive.get(entry.item) is entry)
        if len(self._heap) > most:
            self._heap = [entry for entry in self._heap if alive.get(entry.item) is entry]
            heapify(self._heap)
        if len(self._arrivals) > most:
            self._arrivals = self._swept(self._arrivals)
        if len(self._dues) > most:
            self._dues = self._swept(self._dues)

    def _front(self) -> Waiting | None:
        queue, alive = self._queue, self._alive
        while queue:
            entry = queue[0]
            if alive.get(entry.item) is entry:
                return entry
            queue.popleft()
        return None

    def _soonest(self, heap: list[tuple[float, int, Waiting]]) -> float:
        while heap and self._alive.get(heap[0][2].item) is not heap[0][2]:
            heappop(heap)
        return heap[0][0] if heap else math.inf

    def _swept(self, heap: list[tuple[float, int, Waiting]]) -> list[tuple[float, int, Waiting]]:
        kept = [one for one in heap if self._alive.get(one[2].item) is one[2]]
        heapify(kept)
        return kept
