"""Pipeline graph as written: inputs, steps, wires and outputs, with their source lines.

The YAML loader and the Python builder both produce a `Pipeline`; `check` and `plan` read nothing else. Nothing here is
validated beyond its Python types: `check` reports the problems of a Pipeline. The fields of `Step` and `Input` are the
keys of a file; `weftline.fields` explains their annotations.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path
from typing import Annotated, Any

from msgspec import Meta

from weftline.fields import GRAPH, LOAD, RESOURCE, REST, SCHEDULE, UNWRITTEN, Written, plain, shorthand, worded
from weftline.nodes.ports import PortType
from weftline.pipelines.spec import condition
from weftline.pipelines.spec.condition import Condition
from weftline.pipelines.spec.constants import check_constant, check_default
from weftline.pipelines.spec.policy import (
    NAME_CHARS_MAX,
    AnyIdle,
    AnyRetry,
    BatchPolicy,
    Bytes,
    CallPolicy,
    Device,
    DurationMs,
    GpuPolicy,
    Limits,
    Name,
    OneDevice,
    Pixels,
    Seconds,
    SequencePolicy,
    Slo,
)
from weftline.pipelines.spec.wire import ConstantWire, Wire, parse_wire

WIRE_PATTERN = r"^[A-Za-z_][A-Za-z0-9_-]*(\.[A-Za-z_][A-Za-z0-9_-]*)?$"

NODE_CHARS_MAX = 512
"""Longest reference to a node, or path of a pipeline file, in characters."""

PORTS_MAX = 64
"""Most ports that one `map:` names."""

STRUCTURAL = "structural"
"""Marker of keys on which wires, types or other keys depend: without them the rest cannot be checked."""


def _type_text(text: str) -> str:
    PortType.parse(text)
    return text


def _wire(written: str | ConstantEntry) -> Wire:
    return ConstantWire(None, "", written.value) if isinstance(written, ConstantEntry) else parse_wire(written)


def _one_or_more(written: str | tuple[str, ...]) -> tuple[str, ...]:
    return (written,) if isinstance(written, str) else written


TypeText = Annotated[str, Written(Annotated[str, Meta(max_length=200)], _type_text, plain)]
WireText = Annotated[
    str, worded("step.port, or an input's name", pattern=WIRE_PATTERN, max_length=2 * NAME_CHARS_MAX + 1)
]
ConditionText = Annotated[str, Meta(min_length=1, max_length=condition.CHARS_MAX)]
PathText = Annotated[str, Meta(min_length=1, max_length=NODE_CHARS_MAX)]
Constant = Annotated[Any, Written(Any, check_constant, plain)]
Count = Annotated[int, Meta(ge=1, le=64)]


@dataclass(frozen=True, slots=True)
class ConstantEntry:
    """A constant as the source of a port."""

    value: Annotated[Constant, GRAPH]
    """Text, a number, true, false, null, a list or a mapping."""


AnyPath = Annotated[str, Written(PathText | None, lambda path: path or "", lambda path: path or None)]
AnyWire = Annotated[Wire, Written(WireText | ConstantEntry, _wire, str)]
AnyOutput = Annotated[Wire, Written(WireText, parse_wire, str)]
AnyCondition = Annotated[Condition, Written(ConditionText, condition.parse, lambda one: one.text)]
Names = Annotated[
    tuple[str, ...],
    Written(
        Name | Annotated[tuple[Name, ...], Meta(min_length=1, max_length=PORTS_MAX)],
        _one_or_more,
        lambda names: names[0] if len(names) == 1 else [*names],
    ),
]


@dataclass(frozen=True, slots=True)
class Input:
    """A pipeline input: its type, and tighter limits than the pipeline's."""

    name: Annotated[str, GRAPH, UNWRITTEN]
    """Name; in a file the key of its entry."""
    type: Annotated[TypeText, GRAPH, STRUCTURAL]
    """Written type, such as `audio` or `float32[4]`."""
    about: Annotated[str, SCHEDULE] = ""
    """One line of documentation."""
    seconds_max: Annotated[Seconds | None, GRAPH] = None
    """Longest recording, in seconds; for `audio`."""
    pixels_max: Annotated[Pixels | None, GRAPH] = None
    """Largest picture, in pixels of width times height; for `image`."""
    bytes_max: Annotated[Bytes | None, GRAPH] = None
    """Most bytes of the value as it is sent."""
    default: Annotated[Any, GRAPH, STRUCTURAL] = None
    """Its value when a request omits it; text, a number, true, false, a list or a mapping."""
    optional: Annotated[bool, GRAPH, STRUCTURAL] = False
    """A request may omit it; without a default it is then absent."""
    hidden: Annotated[bool, GRAPH, UNWRITTEN] = False
    """A constant of the pipeline with its value as `default`; requests cannot contain it."""

    @property
    def may_be_left_out(self) -> bool:
        """Return True when a request may omit it: it has a default or may be absent."""
        return self.optional or self.default is not None


