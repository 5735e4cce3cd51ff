"""Plan: a checked, sorted, placed and sized pipeline.

A Plan is immutable and made of plain values. `make_plan` builds it; a pipeline with problems never becomes one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from weftline.nodes.audio import WORKING_BYTES as AUDIO_WORKING_BYTES
from weftline.nodes.image_header import WORKING_BYTES_LEAST, WORKING_BYTES_PER_PIXEL
from weftline.nodes.ports import AUDIO_HZ, Port, PortType
from weftline.pipelines.spec.condition import Condition
from weftline.pipelines.spec.graph import Input
from weftline.pipelines.spec.policy import BatchPolicy, IdlePolicy, Limits, Retry, SequencePolicy, Slo
from weftline.pipelines.spec.wire import Wire
from weftline.shm.block import PAGE_BYTES, align_up


@dataclass(frozen=True, slots=True)
class PlannedInput:
    """An input port of a step, wired: the node's port name, where its value comes from, and the unified type.

    type:     as the node sees it: of a port named in `map`, the type of one element of the list.
    optional: the node can do without; an absent value on any other port skips the step.
    pieces:   it is taken piece by piece, as the step before gives it; at most one input of a step.
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
    outputs:    the node's output ports as it gives them, types unified with their readers.
    readers:    for every output port, how many step inputs, conditions and pipeline outputs read it (0: nobody does).
    streams:    the node is run as a StreamNode.
    fed:        the inputs that its node is given by `feed`, the whole as one piece where nothing comes in pieces.
    workers:    indexes into Plan.workers, one for each instance; none for a control.
    run_max_ms: longest one call may take before its worker is killed.
    devices:    one for each instance, beside `workers`; `device` is the first.
    control:    '' for a node; 'first', 'switch' or 'passes' for a step that the scheduler decides itself, without a
                worker.
    cases:      of a switch, after its first input (what it decides by) one value for each further input but the last
                one when `default` is true.
    default:    of a switch, whether its last input is taken when no case fits.
    when:       skipped where it does not hold; of a step that serves only cases of switches, also where none of them
                can be chosen.
    fallback:   the step that answers in its place; that step runs for nobody else.
    retry, timeout_ms, map, sequence: as in graph.Step; `sequence` is set for every stateful node.
    idempotent: may run twice for one item.
    finite:     an item fails whose outputs hold NaN or an infinite number.
    conditional: its outputs may be absent.
    base_dir:   what relative paths in options are relative to; None: the plan's own.
    reserved:   how many of its instances take no job rows, less than all.
    near_inputs:  input ports whose tensors the node takes on its device.
    near_outputs: output ports that somebody reads on the device: 'device' when nobody else reads them, else 'both'.
    device_bytes: what one instance takes of its device's memory, stated or measured before; 0: not known.
    idle:       when it gives its device's memory back; None: never.
    fills_room: its node can take what is left of a GPU when it opens.
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
    retry: Retry | None = None
    idempotent: bool = True
    timeout_ms: float | None = None
    map: tuple[str, ...] = ()
    sequence: SequencePolicy | None = None
    conditional: bool = False
    base_dir: Path | None = None
    fed: tuple[str, ...] = ()
    reserved: int = 0
    near_inputs: tuple[str, ...] = ()
    near_outputs: Mapping[str, str] = field(default_factory=dict)
    device_bytes: int = 0
    idle: IdlePolicy | None = None
    finite: bool = False
    fills_room: bool = False


@dataclass(frozen=True, slots=True)
class PlannedWorker:
    """One process: its name, the steps it holds, its share of cores, and the size of its arena in bytes.

    device:             the GPU that its steps use; '' for none.
    device_arena_bytes: size of its arena there; 0: none of its steps gives anything that is read there.
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

    who:    a step's name, or a worker's.
    what:   'weights and work', 'context', 'arena', 'KV memory', 'reserve'; or that it is another open pipeline, which
            `who` then names (`pipelines.budget.OF_OTHERS`).
    source: 'stated' in the pipeline, 'measured' by a profile, 'assumed' by Weftline, 'claimed' by another pipeline;
            'unknown': nobody has said, and `bytes` is 0.
    """

    who: str
    what: str
    bytes: int
    source: str


@dataclass(frozen=True, slots=True)
class DeviceBudget:
    """The memory of one GPU and what is claimed of it, by other open pipelines too.

    kv_bytes:   what is left for its llm steps' KV memory.
    rest_bytes: what is left for the weights, the work and the KV memory of its only llm step, which is not
                measured: it takes that when it opens.
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

    ms: its share, when instances share requests evenly; None: nobody has measured it.
    """

    step: str
    ms: float | None
    why: str


@dataclass(frozen=True, slots=True)
class DeviceWork:
    """Measured load of a GPU for one request, largest first, with transfers to other GPUs.

    travel:    over how many edges between it and other GPUs tensors travel that could stay on one.
    travel_ms: what that is assumed to take of the GPU.
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
    """A pipeline output, where it comes from and its type. `pieces`: it can be streamed; `optional`: may be absent."""

    name: str
    wire: Wire
    type: PortType
    pieces: bool = False
    optional: bool = False


@dataclass(frozen=True, slots=True)
class Plan:
    """A pipeline that can run; `steps` are in an order in which every step comes after what it reads.

    inputs: hidden ones are constants.
    cores:  how many cores the machine it was placed on has.
    chains: indexes of steps that hand over inside one worker, each chain in running order; a step is in at most one.
    ordering, mps, nvtx: as in GpuPolicy.
    budgets: of each GPU that a step is on, who takes what of its memory.
    work:    of each GPU, how busy it is by measured times; empty when nothing on GPUs was measured.
    secrets: secret values in the options that came from the environment, each with what is printed instead.
    notes:   lines for people: why processes are as they are, and measurements that do not hold any more.
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
    file: str = field(default="", compare=False)  # where it was written is no part of what it is
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
        """Most bytes that the pictures and recordings of one request are once decoded; 0: it has none."""
        total = sum(self._decoded_bytes(one, self.input_types[one.name]) for one in self.inputs if not one.hidden)
        return min(total, self.limits.request_bytes_max)

    @property
    def ingress_arena_bytes(self) -> int:
        """Shared memory for requests' inputs: two of the largest that are decoded fit, one in use, one on its way."""
        return max(self.limits.arena_bytes, 2 * align_up(self.decoded_bytes_max, PAGE_BYTES))

    @property
    def decode_bytes_max(self) -> int:
        """Most memory that decoding may take at a time; 0: there is nothing to decode."""
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
    """Return 'image' or 'audio' for a port, or a list, of what is decoded; '' for any other."""
    if type.kind == "list":
        return _media_kind(type.item) if type.item is not None else ""
    return type.kind if type.kind in ("image", "audio") else ""
