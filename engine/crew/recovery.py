"""What becomes of work that failed, or whose worker died: tried again, split, given up, or kept out for good.

When a worker dies, every task it was running is a suspect. A group of suspects is split in halves that are run apart,
so that a task that kills its worker is alone after log2 of the batch's size, and its mates are answered; this has a
limit of its own, the deaths of one task. A task that was alone when its worker died is tried once more, within the
budget for retries; if it kills again it is kept out by what it is made of. Work that must not run twice just fails.

Where a worker is killed because it waits on the device for one that died, what it was running is no suspect: it is run
again as it came.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from weftline.engine.crew.budget import RetryBudget
from weftline.engine.crew.quarantine import Quarantine
from weftline.engine.scheduling.request import Task
from weftline.pipelines.plan import Plan

LONE_DEATHS_MAX = 2
"""How many workers a task may take along before it is given up, once it is alone."""

SPARED_MAX = 8
"""How many workers may be killed under a task for another's sake: a killer in a batch of 64 costs log2(64) + 2."""

TRIED_AGAIN = frozenset({"StepError", "WorkerDied", "DeadlineExceeded", "LimitReached", "ModelError"})
"""Errors after which another attempt may help; a wrong input stays wrong."""


@dataclass(slots=True)
class Verdict:
    """What to do after a death: groups to run again, each alone; tasks that failed, with the message; who is kept out.

    kept_out: (step, digest) that no worker may be given again.
    """

    groups: list[list[Task]] = field(default_factory=list)
    failed: list[tuple[Task, str]] = field(default_factory=list)
    kept_out: list[tuple[int, bytes]] = field(default_factory=list)


class Recovery:
    """Decides about second attempts. Pure; owned by the scheduler."""

    def __init__(self, plan: Plan) -> None:
        self._steps = plan.steps
        self.budget = RetryBudget(plan.limits.retry_share)
        self.quarantine = Quarantine()

    def after_death(self, tasks: Sequence[Task], why: str, now_ms: float) -> Verdict:
        """Return what becomes of the tasks that a worker had in hand when it died; ended requests are left out."""
        verdict = Verdict()
        again: list[Task] = []
        for task in tasks:
            task.deaths += 1
            if self._once(task):
                verdict.failed.append((task, f"its worker died while running it ({why})"))
            elif len(tasks) > 1:
                again.append(task)
            elif task.deaths >= LONE_DEATHS_MAX:
                verdict.failed.append((task, f"it took {task.deaths} workers along ({why}); it is not tried again"))
                if task.digest and self.quarantine.add(task.unit.step, task.digest, now_ms):
                    verdict.kept_out.append((task.unit.step, task.digest))
            elif self.budget.try_take():
                again.append(task)
            else:
                verdict.failed.append((task, f"its worker died ({why}), and limits.retry_share is used up"))
        if len(again) > 1:
            half = (len(again) + 1) // 2
            verdict.groups = [again[:half], again[half:]]
        elif again:
            verdict.groups = [again]
        for task in again:
            task.attempts += 1
        return verdict

    def after_loss(self, tasks: Sequence[Task], why: str) -> Verdict:
        """Return what becomes of the tasks that a worker had in hand when it was killed for another's sake."""
        verdict = Verdict()
        for task in tasks:
            task.spared += 1
            if self._once(task):
                verdict.failed.append((task, f"its worker died while running it ({why})"))
            elif task.spared > SPARED_MAX:
                told = f"{task.spared} workers were killed under it ({why}); it is not tried again"
                verdict.failed.append((task, told))
            else:
                task.attempts += 1
                verdict.groups.append([task])
        return verdict

    def _once(self, task: Task) -> bool:
        """Whether a task must not run twice."""
        sequence = self._steps[task.unit.step].sequence
        return task.said or sequence is not None or not all(self._steps[s].idempotent for s in task.unit.steps)

    def try_again_in_ms(self, task: Task, error: str, timed_out: bool, at_work: bool = False) -> float | None:
        """Return after how long a failed task is tried again by its step's `retry:`; None: it is not.

        at_work: a worker may still be running it; what must not run twice is then not tried again. Nor is an item of a
                 sequence that timed out, because those behind it have their turn.
        """
        step = self._steps[task.unit.step]
        retry = step.retry
        if retry is None or error not in TRIED_AGAIN or task.attempts > retry.attempts + task.deaths + task.spared:
            return None
        if (at_work and not step.idempotent) or (timed_out and step.sequence is not None):
            return None
        if ("timeout" if timed_out else "error") not in retry.on or task.said or not self.budget.try_take():
            return None
        wait_ms = retry.wait_ms * 2 ** max(0, task.attempts - 1 - task.deaths - task.spared)
        task.attempts += 1
        return float(wait_ms)
