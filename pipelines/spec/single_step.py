"""Extraction of one step of a pipeline into a pipeline of its own.

Its inputs and outputs are the step's ports. What it was wired to in its pipeline, conditions, retries, fallbacks and
timeouts are left behind; batching, limits, device and memory between requests stay. A step inside a pipeline that is
used as a step, `ocr/read`, gets a name that can be written in a file, `ocr-read`.
"""

from __future__ import annotations

from dataclasses import replace

from weftline.errors import InputError, PipelineError
from weftline.pipelines.check.checker import examine
from weftline.pipelines.check.problems import did_you_mean
from weftline.pipelines.spec.entries import NAME_CHARS_MAX
from weftline.pipelines.spec.graph import Input, Pipeline, Step
from weftline.pipelines.spec.wire import Wire


def alone(pipeline: Pipeline, name: str) -> Pipeline:
    """Return the pipeline of one step; PipelineError: the whole has problems, InputError: there is no such step.

    A port of type `any` takes json. A step that the scheduler decides itself (`first`, `switch`) cannot stand alone.
    """
    checked = examine(pipeline)
    if checked.problems:
        raise PipelineError(checked.problems)
    one = checked.steps.get(name)
    if one is None:
        hint = did_you_mean(name, checked.steps) or f"steps here: {', '.join(checked.steps)}"
        raise InputError(f"step {name:.80} is not in pipeline {pipeline.name}\n    fix: {hint}")
    inputs = tuple(
        Input(port.name, "json" if port.type.kind == "any" else str(port.type), port.about, optional=port.optional)
        for port in one.ports.inputs
    )
    own = one.step.name.replace("/", "-")[:NAME_CHARS_MAX]
    step = Step(
        own,
        one.step.node,
        options=one.step.options,
        inputs={given.name: Wire(None, given.name) for given in inputs},
        batch=one.step.batch,
        device=one.step.device,
        threads=one.step.threads,
        device_bytes=one.step.device_bytes,
        instances=one.step.instances,
        reserved=one.step.reserved,
        run_max_ms=one.step.run_max_ms,
        idempotent=one.step.idempotent,
        finite=one.step.finite,
        sequence=one.step.sequence,
        base_dir=one.step.base_dir,
    )
    outputs = {port.name: Wire(own, port.name) for port in one.ports.outputs}
    whole = f"{pipeline.name}-{own}"[:NAME_CHARS_MAX]
    return replace(checked.pipeline, name=whole, inputs=inputs, steps=(step,), outputs=outputs, about="")
