"""Estimate how long the rest of a request takes, from measured run times and current queues.

The time *after* a unit is the longest path behind it: wait and run of its readers, and so on. A wait lasts until a
worker is free and the full batches in front have run; the time until the request gets there is subtracted. A run is
that of a batch of the size that the step had lately, not of the smallest: under load the most urgent requests go first
and all of them start with little time to spare. When no work is ahead, a run is that of one item, so that an idle
pipeline refuses no request that it could serve. Only run times measured lately count; an unknown time counts as zero,
so work is never refused by a guess. Wake-up times of sleeping steps do not count.
"""

from __future__ import annotations

import math

from weftline.engine.scheduler.routes import ROUTES_MAX, Route
from weftline.engine.scheduler.state import SchedulerState
from weftline.engine.scheduler.step_queue import StepQueue
from weftline.engine.scheduler.workers import Dispatch, WorkerState

KEPT_MS = 1.0
"""Lifetime of a cached estimate; it bounds the cost per request."""

MESSAGE_MS = 0.7
"""Overhead of a batch for messages and wake-ups, at most the run time itself."""

FADES_MS = 500.0
"""Time after which a size of batch that has not been seen again counts about a third."""


def after_ms(state: SchedulerState, route: Route, place: int) -> float:
    """Return the expected time from the end of a unit to the end of the longest path behind it."""
    return _estimate(state, route)[1][place]


def whole_ms(state: SchedulerState, route: Route) -> float:
    """Return the expected time of a request that comes now."""
    return _estimate(state, route)[2]


def _estimate(state: SchedulerState, route: Route) -> tuple[float, list[float], float]:
    now_ms = state.now_ms
    kept = state.estimates.get(route)
    if kept is None or now_ms - kept[0] > KEPT_MS:
        if len(state.estimates) > ROUTES_MAX:
            state.estimates.clear()
        kept = state.estimates[route] = (now_ms, *_compute(state, route, now_ms))
    return kept


def _compute(state: SchedulerState, route: Route, now_ms: float) -> tuple[list[float], float]:
    units = route.units
    run, wait = [0.0] * len(units), [0.0] * len(units)
    queues = {unit.step: state.queues[unit.step] for unit in units if not unit.control}
    busy = {step: busy_ms(state, queue) for step, queue in queues.items()}
    idle = not any(queue.waiting or busy[step] for step, queue in queues.items())
    for place, unit in enumerate(units):
        if unit.control:
            continue
        queue = queues[unit.step]
        if not queue.latency.fresh(now_ms):
            continue
        if queue.streams:
            run[place] = queue.latency.run_ms(1)
            continue
        run[place] = queue.latency.run_ms(1 if idle else _size(state, queue, now_ms))
        full = queue.waiting // (queue.items_max * max(1, len(queue.workers)))
        wait[place] = busy[unit.step] + full * queue.latency.run_ms(queue.items_max)
    after = [0.0] * len(units)
    for place in range(len(units) - 1, -1, -1):
        after[place] = max(
            (max(0.0, wait[n] - run[place]) + run[n] + after[n] for n in route.next[place]),
            default=0.0,
        ) + min(run[place], MESSAGE_MS)
    entries = route.entries
    whole = max((wait[place] + run[place] + after[place] for place in entries), default=0.0)
    return after, whole


def _size(state: SchedulerState, queue: StepQueue, now_ms: float) -> int:
    """Return the recent batch size of a step: the largest, fading towards the current one."""
    size, seen_ms = state.batch_sizes[queue.index]
    running = [len(dispatch.tasks) for dispatch in _running(state, queue)]
    size = max([1.0, *running, size * math.exp((seen_ms - now_ms) / FADES_MS)])
    state.batch_sizes[queue.index] = size, now_ms
    return min(round(size), queue.items_max)


def busy_ms(state: SchedulerState, queue: StepQueue) -> float:
    """Return the expected time until a worker of the step has finished its dispatches."""
    return min((left_ms(state, state.workers[worker_id], queue) for worker_id in queue.workers), default=0.0)


def left_ms(state: SchedulerState, worker: WorkerState, queue: StepQueue) -> float:
    """Return the expected time until a worker of the step has finished its dispatches in the step's thread."""
    now_ms = state.now_ms
    left, running = 0.0, worker.on_thread(queue.index)
    for dispatch in running:
        run_ms = state.queues[dispatch.unit.step].latency.run_ms(len(dispatch.tasks))
        begun_ms = now_ms - dispatch.started_ms if dispatch is running[0] else 0.0
        left += max(0.0, run_ms - begun_ms)
    return left


def _running(state: SchedulerState, queue: StepQueue) -> list[Dispatch]:
    return [
        dispatch
        for worker_id in queue.workers
        for dispatch in state.workers[worker_id].running
        if dispatch.unit.step == queue.index
    ]
