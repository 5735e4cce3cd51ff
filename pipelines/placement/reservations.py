"""GPU reservations of open pipelines: one memory budget for each GPU.

A version of a pipeline takes what its plan claims before it opens, corrects that once it has measured what everything
on a GPU really takes, and gives it back when its workers are gone. What it holds is not free for anybody else: the next
plan is made for a machine that says so (`beside`). A version that sleeps keeps all of it, because it must be able to
wake, and so does one whose worker is being started again.

Versions whose llm steps take what is left of a GPU, and that have taken what they claim before any of them has that,
divide it: evenly, once everything that is held there has been measured.

A GPU is known by its name: plans for different machines that name the same GPU share it. Everything here is a value or
arithmetic on values; who keeps the time at which it happens, and one owner for a process, is
`weftline.engine.gpus`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

from weftline.pipelines.placement.budget import CONTEXT, EVERYBODY, KV, OF_OTHERS, RESERVE, claims_of_others, open_kv
from weftline.pipelines.placement.kv_memory import own_kv_bytes, shares
from weftline.pipelines.placement.machine import Machine, Taken
from weftline.pipelines.placement.plan import Claim, DeviceBudget, Plan


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
