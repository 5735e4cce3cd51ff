"""How long a worker may be silent, or busy with one thing, before it counts as lost; what may take long, and when.

Every wait for a worker has its limit here: opening, leaving, a call, what is left on its device, a settling, a copy, a
round of a stream. A worker that loads a model is given the time that takes. Pure: it is told the time.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from weftline.engine.crew.member import WorkerState
from weftline.engine.crew.supervisor import ASLEEP, LEAVING, READY, STARTING
from weftline.pipelines.plan import Plan

OPEN_MAX_MS = 1_800_000.0
"""Longest a worker may take to open its models, half an hour: a large one on a slow disk takes minutes."""

LEAVE_MAX_MS = 2_000.0
"""Longest a worker that is sent to sleep may take to close its nodes; then it is killed, which does no harm."""


class Patience:
    """Patience with the workers of a plan. steps_of: the steps that each holds."""

    def __init__(self, plan: Plan, steps_of: Sequence[Sequence[int]]) -> None:
        self._plan = plan
        self._steps_of = steps_of
        self._silence_max_ms = plan.limits.silence_max_ms

    def complaint(self, worker: int, member: WorkerState, now_ms: float) -> str:
        """Return why a living worker is to be killed: silent, or too long at one thing; '' for no reason."""
        if member.state == STARTING:
            late = now_ms - member.heard_ms > OPEN_MAX_MS
            return f"it said nothing for {OPEN_MAX_MS / 1000:g} s while opening" if late else ""
        if member.state == LEAVING:
            late = now_ms - member.heard_ms > LEAVE_MAX_MS
            return f"it did not close its nodes within {LEAVE_MAX_MS / 1000:g} s" if late else ""
        if member.rest.loading:
            return ""  # which may silence it; how long that may take is watched elsewhere
        if now_ms - member.heard_ms > self._silence_max_ms:
            return f"it gave no sign of life for {self._silence_max_ms / 1000:g} s"
        first = member.running[0] if member.running else None
        if first is not None and now_ms - first.started_ms > first.limit_ms:
            return "it was busy for longer than run_max_ms"
        oldest = next(iter(member.unfinished.values()), None)
        if oldest is not None and now_ms - oldest.since_ms > oldest.limit_ms:
            return "its device was busy for longer than run_max_ms"
        if member.rest.moving:
            return ""  # all else stands still until one of its steps sleeps or is awake
        if member.settles and now_ms - min(member.settles.values()) > self._settle_max_ms(worker):
            return "its device did not settle within run_max_ms"
        if member.fetches and not member.running:  # it comes to them once it has answered those
            since_ms = max(member.free_ms, min(member.fetches.values()))
            if now_ms - since_ms > self._settle_max_ms(worker):
                return "it did not copy to host memory what was asked for within run_max_ms"
        at_work = [
            task
            for task in member.streams.values()
            if not (task.request.stalled or task.held or (task.feed is not None and task.feed.waits))
        ]
        limits = (self._plan.steps[task.unit.step].run_max_ms for task in at_work)
        return (
            "it was busy for longer than run_max_ms" if now_ms - member.spoke_ms > min(limits, default=math.inf) else ""
        )

    def answers(self, member: WorkerState, now_ms: float) -> bool:
        """Whether a worker is ready and gave a sign of life lately, or sleeps until it is needed."""
        if member.state in (ASLEEP, LEAVING) or member.called:
            return True
        heard = now_ms - member.heard_ms <= self._silence_max_ms or member.rest.loading
        return member.state == READY and not member.why and heard

    def _settle_max_ms(self, worker: int) -> float:
        """How long what is on a worker's streams at one moment may take, and copies of some of it."""
        return max((self._plan.steps[step].run_max_ms for step in self._steps_of[worker]), default=math.inf)
