"""Structured-output constraint of a request: JSON schema, regex, grammar or choice.

A `Constraint` is validated for size and shape only; `weftline.engine.llm.grammar.compiler` compiles it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from weftline.engine.llm.params import CHOICES_MAX, sampling_error
from weftline.errors import InputError
from weftline.nodes.json_value import NotJson
from weftline.nodes.strict_json import parse

KINDS = ("json_schema", "json_object", "regex", "grammar", "choice")
TEXT_BYTES_MAX = 64 * 1024
"""Longest schema, grammar, or list of choices together, as UTF-8; published APIs' schemas are a tenth of it."""
NESTING_MAX = 64
"""Deepest schema: the compiler's own reader stops at 128."""
REGEX_CHARS_MAX = 4096


@dataclass(frozen=True, slots=True)
class Constraint:
    """A constraint of one request; the constructor raises InputError if it exceeds a limit.

    kind:  one of KINDS.
    value: a schema as JSON text, a pattern, or a grammar; the texts of `choice`; empty for `json_object`.

    json_schema: drafts 4 to 2020-12; keywords that cannot be enforced are refused when it is compiled. Properties come
    in the schema's order. regex: the syntax of Rust's regex crate, for the whole text, with \\d and \\w for ASCII; no
    look-around and no back-references. grammar: Lark, starting at `start`.
    """

    kind: str
    value: str | tuple[str, ...] = ""

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise InputError(f"sampling: found a constraint {self.kind!r:.40}, expected one of {', '.join(KINDS)}")
        if self.kind == "choice":
            self._check_choices()
        elif not isinstance(self.value, str) or bool(self.value) == (self.kind == "json_object"):
            raise sampling_error(self.kind, f"found {_shown(self.value)}, expected {_EXPECTED[self.kind]}")
        elif _size(self.kind, self.value) > TEXT_BYTES_MAX:
            raise sampling_error(self.kind, f"found more than {TEXT_BYTES_MAX} bytes, its limit; shorten it")
        elif self.kind == "json_schema":
            _check_schema(self.value)
        elif self.kind == "regex" and len(self.value) > REGEX_CHARS_MAX:
            found = len(self.value)
            raise sampling_error("regex", f"found {found} characters, expected at most {REGEX_CHARS_MAX}")
        elif self.kind == "regex" and (len(self.value) - len(self.value.rstrip("\\"))) % 2:
            raise sampling_error("regex", "found a backslash at the end, expected what it stands before")

    def _check_choices(self) -> None:
        texts = self.value
        if not isinstance(texts, tuple) or not 0 < len(texts) <= CHOICES_MAX:
            found = f"a list of {len(texts)}" if isinstance(texts, tuple) else _shown(texts)
            raise sampling_error("choice", f"found {found}, expected a list of 1 to {CHOICES_MAX} texts")
        for text in texts:
            if not isinstance(text, str) or not text:
                raise sampling_error("choice", f"found {_shown(text)}, expected texts that are not empty")
        if sum(_size("choice", text) for text in texts) > TEXT_BYTES_MAX:
            raise sampling_error("choice", f"found more than {TEXT_BYTES_MAX} bytes together, the limit")

    @classmethod
    def read(cls, value: object) -> Constraint:
        """Parse the constraint of a request: an object with exactly one of KINDS as its key.

        {"json_schema": {...}}, {"json_object": true}, {"regex": "..."}, {"grammar": "..."} or {"choice": [...]}.
        """
        if not isinstance(value, Mapping) or len(value) != 1:
            found = f"an object with {len(value)} keys" if isinstance(value, Mapping) else type(value).__name__
            raise InputError(f"sampling: found {found}, expected an object with one key of {', '.join(KINDS)}")
        ((kind, what),) = value.items()
        if kind == "json_object":
            if what is not True:
                raise sampling_error("json_object", f"found {_shown(what)}, expected true")
            return cls("json_object")
        if kind == "json_schema":
            return cls(kind, _written(what))
        if kind == "choice" and isinstance(what, list | tuple):
            return cls(kind, tuple(what))
        return cls(str(kind), what)


_EXPECTED = {
    "json_schema": "a schema as JSON text",
    "json_object": "nothing beside it",
    "regex": "a pattern as text that is not empty",
    "grammar": "a grammar in Lark's syntax as text that is not empty",
}


def _written(schema: object) -> str:
    if not isinstance(schema, Mapping):
        raise sampling_error("json_schema", f"found {type(schema).__name__}, expected an object")
    _check_nesting(schema)
    try:
        return json.dumps(schema, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    except (ValueError, TypeError, RecursionError):  # NaN, numbers of thousands of digits, values JSON does not have
        raise sampling_error("json_schema", "holds a value that cannot be written as JSON") from None


def _check_schema(text: str) -> None:
    try:
        schema = parse(text)
    except NotJson as error:
        raise sampling_error("json_schema", error.at("")) from None
    if not isinstance(schema, dict):
        raise sampling_error("json_schema", f"found {type(schema).__name__}, expected an object")
    _check_nesting(schema)


def _check_nesting(schema: object) -> None:
    """Raise InputError for values nested too deeply; iterative, so cyclic values are refused too."""
    level: list[Any] = [schema]
    for _ in range(NESTING_MAX):
        inside = [part for value in level if isinstance(value, Mapping) for part in value.values()]
        inside += [part for value in level if isinstance(value, list | tuple) for part in value]
        level = [part for part in inside if isinstance(part, Mapping | list | tuple)]
        if not level:
            return
        if len(level) > TEXT_BYTES_MAX:
            raise sampling_error("json_schema", f"found more than {TEXT_BYTES_MAX} values, the limit")
    raise sampling_error("json_schema", f"found values nested deeper than {NESTING_MAX}, its limit")


def _size(kind: str, text: str) -> int:
    try:
        return len(text.encode())
    except UnicodeEncodeError:
        raise sampling_error(kind, "found half of a surrogate pair, which is no character") from None


def _shown(value: object) -> str:
    if isinstance(value, str):
        return "an empty text" if not value else f"{value!r:.40}"
    return str(value).lower() if isinstance(value, bool) else type(value).__name__
