"""Jinja2 sandbox for untrusted templates, with limits on time, loops and output size.

Jinja's own sandbox protects Python's internals; it does not limit time or memory. Here every way to create something
large is either absent or counted:

    source          bounded, and only the statements that `check_tree` allows
    loops, calls    each iteration, call, filter and operator is a tick; ticks and time have a limit
    strings         operators and filters compute the length of a result first; `%`, format, center, ljust and the like
                    do not exist
    numbers         at most NUMBER_BITS_MAX bits before an operator is applied; texts converted to numbers are short
    lists           at most ITEMS_MAX long, and none built by a template contains another: ten lines of [x, x] would
                    otherwise be a thousand million elements when printed or compared
    output          counted while it is generated

A single operation on one input value, such as sorting it, takes time by that input's size, which the input's own limit
bounds; the worker's run_max_ms is the outer limit.

`check_tree` permits expressions, if, for and set. `count_loops` then adds the filter EACH to every loop's values and
the filter FLAT to every element of a list that the template builds. Filters of Jinja2 are used where their result is no
larger than their input; filters that pad, repeat or format are reimplemented with limits, or absent.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from jinja2 import StrictUndefined, TemplateSyntaxError, Undefined, meta, nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.exceptions import FilterArgumentError, SecurityError
from jinja2.filters import FILTERS as JINJA
from jinja2.runtime import LoopContext
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

from weftline.nodes.detections import Detections
from weftline.nodes.values import describe as describe_value

TEXT_CHARS_MAX = 1 << 20
"""Longest text a filter makes, in characters."""

SHOWN_ELEMENTS_MAX = 4_096
"""Largest array a template sees as numbers; a larger one is shown as its dtype and shape."""

INDENT_MAX = 64

NUMBER_CHARS_MAX = 1_000
"""Longest text that becomes a number: more digits than a float has, fewer than make arithmetic slow."""


@dataclass(frozen=True, slots=True)
class Step:
    """The outputs of another step, `see` in {{ see.detections }}."""

    outputs: Mapping[str, Any]


class Objects(list[dict[str, Any]]):
    """Detections in a template: a list of name, score and box, printed as their description."""

    __slots__ = ("described",)

    def __init__(self, detections: Detections) -> None:
        super().__init__(detections.to_json())
        self.described = detections.describe()


class Marks(list[str]):
    """Marks of pictures in a template, printed one after the other."""

    __slots__ = ()


def to_template(value: Any) -> Any:
    """Return `value` of any port as a template sees it."""
    if isinstance(value, Detections):
        return Objects(value)
    if isinstance(value, np.ndarray):
        return value.tolist() if value.size <= SHOWN_ELEMENTS_MAX else describe_value(value)
    if isinstance(value, bytes | bytearray | memoryview):
        return describe_value(bytes(value))
    return value


def to_text(value: Any) -> Any:
    """Return the text of `value` in the output: a str as it is, lists and dicts as JSON, None as nothing."""
    if isinstance(value, str | Undefined):
        return value  # an undefined value raises where Jinja prints it, with its name
    if value is None:
        return ""
    if isinstance(value, bool | int | float):
        return str(value)
    if isinstance(value, Objects):
        return value.described
    if isinstance(value, Marks):
        return "".join(value)
    return to_json(value)


def to_json(value: Any, indent: int | None = None) -> str:
    """Return `value` as JSON, non-ASCII letters as they are."""
    if indent is not None and not 0 <= indent <= INDENT_MAX:
        raise FilterArgumentError(f"tojson: indent is {indent}; from 0 to {INDENT_MAX}")
    if isinstance(value, Undefined):
        return str(value)
    pieces, left = [], TEXT_CHARS_MAX
    for piece in json.JSONEncoder(ensure_ascii=False, indent=indent, default=_plain).iterencode(value):
        pieces.append(piece)
        left -= len(piece)
        if left < 0:
            raise FilterArgumentError(f"tojson: more than {TEXT_CHARS_MAX} characters")
    return "".join(pieces)


def _plain(value: Any) -> Any:
    if isinstance(value, list | tuple | set | range) or hasattr(value, "__iter__"):
        return list(value)
    raise FilterArgumentError(f"{describe_value(value)} has no text")


def describe(objects: Any) -> str:
    """Return '2 red circles, 1 blue star' for detections, or for any list of objects with a name or of names."""
    if isinstance(objects, Objects):
        return objects.described
    if not isinstance(objects, list | tuple):
        raise FilterArgumentError(f"describe: wants detections, got {describe_value(objects)}")
    names = [thing.get("name") if isinstance(thing, dict) else thing for thing in objects]
    if not all(isinstance(name, str) for name in names):
        raise FilterArgumentError("describe: wants detections, or a list of names")
    counts = sorted(Counter(names).items(), key=lambda item: (-item[1], item[0]))
    return ", ".join(f"{n} {name}{'s' if n != 1 else ''}" for name, n in counts) or "nothing"


def join(values: Any, separator: str = "", attribute: str | None = None) -> str:
    """Return the texts of `values` with `separator` between them."""
    rows = [value[attribute] for value in values] if attribute else list(values)
    texts = [str(to_text(value)) for value in rows]
    separator = str(separator)
    if sum(map(len, texts)) + len(separator) * len(texts) > TEXT_CHARS_MAX:
        raise FilterArgumentError(f"join: more than {TEXT_CHARS_MAX} characters")
    return separator.join(texts)


def replace(value: Any, old: str, new: str) -> str:
    """Return `value` with every `old` replaced by `new`."""
    text, old, new = str(to_text(value)), str(old), str(new)
    if len(text) + text.count(old) * len(new) > TEXT_CHARS_MAX:
        raise FilterArgumentError(f"replace: more than {TEXT_CHARS_MAX} characters")
    return text.replace(old, new)


def indent(value: Any, width: int = 4, first: bool = False) -> str:
    """Return `value` with `width` spaces before every line, before the first one too if `first`."""
    text = str(to_text(value))
    if not 0 <= width <= INDENT_MAX or len(text) + (text.count("\n") + 1) * width > TEXT_CHARS_MAX:
        raise FilterArgumentError(f"indent: a width from 0 to {INDENT_MAX}, and at most {TEXT_CHARS_MAX} characters")
    space = " " * width
    return (space if first else "") + text.replace("\n", "\n" + space)


def number_from(name: str) -> Callable[..., Any]:
    """Return Jinja's filter `name` (int or float) with a limit on the length of the texts it reads."""

    def bounded(value: Any, *args: Any, **kwargs: Any) -> Any:
        _check_digits(name, value)
        return JINJA[name](value, *args, **kwargs)

    return bounded


