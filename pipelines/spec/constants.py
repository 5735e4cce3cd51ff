"""Checks of constants in a pipeline: input defaults, constant wires and constant fallbacks.

A constant is a value that a pipeline file can contain, small enough to be sent inside a message, for a port type that
can be written as JSON. An invalid constant raises ConfigError, which becomes a problem at its place in the file.
"""

from __future__ import annotations

import json
from typing import Any

from weftline.errors import InputError
from weftline.nodes.contract import ConfigError
from weftline.nodes.media import to_value
from weftline.nodes.ports import PortType
from weftline.shm.block import INLINE_BYTES_MAX

CONSTANT_BYTES_MAX = INLINE_BYTES_MAX
"""Largest constant, in bytes of its JSON text; it is sent inside messages."""

_NOT_WRITTEN = ("image", "audio", "bytes", "detections")
"""Kinds whose values cannot be written in a file."""


def type_of(value: Any) -> str:
    """Return the type of a constant whose port is not known: `text` or `json`."""
    return "text" if isinstance(value, str) else "json"


def check_constant(value: Any, option: str = "") -> Any:
    """Return `value`. ConfigError about `option`: not a JSON value, or too large."""
    try:
        size_bytes = len(json.dumps(value, allow_nan=False, ensure_ascii=False).encode())
    except (TypeError, ValueError, RecursionError):
        raise ConfigError(
            option, "not a JSON value", "text, a finite number, true, false, null, a list or a mapping"
        ) from None
    if size_bytes > CONSTANT_BYTES_MAX:
        found = f"a value of {size_bytes} bytes as json"
        raise ConfigError(option, found, f"at most {CONSTANT_BYTES_MAX} bytes", "make it an input of the pipeline")
    return value


def check_default(type: str, value: Any) -> None:
    """Raise ConfigError about `default` when `value` cannot be the default of an input of this type."""
    check_constant(value, "default")
    parsed = PortType.parse(type)
    if not can_be_written(parsed):
        fix = "remove it and write `optional: true`; the input is then absent when a request leaves it out"
        raise ConfigError("default", f"a default of type {type}, which a file cannot contain", fix=fix)
    try:
        to_value(parsed, value)
    except InputError as error:
        raise ConfigError("default", str(error)) from None


def can_be_written(type: PortType) -> bool:
    """Return True when a file can contain values of this type."""
    while type.item is not None:
        type = type.item
    return type.kind not in _NOT_WRITTEN


def misfit(type: PortType, value: Any) -> str:
    """Return why a constant does not fit a port of this type; '' if it fits."""
    if not can_be_written(type):
        return f"a constant, and a file cannot contain values of type {type}"
    try:
        to_value(type, value)
    except InputError as error:
        return str(error)
    return ""
