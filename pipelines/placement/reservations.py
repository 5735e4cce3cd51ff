"""GPU reservations of open pipelines: one memory budget for each GPU, and joint planning of several pipelines.

A version of a pipeline reserves the claims of its plan before it opens, corrects the reservation when the real use of a
GPU was measured, and releases it when its workers have ended. Reserved memory is not free for other pipelines: the next
plan is made for a machine with these reservations (`beside`). A sleeping version keeps its reservation, because it must
be able to wake, and so does a version whose worker is restarting.

Versions whose llm steps use a GPU's remaining memory, and that reserved before that remainder was divided, divide it
evenly once every reservation there has been measured.

A GPU is identified by its name: plans for different machines that name the same GPU share it. Everything here is a
value or arithmetic on values; the time of each call is decided by the one owner in a process, `weftline.engine.gpus`.

Pipelines planned together are placed in the order in which they will be loaded, so that a pipeline that cannot be
loaded is refused before anything starts. Llm steps without a stated KV cache size divide the remainder of a GPU evenly,
across pipelines. While the remainder is unknown none has a size; they divide it when all are open
(`GpuReservations.settle`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial

from weftline.errors import PipelineError
from weftline.pipelines.placement.budget import (
    CONTEXT,
    EVERYBODY,
    KV,
    OF_OTHERS,
    RESERVE,
    claims_of_others,
    fillable,
    open_kv,
    over_commits,
    own_kv_bytes,
    rest_of,
    shares,
    with_kv_memory,
)
from weftline.pipelines.placement.machine import Machine, Taken
from weftline.pipelines.placement.plan import Claim, DeviceBudget, Plan
from weftline.pipelines.placement.planner import make_plan
from weftline.pipelines.placement.profile_file import profile_beside
from weftline.pipelines.spec.graph import Pipeline


@dataclass(frozen=True, slots=True)
class Owner:
    """A version of a pipeline that holds something, or is about to.

    name:    what people call the pipeline.
    session: a number of the session it is a version of; the next version of a session replaces the one before it.
    """

    name: str
    session: int
    version: int = 1


@dataclass(frozen=True, slots=True)
class ReservedMemory:
    """What a version holds of one GPU.

    total_bytes:   what the GPU has, by the machine it was planned for.
    bytes:         what is claimed, its reserve and others' memory aside.
    reserve_bytes: what it wants left free, shared with what others want left free.
    context_bytes: of `bytes`, what processes take before they hold anything; no worker counts it as its own.
    growth_bytes:  of `bytes`, KV memory that steps share and do not start with.
    fills:         its llm steps have what is left, or will have it.
    takers:        instances of llm steps that are to have a part of what is left, and do not know yet how much that is.
    known:         everything was stated or measured.
    free_bytes:    what the driver had free when this was measured.
    measured:      when that was, as a number that goes up; 0: it is yet to be.
    """

    total_bytes: int
    bytes: int
    reserve_bytes: int
    context_bytes: int = 0
    growth_bytes: int = 0
    fills: bool = False
    takers: int = 0
    known: bool = True
    free_bytes: int = 0
    measured: int = 0

    @property
    def settled(self) -> bool:
        """Return True when its size is known, apart from a share of the remainder."""
        return self.measured > 0 or (self.known and not self.takers)


@dataclass(frozen=True, slots=True)
class Left:
    """Remainder of a GPU with a version fully open: `bytes`, negative when it is over-committed.

    others:        what other versions hold of it.
    reserve_bytes: what is left free besides, for all of them.
    waits:         others are yet to be measured; what its llm steps get of it is said when they have been.
    """

    bytes: int
    others: tuple[Taken, ...]
    reserve_bytes: int
    waits: bool = False


Settle = Callable[[str, int, int], Left]
"""Called with a device, what a version's workers take of it, and what it has free by its driver, in bytes."""