def _check_digits(name: str, value: Any) -> None:
    if isinstance(value, str) and len(value) > NUMBER_CHARS_MAX:
        raise FilterArgumentError(f"{name}: a text of {len(value)} characters; a number has {NUMBER_CHARS_MAX} at most")


def rounded(value: Any, precision: int = 0) -> float:
    """Return `value` rounded to `precision` places."""
    _check_digits("round", value)
    if not -20 <= precision <= 20:
        raise FilterArgumentError("round: a precision from -20 to 20")
    return round(float(value), precision)


def total(values: Any, attribute: str | None = None, start: float = 0) -> float:
    """Return the sum of numbers."""
    rows = [value[attribute] for value in values] if attribute else list(values)
    if not all(isinstance(row, int | float) for row in (*rows, start)):
        raise FilterArgumentError("sum: wants numbers")
    found: float = sum(rows, start)
    return found


_TAKEN = (
    "abs", "capitalize", "count", "d", "default", "dictsort", "first", "items", "last", "length",
    "list", "lower", "map", "max", "min", "reject", "rejectattr", "reverse", "select", "selectattr", "sort", "title",
    "trim", "truncate", "unique", "upper", "wordcount",
)  # fmt: skip
"""Filters of Jinja2's own whose result is no larger than their input, or three times that where upper and title change
letters that have no capital of their own."""

FILTERS: dict[str, Callable[..., Any]] = {
    **{name: JINJA[name] for name in _TAKEN},
    "describe": describe, "float": number_from("float"), "indent": indent, "int": number_from("int"), "join": join,
    "replace": replace, "round": rounded, "string": lambda value: str(to_text(value)), "sum": total, "tojson": to_json,
}  # fmt: skip


EACH, FLAT = "_each", "_flat"
"""Names of the two filters; a template that names them itself only counts twice."""

TEMPLATE_CHARS_MAX = 64 << 10
"""Longest template, in characters."""

NODES_MAX = 5_000
_NODES = (
    nodes.Template, nodes.Output, nodes.TemplateData, nodes.Name, nodes.NSRef, nodes.Const, nodes.Tuple, nodes.List,
    nodes.Dict, nodes.Pair, nodes.Keyword, nodes.CondExpr, nodes.Filter, nodes.Test, nodes.Call, nodes.Getitem,
    nodes.Getattr, nodes.Slice, nodes.Concat, nodes.Compare, nodes.Operand, nodes.BinExpr, nodes.UnaryExpr, nodes.For,
    nodes.If, nodes.Assign, nodes.With,
)  # fmt: skip
"""Statements and expressions a template may hold. Not among them: what buffers output uncounted (macro, set blocks,
call, filter blocks) and what reaches for other files (include, import, extends)."""


