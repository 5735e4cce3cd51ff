"""GPU reservations of open pipelines: one memory budget for each GPU.

A version of a pipeline reserves the claims of its plan before it opens, corrects the reservation when the real use of a
GPU was measured, and releases it when its workers have ended; of an engine with several pipelines, the part of each
worker when that has ended for good (`shrink`). Reserved memory is not free for other pipelines: the next plan is made
for a machine with these reservations (`beside`). A sleeping version keeps its reservation, because it must be able to
wake, and so does a version whose worker is restarting.

Versions whose llm steps use a GPU's remaining memory, and that reserved before that remainder was divided, divide it
evenly once every reservation there has been measured.

A GPU is identified by its name: plans for different machines that name the same GPU share it. Everything here is a
value or arithmetic on values; the time of each call is decided by the one owner in a process, `weftline.engine.gpus`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterable, Mapping
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
    open_kv,
    over_commits,
    own_kv_bytes,
    shares,
)
from weftline.pipelines.placement.machine import Machine, Taken
from weftline.pipelines.placement.plan import Claim, DeviceBudget, Plan


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
    share_bytes:   of `bytes`, the share of the remainder that llm steps have, beyond what they opened with.
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
    share_bytes: int = 0
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
            takers, share = 0 if alone else own.takers, fills - settled.bytes
            settled = dataclasses.replace(settled, bytes=fills, takers=takers, share_bytes=max(0, share))
        self._reserved[owner] = {**self._reserved[owner], device: settled}
        if left >= 0:  # else the version is about to end, and others wait for its release
            self._divide(device)
        part = self._new_shares.pop((owner, device), left)
        return Left(part, others, reserve, waits=self._reserved[owner][device].takers > 0)

    def shrink(
        self,
        owner: Owner,
        left: Plan,
        taken_bytes: Mapping[str, int],
        kv_bytes: Mapping[str, int],
    ) -> None:
        """Release what workers had that have ended for good.

        left:        the plan without them (`without_workers`).
        taken_bytes: by device, the measured use of the workers that go on.
        kv_bytes:    by device, KV memory that ended llm steps leave to those which share the remainder with them.
        """
        before = self._reserved.get(owner, {})
        claimed = {one.device: reserved_memory(left, one) for one in left.budgets}
        after = {
            device: _shrunk(own, claimed[device], taken_bytes.get(device, 0), kv_bytes.get(device, 0))
            for device, own in before.items()
            if device in claimed
        }
        if after == before:
            return
        self._reserved[owner] = after
        self.changes += 1
        for device in before:
            if device not in after:
                self._new_shares.pop((owner, device), None)
            self._divide(device)

    def release(self, owner: Owner) -> None:
        """Release a version's reservations; no-op without any."""
        gone = self._reserved.pop(owner, None)
        if gone is not None:
            self.changes += 1
            for device in gone:
                self._new_shares.pop((owner, device), None)
                self._divide(device)

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
            settled = dataclasses.replace(one, bytes=one.bytes + part, share_bytes=one.share_bytes + part, takers=0)
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


def without_workers(plan: Plan, ended: Collection[str]) -> Plan:
    """Return a plan without the claims of workers of these names; GPUs on which none is left have no budget."""
    steps = []
    for step in plan.steps:
        left = [(at, own) for at, own in zip(step.workers, step.devices) if plan.workers[at].name not in ended]
        workers, devices = tuple(at for at, _ in left), tuple(own for _, own in left)
        steps.append(dataclasses.replace(step, workers=workers, devices=devices))
    budgets = []
    for budget in plan.budgets:
        with_kv = any(shares(step) and budget.device in step.devices for step in steps)
        claims = [one for one in budget.claims if one.worker not in ended and (with_kv or one.owner != LLM_STEPS)]
        if any(one.worker for one in claims):
            kv_bytes, rest_bytes = (budget.kv_bytes, budget.rest_bytes) if with_kv else (0, 0)
            budgets.append(dataclasses.replace(budget, claims=tuple(claims), kv_bytes=kv_bytes, rest_bytes=rest_bytes))
    return dataclasses.replace(plan, steps=tuple(steps), budgets=tuple(budgets))


def _shrunk(own: ReservedMemory, claimed: ReservedMemory, taken_bytes: int, kv_bytes: int) -> ReservedMemory:
    """Return a reservation for the claims that are left of it."""
    needs = claimed.context_bytes + taken_bytes + claimed.growth_bytes if own.measured else 0
    share = own.share_bytes + kv_bytes if claimed.fills else 0
    return dataclasses.replace(
        claimed,
        total_bytes=own.total_bytes,
        bytes=min(own.bytes, max(claimed.bytes, needs) + share),
        share_bytes=share,
        takers=min(own.takers, claimed.takers),
        known=own.known or claimed.known,
        free_bytes=own.free_bytes,
        measured=own.measured,
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


def refused(plans: Iterable[Plan]) -> PipelineError:
    """Return the error for plans that over-commit a GPU, including other reservations."""
    return PipelineError([dataclasses.replace(one, file=plan.file) for plan in plans for one in over_commits(plan)])
