"""Parser and evaluator of `when:` conditions: side-effect-free expressions over wire values.

    guard.verdict.action == "block"        kind.label in ["cat", "dog"] and not skip        len(see.detections) > 0
    max(small.scores) < 0.8                max(look.sizes, default=0) > min(limit, 100)

Python's parser reads the text, and its tree is translated. Anything that is not in `ALLOWED` is refused. Nothing is
called, and no attribute of a Python object is read: a name after a dot is a key of a JSON value. Comparisons, `in`,
`and` and `or` have their Python meaning. A missing key, and every key of an absent value, is null.
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from weftline.pipelines.spec.wire import Wire

Tree = tuple[Any, ...]
"""See Condition.tree."""


def _contains(one: Any, many: Any) -> bool:
    return bool(one in many)


_OPERATORS: Mapping[str, Callable[[Any, Any], Any]] = {
    "==": operator.eq, "!=": operator.ne, "<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge,
    "in": _contains, "not-in": lambda one, many: one not in many,
}  # fmt: skip


class Evaluation:
    """One condition over one set of values, one for each of its wires."""

    def __init__(self, wires: Sequence[Wire], values: Sequence[Any]) -> None:
        self._wires, self._values = wires, values

    def value(self, tree: Tree) -> Any:
        """Evaluate a tree. ValueError: undefined."""
        match tree:
            case ("wire", index):
                return self._values[index]
            case ("value", constant):
                return constant
            case ("key", inner, key):
                return self._inside(inner, key)
            case ("len", inner):
                found = self.value(inner)
                if not isinstance(found, str | list | tuple | Mapping):
                    raise ValueError(f"{self._described(inner, found)}, which has no len{_guard(found)}")
                return len(found)
            case ("max" | "min" as name, default, *parts):
                return self._extreme(name, default, parts)
            case ("not", inner):
                return not self.value(inner)
            case ("and" | "or" as word, *parts):
                result: Any = None
                for part in parts:
                    result = self.value(part)
                    if bool(result) is (word == "or"):
                        break
                return result
            case (sign, left, right):
                one, other = self.value(left), self.value(right)
                try:
                    return _OPERATORS[sign](one, other)
                except TypeError:
                    sides = [
                        f"{_written(part, self._wires)} ({_kind(got)})" for part, got in zip(tree[1:], (one, other))
                    ]
                    raise ValueError(f"{f' {sign} '.join(sides)} cannot be decided") from None
        raise ValueError(f"unknown operator {tree[0]!r} in a condition tree")

    def _extreme(self, name: str, default: Tree, parts: Sequence[Tree]) -> Any:
        """Return the largest or smallest of several values, or of the elements of one list."""
        found = [self.value(part) for part in parts]
        if len(parts) == 1 and isinstance(found[0], int | float):
            return found[0]  # of a tensor that happens to have one element
        if len(parts) == 1 and found[0] is None and default:
            return self.value(default)
        if len(parts) == 1:
            if not isinstance(found[0], list | tuple):
                raise ValueError(f"{self._described(parts[0], found[0])}, not a list{_guard(found[0])}")
            found = list(found[0])
        if not found and default:
            return self.value(default)
        written = _written((name, default, *parts), self._wires)
        if not found:
            raise ValueError(f"{written} of an empty list; write {name}(x, default=...)")
        try:
            return max(found) if name == "max" else min(found)
        except TypeError:
            kinds = ", ".join(dict.fromkeys(map(_kind, found)))
            raise ValueError(f"{written} of {kinds} cannot be decided") from None

    def _described(self, tree: Tree, found: Any) -> str:
        return f"{_written(tree, self._wires)} is {_kind(found)}"

    def _inside(self, inner: Tree, key: str | int) -> Any:
        found = self.value(inner)
        if found is None:
            return None
        if isinstance(found, Mapping):
            return found.get(key)
        if isinstance(found, list | tuple) and isinstance(key, int):
            return found[key] if -len(found) <= key < len(found) else None
        raise ValueError(f"{_written(inner, self._wires)} is {_kind(found)}, which has no {literal(key)} in it")


def _guard(value: Any) -> str:
    """Return the fix for a value that is absent."""
    return "; write `x != null and ...` where x may be absent" if value is None else ""


def _kind(value: Any) -> str:
    """Describe a value without its content, which may be private."""
    kinds = ((bool, "true or false"), (int | float, "a number"), (str, "text"), (Mapping, "a mapping"))
    if value is None:
        return "null"
    return next((name for kind, name in kinds if isinstance(value, kind)), "a list")


def _written(tree: Tree, wires: Sequence[Wire]) -> str:
    """Return the source text of a tree, for messages."""
    match tree:
        case ("wire", index):
            return str(wires[index])
        case ("value", constant):
            return literal(constant)
        case ("key", inner, str() as key) if key.isidentifier():
            return f"{_written(inner, wires)}.{key}"
        case ("key", inner, key):
            return f"{_written(inner, wires)}[{literal(key)}]"
        case ("len", inner):
            return f"len({_written(inner, wires)})"
        case ("max" | "min" as name, default, *inner):
            more = [f"default={_written(default, wires)}"] if default else []
            return f"{name}({', '.join([*(_written(part, wires) for part in inner), *more])})"
        case ("not", inner):
            return f"not {_written(inner, wires)}"
    parts = tree[1:]
    return f"({f' {tree[0]} '.join(_written(part, wires) for part in parts)})"


def literal(value: Any) -> str:
    """Return the source text of a constant."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return f"[{', '.join(map(literal, value))}]" if isinstance(value, list) else repr(value)