class ReservationTable:
    """Who holds what of which GPU. Not thread-safe.

    changes: goes up whenever something is taken, corrected or given back.
    """

    def __init__(self) -> None:
        self.changes = 0
        self._held: dict[Owner, dict[str, ReservedMemory]] = {}
        self._new_shares: dict[tuple[Owner, str], int] = {}

    def copy(self) -> ReservationTable:
        """Return the same once more, to try something on."""
        other = ReservationTable()
        other.changes, other._held, other._new_shares = self.changes, dict(self._held), dict(self._new_shares)
        return other

    @property
    def held_bytes(self) -> Mapping[str, int]:
        """Reserved bytes of each GPU that has any, without the safety reserve."""
        found: dict[str, int] = {}
        for own in self._held.values():
            for device, one in own.items():
                found[device] = found.get(device, 0) + one.bytes
        return found

    def alone(self, holder: Owner) -> bool:
        """Return True when no other version has a reservation."""
        return not any(own for other, own in self._held.items() if other != holder)

    def try_take(self, holder: Owner, plan: Plan) -> bool:
        """Hold what a plan claims of its GPUs; False, and nothing is changed, when others have left too little."""
        wanted = {one.device: holding_of(plan, one) for one in plan.budgets}
        for device, one in wanted.items():
            others = self.taken(device, holder)
            reserve = max(one.reserve_bytes, self._reserve(device, holder))
            if others and one.bytes + sum(other.bytes for other in others) + reserve > one.total_bytes:
                return False
        self._held[holder] = wanted
        self.changes += 1
        return True

    def settle(self, holder: Owner, device: str, taken_bytes: int, free_bytes: int) -> Left:
        """Record a version's measurement of a fully opened GPU and return the remainder there.

        What is left is held too, where its llm steps may have it: evenly with those of others that wait for a part as
        well, once everything that is held there has been measured. What was claimed and is not taken yet stays held.
        KeyError when it holds nothing there.
        """
        own, others = self._held[holder][device], self.taken(device, holder)
        reserve = max(own.reserve_bytes, self._reserve(device, holder))
        most = own.total_bytes - sum(one.bytes for one in others) - reserve
        left = min(most - taken_bytes, free_bytes - reserve)
        needs = own.context_bytes + taken_bytes + own.growth_bytes
        self.changes += 1
        settled = dataclasses.replace(
            own, bytes=max(own.bytes, needs), known=True, free_bytes=free_bytes, measured=self.changes
        )
        alone = not self._waiting(device, holder)
        if own.takers and (alone or left < 0):
            fills = max(own.bytes, min(needs + left, most))
            settled = dataclasses.replace(settled, bytes=fills, takers=0 if alone else own.takers)
        self._held[holder] = {**self._held[holder], device: settled}
        if left >= 0:  # else it is about to end, and the others wait until it has
            self._divide(device)
        part = self._new_shares.pop((holder, device), left)
        return Left(part, others, reserve, waits=self._held[holder][device].takers > 0)

    def give_back(self, holder: Owner) -> None:
        """Forget what a version held; nothing happens when that is nothing."""
        gone = self._held.pop(holder, None)
        if gone is not None:
            self.changes += 1
            for device in gone:
                self._new_shares.pop((holder, device), None)
                self._divide(device)

    def left(self, device: str) -> int:
        """Return the unreserved bytes of a GPU with reservations, without the safety reserve."""
        there = [own[device] for own in self._held.values() if device in own]
        reserve = max(one.reserve_bytes for one in there)
        return max(0, min(one.total_bytes for one in there) - reserve - sum(one.bytes for one in there))

    def pop_new_shares(self) -> dict[tuple[Owner, str], int]:
        """Pop the shares of divided GPU memory that waiting versions have not received yet, in bytes."""
        shares, self._new_shares = self._new_shares, {}
        return shares

    def _waiting(self, device: str, holder: Owner) -> bool:
        """Return True while another version's size or share on a GPU is unknown."""
        others = (own[device] for other, own in self._held.items() if other != holder and device in own)
        return any(one.takers or not one.settled for one in others)

    def _divide(self, device: str) -> None:
        """Divide a GPU's remainder among waiting versions, once everything there is measured.

        Unlike one that is alone, whose driver says what its process takes besides, they all keep what they claimed.
        """
        there = {holder: own[device] for holder, own in self._held.items() if device in own}
        takers = {holder: one for holder, one in there.items() if one.takers}
        if not takers or not all(one.settled for one in there.values()):
            return
        reserve = max(one.reserve_bytes for one in there.values())
        total = min(one.total_bytes for one in takers.values())
        lately = max(there.values(), key=lambda one: one.measured)  # whose driver saw most of the others
        left = min(total - reserve - sum(one.bytes for one in there.values()), lately.free_bytes - reserve)
        count = sum(one.takers for one in takers.values())
        for holder, one in takers.items():
            part = max(0, left) * one.takers // count
            settled = dataclasses.replace(one, bytes=one.bytes + part, takers=0)
            self._held[holder] = {**self._held[holder], device: settled}
            self._new_shares[holder, device] = part
        self.changes += 1

    def taken(self, device: str, holder: Owner) -> tuple[Taken, ...]:
        """Return what others than this version hold of a GPU, in the order in which they came."""
        return tuple(
            Taken(
                other.name,
                one.bytes,
                one.fills,
                known=one.known and not one.takers,
                serves=other.session == holder.session,
            )
            for other, own in self._held.items()
            if other != holder and (one := own.get(device)) is not None
        )

    def beside(self, machine: Machine, holder: Owner) -> Machine:
        """Return the machine as it is for this version: with what others hold of its GPUs now."""
        devices = (
            dataclasses.replace(one, taken=taken, reserve_bytes=self._reserve(one.name, holder))
            if (taken := self.taken(one.name, holder))
            else one
            for one in machine.devices
        )
        return dataclasses.replace(machine, devices=tuple(devices))

    def beside_others(self, plan: Plan, holder: Owner) -> Plan:
        """Return a plan whose budgets include other reservations, for a version that cannot be replanned.

        What was left for its llm steps when it was planned is claimed like everything else.
        """
        budgets = []
        for one in plan.budgets:
            more = self._reserve(one.device, holder) - holding_of(plan, one).reserve_bytes
            claims = [claim for claim in one.claims if claim.what not in OF_OTHERS]
            claims += [Claim(EVERYBODY, KV, one.kv_bytes, "planned")] if one.kv_bytes else []
            claims += claims_of_others(self.taken(one.device, holder), more)
            budgets.append(dataclasses.replace(one, claims=tuple(claims), kv_bytes=0, rest_bytes=0))
        return dataclasses.replace(plan, budgets=tuple(budgets))

    def _reserve(self, device: str, holder: Owner) -> int:
        """Return what others want left free of a GPU."""
        wanted = (own[device].reserve_bytes for other, own in self._held.items() if other != holder and device in own)
        return max(wanted, default=0)