def check_tree(tree: nodes.Template) -> None:
    """Raise ValueError when a template is too large, or holds what it must not; the message names the line."""
    for count, node in enumerate(_walk(tree)):
        if count >= NODES_MAX:
            raise ValueError(f"a template of more than {NODES_MAX} syntax nodes")
        _check_node(node)


def count_loops(tree: nodes.Template) -> None:
    """Put the counters into a checked tree."""
    _Counting().visit(tree)


class _Counting(NodeTransformer):
    """Puts a counter into every loop, and a check into every list, tuple and dict that a template builds."""

    def visit_For(self, node: nodes.For) -> nodes.Node:
        node.iter = nodes.Filter(node.iter, EACH, [], [], None, None, lineno=node.lineno)
        return self.generic_visit(node)

    def visit_List(self, node: nodes.List) -> nodes.Node:
        node.items = [_flattened(item) for item in node.items]
        return self.generic_visit(node)

    def visit_Tuple(self, node: nodes.Tuple) -> nodes.Node:
        if node.ctx == "load":
            node.items = [_flattened(item) for item in node.items]
        return self.generic_visit(node)

    def visit_Pair(self, node: nodes.Pair) -> nodes.Node:
        node.value = _flattened(node.value)
        return self.generic_visit(node)


def _flattened(item: nodes.Expr) -> nodes.Expr:
    if isinstance(item, nodes.Const):
        return item
    return nodes.Filter(item, FLAT, [], [], None, None, lineno=item.lineno)


def flat(value: Any) -> Any:
    if isinstance(value, list | tuple | dict):
        raise SecurityError("a template builds no lists of lists")
    return value


def _walk(node: nodes.Node) -> Iterator[nodes.Node]:
    waiting = [node]
    while waiting:
        node = waiting.pop()
        yield node
        waiting.extend(node.iter_child_nodes())


def _check_node(node: nodes.Node) -> None:
    if not isinstance(node, _NODES) or (isinstance(node, nodes.For) and node.recursive):
        name = "recursive loop" if isinstance(node, nodes.For) else type(node).__name__.lower()
        raise ValueError(f"line {node.lineno}: a template here holds no {name}")


TICKS_MAX = 100_000
"""Most loop iterations, calls, filters and operators of one rendering; a prompt needs hundreds."""

ITEMS_MAX = 10_000
NUMBER_BITS_MAX = 4_096

_METHODS: dict[type, frozenset[str]] = {
    str: frozenset((
        "capitalize", "count", "endswith", "find", "isalpha", "isdigit", "islower", "isupper", "lower", "lstrip",
        "partition", "removeprefix", "removesuffix", "rpartition", "rsplit", "rstrip", "split", "splitlines",
        "startswith", "strip", "swapcase", "title", "upper",
    )),
    dict: frozenset(("get", "items", "keys", "values")),
    list: frozenset(("count", "index")),
    tuple: frozenset(("count", "index")),
}  # fmt: skip
"""Methods a template may call, by type: those whose result holds no more characters than what they are called on. Only
a change of case may make two or three letters of one ('\\u0390'.upper() has three), and those do not grow again."""


class Overrun(Exception):
    """A template went over one of its limits; the message names it."""


@dataclass(slots=True)
class Budget:
    """Remaining budget of one rendering: ticks, and the time.monotonic() of its end."""

    ends_at: float
    render_max_ms: float
    ticks: int = TICKS_MAX

    def tick(self) -> None:
        """Count one operation; Overrun when there were too many, or time is up."""
        self.ticks -= 1
        if self.ticks < 0:
            raise Overrun(f"more than {TICKS_MAX} loop iterations and operations")
        if time.monotonic() > self.ends_at:
            raise Overrun(f"not done after {self.render_max_ms:g} ms, its limit render_max_ms")


class Generator(CodeGenerator):
    """Jinja's code generator, except that `~` goes through the environment, which counts."""

    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:
        self.write("environment.concatenated((")
        for part in node.nodes:
            self.visit(part, frame)
            self.write(", ")
        self.write("))")


