"""Sub-pipelines: check of a pipeline file used as a step, and its inlining.

    read: {pipeline: ocr.yaml, inputs: {image: photo}}    ->    read/find, read/crop, read/letters

Step `find` of the file becomes `read/find`. Readers of the file's input `image` read the outer wire instead. Readers of
`read.text` read the wire of the file's output `text`; wires are followed to their end. Optional inputs of the file that
are not wired become constants with their default. Steps of the file that no requested output needs are dropped. The
limits and the deadline of the outermost pipeline apply, not those of the file.

Nesting is checked before any file is loaded: only the `pipeline:` keys of the files are read for that.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from weftline.errors import PipelineError, Problem
from weftline.nodes.contract import ConfigError
from weftline.nodes.declared_files import is_file
from weftline.pipelines.check.problems import Origin, Report, did_you_mean, listed
from weftline.pipelines.spec.condition import Condition, all_of, rewired
from weftline.pipelines.spec.document import TEXT_BYTES_MAX, read_document
from weftline.pipelines.spec.fallbacks import PASSES
from weftline.pipelines.spec.graph import Input, Pipeline, Step
from weftline.pipelines.spec.wire import Wire

if TYPE_CHECKING:
    from weftline.pipelines.check.checked import Checked


DEPTH_MAX = 8
"""Deepest nesting of pipelines: number of files from the outermost to the innermost."""


def check_nesting(path: Path, inside: tuple[Path, ...]) -> None:
    """Raise ConfigError about `pipeline` when the file at `path` runs itself, or files are nested too deep.

    inside: the files around it, outermost first, as resolved paths.
    """
    _height(path.resolve(), inside, {})


def _height(path: Path, inside: tuple[Path, ...], known: dict[Path, int]) -> int:
    """Return the nesting depth of files from `path` on."""
    if path in inside:
        names = [one.name for one in (*inside[inside.index(path) :], path)]
        raise ConfigError("pipeline", f"forms a cycle: {' -> '.join(names)}", fix="remove one of these steps")
    if path not in known:
        deeper = (*inside, path)
        if len(deeper) <= DEPTH_MAX:
            known[path] = 1 + max((_height(one, deeper, known) for one in named_pipelines(path)), default=0)
    if path not in known or len(inside) + known[path] > DEPTH_MAX:
        way = " -> ".join(one.name for one in (*inside, path))
        raise ConfigError("pipeline", f"{way}: pipelines nested too deep", f"at most {DEPTH_MAX} inside each other")
    return known[path]


def named_pipelines(path: Path) -> list[Path]:
    """Return the files that the steps of a pipeline file name, as resolved paths."""
    if not is_file(path):  # a pipe would never end
        return []
    try:
        with path.open("rb") as stream:
            raw = stream.read(TEXT_BYTES_MAX + 1)
        value = read_document(raw.decode("utf-8"), path.name, os.environ).value
    except (OSError, UnicodeDecodeError, PipelineError):
        return []
    steps = value.get("steps") if isinstance(value, dict) else None
    entries = steps.values() if isinstance(steps, dict) else ()
    named = [step.get("pipeline") for step in entries if isinstance(step, dict)]
    paths = [path.parent / one for one in named if isinstance(one, str) and "\0" not in one]
    return [found for one in paths if (found := _resolved(one)) is not None]


def _resolved(path: Path) -> Path | None:
    """Return the resolved path; None when its links form a cycle."""
    try:
        return path.resolve()
    except (OSError, RuntimeError):
        return None


NOWHERE = Wire(None, "")
"""Wire in place of one whose problem is reported already."""


@dataclass(frozen=True, slots=True)
class Constraint:
    """A wire that must carry `type`, as written; named sizes in it belong to `scope`. `path` is where it is wired."""

    path: str
    wire: Wire
    type: str
    scope: str = ""


@dataclass(frozen=True, slots=True)
class Part:
    """A sub-pipeline in the place of a step.

    steps, inputs: its steps and constants under their new names, reading the outer wires as written.
    gives:         the source of each of its outputs, by the outer wire that reads it.
    """

    steps: tuple[Step, ...]
    inputs: tuple[Input, ...]
    gives: Mapping[Wire, Wire]
    origins: Mapping[str, Origin]
    constraints: tuple[Constraint, ...]


def join(pipeline: Pipeline, parts: Mapping[str, Part], report: Report) -> tuple[Pipeline, tuple[Constraint, ...]]:
    """Return the pipeline with `parts` in place of the steps of these names, and its wire constraints.

    Reports unknown outputs of a part, unread parts, and cycles of parts.
    """
    ends = _Ends({wire: to for part in parts.values() for wire, to in part.gives.items()}, parts, report)
    _check_readers(pipeline, parts, report)
    constraints = tuple(
        dataclasses.replace(one, wire=ends.of(one.wire, one.path))
        for part in parts.values()
        for one in part.constraints
    )
    outer, inner = list[Step](), list[Step]()
    steps: list[Step] = []
    for step in pipeline.steps:
        if step.name in parts:
            made = [_led(one, lambda wire, path: ends.of(wire)) for one in parts[step.name].steps]
            inner += made
        else:
            made = [_led(step, ends.of)]
            outer += made
        steps += made
    outputs = {name: ends.of(wire, f"outputs.{name}") for name, wire in pipeline.outputs.items()}
    kept = _needed(outer, inner, outputs)
    steps = [step for step in steps if step.name in kept]
    read = {wire for step in steps for wire in _wires(step)} | {*outputs.values()} | {one.wire for one in constraints}
    constants = [one for part in parts.values() for one in part.inputs if Wire(None, one.name) in read]
    whole = dataclasses.replace(pipeline, inputs=(*pipeline.inputs, *constants), steps=tuple(steps), outputs=outputs)
    return whole, constraints


class _Ends:
    """Final targets of wires."""

    def __init__(self, gives: Mapping[Wire, Wire], parts: Mapping[str, Part], report: Report) -> None:
        self._gives = gives
        self._parts = parts
        self._report = report
        self._circles: set[frozenset[str | None]] = set()

    def of(self, wire: Wire, path: str = "") -> Wire:
        """Return the final source of `wire`; NOWHERE without one, which is reported at `path` if given."""
        passed: list[Wire] = []
        while wire in self._gives:
            if wire in passed:
                self._report_circle(passed[passed.index(wire) :], path)
                return NOWHERE
            passed.append(wire)
            wire = self._gives[wire]
        if wire.step is None or wire.step not in self._parts:
            return wire
        known = [one.port for one in self._parts[wire.step].gives]
        near = did_you_mean(f"{wire}", (f"{wire.step}.{port}" for port in known))
        if path:
            self._report.add(
                path, f"{wire.step} has no output {wire.port}", f"one of its outputs: {listed(known)}", near
            )
        return NOWHERE

    def _report_circle(self, ring: list[Wire], path: str) -> None:
        names = [wire.step or "" for wire in reversed(ring)]
        if path and frozenset(names) not in self._circles:
            self._circles.add(frozenset(names))
            whole = " -> ".join([*names, names[0]])
            self._report.add(path, f"the steps form a cycle: {whole}", fix="remove one of these wires")


def _led(step: Step, end: Callable[[Wire, str], Wire]) -> Step:
    """Return the step with every wire replaced by its final source."""
    path = f"steps.{step.name}"
    inputs = {port: end(wire, f"{path}.inputs.{port}") for port, wire in step.inputs.items()}
    when: Condition | None = None
    if step.when is not None:
        when = rewired(step.when, [end(wire, f"{path}.when") for wire in step.when.wires])
    return dataclasses.replace(step, inputs=inputs, when=when)


def _wires(step: Step) -> Iterator[Wire]:
    yield from step.inputs.values()
    yield from step.when.wires if step.when is not None else ()


def _needed(outer: list[Step], inner: list[Step], outputs: Mapping[str, Wire]) -> set[str]:
    """Return the names of all outer steps, and of the inner ones that they or an output need."""
    by_name = {step.name: step for step in [*outer, *inner]}
    open_names = [*(step.name for step in outer), *(wire.step for wire in outputs.values() if wire.step)]
    needed: set[str] = set()
    while open_names:
        name = open_names.pop()
        if name in needed or name not in by_name:
            continue
        needed.add(name)
        step = by_name[name]
        open_names += [wire.step for wire in _wires(step) if wire.step]
        open_names += [step.fallback] if isinstance(step.fallback, str) else []
    return needed


def _check_readers(pipeline: Pipeline, parts: Mapping[str, Part], report: Report) -> None:
    """Report unread parts, unless a dangling wire explains them."""
    names = {step.name for step in pipeline.steps}
    wires = [*pipeline.outputs.values(), *(wire for step in pipeline.steps for wire in _wires(step))]
    read = {wire.step for wire in wires}
    inputs = {one.name for one in pipeline.inputs}
    if not read <= {*names, *inputs, None}:
        return
    for name in parts:
        if name not in read:
            fix = "remove the step, or add one of them to outputs"
            report.add(f"steps.{name}", "nothing reads any of its outputs", fix=fix)


STEPS_MAX = 1000
"""Most steps of a pipeline including its sub-pipelines: nested files multiply."""


def expand_subpipelines(
    pipeline: Pipeline, report: Report, catalog: Mapping[str, Any]
) -> tuple[Pipeline, tuple[Constraint, ...]]:
    """Return the pipeline with pipeline files in place of the steps that name them, and its wire constraints.

    A step whose file cannot be used is unchanged. Problems, and the origins of new steps, go to `report`.
    """
    read: dict[str, Checked] = {}
    parts: dict[str, Part] = {}
    count = len(pipeline.steps)
    for step in pipeline.steps:
        if not step.pipeline:
            continue
        checked = read.get(step.pipeline) or _read(step, pipeline, report, catalog)
        if checked is not None:
            read[step.pipeline] = checked
            _check_inputs(step, checked.pipeline, report)
            parts[step.name] = _part(step, checked)
            count += len(parts[step.name].steps) - 1
        if count > STEPS_MAX:
            found = f"{count} steps or more, with those of the pipelines that are run as steps"
            report.add("steps", found, f"at most {STEPS_MAX}", "run some of them as separate pipelines")
            return pipeline, ()
    if not parts:
        return pipeline, ()
    secrets = {secret: name for checked in read.values() for secret, name in checked.pipeline.secrets.items()}
    pipeline = dataclasses.replace(pipeline, secrets={**pipeline.secrets, **secrets})
    report.origins = {**report.origins, **{key: one for part in parts.values() for key, one in part.origins.items()}}
    return join(_without_fallbacks_to(pipeline, parts, report), parts, report)


def _read(step: Step, pipeline: Pipeline, report: Report, catalog: Mapping[str, Any]) -> Checked | None:
    """Return the check of the step's file; None when the file cannot be used, which is reported."""
    # These two import this module: a pipeline is loaded and checked with its sub-pipelines.
    from weftline.pipelines.check.checker import examine
    from weftline.pipelines.spec.loader import load_file

    at, path = f"steps.{step.name}.pipeline", pipeline.base_dir / step.pipeline
    outer = Path(pipeline.file)
    try:
        if not is_file(path):
            report.add(at, f"there is no file {step.pipeline}", fix="give its path, relative to this file's folder")
            return None
        check_nesting(path, (outer.resolve(),) if outer.is_file() else ())
        checked = examine(load_file(path, catalog), catalog)
        problems: tuple[Problem, ...] = checked.problems
    except ConfigError as error:
        report.add(at, error.found, error.expected, error.fix)
        return None
    except PipelineError as error:
        problems = error.problems
    if not problems:
        return checked
    count = f"{len(problems)} problem{'s' if len(problems) > 1 else ''}"
    report.add(at, f"{step.pipeline} has {count} of its own, listed with this one")
    report.take(problems)
    return None


