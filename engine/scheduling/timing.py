"""How long a task's steps took, written down in its request."""

from __future__ import annotations

from collections.abc import Sequence

from weftline.engine.crew.crew import Crew
from weftline.engine.messages import Ran
from weftline.engine.scheduling.request import StepTiming, Task
from weftline.pipelines.plan import PlannedStep


def note(
    steps: Sequence[PlannedStep], crew: Crew, task: Task, now_ms: float, outcome: str, ran: Sequence[Ran] = ()
) -> None:
    """Write down how long a task's steps took: one StepTiming for each stage that ran.

    The first stage is charged with all messages; the time that an item waited although its worker was free counts as
    waiting for company.
    """
    timings, first = task.request.timings, steps[task.unit.step].name
    if task.worker < 0 or not ran:
        worker = crew.members[task.worker].name if task.worker >= 0 else ""
        started = task.started_ms if task.worker >= 0 else now_ms
        timings.append(
            StepTiming(
                first, started - task.arrived_ms, now_ms - started, 0, 0.0, 0.0, worker, started, task.attempts,
                task.element, outcome,
            )
        )  # fmt: skip
        return
    member, one, later, started = crew.members[task.worker], ran[0], ran[1:], task.started_ms
    free = member.free_ms if member.free_ms > task.arrived_ms else task.arrived_ms
    run_ms = now_ms - started
    for stage_ran in later:
        run_ms -= stage_ran.run_ms
    run_ms = max(run_ms, 0.0)
    timings.append(
        tuple.__new__(  # which is what StepTiming(...) comes to, at half the cost; it is on the way of every item
            StepTiming,
            (
                first, started - task.arrived_ms, run_ms, _batch(one), max(started - free, 0.0), one.run_ms,
                member.name, started, task.attempts, task.element, "ok" if later else outcome,
            ),
        )
    )  # fmt: skip
    for stage, one in enumerate(later, 1):
        started += run_ms
        run_ms = one.run_ms
        timings.append(
            StepTiming(
                steps[task.unit.steps[stage]].name, 0.0, run_ms, _batch(one), 0.0, run_ms, member.name, started,
                task.attempts, task.element, outcome if stage == len(ran) - 1 else "ok",
            )
        )  # fmt: skip


def _batch(ran: Ran) -> int:
    """Return how many items shared a call."""
    return ran.items if ran.batches <= 1 else -(-ran.items // ran.batches)
