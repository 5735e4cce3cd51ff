"""Pydantic schema of pipeline files: the single definition of every key.

`validate` checks files and, through `serialisation.to_document`, pipelines built in Python, so that the same rules
apply to both. Defaults and descriptions of batch, limits and other policies come from the dataclasses in `policy`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from typing import Annotated, Any, Literal, get_type_hints

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    ValidationError,
    create_model,
    model_validator,
)

from weftline.errors import Problem
from weftline.nodes.ports import PortType
from weftline.pipelines.check.problems import did_you_mean, from_validation, listed
from weftline.pipelines.render.field_docs import field_docs
from weftline.pipelines.spec import condition
from weftline.pipelines.spec.constants import check_constant, check_default
from weftline.pipelines.spec.graph import Input
from weftline.pipelines.spec.policy import BatchPolicy, GpuPolicy, IdlePolicy, Limits, Retry, SequencePolicy, Slo

NAME_CHARS_MAX = 64
"""Longest name of an input, step or output, in characters."""

NAME_PATTERN = r"^[A-Za-z_][A-Za-z0-9_-]*$"
WIRE_PATTERN = r"^[A-Za-z_][A-Za-z0-9_-]*(\.[A-Za-z_][A-Za-z0-9_-]*)?$"
NODE_CHARS_MAX = 512
"""Longest reference to a node, or path of a pipeline file, in characters."""

PORTS_MAX = 64
"""Most ports that one `map:` names."""

SIZES_MAX = 64
"""Most preferred sizes of a batch, and most sizes that one dim is padded to."""

BOUNDS: dict[type, dict[str, dict[str, float]]] = {
    BatchPolicy: {
        "items_max": {"ge": 1, "le": 4096},
        "wait_max_ms": {"ge": 0, "le": 60_000},
        "pad_value": {"ge": -1e38, "le": 1e38},
    },
    Retry: {"attempts": {"ge": 0, "le": 10}, "wait_ms": {"ge": 0, "le": 60_000}},
    SequencePolicy: {"live_max": {"ge": 1, "le": 1_000_000}, "idle_max_ms": {"gt": 0, "le": 86_400_000}},
    Limits: {
        "deadline_ms": {"gt": 0, "le": 86_400_000},
        "requests_max": {"ge": 1, "le": 1_000_000},
        "request_bytes_max": {"ge": 1, "le": 1 << 40},
        "open_bytes_max": {"ge": 1, "le": 1 << 42},
        "pixels_max": {"ge": 1, "le": 1 << 32},
        "seconds_max": {"gt": 0, "le": 86_400},
        "map_items_max": {"ge": 1, "le": 1_000_000},
        "arena_bytes": {"ge": 1 << 16, "le": 1 << 40},
        "decode_bytes_max": {"ge": 1 << 20, "le": 1 << 40},
        "stream_bytes_max": {"ge": 1, "le": 1 << 40},
        "stall_max_ms": {"gt": 0, "le": 86_400_000},
        "silence_max_ms": {"ge": 1500, "le": 3_600_000},  # workers send a heartbeat once a second
        "retry_share": {"ge": 0, "le": 1},
        "job_batch_ms": {"gt": 0, "le": 3_600_000},
    },
    Slo: {"latency_p99_ms": {"gt": 0, "le": 86_400_000}},
    IdlePolicy: {"after_s": {"gt": 0, "le": 2_592_000}},
    GpuPolicy: {
        "arena_bytes": {"ge": 1 << 16, "le": 1 << 40},
        "reserve_bytes": {"ge": 0, "le": 1 << 40},
        "context_bytes": {"ge": 0, "le": 1 << 36},
    },
    Input: {
        "seconds_max": {"gt": 0, "le": 86_400},
        "pixels_max": {"ge": 1, "le": 1 << 32},
        "bytes_max": {"ge": 1, "le": 1 << 40},
    },
}
"""Bounds of the numbers in a file. They catch mistakes such as a negative wait, or seconds for milliseconds."""


def _port_type(text: str) -> str:
    PortType.parse(text)
    return text


def _condition(text: str) -> str:
    condition.parse(text)
    return text


def _as_tuple(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _one_or_more(value: Any) -> Any:
    return (value,) if isinstance(value, str) else _as_tuple(value)


def _length(value: Any) -> str:
    return "long" if isinstance(value, Mapping) else "short"


Name = Annotated[str, Field(pattern=NAME_PATTERN, max_length=NAME_CHARS_MAX)]
WireText = Annotated[str, Field(pattern=WIRE_PATTERN, max_length=2 * NAME_CHARS_MAX + 1)]
TypeText = Annotated[str, Field(max_length=200), AfterValidator(_port_type)]
ConditionText = Annotated[str, Field(min_length=1, max_length=condition.CHARS_MAX), AfterValidator(_condition)]
PathText = Annotated[str, Field(min_length=1, max_length=NODE_CHARS_MAX)]
Device = Annotated[str, Field(pattern=r"^(auto|cpu|cuda(:[0-9]{1,3})?|fake(-[a-z]{1,8})?:[0-9]{1,3})$")]
OneDevice = Annotated[str, Field(pattern=r"^(cpu|cuda(:[0-9]{1,3})?|fake(-[a-z]{1,8})?:[0-9]{1,3})$")]
"""Fake GPUs are for tests; a pipeline names them on a machine that has them."""

Count = Annotated[int, Field(ge=1, le=64)]
Reserved = Annotated[int, Field(ge=0, le=4096)]
Constant = Annotated[Any, AfterValidator(check_constant)]
Threads = Annotated[int, Field(ge=1, le=1024)]
DurationMs = Annotated[float, Field(gt=0, le=86_400_000)]
Sizes = Annotated[
    tuple[Annotated[int, Field(ge=1, le=1 << 32)], ...],
    Field(min_length=1, max_length=SIZES_MAX),
    BeforeValidator(_as_tuple),
]
Ends = Annotated[
    tuple[Literal["error", "timeout"], ...],
    Field(min_length=1),
    BeforeValidator(_as_tuple),
]
Names = Annotated[
    tuple[Name, ...],
    Field(min_length=1, max_length=PORTS_MAX),
    BeforeValidator(_one_or_more, json_schema_input_type=Name | list[Name]),
]

STRICT = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False, use_attribute_docstrings=True)


class Strict(BaseModel):
    """Model with exact types and without further keys."""

    model_config = STRICT


def _model_of(policy: Any, leave: Iterable[str] = (), **overrides: Any) -> type[BaseModel]:
    """Return a model with the fields, defaults and documentation of a dataclass, and the bounds above.

    leave: fields that files do not contain.
    """
    hints, about = get_type_hints(policy), field_docs(policy)
    validators = overrides.pop("validators", {})
    fields: dict[str, Any] = {}
    for one in dataclasses.fields(policy):
        bounds: dict[str, Any] = dict(BOUNDS[policy].get(one.name, {}))
        described = Field(description=about.get(one.name), **bounds)
        default = ... if one.default is dataclasses.MISSING else one.default
        if one.default_factory is not dataclasses.MISSING:
            default = one.default_factory()
        if one.name not in leave:
            fields[one.name] = (Annotated[overrides.get(one.name, hints[one.name]), described], default)
    doc = (policy.__doc__ or "").partition("\n")[0]
    config: ConfigDict = {
        **STRICT,
        "use_attribute_docstrings": False,
    }  # there is no class body to search, which takes a quarter second
    return create_model(
        policy.__name__, __config__=config, __doc__=doc, __module__=__name__, __validators__=validators, **fields
    )


def _default_fits(entry: Any) -> Any:
    if entry.default is not None:
        check_default(entry.type, entry.default)
    return entry


InputEntry: type[BaseModel] = _model_of(
    Input, ("name", "hidden"), type=TypeText, validators={"default_fits": model_validator(mode="after")(_default_fits)}
)
"""The name of an input is its key."""

BatchEntry: type[BaseModel] = _model_of(BatchPolicy, sizes=Sizes, pad=dict[Name, Sizes])
RetryEntry: type[BaseModel] = _model_of(Retry, on=Ends)
SequenceEntry: type[BaseModel] = _model_of(SequencePolicy)
LimitsEntry: type[BaseModel] = _model_of(
    Limits, kv_bytes=dict[OneDevice, Annotated[int, Field(ge=1 << 16, le=1 << 44)]]
)
SloEntry: type[BaseModel] = _model_of(Slo)
IdleEntry: type[BaseModel] = _model_of(IdlePolicy)
GpuEntry: type[BaseModel] = _model_of(GpuPolicy)


def _long_form(value: Any) -> Any:
    return {"type": value} if isinstance(value, str) else value


AnyInput = Annotated[InputEntry, BeforeValidator(_long_form, json_schema_input_type=TypeText | InputEntry)]  # type: ignore[valid-type]


class ConstantEntry(Strict):
    """A constant as the source of a port."""

    value: Constant
    """Text, a number, true, false, null, a list or a mapping."""


AnySource = Annotated[Annotated[WireText, Tag("short")] | Annotated[ConstantEntry, Tag("long")], Discriminator(_length)]
AnyCount = Annotated[
    Annotated[Count, Tag("short")] | Annotated[dict[OneDevice, Count], Field(min_length=1), Tag("long")],
    Discriminator(_length),
]
Attempts = Annotated[int, Field(**BOUNDS[Retry]["attempts"])]
AnyRetry = Annotated[
    Annotated[Attempts, Tag("short")] | Annotated[RetryEntry, Tag("long")],  # type: ignore[valid-type]
    Discriminator(_length),
]
IdleSeconds = Annotated[float, Field(**BOUNDS[IdlePolicy]["after_s"])]
AnyIdle = Annotated[
    Annotated[IdleSeconds, Tag("short")] | Annotated[IdleEntry, Tag("long")],  # type: ignore[valid-type]
    Discriminator(_length),
]
DeviceBytes = Annotated[int, Field(ge=1, le=1 << 44)]
AnyFallback = Annotated[
    Annotated[Name, Tag("short")] | Annotated[dict[Name, Constant], Field(min_length=1), Tag("long")],
    Discriminator(_length),
]


class StepEntry(Strict):
    """One step: its node, the sources of its inputs, batching, placement, and the node's own options."""

    model_config = ConfigDict(extra="allow")

    node: PathText | None = None
    """The node: a name of the catalog, `package.module:Class`, or `file.py:Class`."""

    pipeline: PathText | None = None
    """A pipeline file that runs as this step, instead of a node; only `inputs` and `when` may be set beside it."""

    inputs: dict[Name, AnySource] = Field(default_factory=dict)
    """Source of each input port: `step.port`, the name of a pipeline input, or a constant, `{value: 224}`."""

    when: ConditionText | None = None
    """A condition, such as `kind.label == 'speech'`; where it is false, the step is skipped, its outputs absent."""

    batch: BatchEntry | None = None  # type: ignore[valid-type]
    """Batching of items; default: the node's own."""

    map: Names = ()
    """The input port, or ports, that receive a list and run item by item; the step's outputs become lists."""

    retry: AnyRetry | None = None
    """Number of retries of a failed item, or a mapping; default: one, after a worker's death only."""

    timeout_ms: DurationMs | None = None
    """Upper limit for one item, waiting included; then the step has failed."""

    fallback: AnyFallback | None = None
    """Replacement when the step fails or times out: another step, constants by output port, or `absent`."""

    idempotent: bool | None = None
    """The step may run twice for one item; default: as declared by its node."""

    finite: bool = False
    """An item fails if its outputs contain NaN or an infinite number, before any reader receives them; default: not
    checked."""

    sequence: SequenceEntry | None = None  # type: ignore[valid-type]
    """The step keeps state between the requests of a sequence; default: as declared by its node."""

    worker: Name | None = None
    """Steps that name the same worker share its process; default: each instance has a process of its own, and light
    steps (`template`) share one."""

    instances: AnyCount = 1
    """Loaded copies of the node; or their number on each device, such as `{"cuda:0": 2, cpu: 1}`."""

    reserved: Reserved = 0
    """Number of instances that run no job rows, reserved for other requests; less than `instances`."""

    device: Device = "auto"
    """`auto`, `cpu`, `cuda`, or `cuda:1` and so on; `auto` puts heavy nodes on a GPU when there is one."""

    threads: Threads | None = None
    """CPU threads of one instance's process, for OpenMP, BLAS, torch and ONNX Runtime. Default: heavy nodes such as
    `whisper` and `torch` divide the cores among their processes, and others, `function` among them, have one. Among
    steps that share a process the largest number applies."""

    device_bytes: DeviceBytes | None = None
    """Upper limit of one instance's device memory, in bytes, without KV memory; default: as measured, if it was."""

    idle: AnyIdle | None = None
    """Release of device memory: after this many seconds without work, or a mapping; never by default."""

    run_max_ms: DurationMs | None = None
    """Upper limit of one call of the node, after which its worker is killed; default: 10 minutes. For a streaming step,
    such as `llm`: its longest time without progress while it has work."""


