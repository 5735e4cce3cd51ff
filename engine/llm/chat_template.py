"""Render a model's chat template with limits on time, operations, values and text.

The template is part of a model, and a model is not trusted: as in the template step (`nodes/template_sandbox.py`),
every loop iteration, call, filter and operator is a tick, ticks and time are limited, and the length of a text is
computed before it is made. Chat templates use more of Jinja2 than those of a pipeline: macros, blocks that are kept in
variables, `break`, lists of lists. So printed text is counted where it is printed, in a macro too, each iteration and
call also costs the text of the template, and a list or dict that a template builds has at most VALUES_MAX values,
shared ones counted each time.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterator, Mapping
from functools import wraps
from typing import Any

from jinja2 import TemplateError, Undefined, meta, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.filters import FILTERS
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

from weftline.nodes.template_sandbox import (
    EACH,
    INDENT_MAX,
    TEXT_CHARS_MAX,
    TICKS_MAX,
    Budget,
    Generator,
    Overrun,
    check_operands,
    indent,
    number_from,
    replace,
    rounded,
    short_range,
)

RENDER_MAX_MS = 5_000.0
"""Longest rendering; a conversation of 1 024 messages takes some ms."""

CHARS_MAX = 64 << 20
"""Most characters that one rendering prints, those of blocks and macros included."""

VALUES_MAX = 100_000
SOURCE_CHARS_MAX = 256 << 10
"""Longest template; long ones of published models have 20 000 characters."""

BUILT = "_built"
_TEXTS = re.compile(r"%[^%a-zA-Z]*[0-9*]{3}")
"""A width or precision of `%` that makes a long text of a short one."""

_ABSENT = ("center", "format", "pprint", "random", "urlize", "wordwrap", "xmlattr", "filesizeformat", "slice", "batch")
"""Filters of Jinja2 that pad, or that chat templates do not use."""


class ChatTemplate:
    """One chat template. Not for two renderings at a time. Raises jinja2.TemplateError for a template that is wrong.

    reads: names of the variables that it reads.
    """

    def __init__(self, source: str) -> None:
        if len(source) > SOURCE_CHARS_MAX:
            raise TemplateError(f"a chat template of {len(source)} characters; the most is {SOURCE_CHARS_MAX}")
        self._environment = _Environment(len(source))
        try:
            tree = self._environment.parse(source)
            self.reads = frozenset(meta.find_undeclared_variables(tree))
            _Counting().visit(tree)
            self._template = self._environment.from_string(tree)
        except (RecursionError, MemoryError, SyntaxError):
            raise TemplateError("a chat template that is nested too deeply") from None

    def render(self, values: Mapping[str, Any], render_max_ms: float = RENDER_MAX_MS) -> str:
        """Return the text; Overrun when a limit is reached, TemplateError where the template raises."""
        self._environment.begin(render_max_ms)
        pieces, left = [], CHARS_MAX
        for piece in self._template.generate(**values):
            left -= len(piece)
            if left < 0:
                raise Overrun(f"more than {CHARS_MAX} characters")
            pieces.append(piece)
        return "".join(pieces)


class _Environment(ImmutableSandboxedEnvironment):
    """Jinja2's sandbox with a budget. source_chars: length of the template, the cost of an iteration."""

    code_generator_class = Generator
    intercepted_binops = frozenset(("+", "-", "*", "/", "//", "%", "**"))

    def __init__(self, source_chars: int) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[loopcontrols, _Generation],
            finalize=self._printed,
            optimized=False,  # nothing is computed while it is compiled
        )
        self._source_chars = source_chars
        self.begin(0.0)
        known = {name: filter for name, filter in FILTERS.items() if name not in _ABSENT}
        known |= {"int": number_from("int"), "float": number_from("float"), "round": rounded}
        known |= {"replace": replace, "indent": indent, "join": _join, "tojson": _to_json, "string": self._text}
        self.filters = {name: self._counted(filter) for name, filter in known.items()}
        self.filters |= {EACH: self._each, BUILT: self._built}
        self.globals = {
            "range": short_range, "namespace": self.globals["namespace"], "dict": self._dict,
            "raise_exception": _raise, "strftime_now": _now,
        }  # fmt: skip

    def begin(self, render_max_ms: float) -> None:
        self.budget = Budget(time.monotonic() + render_max_ms / 1e3, render_max_ms, TICKS_MAX)
        self._chars_left = 4 * CHARS_MAX

    def _spend(self, chars: int) -> None:
        self.budget.tick()
        self._chars_left -= chars
        if self._chars_left < 0:
            raise Overrun(f"more than {4 * CHARS_MAX} characters in blocks and loops")

    def _text(self, value: Any) -> str:
        """Return the text of a value of limited size."""
        if not isinstance(value, str):
            self._built(value)
            value = str(value)
        return str(value)

    def _printed(self, value: Any) -> Any:
        if isinstance(value, Undefined):
            return value
        text = self._text(value)
        self._spend(len(text))
        return text

    def _built(self, value: Any) -> Any:
        """Return a list, tuple or dict; Overrun for one of too many values."""
        waiting, left = [value], VALUES_MAX
        while waiting:
            left -= 1
            one = waiting.pop()
            if isinstance(one, Mapping):
                waiting.extend(one.values())
            elif isinstance(one, list | tuple | set):
                waiting.extend(one)
            if left < 0 or len(waiting) > VALUES_MAX:
                raise Overrun(f"a list of more than {VALUES_MAX} values")
        self.budget.ticks -= (VALUES_MAX - left) // 16
        self.budget.tick()
        return value

    def _dict(self, *args: Any, **kwargs: Any) -> Any:
        return self._built(dict(*args, **kwargs))

    def call(self, context: Any, function: Any, *args: Any, **kwargs: Any) -> Any:
        self._spend(self._source_chars)
        name = getattr(function, "__name__", "")
        if isinstance(getattr(function, "__self__", None), str):
            _check_method(name, function.__self__, args, kwargs)
        found = super().call(context, function, *args, **kwargs)
        if isinstance(found, str) and len(found) > TEXT_CHARS_MAX * 16:
            raise Overrun(f"a text of {len(found)} characters")
        return found

    def wrap_str_format(self, value: Any) -> None:
        """Leave str.format to `call`, which refuses it."""

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        self.budget.tick()
        if operator == "%" and isinstance(left, str):
            if _TEXTS.search(left):
                raise SecurityError("a width of three digits in '%'")
            return left % right
        check_operands(operator, left, right)
        found = super().call_binop(context, operator, left, right)
        return self._built(found) if isinstance(found, list | tuple) else found

    def concatenated(self, parts: tuple[Any, ...]) -> str:
        """Return the texts of `parts`, joined: what `~` gives."""
        texts = [self._text(part) for part in parts]
        self._spend(sum(map(len, texts)))
        if sum(map(len, texts)) > TEXT_CHARS_MAX * 16:
            raise Overrun(f"a text of more than {TEXT_CHARS_MAX * 16} characters")
        return "".join(texts)

    def _counted(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)  # keeps the mark for Jinja2 to pass its context
        def counted(*args: Any, **kwargs: Any) -> Any:
            self.budget.tick()
            found = function(*args, **kwargs)
            return self._built(found) if isinstance(found, list | tuple | dict) else found

        return counted

    def _each(self, values: Any) -> Iterator[Any]:
        for value in values:
            self._spend(self._source_chars)
            yield value


