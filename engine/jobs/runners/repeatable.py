"""Reproducibility of a job's outputs: byte-identical or equal within rounding; pure."""

from __future__ import annotations

from collections.abc import Sequence

from weftline.errors import InputError
from weftline.pipelines.check.problems import did_you_mean, listed
from weftline.pipelines.placement.plan import Plan

EXACT, ROUNDING = "exact", "rounding"
"""Whether the same rows give the same bytes in every run, or numbers that may differ by rounding."""


def repeatable(plan: Plan, outputs: Sequence[str], shared: bool) -> dict[str, str]:
    """Return for each output whether a job gives the same bytes in every run.

    Batches that usual requests share, and steps that batch as they go along, make numbers differ by rounding; so does
    everything that is made of these.
    """
    loose = {None: False} | {step.name: shared or step.streams for step in plan.steps}
    for step in plan.steps:  # each comes after what it reads
        wires = [given.wire for given in step.inputs] + list(step.when.wires if step.when is not None else ())
        loose[step.name] = loose[step.name] or any(loose[wire.step] for wire in wires)
    for step in plan.steps:
        if step.fallback is not None:
            loose[step.name] = loose[step.name] or loose[step.fallback]
    wire_of = {one.name: one.wire for one in plan.outputs}
    return {name: ROUNDING if loose[wire_of[name].step] else EXACT for name in outputs}


def check_outputs(plan: Plan, outputs: Sequence[str]) -> None:
    """Raise InputError when the pipeline lacks one of these outputs."""
    known = [one.name for one in plan.outputs]
    unknown = [name for name in outputs if name not in known]
    if unknown or not outputs:
        hints = [hint for name in unknown if (hint := did_you_mean(name, known))]
        told = f"no output is called {listed(unknown)}; outputs: {listed(known)}"
        raise InputError(told + (f"\n    fix: {hints[0]}" if hints else ""))
