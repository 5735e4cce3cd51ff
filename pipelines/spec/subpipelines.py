"""Sub-pipelines: check of a pipeline file used as a step, and its inlining.

    read: {pipeline: ocr.yaml, inputs: {image: photo}}    ->    read/find, read/crop, read/letters

Step `find` of the file becomes `read/find`. What reads the file's input `image` reads the outer wire instead, and what
read `read.text` reads whatever the file's output `text` is wired to. Inputs of the file that are left out become
constants with their default. Steps of the file that serve only outputs nobody asks for are left out. The file's own
limits and deadline do not apply: those of the outermost pipeline do.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from weftline.errors import PipelineError, Problem
from weftline.nodes.contract import ConfigError
from weftline.pipelines.check.problem_collector import Origin, Report
from weftline.pipelines.check.problems import did_you_mean, listed
from weftline.pipelines.spec.condition import Condition, all_of, rewired
from weftline.pipelines.spec.fallbacks import PASSES
from weftline.pipelines.spec.graph import Input, Pipeline, Step
from weftline.pipelines.spec.inlining import NOWHERE, Constraint, Part, join
from weftline.pipelines.spec.nested_files import check_nesting
from weftline.pipelines.spec.wire import Wire

if TYPE_CHECKING:
    from weftline.pipelines.check.checked import Checked


STEPS_MAX = 1000
"""Most steps of a pipeline with all that it runs as steps: files that name files multiply."""


def write_out_subpipelines(
    pipeline: Pipeline, report: Report, catalog: Mapping[str, Any]
) -> tuple[Pipeline, tuple[Constraint, ...]]:
    """Return the pipeline with pipeline files in place of the steps that name them, and what its wires must carry.

    A step whose file cannot be used stays as it is. Problems, and where the new steps come from, go to `report`.
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
            report.add("steps", found, f"at most {STEPS_MAX}", "run some of them as pipelines of their own")
            return pipeline, ()
    if not parts:
        return pipeline, ()
    secrets = {secret: name for checked in read.values() for secret, name in checked.pipeline.secrets.items()}
    pipeline = dataclasses.replace(pipeline, secrets={**pipeline.secrets, **secrets})
    report.origins = {**report.origins, **{key: one for part in parts.values() for key, one in part.origins.items()}}
    return join(_without_fallbacks_to(pipeline, parts, report), parts, report)


def _read(step: Step, pipeline: Pipeline, report: Report, catalog: Mapping[str, Any]) -> Checked | None:
    """Return what a check of the step's file learnt; None when the file cannot be used, which is reported."""
    # These two lead here themselves: a pipeline is loaded and checked with those inside it.
    from weftline.pipelines.check.checker import examine
    from weftline.pipelines.spec.loader import load_file

    at, path = f"steps.{step.name}.pipeline", pipeline.base_dir / step.pipeline
    outer = Path(pipeline.file)
    try:
        if not _is_file(path):
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


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError:  # a name that is too long, say
        return False


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
    """Return what a checked pipeline becomes in place of `step`."""
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
    """Return where everything in the part was written: in the inner file, or in one inside that."""
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
        # a constant that was written on this very step has that name too; it is the outer pipeline's, and there already
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
        """Return when an inner step runs: when its own condition holds, and that of the whole part."""
        parts = [] if self._step.when is None else [self._step.when]
        parts += [] if own is None else [rewired(own, [self.wire(wire) for wire in own.wires])]
        return all_of(parts) if parts else None
