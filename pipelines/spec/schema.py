"""Pydantic schema of pipeline files: the single definition of every key.

`validate` is used for files and, through `written.to_document`, for pipelines built in Python, so both meet the same
rules. The pieces, their types and bounds are in `entries`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from weftline.errors import Problem
from weftline.pipelines.check.problems import did_you_mean, from_validation, listed
from weftline.pipelines.spec.entries import (
    NAME_PATTERN,
    WIRE_PATTERN,
    AnyCount,
    AnyFallback,
    AnyIdle,
    AnyInput,
    AnyRetry,
    AnySource,
    BatchEntry,
    ConditionText,
    ConstantEntry,
    Device,
    DeviceBytes,
    DurationMs,
    GpuEntry,
    IdleEntry,
    InputEntry,
    LimitsEntry,
    Name,
    Names,
    PathText,
    Reserved,
    RetryEntry,
    SequenceEntry,
    SloEntry,
    Strict,
    Threads,
    WireText,
)


class StepEntry(Strict):
    """One step: the node it runs, what its inputs read, how it is grouped and placed, and the node's own options."""

    model_config = ConfigDict(extra="allow")

    node: PathText | None = None
    """What the step runs: a name of the catalog, `package.module:Class`, or `file.py:Class`."""

    pipeline: PathText | None = None
    """A pipeline file that is run as this step, instead of a node; beside it stand `inputs` and `when` only."""

    inputs: dict[Name, AnySource] = Field(default_factory=dict)
    """Where each input port reads: `step.port`, the name of a pipeline input, or a constant, `{value: 224}`."""

    when: ConditionText | None = None
    """A condition, such as `kind.label == 'speech'`: where it does not hold, the step is skipped and its outputs are
    absent."""

    batch: BatchEntry | None = None  # type: ignore[valid-type]
    """How items are grouped; left out, the node's own default."""

    map: Names = ()
    """The input port, or ports, that are given a list and run item by item; the step's outputs become lists."""

    retry: AnyRetry | None = None
    """How often a failed item is tried again, or a mapping that says more; left out, only after a worker's death."""

    timeout_ms: DurationMs | None = None
    """Longest the step may take for one item, waiting included; then it has failed."""

    fallback: AnyFallback | None = None
    """What answers when the step fails or takes too long: the name of another step, or constants by output port."""

    idempotent: bool | None = None
    """The step may run twice for one item; left out, what its node says."""

    finite: bool = False
    """An item fails whose outputs hold NaN or an infinite number, before any other step or caller sees them; left out,
    nobody looks."""

    sequence: SequenceEntry | None = None  # type: ignore[valid-type]
    """The step remembers between the requests of a sequence; left out, what its node says."""

    worker: Name | None = None
    """Steps that name the same worker share its process; left out, each instance has a process of its own."""

    instances: AnyCount = 1
    """Loaded copies of the node; or how many on each device, such as `{"cuda:0": 2, cpu: 1}`."""

    reserved: Reserved = 0
    """How many of the instances take no job rows, and are free for usual requests; less than there are."""

    device: Device = "auto"
    """`auto`, `cpu`, `cuda`, or `cuda:1` and so on; `auto` puts heavy nodes on a GPU when there is one."""

    threads: Threads | None = None
    """CPU threads that one instance's process may compute with: what OpenMP, BLAS, torch and ONNX Runtime are told.
    Left out, heavy nodes such as `whisper` and `torch` divide the cores among their processes, and others, `function`
    among them, have one. Of steps that share a process the largest number holds."""

    device_bytes: DeviceBytes | None = None
    """What one instance takes of its device's memory, in bytes, at most, KV memory aside; left out, what was measured,
    if anything was."""

    idle: AnyIdle | None = None
    """When the step gives its device's memory back: after so many seconds without work, or a mapping that says more;
    left out, never."""

    run_max_ms: DurationMs | None = None
    """Longest one call of the node may take before its worker is killed; left out, 10 minutes. For a streaming step,
    such as `llm`: its longest silence while it has work."""


