"""Strict JSON parser: the one set of rules for JSON from files, requests and other programs.

Refused, in addition to invalid JSON: a key twice in one object, NaN and Infinity, numbers that overflow a double,
integers beyond 64 bits, halves of surrogate pairs, nesting deeper than DEPTH_MAX, anything but UTF-8, a byte order mark
and text behind the document. `Rules` has the exceptions, by name. Errors have the line and the column, or the path
inside the document, and never a value. Sizes in bytes are limited where the bytes are read.

msgspec parses. It accepts duplicate keys, long integers and deep nesting, so the parsed value is checked for them. A
refused document is parsed again by a slower parser, to find the reason.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import msgspec
import numpy as np

from weftline.errors import InputError
from weftline.nodes.json_value import DEPTH_MAX, LONG, SURROGATE, SURROGATE_FIX, TOO_DEEP, NotJson, unencodable

INT_MIN, INT_MAX = -(1 << 63), (1 << 64) - 1
"""Range of int64 and uint64 together."""

VALUES_MAX = 1 << 20
"""Most values of a document, nested ones included: a million small objects take some 0.5 s to build and to read."""

INLINE_BYTES = 64 << 10
"""Largest JSON that a server parses or writes in its event loop: sending it to another process takes about as long."""


@dataclass(frozen=True, slots=True)
class Rules:
    """Exceptions from strict JSON.

    not_finite:         NaN, Infinity and -Infinity, as Python's json module and Triton write them.
    large_integers:     integers beyond 64 bits.
    control_characters: line ends and other control characters inside a text, unescaped.
    """

    not_finite: bool = False
    large_integers: bool = False
    control_characters: bool = False


STRICT = Rules()
"""Documents of Weftline: bodies of requests, profiles, lock files, job records."""

VALUES = Rules(not_finite=True)
"""Values of ports, in requests, in arguments of the command line and in answers of servers."""

FILES = Rules(not_finite=True, large_integers=True)
"""Files of other programs, such as rows of JSONL and config.json, in which transformers writes 1e30 as an integer."""

ANSWERS = Rules(large_integers=True, control_characters=True)
"""Tool calls that a language model wrote."""

# Possessive, and the closing quote may be missing: a string that never ends costs one pass, not one from each quote.
_STRINGS = re.compile(rb'"(?:[^"\\]++|\\.)*+"?', re.DOTALL)
_BRACKETS = bytes.maketrans(b"{}", b"[]")
_NOT_BRACKETS = bytes(byte for byte in range(256) if byte not in b"[]{}")
_SURROGATES = re.compile(rb"\\u[dD][89a-fA-F]")
_DIGITS = bytes.maketrans(b"123456789", b"000000000")
_LONG = b"0" * 19  # integers of fewer digits are within 64 bits
_LARGE = (b"e000", b"E000", b"e+000", b"E+000", b"0" * 309)  # other numbers are within a double

_decode = msgspec.json.Decoder().decode
_members = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_lenient = json.JSONDecoder()
_OPEN, _COLON, _COMMA = (re.compile(rf"[ \t\r\n]*{sign}[ \t\r\n]*") for sign in (r"\{", ":", ",?"))


def parse(data: bytes | bytearray | memoryview | str, rules: Rules = STRICT) -> Any:
    """Parse a JSON document; NotJson with the problem, and its line and column or its path."""
    raw = _encoded(data)
    try:
        value = _decode(raw)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return _parsed_slowly(raw, rules)
    return value if _is_strict(value, raw, rules) else _parsed_slowly(raw, rules)


def parse_all(documents: Sequence[str | None], rules: Rules = STRICT) -> list[Any] | None:
    """Parse many small documents together, None as null; return None if `parse` may refuse one of them."""
    if any(one is not None and one.count("[") + one.count("{") > DEPTH_MAX for one in documents):
        return None
    try:
        raw = ("[" + ",".join(["null" if one is None else one for one in documents]) + "]").encode()
        value: list[Any] = _decode(raw)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return None
    return value if len(value) == len(documents) and _is_strict(value, raw, rules, deep=False) else None


def loads(
    data: bytes | bytearray | memoryview | str, what: str = "json", values_max: int = VALUES_MAX, rules: Rules = STRICT
) -> Any:
    """Parse JSON of a request; InputError that starts with `what`.

    values_max: most values, the outermost included. They are counted before parsing, so that a small document never
                becomes many objects.
    """
    try:
        raw = _encoded(data)
        check_count((raw,), what, values_max)
        return parse(raw, rules)
    except NotJson as error:
        raise InputError(error.at(what)) from None


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


def members(line: bytes, fast: bool = True) -> dict[str, Any]:
    """Return the JSON text of each member of an object, as bytes or msgspec.Raw; NotJson if it is none.

    The values are checked for their syntax only: `parse` each with FILES when it is used.

    fast: `line` is UTF-8, and `repeats_key` finds members of the same name; otherwise both are checked here.
    """
    try:
        if fast:
            return _members(line)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        pass  # NaN and halves of surrogate pairs pass below, everything else gets its reason there
    found = parse_syntax(line)
    if not isinstance(found, dict):
        raise NotJson(f"expected an object, found {kind_of(found)}")
    return _spans(line.decode())


def repeats_key(data: bytes, objects: Sequence[dict[str, Any]]) -> bool:
    """Return True if one of the objects in `data`, as `members` returns them, may have members of the same name.

    False is certain.
    """
    keys, colons = sum(map(len, objects)), data.count(b":")
    if keys == colons:
        return False
    colons -= b"".join(chain.from_iterable(map(dict.values, objects))).count(b":")
    return keys != colons and keys + sum(name.count(":") for one in objects for name in one) != colons


def parse_syntax(data: bytes) -> Any:
    """Parse JSON that is checked for its syntax only, NaN and Infinity included; NotJson if it is none."""
    return _parsed_slowly(data, FILES, syntax_only=True)


def kind_of(value: Any) -> str:
    """Return the kind of a JSON value for messages: 'a whole number'."""
    return "null" if value is None else _KINDS.get(value.__class__, "something else")


_KINDS: Mapping[type, str] = {
    str: "text", bool: "true or false", int: "a whole number", float: "a number", list: "a list", dict: "an object",
}  # fmt: skip


def _spans(line: str) -> dict[str, bytes]:
    """Return the text of each member of a valid object."""
    cells: dict[str, bytes] = {}
    at = _skipped(_OPEN, line, 0)
    while line[at] != "}":
        name, end = _lenient.raw_decode(line, at)
        start = _skipped(_COLON, line, end)
        _, end = _lenient.raw_decode(line, start)
        if name in cells:
            raise NotJson(_twice(name))
        cells[name] = line[start:end].encode()
        at = _skipped(_COMMA, line, end)
    return cells


def _skipped(pattern: re.Pattern[str], text: str, at: int) -> int:
    found = pattern.match(text, at)
    return found.end() if found else at


def _encoded(data: bytes | bytearray | memoryview | str) -> bytes:
    try:
        return data.encode() if isinstance(data, str) else bytes(data)
    except UnicodeEncodeError:
        raise NotJson(SURROGATE, SURROGATE_FIX) from None


def _values(document: bytes | memoryview) -> int:
    raw = bytes(document)
    return raw.count(b",") + raw.count(b"[") + raw.count(b"{") + 1


def _is_strict(value: Any, raw: bytes, rules: Rules, deep: bool = True) -> bool:
    """Check a parsed document for duplicate keys, long integers and deep nesting.

    deep: False if the document is known not to be deep.
    """
    long = not rules.large_integers and _LONG in raw.translate(_DIGITS)
    if not long and b"{" not in raw and not (deep and _may_be_deep(raw)):
        return True
    keys, level = 0, [value]
    for _ in range(DEPTH_MAX + 1):
        if long and any(type(one) is int and not INT_MIN <= one <= INT_MAX for one in level):
            return False
        if not set(map(type, level)) & _CONTAINERS:
            colons = raw.count(b":")
            return keys == colons or keys == _pairs_max(raw) or keys == _STRINGS.sub(b"", raw).count(b":")
        lists = [one for one in level if type(one) is list]
        dicts = [one for one in level if type(one) is dict]
        keys += sum(map(len, dicts))
        level = list(chain(chain.from_iterable(lists), chain.from_iterable(map(dict.values, dicts))))
    return False


_CONTAINERS = {list, dict}


def _pairs_max(raw: bytes) -> int:
    """Return an upper bound of the key-value pairs of a document; exact unless texts contain quotes beside colons."""
    return raw.count(b'":') + sum(raw.count(space + b":") for space in (b" ", b"\t", b"\r", b"\n") if space in raw)


def _may_be_deep(raw: bytes) -> bool:
    """Return True if brackets may be nested deeper than DEPTH_MAX, or may not match. Those inside texts count too."""
    if raw.count(b"[") + raw.count(b"{") <= DEPTH_MAX:
        return False
    brackets = np.frombuffer(raw.translate(_BRACKETS, _NOT_BRACKETS), np.uint8)
    depths = np.cumsum(np.where(brackets == ord("["), 1, -1), dtype=np.int32)
    return bool(depths.max() > DEPTH_MAX or depths.min() < 0 or depths[-1])


def _parsed_slowly(raw: bytes, rules: Rules, syntax_only: bool = False) -> Any:
    """Parse a document with a parser that finds where it is wrong; NotJson with the reason."""
    wrong = list[NotJson]()  # each stands in the value in place of the part that the rules refuse

    def refused(found: str, fix: str = "") -> NotJson:
        wrong.append(NotJson(found, fix))
        return wrong[-1]

    def object_of(pairs: list[tuple[str, Any]]) -> Any:
        value = dict(pairs)
        if len(value) == len(pairs):
            return value
        ((name, _),) = Counter(name for name, _ in pairs).most_common(1)
        return refused(_twice(name))

    def constant(name: str) -> Any:
        return float(name) if rules.not_finite else refused(f"found {name}, expected a finite number")

    def integer(digits: str) -> Any:
        if len(digits) > 20 or not INT_MIN <= (value := int(digits)) <= INT_MAX:
            return refused(LONG, "write it as text")
        return value

    def number(digits: str) -> Any:
        value = float(digits)
        return value if math.isfinite(value) else refused("found a number that no double holds", "write it as text")

    hooks: dict[str, Any] = {"parse_constant": constant, "strict": not rules.control_characters}
    if not syntax_only:
        hooks["object_pairs_hook"] = object_of
        zeros = raw.translate(_DIGITS)
        hooks["parse_float"] = number if any(one in zeros for one in _LARGE) else None
        hooks["parse_int"] = integer if not rules.large_integers and _LONG in zeros else None
    try:
        value = json.loads(raw.decode(), **hooks)
    except UnicodeDecodeError as error:
        line = 1 + raw.count(b"\n", 0, error.start)
        raise NotJson(f"text that is not UTF-8 (byte {error.start + 1})", line=line) from None
    except json.JSONDecodeError as error:
        at = f"line {error.lineno}, column {error.colno}" if b"\n" in raw else f"character {error.colno}"
        raise NotJson(f"not valid JSON at {at}: {error.msg}", line=error.lineno) from None
    except RecursionError:
        raise NotJson(TOO_DEEP) from None
    except ValueError:
        raise NotJson("found an integer of too many digits", "write it as text") from None
    doubtful = not syntax_only and (wrong or _SURROGATES.search(raw) or _may_be_deep(raw))
    if doubtful and (found := unencodable(value, rules.large_integers)) is not None:
        raise found
    return value


def _twice(name: str) -> str:
    return f"found the key {name!r:.40} twice in one object, expected each once"
