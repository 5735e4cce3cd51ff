"""Control-flow analysis: inputs of conditions, guards of switch cases, and absent values.

A step whose outputs are only read by cases of switches has a *guard*: a condition that is true where one of those cases
can be chosen, so that the step runs only then. Guards are computed backwards from the outputs: a switch demands a case
under "`by` has this case's value", a guarded step passes its own guard on, and every other reader demands it always. A
guard may let a step run unnecessarily; it never skips a step that is needed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import networkx as nx

from weftline.nodes.control import BY, DEFAULT, NUMBERS, cases_of, is_number
from weftline.nodes.ports import PortType
from weftline.pipelines.check.checked import Checked, CheckedStep
from weftline.pipelines.check.problems import Report
from weftline.pipelines.check.wiring import fallbacks_of, graph_of, readers
from weftline.pipelines.spec.condition import Condition, Tree, all_of, any_of, equals, none_of
from weftline.pipelines.spec.fallbacks import ABSENT
from weftline.pipelines.spec.graph import Input
from weftline.pipelines.spec.wire import Wire

TERMS_MAX = 16
"""Most alternatives of a guard; a step with more of them is not guarded."""

# conditions


def check_conditions(checked: Checked, report: Report) -> None:
    """Report conditions over values of unsupported types."""
    for step in checked.pipeline.steps:
        for found, fix in _unseen(step.when, checked) if step.when else ():
            report.add(f"steps.{step.name}.when", found, _SEEN, fix)


_SEEN = (
    "text, json, detections (the list of their labels), a tensor known to have one element, len(x), max(x) and min(x)"
    " of a list, max(x) and min(x) of a tensor of one axis"
)
_FIX = "compute the needed value in a function step"


def _unseen(when: Condition, checked: Checked) -> list[tuple[str, str]]:
    """Return the problems of a condition's values: found, and a fix."""
    types = [checked.type_of(wire) for wire in when.wires]
    found = [
        (f"reads {wire}, which is {type}", _FIX)
        for wire, type in zip(when.wires, types, strict=True)
        if type is not None and not _visible(type)
    ]
    if found:
        return found
    return [(text, "") for text in dict.fromkeys(_misread(when.tree, when, types, bare=True))]


def _visible(type: PortType) -> bool:
    return type.kind in ("json", "text", "detections", "any", "list") or is_number(type) or _is_flat(type)


def _is_flat(type: PortType) -> bool:
    """Return True for a tensor of one axis, of which a condition can use the extremes."""
    return type.kind == "tensor" and type.dtype in NUMBERS and type.dims is not None and len(type.dims) == 1


def _has_order(type: PortType) -> bool:
    """Return True if a condition can compare the elements of a list or a tensor."""
    item = type.item
    return _is_flat(type) or (item is not None and (item.kind in ("json", "text", "any") or is_number(item)))


def _misread(tree: Tree, when: Condition, types: Sequence[PortType | None], bare: bool) -> list[str]:
    """Return keys of values without keys, and lists that are used for more than their length.

    bare: a list is allowed here: only its presence or emptiness matters.
    """
    match tree:
        case ("wire", index):
            type = types[index]
            if type is None or is_number(type):
                return []
            extremes = "max(x) and min(x)"
            if _is_flat(type):
                return [f"{when.wires[index]} is {type}, of which a condition can only use {extremes}"]
            uses = f"len(x), {extremes}" if _has_order(type) else "the length"
            found = f"{when.wires[index]} is {type}, of which a condition can only use {uses}"
            return [found] if type.kind == "list" and not bare else []
        case ("key", ("wire", index), key):
            type = types[index]
            labels = type is not None and type.kind == "detections" and isinstance(key, int)
            if type is None or labels or type.kind in ("json", "any"):
                return []
            return [f"{when.wires[index]} is {type}, which has no {key} in it"]
        case ("len", ("wire", index)) if (type := types[index]) is not None and is_number(type):
            return [f"{when.wires[index]} is {type}, which has no len"]
        case ("len", inner):
            return _misread(inner, when, types, bare=True)
        case ("max" | "min", _, ("wire", index)):
            type = types[index]
            if type is None or type.kind in ("json", "any", "detections") or _has_order(type):
                return []
            return [f"{when.wires[index]} is {type}, of which a condition has no {tree[0]}"]
        case ("==" | "!=", left, right):
            missing = ("value", None) in (left, right)
            return [*_misread(left, when, types, missing), *_misread(right, when, types, missing)]
        case ("value", _):
            return []
    bare = tree[0] in ("and", "or", "not")
    return [text for part in tree[1:] if isinstance(part, tuple) and part for text in _misread(part, when, types, bare)]


# what may be absent


def may_lack(given: Input) -> bool:
    """Return True when an input may be absent."""
    return given.optional and given.default is None


def conditional(checked: Checked) -> frozenset[str]:
    """Return the steps whose outputs may be absent, without guards: a guard is true wherever an output is needed."""
    absent = {Wire(None, one.name) for one in checked.pipeline.inputs if may_lack(one)}
    found: set[str] = set()
    for name, one in checked.steps.items():
        if _may_skip(one, absent):
            found.add(name)
            absent |= {Wire(name, port.name) for port in one.ports.outputs}
    return frozenset(found)


