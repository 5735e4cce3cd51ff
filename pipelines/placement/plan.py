"""Plan: a checked, sorted, placed and sized pipeline.

A Plan is immutable and made of plain values. `make_plan` builds it; a pipeline with problems never becomes one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from weftline.nodes.audio import WORKING_BYTES as AUDIO_WORKING_BYTES
from weftline.nodes.image import WORKING_BYTES_LEAST, WORKING_BYTES_PER_PIXEL
from weftline.nodes.ports import AUDIO_HZ, Port, PortType
from weftline.pipelines.spec.condition import Condition
from weftline.pipelines.spec.graph import Input
from weftline.pipelines.spec.policy import BatchPolicy, IdlePolicy, Limits, Retry, SequencePolicy, Slo
from weftline.pipelines.spec.wire import Wire
from weftline.shm.block import PAGE_BYTES, align_up


@dataclass(frozen=True, slots=True)
class PlannedInput:
    """A wired input port of a step: the port name, the source wire, and the unified type.

    type:     as the node receives it: of a port named in `map`, the type of one element of the list.
    optional: the node accepts an absent value; an absent value on any other port skips the step.
    pieces:   it is streamed in chunks from the step before; at most one input of a step.
    """

    port: str
    wire: Wire
    type: PortType
    optional: bool = False
    pieces: bool = False


@dataclass(frozen=True, slots=True)
class PlannedStep:
    """A step that can run.

    node:       dotted path of the node class, 'weftline.nodes.whisper:Whisper', or 'file.py:Class' of a user's file.
    options:    the node's options as plain JSON-like values, defaults included, ready to become its Config.
    inputs:     connected inputs only, in port order.
    outputs:    the node's output ports, types unified with their readers.
    readers:    for every output port, the number of step inputs, conditions and pipeline outputs that read it.
    streams:    the node is run as a StreamNode.
    fed:        inputs that its node receives by `feed`; a value that is not streamed is one chunk.
    workers:    indexes into Plan.workers, one for each instance; none for a control.
    run_max_ms: longest one call may take before its worker is killed.
    devices:    one for each instance, beside `workers`; `device` is the first.
    control:    '' for a node; 'first', 'switch' or 'passes' for a step that the scheduler evaluates without a worker.
    cases:      of a switch, the value of each input after the first (`by`), except the last one if `default` is set.
    default:    of a switch, True when its last input is used if no case matches.
    when:       the step is skipped where this is false; includes the guard of a step that serves switch cases only.
    fallback:   the step that replaces it on failure; that step runs for no other reason.
    absent_on_failure: its outputs are absent when it fails.
    retry, timeout_ms, map, sequence: as in graph.Step; `sequence` is set for every stateful node.
    idempotent: may run twice for one item.
    finite:     an item fails whose outputs hold NaN or an infinite number.
    conditional: its outputs may be absent.
    base_dir:   folder of relative paths in options; None: the plan's own.
    reserved:   number of instances without job rows, less than all.
    device_inputs:  input ports whose tensors the node reads on its device.
    device_outputs: output ports with readers on the device: 'device' when all readers are there, else 'both'.
    device_bytes: device memory of one instance, stated or measured; 0: not known.
    idle:       when it releases its device's memory; None: never.
    fills_memory: its node can use the remainder of a GPU when it opens.
    variables:  further environment variables that its processes inherit.
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
    devices: tuple[str, ...] = ()
    control: str = ""
    cases: tuple[Any, ...] = ()
    default: bool = False
    when: Condition | None = None
    fallback: str | None = None
    absent_on_failure: bool = False
    retry: Retry | None = None
    idempotent: bool = True
    timeout_ms: float | None = None
    map: tuple[str, ...] = ()
    sequence: SequencePolicy | None = None
    conditional: bool = False
    base_dir: Path | None = None
    fed: tuple[str, ...] = ()
    reserved: int = 0
    device_inputs: tuple[str, ...] = ()
    device_outputs: Mapping[str, str] = field(default_factory=dict)
    device_bytes: int = 0
    idle: IdlePolicy | None = None
    finite: bool = False
    fills_memory: bool = False
    variables: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class PlannedWorker:
    """One process: its name, the steps it holds, its share of cores, and the size of its arena in bytes.

    device:             the GPU that its steps use; '' for none.
    device_arena_bytes: size of its arena there; 0: none of its outputs is read there.
    """

    name: str
    steps: tuple[str, ...]
    threads: int
    arena_bytes: int
    device: str = ""
    device_arena_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Claim:
    """A claim on a device's memory.

    owner:    name of a step or of a worker.
    what:   'weights and work', 'context', 'arena', 'KV memory', 'reserve'; or the claim of another open pipeline,
            named by `owner` (`budget.OF_OTHERS`).
    source: 'stated' in the pipeline, 'measured' by a profile, 'assumed' by Weftline, 'claimed' by another pipeline;
            'unknown': neither stated nor measured; `bytes` is 0.
    """

    owner: str
    what: str
    bytes: int
    source: str


