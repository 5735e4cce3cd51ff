"""Everything that is wrong with a pipeline, at once, before anything starts.

`check` imports the nodes' modules but none of their frameworks, opens no model and starts no process. `examine` does
the same and also returns what it learnt, which is what a plan is made from.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from weftline.errors import ModelError, Problem
from weftline.nodes.catalog import CATALOG, dotted, resolve
from weftline.nodes.contract import ConfigError, Node, StepContext
from weftline.nodes.ports import Port, Ports, PortType
from weftline.pipelines.graph import Pipeline, Step, Wire
from weftline.pipelines.options import read_options
from weftline.pipelines.ports import Sizes, mismatch
from weftline.pipelines.prompts import expand
from weftline.pipelines.report import Report
from weftline.pipelines.schema import validate
from weftline.pipelines.wiring import check_use, check_wires, readers, run_order
from weftline.pipelines.written import to_document


@dataclass(frozen=True, slots=True)
class CheckedStep:
    """A step with its node class, the dotted path to it, its Config and its ports."""

    step: Step
    node: type[Node]
    reference: str
    config: Any
    ports: Ports


@dataclass(frozen=True, slots=True)
class Checked:
    """What a check learnt.

    pipeline: as written, with prompts made steps of their own.
    steps:    those whose node and options are sound, in run order; all of them when there are no problems.
    sizes:    what the wires say about named dims.
    """

    pipeline: Pipeline
    steps: Mapping[str, CheckedStep]
    sizes: Sizes
    problems: tuple[Problem, ...]

    def source(self, wire: Wire) -> tuple[PortType, str] | None:
        """Return the type a wire gives and the scope of its names; None when it leads nowhere."""
        if wire.step is None:
            one = next((one for one in self.pipeline.inputs if one.name == wire.port), None)
            return (_input_type(one.type), "") if one else None
        port = self.steps[wire.step].ports.output(wire.port) if wire.step in self.steps else None
        return (port.type, wire.step) if port else None


def check(pipeline: Pipeline, catalog: Mapping[str, str] = CATALOG) -> list[Problem]:
    """Return every problem of the pipeline, in file order; empty means that it can be planned."""
    return list(examine(pipeline, catalog).problems)


def examine(pipeline: Pipeline, catalog: Mapping[str, str] = CATALOG) -> Checked:
    """Return what can be known of the pipeline without opening its models, and every problem of it."""
    report = Report(pipeline)
    _check_written(pipeline, report)
    expansion = expand(pipeline, report, catalog)
    pipeline, report.origins = expansion.pipeline, expansion.origins
    _check_names(pipeline, report)
    known = {}
    for step in pipeline.steps:
        found = _check_step(step, pipeline, catalog, report)
        if found:
            known[step.name] = found
    check_wires(pipeline, {name: one.ports for name, one in known.items()}, report)
    check_use(pipeline, report)
    ordered = {name: known[name] for name in run_order(pipeline) if name in known}
    checked = Checked(pipeline, {**ordered, **known}, Sizes(), ())
    _check_types(checked, report)
    problems = tuple(sorted(report.problems, key=lambda one: one.line))
    return dataclasses.replace(checked, problems=problems)


RESERVED = frozenset({"self", "outputs", "deadline_ms"})
"""Names an input cannot have: inputs are passed to Session.run by name, beside these."""


def _check_written(pipeline: Pipeline, report: Report) -> None:
    """Hold a pipeline built in Python to the rules of a file."""
    bare = tuple(dataclasses.replace(step, options={}) for step in pipeline.steps)  # options are checked one by one
    report.take(validate(to_document(dataclasses.replace(pipeline, steps=bare)))[1])


def _check_names(pipeline: Pipeline, report: Report) -> None:
    for what, names in (
        ("inputs", [one.name for one in pipeline.inputs]),
        ("steps", [step.name for step in pipeline.steps]),
    ):
        for name in sorted({name for name in names if names.count(name) > 1}):
            report.add(f"{what}.{name}", "written twice", fix="rename one of them")
    for name in sorted(RESERVED & {one.name for one in pipeline.inputs}):
        report.add(f"inputs.{name}", f"{name} is an argument of Session.run itself", fix="give the input another name")
    for name in [step.name for step in pipeline.steps if any(step.name == one.name for one in pipeline.inputs)]:
        report.add(f"steps.{name}", f"{name} is also the name of an input", fix="rename one of them")


def _check_step(step: Step, pipeline: Pipeline, catalog: Mapping[str, str], report: Report) -> CheckedStep | None:
    path = f"steps.{step.name}"
    try:
        node = resolve(step.node, pipeline.base_dir, catalog)
    except ConfigError as error:
        report.add(f"{path}.{error.option}", error.found, error.expected, error.fix)
        return None
    options = dict(step.options)
    for attempt in (1, 2):
        config, problems = read_options(node, options, path)
        if not problems:
            ports, problems = _ports(node, config, StepContext(pipeline.base_dir, tuple(step.inputs)), path)
            if ports:
                return CheckedStep(step, node, dotted(step.node, catalog), config, ports)
        if attempt == 1:  # what is wrong the second time only follows from leaving options out
            report.take(one for one in problems if not report.holds(one.path))
        # Without the options that are wrong its ports may still be known, and its wires be checked.
        for one in problems:
            options.pop(one.path.removeprefix(f"{path}.").partition(".")[0], None)
    return None


def _ports(node: type[Node], config: Any, context: StepContext, path: str) -> tuple[Ports | None, list[Problem]]:
    """Return the ports of a step, or why its node cannot say."""
    try:
        return node.ports(config, context), []
    except ConfigError as error:
        return None, [Problem(f"{path}.{error.option}", error.found, error.expected, error.fix)]
    except (ValueError, ModelError) as error:
        return None, [Problem(path, str(error))]
    except Exception as error:  # a mistake in a user's node is a problem of the pipeline, not of the check
        return None, [Problem(path, f"{node.__name__}.ports failed: {type(error).__name__}: {error}")]


def _check_types(checked: Checked, report: Report) -> None:
    """Fit every wire's two ends, in run order, so that sizes flow downstream."""
    ends = {
        f"steps.{name}.inputs.{port.name}": (port.type, name)
        for name, one in checked.steps.items()
        for port in one.ports.inputs
    }
    order = {name: position for position, name in enumerate(checked.steps)}
    wires = [(path, wire) for path, wire in readers(checked.pipeline) if path in ends]
    for path, wire in sorted(wires, key=lambda one: order[ends[one[0]][1]]):
        source, (wanted, taker) = checked.source(wire), ends[path]
        if source is None or checked.sizes.fit(*source, wanted, taker):
            continue
        given, giver = source
        others = _others(checked, wire, wanted, taker)
        settle = checked.sizes.settle
        report.take([mismatch(path, settle(given, giver), str(wire), settle(wanted, taker), others)])


def _others(checked: Checked, wire: Wire, wanted: PortType, taker: str) -> list[tuple[str, Port]]:
    """Return other outputs of the wire's step that would fit."""
    if wire.step is None or wire.step not in checked.steps:
        return []
    outputs = checked.steps[wire.step].ports.outputs
    trial = [port for port in outputs if port.name != wire.port and port.type.kind != "any"]
    copies = dataclasses.replace(checked.sizes, _known={})
    return [(f"{wire.step}.{port.name}", port) for port in trial if copies.fit(port.type, wire.step, wanted, taker)]


def _input_type(text: str) -> PortType:
    try:
        return PortType.parse(text)
    except ValueError:  # reported with its line already
        return PortType("any")
