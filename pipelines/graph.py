"""The nouns of a pipeline as somebody wrote it: inputs, steps, wires and outputs, with the lines they stand on.

The YAML loader and the Python builder both produce a `Pipeline`; `check` and `plan` read nothing else. Nothing here is
validated beyond its Python types: a Pipeline may be nonsense, and `check` says in which ways.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from weftline.pipelines.policy import BatchPolicy, Limits, Slo


@dataclass(frozen=True, slots=True)
class Wire:
    """Where a value comes from: output `port` of `step`, or pipeline input `port` when `step` is None.

    Written `hear.text`, or `question` for a pipeline input.
    """

    step: str | None
    port: str

    def __str__(self) -> str:
        return self.port if self.step is None else f"{self.step}.{self.port}"


@dataclass(frozen=True, slots=True)
class Input:
    """A pipeline input: its type, and tighter limits than the pipeline's.

    type:        written type, such as `audio` or `float32[4]`.
    about:       one line for people.
    seconds_max: longest recording, in seconds; for `audio`.
    pixels_max:  largest picture, in pixels of width times height; for `image`.
    bytes_max:   most bytes of the value as it is sent.
    """

    name: str
    type: str
    about: str = ""
    seconds_max: float | None = None
    pixels_max: int | None = None
    bytes_max: int | None = None


@dataclass(frozen=True, slots=True)
class Step:
    """One place in a pipeline.

    node:       a catalog name, or 'package.module:Class', or 'file.py:Class'.
    options:    the node's own options, as written; validated against the node's Config.
    inputs:     wires by input port name.
    batch:      None takes the node's default.
    worker:     steps that name the same worker share its process; None gives each instance one of its own.
    instances:  loaded copies.
    device:     'auto', 'cpu', 'cuda', 'cuda:1'.
    run_max_ms: longest one call of the node may take before its worker is killed; None means 10 minutes.
    """

    name: str
    node: str
    options: Mapping[str, Any] = field(default_factory=dict)
    inputs: Mapping[str, Wire] = field(default_factory=dict)
    batch: BatchPolicy | None = None
    worker: str | None = None
    instances: int = 1
    device: str = "auto"
    run_max_ms: float | None = None


@dataclass(frozen=True, slots=True)
class Pipeline:
    """A whole pipeline as written.

    file:     as the user named it; the user's Python file when built in Python. Not part of equality, nor are lines.
    base_dir: relative paths in options are relative to this.
    lines:    1-based line of each YAML path ('steps.see.batch.items_max'); of the call when built in Python.
    """

    name: str
    inputs: tuple[Input, ...]
    steps: tuple[Step, ...]
    outputs: Mapping[str, Wire]
    limits: Limits = Limits()
    slo: Slo = Slo()
    about: str = ""
    file: str = field(default="", compare=False)
    base_dir: Path = Path()
    lines: Mapping[str, int] = field(default_factory=dict, compare=False)

    def step(self, name: str) -> Step | None:
        return next((step for step in self.steps if step.name == name), None)

    def line(self, path: str) -> int:
        """Return the line of `path`, or of the nearest thing above it; 0 when unknown."""
        while path:
            if path in self.lines:
                return self.lines[path]
            path = path.rpartition(".")[0]
        return 0