def _check_inputs(step: Step, inner: Pipeline, report: Report) -> None:
    path, asked = f"steps.{step.name}.inputs", [one for one in inner.inputs if not one.hidden]
    names = [one.name for one in asked]
    for name in step.inputs:
        if name not in names:
            taken = listed((f"{one.name} ({one.type})" for one in asked), "no inputs at all")
            report.add(f"{path}.{name}", f"{step.pipeline} has no input {name}", taken, did_you_mean(name, names))
    for one in asked:
        if one.name not in step.inputs and not one.may_be_left_out:
            found = f"{step.pipeline} needs its input {one.name} ({one.type}), which is not wired"
            report.add(path, found, fix=f"add `{one.name}: <step.port or input>` under {path}")


def _without_fallbacks_to(pipeline: Pipeline, parts: Mapping[str, Part], report: Report) -> Pipeline:
    steps = []
    for step in pipeline.steps:
        if isinstance(step.fallback, str) and step.fallback in parts:
            fix = f"name a step of its own that does what {step.fallback} does"
            report.add(f"steps.{step.name}.fallback", f"{step.fallback} is a pipeline run as a step", fix=fix)
            step = dataclasses.replace(step, fallback=None)
        steps.append(step)
    return dataclasses.replace(pipeline, steps=tuple(steps))


