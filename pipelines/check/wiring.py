"""Graph checks: dangling wires, cycles, unused steps, and the wires that carry chunks.

A node that is a StreamNode streams. A node that is a BatchNode too runs in batches, unless a wire brings it chunks. A
wire carries chunks from a port that streams to one that accepts chunks. It carries the whole value instead

- where either step runs under `map:`, or the source step runs in batches;
- where the source step has a fallback, whose answer would replace chunks that were read already;
- into every further port of a step that receives chunks on one.

That costs time only, so it is not a problem; `weftline plan` shows the streams.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field

import networkx as nx

from weftline.nodes.contract import BatchNode, StreamNode
from weftline.nodes.ports import Port, Ports
from weftline.pipelines.check.checked import Checked, CheckedStep
from weftline.pipelines.check.problems import Report, did_you_mean, listed, nearest
from weftline.pipelines.spec.graph import Pipeline, Step
from weftline.pipelines.spec.wire import Wire


def readers(pipeline: Pipeline) -> Iterator[tuple[str, Wire]]:
    """Yield (path, wire) of every reader: step inputs and conditions first, then pipeline outputs."""
    for step in pipeline.steps:
        for port, wire in step.inputs.items():
            yield f"steps.{step.name}.inputs.{port}", wire
        for wire in step.when.wires if step.when else ():
            yield f"steps.{step.name}.when", wire
    for name, wire in pipeline.outputs.items():
        yield f"outputs.{name}", wire


def graph_of(pipeline: Pipeline) -> nx.DiGraph:
    """Return the steps as a graph, an edge from each step to every step that reads it, in an input or a condition."""
    graph: nx.DiGraph = nx.DiGraph()
    graph.add_nodes_from(step.name for step in pipeline.steps)
    for step in pipeline.steps:
        for wire in step.when.wires if step.when else ():
            if wire.step in graph:
                graph.add_edge(wire.step, step.name, path=f"steps.{step.name}.when")
        for port, wire in step.inputs.items():
            if wire.step in graph:
                graph.add_edge(wire.step, step.name, path=f"steps.{step.name}.inputs.{port}")
    return graph


def fallbacks_of(pipeline: Pipeline) -> dict[str, str]:
    """Return the fallback of each step that has one."""
    names = {step.name for step in pipeline.steps}
    named = {step.name: step.fallback for step in pipeline.steps if isinstance(step.fallback, str)}
    return {name: fallback for name, fallback in named.items() if fallback in names}


def run_order(pipeline: Pipeline) -> list[str]:
    """Return step names in topological order, fallbacks after their step; else in file order.

    Steps on a cycle, and those after one, are omitted.
    """
    graph, place = graph_of(pipeline), {step.name: place for place, step in enumerate(pipeline.steps)}
    graph.add_edges_from(fallbacks_of(pipeline).items())
    for ring in list(nx.strongly_connected_components(graph)):
        if len(ring) > 1 or any(graph.has_edge(name, name) for name in ring):
            graph.remove_nodes_from(
                {name for start in ring if start in graph for name in nx.descendants(graph, start)} | ring
            )
    return list(nx.lexicographical_topological_sort(graph, key=lambda name: place[name]))


def check_wires(pipeline: Pipeline, ports: Mapping[str, Ports], report: Report) -> None:
    """Report wires that lead nowhere, inputs that are missing or unknown, and cycles.

    ports: of the steps whose ports are known; for the others only names are checked.
    """
    for path, wire in readers(pipeline):
        _check_source(path, wire, pipeline, ports, report)
    for step in pipeline.steps:
        if step.name in ports:
            _check_inputs(step, ports[step.name], report)
    _check_cycles(pipeline, report)


def check_use(pipeline: Pipeline, used: Collection[Wire], report: Report) -> None:
    """Report unused inputs and steps, and a pipeline without steps or outputs.

    used: wires that count as read besides those of steps and outputs.

    After a dangling wire or an invalid template, unread parts may only follow from it; they are not reported then.
    """
    wires = [*(wire for _, wire in readers(pipeline)), *used]
    read = {wire.port for wire in wires if wire.step is None}
    read_steps = {wire.step for wire in wires} | {*fallbacks_of(pipeline).values()}
    if not pipeline.steps:
        report.add("steps", "no steps", "at least one step")
    if not pipeline.outputs:
        report.add(
            "outputs", "no outputs", "at least one output", "name an output of the request, like `answer: step.port`"
        )
    if not _all_lead_somewhere(pipeline) or any(one.path.endswith(_TEXTS) for one in report.problems):
        return
    for one in pipeline.inputs:
        if one.name not in read and not one.hidden:
            report.add(f"inputs.{one.name}", "nothing reads this input", fix="wire it to a step, or remove it")
    for step in pipeline.steps:
        if step.name not in read_steps and WITHIN not in step.name:
            report.add(
                f"steps.{step.name}",
                "nothing reads any of its outputs",
                fix="remove the step, or add one of them to outputs",
            )


_TEXTS = (".template", ".prompt")

WITHIN = "/"
"""Part of the names of steps from sub-pipelines; their outputs need not be read."""


def _all_lead_somewhere(pipeline: Pipeline) -> bool:
    inputs, steps = {one.name for one in pipeline.inputs}, {step.name for step in pipeline.steps}
    return all(wire.port in inputs if wire.step is None else wire.step in steps for _, wire in readers(pipeline))


def _check_source(path: str, wire: Wire, pipeline: Pipeline, ports: Mapping[str, Ports], report: Report) -> None:
    inputs, steps = [one.name for one in pipeline.inputs], [step.name for step in pipeline.steps]
    if wire.step is None:
        if wire.port in inputs or not wire.port:
            return
        if wire.port in steps:
            outputs = ports[wire.port].outputs if wire.port in ports else ()
            fix = f"write {wire.port}.{outputs[0].name}" if outputs else f"write {wire.port}.<port>"
            report.add(path, f"{wire} is a step, not an input", _output_names(outputs), fix)
            return
        report.add(
            path,
            f"there is no input {wire}",
            f"step.port, or one of the inputs: {listed(inputs)}",
            _near(wire.port, inputs, steps, ports),
        )
    elif wire.step in inputs and wire.step not in steps:
        report.add(path, f"{wire.step} is an input and has no ports", fix=f"write {wire.step}")
    elif wire.step not in steps:
        report.add(path, f"there is no step {wire.step}", f"one of {listed(steps)}", did_you_mean(wire.step, steps))
    elif wire.step in ports and not ports[wire.step].output(wire.port):
        known = [port.name for port in ports[wire.step].outputs]
        near = nearest(wire.port, known) or (known[0] if len(known) == 1 else "")
        fix = f"did you mean {wire.step}.{near}?" if near else ""
        report.add(path, f"{wire.step} has no output {wire.port}", _output_names(ports[wire.step].outputs), fix)


def _near(word: str, inputs: list[str], steps: list[str], ports: Mapping[str, Ports]) -> str:
    name = nearest(word, [*inputs, *steps])
    if name in steps and name not in inputs:
        outputs = ports[name].outputs if name in ports else ()
        return f"did you mean {name}.{outputs[0].name if outputs else '<port>'}?"
    return f"did you mean {name}?" if name else ""


def _output_names(outputs: tuple[Port, ...]) -> str:
    return f"one of its outputs: {listed(f'{port.name} ({port.type})' for port in outputs)}" if outputs else ""


def _check_inputs(step: Step, ports: Ports, report: Report) -> None:
    path, known = f"steps.{step.name}.inputs", [port.name for port in ports.inputs]
    for name in step.inputs:
        if name not in known:
            taken = listed((f"{port.name} ({port.type})" for port in ports.inputs), "no inputs at all")
            report.add(f"{path}.{name}", f"{step.node} has no input {name}", taken, did_you_mean(name, known))
    missing = [port for port in ports.inputs if not port.optional and port.name not in step.inputs]
    for port in missing:
        fix = f"add `{port.name}: <step.port or input>` under steps.{step.name}.inputs"
        report.add(path, f"{step.node} needs its input {port.name} ({port.type}), which is not wired", fix=fix)


def _check_cycles(pipeline: Pipeline, report: Report) -> None:
    graph, place = graph_of(pipeline), {step.name: place for place, step in enumerate(pipeline.steps)}
    for ring in nx.strongly_connected_components(graph):
        if len(ring) == 1 and not any(graph.has_edge(name, name) for name in ring):
            continue
        start = min(ring, key=lambda name: place[name])
        edges = nx.find_cycle(graph.subgraph(ring), start)
        names = [edge[0] for edge in edges]
        turn = names.index(min(names, key=lambda name: place[name]))
        names = [*names[turn:], *names[:turn]]
        path = graph.edges[names[-1], names[0]]["path"]
        whole = " -> ".join([*names, names[0]])
        report.add(path, f"the steps form a cycle: {whole}", fix="remove one of these wires")


@dataclass(frozen=True, slots=True)
class Streams:
    """steps: streaming steps. inputs: the streamed input of a step, by the step's name."""

    steps: frozenset[str] = frozenset()
    inputs: Mapping[str, str] = field(default_factory=dict)


