"""Evaluator of condition trees over JSON-like values."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
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
        """Return what the tree comes to; ValueError when it cannot be decided."""
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
                    raise ValueError(f"{_written(inner, self._wires)} is {_kind(found)}, which has no len")
                return len(found)
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
        raise ValueError(f"a condition with {tree[0]!r} in it, which nothing here makes")

    def _inside(self, inner: Tree, key: str | int) -> Any:
        found = self.value(inner)
        if found is None:
            return None
        if isinstance(found, Mapping):
            return found.get(key)
        if isinstance(found, list | tuple) and isinstance(key, int):
            return found[key] if -len(found) <= key < len(found) else None
        raise ValueError(f"{_written(inner, self._wires)} is {_kind(found)}, which has no {literal(key)} in it")


def _kind(value: Any) -> str:
    """Return what a value is, without showing it: it may be private."""
    kinds = ((bool, "true or false"), (int | float, "a number"), (str, "text"), (Mapping, "a mapping"))
    if value is None:
        return "null"
    return next((name for kind, name in kinds if isinstance(value, kind)), "a list")


def _written(tree: Tree, wires: Sequence[Wire]) -> str:
    """Return a tree as a condition would have it, for messages."""
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
        case ("not", inner):
            return f"not {_written(inner, wires)}"
    parts = tree[1:]
    return f"({f' {tree[0]} '.join(_written(part, wires) for part in parts)})"


def literal(value: Any) -> str:
    """Return a constant as a condition has it."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return f"[{', '.join(map(literal, value))}]" if isinstance(value, list) else repr(value)