CHARS_MAX = 1000
"""Longest condition, in characters."""

DEPTH_MAX = 32
"""Deepest nesting of a condition."""

ALLOWED = (
    "wires (step.port, or an input), keys (x.key, x['key'], x[0]), text, numbers, true, false, null, [lists], "
    "== != < <= > >=, in, not in, and, or, not, len(x), max(x), min(x), max(x, default=0), max(a, b), brackets"
)
"""Allowed syntax of a condition, for messages."""


@dataclass(frozen=True, slots=True)
class Condition:
    """A parsed condition.

    text:  as written.
    wires: its wires, each once.
    tree:  nested tuples: ("wire", index), ("key", tree, name), ("value", constant), ("len", tree), ("not", tree),
           ("max" or "min", default, trees...), where () is no default and a single tree is a list,
           ("and", trees...), ("or", trees...), and (operator, left, right) with one of == != < <= > >= in not-in.
    """

    text: str
    wires: tuple[Wire, ...]
    tree: Tree

    def holds(self, values: Sequence[Any]) -> bool:
        """Evaluate for one value of each of `wires` (None: absent); raise ValueError when undefined."""
        return bool(Evaluation(self.wires, values).value(self.tree))


def parse(text: str) -> Condition:
    """Parse the condition in `text`; ValueError with the position and the allowed syntax.

    Names of inputs are unknown here: `a.b` is port `b` of step `a` until `resolve` is called.
    """
    if len(text) > CHARS_MAX:
        raise ValueError(f"a condition of {len(text)} characters; the most is {CHARS_MAX}")
    flat = text.replace("\n", " ").replace("\r", " ").replace("\t", " ")
    lead = len(flat) - len(flat.lstrip())
    if not flat.strip():
        raise ValueError(f"an empty condition; it is made of {ALLOWED}")
    try:
        found = ast.parse(flat.strip(), mode="eval")
    except SyntaxError as error:
        raise ValueError(f"at character {lead + (error.offset or 1)}: {error.msg}{_dialect(flat)}") from None
    except (ValueError, RecursionError, MemoryError):
        raise ValueError(f"no condition; it is made of {ALLOWED}") from None
    rest = flat.strip().encode()[found.body.end_col_offset :]
    if b"#" in rest:  # lines were joined: all text after it, on other lines too, would be ignored silently
        at = lead + len(flat.strip()) - len(rest[rest.index(b"#") :].decode()) + 1
        raise ValueError(f"at character {at}: a condition has no comments; it is made of {ALLOWED}")
    reader = _Reader(flat.strip(), lead)
    tree = reader.tree(found.body, 1)
    return Condition(text, tuple(reader.wires), tree)


