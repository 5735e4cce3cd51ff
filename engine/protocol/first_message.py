"""Build OpenSteps, the first message to a worker: its steps, device and memory sizes from the plan."""

from __future__ import annotations

import logging
from pathlib import Path

from weftline.engine.protocol import messages as msg
from weftline.fields import copied
from weftline.pipelines.placement.budget import kv_most, reserve_of, takes_rest
from weftline.pipelines.placement.chains import step_threads
from weftline.pipelines.placement.plan import Plan, PlannedStep
from weftline.pipelines.spec.policy import CallPolicy


def open_message(plan: Plan, worker: int, cache_dir: Path) -> msg.OpenSteps:
    """Return the OpenSteps of one worker of a plan. cache_dir: cache of compiled engines and similar files of nodes."""
    planned, threads = plan.workers[worker], step_threads(plan, worker)
    steps = tuple(
        _step_to_open(index, step, worker, threads.get(index, 0), plan)
        for index, step in enumerate(plan.steps)
        if step.name in planned.steps
    )
    return msg.OpenSteps(
        worker=planned.name,
        arena_bytes=planned.arena_bytes,
        threads=planned.threads,
        base_dir=str(plan.base_dir.absolute()),
        cache_dir=str(cache_dir.absolute()),
        steps=steps,
        device=planned.device,
        device_arena_bytes=planned.device_arena_bytes,
        ordering=plan.ordering,
        log_level=logging.getLogger().getEffectiveLevel(),  # workers follow this process's root logger
        nvtx=plan.nvtx and bool(planned.device),
    )


def _step_to_open(index: int, step: PlannedStep, worker: int, thread: int, plan: Plan) -> msg.StepToOpen:
    device = step.devices[step.workers.index(worker)] if step.devices else step.device
    budget = next((one for one in plan.budgets if one.device == device and takes_rest(step, one)), None)
    return msg.StepToOpen(
        index=index,
        name=step.name,
        node=step.node,
        options=dict(step.options),
        inputs=tuple((given.port, str(given.type)) for given in step.inputs),
        outputs=tuple((port.name, str(port.type)) for port in step.outputs),
        device=device,
        batch=step.batch,
        mutates_inputs=step.mutates_inputs,
        policy=CallPolicy(**copied(CallPolicy, step)),
        base_dir=str(step.base_dir.absolute()) if step.base_dir is not None else "",
        streams=step.streams,
        fed=step.fed,
        device_inputs=step.device_inputs,
        device_outputs=dict(step.device_outputs),
        remembers=step.sequence is not None,
        memory_limit_bytes=budget.rest_bytes if budget is not None else 0,
        reserve_bytes=reserve_of(budget) if budget is not None else 0,
        kv_most_bytes=kv_most(plan, step, device),
        thread=thread,
        files=step.files,
    )
