"""Pydantic models for the parts of a pipeline file: names, wires, types, policies and bounds.

Defaults and descriptions of batch, limits and the like come from the values in `policy`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Literal, get_type_hints

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    create_model,
    model_validator,
)

from weftline.nodes.ports import PortType
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
