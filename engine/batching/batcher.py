"""When a step stops waiting and runs a batch, and which items are in it.

A Batcher holds the items that wait for one step and, told the time, says which of them leave together. It owns no
clock, no thread and no tensor: time comes in as an argument and the decision goes out as a return value, so a test of
it reads like a script.

A batch leaves when it is full, when its oldest item has waited long enough, when longer waiting would cost an item its
deadline, or, under `wait: auto`, when waiting for one more does not pay. The most urgent item goes first: the one with
the earliest latest start, moved by its priority. Keys never change while an item waits, and later ones are larger, so
everything gets its turn: that is the whole of ageing.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Hashable

from weftline.engine.batching.latency import SHARE, Latency
from weftline.engine.batching.line import Line, Waiting
from weftline.nodes.urgency import PATIENCE_MS, PRIORITY_STEP_MS
from weftline.pipelines.policy import BatchPolicy

SLACK_MARGIN_MS = 5.0
"""A batch leaves this much before it must: waking up may take a millisecond or two, and so may messages."""

GAPS_WAITED = 2.0
"""Under `wait: auto`, an arrival that has not come after so many usual gaps is waited for no longer."""


class Batcher:
    """Items waiting for one step. What is asked costs the same however many wait; it grows with the waiting groups.

    waiting: the items themselves, to be looked at only.
    """

    def __init__(self, policy: BatchPolicy, latency: Latency | None = None) -> None:
        self.policy = policy
        self._latency = latency if latency is not None else Latency()
        self._by_deadline = policy.order == "deadline"
        self._auto = policy.wait == "auto"
        self._wait_ms = policy.wait_ms
        self.waiting: dict[int, Waiting] = {}
        self._lines: dict[Hashable, Line] = {}
        self._serial = 0
        self._now_ms = -math.inf
        self._last_ms = -math.inf  # when the last item came
        self._gap_ms = math.nan  # moving average of the time between arrivals; not a number until two came
        self._learned = 0  # Latency.samples when the lines' leave_ms were worked out
        self.items_max = policy.items_max

    @property
    def items_max(self) -> int:
        """Most items in one batch: the policy's, or fewer while there is too little memory for so many."""
        return self._items_max

    @items_max.setter
    def items_max(self, items: int) -> None:
        self._items_max = max(1, items)
        fitting = [size for size in self.policy.sizes if size <= self._items_max]
        self._sizes = sorted(fitting)
        self._goal = max(fitting, default=self._items_max)
        self._forget_times()

    def __len__(self) -> int:
        return len(self.waiting)

    def add(
        self,
        item: int,
        now_ms: float,
        *,
        group: Hashable = None,
        priority: int = 0,
        due_ms: float = math.inf,
        arrived_ms: float | None = None,
    ) -> None:
        """Let an item wait.

        group:      only items of one group share a batch.
        due_ms:     when the step must be done with it for the request to make its deadline.
        arrived_ms: when it came first, for one that comes back.
        """
        if item in self.waiting:
            raise ValueError(f"item {item} waits already; discard it before it is added again")
        if arrived_ms is None:
            arrived_ms = now_ms
        key = arrived_ms + PATIENCE_MS
        if not self._by_deadline:
            due_ms = math.inf
        else:
            if due_ms < math.inf:
                key = min(key, due_ms - self._latency.run_ms(1))
            if priority:
                key -= priority * PRIORITY_STEP_MS
        self._now_ms = now_ms
        if self._auto:
            self._learn_gap(now_ms)
        line = self._lines.get(group)
        if line is None:
            if not self.waiting:
                self._lines.clear()
            line = self._lines[group] = Line(group, self.waiting)
        self._serial += 1
        line.leave_ms = None
        # tuple.__new__ makes a Waiting at half the cost of calling it; this runs for every item of every step
        self.waiting[item] = entry = tuple.__new__(Waiting, (key, self._serial, item, arrived_ms, due_ms, line))
        line.add(entry)

    def discard(self, item: int) -> bool:
        """Take an item out, wherever it stands; False when it was not waiting."""
        entry = self.waiting.pop(item, None)
        if entry is None:
            return False
        line = entry.line
        line.removed()
        self._changed(line)
        return True

    def take(self, now_ms: float, batches: int = 1) -> list[int]:
        """Return the items that leave now, all of one group, the most urgent first. Empty: waiting is still worth it.

        At most `batches` full batches leave; more than one is for steps so quick that messages would cost more than
        they do.
        """
        self._now_ms = now_ms
        line = self._due_line(now_ms)
        if line is None:
            return []
        count = self._count(line, now_ms)
        if batches > 1 and count == self._items_max:
            whole = min(line.size // count, batches) * count
            count = whole if self._wait_ms > 0 else min(line.size, count * batches)
        taken = line.pop(count)
        self._changed(line)
        return taken

    def late(self, now_ms: float) -> list[int]:
        """Remove and return the items that would miss their deadline even if they left now, the first due first.

        While more wait than one batch holds, an item is judged by the time of a full batch, else by that of a call
        with half of those who wait: for one item's sake a batch is not made smaller than that. Nothing is late by times
        that are unknown or old.
        """
        self._now_ms = now_ms
        gone: list[int] = []
        if not self._by_deadline or not self.waiting or not self._latency.fresh(now_ms):
            return gone
        for line in list(self._lines.values()):
            while (entry := line.due_first()) is not None and now_ms > entry.due_ms - self._least_ms():
                self.discard(entry.item)
                gone.append(entry.item)
        return gone

    def wake_at_ms(self) -> float | None:
        """When `take` or `late` would next return something if nothing arrives; None when empty."""
        if not self.waiting:
            return None
        soonest = min(self._leaves_ms(line) for line in self._lines.values())
        if self._by_deadline and self._latency.fresh(self._now_ms):
            due = min(line.due_ms() for line in self._lines.values())
            soonest = min(soonest, math.nextafter(due - self._least_ms(), math.inf))
        return soonest

    def oldest_ms(self) -> float | None:
        """When the oldest item arrived; None when empty."""
        return min(line.oldest_ms() for line in self._lines.values()) if self.waiting else None

    def urgency(self) -> float | None:
        """The key of the most urgent item, in milliseconds; the smaller is the more urgent, between steps too."""
        return min((first.key for line in self._lines.values() if (first := line.first())), default=None)

    def _due_line(self, now_ms: float) -> Line | None:
        """Return the line whose batch leaves now; of several the one with the most urgent item."""
        best: Waiting | None = None
        for line in self._lines.values():
            if not line.size or not (line.size >= self._goal or self._leaves_ms(line) <= now_ms):
                continue
            if len(self._lines) == 1:
                return line
            entry = line.first()
            if entry is not None and (best is None or entry < best):
                best = entry
        return best.line if best is not None else None

    def _count(self, line: Line, now_ms: float) -> int:
        """Return how many items the batch that leaves now has."""
        count = min(line.size, self._goal)
        if self._sizes and count < self._goal:
            fitting = bisect_right(self._sizes, count)
            count = self._sizes[fitting - 1] if fitting else count
        if 1 < line.size <= self._items_max and self._by_deadline:
            first = line.first()
            left_ms = first.due_ms - now_ms if first is not None else math.inf
            if self._latency.run_ms(1) <= left_ms < self._latency.run_ms(count):
                return bisect_right(range(1, count), left_ms, key=self._latency.run_ms)
        return count

    def _leaves_ms(self, line: Line) -> float:
        """Return when the line's next batch leaves if nothing arrives; when that is now or was before, a past time."""
        if self._learned != self._latency.samples:
            self._forget_times()
        if line.leave_ms is None:
            line.leave_ms = self._work_out(line)
        return line.leave_ms

    def _work_out(self, line: Line) -> float:
        oldest = line.oldest_ms()
        if line.size >= self._goal or self._wait_ms <= 0:
            return oldest
        soonest = oldest + self._wait_ms
        due = line.due_ms()
        if due < math.inf:
            soonest = min(soonest, due - self._latency.run_ms(line.size + 1) - SLACK_MARGIN_MS)
        if self._auto:
            soonest = min(soonest, self._pays_until_ms(line.size))
        return max(soonest, oldest)

    def _pays_until_ms(self, count: int) -> float:
        """Return until when waiting for one more item pays: it lowers the sum of the latencies of all of them."""
        now_alone, now_all, later = (self._latency.run_ms(items) for items in (1, count, count + 1))
        gap = self._gap_ms * len(self._lines)  # the next to arrive is as likely of any group
        if not later or math.isnan(gap):
            return -math.inf
        waiting = count * (gap + later) + later
        leaving = count * now_all + max(now_all - gap, 0.0) + now_alone
        return self._last_ms + GAPS_WAITED * gap if waiting < leaving else -math.inf

    def _learn_gap(self, now_ms: float) -> None:
        if self._last_ms > -math.inf:
            gap = min(max(0.0, now_ms - self._last_ms), GAPS_WAITED * self._wait_ms)  # longer gaps say no more
            self._gap_ms = gap if math.isnan(self._gap_ms) else self._gap_ms + SHARE * (gap - self._gap_ms)
        self._last_ms = now_ms

    def _least_ms(self) -> float:
        waiting = len(self.waiting)
        return self._latency.run_ms(self._items_max if waiting > self._items_max else (waiting + 1) // 2)

    def _changed(self, line: Line) -> None:
        line.leave_ms = None
        if not line.size and len(self._lines) > 1:  # the last one stays, for the next item is likely of its group
            del self._lines[line.group]

    def _forget_times(self) -> None:
        self._learned = self._latency.samples
        for line in self._lines.values():
            line.leave_ms = None
