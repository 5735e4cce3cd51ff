"""Jinja2 sandbox for untrusted templates, with limits on time, loops and output size.

Jinja's own sandbox keeps a template from Python's inside; it does not keep it from running for hours or filling memory.
Here every way to make something large is either absent or counted:

    source          bounded, and only the statements that template_syntax lists
    loops, calls    each iteration, call, filter and operator is a tick; ticks and time have a limit
    strings         every operator and filter that makes one knows its length before it makes it; `%`, format, center,
                    ljust and the like do not exist
    numbers         at most NUMBER_BITS_MAX bits before an operator takes them; texts that become numbers are short
    lists           at most ITEMS_MAX long, and none built by a template holds another: ten lines of [x, x] would
                    otherwise be a thousand million elements when printed or compared
    output          counted while it is generated

A single operation on one input value (sorting it, say) is as long as that input; what bounds it is the input's own
limit and, from outside, the worker's run_max_ms.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from jinja2 import StrictUndefined, TemplateSyntaxError, meta, nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.exceptions import SecurityError
from jinja2.runtime import LoopContext
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from weftline.nodes.template_filters import FILTERS, TEXT_CHARS_MAX, Step, to_text
from weftline.nodes.template_syntax import EACH, FLAT, TEMPLATE_CHARS_MAX, check_tree, count_loops, flat

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


class _Generator(CodeGenerator):
    """Jinja's code generator, except that `~` goes through the environment, which counts."""

    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:
        self.write("environment.concatenated((")
        for part in node.nodes:
            self.visit(part, frame)
            self.write(", ")
        self.write("))")


class Sandbox(ImmutableSandboxedEnvironment):
    """The environment of one template node. Not for two renderings at a time: `render` sets the budget."""

    code_generator_class = _Generator
    intercepted_binops = frozenset(("+", "-", "*", "/", "//", "%", "**"))

    def __init__(self) -> None:
        super().__init__(undefined=StrictUndefined, optimized=False, finalize=to_text, keep_trailing_newline=True)
        self.budget = Budget(0.0, 0.0)
        self.filters = {name: self._counted(function) for name, function in FILTERS.items()}
        self.filters |= {EACH: self._each, FLAT: flat}
        self.globals = {"range": _short_range, "namespace": Namespace}

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
        _check_operands(operator, left, right)
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


def _short_range(*bounds: int) -> range:
    found = range(*bounds)
    if abs((found.stop - found.start) // found.step) > TICKS_MAX:
        raise Overrun(f"a range of more than {TICKS_MAX} numbers")
    return found


def _check_operands(operator: str, left: Any, right: Any) -> None:
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