def _may_skip(one: CheckedStep, absent: set[Wire]) -> bool:
    if one.step.when is not None or one.step.fallback == ABSENT:
        return True
    lacking = [port.name for port in one.ports.inputs if one.step.inputs.get(port.name) in absent]
    if one.control == "first":
        return len(lacking) == len(one.ports.inputs)
    if one.control == "switch":
        return bool(lacking) or DEFAULT not in one.step.inputs
    return any(port.name in lacking and not one.does_without(port) for port in one.ports.inputs)


# switches


def switch_cases(one: CheckedStep) -> tuple[tuple[Any, ...], bool]:
    """Return the case values of a switch, in the order of its ports, and True if it has a default."""
    names = [port.name for port in one.ports.inputs if port.name not in (BY, DEFAULT)]
    return tuple(cases_of(names, one.config).values()), one.ports.input(DEFAULT) is not None


_Guard = frozenset[frozenset[str]] | None
"""Disjunction of conjunctions of conditions (by their text); None: always."""


def guards(checked: Checked) -> dict[str, Condition]:
    """Return the guards of steps that serve only cases of switches.

    Control steps are omitted: they cost nothing.
    """
    finder = _Guards(checked)
    for name in finder.order():
        finder.visit(name)
    return {name: one for name, one in finder.found.items() if not checked.steps[name].control}


class _Guards:
    """Computation of guards, readers before their sources, without creating cycles."""

    def __init__(self, checked: Checked) -> None:
        self.found: dict[str, Condition] = {}
        self._checked = checked
        self._owner = {fallback: name for name, fallback in fallbacks_of(checked.pipeline).items()}
        self._graph = graph_of(checked.pipeline)  # grows by an edge from a guard's inputs to the guarded step
        self._graph.add_edges_from(fallbacks_of(checked.pipeline).items())
        self._atoms: dict[str, Condition] = {}
        self._demands: dict[str, _Guard] = {}
        self._readers: dict[str, list[tuple[str, str]]] = {}  # step -> (reading step, its port; '' for other readers)
        self._cases = {name: self._cases_of(one) for name, one in checked.steps.items() if one.control == "switch"}
        for path, wire in readers(checked.pipeline):
            reader, _, port = path.removeprefix("steps.").partition(".inputs.")
            if wire.step is not None:
                self._readers.setdefault(wire.step, []).append((reader, port))

    def order(self) -> list[str]:
        """Return the steps in reverse topological order: readers and replaced steps first."""
        graph = graph_of(self._checked.pipeline)
        graph.add_edges_from(self._owner.items())
        return list(reversed(list(nx.topological_sort(graph))))

    def visit(self, name: str) -> None:
        if name in self._owner:
            self._demands[name] = self._demands[self._owner[name]]
            return
        guard = self._sound(name, self._demanded(name))
        self._demands[name] = guard
        if guard is None:
            return
        parts = [all_of([self._atoms[text] for text in sorted(term)]) for term in sorted(guard, key=sorted)]
        self.found[name] = any_of(parts)
        self._graph.add_edges_from((wire.step, name) for wire in self.found[name].wires if wire.step is not None)

    def _demanded(self, name: str) -> _Guard:
        """Return the conditions under which an output of a step is read."""
        alternatives: set[frozenset[str]] = set()
        for reader, port in self._readers.get(name, ()):
            own = self._demands[reader] if port else None
            case = self._cases.get(reader, {}).get(port)
            if case is not None:
                alternatives |= {term | {case} for term in (own or {frozenset[str]()})}
            elif own is None:
                return None
            else:
                alternatives |= own
        return frozenset(alternatives) or None

    def _sound(self, name: str, guard: _Guard) -> _Guard:
        """Return the guard without conditions that depend on the step itself, and without redundant alternatives."""
        if guard is None:
            return None
        terms = {frozenset(text for text in term if not self._depends(text, name)) for term in guard}
        terms = {term for term in terms if not any(other < term for other in terms)}
        return frozenset(terms) if frozenset() not in terms and len(terms) <= TERMS_MAX else None

    def _depends(self, text: str, name: str) -> bool:
        given = [wire.step for wire in self._atoms[text].wires if wire.step is not None]
        return any(nx.has_path(self._graph, name, step) for step in given)

    def _cases_of(self, one: CheckedStep) -> dict[str, str]:
        """Return the condition of each case of a switch, by its port."""
        by, ports = one.step.inputs.get(BY), [port.name for port in one.ports.inputs]
        if by is None:
            return {}
        values = cases_of([name for name in ports if name not in (BY, DEFAULT)], one.config)
        conditions = {name: equals(by, value) for name, value in values.items()}
        if DEFAULT in ports and not any(value in (0, 1) for value in values.values()):  # true equals 1
            conditions[DEFAULT] = none_of(by, list(values.values()))
        self._atoms |= {one.text: one for one in conditions.values()}
        return {name: one.text for name, one in conditions.items()}
