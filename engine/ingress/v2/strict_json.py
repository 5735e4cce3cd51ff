"""JSON from strangers: what the standard says and no more, or an InputError.

Refused beside what is not JSON at all: a key that occurs twice in one object, NaN and Infinity, numbers that overflow a
double, integers beyond 64 bits, halves of surrogate pairs, nesting deeper than 64, and anything but UTF-8. Depth is
found before parsing, so no parser recurses on a stranger's word. The usual document costs one pass of a few regular
expressions and json's own C scanner; only documents that look as if they held something of the above are read slowly.
"""

from __future__ import annotations

import json
import math
import re
from typing import Any, NoReturn

from weftline.errors import InputError
from weftline.nodes.values import JSON_DEPTH_MAX

INT_MIN, INT_MAX = -(1 << 63), (1 << 64) - 1
"""Integers that an int64 or a uint64 holds."""

# Possessive, and the closing quote may be missing: a string that never ends costs one pass, not one from each quote.
_STRINGS = re.compile(rb'"(?:[^"\\]++|\\.)*+"?', re.DOTALL)
_BRACKETS = bytes.maketrans(b"{}", b"[]")
_NOT_BRACKETS = bytes(byte for byte in range(256) if byte not in b"[]{}")
_LARGE = re.compile(rb"[0-9]{19}|[eE]\+?[0-9]{3}")  # anything less is within 64 bits, or a finite double
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")


def loads(data: bytes | bytearray | memoryview | str, what: str = "json") -> Any:
    """Return the value of a JSON document; InputError says what is wrong and where, never what stands there.

    what: how the message begins.
    """
    raw, text = _both(data, what)
    if raw.count(b"[") + raw.count(b"{") > JSON_DEPTH_MAX:
        _check_depth(raw, what)
    large = _LARGE.search(raw) is not None
    try:
        value = json.loads(
            text,
            object_pairs_hook=_object,
            parse_constant=_constant,
            parse_int=_int if large else None,
            parse_float=_float if large else None,
        )
        if _SURROGATE.search(raw):
            json.dumps(value, ensure_ascii=False).encode()
    except json.JSONDecodeError as error:
        raise InputError(f"{what}: not valid JSON at line {error.lineno}, column {error.colno}") from None
    except UnicodeEncodeError:
        raise InputError(f"{what}: found half of a surrogate pair, expected text that UTF-8 can hold") from None
    except InputError as error:
        raise InputError(f"{what}: {error}") from None
    except (ValueError, RecursionError):
        raise InputError(f"{what}: not valid JSON") from None
    return value


def _both(data: bytes | bytearray | memoryview | str, what: str) -> tuple[bytes, str]:
    """Return a document as bytes and as text."""
    try:
        if isinstance(data, str):
            return data.encode(), data
        raw = bytes(data)
        return raw, raw.decode()
    except UnicodeDecodeError as error:
        raise InputError(f"{what}: found a byte that is not UTF-8 at {error.start}, expected JSON in UTF-8") from None
    except UnicodeEncodeError:
        raise InputError(f"{what}: found half of a surrogate pair, expected text that UTF-8 can hold") from None


def _check_depth(raw: bytes, what: str) -> None:
    """Take the innermost pairs of brackets away, level by level: what is left after the deepest allowed is too deep."""
    left = _STRINGS.sub(b"", raw).translate(_BRACKETS, _NOT_BRACKETS)
    for _ in range(JSON_DEPTH_MAX):
        before = len(left)
        left = left.replace(b"[]", b"")
        if len(left) == before:
            break
    if left:
        raise InputError(f"{what}: nested deeper than {JSON_DEPTH_MAX}, or brackets that do not match")


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) != len(pairs):
        raise InputError("found a key twice in one object, expected each once")
    return value


def _constant(name: str) -> NoReturn:
    raise InputError(f"found {name}, expected a finite number")


def _int(digits: str) -> int:
    if len(digits) > 20 or not INT_MIN <= (value := int(digits)) <= INT_MAX:
        raise InputError("found an integer beyond 64 bits")
    return value


def _float(digits: str) -> float:
    value = float(digits)
    if not math.isfinite(value):
        raise InputError("found a number that no double holds")
    return value