def holding_of(plan: Plan, budget: DeviceBudget) -> ReservedMemory:
    """Return a plan's claims on one of its GPUs, without those of other pipelines."""
    own = [claim for claim in budget.claims if claim.what not in OF_OTHERS]
    shared = plan.limits.kv_bytes.get(budget.device, 0)
    starts = sum(own_kv_bytes(step) * step.devices.count(budget.device) for step in plan.steps if shares(step))
    takers = 0 if budget.rest_bytes else len(open_kv(plan, budget.device))
    return ReservedMemory(
        total_bytes=budget.total_bytes,
        bytes=sum(claim.bytes for claim in own if claim.what != RESERVE) + budget.kv_bytes + budget.rest_bytes,
        reserve_bytes=sum(claim.bytes for claim in own if claim.what == RESERVE),
        context_bytes=sum(claim.bytes for claim in own if claim.what == CONTEXT),
        growth_bytes=max(0, shared - starts) if shared else 0,
        fills=takers > 0 or budget.kv_bytes > 0 or budget.rest_bytes > 0,
        takers=takers,
        known=all(claim.source != "unknown" for claim in own),
    )


def without_rest(plan: Plan) -> Plan:
    """Return a plan none of whose llm steps takes what is left of a GPU when it opens."""
    if not any(one.rest_bytes for one in plan.budgets):
        return plan
    return dataclasses.replace(plan, budgets=tuple(dataclasses.replace(one, rest_bytes=0) for one in plan.budgets))


def alone(plan: Plan) -> Settle:
    """Return a callback for the remainder of a plan's GPUs without other reservations."""
    holdings, holder = ReservationTable(), Owner(plan.name, 0)
    holdings.try_take(holder, plan)
    return partial(holdings.settle, holder)


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
