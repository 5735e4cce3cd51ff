"""Queue of batch-job work for one step: formed batches, and single rows that form batches as they leave.

Job work runs when no interactive request waits for the step. A batch is no larger than the step's. On a step shared
with interactive requests it is also no longer than `limits.job_batch_ms` by recent measurements, because an interactive
request that arrives now may have to wait for it.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import deque
from collections.abc import Hashable

from weftline.engine.scheduler.latency import Latency
from weftline.engine.scheduler.request import Task
from weftline.engine.scheduler.shapes import Shapes
from weftline.nodes.grouping import group_by
from weftline.pipelines.placement.plan import PlannedStep


class JobQueue:
    """The queued job work of one step, part of its StepQueue. any: True if it is not empty."""

    def __init__(self, step: PlannedStep, shapes: Shapes) -> None:
        self._inputs = len(step.inputs)
        self._shapes = shapes
        self._sizes = step.batch.sizes
        self._formed: deque[list[Task]] = deque()
        self._single: dict[int, Task] = {}
        self.any = False

    def __len__(self) -> int:
        return len(self._single) + sum(map(len, self._formed))

    def add(self, task: Task) -> None:
        """Queue a single row, or a row that is retried."""
        self._single[task.id] = task
        self.any = True

    def form(self, tasks: list[Task], items_max: int) -> None:
        """Form batches of rows in their order.

        Rows of one shape share a batch. They are sorted by length, which keeps padding small.
        """
        for group in group_by(tasks, self._group):
            group.sort(key=_size)
            size = max((one for one in self._sizes if one <= items_max), default=items_max)
            self._formed += [group[at : at + size] for at in range(0, len(group), size)]
        self._changed()

    def discard(self, task: Task) -> bool:
        """Remove a queued task; False if it is not queued here."""
        if self._single.pop(task.id, None) is not None:
            self._changed()
            return True
        for batch in self._formed:
            if task in batch:
                batch.remove(task)
                return True
        return False

    def take(self, items_max: int) -> list[Task]:
        """Pop the next batch, of at most `items_max` rows; empty when none is queued."""
        taken = self._taken(items_max)
        self._changed()
        return taken

    def _taken(self, items_max: int) -> list[Task]:
        while self._formed:
            batch = self._formed.popleft()
            if len(batch) > items_max:  # there is less memory than when it was formed
                self._formed.appendleft(batch[items_max:])
                batch = batch[:items_max]
            if batch:  # else they were all dropped meanwhile
                return batch
        taken: list[Task] = []
        first: Hashable = None
        for task in self._single.values():
            group = self._group(task)
            if not taken:
                first = group
            if group == first:
                taken.append(task)
            if len(taken) == items_max:
                break
        for task in taken:
            del self._single[task.id]
        return taken

    def _changed(self) -> None:
        self.any = bool(self._single or self._formed)

    def _group(self, task: Task) -> Hashable:
        shape = None if self._shapes.any else self._shapes.group(task.inputs[: self._inputs])
        return task.unit.chain, shape


def items_within(latency: Latency, items_max: int, most_ms: float) -> int:
    """Return the largest batch that by what was measured takes no longer than `most_ms`; at least 1."""
    if most_ms == math.inf or latency.run_ms(items_max) <= most_ms:
        return items_max
    return max(1, bisect_right(range(1, items_max + 1), most_ms, key=latency.run_ms))


def _size(task: Task) -> int:
    return sum(value.size_bytes for value in task.inputs)