class PipelineFile(Strict):
    """A Weftline pipeline."""

    weftline: Literal[1]
    """Version of this format."""

    name: Name
    """What the pipeline is called."""

    about: str = ""
    """One line for people."""

    inputs: dict[Name, AnyInput] = Field(default_factory=dict)
    """What a request brings: a type such as `image` or `float32[4]`, or a mapping with its type and limits."""

    steps: dict[Name, StepEntry]
    """What runs, by name."""

    outputs: dict[Name, WireText]
    """What a request gets back: `step.port`, or the name of an input."""

    limits: LimitsEntry | None = None  # type: ignore[valid-type]
    """What the pipeline accepts."""

    slo: SloEntry | None = None  # type: ignore[valid-type]
    """Service level objectives: measured and reported, never enforced."""

    gpu: GpuEntry | None = None  # type: ignore[valid-type]
    """How the pipeline uses GPUs."""


STEP_KEYS = tuple(StepEntry.model_fields)
"""Keys of a step that are the format's own; every other key is an option of its node."""

BESIDE_PIPELINE = ("pipeline", "inputs", "when")
"""Keys of a step that runs a pipeline file; everything else is said inside that file."""


def validate(document: Any) -> tuple[PipelineFile | None, list[Problem]]:
    """Return the document as a model, or None and every problem in it, without file or line."""
    if not isinstance(document, Mapping):
        found = "an empty file" if document is None else "a list" if isinstance(document, list) else "a single value"
        return None, [Problem("", found, "a mapping that starts with `weftline: 1`")]
    problems = list(_what_runs(document.get("steps")))
    try:
        model = PipelineFile.model_validate(document)
    except ValidationError as error:
        said = tuple(one.path for one in problems)
        under = tuple(f"{path}." for path in said)
        more = [_spoken(one, document) for one in from_validation(error, document, "", _known)]
        return None, [*problems, *(one for one in more if one.path not in said and not one.path.startswith(under))]
    return (None, problems) if problems else (model, [])


def _what_runs(steps: Any) -> Iterator[Problem]:
    """Yield what is wrong with steps that have no node, or a pipeline file instead of one."""
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


_ENTRIES: dict[str, type[BaseModel]] = {
    "batch": BatchEntry,
    "retry": RetryEntry,
    "sequence": SequenceEntry,
    "idle": IdleEntry,
}


MOVED = {"slo.deadline_ms": "limits.deadline_ms", "slo.refuse_early": "limits.refuse_early"}
"""Keys that are often written in another mapping than their own, with the right path."""


def _known(loc: tuple[str | int, ...]) -> Iterable[str]:
    """Return the keys allowed in the mapping at `loc`; a step's own keys are never refused here."""
    if not loc:
        return PipelineFile.model_fields
    if loc[0] != "steps":
        return {"inputs": InputEntry, "limits": LimitsEntry, "slo": SloEntry, "gpu": GpuEntry}[str(loc[0])].model_fields
    return (_ENTRIES.get(str(loc[2]), ConstantEntry)).model_fields


def _spoken(problem: Problem, document: Mapping[str, Any]) -> Problem:
    """Return the problem with regular expressions put into words, and the format's version with its value."""
    if problem.path in MOVED and problem.found == "unknown key":
        return dataclasses.replace(problem, fix=f"write it as {MOVED[problem.path]}")
    if problem.path == "weftline":
        fix = "write `weftline: 1` as the first line of the file"
        found = "missing" if problem.found == "missing" else f"is {document.get('weftline')!r:.40}"
        return dataclasses.replace(problem, found=found, expected="1, the version of the format", fix=fix)
    words = {
        NAME_PATTERN: "letters, digits, _ and -, not starting with a digit",
        WIRE_PATTERN: "step.port, or an input's name",
    }
    expected = next((text for pattern, text in words.items() if pattern in problem.expected), problem.expected)
    if "cuda" in expected and "pattern" in expected:
        expected = f"{'auto, ' if 'auto' in expected else ''}cpu, cuda, or cuda:0 and so on"
    return dataclasses.replace(problem, expected=expected)
