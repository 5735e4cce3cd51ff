"""From a pipeline to its plan: checked, sorted, placed, every default filled in."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping

from weftline.errors import PipelineError
from weftline.nodes.catalog import CATALOG
from weftline.nodes.contract import StreamNode
from weftline.nodes.ports import PortType
from weftline.pipelines.check import Checked, CheckedStep, examine
from weftline.pipelines.graph import Pipeline
from weftline.pipelines.options import to_options
from weftline.pipelines.place import Machine, Placement, place
from weftline.pipelines.plan import Plan, PlannedInput, PlannedOutput, PlannedStep
from weftline.pipelines.policy import BatchPolicy
from weftline.pipelines.report import Report
from weftline.pipelines.wiring import readers

RUN_MAX_MS = 600_000.0
"""Longest one call of a node may take when its step does not say: 10 minutes."""


def make_plan(pipeline: Pipeline, machine: Machine, catalog: Mapping[str, str] = CATALOG) -> Plan:
    """Return the plan of the pipeline on `machine`; PipelineError lists every problem of both."""
    checked = examine(pipeline, catalog)
    heavy = {step.name: _heavy(checked, step.name) for step in checked.pipeline.steps}
    placement, problems = place(checked.pipeline.steps, heavy, pipeline.limits, machine)
    report = Report(pipeline, problems=list(checked.problems))
    report.take(problems)
    if report.problems:
        raise PipelineError(report.problems)
    return _plan(checked, placement, machine)


def _heavy(checked: Checked, name: str) -> bool:
    return name in checked.steps and checked.steps[name].node.heavy


def _plan(checked: Checked, placement: Placement, machine: Machine) -> Plan:
    pipeline = checked.pipeline
    uses = Counter(wire for _, wire in readers(pipeline))
    types = {one.name: checked.sizes.settle(PortType.parse(one.type), "") for one in pipeline.inputs}
    return Plan(
        name=pipeline.name,
        about=pipeline.about,
        inputs=pipeline.inputs,
        input_types=types,
        input_readers={
            one.name: sum(n for wire, n in uses.items() if wire.step is None and wire.port == one.name)
            for one in pipeline.inputs
        },
        steps=tuple(_step(one, checked, placement, uses) for one in checked.steps.values()),
        outputs=_outputs(checked),
        workers=placement.workers,
        limits=pipeline.limits,
        slo=pipeline.slo,
        cores=machine.cores,
        base_dir=pipeline.base_dir,
        file=pipeline.file,
    )


def _step(one: CheckedStep, checked: Checked, placement: Placement, uses: Counter) -> PlannedStep:
    step, node, settle = one.step, one.node, checked.sizes.settle
    readers_of = {
        port.name: sum(n for wire, n in uses.items() if (wire.step, wire.port) == (step.name, port.name))
        for port in one.ports.outputs
    }
    return PlannedStep(
        name=step.name,
        node=one.reference,
        options=to_options(one.config),
        inputs=_inputs(one, checked),
        outputs=tuple(dataclasses.replace(port, type=settle(port.type, step.name)) for port in one.ports.outputs),
        readers=readers_of,
        batch=step.batch or BatchPolicy(*node.batch_default),
        streams=issubclass(node, StreamNode),
        mutates_inputs=node.mutates_inputs,
        heavy=node.heavy,
        device=placement.devices[step.name],
        workers=placement.places[step.name],
        run_max_ms=RUN_MAX_MS if step.run_max_ms is None else step.run_max_ms,
    )


def _inputs(one: CheckedStep, checked: Checked) -> tuple[PlannedInput, ...]:
    planned = []
    for port in one.ports.inputs:
        wire = one.step.inputs.get(port.name)
        source = checked.source(wire) if wire else None
        if wire and source:
            planned.append(PlannedInput(port.name, wire, checked.sizes.meet(*source, port.type, one.step.name)))
    return tuple(planned)


def _outputs(checked: Checked) -> tuple[PlannedOutput, ...]:
    planned = []
    for name, wire in checked.pipeline.outputs.items():
        source = checked.source(wire)
        if source:
            port = checked.steps[wire.step].ports.output(wire.port) if wire.step else None
            planned.append(PlannedOutput(name, wire, checked.sizes.settle(*source), bool(port and port.pieces)))
    return tuple(planned)
