"""Bare plan: a checked pipeline with all defaults applied, before placement."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from weftline.fields import copied
from weftline.nodes.catalog import CATALOG
from weftline.nodes.contract import StreamNode
from weftline.nodes.declared_files import identities, listings
from weftline.nodes.ports import PortType
from weftline.pipelines.check.checked import Checked, CheckedStep
from weftline.pipelines.check.checker import examine
from weftline.pipelines.check.control import conditional, guards, may_lack, switch_cases
from weftline.pipelines.check.options import request_options, to_options
from weftline.pipelines.check.wiring import Streams, readers, run_order, streams_of
from weftline.pipelines.placement.machine import Machine
from weftline.pipelines.placement.plan import Plan, PlannedInput, PlannedOutput, PlannedStep
from weftline.pipelines.spec.condition import Condition, all_of
from weftline.pipelines.spec.fallbacks import ABSENT
from weftline.pipelines.spec.graph import Pipeline, StepPolicy
from weftline.pipelines.spec.policy import BatchPolicy, SequencePolicy
from weftline.pipelines.spec.wire import Wire

OWN_NODES = "weftline.nodes."
"""Prefix of the dotted paths of Weftline's own node classes; only these can be light."""

RUN_MAX_MS = 600_000.0
"""Default upper limit of one call of a node: 10 minutes."""


@dataclass(frozen=True, slots=True)
class BarePlan:
    """A checked pipeline before placement.

    plan: with steps in running order, without processes and devices; None for a pipeline with problems.
    """

    pipeline: Pipeline
    checked: Checked
    plan: Plan | None

    def runs(self) -> list[str]:
        """Return the steps that workers run, in running order; of a pipeline with problems, in that of its file."""
        steps = self.plan.steps if self.plan is not None else self.checked.pipeline.steps
        return [step.name for step in steps if not self.is_control(step.name)]

    def is_control(self, name: str) -> bool:
        """Return True for a step that the scheduler evaluates."""
        return name in self.checked.steps and bool(self.checked.steps[name].control)


def bare_plan(pipeline: Pipeline, machine: Machine, catalog: Mapping[str, str] = CATALOG) -> BarePlan:
    """Return the bare plan of a pipeline; `checked.problems` of the result lists its problems."""
    checked = examine(pipeline, catalog)
    return BarePlan(pipeline, checked, None if checked.problems else _plan(checked, machine))


def light_bytes(checked: Checked, step: PlannedStep) -> int | None:
    """Return the bytes of the outputs of a light step's largest batch; None if it is not light."""
    if step.control or step.streams or step.sequence is not None or not step.node.startswith(OWN_NODES):
        return None
    one = checked.steps[step.name]
    item_bytes = one.node.light_output_bytes(one.config)
    return None if item_bytes is None else item_bytes * step.batch.items_max


def _plan(checked: Checked, machine: Machine) -> Plan:
    """Return the plan of a pipeline without problems, before placement."""
    pipeline, found, streams = checked.pipeline, guards(checked), streams_of(checked)
    uses = Counter(wire for _, wire in readers(pipeline))
    absent = conditional(checked)
    steps = []
    for name in run_order(_guarded(pipeline, found)):
        step = _step(checked.steps[name], checked, uses, streams)
        when = [one for one in (step.when, found.get(name)) if one is not None]
        may_lack_it = name in absent or name in found
        steps.append(dataclasses.replace(step, when=all_of(when) if when else None, conditional=may_lack_it))
    return Plan(
        name=pipeline.name,
        about=pipeline.about,
        secrets=pipeline.secrets,
        inputs=pipeline.inputs,
        input_types={one.name: checked.sizes.settle(PortType.parse(one.type), "") for one in pipeline.inputs},
        input_readers={one.name: uses[Wire(None, one.name)] for one in pipeline.inputs},
        steps=tuple(steps),
        outputs=_outputs(checked, absent, streams),
        workers=(),
        limits=pipeline.limits,
        slo=pipeline.slo,
        cores=machine.cores,
        base_dir=pipeline.base_dir,
        file=pipeline.file,
        ordering=pipeline.gpu.ordering,
        mps=pipeline.gpu.mps,
        nvtx=pipeline.gpu.nvtx,
    )