class _Counting(NodeTransformer):
    """Adds a counter to every loop, and a check to every list, tuple and dict that a template builds."""

    def visit_For(self, node: nodes.For) -> nodes.Node:
        node.iter = nodes.Filter(node.iter, EACH, [], [], None, None, lineno=node.lineno)
        return self.generic_visit(node)

    def visit_List(self, node: nodes.List) -> nodes.Node:
        return self._checked(node)

    def visit_Dict(self, node: nodes.Dict) -> nodes.Node:
        return self._checked(node)

    def visit_Tuple(self, node: nodes.Tuple) -> nodes.Node:
        return self._checked(node) if node.ctx == "load" else self.generic_visit(node)

    def _checked(self, node: Any) -> nodes.Node:
        self.generic_visit(node)
        return nodes.Filter(node, BUILT, [], [], None, None, lineno=node.lineno)


class _Generation(Extension):
    """Block `generation` of training templates: its text, unchanged."""

    tags = {"generation"}  # noqa: RUF012  as in Jinja2

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _check_method(name: str, text: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Raise Overrun before a method of str makes a long text of a short one."""
    if name in ("center", "ljust", "rjust", "zfill", "expandtabs") and any(
        isinstance(one, int) and one > INDENT_MAX for one in (*args, *kwargs.values())
    ):
        raise Overrun(f"{name}: a width of more than {INDENT_MAX}")
    if name in ("format", "format_map", "translate"):
        raise SecurityError(f"a template does not call {name}")
    chars = 0
    if name == "replace" and len(args) >= 2 and isinstance(args[0], str) and isinstance(args[1], str):
        chars = len(text) + text.count(args[0]) * len(args[1])
    elif name == "join" and args and isinstance(args[0], list | tuple):
        chars = len(text) * len(args[0]) + sum(len(str(one)) for one in args[0])
    if chars > TEXT_CHARS_MAX * 16:
        raise Overrun(f"{name}: a text that is too long")


def _join(values: Any, separator: str = "", attribute: str | None = None) -> str:
    rows = [value[attribute] for value in values] if attribute else list(values)
    texts = [str(value) for value in rows]
    if sum(map(len, texts)) + len(str(separator)) * len(texts) > TEXT_CHARS_MAX * 16:
        raise Overrun("join: a text that is too long")
    return str(separator).join(texts)


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """Return `value` as JSON, without the HTML escapes of Jinja2's own filter, as transformers does."""
    if isinstance(indent, int) and indent > INDENT_MAX:
        raise Overrun(f"tojson: an indent of more than {INDENT_MAX}")
    encoder = json.JSONEncoder(ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
    pieces, left = [], TEXT_CHARS_MAX * 16
    for piece in encoder.iterencode(value):
        pieces.append(piece)
        left -= len(piece)
        if left < 0:
            raise Overrun("tojson: a text that is too long")
    return "".join(pieces)


def _raise(message: object) -> None:
    raise TemplateError(f"{message!s:.1000}")


def _now(format: str) -> str:
    if len(format) > INDENT_MAX or re.search("[0-9]{3}", format):
        raise Overrun(f"strftime_now: a format of more than {INDENT_MAX} characters")
    return time.strftime(format)
