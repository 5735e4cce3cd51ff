"""Timeouts of workers: how long one may be silent or busy before it is killed.

There is a limit for each wait on a worker: opening, closing, a call, work on its device, a device fence, a host copy, a
round of a stream. A worker that loads a model may be silent for that time. The callers kill and restart. Pure:
time is an argument.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from weftline.engine.scheduler.request import Task
from weftline.engine.scheduler.workers import LEAVING, READY, STARTING, STOPPED, WorkerState
from weftline.pipelines.placement.plan import Plan

OPEN_MAX_MS = 1_800_000.0
"""Longest time to open the models of a worker, half an hour: a large model on a slow disk takes minutes."""

LEAVE_MAX_MS = 2_000.0
"""Longest time to close the nodes of a worker that goes to sleep or failed to open; then it is killed."""


class Timeouts:
    """Timeouts of the workers of a plan. steps_of: the deployments of each worker."""

    def __init__(self, plan: Plan, steps_of: Sequence[Sequence[int]]) -> None:
        self._plan = plan
        self._steps_of = steps_of
        self._silence_max_ms = plan.limits.silence_max_ms
        self._in_debugger = {index for index, worker in enumerate(plan.workers) if plan.debug in worker.steps}

    def complaint(self, worker_id: int, worker: WorkerState, now_ms: float) -> str:
        """Return the reason to kill a live worker, silent or busy for too long; '' if there is none."""
        if worker_id in self._in_debugger:
            return ""
        if worker.state == STARTING and worker.failed:
            late = now_ms - worker.last_message_ms > LEAVE_MAX_MS
            return f"it did not end within {LEAVE_MAX_MS / 1000:g} s after opening failed" if late else ""
        if worker.state == STARTING:
            late = now_ms - worker.last_message_ms > OPEN_MAX_MS
            return f"it sent no message for {OPEN_MAX_MS / 1000:g} s while opening" if late else ""
        if worker.state == LEAVING:
            late = now_ms - worker.last_message_ms > LEAVE_MAX_MS
            return f"it did not close its nodes within {LEAVE_MAX_MS / 1000:g} s" if late else ""
        if worker.sleep.loading:
            return ""  # loading may block heartbeats; its own timer limits it (see idle.py)
        if now_ms - worker.last_message_ms > self._silence_max_ms:
            return f"it sent no heartbeat for {self._silence_max_ms / 1000:g} s"
        if any(now_ms - first.started_ms > first.limit_ms for first in worker.heads):
            return "a call took longer than run_max_ms"
        if any(now_ms - one.since_ms > one.limit_ms for one in worker.unfinished.values()):
            return "its work on the device took longer than run_max_ms"
        if worker.sleep.moving:
            return ""  # it does no other work until the step sleeps or is awake
        if worker.settles and now_ms - min(worker.settles.values()) > self._settle_max_ms(worker_id):
            return "its device fence was not reached within run_max_ms"
        if worker.fetches and not worker.running:  # fetches start after the running dispatches
            since_ms = max(worker.free_ms, min(worker.fetches.values()))
            if now_ms - since_ms > self._settle_max_ms(worker_id):
                return "a copy to host memory took longer than run_max_ms"
        at_work = [
            task
            for task in worker.streams.values()
            if not (task.request.stalled or task.held or (task.stream_input is not None and task.stream_input.waits))
        ]
        late = now_ms - worker.stream_active_ms > _run_max_ms(at_work)
        return "a call took longer than run_max_ms" if late else ""

    def answers(self, worker: WorkerState, now_ms: float) -> bool:
        """Return True if a worker is ready and sent a recent heartbeat, or sleeps until it is needed."""
        if worker.state in (STOPPED, LEAVING) or worker.woken:
            return True
        recent = now_ms - worker.last_message_ms <= self._silence_max_ms or worker.sleep.loading
        return worker.state == READY and not worker.why and recent

    def _settle_max_ms(self, worker_id: int) -> float:
        """Return the timeout of device fences and host copies of a worker."""
        return max((self._plan.steps[step].run_max_ms for step in self._steps_of[worker_id]), default=math.inf)


def _run_max_ms(tasks: Iterable[Task]) -> float:
    """Return how long the streams of a worker may be silent: the least of its deployments.

    Steps of several programs may use one deployment: the longest of their limits counts, so that no program ends the
    work of another.
    """
    limits: dict[int, float] = {}
    for task in tasks:
        unit = task.unit
        limits[unit.deployment] = max(limits.get(unit.deployment, 0.0), unit.head.run_max_ms)
    return min(limits.values(), default=math.inf)
