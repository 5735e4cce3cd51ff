"""Checks of a step's behaviour: batches, lists, sequences, instances and fallback.

Bounds of single numbers are checked by the schema; these checks need the node, its ports and other steps.
"""

from __future__ import annotations

from collections.abc import Iterator

import networkx as nx

from weftline.fields import written_fields
from weftline.nodes.contract import StreamNode
from weftline.nodes.ports import Dim
from weftline.pipelines.check.checked import Checked, CheckedStep, mismatch
from weftline.pipelines.check.problems import Report, did_you_mean, listed, nearest
from weftline.pipelines.check.wiring import fallbacks_of, graph_of, readers
from weftline.pipelines.placement.place import instance_count
from weftline.pipelines.spec.fallbacks import ABSENT, PASSES, shared_fallback
from weftline.pipelines.spec.graph import Pipeline, Step
from weftline.pipelines.spec.policy import BatchPolicy
from weftline.pipelines.spec.wire import Wire

_OF_CONTROL = frozenset({"node", "pipeline", "inputs", "when"})
"""Keys of a control step. Others are about the execution of a node, and it has none."""


def check_behaviour(checked: Checked, report: Report) -> None:
    """Report contradictory step settings, except those about fallbacks."""
    for one in checked.steps.values():
        if one.control:
            _check_control(one, report)
            continue
        _check_map(one, checked, report)
        _check_sequence(one, report)
        _check_idle(one, report)
        _check_finite(one, report)
        _check_share(one, report)
        _check_instances(one.step, report)
        if one.step.batch is not None:
            _check_batch(one, one.step.batch, checked, report)


def _check_control(one: CheckedStep, report: Report) -> None:
    usual = Step("")
    for key in {one.name for one in written_fields(Step)} - _OF_CONTROL:
        if getattr(one.step, key) != getattr(usual, key):
            found = f"has no effect here: {one.step.node} is evaluated without running anything"
            report.add(f"steps.{one.step.name}.{key}", found, fix="remove it")


def _check_map(one: CheckedStep, checked: Checked, report: Report) -> None:
    path, known = f"steps.{one.step.name}", [port.name for port in one.ports.inputs]
    for name in one.step.map:
        if name not in known:
            report.add(f"{path}.map", f"{one.step.node} has no input {name}", listed(known), did_you_mean(name, known))
        elif name not in one.step.inputs:
            report.add(f"{path}.map", f"{name} is not wired", "inputs that receive lists", "wire it, or leave it out")
    if one.step.map and _keeps_state(one):
        found = f"runs {one.step.node} item by item, and it keeps state between requests"
        report.add(f"{path}.map", found, fix="map in a step of its own, before or after this one")


def _keeps_state(one: CheckedStep) -> bool:
    return one.node.stateful or one.step.sequence is not None


def _check_sequence(one: CheckedStep, report: Report) -> None:
    if one.step.sequence is not None and issubclass(one.node, StreamNode):
        found = f"{one.step.node} streams, and runs items of all sequences in arrival order"
        report.add(f"steps.{one.step.name}.sequence", found, fix="remove it")


def _check_finite(one: CheckedStep, report: Report) -> None:
    if one.step.finite and issubclass(one.node, StreamNode):
        found = f"{one.step.node} streams: readers receive its chunks before all of them could be checked"
        report.add(f"steps.{one.step.name}.finite", found, fix="remove it")


def _check_idle(one: CheckedStep, report: Report) -> None:
    if one.step.idle is not None and _keeps_state(one):
        found = f"{one.step.node} keeps state between requests, which sleep would lose"
        report.add(f"steps.{one.step.name}.idle", found, fix="remove it")


def _check_share(one: CheckedStep, report: Report) -> None:
    if one.step.share and _keeps_state(one):
        found = f"{one.step.node} keeps state between requests, which no other step may see"
        report.add(f"steps.{one.step.name}.share", found, fix="remove it")