def streams_of(checked: Checked) -> Streams:
    """Return the streams of a pipeline without problems."""
    steps: set[str] = set()
    inputs: dict[str, str] = {}
    for name in run_order(checked.pipeline):
        one = checked.steps[name]
        if not issubclass(one.node, StreamNode):
            continue
        fed = next(
            (port.name for port in one.ports.inputs if port.pieces and _comes(one, port.name, steps, checked)), ""
        )
        if fed:
            inputs[name] = fed
        if fed or not issubclass(one.node, BatchNode):
            steps.add(name)
    return Streams(frozenset(steps), inputs)


def _comes(one: CheckedStep, port: str, streaming: set[str], checked: Checked) -> bool:
    """Return True when an input's wire carries chunks."""
    wire = one.step.inputs.get(port)
    if wire is None or wire.step not in streaming or one.step.map:
        return False
    giver = checked.steps[wire.step]
    given = giver.ports.output(wire.port)
    return given is not None and given.pieces and not giver.step.map and giver.step.fallback is None


def check_streams(checked: Checked, report: Report) -> None:
    """Report nodes with stream inputs that do not implement them."""
    for name, one in checked.steps.items():
        taken = [port.name for port in one.ports.inputs if port.pieces]
        if taken and not (issubclass(one.node, StreamNode) and one.node.feed is not StreamNode.feed):
            found = f"has the streamed input {taken[0]}, and {one.node.__name__} has no `feed`"
            report.add(f"steps.{name}.node", found, "a StreamNode with `feed`", "declare the port without `pieces`")