@dataclass(frozen=True, slots=True)
class DeviceBudget:
    """The memory of one GPU and the claims on it, including those of other open pipelines.

    kv_bytes:   remainder for its llm steps' KV memory.
    rest_bytes: remainder for the weights, work and KV memory of its only llm step that was not measured; the step
                allocates it when it opens.
    """

    device: str
    total_bytes: int
    claims: tuple[Claim, ...]
    kv_bytes: int = 0
    rest_bytes: int = 0

    @property
    def claimed_bytes(self) -> int:
        return sum(claim.bytes for claim in self.claims)


@dataclass(frozen=True, slots=True)
class StepWork:
    """Measured GPU time of a step's instance for one request, and the reason for its placement.

    ms: its share, when instances share requests evenly; None: not measured.
    """

    step: str
    ms: float | None
    why: str


@dataclass(frozen=True, slots=True)
class DeviceWork:
    """Measured load of a GPU for one request, largest first, with transfers to other GPUs.

    travel:    number of edges with avoidable transfers between it and other GPUs.
    travel_ms: assumed time of these transfers on the GPU.
    """

    device: str
    steps: tuple[StepWork, ...]
    travel: int = 0
    travel_ms: float = 0.0

    @property
    def busy_ms(self) -> float:
        return sum(one.ms or 0.0 for one in self.steps) + self.travel_ms


@dataclass(frozen=True, slots=True)
class PlannedOutput:
    """A pipeline output: source wire and type. `pieces`: it can be streamed; `optional`: it may be absent."""

    name: str
    wire: Wire
    type: PortType
    pieces: bool = False
    optional: bool = False


@dataclass(frozen=True, slots=True)
class Plan:
    """A pipeline that can run; every step comes after the steps that it reads.

    inputs: hidden ones are constants.
    cores:  number of cores of the machine.
    chains: indexes of steps that pass values inside one worker, in running order; a step is in at most one chain.
    ordering, mps, nvtx: as in GpuPolicy.
    budgets: memory claims on each GPU that a step is on.
    work:    measured load of each GPU; empty without measurements on GPUs.
    secrets: secret values in the options that came from the environment, each with its printed replacement.
    notes:   lines for display: reasons for processes, and outdated measurements.
    debug:   the step that runs in the process that opens the plan, for a debugger; '' for none.
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
    file: str = field(default="", compare=False)  # not part of equality
    about: str = ""
    chains: tuple[tuple[int, ...], ...] = ()
    ordering: str = "host"
    mps: bool = False
    nvtx: bool = False
    budgets: tuple[DeviceBudget, ...] = ()
    notes: tuple[str, ...] = ()
    work: tuple[DeviceWork, ...] = ()
    secrets: Mapping[str, str] = field(default_factory=dict, compare=False, repr=False)
    debug: str = ""

    @property
    def decoded_bytes_max(self) -> int:
        """Most bytes of the decoded pictures and recordings of one request; 0: it has none."""
        total = sum(self._decoded_bytes(one, self.input_types[one.name]) for one in self.inputs if not one.hidden)
        return min(total, self.limits.request_bytes_max)

    @property
    def ingress_arena_bytes(self) -> int:
        """Shared memory for request inputs: holds two of the largest decoded inputs."""
        return max(self.limits.arena_bytes, 2 * align_up(self.decoded_bytes_max, PAGE_BYTES))

    @property
    def decode_bytes_max(self) -> int:
        """Most memory that decoding may use at a time; 0: nothing to decode."""
        if not self.decoded_bytes_max:
            return 0
        if self.limits.decode_bytes_max is not None:
            return self.limits.decode_bytes_max
        kinds = {one.name: _media_kind(self.input_types[one.name]) for one in self.inputs if not one.hidden}
        pictures = [self._pixels_max(one) for one in self.inputs if kinds.get(one.name) == "image"]
        return max(
            AUDIO_WORKING_BYTES, max(pictures, default=0) * max(WORKING_BYTES_PER_PIXEL.values()) + WORKING_BYTES_LEAST
        )

    def _decoded_bytes(self, one: Input, type: PortType) -> int:
        kind = _media_kind(type)
        if not kind:
            return 0
        if type.kind == "list":
            return self.limits.request_bytes_max
        if kind == "image":
            return 3 * self._pixels_max(one)
        return int((one.seconds_max or self.limits.seconds_max) * AUDIO_HZ + 1) * 4

    def _pixels_max(self, one: Input) -> int:
        return one.pixels_max or self.limits.pixels_max

    def step(self, name: str) -> PlannedStep:
        return next(step for step in self.steps if step.name == name)


def _media_kind(type: PortType) -> str:
    """Return 'image' or 'audio' for ports, or lists, of decoded media; else ''."""
    if type.kind == "list":
        return _media_kind(type.item) if type.item is not None else ""
    return type.kind if type.kind in ("image", "audio") else ""