def resolve(condition: Condition, inputs: Collection[str]) -> Condition:
    """Return the condition with `a.b` read as key `b` of input `a` wherever `a` is one of `inputs`."""
    if not any(wire.step in inputs for wire in condition.wires):
        return condition
    wires: dict[Wire, int] = {}
    trees: list[Tree] = []
    for wire in condition.wires:
        source = Wire(None, wire.step) if wire.step is not None and wire.step in inputs else wire
        read = ("wire", wires.setdefault(source, len(wires)))
        trees.append(read if source is wire else ("key", read, wire.port))
    return Condition(condition.text, tuple(wires), _replaced(condition.tree, trees))


def rewired(condition: Condition, sources: Sequence[Wire]) -> Condition:
    """Return the condition with each of its wires replaced by the one of `sources` at the same place."""
    wires: dict[Wire, int] = {}
    places: list[Tree] = [("wire", wires.setdefault(source, len(wires))) for source in sources]
    return Condition(condition.text, tuple(wires), _replaced(condition.tree, places))


def equals(wire: Wire, value: Any) -> Condition:
    """Return the condition that a wire has `value`."""
    return Condition(f"{wire} == {literal(value)}", (wire,), ("==", ("wire", 0), ("value", value)))


def none_of(wire: Wire, values: Sequence[Any]) -> Condition:
    """Return the condition that a wire has none of `values`."""
    written = f"{wire} not in {literal(list(values))}"
    return Condition(written, (wire,), ("not-in", ("wire", 0), ("value", list(values))))


def all_of(parts: Sequence[Condition]) -> Condition:
    """Return the conjunction of `parts`, at least one."""
    return _joined("and", parts)


def any_of(parts: Sequence[Condition]) -> Condition:
    """Return the disjunction of `parts`, at least one."""
    return _joined("or", parts)


def _joined(word: str, parts: Sequence[Condition]) -> Condition:
    if len(parts) == 1:
        return parts[0]
    wires: dict[Wire, int] = {}
    trees = []
    for part in parts:
        places: list[Tree] = [("wire", wires.setdefault(wire, len(wires))) for wire in part.wires]
        trees.append(_replaced(part.tree, places))
    other = "or" if word == "and" else "and"
    texts = [f"({part.text})" if part.tree[0] == other else part.text for part in parts]
    return Condition(f" {word} ".join(texts), tuple(wires), (word, *trees))


def _replaced(tree: Tree, wires: Sequence[Tree]) -> Tree:
    """Return the tree with each wire replaced by the tree at its index."""
    if not tree or tree[0] == "value":
        return tree
    if tree[0] == "wire":
        return wires[tree[1]]
    return tuple(_replaced(part, wires) if isinstance(part, tuple) else part for part in tree)


# from text

_NAMED: Mapping[str, Any] = {"true": True, "false": False, "null": None}

_COMPARED: Mapping[type[ast.cmpop], str] = {
    ast.Eq: "==", ast.NotEq: "!=", ast.Lt: "<", ast.LtE: "<=", ast.Gt: ">", ast.GtE: ">=",
    ast.In: "in", ast.NotIn: "not-in",
}  # fmt: skip

_DIALECTS = {"&&": "and", "||": "or", "=": "=="}


def _dialect(text: str) -> str:
    """Return a hint for conditions written in another language's syntax."""
    found = [sign for sign in _DIALECTS if re.search(rf"(?<![=!<>]){re.escape(sign)}(?!=)", text)]
    return "".join(f"; write `{_DIALECTS[sign]}` for {sign}" for sign in found)


