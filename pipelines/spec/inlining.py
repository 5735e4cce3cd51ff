"""Inlining of sub-pipelines: rewiring and removal of unused steps.

A wire that reads an output of such a step reads what that output stands for: an output of one of the part's own steps,
or, when the part passes an input on, the wire that the input was given; so wires are followed to their end.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from weftline.pipelines.check.problem_collector import Origin, Report
from weftline.pipelines.check.problems import did_you_mean, listed
from weftline.pipelines.spec.condition import Condition, rewired
from weftline.pipelines.spec.graph import Input, Pipeline, Step
from weftline.pipelines.spec.wire import Wire

NOWHERE = Wire(None, "")
"""What is read where a problem is known already."""


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

    steps, inputs: its steps and constants under their new names; they read the outer wires as they were written.
    gives:         what each of its outputs stands for, by the wire that reads it.
    """

    steps: tuple[Step, ...]
    inputs: tuple[Input, ...]
    gives: Mapping[Wire, Wire]
    origins: Mapping[str, Origin]
    constraints: tuple[Constraint, ...]


def join(pipeline: Pipeline, parts: Mapping[str, Part], report: Report) -> tuple[Pipeline, tuple[Constraint, ...]]:
    """Return the pipeline with `parts` in place of the steps of these names, and what its wires must carry.

    Reports outputs that a part does not have, parts that nobody reads, and parts that pass on what they are passed.
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
        """Return what `wire` reads in the end; NOWHERE when that is nothing, which is reported at `path` if given."""
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
            self._report.add(path, f"the steps run in a circle: {whole}", fix="remove one of these wires")


def _led(step: Step, end: Callable[[Wire, str], Wire]) -> Step:
    """Return the step with every wire it reads led to its end."""
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
    heard = {wire.step for wire in wires}
    inputs = {one.name for one in pipeline.inputs}
    if not heard <= {*names, *inputs, None}:
        return
    for name in parts:
        if name not in heard:
            fix = "remove the step, or add one of them to outputs"
            report.add(f"steps.{name}", "nothing reads any of its outputs", fix=fix)
