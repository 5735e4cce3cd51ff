"""Priority queue of the items that may share a batch: most urgent, oldest, and first due.

Items that arrive in the order of all three, as most do, are kept in a FIFO queue, the others in heaps. Removal is lazy:
an item is deleted from the `alive` map, its entries in queue and heaps are skipped later, and they are swept when there
are many. When a batch closes is decided by the Batcher.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Hashable
from heapq import heapify, heappop, heappush
from typing import NamedTuple

SWEEP_MIN = 32
"""Entries are swept when there are more than twice the queued items plus this."""


class QueuedItem(NamedTuple):
    """A queued item, ordered by key (smaller is more urgent), then by serial number."""

    key: float
    serial: int
    item: int
    arrived_ms: float
    due_ms: float
    line: PriorityQueue


class PriorityQueue:
    """The queued items of one group.

    group:    the key that the items share.
    size:     number of queued items.
    leave_ms: cache of the Batcher: when the next batch closes; None when it must be computed again.
    """

    __slots__ = ("_alive", "_arrivals", "_dues", "_heap", "_queue", "group", "leave_ms", "size")

    def __init__(self, group: Hashable, alive: dict[int, QueuedItem]) -> None:
        self.group = group
        self.size = 0
        self.leave_ms: float | None = None
        self._alive = alive
        self._queue: deque[QueuedItem] = deque()  # rising in key, arrived_ms and due_ms
        self._heap: list[QueuedItem] = []
        self._arrivals: list[tuple[float, int, QueuedItem]] = []  # of those in the heap
        self._dues: list[tuple[float, int, QueuedItem]] = []  # of those in the heap that are ever due

    def add(self, entry: QueuedItem) -> None:
        """Add an item that is in the `alive` map already."""
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
        """Count an item that was removed from the `alive` map."""
        self.size -= 1
        self.sweep()

    def pop(self, count: int) -> list[int]:
        """Pop the `count` most urgent items, from the `alive` map too; at least `count` must be queued."""
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

    def first(self) -> QueuedItem | None:
        """Return the most urgent item."""
        front, heap, alive = self._front(), self._heap, self._alive
        while heap and alive.get(heap[0].item) is not heap[0]:
            heappop(heap)
        return heap[0] if heap and (front is None or heap[0] < front) else front

    def oldest_ms(self) -> float:
        """Return the arrival time of the oldest item; infinity when empty."""
        front = self._front()
        oldest = front.arrived_ms if front is not None else math.inf
        return min(oldest, self._soonest(self._arrivals)) if self._arrivals else oldest

    def due_ms(self) -> float:
        """Return the earliest deadline; infinity when no item has one."""
        front = self._front()
        due = front.due_ms if front is not None else math.inf
        return min(due, self._soonest(self._dues)) if self._dues else due

    def due_first(self) -> QueuedItem | None:
        """Return the item with the earliest deadline; None when no item has one."""
        front = self._front()
        if self._soonest(self._dues) < (front.due_ms if front is not None else math.inf):
            return self._dues[0][2]
        return front if front is not None and front.due_ms < math.inf else None

    def sweep(self) -> None:
        """Drop the entries of removed items, when there are many."""
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

    def _front(self) -> QueuedItem | None:
        queue, alive = self._queue, self._alive
        while queue:
            entry = queue[0]
            if alive.get(entry.item) is entry:
                return entry
            queue.popleft()
        return None

    def _soonest(self, heap: list[tuple[float, int, QueuedItem]]) -> float:
        while heap and self._alive.get(heap[0][2].item) is not heap[0][2]:
            heappop(heap)
        return heap[0][0] if heap else math.inf

    def _swept(self, heap: list[tuple[float, int, QueuedItem]]) -> list[tuple[float, int, QueuedItem]]:
        kept = [one for one in heap if self._alive.get(one[2].item) is one[2]]
        heapify(kept)
        return kept
