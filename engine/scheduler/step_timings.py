"""Record step timings in a request."""

from __future__ import annotations

from collections.abc import Sequence

from weftline.engine.protocol.messages import StepRun
from weftline.engine.scheduler.request import StepTiming, Task
from weftline.engine.scheduler.state import SchedulerState


def record_timings(state: SchedulerState, task: Task, outcome: str, ran: Sequence[StepRun] = ()) -> None:
    """Write down how long a task's steps took: one StepTiming for each stage that ran.

    The first stage is charged with all messages; the time that an item waited although its worker was free counts as
    waiting for company.
    """
    now_ms, steps = state.now_ms, state.steps
    timings, first = task.request.timings, steps[task.unit.step].name
    if task.worker < 0 or not ran:
        worker_id = state.workers[task.worker].name if task.worker >= 0 else ""
        started = task.started_ms if task.worker >= 0 else now_ms
        timings.append(
            StepTiming(
                first, started - task.arrived_ms, now_ms - started, 0, 0.0, 0.0, worker_id, started, task.attempts,
                task.element, outcome,
            )
        )  # fmt: skip
        return
    worker, one, later, started = state.workers[task.worker], ran[0], ran[1:], task.started_ms
    free = worker.free_ms if worker.free_ms > task.arrived_ms else task.arrived_ms
    run_ms = now_ms - started
    for stage_ran in later:
        run_ms -= stage_ran.run_ms
    run_ms = max(run_ms, 0.0)
    batch = one.items if one.batches <= 1 else _batch(one)
    timings.append(
        tuple.__new__(  # equal to StepTiming(...) at half the cost, on the hot path
            StepTiming,
            (
                first, started - task.arrived_ms, run_ms, batch, max(started - free, 0.0), one.run_ms,
                worker.name, started, task.attempts, task.element, "ok" if later else outcome,
            ),
        )
    )  # fmt: skip
    for stage, one in enumerate(later, 1):
        started += run_ms
        run_ms = one.run_ms
        timings.append(
            StepTiming(
                steps[task.unit.steps[stage]].name, 0.0, run_ms, _batch(one), 0.0, run_ms, worker.name, started,
                task.attempts, task.element, outcome if stage == len(ran) - 1 else "ok",
            )
        )  # fmt: skip


def _batch(ran: StepRun) -> int:
    """Return how many items shared a call."""
    return ran.items if ran.batches <= 1 else -(-ran.items // ran.batches)