class PipelineFile(Strict):
    """A Weftline pipeline."""

    weftline: Literal[1]
    """Version of this format."""

    name: Name
    """Name of the pipeline."""

    about: str = ""
    """One line of documentation."""

    inputs: dict[Name, AnyInput] = Field(default_factory=dict)
    """Inputs of a request: a type such as `image` or `float32[4]`, or a mapping with type and limits."""

    steps: dict[Name, StepEntry]
    """Steps by name."""

    outputs: dict[Name, WireText]
    """Outputs of a request: `step.port`, or the name of an input."""

    limits: LimitsEntry | None = None  # type: ignore[valid-type]
    """Limits on requests."""

    slo: SloEntry | None = None  # type: ignore[valid-type]
    """Service level objectives: measured and reported, never enforced."""

    gpu: GpuEntry | None = None  # type: ignore[valid-type]
    """GPU policy."""


STEP_KEYS = tuple(StepEntry.model_fields)
"""Keys of a step that are the format's own; every other key is an option of its node."""

BESIDE_PIPELINE = ("pipeline", "inputs", "when")
"""Keys of a step that runs a pipeline file; all other settings are in that file."""


def validate(document: Any) -> tuple[PipelineFile | None, list[Problem]]:
    """Return the document as a model, or None and every problem in it, without file or line."""
    if not isinstance(document, Mapping):
        found = "an empty file" if document is None else "a list" if isinstance(document, list) else "a single value"
        return None, [Problem("", found, "a mapping that starts with `weftline: 1`")]
    problems = list(_what_runs(document.get("steps")))
    try:
        model = PipelineFile.model_validate(document)
    except ValidationError as error:
        known = tuple(one.path for one in problems)
        under = tuple(f"{path}." for path in known)
        more = [_described(one, document) for one in from_validation(error, document, "", _known)]
        return None, [*problems, *(one for one in more if one.path not in known and not one.path.startswith(under))]
    return (None, problems) if problems else (model, [])


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


