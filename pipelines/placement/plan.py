"""Plan: a checked, sorted, placed and sized pipeline.

A Plan is immutable and made of plain values. `make_plan` builds it; a pipeline with problems never becomes one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from weftline.fields import DERIVED, GRAPH, LOAD, RESOURCE, SCHEDULE
from weftline.nodes.audio import WORKING_BYTES as AUDIO_WORKING_BYTES
from weftline.nodes.declared_files import FileIdentity
from weftline.nodes.image import WORKING_BYTES_LEAST, WORKING_BYTES_PER_PIXEL
from weftline.nodes.ports import AUDIO_HZ, Port, PortType
from weftline.pipelines.spec.graph import Input, StepPolicy
from weftline.pipelines.spec.policy import BatchPolicy, Limits, SequencePolicy, Slo
from weftline.pipelines.spec.wire import Wire
from weftline.shm.block import PAGE_BYTES, align_up


@dataclass(frozen=True, slots=True)
class PlannedInput:
    """A wired input port of a step: the port name, the source wire, and the unified type.

    type:     as the node receives it: of a port named in `map`, the type of one element of the list.
    optional: the node accepts an absent value; an absent value on any other port skips the step.
    pieces:   it is streamed in chunks from the step before; at most one input of a step.
    """

    port: Annotated[str, LOAD]
    wire: Annotated[Wire, GRAPH]
    type: Annotated[PortType, LOAD]
    optional: Annotated[bool, GRAPH] = False
    pieces: Annotated[bool, RESOURCE] = False


@dataclass(frozen=True, slots=True)
class PlannedStep(StepPolicy):
    """A step that can run; the keys of StepPolicy are those of the written step.

    node:       dotted path of the node class, 'weftline.nodes.whisper:Whisper', or 'file.py:Class' of a user's file.
    options:    the node's options as plain JSON-like values, defaults included, ready to become its Config.
    request_options: names of the options that apply to single items: steps that differ in them may share a node.
    mixed_options:   its node takes items with different request options in one call.
    inputs:     connected inputs only, in port order.
    outputs:    the node's output ports, types unified with their readers.
    readers:    for every output port, the number of step inputs, conditions and pipeline outputs that read it.
    streams:    the node is run as a StreamNode.
    workers:    indexes into Plan.workers, one for each instance; none for a control.
    run_max_ms: longest one call may take before its worker is killed.
    devices:    one for each instance, beside `workers`; `device` is the first.
    control:    '' for a node; 'first', 'switch' or 'passes' for a step that the scheduler evaluates without a worker.
    cases:      of a switch, the value of each input after the first (`by`), except the last one if `default` is set.
    default:    of a switch, True when its last input is used if no case matches.
    when:       as in StepPolicy; includes the guard of a step that serves switch cases only.
    fallback:   the step that replaces it on failure; that step runs for no other reason.
    absent_on_failure: its outputs are absent when it fails.
    idempotent: may run twice for one item.
    sequence:   set for every stateful node.
    conditional: its outputs may be absent.
    fed:        inputs that its node receives by `feed`; a value that is not streamed is one chunk.
    device_inputs:  input ports whose tensors the node reads on its device.
    device_outputs: output ports with readers on the device: 'device' when all readers are there, else 'both'.
    device_bytes: device memory of one instance, stated or measured; 0: not known.
    fills_memory: its node can use the remainder of a GPU when it opens.
    variables:  further environment variables that its processes inherit.
    files:      state of the files that it loads; workers compare it whenever they open or wake the node.
    """

    name: Annotated[str, GRAPH]
    node: Annotated[str, LOAD]
    options: Annotated[Mapping[str, Any], LOAD]
    inputs: Annotated[tuple[PlannedInput, ...], LOAD]
    outputs: Annotated[tuple[Port, ...], LOAD]
    readers: Annotated[Mapping[str, int], DERIVED]
    batch: Annotated[BatchPolicy, LOAD]
    streams: Annotated[bool, RESOURCE]
    mutates_inputs: Annotated[bool, DERIVED]
    heavy: Annotated[bool, DERIVED]
    device: Annotated[str, RESOURCE]
    workers: Annotated[tuple[int, ...], RESOURCE]
    run_max_ms: Annotated[float, SCHEDULE]
    devices: Annotated[tuple[str, ...], RESOURCE] = ()
    control: Annotated[str, GRAPH] = ""
    cases: Annotated[tuple[Any, ...], GRAPH] = ()
    default: Annotated[bool, GRAPH] = False
    fallback: Annotated[str | None, GRAPH] = None
    absent_on_failure: Annotated[bool, GRAPH] = False
    idempotent: Annotated[bool, SCHEDULE] = True
    sequence: Annotated[SequencePolicy | None, LOAD] = None
    conditional: Annotated[bool, DERIVED] = False
    fed: Annotated[tuple[str, ...], RESOURCE] = ()
    device_inputs: Annotated[tuple[str, ...], RESOURCE] = ()
    device_outputs: Annotated[Mapping[str, str], RESOURCE] = field(default_factory=dict)
    device_bytes: Annotated[int, RESOURCE] = 0
    fills_memory: Annotated[bool, DERIVED] = False
    variables: Annotated[tuple[str, ...], RESOURCE] = ()
    files: Annotated[tuple[FileIdentity, ...], RESOURCE] = ()
    request_options: Annotated[tuple[str, ...], DERIVED] = ()
    mixed_options: Annotated[bool, DERIVED] = False


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
    worker: name of the worker whose process holds it; '' for what several hold.
    """

    owner: str
    what: str
    bytes: int
    source: str
    worker: str = field(default="", compare=False)


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
    """A pipeline output: source wire and type.

    pieces:   it can be streamed.
    optional: it may be absent.
    labels:   as in `Port`.
    """

    name: Annotated[str, GRAPH]
    wire: Annotated[Wire, GRAPH]
    type: Annotated[PortType, GRAPH]
    pieces: Annotated[bool, SCHEDULE] = False
    optional: Annotated[bool, GRAPH] = False
    labels: Annotated[tuple[str, ...], DERIVED] = ()


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

    name: Annotated[str, DERIVED]
    inputs: Annotated[tuple[Input, ...], GRAPH]
    input_types: Annotated[Mapping[str, PortType], GRAPH]
    input_readers: Annotated[Mapping[str, int], DERIVED]
    steps: Annotated[tuple[PlannedStep, ...], GRAPH]
    outputs: Annotated[tuple[PlannedOutput, ...], GRAPH]
    workers: Annotated[tuple[PlannedWorker, ...], RESOURCE]
    limits: Annotated[Limits, GRAPH]
    slo: Annotated[Slo, SCHEDULE]
    cores: Annotated[int, RESOURCE]
    base_dir: Annotated[Path, RESOURCE]
    file: Annotated[str, DERIVED] = field(default="", compare=False)  # not part of equality
    about: Annotated[str, DERIVED] = ""
    chains: Annotated[tuple[tuple[int, ...], ...], DERIVED] = ()
    ordering: Annotated[str, SCHEDULE] = "host"
    mps: Annotated[bool, RESOURCE] = False
    nvtx: Annotated[bool, SCHEDULE] = False
    budgets: Annotated[tuple[DeviceBudget, ...], RESOURCE] = ()
    notes: Annotated[tuple[str, ...], DERIVED] = ()
    work: Annotated[tuple[DeviceWork, ...], DERIVED] = ()
    secrets: Annotated[Mapping[str, str], DERIVED] = field(default_factory=dict, compare=False, repr=False)
    debug: Annotated[str, DERIVED] = ""

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
