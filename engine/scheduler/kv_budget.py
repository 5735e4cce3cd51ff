"""KV memory budget of one device: how the llm steps on it share memory by demand.

Each step starts with its minimum and never gets less. The rest of the budget, and what calm steps do not use, goes to
starving steps. Inputs are reports of steps and confirmations of earlier orders; outputs are resize orders. The budget
holds no memory itself and reads no clock.

The sum of what steps may hold is within the budget at every moment: a step counts with its last limit until it confirms
a smaller one. A shrinking step therefore confirms before another grows. A step whose worker died counts with its
minimum.

    used       pages of running sequences
    idle       pages of the prefix cache, released for a starving step
    starving   sequences wait or were preempted, and hardly any page is free or idle, for STARVING_MS
    calm       did not starve for CALM_MS: releases what it does not use, except for a margin
    full       hardly any page is free: gets unassigned memory, for its prefix cache

A starving step below an even share gets memory from a step above it, calm or not. A step gives up memory in use only
above an even share and to a step below it, so a steady load moves nothing back and forth.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

Part = tuple[int, int]
"""One instance of a step: (worker, step), as indexes in the plan."""

STARVING_MS = 500.0
"""Time of shortage before memory is moved: waiting for one round is no shortage."""

CALM_MS = 10_000.0
"""Time without shortage before a step gives up unused memory."""

SHORT_SHARE = 0.25
"""A wait is caused by memory if less than this share of the step's memory is free or idle."""

FULL_SHARE = 0.125
"""A step is full when less than this share of its memory is free."""

MARGIN = 1.25
"""A shrinking step keeps this many times the memory of its running sequences."""

REFUSE_MS = 5_000.0
"""Longest wait for the memory of one request. Then an order without change refuses the request."""

STEPS = 8
"""Memory moves in steps of this fraction of the budget, so that one stale report moves little."""

CRUMBS = 64
"""Smallest move: the budget divided by this."""


@dataclass(frozen=True, slots=True)
class KvUse:
    """Report of a step on its KV memory, in bytes.

    waiting:   sequences that wait to run.
    preempted: sequences preempted for lack of memory since the step was opened.
    wanted_bytes: memory that the step needs for a request too long for it now; 0: there is none.
    """

    used_bytes: int
    idle_bytes: int
    free_bytes: int
    waiting: int = 0
    preempted: int = 0
    wanted_bytes: int = 0

    @property
    def total_bytes(self) -> int:
        return self.used_bytes + self.idle_bytes + self.free_bytes


@dataclass(frozen=True, slots=True)
class Resize:
    """Order to resize a part to `bytes`; it confirms the size it then has, that or less in whole pages."""

    part: Part
    bytes: int


@dataclass(slots=True, eq=False)
class _Account:
    """State of one part.

    held:     its limit now: the larger of both while an order is unconfirmed.
    ordered:  the size of an unconfirmed order; None: there is none.
    short_ms: start of the shortage; None: there is none.
    calm_ms:  when it becomes calm, if no shortage occurs until then.
    fresh:    True if it has reported since its last confirmation.
    """

    least: int
    held: int
    use: KvUse | None = None
    ordered: int | None = None
    short_ms: float | None = None
    calm_ms: float = 0.0
    fresh: bool = False

    @property
    def shrinks_by(self) -> int:
        """Bytes released when the unconfirmed order is confirmed."""
        return 0 if self.ordered is None else self.held - self.ordered

    @property
    def lacks(self) -> int:
        """Bytes that its longest request needs beyond those that it holds."""
        return max(0, self.use.wanted_bytes - self.held) if self.use is not None else 0

    @property
    def full(self) -> bool:
        return self.use is not None and self.use.free_bytes < FULL_SHARE * self.use.total_bytes

    @property
    def spare(self) -> int:
        """Bytes that it can give up."""
        return self.held - max(self.least, int((self.use.used_bytes if self.use else self.held) * MARGIN))


