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
        "silence_max_ms": {"ge": 1500, "le": 3_600_000},  # workers say that they live once a second
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
"""Bounds of the numbers in a file. Both ends catch slips: a negative wait, seconds for milliseconds."""


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
"""Made-up GPUs are for tests and trials; they are named where a pipeline is opened on a machine that has them."""

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
    """Takes what it names, of the very types it names, and nothing else."""

    model_config = STRICT


def _model_of(policy: Any, leave: Iterable[str] = (), **overrides: Any) -> type[BaseModel]:
    """Return a model with the fields, defaults and documentation of a dataclass, and the bounds above.

    leave: fields that no file has.
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
    config: ConfigDict = {**STRICT, "use_attribute_docstrings": False}  # no class body to look for: a quarter second
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
    """What a port reads, when that is always the same."""

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
