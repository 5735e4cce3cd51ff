"""Fair queue: share a resource among callers by cost, in the order of start-time fair queuing.

Each caller has a queue in order of arrival. The head of each queue has a start tag: the finish tag of the caller's
previous item, or the virtual time if that is later. An item's finish tag is its start tag plus cost / weight. The item
with the smallest start tag is next, and the virtual time becomes its start tag. (P. Goyal, H. Vin, H. Cheng: Start-Time
Fair Queueing, SIGCOMM 1996.)

- A caller with a backlog delays another caller's item by at most one item of each caller, whatever its backlog.
- An idle caller saves no credit, and owes at most the cost of its last items.
- A cost that is known only afterwards is corrected by `charge`.

A full queue refuses the newest item of the caller with the most items, so one caller cannot fill it for the others.
Pure, and not thread-safe. An operation takes O(log callers), times the callers that it passes over; `add` to a full
queue takes O(callers), and `discard` O(items of the caller).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Container, Hashable
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from typing import Generic, TypeVar

T = TypeVar("T")

IDLE_CALLERS_MAX = 1024
"""Most callers without an item whose finish tags are kept; above that, their debts are forgotten."""

_Entry = tuple[float, int, "_Caller[T]"]  # start tag, serial number


@dataclass(slots=True, eq=False)
class _Caller(Generic[T]):
    """One caller. finish: finish tag of its last popped item; entry: that of its head in the heap, None without one."""

    name: Hashable
    finish: float = 0.0
    entry: _Entry[T] | None = None
    items: deque[tuple[T, float]] = field(default_factory=deque)  # with cost / weight


class FairQueue(Generic[T]):
    """The waiting items of all callers.

    items_max: most items; `add` refuses one item above that.
    size:      number of items.
    """

    def __init__(self, items_max: int) -> None:
        self.items_max = items_max
        self._callers: dict[Hashable, _Caller[T]] = {}
        self._heads: list[_Entry[T]] = []  # one valid entry per caller with items, and invalid ones
        self.size = 0
        self._serial = 0
        self._virtual = 0.0

    def __len__(self) -> int:
        return self.size

    def waiting(self, caller: Hashable) -> int:
        """Return the number of a caller's items."""
        found = self._callers.get(caller)
        return len(found.items) if found is not None else 0

    def add(self, item: T, caller: Hashable, cost: float, weight: float = 1.0) -> T | None:
        """Queue an item; return the item that is refused for it when the queue is full, perhaps the new one.

        caller: key of the caller, such as its name.
        cost:   what the item takes of the resource, over 0, in any unit that all items share (seconds, bytes, tokens).
        weight: share of the caller, relative to those of the others.
        """
        if not (cost > 0 and weight > 0):
            raise ValueError(f"found cost {cost} and weight {weight}, expected both over 0")
        own = self._callers.get(caller)
        if own is None:
            self._forget_idle()
            own = self._callers[caller] = _Caller(caller)
        own.items.append((item, cost / weight))
        self.size += 1
        if len(own.items) == 1:
            self._push(own)
        return self._pop_newest(own) if self.size > self.items_max else None

    def first(self, skip: Container[Hashable] = ()) -> T | None:
        """Return the next item, which stays queued; None without one. skip: callers that are passed over."""
        head = self._head(skip)
        return head.items[0][0] if head is not None else None

    def pop(self, skip: Container[Hashable] = ()) -> T:
        """Remove and return the next item, and charge its cost to its caller; IndexError without one.

        skip: callers that are passed over, such as those that hold as many servers of the queue as they may.
        """
        head = self._head(skip)
        if head is None or head.entry is None:
            raise IndexError("no item is queued")
        return self._pop_head(head)

    def take(self, item: T, caller: Hashable) -> None:
        """Remove the first item of a caller, as returned by `first`, and charge its cost."""
        own = self._callers[caller]
        if own.items[0][0] is not item:
            raise ValueError("the item is not the caller's first")
        self._pop_head(own)

    def _pop_head(self, head: _Caller[T]) -> T:
        start = max(self._virtual, head.finish) if head.entry is None else head.entry[0]
        item, cost = head.items.popleft()
        self.size -= 1
        self._virtual = max(self._virtual, start)
        head.finish = start + cost
        head.entry = None  # the heap drops its entry later
        if head.items:
            self._push(head)
        return item

    def charge(self, caller: Hashable, cost: float, weight: float = 1.0) -> None:
        """Add to the cost of a caller's popped items; a negative cost corrects an estimate that was too high."""
        own = self._callers.get(caller)
        if own is None:
            if cost <= 0:
                return
            self._forget_idle()
            own = self._callers[caller] = _Caller(caller, self._virtual)
        own.finish += cost / weight
        if own.items:
            self._push(own)

    def discard(self, item: T, caller: Hashable) -> bool:
        """Remove a waiting item of a caller at no cost; False if it is not queued."""
        own = self._callers.get(caller)
        at = next((at for at, (one, _) in enumerate(own.items) if one is item), None) if own is not None else None
        if own is None or at is None:
            return False
        del own.items[at]
        self._removed(own)
        return True

    def _pop_newest(self, adding: _Caller[T]) -> T:
        """Remove the newest item of the caller with the most items; the adding caller's if several have as many."""
        most = max(self._callers.values(), key=lambda one: (len(one.items), one is adding))
        item, _ = most.items.pop()
        self._removed(most)
        return item

    def _removed(self, caller: _Caller[T]) -> None:
        self.size -= 1
        if not caller.items:
            caller.entry = None  # its entry in the heap is no longer valid

    def _push(self, caller: _Caller[T]) -> None:
        """Give the caller's head a start tag."""
        self._serial += 1
        caller.entry = (max(self._virtual, caller.finish), self._serial, caller)
        heappush(self._heads, caller.entry)
        if len(self._heads) > 2 * len(self._callers) + 32:
            self._heads = [one for one in self._heads if one[2].entry is one]
            heapify(self._heads)

    def _head(self, skip: Container[Hashable]) -> _Caller[T] | None:
        """Return the caller whose head is next."""
        heads, passed = self._heads, []
        while heads and (heads[0][2].entry is not heads[0] or heads[0][2].name in skip):
            if (entry := heappop(heads))[2].entry is entry:
                passed.append(entry)
        found = heads[0][2] if heads else None
        for entry in passed:
            heappush(heads, entry)
        return found

    def _forget_idle(self) -> None:
        """Drop the callers without items when they are many."""
        if len(self._callers) < IDLE_CALLERS_MAX:
            return
        kept = {name: one for name, one in self._callers.items() if one.items}
        if len(self._callers) - len(kept) >= IDLE_CALLERS_MAX:
            self._callers = kept