class KvBudget:
    """The KV memory of one device. ValueError if the minimums of all parts exceed it."""

    def __init__(self, total_bytes: int, least: Mapping[Part, int]) -> None:
        if sum(least.values()) > total_bytes:
            raise ValueError(f"parts need {sum(least.values())} bytes at least, and the budget is {total_bytes}")
        self.total_bytes = total_bytes
        self._accounts = {part: _Account(bytes, bytes) for part, bytes in least.items()}

    @property
    def held(self) -> dict[Part, int]:
        """Limit of each part now, in bytes."""
        return {part: account.held for part, account in self._accounts.items()}

    @property
    def used(self) -> dict[Part, int]:
        """Bytes used by the running sequences of each part, by its last report."""
        return {part: account.use.used_bytes if account.use else 0 for part, account in self._accounts.items()}

    @property
    def unassigned(self) -> int:
        """Bytes that are assigned to no part."""
        return self.total_bytes - sum(account.held for account in self._accounts.values())

    def died(self, part: Part) -> None:
        """Reset a part whose worker died: it restarts with its minimum."""
        account = self._accounts[part]
        self._accounts[part] = _Account(account.least, account.least)

    def remove(self, part: Part) -> int:
        """Remove a part that has ended for good; what it held is for the others. Return its minimum."""
        return self._accounts.pop(part).least

    def rests(self, part: Part) -> None:
        """Exclude a part that is going to sleep: it neither gets nor gives memory until it reports."""
        account = self._accounts[part]
        account.use, account.fresh, account.short_ms = None, False, None

    def confirmed(self, part: Part, bytes: int) -> None:
        """Confirm that a part holds `bytes`; ValueError if that is above its limit."""
        account = self._accounts[part]
        if not 0 <= bytes <= account.held:
            raise ValueError(f"it holds {bytes} bytes of KV memory and may hold {account.held}")
        account.held = max(bytes, account.least)  # its least is kept for its next worker
        account.ordered, account.fresh = None, False

    def reported(self, part: Part, use: KvUse, now_ms: float) -> None:
        """Process a report. One of more than the limit is older than the last order, and is ignored."""
        account = self._accounts[part]
        if use.total_bytes > account.held:
            return
        before = account.use.preempted if account.use else 0
        account.use, account.fresh = use, True
        scarce = use.free_bytes + use.idle_bytes < SHORT_SHARE * use.total_bytes
        if use.preempted > before or (use.waiting and scarce) or account.lacks:
            account.short_ms = now_ms if account.short_ms is None else account.short_ms
            account.calm_ms = now_ms + CALM_MS
        else:
            account.short_ms = None

    def decide(self, now_ms: float) -> list[Resize]:
        """Return the orders to send now; each part has at most one unconfirmed order."""
        orders: list[Resize] = []
        step = max(1, self.total_bytes // STEPS)
        coming = sum(account.shrinks_by for account in self._accounts.values())
        for taker in self._waiting(lambda one: one.short_ms is not None and now_ms - one.short_ms >= STARVING_MS):
            account = self._accounts[taker]
            wanted = max(step, account.lacks)
            if min(step, self.unassigned) >= self._crumb:
                orders.append(self._grow(taker, min(wanted, self.unassigned)))
            elif coming:
                coming -= min(coming, step)
            elif taken := self._taken_for(taker, wanted, now_ms):
                orders += taken
            elif account.lacks and account.short_ms is not None and now_ms - account.short_ms >= REFUSE_MS:
                orders.append(self._grow(taker, 0))
        for taker in self._waiting(lambda one: one.short_ms is None and one.full):
            if self.unassigned >= 2 * step:  # one is kept for the next starving part
                orders.append(self._grow(taker, step))
        return orders

    @property
    def _crumb(self) -> int:
        return max(1, self.total_bytes // CRUMBS)

    def _waiting(self, wants: Callable[[_Account], bool]) -> list[Part]:
        """Return the parts that want memory and have no unconfirmed order, smallest first."""
        found = [part for part, one in self._accounts.items() if one.fresh and one.ordered is None and wants(one)]
        return sorted(found, key=lambda part: (self._accounts[part].held, part))

    def _grow(self, part: Part, bytes: int) -> Resize:
        account = self._accounts[part]
        account.held += bytes
        account.ordered = account.held
        return Resize(part, account.held)

    def _taken_for(self, taker: Part, wanted: int, now_ms: float) -> list[Resize]:
        """Return an order to shrink the part with the most to spare; the taker grows after it is confirmed."""
        even = self.total_bytes // len(self._accounts)
        owed = even - self._accounts[taker].held
        offers: list[tuple[int, Part]] = []
        for part, one in self._accounts.items():
            if part == taker or one.ordered is not None or one.use is None:
                continue
            calm = one.short_ms is None and one.calm_ms <= now_ms
            fair = min(one.held - max(one.least, even), owed)
            offers.append((max(one.spare if calm else 0, fair), part))
        most, giver = max(offers, default=(0, taker))
        if min(most, wanted) < self._crumb:
            return []
        account = self._accounts[giver]
        account.ordered = account.held - min(most, wanted)
        return [Resize(giver, account.ordered)]
