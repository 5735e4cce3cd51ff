"""Strict reader of small JSON documents; keeps file names that are not valid Unicode."""

from __future__ import annotations

import json
from typing import Any, TypeVar

import msgspec

T = TypeVar("T")


class Unreadable(ValueError):
    """A document is torn, or holds something else; says what was found."""


def encode(value: Any) -> bytes:
    """Return a value of plain data or a msgspec struct as one line of JSON; a lone surrogate stands as its escape."""
    written = json.dumps(msgspec.to_builtins(value, str_keys=True), ensure_ascii=False, allow_nan=False)
    return written.encode("utf-8", "backslashreplace") + b"\n"


def decode(data: bytes, type: type[T]) -> T:
    """Return what `encode` wrote; Unreadable when it is not whole or not of that type."""
    try:
        return msgspec.convert(json.loads(data), type)
    except msgspec.ValidationError as error:
        raise Unreadable(str(error)) from None
    except (ValueError, RecursionError) as error:
        raise Unreadable("it is not whole" if data.strip() else "it is empty") from error
