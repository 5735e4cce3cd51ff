"""A checked, sorted, placed and sized pipeline: everything the engine needs, and nothing it has to look up.

A Plan is immutable and made of plain values. `make_plan` builds it; a pipeline with problems never becomes one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from weftline.nodes.ports import Port, PortType
from weftline.pipelines.graph import Input, Wire
from weftline.pipelines.policy import BatchPolicy, Limits, Slo


@dataclass(frozen=True, slots=True)
class PlannedInput:
    """An input port of a step, wired: the node's port name, where its value comes from, and the unified type."""

    port: str
    wire: Wire
    type: PortType


@dataclass(frozen=True, slots=True)
class PlannedStep:
    """A step that can run.

    node:       dotted path of the node class, 'weftline.nodes.whisper:Whisper', or 'file.py:Class' of a user's file.
    options:    the node's options as plain JSON-like values, defaults included, ready to become its Config.
    inputs:     connected inputs only, in port order.
    outputs:    the node's output ports, types unified with their readers.
    readers:    for every output port, how many step inputs and pipeline outputs read it (0: nobody does).
    streams:    the node is a StreamNode.
    workers:    indexes into Plan.workers, one for each instance.
    run_max_ms: longest one call may take before its worker is killed.
    """

    name: str
    node: str
    options: Mapping[str, Any]
    inputs: tuple[PlannedInput, ...]
    outputs: tuple[Port, ...]
    readers: Mapping[str, int]
    batch: BatchPolicy
    streams: bool
    mutates_inputs: bool
    heavy: bool
    device: str
    workers: tuple[int, ...]
    run_max_ms: float


@dataclass(frozen=True, slots=True)
class PlannedWorker:
    """One process: its name, the steps it holds, its share of cores, and the size of its arena in bytes."""

    name: str
    steps: tuple[str, ...]
    threads: int
    arena_bytes: int


@dataclass(frozen=True, slots=True)
class PlannedOutput:
    """A pipeline output, where it comes from and its type. `pieces`: it can be streamed."""

    name: str
    wire: Wire
    type: PortType
    pieces: bool = False


@dataclass(frozen=True, slots=True)
class Plan:
    """A pipeline that can run; `steps` are in an order in which every step comes after what it reads.

    cores: how many cores the machine it was placed on has.
    """

    name: str
    inputs: tuple[Input, ...]
    input_types: Mapping[str, PortType]
    input_readers: Mapping[str, int]
    steps: tuple[PlannedStep, ...]
    outputs: tuple[PlannedOutput, ...]
    workers: tuple[PlannedWorker, ...]
    limits: Limits
    slo: Slo
    cores: int
    base_dir: Path
    file: str = field(default="", compare=False)  # where it was written is no part of what it is
    about: str = ""

    def step(self, name: str) -> PlannedStep:
        return next(step for step in self.steps if step.name == name)
