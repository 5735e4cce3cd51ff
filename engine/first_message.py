"""The first thing a worker is told: which steps to open, where, and with how much memory, as its plan says."""

from __future__ import annotations

from pathlib import Path

from weftline.engine import messages as msg
from weftline.pipelines.plan import Plan, PlannedStep


def open_message(plan: Plan, worker: int, cache_dir: Path) -> msg.Open:
    """Return the Open of one worker of a plan. cache_dir: where its nodes keep compiled engines and the like."""
    planned = plan.workers[worker]
    steps = tuple(
        _step_to_open(index, step, worker) for index, step in enumerate(plan.steps) if step.name in planned.steps
    )
    folders = str(plan.base_dir.absolute()), str(cache_dir.absolute())
    return msg.Open(
        planned.name,
        planned.arena_bytes,
        planned.threads,
        *folders,
        steps,
        planned.device,
        planned.device_arena_bytes,
        plan.ordering,
    )


def _step_to_open(index: int, step: PlannedStep, worker: int) -> msg.StepToOpen:
    return msg.StepToOpen(
        index,
        step.name,
        step.node,
        dict(step.options),
        tuple((given.port, str(given.type)) for given in step.inputs),
        tuple((port.name, str(port.type)) for port in step.outputs),
        step.devices[step.workers.index(worker)] if step.devices else step.device,
        step.batch.items_max,
        step.mutates_inputs,
        dict(step.batch.pad),
        step.batch.pad_value,
        str(step.base_dir.absolute()) if step.base_dir is not None else "",
        step.streams,
        step.fed,
        step.near_inputs,
        dict(step.near_outputs),
        step.finite,
    )
