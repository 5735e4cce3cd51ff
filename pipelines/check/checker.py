"""Pipeline checker: reports every problem before anything starts.

`check` imports the nodes' modules but none of their frameworks, opens no model and starts no process. `examine` also
returns the node, options, ports and types of each step, from which a plan is made.
"""

from __future__ import annotations

import contextlib
import dataclasses
import re
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

from weftline.errors import ModelError, Problem
from weftline.fields import plain
from weftline.nodes.catalog import CATALOG, resolve, with_engine
from weftline.nodes.contract import ConfigError, Node, StepContext
from weftline.nodes.declared_files import texts_of
from weftline.nodes.ports import Port, Ports, PortType
from weftline.nodes.user_code import locate
from weftline.pipelines.check.behaviour import check_behaviour, check_fallbacks
from weftline.pipelines.check.checked import Checked, CheckedStep, Sizes, loose, mismatch
from weftline.pipelines.check.control import check_conditions, may_lack
from weftline.pipelines.check.options import read_options
from weftline.pipelines.check.problems import Report, did_you_mean, listed
from weftline.pipelines.check.wiring import check_streams, check_use, check_wires, fallbacks_of, readers, run_order
from weftline.pipelines.spec.condition import resolve as resolve_names
from weftline.pipelines.spec.constants import misfit
from weftline.pipelines.spec.expansion import Constraint, expand
from weftline.pipelines.spec.fallbacks import PASSES
from weftline.pipelines.spec.graph import Pipeline, Step
from weftline.pipelines.spec.schema import validate
from weftline.pipelines.spec.serialisation import to_document
from weftline.pipelines.spec.wire import Wire


def check(pipeline: Pipeline, catalog: Mapping[str, str] = CATALOG) -> list[Problem]:
    """Return every problem of the pipeline, in file order; without any it can be planned."""
    return list(examine(pipeline, catalog).problems)


def examine(pipeline: Pipeline, catalog: Mapping[str, str] = CATALOG) -> Checked:
    """Check a pipeline without opening its models; the result includes every problem."""
    report = Report(pipeline)
    _check_written(pipeline, report)
    expansion = expand(pipeline, report, catalog)
    pipeline = _with_conditions(expansion.pipeline)
    _check_names(pipeline, report)
    known: dict[str, CheckedStep] = {}
    checked = Checked(pipeline, known, Sizes(), (), expansion.origins, expansion.constraints)
    order = run_order(pipeline)
    rest = [step.name for step in pipeline.steps if step.name not in order]  # on a cycle, or behind one
    steps = {step.name: step for step in pipeline.steps}
    owners = {fallback: name for name, fallback in fallbacks_of(pipeline).items()}
    for one in expansion.constraints:
        _take_constant(one.path, one.wire, PortType.parse(one.type), checked, report)
    for name in [*order, *rest]:  # types flow downstream: input types are known before `ports` is called
        if steps[name].node == PASSES and name in owners:
            _take_fallback(steps[name], owners[name], checked, report)
        found = _check_step(steps[name], checked, catalog, report)
        if found:
            known[name] = found
            for port in _mapped_outputs({name, owners.get(name)}, pipeline):
                checked.read_as_list(Wire(name, port))
            _check_types(known[name], checked, report)
    for name in rest:
        if name in known:
            _check_types(known[name], checked, report)
    check_wires(pipeline, {name: one.ports for name, one in known.items()}, report)
    _check_constraints(expansion.constraints, checked, report)
    check_use(pipeline, [one.wire for one in expansion.constraints], report)
    check_conditions(checked, report)
    check_behaviour(checked, report)
    check_streams(checked, report)
    check_fallbacks(checked, report)
    problems = tuple(sorted(report.problems, key=lambda one: one.line))
    return dataclasses.replace(checked, problems=problems, pipeline=_with_types(pipeline, checked.constants))


def remarks(pipeline: Pipeline) -> list[str]:
    """Return remarks about a pipeline that are not errors, a line each."""
    if pipeline.slo.latency_p99_ms is None or pipeline.limits.deadline_ms is not None:
        return []
    return [
        "slo.latency_p99_ms is an objective and fails no request; requests of this pipeline have no deadline. "
        "To fail late requests, set limits.deadline_ms"
    ]


def _with_types(pipeline: Pipeline, constants: Mapping[Wire, PortType]) -> Pipeline:
    """Return the pipeline with the types of its constants."""
    inputs = [
        dataclasses.replace(one, type=str(constants.get(Wire(None, one.name), one.type))) for one in pipeline.inputs
    ]
    return dataclasses.replace(pipeline, inputs=tuple(inputs))


def _with_conditions(pipeline: Pipeline) -> Pipeline:
    """Return the pipeline with `a.b` in conditions read as a key of input `a` where there is such an input."""
    inputs = {one.name for one in pipeline.inputs}
    steps = [
        dataclasses.replace(step, when=resolve_names(step.when, inputs)) if step.when else step
        for step in pipeline.steps
    ]
    return dataclasses.replace(pipeline, steps=tuple(steps))


