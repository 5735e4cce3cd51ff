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
(`ReservationTable.settle`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial

from weftline.errors import PipelineError
from weftline.pipelines.placement.budget import (
    CONTEXT,
    KV,
    LLM_STEPS,
    OF_OTHERS,
    RESERVE,
    claims_of_others,
    fillable,
    open_kv,
    over_commits,
    own_kv_bytes,
    remainder_of,
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
    """A version of a pipeline with a reservation.

    name:    name of the pipeline.
    session: number of its session; the next version of a session replaces the one before it.
    """

    name: str
    session: int
    version: int = 1


@dataclass(frozen=True, slots=True)
class ReservedMemory:
    """Reservation of a version on one GPU.

    total_bytes:   the GPU's memory, by the machine of the plan.
    bytes:         claimed memory, without the safety reserve and other pipelines' memory.
    reserve_bytes: memory to keep free; reserves of several pipelines overlap.
    context_bytes: of `bytes`, the base memory of processes; workers do not count it as their own.
    growth_bytes:  of `bytes`, KV memory that steps share beyond their start sizes.
    fills:         its llm steps have the remainder, or will have it.
    takers:        instances of llm steps that wait for a share of the remainder.
    known:         everything was stated or measured.
    free_bytes:    free memory by the driver at the time of measurement.
    measured:      sequence number of the measurement; 0: not measured.
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

    others:        reservations of other versions.
    reserve_bytes: memory to keep free for all of them.
    waits:         others are not measured yet; its llm steps receive their share later.
    """

    bytes: int
    others: tuple[Taken, ...]
    reserve_bytes: int
    waits: bool = False


Settle = Callable[[str, int, int], Left]
"""Callback with a device, the bytes used by a version's workers, and the bytes free by the driver."""


class ReservationTable:
    """GPU reservations by owner. Not thread-safe.

    changes: counts reservations, corrections and releases.
    """

    def __init__(self) -> None:
        self.changes = 0
        self._reserved: dict[Owner, dict[str, ReservedMemory]] = {}
        self._new_shares: dict[tuple[Owner, str], int] = {}

    def copy(self) -> ReservationTable:
        """Return a copy, to try changes."""
        other = ReservationTable()
        other.changes, other._reserved, other._new_shares = self.changes, dict(self._reserved), dict(self._new_shares)
        return other

    @property
    def reserved_bytes(self) -> Mapping[str, int]:
        """Reserved bytes of each GPU that has any, without the safety reserve."""
        found: dict[str, int] = {}
        for own in self._reserved.values():
            for device, one in own.items():
                found[device] = found.get(device, 0) + one.bytes
        return found

    def alone(self, owner: Owner) -> bool:
        """Return True when no other version has a reservation."""
        return not any(own for other, own in self._reserved.items() if other != owner)

    def try_reserve(self, owner: Owner, plan: Plan) -> bool:
        """Reserve a plan's claims; False, without a change, when other reservations leave too little."""
        wanted = {one.device: reserved_memory(plan, one) for one in plan.budgets}
        for device, one in wanted.items():
            others = self.taken(device, owner)
            reserve = max(one.reserve_bytes, self._reserve(device, owner))
            if others and one.bytes + sum(other.bytes for other in others) + reserve > one.total_bytes:
                return False
        self._reserved[owner] = wanted
        self.changes += 1
        return True

    def settle(self, owner: Owner, device: str, taken_bytes: int, free_bytes: int) -> Left:
        """Record a version's measurement of a fully opened GPU and return the remainder there.

        The remainder is reserved too, if its llm steps may use it: divided evenly with waiting versions, once every
        reservation there was measured. Claimed memory that is not used yet stays reserved.
        KeyError: no reservation there.
        """
        own, others = self._reserved[owner][device], self.taken(device, owner)
        reserve = max(own.reserve_bytes, self._reserve(device, owner))
        most = own.total_bytes - sum(one.bytes for one in others) - reserve
        left = min(most - taken_bytes, free_bytes - reserve)
        needs = own.context_bytes + taken_bytes + own.growth_bytes
        self.changes += 1
        settled = dataclasses.replace(
            own, bytes=max(own.bytes, needs), known=True, free_bytes=free_bytes, measured=self.changes
        )
        alone = not self._waiting(device, owner)
        if own.takers and (alone or left < 0):
            fills = max(own.bytes, min(needs + left, most))
            settled = dataclasses.replace(settled, bytes=fills, takers=0 if alone else own.takers)
        self._reserved[owner] = {**self._reserved[owner], device: settled}
        if left >= 0:  # else the version is about to end, and others wait for its release
            self._divide(device)
        part = self._new_shares.pop((owner, device), left)
        return Left(part, others, reserve, waits=self._reserved[owner][device].takers > 0)

    def release(self, owner: Owner) -> None:
        """Release a version's reservations; no-op without any."""
        gone = self._reserved.pop(owner, None)
        if gone is not None:
            self.changes += 1
            for device in gone:
                self._new_shares.pop((owner, device), None)
                self._divide(device)

    def left(self, device: str) -> int:
        """Return the unreserved bytes of a GPU with reservations, without the safety reserve."""
        there = [own[device] for own in self._reserved.values() if device in own]
        reserve = max(one.reserve_bytes for one in there)
        return max(0, min(one.total_bytes for one in there) - reserve - sum(one.bytes for one in there))

    def pop_new_shares(self) -> dict[tuple[Owner, str], int]:
        """Pop the shares, in bytes, that waiting versions have not received yet."""
        shares, self._new_shares = self._new_shares, {}
        return shares

    def _waiting(self, device: str, owner: Owner) -> bool:
        """Return True while another version's size or share on a GPU is unknown."""
        others = (own[device] for other, own in self._reserved.items() if other != owner and device in own)
        return any(one.takers or not one.settled for one in others)

    def _divide(self, device: str) -> None:
        """Divide a GPU's remainder among waiting versions, once everything there is measured.

        Unlike a single version, whose driver reports the exact use of its process, they all keep their claims.
        """
        there = {owner: own[device] for owner, own in self._reserved.items() if device in own}
        takers = {owner: one for owner, one in there.items() if one.takers}
        if not takers or not all(one.settled for one in there.values()):
            return
        reserve = max(one.reserve_bytes for one in there.values())
        total = min(one.total_bytes for one in takers.values())
        lately = max(
            there.values(), key=lambda one: one.measured
        )  # the most recent measurement includes most of the others
        left = min(total - reserve - sum(one.bytes for one in there.values()), lately.free_bytes - reserve)
        count = sum(one.takers for one in takers.values())
        for owner, one in takers.items():
            part = max(0, left) * one.takers // count
            settled = dataclasses.replace(one, bytes=one.bytes + part, takers=0)
            self._reserved[owner] = {**self._reserved[owner], device: settled}
            self._new_shares[owner, device] = part
        self.changes += 1

    def taken(self, device: str, owner: Owner) -> tuple[Taken, ...]:
        """Return other versions' reservations on a GPU, oldest first."""
        return tuple(
            Taken(
                other.name,
                one.bytes,
                one.fills,
                known=one.known and not one.takers,
                serves=other.session == owner.session,
            )
            for other, own in self._reserved.items()
            if other != owner and (one := own.get(device)) is not None
        )

    def beside(self, machine: Machine, owner: Owner) -> Machine:
        """Return the machine with other versions' current reservations on its GPUs."""
        devices = (
            dataclasses.replace(one, taken=taken, reserve_bytes=self._reserve(one.name, owner))
            if (taken := self.taken(one.name, owner))
            else one
            for one in machine.devices
        )
        return dataclasses.replace(machine, devices=tuple(devices))

    def beside_others(self, plan: Plan, owner: Owner) -> Plan:
        """Return a plan whose budgets include other reservations, for a version that cannot be replanned.

        The remainder that its plan had for llm steps becomes a claim.
        """
        budgets = []
        for one in plan.budgets:
            more = self._reserve(one.device, owner) - reserved_memory(plan, one).reserve_bytes
            claims = [claim for claim in one.claims if claim.what not in OF_OTHERS]
            claims += [Claim(LLM_STEPS, KV, one.kv_bytes, "planned")] if one.kv_bytes else []
            claims += claims_of_others(self.taken(one.device, owner), more)
            budgets.append(dataclasses.replace(one, claims=tuple(claims), kv_bytes=0, rest_bytes=0))
        return dataclasses.replace(plan, budgets=tuple(budgets))

    def _reserve(self, device: str, owner: Owner) -> int:
        """Return the largest reserve of other versions on a GPU."""
        wanted = (
            own[device].reserve_bytes for other, own in self._reserved.items() if other != owner and device in own
        )
        return max(wanted, default=0)


def reserved_memory(plan: Plan, budget: DeviceBudget) -> ReservedMemory:
    """Return the reservation for a plan's own claims on one of its GPUs."""
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


def without_remainder(plan: Plan) -> Plan:
    """Return the plan without llm steps that use a GPU's remainder when they open."""
    if not any(one.rest_bytes for one in plan.budgets):
        return plan
    return dataclasses.replace(plan, budgets=tuple(dataclasses.replace(one, rest_bytes=0) for one in plan.budgets))


def alone(plan: Plan) -> Settle:
    """Return a callback for the remainder of a plan's GPUs without other reservations."""
    reservations, owner = ReservationTable(), Owner(plan.name, 0)
    reservations.try_reserve(owner, plan)
    return partial(reservations.settle, owner)


Replan = Callable[[Machine], Plan]
"""Function that plans a pipeline for a machine with other reservations. PipelineError: it does not fit."""


class JointPlan:
    """Plans pipelines for a machine, beside open pipelines.

    reservations: those of open pipelines; None: no pipeline is open.
    """

    def __init__(self, machine: Machine, reservations: ReservationTable | None = None) -> None:
        devices = (dataclasses.replace(one, shared=True) for one in machine.devices)
        self._machine = dataclasses.replace(machine, devices=tuple(devices))
        self._open = reservations.copy() if reservations is not None else ReservationTable()
        self._together = self._open.copy()
        self._plans: dict[Owner, Plan] = {}

    def add(self, owner: Owner, replan: Replan) -> Plan:
        """Place one more pipeline and return its plan, without its share of the remainder.

        PipelineError: it has problems, or too little is left; it then reserves nothing.
        """
        plan = replan(self._together.beside(self._machine, owner))
        if not self._together.try_reserve(owner, plan):
            raise refused([self._together.beside_others(plan, owner)])
        self._plans[owner] = plan
        return plan

    def plans(self) -> Mapping[Owner, Plan]:
        """Return the final plans of all added pipelines, in that order.

        PipelineError: too little is left for KV memory; lists every plan below the minimum.
        """
        parts = self._parts()
        held = self._together.copy()
        for owner, plan in self._plans.items():
            held.try_reserve(owner, _with_left(plan, parts.get(owner, {})))
        beside = {owner: held.beside_others(plan, owner) for owner, plan in self._plans.items()}
        if any(over_commits(plan) for plan in beside.values()):
            raise refused(beside.values())
        return {owner: _with_remainder(_with_left(plan, parts.get(owner, {}))) for owner, plan in beside.items()}

    def _parts(self) -> dict[Owner, dict[str, int]]:
        """Return each plan's share of each GPU's remainder, where known."""
        opened = {owner: self._open.beside_others(plan, owner) for owner, plan in self._plans.items()}
        parts: dict[Owner, dict[str, int]] = {}
        for device in fillable(opened.values()):
            takers = {owner: len(open_kv(plan, device)) for owner, plan in opened.items()}
            left, count = self._together.left(device), sum(takers.values())
            for owner, own in takers.items():
                parts.setdefault(owner, {})[device] = left * own // count
        return parts


def planner(pipeline: Pipeline) -> Replan:
    """Return the planning function of a pipeline, with its profile."""
    return lambda machine: make_plan(pipeline, machine, profile=profile_beside(pipeline))


def refused(plans: Iterable[Plan]) -> PipelineError:
    """Return the error for plans that over-commit a GPU, including other reservations."""
    return PipelineError([dataclasses.replace(one, file=plan.file) for plan in plans for one in over_commits(plan)])


def _with_remainder(plan: Plan) -> Plan:
    """Return the plan with the remainder for a GPU's only llm step that was not measured."""
    budgets = tuple(
        one if one.kv_bytes else dataclasses.replace(one, rest_bytes=remainder_of(plan, one)) for one in plan.budgets
    )
    return plan if budgets == plan.budgets else dataclasses.replace(plan, budgets=budgets)


def _with_left(plan: Plan, parts: Mapping[str, int]) -> Plan:
    """Return the plan with these shares of each GPU for its llm steps."""
    if not any(parts.values()):
        return plan
    budgets = (dataclasses.replace(one, kv_bytes=parts.get(one.device, one.kv_bytes)) for one in plan.budgets)
    return with_kv_memory(dataclasses.replace(plan, budgets=tuple(budgets)))[0]
