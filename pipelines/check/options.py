"""Validation of a step's options into the node's Config.

The node's frozen dataclass is the only declaration: its annotations are the types, its defaults the defaults. Types are
strict: "5" is no number and 1 is not true. Values are read as JSON, so a list stands for a tuple and a mapping for a
nested dataclass.

pydantic checks options and reports problems. A worker only converts checked options (`to_config`): msgspec does that
for types that both read alike, which avoids importing pydantic, a quarter of a worker's start.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from functools import cache
from typing import Any

import msgspec
import msgspec.inspect as types

from weftline.errors import PipelineError, Problem
from weftline.fields import LOAD, FieldClass, classes, fields_of_part, plain
from weftline.nodes.contract import Node

_ALIKE = (
    types.AnyType, types.NoneType, types.BoolType, types.IntType, types.FloatType, types.StrType, types.EnumType,
    types.LiteralType,
)  # fmt: skip
"""Types without inner types that msgspec and pydantic read alike from JSON; bytes differ, for example."""


def read_options(node: type[Node], options: Mapping[str, Any], path: str) -> tuple[Any, list[Problem]]:
    """Convert `options` to the node's Config, or return None and every problem under `path`, without file or line."""
    from pydantic.errors import PydanticUserError

    from weftline.pipelines.check.validation import read
    from weftline.pipelines.spec.schema import STEP_KEYS

    try:
        _check_config(node, STEP_KEYS)
        config, problems = read(node.Config, options, path, STEP_KEYS)
    except (TypeError, PydanticUserError, NameError) as error:
        reason = str(error).partition("\n")[0]
        return None, [Problem(path, f"options of {node.__name__} cannot be checked: {reason}")]
    return config, [_of_other_engine(one, node, path) for one in problems]


def to_config(node: type[Node], options: Mapping[str, Any]) -> Any:
    """Convert `options` to the node's Config. PipelineError lists their problems."""
    if options.keys() <= _fields_alike(node):
        try:
            return msgspec.convert(plain(options), node.Config)
        except Exception:  # `read_options` reports the problem
            pass
    config, problems = read_options(node, options, "")
    if problems:
        raise PipelineError(problems)
    return config


def to_options(config: Any) -> dict[str, Any]:
    """Return a Config as plain values, every field included: the input of `to_config`."""
    return {field.name: plain(getattr(config, field.name)) for field in dataclasses.fields(config)}


def option_classes(node: type[Node]) -> dict[str, FieldClass]:
    """Return the class of each option; one without a marker is LOAD, since it may change what is loaded."""
    return {name: found or LOAD for name, found in classes(node.Config).items()}


def load_options(node: type[Node], config: Any) -> dict[str, Any]:
    """Return the options that are part of what a worker loads, as plain values."""
    return _of_part("load", node, config)


def request_options(node: type[Node], config: Any) -> dict[str, Any]:
    """Return the options that apply to single items, as plain values; the others are `load_options`."""
    return _of_part("request", node, config)


def _of_part(part: str, node: type[Node], config: Any) -> dict[str, Any]:
    return {name: plain(getattr(config, name)) for name in fields_of_part(node.Config, part)}


@cache
def _fields_alike(node: type[Node]) -> frozenset[str]:
    """Return the fields of a Config that msgspec and pydantic convert alike; none if one differs."""
    config = node.Config
    try:
        fields = types.type_info(config).fields if dataclasses.is_dataclass(config) else ()  # type: ignore[attr-defined]
    except (TypeError, NameError):
        return frozenset()
    return frozenset(one.name for one in fields) if all(_is_alike(one.type) for one in fields) else frozenset()


def _is_alike(type: types.Type) -> bool:
    if isinstance(type, types.UnionType):
        return all(map(_is_alike, type.types))
    if isinstance(type, types.VarTupleType | types.ListType):
        return _is_alike(type.item_type)
    if isinstance(type, types.DictType):
        return isinstance(type.key_type, types.StrType) and _is_alike(type.value_type)
    return isinstance(type, _ALIKE)


def _check_config(node: type[Node], taken: Iterable[str]) -> None:
    if not dataclasses.is_dataclass(node.Config):
        raise TypeError(f"{node.__name__}.Config is no dataclass")
    for field in dataclasses.fields(node.Config):
        if field.name in taken:
            raise TypeError(
                f"{field.name} is a key of every step and cannot be an option; rename it in {node.__name__}"
            )


def _of_other_engine(problem: Problem, node: type[Node], path: str) -> Problem:
    """Explain an unknown key that is an option of another engine of the node."""
    from weftline.pipelines.check.problems import UNKNOWN_KEY

    name = problem.path.removeprefix(path).removeprefix(".")
    if name not in node.other_options or problem.found != UNKNOWN_KEY:
        return problem
    engine = node.other_options[name]
    found, fix = f"is an option of `{engine}` only", f"remove it, or set `{engine}`"
    return dataclasses.replace(problem, found=found, expected="", fix=fix)
