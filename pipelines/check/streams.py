"""Stream analysis: steps that stream, and wires that carry chunks.

A node that is a StreamNode streams. One that is a BatchNode too is run in batches, unless a wire brings it pieces. A
wire carries pieces from a port that gives them to one that takes them. It carries the whole value instead

- where either step is run under `map:`, or the giver is itself run in batches;
- where the giver has a fallback, whose answer would take the place of pieces that were read already;
- into every further port of a step that is given pieces on one.

That costs time and nothing else, so none of it is a mistake; `weftline plan` shows what streams.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from weftline.nodes.contract import BatchNode, StreamNode
from weftline.pipelines.check.checked import Checked, CheckedStep
from weftline.pipelines.check.problem_collector import Report
from weftline.pipelines.check.wiring import run_order


@dataclass(frozen=True, slots=True)
class Streams:
    """steps: those that stream. inputs: the input that a step takes in pieces, by the step's name."""

    steps: frozenset[str] = frozenset()
    inputs: Mapping[str, str] = field(default_factory=dict)


def streams_of(checked: Checked) -> Streams:
    """Return what streams in a pipeline without problems."""
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
            found = f"takes {taken[0]} in pieces, and {one.node.__name__} has no `feed`"
            report.add(f"steps.{name}.node", found, "a StreamNode with `feed`", "declare the port without `pieces`")