def _check_written(pipeline: Pipeline, report: Report) -> None:
    """Check a pipeline built in Python by the rules of a file."""
    bare = tuple(dataclasses.replace(step, options={}) for step in pipeline.steps)  # options are checked one by one
    report.take(validate(to_document(dataclasses.replace(pipeline, steps=bare)))[1])


def _check_names(pipeline: Pipeline, report: Report) -> None:
    for what, names in (
        ("inputs", [one.name for one in pipeline.inputs]),
        ("steps", [step.name for step in pipeline.steps]),
    ):
        for name in sorted({name for name in names if names.count(name) > 1}):
            report.add(f"{what}.{name}", "written twice", fix="rename one of them")
    for name in [step.name for step in pipeline.steps if any(step.name == one.name for one in pipeline.inputs)]:
        report.add(f"steps.{name}", f"{name} is also the name of an input", fix="rename one of them")


def _check_step(step: Step, checked: Checked, catalog: Mapping[str, str], report: Report) -> CheckedStep | None:
    path, base_dir = f"steps.{step.name}", step.base_dir or checked.pipeline.base_dir
    if step.pipeline:  # could not be expanded, which is reported
        return None
    reference = with_engine(step.node, step.options, catalog)
    try:
        node = resolve(reference, base_dir, catalog)
    except ConfigError as error:
        report.add(f"{path}.{error.option}", error.found, error.expected, error.fix)
        return None
    options, types = dict(step.options), types_of(step, checked)
    read = tuple(sorted({wire.port for _, wire in readers(checked.pipeline) if wire.step == step.name}))
    for attempt in (1, 2):
        config, problems = read_options(node, options, path)
        if not problems:
            ports, problems = _ports(node, config, StepContext(base_dir, tuple(step.inputs), types, read=read), path)
            if ports:
                on_device, wrong = _device_ports(node, config, ports, path)
                report.take(wrong)
                found = CheckedStep(step, node, reference, config, ports, on_device)
                files, wrong = _files(found, base_dir, path)
                report.take(wrong)
                return dataclasses.replace(found, files=files)
        if attempt == 1:  # problems of the second attempt only follow from omitted options
            report.take(one for one in problems if not report.holds(one.path))
        # Without the invalid options its ports may still be known, so that its wires are checked.
        for one in problems:
            _leave_out(options, one.path.removeprefix(f"{path}."))
    return None


def _leave_out(options: dict[str, Any], path: str) -> None:
    """Remove what is at `path` of the options: an option, or one entry of an option that is a mapping."""
    name, _, rest = path.partition(".")
    value, key = options.get(name), re.split(r"[.\[]", rest)[0]
    if isinstance(value, Mapping) and key in value:
        options[name] = {other: one for other, one in value.items() if other != key}
    else:
        options.pop(name, None)


def _ports(node: type[Node], config: Any, context: StepContext, path: str) -> tuple[Ports | None, list[Problem]]:
    """Return the ports of a step, or the reason why its node has none."""
    try:
        ports = node.ports(config, context)
    except ConfigError as error:
        problems = (error, *error.others)
        return None, [Problem(f"{path}.{one.option}", one.found, one.expected, one.fix) for one in problems]
    except (ValueError, ModelError) as error:
        return None, [Problem(path, str(error))]
    except Exception as error:  # an error in a user's node is a problem of the pipeline, not of the check
        return None, [Problem(path, f"{node.__name__}.ports failed: {type(error).__name__}: {error}")]
    wrong = _wrong_ports(ports)
    return (None, [Problem(path, f"{node.__name__}.ports {wrong[0]}", wrong[1])]) if wrong else (ports, [])


def _wrong_ports(ports: object) -> tuple[str, str] | None:
    """Return the problem of a user's `ports` result, and the expected type; None if it is valid."""
    if not isinstance(ports, Ports):
        return f"returned {type(ports).__name__}", "weftline.node.Ports"
    for where, side in (("inputs", ports.inputs), ("outputs", ports.outputs)):
        if not isinstance(side, tuple | list) or not all(isinstance(one, Port) for one in side):
            return f"returned {where} that are not a tuple of ports", f'Ports({where}=(port("name", "text"),))'
        names = [one.name for one in side]
        if twice := next((name for name in names if names.count(name) > 1), None):
            return f"names {twice} twice among its {where}", "a name of its own for every port"
    return None


def _device_ports(node: type[Node], config: Any, ports: Ports, path: str) -> tuple[frozenset[str], list[Problem]]:
    """Return the ports whose tensors stay on the node's device, or an error."""
    try:
        on_device = frozenset(node.device_ports(config, ports))
    except Exception as error:  # an error in a user's node is a problem of the pipeline, not of the check
        return frozenset(), [Problem(path, f"{node.__name__}.device_ports failed: {type(error).__name__}: {error}")]
    known = [port.name for port in (*ports.inputs, *ports.outputs)]
    if unknown := sorted(str(name) for name in on_device if name not in known):
        found = f"{node.__name__}.device_ports names {', '.join(unknown)}"
        return frozenset(), [Problem(path, found, f"its ports: {listed(known)}", did_you_mean(unknown[0], known))]
    return on_device, []


