"""Pipeline graph as written: inputs, steps, wires and outputs, with their source lines.

The YAML loader and the Python builder both produce a `Pipeline`; `check` and `plan` read nothing else. Nothing here is
validated beyond its Python types: `check` reports the problems of a Pipeline.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from weftline.pipelines.spec.condition import Condition
from weftline.pipelines.spec.policy import BatchPolicy, GpuPolicy, IdlePolicy, Limits, Retry, SequencePolicy, Slo
from weftline.pipelines.spec.wire import Wire


@dataclass(frozen=True, slots=True)
class Input:
    """A pipeline input: its type, and tighter limits than the pipeline's.

    type:        written type, such as `audio` or `float32[4]`.
    about:       one line of documentation.
    seconds_max: longest recording, in seconds; for `audio`.
    pixels_max:  largest picture, in pixels of width times height; for `image`.
    bytes_max:   most bytes of the value as it is sent.
    default:     its value when a request omits it; text, a number, true, false, a list or a mapping.
    optional:    a request may omit it; without a default it is then absent.
    hidden:      a constant of the pipeline with its value as `default`; requests cannot contain it.
    """

    name: str
    type: str
    about: str = ""
    seconds_max: float | None = None
    pixels_max: int | None = None
    bytes_max: int | None = None
    default: Any = None
    optional: bool = False
    hidden: bool = False

    @property
    def may_be_left_out(self) -> bool:
        """Return True when a request may omit it: it has a default or may be absent."""
        return self.optional or self.default is not None


@dataclass(frozen=True, slots=True)
class Step:
    """One step of a pipeline.

    node:       a catalog name, or 'package.module:Class', or 'file.py:Class'; '' for a `pipeline:` step.
    options:    the node's own options, as written; validated against the node's Config.
    inputs:     wires by input port name.
    batch:      None takes the node's default.
    worker:     steps that name the same worker share its process; None gives each instance one of its own, or
                that of light steps.
    instances:  loaded copies; or their number on each device, such as {'cuda:0': 2, 'cpu': 1}.
    reserved:   number of instances without job rows.
    device:     'auto', 'cpu', 'cuda', 'cuda:1'.
    run_max_ms: longest one call of the node may take before its worker is killed; None means 10 minutes.
    when:       a condition; where it is false the step is skipped and its outputs are absent.
    fallback:   a step that replaces this one when it fails or times out, constants by output port, or 'absent'.
    retry:      retry policy; None: one retry after a worker's death.
    idempotent: the step may run twice for one item; None: as declared by the node.
    finite:     an item fails whose outputs hold NaN or an infinite number.
    timeout_ms: upper limit for one item, waiting included; then the step has failed.
    map:        input ports that receive a list and run item by item; the outputs become lists.
    sequence:   the step keeps state between the requests of a sequence; None: as declared by the node.
    pipeline:   a pipeline file that is run as this step, instead of a node.
    base_dir:   folder of relative paths in options; None: the pipeline's own. Never written in a file.
    device_bytes: upper limit of an instance's device memory, without KV memory; None: as measured, if it was.
    idle:       when it releases its device's memory; None: never.
    threads:    CPU threads of its process; None: its share of the cores if it is heavy, else one.
    """

    name: str
    node: str = ""
    options: Mapping[str, Any] = field(default_factory=dict)
    inputs: Mapping[str, Wire] = field(default_factory=dict)
    batch: BatchPolicy | None = None
    worker: str | None = None
    instances: int | Mapping[str, int] = 1
    device: str = "auto"
    run_max_ms: float | None = None
    when: Condition | None = None
    fallback: str | Mapping[str, Any] | None = None
    retry: Retry | None = None
    idempotent: bool | None = None
    timeout_ms: float | None = None
    map: tuple[str, ...] = ()
    sequence: SequencePolicy | None = None
    pipeline: str = ""
    base_dir: Path | None = None
    reserved: int = 0
    device_bytes: int | None = None
    idle: IdlePolicy | None = None
    finite: bool = False
    threads: int | None = None


@dataclass(frozen=True, slots=True)
class Pipeline:
    """A whole pipeline as written.

    file:     path as given; the user's Python file when built in Python. Not part of equality, nor are lines.
    base_dir: relative paths in options are relative to this.
    lines:    1-based line of each YAML path ('steps.see.batch.items_max'); of the call when built in Python.
    secrets:  secret values from the environment, each with its printed replacement.
    """

    name: str
    inputs: tuple[Input, ...]
    steps: tuple[Step, ...]
    outputs: Mapping[str, Wire]
    limits: Limits = Limits()
    slo: Slo = Slo()
    gpu: GpuPolicy = GpuPolicy()
    about: str = ""
    file: str = field(default="", compare=False)
    base_dir: Path = Path()
    lines: Mapping[str, int] = field(default_factory=dict, compare=False)
    secrets: Mapping[str, str] = field(default_factory=dict, compare=False, repr=False)

    def step(self, name: str) -> Step | None:
        return next((step for step in self.steps if step.name == name), None)

    def line(self, path: str) -> int:
        """Return the line of `path` or of its nearest known parent; 0 when unknown."""
        while path:
            if path in self.lines:
                return self.lines[path]
            path = path.rpartition(".")[0]
        return 0