_ENTRIES: dict[str, type[BaseModel]] = {
    "batch": BatchEntry,
    "retry": RetryEntry,
    "sequence": SequenceEntry,
    "idle": IdleEntry,
}


MOVED = {"slo.deadline_ms": "limits.deadline_ms", "slo.refuse_early": "limits.refuse_early"}
"""Keys that are often written in the wrong mapping, with the right path."""


def _known(loc: tuple[str | int, ...]) -> Iterable[str]:
    """Return the keys allowed in the mapping at `loc`; a step's own keys are never refused here."""
    if not loc:
        return PipelineFile.model_fields
    if loc[0] != "steps":
        return {"inputs": InputEntry, "limits": LimitsEntry, "slo": SloEntry, "gpu": GpuEntry}[str(loc[0])].model_fields
    return (_ENTRIES.get(str(loc[2]), ConstantEntry)).model_fields


def _described(problem: Problem, document: Mapping[str, Any]) -> Problem:
    """Return the problem with regular expressions described in words, and the format's version with its value."""
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
    if problem.path.split(".")[2:3] == ["map"]:
        words[NAME_PATTERN] = "the name of an input of the step, which is wired to the list under `inputs`"
    expected = next((text for pattern, text in words.items() if pattern in problem.expected), problem.expected)
    if "cuda" in expected and "pattern" in expected:
        expected = f"{'auto, ' if 'auto' in expected else ''}cpu, cuda, or cuda:0 and so on"
    return dataclasses.replace(problem, expected=expected)
