"""Schema of pipeline files: the whole file, and its problems.

`validate` checks files and, through `serialisation.to_document`, pipelines built in Python, so that the same rules
apply to both. The keys are the fields of `PipelineFile`, of `graph.Step` and `graph.Input`, and of the policies.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from weftline.errors import Problem
from weftline.fields import written_fields
from weftline.pipelines.check.problems import PATTERNS, did_you_mean, listed
from weftline.pipelines.check.validation import read
from weftline.pipelines.spec.graph import AnyInput, AnyOutput, Step
from weftline.pipelines.spec.policy import NAME_PATTERN, GpuPolicy, Limits, Name, Slo


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineFile:
    """A Weftline pipeline."""

    weftline: Literal[1]
    """Version of this format."""
    name: Name
    """Name of the pipeline."""
    about: str = ""
    """One line of documentation."""
    inputs: Mapping[Name, AnyInput] = field(default_factory=dict)
    """Inputs of a request: a type such as `image` or `float32[4]`, or a mapping with type and limits."""
    steps: Mapping[Name, Step]
    """Steps by name."""
    outputs: Mapping[Name, AnyOutput]
    """Outputs of a request: `step.port`, or the name of an input."""
    limits: Limits | None = None
    """Limits on requests."""
    slo: Slo | None = None
    """Service level objectives: measured and reported, never enforced."""
    gpu: GpuPolicy | None = None
    """GPU policy."""


STEP_KEYS = tuple(one.name for one in written_fields(Step))
"""Keys of a step that are the format's own; every other key is an option of its node."""

BESIDE_PIPELINE = ("pipeline", "inputs", "when")
"""Keys of a step that runs a pipeline file; all other settings are in that file."""


def validate(document: Any) -> tuple[PipelineFile | None, list[Problem]]:
    """Return the document as a model, or None and every problem in it, without file or line."""
    if not isinstance(document, Mapping):
        found = "an empty file" if document is None else "a list" if isinstance(document, list) else "a single value"
        return None, [Problem("", found, "a mapping that starts with `weftline: 1`")]
    problems = list(_what_runs(document.get("steps")))
    known = tuple(one.path for one in problems)
    under = tuple(f"{path}." for path in known)
    file, more = read(PipelineFile, document)
    problems += [_described(one, document) for one in more if one.path not in known and not one.path.startswith(under)]
    return (None, problems) if problems else (file, [])


def _what_runs(steps: Any) -> Iterator[Problem]:
    """Yield problems of `node` and `pipeline` of the steps."""
    for name, step in steps.items() if isinstance(steps, Mapping) else ():
        if not isinstance(step, Mapping):
            continue
        path, written = f"steps.{name}", [key for key, value in step.items() if value is not None]
        if "pipeline" not in written:
            if "node" not in written:
                yield Problem(f"{path}.node", "missing", fix="add `node:`, or `pipeline:` with a pipeline file")
            continue
        if "node" in written:
            yield Problem(f"{path}.pipeline", "written beside node", "one of the two", "remove one of them")
            continue
        for key in (key for key in written if key not in BESIDE_PIPELINE):
            if key in STEP_KEYS:
                found, fix = f"a pipeline run as a step has no {key} of its own", "write it on a step inside that file"
                yield Problem(f"{path}.{key}", found, f"one of {listed(BESIDE_PIPELINE)}", fix)
            else:
                expected, fix = f"one of {listed(BESIDE_PIPELINE)}", did_you_mean(key, BESIDE_PIPELINE)
                yield Problem(f"{path}.{key}", "unknown key", expected, fix)


MOVED = {"slo.deadline_ms": "limits.deadline_ms", "slo.refuse_early": "limits.refuse_early"}
"""Keys that are often written in the wrong mapping, with the right path."""


def _described(problem: Problem, document: Mapping[str, Any]) -> Problem:
    """Return the problem with more on keys in the wrong mapping, the format's version, and names under `map`."""
    if problem.path in MOVED and problem.found == "unknown key":
        return dataclasses.replace(problem, fix=f"write it as {MOVED[problem.path]}")
    if problem.path == "weftline":
        fix = "write `weftline: 1` as the first line of the file"
        found = "missing" if problem.found == "missing" else f"is {document.get('weftline')!r:.40}"
        return dataclasses.replace(problem, found=found, expected="1, the version of the format", fix=fix)
    if problem.path.split(".")[2:3] == ["map"] and problem.expected == PATTERNS[NAME_PATTERN]:
        expected = "the name of an input of the step, which is wired to the list under `inputs`"
        return dataclasses.replace(problem, expected=expected)
    return problem
