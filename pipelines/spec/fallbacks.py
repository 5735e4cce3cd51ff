"""Expansion of fallbacks that are not one unread step: constants, and steps that others read as well.

A fallback that others read as well is expanded into a step that passes its outputs on. A constant fallback is expanded
into a step that passes constants on:

    answer:                                  answer/fallback:
      fallback: {text: "Sorry"}      ->        node: passes
                                               inputs: {text: answer/fallback/text}    # a hidden input, always "Sorry"
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from weftline.pipelines.check.problems import Origin
from weftline.pipelines.spec.constants import type_of
from weftline.pipelines.spec.graph import Input, Pipeline, Step
from weftline.pipelines.spec.wire import Wire

PASSES = "weftline.nodes.control:Passes"
"""Reference of the node that passes its inputs on."""


ABSENT = "absent"
"""The fallback of a step whose failure counts as absent outputs."""


def expand_fallbacks(pipeline: Pipeline) -> tuple[Pipeline, dict[str, Origin]]:
    """Return the pipeline with a step for every constant or shared fallback, and the origins of what was added."""
    inputs, steps, origins = list(pipeline.inputs), list[Step](), _of_constants(pipeline)
    read = _read_ports(pipeline)
    for step in pipeline.steps:
        name, path = f"{step.name}/fallback", f"steps.{step.name}.fallback"
        if isinstance(step.fallback, Mapping):
            wires = {port: Wire(None, f"{name}/{port}") for port in step.fallback}
            for port, value in step.fallback.items():
                inputs.append(Input(f"{name}/{port}", type_of(value), default=value, hidden=True))
                origins[f"inputs.{name}/{port}"] = Origin(f"{path}.{port}")
        elif isinstance(step.fallback, str) and step.fallback not in (step.name, ABSENT) and read.get(step.fallback):
            wires = {port: Wire(step.fallback, port) for port in _wanted_ports(step, pipeline, read)}
            origins |= {f"steps.{name}.inputs.{port}": Origin(path) for port in wires}
        else:
            steps.append(step)
            continue
        origins[f"steps.{name}"] = Origin(path)
        steps += [dataclasses.replace(step, fallback=name), Step(name, PASSES, inputs=wires)]
    return dataclasses.replace(pipeline, inputs=tuple(inputs), steps=tuple(steps)), origins


def shared_fallback(step: Step) -> str:
    """Return the step whose outputs a generated fallback passes on; '' if it passes on constants."""
    return next((wire.step for wire in step.inputs.values() if wire.step is not None), "")


def _read_ports(pipeline: Pipeline) -> dict[str, dict[str, None]]:
    """Return the ports of each step that steps, conditions and outputs read."""
    found: dict[str, dict[str, None]] = {}
    wires = [*pipeline.outputs.values()]
    for step in pipeline.steps:
        wires += [*step.inputs.values(), *(step.when.wires if step.when else ())]
    for wire in wires:
        if wire.step is not None:
            found.setdefault(wire.step, {})[wire.port] = None
    return found


def _wanted_ports(step: Step, pipeline: Pipeline, read: Mapping[str, Mapping[str, None]]) -> list[str]:
    """Return the ports that a step's fallback must have: those that are read, also of a step that it replaces."""
    owners = {one.fallback: one.name for one in pipeline.steps if isinstance(one.fallback, str)}
    name, found = step.name, dict.fromkeys(read.get(step.name, ()))
    for _ in pipeline.steps:
        if name not in owners:
            break
        name = owners[name]
        found |= dict.fromkeys(read.get(name, ()))
    return list(found)


def _of_constants(pipeline: Pipeline) -> dict[str, Origin]:
    hidden = {Wire(None, one.name) for one in pipeline.inputs if one.hidden}
    return {
        f"inputs.{wire.port}": Origin(f"steps.{step.name}.inputs.{port}")
        for step in pipeline.steps
        for port, wire in step.inputs.items()
        if wire in hidden
    }
