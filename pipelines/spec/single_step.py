"""Pipelines around one step: an exposed step as a pipeline of its own, and the debug variant of a pipeline.

Extraction: inputs and outputs are the step's ports. Wires, conditions, retries, fallbacks and timeouts are dropped.
Batching, limits, device and sequence state stay. Step `ocr/read` of a sub-pipeline is renamed `ocr-read`.

Debug: the step runs alone in its worker. A debugger can stop it for minutes, so its timeout, its retries, its further
instances, the deadlines of requests, and the limits on silent workers and slow readers are removed.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import replace

from weftline.errors import InputError, PipelineError
from weftline.nodes.ports import Port
from weftline.pipelines.check.checker import examine
from weftline.pipelines.check.problems import did_you_mean
from weftline.pipelines.placement.plan import Plan
from weftline.pipelines.spec.graph import Input, Pipeline, Step
from weftline.pipelines.spec.policy import NAME_CHARS_MAX
from weftline.pipelines.spec.wire import Wire

_IN_GRAPH = ("when", "map", "retry", "timeout_ms", "fallback", "worker", "idle")
"""Keys of a step that make no sense outside its pipeline."""


def alone(pipeline: Pipeline, name: str) -> Pipeline:
    """Return the pipeline of one step. PipelineError: the pipeline has problems. InputError: there is no such step.

    A port of type `any` accepts json. A step that the scheduler evaluates (`first`, `switch`) cannot be extracted.
    """
    checked = examine(pipeline)
    if checked.problems:
        raise PipelineError(checked.problems)
    one = checked.steps.get(name)
    if one is None:
        hint = did_you_mean(name, checked.steps) or f"steps here: {', '.join(checked.steps)}"
        raise InputError(f"step {name:.80} is not in pipeline {pipeline.name}\n    fix: {hint}")
    inputs = tuple(_input(port, port.name) for port in one.ports.inputs)
    own = one.step.name.replace("/", "-")[:NAME_CHARS_MAX]
    step = replace(
        one.step,
        name=own,
        inputs={given.name: Wire(None, given.name) for given in inputs},
        **{key: getattr(Step(""), key) for key in _IN_GRAPH},
    )
    outputs = {port.name: Wire(own, port.name) for port in one.ports.outputs}
    whole = f"{pipeline.name}-{own}"[:NAME_CHARS_MAX]
    return replace(checked.pipeline, name=whole, inputs=inputs, steps=(step,), outputs=outputs, about="")


def exposed(pipeline: Pipeline, name: str) -> Pipeline:
    """Return the pipeline of one step that shares what the step of `exposing(pipeline, [name])` loads.

    Errors as of `alone`. A step in a process that it shares by `worker:` is loaded again.
    """
    one = alone(pipeline, name)
    step = pipeline.step(name)
    return replace(one, steps=(replace(one.steps[0], idle=step.idle if step is not None else None),))


Models = frozenset[tuple[str, str]]
"""Node and `model:` of steps."""


def models_of(pipeline: Pipeline, names: Collection[str]) -> Models:
    """Return the models that some steps of a pipeline name."""
    found = ((step.node, step.options.get("model")) for step in pipeline.steps if step.name in names)
    return frozenset((node, model) for node, model in found if isinstance(model, str))


def steps_of(pipeline: Pipeline, models: Models) -> list[str]:
    """Return the steps of a pipeline that name one of these models."""
    return [step.name for step in pipeline.steps if (step.node, step.options.get("model")) in models]


def exposing(pipeline: Pipeline, names: Collection[str]) -> Pipeline:
    """Return the pipeline with all optional inputs of these steps connected: further ones to absent constants.

    What is loaded depends on the inputs that are connected. PipelineError: the pipeline has problems.
    """
    checked = examine(pipeline)
    if checked.problems:
        raise PipelineError(checked.problems)
    inputs, steps = list(pipeline.inputs), list[Step]()
    for step in pipeline.steps:
        one = checked.steps.get(step.name) if step.name in names else None
        ports = [port for port in one.ports.inputs if port.name not in one.step.inputs] if one is not None else []
        free = [_input(port, f"{step.name}/{port.name}") for port in ports]
        wires = {one.name.rpartition("/")[2]: Wire(None, one.name) for one in free}
        inputs += [replace(one, optional=True, hidden=True) for one in free]
        steps.append(replace(step, inputs={**step.inputs, **wires}))
    return replace(pipeline, inputs=tuple(inputs), steps=tuple(steps))


def _input(port: Port, name: str) -> Input:
    return Input(name, "json" if port.type.kind == "any" else str(port.type), port.about, optional=port.optional)


def graph_to_debug(pipeline: Pipeline, name: str) -> Pipeline:
    """Return the pipeline with this step in one worker of its own. InputError: there is no such step."""
    step = pipeline.step(name)
    if step is None or step.pipeline:
        steps = [one.name for one in pipeline.steps if not one.pipeline]
        hint = did_you_mean(name, steps) or f"steps here: {', '.join(steps)}"
        what = "is a pipeline of its own" if step is not None else f"is not in pipeline {pipeline.name}"
        raise InputError(f"debug: step {name:.80} {what}\n    fix: {hint}")
    instances = 1 if isinstance(step.instances, int) else {next(iter(step.instances), "cpu"): 1}
    own, others = name, {other.worker for other in pipeline.steps}
    while own in others:
        own += "-debug"
    alone: Step = replace(
        step, instances=instances, reserved=0, worker=own, idle=None, retry=None, timeout_ms=None, run_max_ms=None
    )
    replaced = tuple(alone if one is step else one for one in pipeline.steps)
    return replace(pipeline, steps=replaced, limits=replace(pipeline.limits, deadline_ms=None, refuse_early=False))


def plan_to_debug(plan: Plan, name: str) -> Plan:
    """Return the plan of such a pipeline with the step marked, and without time limits for it."""
    if not plan.step(name).workers:
        raise InputError(f"debug: step {name:.80} runs no code: the scheduler evaluates it")
    steps = tuple(replace(step, run_max_ms=math.inf) if step.name == name else step for step in plan.steps)
    limits = replace(plan.limits, silence_max_ms=math.inf, stall_max_ms=math.inf)
    return replace(plan, steps=steps, limits=limits, debug=name)