def _files(one: CheckedStep, base_dir: Path, path: str) -> tuple[tuple[Path, ...], list[Problem]]:
    """Return the files and folders that a step loads, or an error.

    User code may write to what its options name. It has files only with `share: true`, or where its class overrides
    `files`.
    """
    if one.user_code and not one.step.share and one.node.files.__func__ is Node.files.__func__:  # type: ignore[attr-defined]
        return (), []
    try:
        files = [Path(file) for file in one.node.files(one.config, StepContext(base_dir))]
    except Exception as error:  # an error in a user's node is a problem of the pipeline, not of the check
        return (), [Problem(path, f"{one.node.__name__}.files failed: {type(error).__name__}: {error}")]
    for text in (one.reference, *texts_of(plain(one.config))) if one.user_code else ():
        with contextlib.suppress(ConfigError):
            files += [] if text.startswith("weftline.") else [locate(text, base_dir, "").path]
    return tuple(files), []


def types_of(step: Step, checked: Checked) -> dict[str, PortType]:
    """Return the known types of the step's wires; of a port under `map:`, the type of one element."""
    found = {port: checked.type_of(wire) for port, wire in step.inputs.items()}
    types = {port: loose(type) for port, type in found.items() if type is not None}
    return {port: type.item if port in step.map and type.item else type for port, type in types.items()}


def _check_types(one: CheckedStep, checked: Checked, report: Report) -> None:
    """Fit both ends of every wire into a step, so that sizes flow downstream."""
    for port, wire in one.step.inputs.items():
        if (type := one.takes(port)) is not None:
            _take_constant(f"steps.{one.step.name}.inputs.{port}", wire, type, checked, report)
        source, wanted, taker = checked.source(wire), one.takes(port), one.step.name
        if source is None or wanted is None or checked.fit(wire, wanted, taker):
            continue
        source = checked.source(wire) or source
        path, settle = f"steps.{taker}.inputs.{port}", checked.sizes.settle
        if port in one.step.map and source[0].item is None:
            gives = f"runs for each element of {port}, and {wire} gives {settle(*source)}, which is not a list"
            report.add(path, gives, f"{settle(wanted, taker)}", f"take {port} out of `map:`")
            continue
        others = _others(checked, wire, wanted, taker)
        report.take([mismatch(path, settle(*source), str(wire), settle(wanted, taker), others)])


def _mapped_outputs(names: Collection[str | None], pipeline: Pipeline) -> set[str]:
    """Return the outputs of some steps that a step reads element by element."""
    wires = (step.inputs[port] for step in pipeline.steps for port in step.map if port in step.inputs)
    return {wire.port for wire in wires if wire.step in names and wire.step is not None}


def _take_constant(path: str, wire: Wire, wanted: PortType, checked: Checked, report: Report) -> None:
    """Convert a constant to its reader's type, a list or a tensor; report one that does not fit."""
    one = next((one for one in checked.pipeline.inputs if one.hidden and Wire(None, one.name) == wire), None)
    if one is None or one.type not in ("text", "json") or wire in checked.constants or may_lack(one):
        return
    given, wanted = PortType.parse(one.type), loose(wanted)
    if Sizes().fit(given, "", wanted, ""):
        return
    wrong = misfit(wanted, one.default)
    if wrong:
        report.add(path, wrong)
    checked.constants[wire] = wanted


def _take_fallback(step: Step, owner: str, checked: Checked, report: Report) -> None:
    """Convert fallback constants to the output types of the step that they replace."""
    if owner not in checked.steps or checked.steps[owner].control:
        return
    known = [port.name for port in checked.steps[owner].ports.outputs]
    for port, wire in step.inputs.items():
        if wire.step is not None:
            continue  # it passes on the outputs of a step
        path, source = f"steps.{owner}.fallback.{port}", checked.source(Wire(owner, port))
        if source is not None:
            _take_constant(path, wire, checked.sizes.settle(*source), checked, report)
        else:
            found = f"{checked.steps[owner].step.node} has no output {port}"
            report.add(path, found, f"one of {listed(known)}", did_you_mean(port, known))


def _check_constraints(constraints: Iterable[Constraint], checked: Checked, report: Report) -> None:
    """Check wires into sub-pipelines against the declared input types."""
    for one in constraints:
        source, wanted = checked.source(one.wire), PortType.parse(one.type)
        if source is not None and not checked.sizes.fit(*source, wanted, one.scope):
            given = checked.sizes.settle(*source)
            report.take([mismatch(one.path, given, str(one.wire), wanted, ())])


def _others(checked: Checked, wire: Wire, wanted: PortType, taker: str) -> list[tuple[str, Port]]:
    """Return other outputs of the wire's step that would fit."""
    if wire.step is None or wire.step not in checked.steps:
        return []
    if checked.steps[wire.step].step.map:
        return []
    outputs = checked.steps[wire.step].ports.outputs
    candidates = [port for port in outputs if port.name != wire.port and port.type.kind != "any"]
    copies = dataclasses.replace(checked.sizes, _known={})
    return [
        (f"{wire.step}.{port.name}", port) for port in candidates if copies.fit(port.type, wire.step, wanted, taker)
    ]