class Sandbox(ImmutableSandboxedEnvironment):
    """The environment of one template node. Not for two renderings at a time: `render` sets the budget."""

    code_generator_class = Generator
    intercepted_binops = frozenset(("+", "-", "*", "/", "//", "%", "**"))

    def __init__(self) -> None:
        super().__init__(undefined=StrictUndefined, optimized=False, finalize=to_text, keep_trailing_newline=True)
        self.budget = Budget(0.0, 0.0)
        self.filters = {name: self._counted(function) for name, function in FILTERS.items()}
        self.filters |= {EACH: self._each, FLAT: flat}
        self.globals = {"range": short_range, "namespace": Namespace}

    def prepared(self, source: str) -> tuple[Any, set[str]]:
        """Return `source` prepared for `generate`, and its variables; raise ValueError when invalid."""
        if len(source) > TEMPLATE_CHARS_MAX:
            raise ValueError(f"a template of {len(source)} characters; the most is {TEMPLATE_CHARS_MAX}")
        try:
            tree = self.parse(source)
            check_tree(tree)
            used = meta.find_undeclared_variables(tree) - set(self.globals)
            count_loops(tree)
            return self.from_string(tree), used
        except TemplateSyntaxError as error:
            raise ValueError(f"line {error.lineno}: {error.message}") from None
        except (RecursionError, MemoryError, SyntaxError):  # SyntaxError: Python's own limit on nested parentheses
            raise ValueError("a template that is nested too deeply") from None

    def generate(self, template: Any, values: Mapping[str, Any], chars_max: int, render_max_ms: float) -> str:
        """Return the rendered text; Overrun when a limit is reached."""
        self.budget = Budget(time.monotonic() + render_max_ms / 1e3, render_max_ms)
        pieces: list[str] = []
        left = chars_max
        for piece in template.generate(**values):
            self.budget.tick()
            left -= len(piece)
            if left < 0:
                raise Overrun(f"more than {chars_max} characters, its limit output_chars_max")
            pieces.append(piece)
        return "".join(pieces)

    def call(self, context: Any, function: Any, *args: Any, **kwargs: Any) -> Any:
        self.budget.tick()
        return super().call(context, function, *args, **kwargs)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        self.budget.tick()
        check_operands(operator, left, right)
        return super().call_binop(context, operator, left, right)

    def concatenated(self, parts: tuple[Any, ...]) -> str:
        """Return what `~` gives: the texts of `parts`, joined."""
        self.budget.tick()
        texts = [str(to_text(part)) for part in parts]
        if sum(map(len, texts)) > TEXT_CHARS_MAX:
            raise Overrun(f"a text of more than {TEXT_CHARS_MAX} characters")
        return "".join(texts)

    def getattr(self, obj: Any, attribute: str) -> Any:
        if isinstance(obj, Step):
            return obj.outputs.get(attribute, self.undefined(obj=obj, name=attribute))
        return super().getattr(obj, attribute)

    def wrap_str_format(self, value: Any) -> None:
        """Refuse str.format like every method that is not listed."""

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        if attr.startswith("_"):
            return False
        if isinstance(obj, LoopContext | Namespace):
            return True
        return any(isinstance(obj, type) and attr in names for type, names in _METHODS.items())

    def _counted(self, function: Any) -> Any:
        from functools import wraps

        @wraps(function)  # keeps the mark that tells Jinja to pass its context as the first argument
        def counted(*args: Any, **kwargs: Any) -> Any:
            self.budget.tick()
            return function(*args, **kwargs)

        return counted

    def _each(self, values: Any) -> Iterator[Any]:
        for value in values:
            self.budget.tick()
            yield value


def short_range(*bounds: int) -> range:
    found = range(*bounds)
    if abs((found.stop - found.start) // found.step) > TICKS_MAX:
        raise Overrun(f"a range of more than {TICKS_MAX} numbers")
    return found


def check_operands(operator: str, left: Any, right: Any) -> None:
    """Raise before an operator makes something too large, or formats a string."""
    if operator == "%" and isinstance(left, str | bytes):
        raise SecurityError("'%' does not format text here; write {{ a ~ b }}")
    bits = max(_bits(left), _bits(right))  # of the longest number there is before, during or after the operation
    if operator == "**":
        bits = max(bits, max(_bits(left), 1) * (abs(right) if isinstance(right, int) else 1))
    elif operator == "*":
        bits = _bits(left) + _bits(right)
    if bits > NUMBER_BITS_MAX:
        raise Overrun(f"a number of more than {NUMBER_BITS_MAX} bits")
    if operator == "*":
        _check_length(left, right)
        _check_length(right, left)
    elif operator == "+" and hasattr(left, "__len__") and hasattr(right, "__len__"):
        limit = TEXT_CHARS_MAX if isinstance(left, str) else ITEMS_MAX
        if len(left) + len(right) > limit:
            raise Overrun(f"a text or list longer than {limit}")


def _check_length(sequence: Any, times: Any) -> None:
    if isinstance(sequence, str | bytes | list | tuple) and isinstance(times, int):
        limit = TEXT_CHARS_MAX if isinstance(sequence, str | bytes) else ITEMS_MAX
        if len(sequence) * times > limit:
            raise Overrun(f"a text or list longer than {limit}")


def _bits(value: Any) -> int:
    return value.bit_length() if isinstance(value, int) else 0
