"""Debug variant of a pipeline: one step alone in its worker, without time limits.

A debugger stops a step for minutes. Its timeout, its retries, its further instances and the deadlines of requests are
left out, and so are the limits on silent workers and slow readers, which the same debugger may stop.
"""

from __future__ import annotations

import math
from dataclasses import replace

from weftline.errors import InputError
from weftline.pipelines.check.problems import did_you_mean
from weftline.pipelines.placement.plan import Plan
from weftline.pipelines.spec.graph import Pipeline, Step


def graph_to_debug(pipeline: Pipeline, name: str) -> Pipeline:
    """Return the pipeline with this step in one worker of its own; InputError when there is no such step in it."""
    step = pipeline.step(name)
    if step is None or step.pipeline:
        steps = [one.name for one in pipeline.steps if not one.pipeline]
        hint = did_you_mean(name, steps) or f"steps here: {', '.join(steps)}"
        what = "is a pipeline of its own" if step is not None else f"is not in pipeline {pipeline.name}"
        raise InputError(f"debug: step {name:.80} {what}\n    fix: {hint}")
    instances = 1 if isinstance(step.instances, int) else {next(iter(step.instances), "cpu"): 1}
    alone: Step = replace(
        step, instances=instances, reserved=0, worker=None, idle=None, retry=None, timeout_ms=None, run_max_ms=None
    )
    replaced = tuple(alone if one is step else one for one in pipeline.steps)
    return replace(pipeline, steps=replaced, limits=replace(pipeline.limits, deadline_ms=None, refuse_early=False))


def plan_to_debug(plan: Plan, name: str) -> Plan:
    """Return the plan of such a pipeline with the step marked and without limits of time that it may exceed."""
    if not plan.step(name).workers:
        raise InputError(f"debug: step {name:.80} runs no code: the scheduler decides it")
    steps = tuple(replace(step, run_max_ms=math.inf) if step.name == name else step for step in plan.steps)
    limits = replace(plan.limits, silence_max_ms=math.inf, stall_max_ms=math.inf)
    return replace(plan, steps=steps, limits=limits, debug=name)
