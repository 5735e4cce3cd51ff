"""Batch closing rule: when a step stops waiting and runs a batch, and which items are in it.

A Batcher queues the items of one step and returns, for a given time, the items that leave together. It owns no clock,
no thread and no tensor: time is an argument and the decision a return value.

A batch closes when it is full; when its oldest item has waited for `wait_ms`; when longer waiting would miss a
deadline; or, under `wait: auto`, when waiting for one more item does not lower the total latency. Items leave in the
order of their latest start time, shifted by priority. An item may also expire, by the timeout of its step, whatever the
order. The key of an item never changes and later items get larger keys,
so no item starves. The order itself is kept by PriorityQueue.

Where several steps use the queue, a batch closes by the times of all, and `late` pops the items that even the quickest
of these steps could not finish in time. What is late for a slower one is found when it is taken (dispatch.py).

Items share a call only within one group: under `shapes: same`, the dtypes and shapes of all inputs are equal. Sizes
that the step pads count as the padded size. The comparison itself is in `weftline.nodes.grouping`.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Hashable, Sequence

from weftline.engine.protocol.messages import Value
from weftline.engine.scheduler.latency import SHARE, Latency
from weftline.engine.scheduler.priority_queue import PriorityQueue, QueuedItem
from weftline.nodes.grouping import shape_key
from weftline.nodes.ports import PortType
from weftline.nodes.urgency import PATIENCE_MS, PRIORITY_STEP_MS
from weftline.pipelines.placement.plan import PlannedStep
from weftline.pipelines.spec.policy import BatchPolicy


class Shapes:
    """The batch groups of one step.

    any: all items may share a batch; `group` then always returns None.
    """

    def __init__(self, step: PlannedStep) -> None:
        self.any = step.batch.shapes == "any" and not step.batch.pad
        pad = {name: tuple(sorted(sizes)) for name, sizes in step.batch.pad.items()}
        self._pads = tuple(_axis_pads(given.type, pad) for given in step.inputs)

    def group(self, inputs: Sequence[Value]) -> Hashable:
        """Return the key that is equal for all items of one batch; None when any items may share one.

        inputs: one value for each connected input, in the order of the plan.
        """
        if self.any:
            return None
        return tuple(shape_key(value, pads) for value, pads in zip(inputs, self._pads))


def _axis_pads(type: PortType, pad: dict[str, tuple[int, ...]]) -> tuple[tuple[int, ...], ...]:
    """Return the sizes that each axis of a type is padded to; empty for an axis that is not padded."""
    return tuple(pad.get(dim, ()) if isinstance(dim, str) else () for dim in type.dims or ())


SLACK_MARGIN_MS = 5.0
"""A batch closes this long before its deadline requires it: a timer and a message each take 1 to 2 ms."""

GAPS_WAITED = 2.0
"""Under `wait: auto`, a batch waits at most this many mean gaps between arrivals for the next item."""


class Batcher:
    """The queued items of one step. The cost of a query grows with the number of groups, not of items.

    waiting: the queued items; read-only for callers.
    """

    def __init__(self, policy: BatchPolicy, latency: Latency | None = None, timeout_ms: float = math.inf) -> None:
        """timeout_ms: of the step; its items expire."""
        self.policy = policy
        self._latency = latency if latency is not None else Latency()
        self.set_lateness(self._latency, timeout_ms)
        self._by_deadline = policy.order == "deadline"
        self._auto = policy.wait == "auto"
        self._wait_ms = policy.wait_ms
        self.waiting: dict[int, QueuedItem] = {}
        self._lines: dict[Hashable, PriorityQueue] = {}
        self._serial = 0
        self._now_ms = -math.inf
        self._last_ms = -math.inf  # when the last item came
        self._gap_ms = math.nan  # moving average of the time between arrivals; not a number until two came
        self._learned = 0  # Latency.samples when the lines' leave_ms were worked out
        self.items_max = policy.items_max

    def set_lateness(self, lateness: Latency, timeout_ms: float) -> None:
        """Set the times by which items are late: of all steps that use the queue, the least."""
        self._lateness = lateness
        self._timeout_ms = timeout_ms
        self._expires = timeout_ms < math.inf

    @property
    def items_max(self) -> int:
        """Most items in one batch: the policy's limit, or less after an out-of-memory error."""
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
        expires_ms: float = math.inf,
        arrived_ms: float | None = None,
    ) -> None:
        """Queue an item.

        group:      only items of one group share a batch.
        due_ms:     when the step must have finished it for the request to meet its deadline.
        expires_ms: when the timeout of the step ends for it.
        arrived_ms: time of the first arrival, for an item that is queued again and is no new arrival.
        """
        if item in self.waiting:
            raise ValueError(f"item {item} waits already; discard it before it is added again")
        self._now_ms = now_ms
        if arrived_ms is None:
            arrived_ms = now_ms
            if self._auto:
                self._learn_gap(now_ms)
        key = arrived_ms + PATIENCE_MS
        if expires_ms < due_ms or not self._by_deadline:
            due_ms = expires_ms
        if self._by_deadline:
            if due_ms < math.inf:
                key = min(key, due_ms - self._latency.run_ms(1))
            if priority:
                key -= priority * PRIORITY_STEP_MS
        line = self._lines.get(group)
        if line is None:
            if not self.waiting:
                self._lines.clear()
            line = self._lines[group] = PriorityQueue(group, self.waiting)
        self._serial += 1
        line.leave_ms = None
        # tuple.__new__ makes a Waiting at half the cost of calling it; this runs for every item of every step
        self.waiting[item] = entry = tuple.__new__(QueuedItem, (key, self._serial, item, arrived_ms, due_ms, line))
        line.add(entry)

    def reschedule(self, item: int, priority: int, due_ms: float, expires_ms: float) -> None:
        """Change the due time of a queued item."""
        entry = self.waiting[item]
        self.discard(item)
        self.add(
            item,
            self._now_ms,
            group=entry.line.group,
            priority=priority,
            due_ms=due_ms,
            expires_ms=expires_ms,
            arrived_ms=entry.arrived_ms,
        )

    def discard(self, item: int) -> bool:
        """Remove an item; False if it was not queued."""
        entry = self.waiting.pop(item, None)
        if entry is None:
            return False
        line = entry.line
        line.removed()
        self._changed(line)
        return True

    def take(self, now_ms: float, batches: int = 1) -> list[int]:
        """Pop the batch to run now, of one group, most urgent item first; empty while it may wait.

        At most `batches` full batches are popped. More than one is for steps that take less time than a message.
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
        """Pop the items that would miss their deadline, or expire, even if they ran now, earliest first.

        The expected run time is that of a full batch while more items are queued than one batch holds, else that of
        half the queued items: one urgent item never makes a batch smaller than that. Without recent measurements no
        item is late.
        """
        self._now_ms = now_ms
        gone: list[int] = []
        if not (self._by_deadline or self._expires) or not self.waiting or not self._lateness.fresh(now_ms):
            return gone
        for line in list(self._lines.values()):
            while (entry := line.due_first()) is not None and now_ms > entry.due_ms - self._least_ms():
                self.discard(entry.item)
                gone.append(entry.item)
        return gone

    def wake_at_ms(self) -> float | None:
        """Return when `take` or `late` next returns items, if none arrive; None when empty."""
        if not self.waiting:
            return None
        soonest = min(self._leaves_ms(line) for line in self._lines.values())
        if (self._by_deadline or self._expires) and self._lateness.fresh(self._now_ms):
            due = min(line.due_ms() for line in self._lines.values())
            soonest = min(soonest, math.nextafter(due - self._least_ms(), math.inf))
        return soonest

    def oldest_ms(self) -> float | None:
        """Return the arrival time of the oldest item; None when empty."""
        return min(line.oldest_ms() for line in self._lines.values()) if self.waiting else None

    def urgency(self) -> float | None:
        """Return the key in ms of the most urgent item, comparable between steps; smaller is more urgent."""
        return min((first.key for line in self._lines.values() if (first := line.first())), default=None)

    def _due_line(self, now_ms: float) -> PriorityQueue | None:
        """Return the group whose batch closes now; of several, the one with the most urgent item."""
        best: QueuedItem | None = None
        for line in self._lines.values():
            if not line.size or not (line.size >= self._goal or self._leaves_ms(line) <= now_ms):
                continue
            if len(self._lines) == 1:
                return line
            entry = line.first()
            if entry is not None and (best is None or entry < best):
                best = entry
        return best.line if best is not None else None

    def _count(self, line: PriorityQueue, now_ms: float) -> int:
        """Return the size of the batch that closes now."""
        count = min(line.size, self._goal)
        if self._sizes and count < self._goal:
            fitting = bisect_right(self._sizes, count)
            count = self._sizes[fitting - 1] if fitting else count
        if self._expires:
            count = min(count, 2 * self._latency.items_max or count)  # a larger call may end too late for all its items
            left_ms = line.due_ms() - now_ms
            if left_ms < self.needs_ms(count):
                return max(1, bisect_right(range(1, count), left_ms, key=self.needs_ms))
        elif 1 < line.size <= self._items_max and self._by_deadline:
            first = line.first()
            left_ms = first.due_ms - now_ms if first is not None else math.inf
            if self._latency.run_ms(1) <= left_ms < self._latency.run_ms(count):
                return bisect_right(range(1, count), left_ms, key=self._latency.run_ms)
        return count

    def _leaves_ms(self, line: PriorityQueue) -> float:
        """Return when the group's next batch closes if no item arrives; a past time if it is due."""
        if self._learned != self._latency.samples:
            self._forget_times()
        if line.leave_ms is None:
            line.leave_ms = self._work_out(line)
        return line.leave_ms

    def _work_out(self, line: PriorityQueue) -> float:
        oldest = line.oldest_ms()
        if line.size >= self._goal or self._wait_ms <= 0:
            return oldest
        soonest = oldest + self._wait_ms
        due = line.due_ms()
        if due < math.inf:
            run_ms = self.needs_ms if self._expires else self._latency.run_ms
            soonest = min(soonest, due - run_ms(line.size + 1) - SLACK_MARGIN_MS)
        if self._auto:
            soonest = min(soonest, self._pays_until_ms(line.size))
        return max(soonest, oldest)

    def _pays_until_ms(self, count: int) -> float:
        """Return until when waiting for one more item lowers the sum of the latencies of all items."""
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

    def needs_ms(self, items: int, own: Latency | None = None, timeout_ms: float = math.inf) -> float:
        """Return the time that a call with `items` needs, by which items of a step with a timeout expire early.

        A time that few calls exceed, so that under load the item that is selected next, which is the oldest one, is
        not always the one that just misses. Where the timeout is shorter than that, the time of the shortest calls:
        nothing is held back that has a chance, unless a newer item with a better one can run instead.

        own, timeout_ms: of the item's step, where several use the queue; None: the least of all.
        """
        if own is None:
            own, timeout_ms = self._lateness, self._timeout_ms
        if len(self.waiting) > self._items_max or own.likely_ms(1) <= timeout_ms:
            return own.likely_ms(items)
        return own.shortest_ms(items)

    def fitting(self, own: Latency | None = None, timeout_ms: float = math.inf) -> int:
        """Return the size of the largest call that is likely to end within the timeout of the step; at least 1.

        own, timeout_ms: as in `needs_ms`.
        """
        if own is None:
            own, timeout_ms = self._lateness, self._timeout_ms
        return max(1, bisect_right(range(1, self._items_max + 1), timeout_ms, key=own.likely_ms))

    def _least_ms(self) -> float:
        waiting = len(self.waiting)
        if not self._expires:
            return self._lateness.run_ms(self._items_max if waiting > self._items_max else (waiting + 1) // 2)
        if waiting <= self._items_max:
            return self.needs_ms((waiting + 1) // 2)
        return self.needs_ms(self.fitting())

    def _changed(self, line: PriorityQueue) -> None:
        line.leave_ms = None
        if not line.size and len(self._lines) > 1:  # the last one stays, for the next item is likely of its group
            del self._lines[line.group]

    def _forget_times(self) -> None:
        self._learned = self._latency.samples
        for line in self._lines.values():
            line.leave_ms = None
