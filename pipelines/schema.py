"""What a pipeline file may say, as pydantic models: the one home of its keys, their types and their bounds.

`validate` is used for files and, through `written.to_document`, for pipelines built in Python, so both meet the same
rules. Defaults and descriptions of batch, limits and slo come from the values in `policy`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Literal, get_type_hints

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, create_model

from weftline.errors import Problem
from weftline.nodes.ports import PortType
from weftline.pipelines.field_docs import field_docs
from weftline.pipelines.graph import Input
from weftline.pipelines.policy import BatchPolicy, Limits, Slo
from weftline.pipelines.problems import from_validation

NAME_CHARS_MAX = 64
"""Longest name of an input, step or output, in characters."""

NAME_PATTERN = r"^[A-Za-z_][A-Za-z0-9_-]*$"
WIRE_PATTERN = r"^[A-Za-z_][A-Za-z0-9_-]*(\.[A-Za-z_][A-Za-z0-9_-]*)?$"
NODE_CHARS_MAX = 512
"""Longest reference to a node, in characters."""

BOUNDS: dict[type, dict[str, dict[str, float]]] = {
    BatchPolicy: {"items_max": {"ge": 1, "le": 4096}, "wait_max_ms": {"ge": 0, "le": 60_000}},
    Limits: {
        "requests_max": {"ge": 1, "le": 1_000_000},
        "request_bytes_max": {"ge": 1, "le": 1 << 40},
        "pixels_max": {"ge": 1, "le": 1 << 32},
        "seconds_max": {"gt": 0, "le": 86_400},
        "arena_bytes": {"ge": 1 << 16, "le": 1 << 40},
    },
    Slo: {"latency_p99_ms": {"gt": 0, "le": 86_400_000}},
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


Name = Annotated[str, Field(pattern=NAME_PATTERN, max_length=NAME_CHARS_MAX)]
WireText = Annotated[str, Field(pattern=WIRE_PATTERN, max_length=2 * NAME_CHARS_MAX + 1)]
TypeText = Annotated[str, Field(max_length=200), AfterValidator(_port_type)]
Device = Annotated[str, Field(pattern=r"^(auto|cpu|cuda(:[0-9]{1,3})?)$")]

_STRICT = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False, use_attribute_docstrings=True)


class _Strict(BaseModel):
    model_config = _STRICT


def _model_of(policy: Any, **overrides: Any) -> type[BaseModel]:
    """Return a model with the fields, defaults and documentation of a dataclass, and the bounds above."""
    hints, about = get_type_hints(policy), field_docs(policy)
    fields: dict[str, Any] = {}
    for one in dataclasses.fields(policy):
        bounds: dict[str, Any] = dict(BOUNDS[policy].get(one.name, {}))
        described = Field(description=about.get(one.name), **bounds)
        default = ... if one.default is dataclasses.MISSING else one.default
        fields[one.name] = (Annotated[overrides.get(one.name, hints[one.name]), described], default)
    fields.pop("name", None)  # the name of an input is its key
    doc = (policy.__doc__ or "").partition("\n")[0]
    return create_model(policy.__name__, __config__=_STRICT, __doc__=doc, __module__=__name__, **fields)


InputEntry: type[BaseModel] = _model_of(Input, type=TypeText)
BatchEntry: type[BaseModel] = _model_of(BatchPolicy)
LimitsEntry: type[BaseModel] = _model_of(Limits)
SloEntry: type[BaseModel] = _model_of(Slo)


def _long_form(value: Any) -> Any:
    return {"type": value} if isinstance(value, str) else value


AnyInput = Annotated[InputEntry, BeforeValidator(_long_form, json_schema_input_type=TypeText | InputEntry)]  # type: ignore[valid-type]


class StepEntry(_Strict):
    """One step: the node it runs, what its inputs read, how it is grouped and placed, and the node's own options."""

    model_config = ConfigDict(extra="allow")

    node: Annotated[str, Field(min_length=1, max_length=NODE_CHARS_MAX)]
    """What the step runs: a name of the catalog, `package.module:Class`, or `file.py:Class`."""

    inputs: dict[Name, WireText] = Field(default_factory=dict)
    """Where each input port reads: `step.port`, or the name of a pipeline input."""

    batch: BatchEntry | None = None  # type: ignore[valid-type]
    """How items are grouped; left out, the node's own default."""

    worker: Name | None = None
    """Steps that name the same worker share its process; left out, each instance has a process of its own."""

    instances: Annotated[int, Field(ge=1, le=64)] = 1
    """Loaded copies of the node."""

    device: Device = "auto"
    """`auto`, `cpu`, `cuda`, or `cuda:1` and so on; `auto` puts heavy nodes on a GPU when there is one."""

    run_max_ms: Annotated[float, Field(gt=0, le=86_400_000)] | None = None
    """Longest one call of the node may take before its worker is killed; left out, 10 minutes. For a streaming step,
    such as `llm`: its longest silence while it has work."""


class PipelineFile(_Strict):
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
    """What the pipeline aims for."""


STEP_KEYS = tuple(StepEntry.model_fields)
"""Keys of a step that are the format's own; every other key is an option of its node."""


def validate(document: Any) -> tuple[PipelineFile | None, list[Problem]]:
    """Return the document as a model, or None and every problem in it, without file or line."""
    if not isinstance(document, Mapping):
        found = "an empty file" if document is None else "a list" if isinstance(document, list) else "a single value"
        return None, [Problem("", found, "a mapping that starts with `weftline: 1`")]
    try:
        return PipelineFile.model_validate(document), []
    except ValidationError as error:
        return None, [_spoken(one) for one in from_validation(error, document, "", _known)]


def _known(loc: tuple[str | int, ...]) -> Iterable[str]:
    """Return the keys allowed in the mapping at `loc`; a step's own keys are never refused here."""
    model = {"inputs": InputEntry, "limits": LimitsEntry, "slo": SloEntry, "steps": BatchEntry}
    return (model[str(loc[0])] if loc else PipelineFile).model_fields


def _spoken(problem: Problem) -> Problem:
    """Return the problem with regular expressions put into words."""
    words = {
        NAME_PATTERN: "letters, digits, _ and -, not starting with a digit",
        WIRE_PATTERN: "step.port, or an input's name",
    }
    expected = next((text for pattern, text in words.items() if pattern in problem.expected), problem.expected)
    if "cuda" in expected and "pattern" in expected:
        expected = "auto, cpu, cuda, or cuda:0 and so on"
    return dataclasses.replace(problem, expected=expected)