def _part(step: Step, checked: Checked) -> Part:
    """Return the part that replaces `step`."""
    inner, names = checked.pipeline, _Names(step, checked.pipeline)
    gives = {Wire(step.name, name): names.wire(wire) for name, wire in inner.outputs.items()}
    passed = {wire.port: to for wire, to in gives.items() if inner.outputs[wire.port].step is None}
    steps = [names.step(one) for one in inner.steps]
    if step.when is not None and passed:  # skipped with the rest
        name = names.free("passed")
        steps.append(Step(name, PASSES, inputs=passed, when=step.when))
        gives |= {Wire(step.name, port): Wire(name, port) for port in passed}
    asked = {one.name: one for one in inner.inputs if not one.hidden}
    wired = [
        Constraint(f"steps.{step.name}.inputs.{port}", wire, asked[port].type, step.name)
        for port, wire in step.inputs.items()
        if port in asked
    ]
    deeper = [names.constraint(one) for one in checked.constraints]
    return Part(tuple(steps), names.constants(), gives, _origins(step, checked, deeper), (*wired, *deeper))


def _origins(step: Step, checked: Checked, deeper: list[Constraint]) -> dict[str, Origin]:
    """Return the source location of everything in the part: the inner file, or a file inside it."""
    inner, name = checked.pipeline, step.name
    paths = [f"steps.{one.name}" for one in inner.steps] + [f"inputs.{one.name}" for one in inner.inputs]
    found = {path.replace(".", f".{name}/", 1): Origin(path, inner, whole=False) for path in paths}
    for one in deeper:
        path = one.path.split(".")[1].removeprefix(f"{name}/")
        found[f"steps.{name}/{path}"] = Origin(f"steps.{path}", inner, whole=False)
    for path, origin in checked.origins.items():
        found[path.replace(".", f".{name}/", 1)] = dataclasses.replace(origin, pipeline=origin.pipeline or inner)
    return found


