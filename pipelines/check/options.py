"""Validation of a step's options into the node's Config.

The node's frozen dataclass is the only declaration: its annotations are the types, its defaults the defaults. Types are
strict: "5" is no number and 1 is not true. Values are read as JSON, so a list stands for a tuple and a mapping for a
nested dataclass.

pydantic checks options and reports problems. A worker only converts checked options (`to_config`): msgspec does that
for types that both read alike, which avoids importing pydantic, a quarter of a worker's start.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Mapping
from enum import Enum
from functools import cache
from pathlib import PurePath
from typing import TYPE_CHECKING, Any

import msgspec
import msgspec.inspect as types

from weftline.errors import InputError, PipelineError, Problem
from weftline.nodes.contract import Node

if TYPE_CHECKING:
    from pydantic import BaseModel

_ALIKE = (
    types.AnyType, types.NoneType, types.BoolType, types.IntType, types.FloatType, types.StrType, types.EnumType,
    types.LiteralType,
)  # fmt: skip
"""Types without inner types that msgspec and pydantic read alike from JSON; bytes differ, for example."""


def read_options(node: type[Node], options: Mapping[str, Any], path: str) -> tuple[Any, list[Problem]]:
    """Convert `options` to the node's Config, or return None and every problem under `path`, without file or line."""
    from pydantic import ValidationError
    from pydantic.errors import PydanticUserError

    from weftline.pipelines.check.problems import from_validation
    from weftline.pipelines.spec.schema import STEP_KEYS

    try:
        model = _model(node)
        _check_names(node, STEP_KEYS)
        written = json.dumps({"config": plain(options)})
    except (TypeError, PydanticUserError, NameError) as error:
        reason = str(error).partition("\n")[0]
        return None, [Problem(path, f"options of {node.__name__} cannot be checked: {reason}")]
    try:
        return model.model_validate_json(written).config, []  # type: ignore[attr-defined]
    except InputError as error:  # a config's own check, written 'option: what is wrong'
        option, _, found = str(error).partition(": ")
        return None, [Problem(f"{path}.{option}" if path else option, found)]
    except ValidationError as error:
        own = [*_known(model, ()), *STEP_KEYS]
        problems = from_validation(
            error, {"config": options}, "", lambda loc: own if len(loc) < 2 else _known(model, loc[1:])
        )
        return None, [_of_other_engine(_moved(one, path), node, path) for one in problems]


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


def plain(value: Any) -> Any:
    """Convert `value` to None, bool, int, float, str, list and dict only. TypeError: not possible."""
    if value is None or (isinstance(value, bool | int | float | str) and not isinstance(value, Enum)):
        return value
    if isinstance(value, Enum):
        return plain(value.value)
    if isinstance(value, PurePath):
        return value.as_posix()
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return to_options(value)
    if isinstance(value, Mapping):
        if not all(isinstance(key, str) for key in value):
            raise TypeError("a mapping with a key that is not text")
        return {key: plain(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [plain(one) for one in value]
    if isinstance(value, set | frozenset):
        return sorted(plain(one) for one in value)
    raise TypeError(f"a value of type {type(value).__name__}, which a pipeline file cannot contain")


def options_schema(node: type[Node]) -> dict[str, Any]:
    """Return the JSON Schema of the node's options, its nested definitions under `$defs`."""
    schema = _model(node).model_json_schema()
    target = schema["properties"]["config"]["$ref"].rpartition("/")[2]
    defs = schema.pop("$defs")
    own: dict[str, Any] = defs.pop(target)
    return {**own, "$defs": defs} if defs else own


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


@cache
def _model(node: type[Node]) -> type[BaseModel]:
    """Return a model with one field, the Config: the wrapper makes a plain dataclass strict."""
    from pydantic import ConfigDict, create_model

    if not dataclasses.is_dataclass(node.Config):
        raise TypeError(f"{node.__name__}.Config is no dataclass")
    strict = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, arbitrary_types_allowed=True)
    return create_model("Options", __config__=strict, config=(node.Config, ...))


def _check_names(node: type[Node], taken: Iterable[str]) -> None:
    for field in dataclasses.fields(node.Config):
        if field.name in taken:
            raise TypeError(
                f"{field.name} is a key of every step and cannot be an option; rename it in {node.__name__}"
            )


def _known(model: type[BaseModel], loc: tuple[str | int, ...]) -> Iterable[str]:
    """Return the keys allowed in the mapping at `loc` of the config, read from its JSON Schema."""
    schema = model.model_json_schema()
    defs = schema.get("$defs", {})
    found = [schema["properties"]["config"]]
    for part in loc:
        found = [inner for one in _flat(found, defs) for inner in _inside(one, part)]
    return [key for one in _flat(found, defs) for key in one.get("properties", {})]


def _flat(schemas: Iterable[Any], defs: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the schemas with references followed and alternatives spread out."""
    flat: list[dict[str, Any]] = []
    for one in schemas:
        if not isinstance(one, dict):
            continue
        if "$ref" in one:
            flat += _flat([defs[one["$ref"].rpartition("/")[2]]], defs)
        elif "anyOf" in one or "oneOf" in one or "allOf" in one:
            flat += _flat([*one.get("anyOf", ()), *one.get("oneOf", ()), *one.get("allOf", ())], defs)
        else:
            flat.append(one)
    return flat


def _inside(schema: Mapping[str, Any], part: str | int) -> list[Any]:
    if isinstance(part, int):
        prefix = schema.get("prefixItems", [])
        return [prefix[part] if part < len(prefix) else schema.get("items")]
    return [schema.get("properties", {}).get(part, schema.get("additionalProperties"))]


def _of_other_engine(problem: Problem, node: type[Node], path: str) -> Problem:
    """Explain an unknown key that is an option of another engine of the node."""
    from weftline.pipelines.check.problems import UNKNOWN_KEY

    name = problem.path.removeprefix(path).removeprefix(".")
    if name not in node.other_options or problem.found != UNKNOWN_KEY:
        return problem
    engine = node.other_options[name]
    found, fix = f"is an option of `{engine}` only", f"remove it, or set `{engine}`"
    return dataclasses.replace(problem, found=found, expected="", fix=fix)


def _moved(problem: Problem, path: str) -> Problem:
    inner = problem.path.removeprefix("config").removeprefix(".")
    return dataclasses.replace(problem, path=".".join(part for part in (path, inner) if part))