class _Reader:
    """Translator of one condition's Python syntax tree; numbers the wires."""

    def __init__(self, text: str, lead: int) -> None:
        self.wires: dict[Wire, int] = {}
        self._text, self._lead = text, lead

    def tree(self, node: ast.expr, depth: int) -> Tree:
        if depth > DEPTH_MAX:
            raise ValueError(f"a condition nested more than {DEPTH_MAX} deep")
        match node:
            case ast.Name(id=name) if name in _NAMED:
                return ("value", _NAMED[name])
            case ast.Name(id=name) if name != "len":
                return self._wire(Wire(None, name))
            case ast.Attribute(value=ast.Name(id=name), attr=port) if name not in _NAMED and name != "len":
                return self._wire(Wire(name, port))
            case ast.Attribute(value=inner, attr=key) if not _is_literal(inner):
                return ("key", self.tree(inner, depth + 1), key)
            case ast.Subscript(value=inner, slice=key) if not _is_literal(inner):
                return ("key", self.tree(inner, depth + 1), self._key(key))
            case ast.Call(func=ast.Name(id="len"), args=[inner], keywords=[]) if not isinstance(inner, ast.Starred):
                return ("len", self.tree(inner, depth + 1))
            case ast.Call(func=ast.Name(id="max" | "min" as name), args=[_, *_], keywords=keywords):
                return self._extreme(node, name, keywords, depth)
            case ast.UnaryOp(op=ast.Not(), operand=inner):
                return ("not", self.tree(inner, depth + 1))
            case ast.BoolOp(op=op, values=parts):
                word = "and" if isinstance(op, ast.And) else "or"
                return (word, *(self.tree(part, depth + 1) for part in parts))
            case ast.Compare():
                return self._compared(node, depth)
            case _:
                return ("value", self._constant(node, depth))

    def _extreme(self, node: ast.Call, name: str, keywords: Sequence[ast.keyword], depth: int) -> Tree:
        """Return max(...) or min(...) of one list, which may be empty if there is a default, or of several values."""
        single = len(node.args) == 1
        if any(one.arg != "default" for one in keywords) or (keywords and not single) or len(keywords) > 1:
            raise self._refusal(node, f"{name} is written {name}(x), {name}(x, default=0) or {name}(a, b)")
        if any(isinstance(one, ast.Starred) for one in node.args):
            raise self._refusal(node, f"{name} is written {name}(x), without *")
        default = self.tree(keywords[0].value, depth + 1) if keywords else ()
        return (name, default, *(self.tree(one, depth + 1) for one in node.args))

    def _wire(self, wire: Wire) -> Tree:
        return ("wire", self.wires.setdefault(wire, len(self.wires)))

    def _compared(self, node: ast.Compare, depth: int) -> Tree:
        """Return one comparison, or for `a < b < c` both of them."""
        sides = [self.tree(side, depth + 2) for side in (node.left, *node.comparators)]
        pairs = []
        for op, left, right in zip(node.ops, sides, sides[1:], strict=False):
            if type(op) not in _COMPARED:
                raise self._refusal(node, "`is` is not supported; write == or !=")
            pairs.append((_COMPARED[type(op)], left, right))
        return pairs[0] if len(pairs) == 1 else ("and", *pairs)

    def _key(self, node: ast.expr) -> str | int:
        key = self._constant(node)
        if isinstance(key, bool) or not isinstance(key, str | int):
            raise self._refusal(node, "a key is text in quotes, or a whole number")
        return key

    def _constant(self, node: ast.expr, depth: int = 1) -> Any:
        if depth > DEPTH_MAX:
            raise ValueError(f"a condition nested more than {DEPTH_MAX} deep")
        match node:
            case ast.Constant(value=bool() | int() | float() | str() | None as value):
                return value
            case ast.Name(id=name) if name in _NAMED:
                return _NAMED[name]
            case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as value)) if value is not True:
                return -value
            case ast.List(elts=parts):
                return [self._constant(part, depth + 1) for part in parts]
        raise self._refusal(node, _what(node))

    def _refusal(self, node: ast.expr, what: str) -> ValueError:
        before = self._text.encode()[: node.col_offset].decode()  # the parser counts bytes
        return ValueError(f"at character {self._lead + len(before) + 1}: {what}; a condition is made of {ALLOWED}")


def _is_literal(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant | ast.List) or (isinstance(node, ast.Name) and node.id in (*_NAMED, "len"))


def _what(node: ast.expr) -> str:
    """Describe syntax that a condition cannot contain."""
    match node:
        case ast.Call():
            return "nothing can be called but len(x), max(...) and min(...)"
        case ast.BinOp(op=ast.Sub()):
            return "nothing can be computed (a name with a - in it cannot be used here: rename it)"
        case ast.BinOp() | ast.UnaryOp():
            return "nothing can be computed"
        case ast.Name(id="len"):
            return "len is written len(x)"
        case ast.Attribute() | ast.Subscript():
            return "a key of something that has none"
    return f"{ast.unparse(node):.40} cannot stand here"