def _check_instances(step: Step, report: Report) -> None:
    path, count = f"steps.{step.name}", instance_count(step)
    if 0 < count <= step.reserved:
        found = f"{step.reserved} of {count} instance{'s' if count > 1 else ''}, which leaves none for job rows"
        report.add(f"{path}.reserved", found, f"less than {count}", "raise instances, or reserve fewer")
    if isinstance(step.instances, int):
        return
    if sum(step.instances.values()) < 1:
        report.add(f"{path}.instances", "no instance at all", "at least one")
    if step.device != "auto":
        report.add(f"{path}.device", "written beside instances for each device", "one of the two", "remove device")


def _check_batch(one: CheckedStep, batch: BatchPolicy, checked: Checked, report: Report) -> None:
    path = f"steps.{one.step.name}.batch"
    if list(batch.sizes) != sorted(set(batch.sizes)) or not all(1 <= size <= batch.items_max for size in batch.sizes):
        expected = f"rising numbers from 1 to items_max, which is {batch.items_max}"
        report.add(f"{path}.sizes", f"{list(batch.sizes)}", expected)
    sizes = _named_sizes(one, checked)
    for name, buckets in batch.pad.items():
        known = [other for other, size in sizes.items() if not isinstance(size, int)]
        size = sizes.get(name, "")
        if isinstance(size, int):
            report.add(f"{path}.pad.{name}", f"{name} is always {size} here", fix="remove it")
        elif name not in sizes:
            found = f"the input tensors of {one.step.node} have no size named {name}"
            expected = f"one of {listed(known)}" if known else "a named size; its inputs have none"
            report.add(f"{path}.pad.{name}", found, expected, did_you_mean(name, known))
        if not buckets or list(buckets) != sorted(set(buckets)) or buckets[0] < 1:
            report.add(f"{path}.pad.{name}", f"{list(buckets)}", "rising numbers from 1, at least one")


def _named_sizes(one: CheckedStep, checked: Checked) -> dict[str, Dim]:
    """Return the named sizes of the step's tensor inputs, each with its known value."""
    found: dict[str, Dim] = {}
    for port in one.ports.inputs:
        settled = checked.sizes.settle(port.type, one.step.name)
        if port.type.dims is not None and settled.dims is not None and port.name in one.step.inputs:
            pairs = zip(port.type.dims, settled.dims, strict=True)
            found |= {name: size for name, size in pairs if isinstance(name, str) and name != "?"}
    return found


# fallbacks


def check_fallbacks(checked: Checked, report: Report) -> None:
    """Report fallbacks that cannot replace their step."""
    pipeline, owners = checked.pipeline, dict[str, str]()
    graph = graph_of(pipeline)
    for step in pipeline.steps:
        if not isinstance(step.fallback, str) or (step.name in checked.steps and checked.steps[step.name].control):
            continue
        path, named = f"steps.{step.name}.fallback", step.fallback
        if named == ABSENT:
            if any(one.name == ABSENT for one in pipeline.steps):
                found = "means that the step's outputs are absent, and a step has that name"
                report.add(path, f"{ABSENT} {found}", fix="rename the step")
            continue
        wrong = _unfit(step, named, pipeline, graph, checked)
        if wrong is None and named in owners:
            found = f"{named} is the fallback of {owners[named]} already"
            fix = f"write a second step like it, or read {named} somewhere: then it always runs, and both can name it"
            wrong = found, "a step that is the fallback of this one only", fix
        owners.setdefault(named, step.name)
        if wrong is not None:
            report.add(path, *wrong)
        elif step.name in checked.steps and named in checked.steps:
            for found, fix in _unlike(step.name, named, checked):
                report.add(path, found, fix=fix)


_Wrong = tuple[str, str, str]  # found, expected, fix


