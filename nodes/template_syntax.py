"""Permitted template syntax and instrumentation of loops and lists.

A template is read as Jinja2's syntax tree. `check_tree` lets through expressions, if, for and set; `count_loops` then
puts the filters EACH around every loop's values and FLAT around every element of a list that the template builds. The
sandbox supplies both.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.visitor import NodeTransformer

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
