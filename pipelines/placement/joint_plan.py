"""Joint planning of several pipelines that are open at the same time.

They are placed in the order in which they will be loaded, so that who is refused when they are is refused here, before
anything starts. What is then left of a GPU, llm steps that name no KV memory divide evenly, whosever they are. Where
nobody knows how much that is, none has a figure: they divide it when all of them are open (`ReservationTable.settle`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping

from weftline.errors import PipelineError
from weftline.pipelines.placement.budget import fillable, open_kv, over_commits, rest_of
from weftline.pipelines.placement.kv_memory import with_kv_memory
from weftline.pipelines.placement.machine import Machine
from weftline.pipelines.placement.plan import Plan
from weftline.pipelines.placement.planner import make_plan
from weftline.pipelines.placement.profile_file import profile_beside
from weftline.pipelines.placement.reservations import Owner, ReservationTable
from weftline.pipelines.spec.graph import Pipeline

Replan = Callable[[Machine], Plan]
"""Makes a pipeline's plan for a machine, with what others have of its GPUs; PipelineError when it does not fit."""


class JointPlan:
    """Plans pipelines for a machine, beside what is open on it already.

    holdings: what that is; None: nothing is.
    """

    def __init__(self, machine: Machine, holdings: ReservationTable | None = None) -> None:
        devices = (dataclasses.replace(one, shared=True) for one in machine.devices)
        self._machine = dataclasses.replace(machine, devices=tuple(devices))
        self._open = holdings.copy() if holdings is not None else ReservationTable()
        self._together = self._open.copy()
        self._plans: dict[Owner, Plan] = {}

    def add(self, holder: Owner, again: Replan) -> Plan:
        """Place one more and return its plan without what it gets of what is left.

        PipelineError: it has problems, or too little is left; it then claims nothing.
        """
        plan = again(self._together.beside(self._machine, holder))
        if not self._together.try_take(holder, plan):
            raise refused([self._together.beside_others(plan, holder)])
        self._plans[holder] = plan
        return plan

    def plans(self) -> Mapping[Owner, Plan]:
        """Return the plans of all that were added, in that order, now that it is known with whom each shares a GPU.

        PipelineError: too little is left for KV memory, with every plan that has less than the least.
        """
        parts = self._parts()
        held = self._together.copy()
        for holder, plan in self._plans.items():
            held.try_take(holder, _with_left(plan, parts.get(holder, {})))
        beside = {holder: held.beside_others(plan, holder) for holder, plan in self._plans.items()}
        if any(over_commits(plan) for plan in beside.values()):
            raise refused(beside.values())
        return {holder: _with_rest(_with_left(plan, parts.get(holder, {}))) for holder, plan in beside.items()}

    def _parts(self) -> dict[Owner, dict[str, int]]:
        """Return how many bytes of what is left of each GPU the llm steps of each plan get, where that is known."""
        opened = {holder: self._open.beside_others(plan, holder) for holder, plan in self._plans.items()}
        parts: dict[Owner, dict[str, int]] = {}
        for device in fillable(opened.values()):
            takers = {holder: len(open_kv(plan, device)) for holder, plan in opened.items()}
            left, count = self._together.left(device), sum(takers.values())
            for holder, own in takers.items():
                parts.setdefault(holder, {})[device] = left * own // count
        return parts


def planner(pipeline: Pipeline) -> Replan:
    """Return what makes a pipeline's plan, with what was measured of it."""
    return lambda machine: make_plan(pipeline, machine, profile=profile_beside(pipeline))


def refused(plans: Iterable[Plan]) -> PipelineError:
    """Return what to raise for plans that claim too much of a GPU, beside what others have of it."""
    return PipelineError([dataclasses.replace(one, file=plan.file) for plan in plans for one in over_commits(plan)])


def _with_rest(plan: Plan) -> Plan:
    """Return a plan whose llm step takes what is left of a GPU when it opens, where it alone is not known there."""
    budgets = tuple(
        one if one.kv_bytes else dataclasses.replace(one, rest_bytes=rest_of(plan, one)) for one in plan.budgets
    )
    return plan if budgets == plan.budgets else dataclasses.replace(plan, budgets=budgets)


def _with_left(plan: Plan, parts: Mapping[str, int]) -> Plan:
    """Return a plan whose llm steps have so much of each GPU."""
    if not any(parts.values()):
        return plan
    budgets = (dataclasses.replace(one, kv_bytes=parts.get(one.device, one.kv_bytes)) for one in plan.budgets)
    return with_kv_memory(dataclasses.replace(plan, budgets=tuple(budgets)))[0]
