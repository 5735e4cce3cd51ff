"""Planner: from a pipeline to its plan, with all defaults applied."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Collection, Mapping

from weftline.errors import PipelineError
from weftline.fields import copied
from weftline.nodes.catalog import CATALOG
from weftline.nodes.contract import StepContext, StreamNode
from weftline.nodes.ports import PortType
from weftline.pipelines.check.checked import Checked, CheckedStep
from weftline.pipelines.check.checker import examine, types_of
from weftline.pipelines.check.control import conditional, guards, may_lack, switch_cases
from weftline.pipelines.check.options import to_options
from weftline.pipelines.check.problems import Report
from weftline.pipelines.check.wiring import Streams, readers, run_order, streams_of
from weftline.pipelines.placement.budget import budgets, over_commits, with_kv_memory
from weftline.pipelines.placement.chains import chains
from weftline.pipelines.placement.machine import Machine
from weftline.pipelines.placement.model_memory import oversized
from weftline.pipelines.placement.needs import Needs, needs_of
from weftline.pipelines.placement.place import Placement, place
from weftline.pipelines.placement.plan import Plan, PlannedInput, PlannedOutput, PlannedStep
from weftline.pipelines.placement.profile_file import Profile
from weftline.pipelines.placement.transfers import device_edges, with_transfers
from weftline.pipelines.spec.condition import Condition, all_of
from weftline.pipelines.spec.fallbacks import ABSENT
from weftline.pipelines.spec.graph import Pipeline, StepPolicy
from weftline.pipelines.spec.policy import BatchPolicy, SequencePolicy
from weftline.pipelines.spec.wire import Wire
from weftline.shm.device.names import is_gpu

OWN_NODES = "weftline.nodes."
"""Prefix of the dotted paths of Weftline's own node classes; only these can be light."""

RUN_MAX_MS = 600_000.0
"""Default upper limit of one call of a node: 10 minutes."""


def make_plan(
    pipeline: Pipeline, machine: Machine, catalog: Mapping[str, str] = CATALOG, profile: Profile | None = None
) -> Plan:
    """Return the plan of the pipeline on `machine`; PipelineError lists every problem of both.

    profile: measured costs of its steps; None: not measured.
    """
    checked = examine(pipeline, catalog)
    controls = {name for name, one in checked.steps.items() if one.control}
    run = [step for step in checked.pipeline.steps if step.name not in controls]
    heavy = {step.name: _heavy(checked, step.name) for step in run}
    ports = {name: one.device_ports for name, one in checked.steps.items()}
    needs = needs_of(checked, machine, profile)
    bare = None if checked.problems else _plan(checked, machine)
    edges = device_edges(bare.steps, ports) if bare is not None else ()
    light = (
        {step.name: size for step in bare.steps if (size := _light_bytes(checked, step)) is not None} if bare else {}
    )
    placement, problems = place(run, heavy, pipeline.limits, machine, pipeline.gpu, needs, edges, light)
    report = Report(pipeline, checked.origins, list(checked.problems))
    report.take(problems)
    if report.problems or bare is None:
        raise PipelineError(report.problems)
    plan = with_transfers(_placed(bare, placement), ports, pipeline.gpu.arena_bytes)
    plan = dataclasses.replace(
        plan,
        steps=tuple(dataclasses.replace(step, device_bytes=_device_bytes(step, needs)) for step in plan.steps),
        budgets=budgets(plan, needs, pipeline.gpu, machine),
        notes=(*placement.process_notes, *needs.notes, *_without_host_sleep(checked, plan), *_of_nodes(checked, plan)),
        work=placement.work,
    )
    report.take(oversized(checked, plan, machine))
    report.take(over_commits(plan))
    plan, problems = with_kv_memory(plan)
    report.take(problems)
    if report.problems:
        raise PipelineError(report.problems)
    return plan


def _heavy(checked: Checked, name: str) -> bool:
    return name in checked.steps and checked.steps[name].node.heavy


def _light_bytes(checked: Checked, step: PlannedStep) -> int | None:
    """Return the bytes of the outputs of a light step's largest batch; None if it is not light."""
    if step.control or step.streams or step.sequence is not None or not step.node.startswith(OWN_NODES):
        return None
    one = checked.steps[step.name]
    item_bytes = one.node.light_output_bytes(one.config)
    return None if item_bytes is None else item_bytes * step.batch.items_max


def _without_host_sleep(checked: Checked, plan: Plan) -> list[str]:
    """Return a line for each step that is configured to keep weights in host memory while asleep, but cannot."""
    found = []
    for step in plan.steps:
        if step.idle is None or step.idle.keep != "host":
            continue
        one = checked.steps[step.name]
        if not one.node.can_rest(one.config, StepContext(one.step.base_dir or checked.pipeline.base_dir)):
            what = f"node {one.step.node} is opened again"
            found.append(f"{step.name} keeps only its process while it sleeps: {what}")
        elif not any(map(is_gpu, step.devices or (step.device,))):
            why = "the CPU's memory is the host's"
            found.append(f"{step.name} keeps its weights where they are while it sleeps: {why}")
    return found


def _of_nodes(checked: Checked, plan: Plan) -> list[str]:
    """Return notes of the plan's nodes for display."""
    found = []
    for name, devices in ((step.name, step.devices) for step in plan.steps if not step.control):
        one = checked.steps[name]
        base_dir, types = one.step.base_dir or checked.pipeline.base_dir, types_of(one.step, checked)
        context = StepContext(base_dir, tuple(one.step.inputs), types, devices)
        found += [f"{name}: {line}" for line in one.node.plan_notes(one.config, context)]
    return found


def _device_bytes(step: PlannedStep, needs: Needs) -> int:
    """Return the known memory of an instance on its first GPU."""
    known = needs.steps[step.name].bytes if step.name in needs.steps else {}
    return next((known[device] for device in step.devices if device in known), step.device_bytes)


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


def _placed(plan: Plan, placement: Placement) -> Plan:
    """Return the plan with processes and devices."""
    steps = []
    for step in plan.steps:
        devices = placement.devices.get(step.name, ())
        indexes = placement.worker_indexes.get(step.name, ())
        steps.append(dataclasses.replace(step, device=devices[0] if devices else "", devices=devices, workers=indexes))
    return dataclasses.replace(plan, steps=tuple(steps), workers=placement.workers, chains=chains(steps, plan.inputs))


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
        planned.append(PlannedOutput(name, wire, type, pieces, optional))
    return tuple(planned)
