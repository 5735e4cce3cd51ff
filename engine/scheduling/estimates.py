"""How long what is still ahead of a request will take, by measured run times and the queues as they are.

A unit's *after* is the longest path behind it: what its readers wait and run, and theirs in turn. A wait is until a
worker comes free, and for the full batches that stand in front; it goes on while the request is still on its way, which
is taken off. A run is that of a batch of the size that the step has lately had, not of the smallest: under load the
most urgent go first, so all are begun with little time to spare, and who counts on a small batch comes too late by a
full one. With nothing at work anywhere ahead it is the run of one item, so that an idle pipeline refuses nobody whom it
could serve. Only run times that were measured in service lately count; what nobody knows counts as nothing, and work is
never refused by a guess. Nor does the time in which a step wakes: a request that is refused would leave it asleep.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from weftline.engine.batching.lanes import Lane
from weftline.engine.crew.member import Dispatch, WorkerState
from weftline.engine.scheduling.routes import ROUTES_MAX, Route

KEPT_MS = 1.0
"""How long an estimate is used before it is worked out again, so that its cost for a request stays flat."""

MESSAGE_MS = 0.7
"""What a batch takes beyond its run, for messages and waking up; counted as no more than the run itself."""

FADES_MS = 500.0
"""Time after which a size of batch that has not been seen again counts about a third."""


class Estimates:
    """Estimates for the routes of one plan. Pure."""

    def __init__(self, lanes: Sequence[Lane], members: Sequence[WorkerState]) -> None:
        self._lanes = lanes
        self._members = members
        self._kept: dict[Route, tuple[float, list[float], float]] = {}
        self._sizes = [(1.0, -math.inf)] * len(lanes)  # of each step: the size of a batch lately, and when it was seen

    def after_ms(self, route: Route, place: int, now_ms: float) -> float:
        """Return the expected time from the end of a unit to the end of the longest path behind it."""
        return self._of(route, now_ms)[1][place]

    def whole_ms(self, route: Route, now_ms: float) -> float:
        """Return the expected time of a request that comes now."""
        return self._of(route, now_ms)[2]

    def _of(self, route: Route, now_ms: float) -> tuple[float, list[float], float]:
        kept = self._kept.get(route)
        if kept is None or now_ms - kept[0] > KEPT_MS:
            if len(self._kept) > ROUTES_MAX:
                self._kept.clear()
            kept = self._kept[route] = (now_ms, *self._work_out(route, now_ms))
        return kept

    def _work_out(self, route: Route, now_ms: float) -> tuple[list[float], float]:
        units = route.units
        run, wait = [0.0] * len(units), [0.0] * len(units)
        lanes = {unit.step: self._lanes[unit.step] for unit in units if not unit.control}
        busy = {step: self._busy_ms(lane, now_ms) for step, lane in lanes.items()}
        idle = not any(lane.waiting or busy[step] for step, lane in lanes.items())
        for place, unit in enumerate(units):
            if unit.control:
                continue
            lane = lanes[unit.step]
            if not lane.latency.fresh(now_ms):
                continue
            if lane.streams:
                run[place] = lane.least_ms
                continue
            run[place] = lane.latency.run_ms(1 if idle else self._size(lane, now_ms))
            full = lane.waiting // (lane.items_max * max(1, len(lane.workers)))
            wait[place] = busy[unit.step] + full * lane.latency.run_ms(lane.items_max)
        after = [0.0] * len(units)
        for place in range(len(units) - 1, -1, -1):
            after[place] = max(
                (max(0.0, wait[n] - run[place]) + run[n] + after[n] for n in route.next[place]),
                default=0.0,
            ) + min(run[place], MESSAGE_MS)
        entries = route.entries
        whole = max((wait[place] + run[place] + after[place] for place in entries), default=0.0)
        return after, whole

    def _size(self, lane: Lane, now_ms: float) -> int:
        """Return how many items a batch of the step has lately had: the most, fading towards what it has now."""
        size, seen_ms = self._sizes[lane.index]
        running = [len(dispatch.tasks) for dispatch in self._running(lane)]
        size = max([1.0, *running, size * math.exp((seen_ms - now_ms) / FADES_MS)])
        self._sizes[lane.index] = size, now_ms
        return min(round(size), lane.items_max)

    def _busy_ms(self, lane: Lane, now_ms: float) -> float:
        """Return how long it should take until a worker of the step has done what it was given."""
        return min((self._left_ms(self._members[worker], now_ms) for worker in lane.workers), default=0.0)

    def _left_ms(self, member: WorkerState, now_ms: float) -> float:
        left = 0.0
        for dispatch in member.running:
            run_ms = self._lanes[dispatch.unit.step].latency.run_ms(len(dispatch.tasks))
            begun_ms = now_ms - dispatch.started_ms if dispatch is member.running[0] else 0.0
            left += max(0.0, run_ms - begun_ms)
        return left

    def _running(self, lane: Lane) -> list[Dispatch]:
        return [
            dispatch
            for worker in lane.workers
            for dispatch in self._members[worker].running
            if dispatch.unit.step == lane.index
        ]
