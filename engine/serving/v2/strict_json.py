"""Strict JSON parser for untrusted input.

Refuses, in addition to invalid JSON: a duplicate key in one object, numbers that overflow a double, integers beyond 64
bits, halves of surrogate pairs, nesting deeper than 64, more than VALUES_MAX values, anything but UTF-8, and NaN and
Infinity except where the caller accepts them. Values are counted before parsing, so a small document never becomes many
objects.

msgspec parses. It accepts duplicate keys, long integers and deep nesting, so the parsed value is checked for them. A
refused document is parsed again by a slower parser, to find the reason.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from itertools import chain
from typing import Any, NoReturn

import msgspec
import numpy as np

from weftline.errors import InputError
from weftline.nodes.json_value import DEPTH_MAX

INT_MIN, INT_MAX = -(1 << 63), (1 << 64) - 1
"""Range of int64 and uint64 together."""

VALUES_MAX = 1 << 20
"""Most values of a document, nested ones included: a million small objects take some 0.5 s to build and to read."""

INLINE_BYTES = 64 << 10
"""Largest JSON that is parsed in the event loop: sending it to another process takes about as long."""

# Possessive, and the closing quote may be missing: a string that never ends costs one pass, not one from each quote.
_STRINGS = re.compile(rb'"(?:[^"\\]++|\\.)*+"?', re.DOTALL)
_BRACKETS = bytes.maketrans(b"{}", b"[]")
_NOT_BRACKETS = bytes(byte for byte in range(256) if byte not in b"[]{}")
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")
_DIGITS = bytes.maketrans(b"123456789", b"000000000")
_LONG = b"0" * 19  # integers of fewer digits are within 64 bits

_NOT_FINITE = re.compile(rb"NaN|Infinity")

_decode = msgspec.json.Decoder().decode


def loads(
    data: bytes | bytearray | memoryview | str,
    what: str = "json",
    values_max: int = VALUES_MAX,
    not_finite: bool = False,
) -> Any:
    """Parse a JSON document; InputError with the problem and its position, never with its text.

    what:       start of the message.
    values_max: most values, the outermost included.
    not_finite: accept NaN, Infinity and -Infinity, as Python's json module and Triton write them.
    """
    raw = _encoded(data, what)
    check_count((raw,), what, values_max)
    try:
        value = _decode(raw)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        if not_finite and _NOT_FINITE.search(raw):
            return _parsed_slowly(raw, what, not_finite)
        raise _reason(raw, what) from None
    if not _is_strict(value, raw):
        raise _reason(raw, what)
    return value


def check_count(documents: Sequence[bytes | memoryview], what: str, values_max: int) -> None:
    """Raise InputError if documents have more than `values_max` values in total.

    Counts separators, without parsing. Strings, which may contain commas, are removed if the count is too high.
    """
    if sum(map(_values, documents)) <= values_max:
        return
    count = sum(_values(_STRINGS.sub(b"", one)) for one in documents)
    if count > values_max:
        raise InputError(
            f"{what}: found {count} values, expected at most {values_max} (limits.elements_max); send tensors raw"
        )


def _values(document: bytes | memoryview) -> int:
    raw = bytes(document)
    return raw.count(b",") + raw.count(b"[") + raw.count(b"{") + 1


def _encoded(data: bytes | bytearray | memoryview | str, what: str) -> bytes:
    try:
        return data.encode() if isinstance(data, str) else bytes(data)
    except UnicodeEncodeError:
        raise InputError(f"{what}: found half of a surrogate pair, expected text that UTF-8 can hold") from None


def _is_strict(value: Any, raw: bytes) -> bool:
    """Check a parsed document for duplicate keys, long integers and deep nesting."""
    long = _LONG in raw.translate(_DIGITS)
    colons = raw.count(b":")
    if not long and not colons and raw.count(b"[") <= DEPTH_MAX:
        return True
    keys, level = 0, [value]
    for _ in range(DEPTH_MAX + 1):
        if long and any(type(one) is int and not INT_MIN <= one <= INT_MAX for one in level):
            return False
        if not set(map(type, level)) & _CONTAINERS:
            return keys == colons or keys == _STRINGS.sub(b"", raw).count(b":")
        lists = [one for one in level if type(one) is list]
        objects = [one for one in level if type(one) is dict]
        keys += sum(map(len, objects))
        level = list(chain(chain.from_iterable(lists), chain.from_iterable(map(dict.values, objects))))
    return False


_CONTAINERS = {list, dict}


def _reason(raw: bytes, what: str) -> InputError:
    """Return the error of a refused document."""
    try:
        _parsed_slowly(raw, what)
    except InputError as error:
        return error
    return InputError(f"{what}: not valid JSON")


def _parsed_slowly(raw: bytes, what: str, not_finite: bool = False) -> Any:
    """Parse a document with a parser that finds where it is wrong; InputError with the reason.

    not_finite: accept NaN, Infinity and -Infinity.
    """
    try:
        document = raw.decode()
    except UnicodeDecodeError as error:
        raise InputError(f"{what}: found a byte that is not UTF-8 at {error.start}, expected JSON in UTF-8") from None
    try:
        _check_depth(raw, what)
        constant = float if not_finite else _constant
        value = json.loads(
            document, object_pairs_hook=_object, parse_constant=constant, parse_int=_int, parse_float=_float
        )
        if _SURROGATE.search(raw):
            json.dumps(value, ensure_ascii=False).encode()
        return value
    except json.JSONDecodeError as error:
        raise InputError(f"{what}: not valid JSON at line {error.lineno}, column {error.colno}") from None
    except UnicodeEncodeError:
        raise InputError(f"{what}: found half of a surrogate pair, expected text that UTF-8 can hold") from None
    except InputError as error:
        text = str(error)
        raise InputError(text if text.startswith(what) else f"{what}: {text}") from None
    except (ValueError, RecursionError):
        raise InputError(f"{what}: not valid JSON") from None


def _check_depth(raw: bytes, what: str) -> None:
    """Raise InputError for brackets that are nested deeper than DEPTH_MAX, or do not match."""
    brackets = np.frombuffer(_STRINGS.sub(b"", raw).translate(_BRACKETS, _NOT_BRACKETS), np.uint8)
    depths = np.cumsum(np.where(brackets == ord("["), 1, -1), dtype=np.int32)
    if len(depths) and (depths.max() > DEPTH_MAX or depths.min() < 0 or depths[-1]):
        raise InputError(f"{what}: nested deeper than {DEPTH_MAX}, or brackets that do not match")


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