def _unfit(step: Step, named: str, pipeline: Pipeline, graph: nx.DiGraph, checked: Checked) -> _Wrong | None:
    """Return why a step cannot be another's fallback, regardless of its outputs."""
    others = [one.name for one in pipeline.steps if one.name != step.name]
    if named == step.name:
        return "names itself", "another step, or a constant for each output", "use `retry:` to try it again"
    if named not in others:
        return f"there is no step {named}", f"one of {listed(others)}", did_you_mean(named, others)
    if named in checked.steps and checked.steps[named].control in ("first", "switch"):
        node = checked.steps[named].step.node
        return f"{named} is a {node} step, which runs nothing", "a step that runs something, or constants", ""
    ring = _ring(step.name, _targets(pipeline))
    if ring:
        return f"the fallbacks form a cycle: {' -> '.join(ring)}", "", "remove one of them"
    if nx.has_path(graph, step.name, named):
        source = _targets(pipeline)[step.name]
        return f"{source} depends on {step.name}", "a step that can run when this one has failed", ""
    if _waits_for_itself(named, pipeline, graph):
        source = _targets(pipeline)[step.name]
        found = f"{source} depends on the output of {step.name}, through the fallback of another step"
        return found, "a step that can run when this one has failed", ""
    return None


def _targets(pipeline: Pipeline) -> dict[str, str]:
    """Return the fallback of each step as it was written: for a shared one, the step whose outputs are passed on."""
    steps = {step.name: step for step in pipeline.steps}
    named = fallbacks_of(pipeline)
    return {name: (steps[to].node == PASSES and shared_fallback(steps[to])) or to for name, to in named.items()}


def _waits_for_itself(named: str, pipeline: Pipeline, graph: nx.DiGraph) -> bool:
    """Return True if a fallback waits for an output that it may have to produce."""
    waits = graph.copy()
    for owner, fallback in fallbacks_of(pipeline).items():
        waits.add_edges_from((fallback, reader) for reader in graph.successors(owner))
    return any(nx.has_path(waits, after, named) for after in waits.successors(named))


def _ring(start: str, fallbacks: dict[str, str]) -> list[str]:
    """Return the cycle of fallbacks through `start`; empty without one."""
    chain = [start]
    while chain[-1] in fallbacks and chain.count(chain[-1]) == 1:
        chain.append(fallbacks[chain[-1]])
    return chain if len(chain) > 1 and chain[-1] == start else []


def _unlike(name: str, fallback: str, checked: Checked) -> Iterator[tuple[str, str]]:
    """Yield the differences between a fallback's outputs and the step's: problem and fix."""
    own = [port.name for port in checked.steps[fallback].ports.outputs]
    for port in dict.fromkeys(_read_of(name, checked)):
        wanted = checked.source(Wire(name, port))
        if wanted is None:
            continue
        given, shared = checked.source(Wire(fallback, port)), ""
        if checked.steps[fallback].step.node == PASSES:
            shared = shared_fallback(checked.steps[fallback].step)
        if given is None and shared:
            continue  # the wire is reported
        if given is None and checked.steps[fallback].step.node == PASSES:
            yield f"no constant for {port}, which is read", f"add `{port}: <value>` to it"
        elif given is None:
            near = nearest(port, own) or listed(own)
            yield f"{fallback} has no output {port}, which is read", f"give {fallback} an output {port} (it has {near})"
        elif not checked.fit(Wire(fallback, port), *wanted):
            settle = checked.sizes.settle
            source = f"{shared or fallback}.{port}"
            problem = mismatch("", settle(*given), source, settle(*wanted), ())
            yield f"{name}.{port} is {settle(*wanted)}, {source} is {settle(*given)}", problem.fix


def _read_of(name: str, checked: Checked) -> list[str]:
    """Return the ports of a step that are read; for a fallback, those of the step it replaces."""
    owners = {fallback: owner for owner, fallback in fallbacks_of(checked.pipeline).items()}
    seen: set[str] = set()
    while name in owners and name not in seen:
        seen.add(name)
        name = owners[name]
    return [wire.port for _, wire in readers(checked.pipeline) if wire.step == name]