def _guarded(pipeline: Pipeline, found: Mapping[str, Condition]) -> Pipeline:
    """Return the pipeline with its guards as conditions, so that a guard's inputs run before the guarded step."""
    steps = [
        dataclasses.replace(step, when=all_of([one for one in (step.when, found[step.name]) if one]))
        if step.name in found
        else step
        for step in pipeline.steps
    ]
    return dataclasses.replace(pipeline, steps=tuple(steps))


def _step(one: CheckedStep, checked: Checked, uses: Counter[Wire], flow: Streams) -> PlannedStep:
    step, node, settle = one.step, one.node, checked.sizes.settle
    streams = step.name in flow.steps
    cases, default = switch_cases(one) if one.control == "switch" else ((), False)
    return PlannedStep(
        **copied(StepPolicy, step),
        name=step.name,
        node=one.reference,
        options=to_options(one.config),
        inputs=_inputs(one, checked, flow),
        fed=tuple(port.name for port in one.ports.inputs if streams and port.pieces and port.name in step.inputs),
        outputs=tuple(dataclasses.replace(port, type=settle(port.type, step.name)) for port in one.ports.outputs),
        readers={port.name: uses[Wire(step.name, port.name)] for port in one.ports.outputs},
        batch=step.batch or BatchPolicy(*node.batch_default),
        streams=streams,
        mutates_inputs=node.mutates_inputs,
        heavy=node.heavy,
        device="",
        workers=(),
        run_max_ms=RUN_MAX_MS if step.run_max_ms is None else step.run_max_ms,
        control=one.control,
        cases=cases,
        default=default,
        fallback=step.fallback if isinstance(step.fallback, str) and step.fallback != ABSENT else None,
        absent_on_failure=step.fallback == ABSENT,
        idempotent=node.idempotent if step.idempotent is None else step.idempotent,
        sequence=step.sequence or (SequencePolicy() if node.stateful and not streams else None),
        device_bytes=step.device_bytes or 0,
        fills_memory=issubclass(node, StreamNode) and node.fills_memory,
        variables=tuple(node.variables(one.config)),
        files=(*identities(one.files), *(() if one.user_code else listings(one.files))),
        request_options=tuple(request_options(node, one.config)),
        mixed_options=node.mixed_options,
    )


def _inputs(one: CheckedStep, checked: Checked, flow: Streams) -> tuple[PlannedInput, ...]:
    planned = []
    for port in one.ports.inputs:
        wire = one.step.inputs.get(port.name)
        source = checked.source(wire) if wire else None
        if wire and source:
            given, giver = source
            given = given.item if port.name in one.step.map and given.item else given
            type = checked.sizes.meet(given, giver, port.type, one.step.name)
            pieces = flow.inputs.get(one.step.name) == port.name
            planned.append(PlannedInput(port.name, wire, type, one.does_without(port), pieces))
    return tuple(planned)


def _outputs(checked: Checked, absent: Collection[str], flow: Streams) -> tuple[PlannedOutput, ...]:
    planned = []
    left_out = {one.name for one in checked.pipeline.inputs if may_lack(one)}
    for name, wire in checked.pipeline.outputs.items():
        type = checked.type_of(wire)
        if type is None:
            continue
        giver = checked.steps.get(wire.step) if wire.step else None
        port = giver.ports.output(wire.port) if giver else None
        pieces = bool(giver and port and port.pieces and giver.step.name in flow.steps and not giver.step.map)
        optional = wire.step in absent if wire.step else wire.port in left_out
        labels = port.labels if giver and port and not giver.step.map else ()
        planned.append(PlannedOutput(name, wire, type, pieces, optional, labels))
    return tuple(planned)