def _checked_default(one: Input) -> Input:
    if one.default is not None:
        check_default(one.type, one.default)
    return one


_INPUT = shorthand(Input, "type", name="")
AnyInput = Annotated[Input, Written(_INPUT.type, lambda entry: _checked_default(_INPUT.read(entry)), _INPUT.write)]
write_input = _INPUT.write


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPolicy(CallPolicy):
    """Keys of a step that its plan has unchanged."""

    when: Annotated[AnyCondition | None, GRAPH, STRUCTURAL] = None
    """A condition, such as `kind.label == 'speech'`; where it is false, the step is skipped, its outputs absent."""
    map: Annotated[Names, GRAPH, STRUCTURAL] = ()
    """The input port, or ports, that receive a list and run item by item; the step's outputs become lists."""
    retry: Annotated[AnyRetry | None, SCHEDULE] = None
    """Number of retries of a failed item, or a mapping; default: one, after a worker's death only."""
    timeout_ms: Annotated[DurationMs | None, SCHEDULE] = None
    """Upper limit for one item, waiting included; then the step has failed."""
    reserved: Annotated[int, Meta(ge=0, le=4096), RESOURCE] = 0
    """Number of instances that run no job rows, reserved for other requests; less than `instances`."""
    idle: Annotated[AnyIdle | None, RESOURCE] = None
    """Release of device memory: after this many seconds without work, or a mapping; never by default."""
    base_dir: Annotated[Path | None, RESOURCE, UNWRITTEN] = None
    """Folder of relative paths in options; None: the pipeline's own."""


@dataclass(frozen=True, slots=True)
class Step(StepPolicy):
    """One step: its node, the sources of its inputs, batching, placement, and the node's own options."""

    name: Annotated[str, GRAPH, UNWRITTEN]
    """Name; in a file the key of its entry."""
    node: Annotated[AnyPath, LOAD, STRUCTURAL] = ""
    """The node: a name of the catalog, `package.module:Class`, or `file.py:Class`."""
    options: Annotated[Mapping[str, Any], LOAD, REST] = field(default_factory=dict)
    """The node's own options, as written; validated against the node's Config."""
    inputs: Annotated[Mapping[Name, AnyWire], GRAPH, STRUCTURAL] = field(default_factory=dict)
    """Source of each input port: `step.port`, the name of a pipeline input, or a constant, `{value: 224}`."""
    _: KW_ONLY

    pipeline: Annotated[AnyPath, GRAPH, STRUCTURAL] = ""
    """A pipeline file that runs as this step, instead of a node; only `inputs` and `when` may be set beside it."""
    batch: Annotated[BatchPolicy | None, LOAD] = None
    """Batching of items; default: the node's own."""
    fallback: Annotated[Name | Annotated[Mapping[Name, Constant], Meta(min_length=1)] | None, GRAPH, STRUCTURAL] = None
    """Replacement when the step fails or times out: another step, constants by output port, or `absent`."""
    idempotent: Annotated[bool | None, SCHEDULE] = None
    """The step may run twice for one item; default: as declared by its node."""
    sequence: Annotated[SequencePolicy | None, LOAD] = None
    """The step keeps state between the requests of a sequence; default: as declared by its node."""
    worker: Annotated[Name | None, RESOURCE] = None
    """Steps that name the same worker share its process; default: each instance has a process of its own, and light
    steps (`template`) share one."""
    instances: Annotated[Count | Annotated[Mapping[OneDevice, Count], Meta(min_length=1)], RESOURCE] = 1
    """Loaded copies of the node; or their number on each device, such as `{"cuda:0": 2, cpu: 1}`."""
    device: Annotated[Device, RESOURCE] = "auto"
    """`auto`, `cpu`, `cuda`, or `cuda:1` and so on; `auto` puts heavy nodes on a GPU when there is one."""
    share: Annotated[bool | None, SCHEDULE] = None
    """Steps that load the same, of one pipeline or of several in a server, share one loaded node. Default: nodes of
    Weftline share, those without a model only with steps of other pipelines; user code does not, because its state may
    matter."""
    threads: Annotated[Annotated[int, Meta(ge=1, le=1024)] | None, SCHEDULE] = None
    """CPU threads of one instance's process, for OpenMP, BLAS, torch and ONNX Runtime. Default: heavy nodes such as
    `whisper` and `torch` divide the cores among their processes, and others, `function` among them, have one. Among
    steps that share a process the largest number applies."""
    device_bytes: Annotated[Annotated[int, Meta(ge=1, le=1 << 44)] | None, RESOURCE] = None
    """Upper limit of one instance's device memory, in bytes, without KV memory; default: as measured, if it was."""
    run_max_ms: Annotated[DurationMs | None, SCHEDULE] = None
    """Upper limit of one call of the node, after which its worker is killed; default: 10 minutes. For a streaming step,
    such as `llm`: its longest time without progress while it has work."""


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
