"""Estimate how long the rest of a request takes, from measured run times and current queues.

The time *after* a unit is the longest path behind it: wait and run of its readers, and so on. A wait lasts until a
worker is free and the full batches in front have run; the time until the request gets there is subtracted. A run is
that of a batch of the size that the step had lately, not of the smallest: under load the most urgent requests go first
and all of them start with little time to spare. When no work is ahead, a run is that of one item, so that an idle
pipeline refuses no request that it could serve. Only run times measured lately count; an unknown time counts as zero,
so work is never refused by a guess. Wake-up times of sleeping steps do not count.

Times are those that the program's own steps have measured. The work of other programs in front of a request counts as
if it were the program's own: nothing is refused because of the slow requests of others.

A unit counts only where the request is known to run it (known_path.py). A unit that would exceed the timeout of its
step counts until its latest start, and then as its fallback.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from weftline.engine.scheduler.known_path import DORMANT
from weftline.engine.scheduler.routes import KNOWN, ROUTES_MAX, ProgramStep, Route
from weftline.engine.scheduler.state import SchedulerState
from weftline.engine.scheduler.step_queue import StepQueue
from weftline.engine.scheduler.workers import Dispatch, WorkerState

if TYPE_CHECKING:
    from weftline.engine.scheduler.programs import Program

KEPT_MS = 1.0
"""Lifetime of a cached estimate; it bounds the cost per request."""

MESSAGE_MS = 0.7
"""Overhead of a batch for messages and wake-ups, at most the run time itself."""

FADES_MS = 500.0
"""Time after which a size of batch that has not been seen again counts about a third."""


def after_ms(state: SchedulerState, program: Program, route: Route, path: bytes, place: int) -> float:
    """Return the expected time from the end of a unit to the end of the longest path behind it.

    path: the units that the request is known to run.
    """
    return _estimate(state, program, route, path)[1][place]


def whole_ms(state: SchedulerState, program: Program, route: Route, path: bytes) -> float:
    """Return the expected time of a request that comes now."""
    return _estimate(state, program, route, path)[2]


def _estimate(state: SchedulerState, program: Program, route: Route, path: bytes) -> tuple[float, list[float], float]:
    now_ms = state.now_ms
    kept = program.estimates.get((route, path))
    if kept is None or now_ms - kept[0] > KEPT_MS:
        if len(program.estimates) > ROUTES_MAX:
            program.estimates.clear()
        kept = program.estimates[route, path] = (now_ms, *_compute(state, route, path))
    return kept


def _compute(state: SchedulerState, route: Route, path: bytes) -> tuple[list[float], float]:
    costs = _Costs(state, route, path)
    run, after = costs.run, [0.0] * len(route.units)
    for place in route.order:
        after[place] = max(
            (costs.after_wait(n, run[place]) + after[n] for n in route.next[place] if path[n] != DORMANT),
            default=0.0,
        ) + min(run[place], MESSAGE_MS)
    whole = max((costs.after_wait(place, 0.0) + after[place] for place in route.entries), default=0.0)
    return after, whole


class _Costs:
    """The time that each unit of a route takes: 0 where it is unknown, or the unit is not known to run."""

    def __init__(self, state: SchedulerState, route: Route, path: bytes) -> None:
        self._state, self._route = state, route
        self.run, self._wait = [0.0] * len(path), [0.0] * len(path)
        counted = [place for place in range(len(path)) if path[place] == KNOWN and not route.units[place].control]
        queues = {one: state.queues[one] for one in {route.units[place].deployment for place in counted}}
        busy = {one: busy_ms(state, queue) for one, queue in queues.items()}
        self._idle = not any(queue.waiting or busy[one] for one, queue in queues.items())
        for place in counted:
            head = route.units[place].head
            self.run[place], self._wait[place] = self._times(head, queues[head.deployment], busy[head.deployment])

    def after_wait(self, place: int, credit_ms: float) -> float:
        """Return the time of a unit: its wait, less `credit_ms` that pass before the request gets there, and its run.

        No more than the timeout of its step and its fallback.
        """
        return self._within_timeout(place, max(0.0, self._wait[place] - credit_ms), self.run[place])

    def _within_timeout(self, place: int, wait_ms: float, run_ms: float) -> float:
        timeout_ms = self._route.units[place].head.timeout_ms
        needs_ms = wait_ms + run_ms
        if needs_ms <= timeout_ms:
            return needs_ms
        return min(needs_ms, max(0.0, timeout_ms - run_ms) + self._fallback_ms(place))

    def _fallback_ms(self, place: int) -> float:
        """Return the time of a unit's fallback and the units that run only for it; the units' conditions are open."""
        fallback, route = self._route.fallbacks.get(place), self._route
        if fallback is None:
            return 0.0
        ready = dict.fromkeys(fallback.group, 0.0)
        end = 0.0
        for one in fallback.group:
            unit, cost = route.units[one], 0.0
            if not (unit.control or unit.mapped or unit.when is not None):
                queue = self._state.queues[unit.deployment]
                run_ms, wait_ms = self._times(unit.head, queue, busy_ms(self._state, queue))
                cost = self._within_timeout(one, max(0.0, wait_ms - ready[one]), run_ms)
            end = ready[one] + cost
            for reader in route.next[one]:
                if reader in ready:
                    ready[reader] = max(ready[reader], end)
        return end

    def _times(self, step: ProgramStep, queue: StepQueue, busy: float) -> tuple[float, float]:
        """Return the run time of a step and the wait for its deployment."""
        now_ms, latency = self._state.now_ms, step.latency
        if not latency.fresh(now_ms):
            return 0.0, 0.0
        if queue.streams:
            return latency.run_ms(1), 0.0
        run_ms = latency.run_ms(1 if self._idle else _size(self._state, step, queue, now_ms))
        full = queue.waiting // (queue.items_max * max(1, len(queue.workers)))
        return run_ms, busy + full * latency.run_ms(queue.items_max)


def _size(state: SchedulerState, step: ProgramStep, queue: StepQueue, now_ms: float) -> int:
    """Return the recent batch size of a step: the largest, fading towards the current one."""
    size, seen_ms = step.batch_size
    running = [len(dispatch.tasks) for dispatch in _running(state, queue)]
    size = max([1.0, *running, size * math.exp((seen_ms - now_ms) / FADES_MS)])
    step.batch_size = size, now_ms
    return min(round(size), queue.items_max)


def busy_ms(state: SchedulerState, queue: StepQueue) -> float:
    """Return the expected time until a worker of a deployment has finished its dispatches."""
    return min((left_ms(state, state.workers[worker_id], queue) for worker_id in queue.workers), default=0.0)


def left_ms(state: SchedulerState, worker: WorkerState, queue: StepQueue) -> float:
    """Return the expected time until a worker of a deployment has finished its dispatches in the same thread."""
    now_ms = state.now_ms
    left, running = 0.0, worker.on_thread(queue.index)
    for dispatch in running:
        took_ms = dispatch.unit.head.latency.took_ms(len(dispatch.tasks))
        begun_ms = now_ms - dispatch.started_ms if dispatch is running[0] else 0.0
        left += max(0.0, took_ms - begun_ms)
    return left


def _running(state: SchedulerState, queue: StepQueue) -> list[Dispatch]:
    return [
        dispatch
        for worker_id in queue.workers
        for dispatch in state.workers[worker_id].running
        if dispatch.unit.deployment == queue.index
    ]