class _Names:
    """Mapping of an inner pipeline's names and inputs to the outer pipeline."""

    def __init__(self, step: Step, inner: Pipeline) -> None:
        self._step = step
        self._inner = inner
        self._reads: dict[str, Wire] = {}
        for one in inner.inputs:
            if one.hidden or (one.name not in step.inputs and one.may_be_left_out):
                self._reads[one.name] = Wire(None, self.of(one.name))
            else:
                self._reads[one.name] = step.inputs.get(one.name, NOWHERE)

    def of(self, name: str) -> str:
        return f"{self._step.name}/{name}"

    def free(self, name: str) -> str:
        """Return a name that no step of the inner pipeline has."""
        while self._inner.step(name):
            name += "_"
        return self.of(name)

    def wire(self, wire: Wire) -> Wire:
        if wire.step is not None:
            return Wire(self.of(wire.step), wire.port)
        return self._reads.get(wire.port, NOWHERE)

    def constants(self) -> tuple[Input, ...]:
        # a constant on this step has that name too; it belongs to the outer pipeline and exists already
        own = [one for one in self._inner.inputs if one.hidden or one.name not in self._step.inputs]
        kept = [one for one in own if self._reads[one.name] == Wire(None, self.of(one.name))]
        return tuple(dataclasses.replace(one, name=self.of(one.name), hidden=True) for one in kept)

    def constraint(self, one: Constraint) -> Constraint:
        path = one.path.replace(".", f".{self._step.name}/", 1)
        return Constraint(path, self.wire(one.wire), one.type, self.of(one.scope))

    def step(self, one: Step) -> Step:
        return dataclasses.replace(
            one,
            name=self.of(one.name),
            inputs={port: self.wire(wire) for port, wire in one.inputs.items()},
            when=self._when(one.when),
            fallback=self.of(one.fallback) if isinstance(one.fallback, str) else one.fallback,
            worker=self.of(one.worker) if one.worker is not None else None,
            base_dir=self._inner.base_dir if one.base_dir is None else one.base_dir,
        )

    def _when(self, own: Condition | None) -> Condition | None:
        """Return the condition of an inner step: its own and that of the whole part."""
        parts = [] if self._step.when is None else [self._step.when]
        parts += [] if own is None else [rewired(own, [self.wire(wire) for wire in own.wires])]
        return all_of(parts) if parts else None
