"""Control nodes: `first`, `switch` and `passes`, evaluated by the scheduler.

They run no code and need no process: the scheduler evaluates them and passes the selected value on without a copy.
Their ports follow from the types of the wires.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from weftline.node import ConfigError, Node, Port, Ports, PortType, StepContext, list_of

BY, DEFAULT, VALUE = "by", "default", "value"
"""Ports of `switch`: the deciding input and the default; and the output of `first` and `switch`."""

JSON_LIKE = ("json", "text", "detections")
"""Kinds whose common type is json."""

NUMBERS = (
    *("bool", "uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64"),
    *("float16", "float32", "float64"),
)
"""Dtypes of one-element tensors that a switch can decide by."""

_ANY = PortType("any")


class Control(Node):
    """A node that the scheduler evaluates: it has no `run`, and no worker opens it.

    control: name of the decision.
    """

    control: ClassVar[str]


class First(Control):
    """Passes on the first of its inputs that is present, in written order; absent when none is."""

    control = "first"

    @classmethod
    def ports(cls, config: Any, step: StepContext) -> Ports:
        if not step.wired:
            raise ConfigError("inputs", "no inputs to choose from", "at least one, under any name")
        type = common_type((name, step.types.get(name)) for name in step.wired)
        return Ports(tuple(Port(name, type, optional=True) for name in step.wired), (Port(VALUE, type),))


@dataclass(frozen=True, slots=True)
class SwitchConfig:
    """Options of `switch`.

    cases: the value that each input stands for, by its name: text, a number, true or false. An input that is not named
           here stands for its own name, as text.
    """

    cases: Mapping[str, Any] = field(default_factory=dict)


class Switch(Control):
    """Passes on the input whose case equals `by`, else `default`; absent without one."""

    control = "switch"
    Config: ClassVar[type[Any]] = SwitchConfig

    @classmethod
    def ports(cls, config: SwitchConfig, step: StepContext) -> Ports:
        names = [name for name in step.wired if name not in (BY, DEFAULT)]
        for name in config.cases:
            if name not in names:
                found = f"{name} is the value that fits when no case does" if name == DEFAULT else f"no input {name}"
                raise ConfigError("cases", found, "inputs of this step, each with the value it stands for")
        if not names:
            raise ConfigError("inputs", "no case to choose", "beside `by` one input for each case, or more")
        _check_by(step.types.get(BY), cases_of(names, config))
        chosen = [*names, *([DEFAULT] if DEFAULT in step.wired else [])]
        type = common_type((name, step.types.get(name)) for name in chosen)
        by = Port(BY, step.types.get(BY, _ANY), about="what it decides by")
        return Ports((by, *(Port(name, type, optional=True) for name in chosen)), (Port(VALUE, type),))


class Passes(Control):
    """Passes its inputs on as outputs of the same names."""

    control = "passes"

    @classmethod
    def ports(cls, config: Any, step: StepContext) -> Ports:
        ports = tuple(Port(name, step.types.get(name, _ANY)) for name in step.wired)
        return Ports(ports, ports)


def cases_of(names: Iterable[str], config: SwitchConfig) -> dict[str, Any]:
    """Return the case value of each of these inputs of a switch."""
    return {name: config.cases.get(name, name) for name in names}


def decidable(type: PortType) -> bool:
    """Return True for types a switch can decide by: text, json, or a tensor of one element."""
    return type.kind in ("text", "json", "any") or is_number(type)


def is_number(type: PortType) -> bool:
    """Return True for tensor types of one element and a readable dtype."""
    return type.kind == "tensor" and type.dtype in NUMBERS and type.dims is not None and {*type.dims} <= {1}


def _check_by(by: PortType | None, cases: Mapping[str, Any]) -> None:
    """Refuse types that cannot decide, and cases that cannot match."""
    if by is not None and not decidable(by):
        raise ConfigError(f"inputs.{BY}", f"nothing can be decided by {by}", "text, json, or a tensor of one element")
    seen: dict[tuple[str, Any], str] = {}
    for name, value in cases.items():
        if not isinstance(value, str | bool | int | float):
            raise ConfigError("cases", f"{name} stands for something else", "text, a number, true or false")
        kind = "text" if isinstance(value, str) else "true or false" if isinstance(value, bool) else "a number"
        wanted = _kind_of(by)
        if wanted and kind != wanted:
            written = f"`cases: {{{name}: <{wanted}>}}`"
            raise ConfigError("cases", f"{name} stands for {kind}, and `by` is {wanted}", fix=f"write {written}")
        if (kind, value) in seen:
            raise ConfigError("cases", f"{seen[kind, value]} and {name} stand for the same", "a value of its own each")
        seen[kind, value] = name


def _kind_of(by: PortType | None) -> str:
    """Return the type a switch decides by; '' when it is known per request only."""
    if by is None or by.kind in ("json", "any"):
        return ""
    return "text" if by.kind == "text" else "true or false" if by.dtype == "bool" else "a number"


def common_type(wired: Iterable[tuple[str, PortType | None]]) -> PortType:
    """Return the type that fits each of these; None is a type not known yet. ConfigError names two that differ."""
    known = [(name, type) for name, type in wired if type is not None]
    found = known[0][1] if known else _ANY
    for name, type in known[1:]:
        both = _common(found, type)
        if both is None:
            first = known[0]
            raise ConfigError(
                "inputs",
                f"its inputs have different types: {first[0]} gives {first[1]}, {name} gives {type}",
                fix="wire values of one type to it, or turn them into one before",
            )
        found = both
    return found


def _common(one: PortType, other: PortType) -> PortType | None:
    if one == other:
        return one
    if "any" in (one.kind, other.kind):
        return _ANY
    if is_json_like(one) and is_json_like(other):
        return PortType("json")
    if one.item is not None and other.item is not None:
        item = _common(one.item, other.item)
        return list_of(item) if item else None
    if one.kind != "tensor" or other.kind != "tensor":
        return None
    if None not in (one.dtype, other.dtype) and one.dtype != other.dtype:
        return None
    dtype = one.dtype if one.dtype == other.dtype else None
    if one.dims is None or other.dims is None:
        return PortType("tensor", dtype)
    if len(one.dims) != len(other.dims):
        return None
    dims = tuple(a if a == b else "?" for a, b in zip(one.dims, other.dims, strict=True))
    return PortType("tensor", dtype, dims)


def is_json_like(type: PortType) -> bool:
    """Return True for types accepted as json: text, detections, and lists of text or json."""
    if type.kind == "list" and type.item is not None:
        return type.item.kind != "detections" and is_json_like(type.item)
    return type.kind in JSON_LIKE
