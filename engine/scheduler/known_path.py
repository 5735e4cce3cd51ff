"""Known path of a request: which units of its route it is known to run, from the values that it has so far.

Estimates count the units that are known to run. A unit that may be skipped takes no time, but the units behind it wait
for it; a fallback that was not called is on no path. What is not decided yet: a condition over a value that is not
there, a case of a switch, a required input that may be absent, and a list of which the length is not known. The outputs
of a step may be absent until it has succeeded if its failure counts as absent (`fallback: absent`).
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence

from weftline.engine.protocol.messages import Value
from weftline.engine.scheduler.condition_values import peek
from weftline.engine.scheduler.routes import KNOWN, Route, Unit
from weftline.pipelines.placement.plan import PlannedStep

DORMANT, OPEN = 0, 1
"""Of a unit: it belongs to a fallback that was not called; it may be skipped, or is. KNOWN: it runs, or will."""

Presence = bool | None
"""True if a value is or will be present, False if it is or will be absent, None if that is not known."""


def known_path(
    route: Route,
    values: Mapping[int, Value],
    missing: Sequence[int] = (),
    called: Container[int] = (),
) -> bytes:
    """Return DORMANT, OPEN or KNOWN for each unit of a route.

    values:  the values that are settled, by slot.
    missing: as in Request; empty for a request that has not begun.
    called:  the fallbacks that were called.
    """
    if route.fixed_path is not None:
        return route.fixed_path
    expected: dict[int, Presence] = {}

    def presence(slot: int) -> Presence:
        value = values.get(slot)
        return expected.get(slot) if value is None else value.kind != "absent"

    path = bytearray(len(route.units))
    for place, unit in enumerate(route.units):
        caller = route.waits_for.get(place)
        if caller is not None and caller not in called:
            continue
        runs: Presence = True
        if not missing or missing[place] >= 0:
            runs = _runs(unit, values, [presence(slot) for slot in unit.slots])
        gives = runs
        if unit.control and runs:
            gives = _chosen(unit, unit.head.planned, values, [presence(slot) for slot in unit.slots])
        if gives and route.absent_on_failure[place]:
            gives = None
        lists = [values.get(unit.slots[at]) for at in unit.mapped]
        if any(one is None or not one.items for one in lists) and (not missing or missing[place] >= 0):
            runs = None
        path[place] = KNOWN if runs else OPEN
        expected.update(dict.fromkeys(unit.returns, gives))
    return bytes(path)


def _runs(unit: Unit, values: Mapping[int, Value], inputs: Sequence[Presence]) -> Presence:
    """Return True if a unit will run, False if it will be skipped."""
    lacks = [there for must, there in zip(unit.required, inputs) if must and not unit.control]
    if False in lacks:
        return False
    holds = _holds(unit, values)
    return holds if all(lacks) or holds is False else None


def _holds(unit: Unit, values: Mapping[int, Value]) -> Presence:
    """Return the value of a unit's condition; None while it is not known, and when it cannot be evaluated."""
    if unit.when is None:
        return True
    try:
        return unit.when.holds([peek(values[slot]) for slot in unit.condition_slots])
    except (KeyError, ValueError):
        return None


def _chosen(unit: Unit, step: PlannedStep, values: Mapping[int, Value], inputs: Sequence[Presence]) -> Presence:
    """Return the presence of a control's output."""
    if unit.control == "passes":
        return all(inputs) or None
    if unit.control == "first":
        return True if True in inputs else None if None in inputs else False
    by = values.get(unit.slots[0])
    if by is None:
        return True if step.default and all(inputs) else None
    try:
        at = chosen_case(step, by)
    except ValueError:
        return None
    return False if at is None else inputs[at]


def chosen_case(step: PlannedStep, by: Value) -> int | None:
    """Return the position of the input that a switch selects by a value; None: none. ValueError: not readable."""
    if by.kind == "absent":
        return None
    found = peek(by)
    if by.kind == "tensor" and isinstance(found, list):
        raise ValueError(f"a switch cannot read {by.dtype}{list(by.shape)}")
    cases = (
        at
        for at, case in enumerate(step.cases, 1)
        if case == found and isinstance(case, bool) == isinstance(found, bool)
    )
    return next(cases, len(step.inputs) - 1 if step.default else None)
