"""Expansion of constant fallbacks into steps that pass constants on.

answer:                                  answer/fallback:
  fallback: {text: "Sorry"}      ->        node: passes
                                           inputs: {text: answer/fallback/text}    # a hidden input, always "Sorry"
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from weftline.pipelines.check.problem_collector import Origin
from weftline.pipelines.spec.constants import type_of
from weftline.pipelines.spec.graph import Input, Pipeline, Step
from weftline.pipelines.spec.wire import Wire

PASSES = "weftline.nodes.control:Passes"
"""The node whose outputs are its inputs."""


def write_out_fallbacks(pipeline: Pipeline) -> tuple[Pipeline, dict[str, Origin]]:
    """Return the pipeline with a step behind every constant fallback, and where its constants were written."""
    inputs, steps, origins = list(pipeline.inputs), list[Step](), _of_constants(pipeline)
    for step in pipeline.steps:
        if not isinstance(step.fallback, Mapping):
            steps.append(step)
            continue
        name, path = f"{step.name}/fallback", f"steps.{step.name}.fallback"
        origins[f"steps.{name}"] = Origin(path)
        wires = {}
        for port, value in step.fallback.items():
            wires[port] = Wire(None, f"{name}/{port}")
            inputs.append(Input(f"{name}/{port}", type_of(value), default=value, hidden=True))
            origins[f"inputs.{name}/{port}"] = Origin(f"{path}.{port}")
        steps += [dataclasses.replace(step, fallback=name), Step(name, PASSES, inputs=wires)]
    return dataclasses.replace(pipeline, inputs=tuple(inputs), steps=tuple(steps)), origins


def _of_constants(pipeline: Pipeline) -> dict[str, Origin]:
    hidden = {Wire(None, one.name) for one in pipeline.inputs if one.hidden}
    return {
        f"inputs.{wire.port}": Origin(f"steps.{step.name}.inputs.{port}")
        for step in pipeline.steps
        for port, wire in step.inputs.items()
        if wire in hidden
    }
