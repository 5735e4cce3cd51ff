"""How the llm steps on one device share its KV memory: who gives some up, and who may take it.

Each step starts with its least and is never told to have less; what is left of the budget, and what calm steps do not
need, goes to steps that starve. A budget is told what steps report and what became of earlier orders, and answers with
orders. It holds no memory itself, and reads no clock.

The sum of what steps may hold is within the budget at every moment: a step counts with what it was last allowed until
it has confirmed that it holds less, so a giver shrinks first and only then does a taker grow. A step whose worker died
holds nothing any more, and counts with the least it will start with again.

    used       pages of running sequences
    idle       pages of the prefix cache: worth keeping, and given up for a step that starves
    starving   sequences wait or were preempted, and hardly any page is free or idle, for STARVING_MS
    calm       did not starve for CALM_MS: gives what it does not use, but for a margin
    full       hardly any page is free: gets what nobody has, for its prefix cache

A starving step with less than an even share gets memory from one with more than that, calm or not. Nobody gives what it
uses beyond an even share to one that has as much, so under a steady load nothing moves to and fro.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

Part = tuple[int, int]
"""One instance of a step: (worker, step), as indexes in the plan."""

STARVING_MS = 500.0
"""How long a step must be short before memory is moved: a round's waiting is no shortage."""

CALM_MS = 10_000.0
"""How long a step must have been without shortage before it gives up what it does not use."""

SHORT_SHARE = 0.25
"""Waiting is for memory when less than this share of a step's own is free or idle; else something else holds it up."""

FULL_SHARE = 0.125
"""A step is full when less than this share of its memory is free."""

MARGIN = 1.25
"""A giver keeps so many times what its running sequences use."""

STEPS = 8
"""Memory moves in this many parts of the budget, so that one report too many moves little."""

CRUMBS = 64
"""Less than this part of the budget is not worth a move."""


@dataclass(frozen=True, slots=True)
class KvUse:
    """What a step says of its KV memory, in bytes.

    waiting:   sequences that wait to run.
    preempted: sequences that gave way for lack of memory, since the step was opened.
    """

    used_bytes: int
    idle_bytes: int
    free_bytes: int
    waiting: int = 0
    preempted: int = 0

    @property
    def total_bytes(self) -> int:
        return self.used_bytes + self.idle_bytes + self.free_bytes


@dataclass(frozen=True, slots=True)
class Resize:
    """An order: this part is to hold so many bytes; it confirms what it then has, which is that or less in pages."""

    part: Part
    bytes: int


@dataclass(slots=True, eq=False)
class _Account:
    """What a budget knows of one part.

    held:     what it may hold now: the larger of both while an order is on its way.
    ordered:  what it was told to hold, and has not confirmed; None: nothing is on its way.
    short_ms: since when it starves; None: it does not.
    calm_ms:  when it is calm, if nothing happens until then.
    fresh:    it has reported since it confirmed its last order.
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
        """What it gives up once it confirms the order that is on its way."""
        return 0 if self.ordered is None else self.held - self.ordered

    @property
    def full(self) -> bool:
        return self.use is not None and self.use.free_bytes < FULL_SHARE * self.use.total_bytes

    @property
    def spare(self) -> int:
        """What it can do without."""
        return self.held - max(self.least, int((self.use.used_bytes if self.use else self.held) * MARGIN))


class KvBudget:
    """The KV memory of one device. ValueError when the least of all parts is more than it."""

    def __init__(self, total_bytes: int, least: Mapping[Part, int]) -> None:
        if sum(least.values()) > total_bytes:
            raise ValueError(f"parts need {sum(least.values())} bytes at least, and the budget is {total_bytes}")
        self.total_bytes = total_bytes
        self._accounts = {part: _Account(bytes, bytes) for part, bytes in least.items()}

    @property
    def held(self) -> dict[Part, int]:
        """The most that each part may hold at this moment, in bytes."""
        return {part: account.held for part, account in self._accounts.items()}

    @property
    def used(self) -> dict[Part, int]:
        """What running sequences of each part use, in bytes, by its last report."""
        return {part: account.use.used_bytes if account.use else 0 for part, account in self._accounts.items()}

    @property
    def unassigned(self) -> int:
        """Bytes that nobody may hold."""
        return self.total_bytes - sum(account.held for account in self._accounts.values())

    def died(self, part: Part) -> None:
        """The part's worker is gone, and with it all it held; it will start again with its least."""
        account = self._accounts[part]
        self._accounts[part] = _Account(account.least, account.least)

    def rests(self, part: Part) -> None:
        """The part is about to give up all it holds: until then it neither wants memory nor can do without any."""
        account = self._accounts[part]
        account.use, account.fresh, account.short_ms = None, False, None

    def confirmed(self, part: Part, bytes: int) -> None:
        """The part holds `bytes` now; ValueError when that is more than it may hold."""
        account = self._accounts[part]
        if not 0 <= bytes <= account.held:
            raise ValueError(f"it holds {bytes} bytes of KV memory and may hold {account.held}")
        account.held = max(bytes, account.least)  # its least is kept for its next worker
        account.ordered, account.fresh = None, False

    def reported(self, part: Part, use: KvUse, now_ms: float) -> None:
        """Take in what a part says. A report of more than it may hold was overtaken by an order, and is ignored."""
        account = self._accounts[part]
        if use.total_bytes > account.held:
            return
        before = account.use.preempted if account.use else 0
        account.use, account.fresh = use, True
        scarce = use.free_bytes + use.idle_bytes < SHORT_SHARE * use.total_bytes
        if use.preempted > before or (use.waiting and scarce):
            account.short_ms = now_ms if account.short_ms is None else account.short_ms
            account.calm_ms = now_ms + CALM_MS
        else:
            account.short_ms = None

    def decide(self, now_ms: float) -> list[Resize]:
        """Return orders to carry out now, in any order; each part has at most one that is not confirmed."""
        orders: list[Resize] = []
        step = max(1, self.total_bytes // STEPS)
        coming = sum(account.shrinks_by for account in self._accounts.values())
        for taker in self._waiting(lambda one: one.short_ms is not None and now_ms - one.short_ms >= STARVING_MS):
            if min(step, self.unassigned) >= self._crumb:
                orders.append(self._grow(taker, min(step, self.unassigned)))
            elif coming:
                coming -= min(coming, step)
            else:
                orders += self._taken_for(taker, step, now_ms)
        for taker in self._waiting(lambda one: one.short_ms is None and one.full):
            if self.unassigned >= 2 * step:  # one is kept for whoever starves next
                orders.append(self._grow(taker, step))
        return orders

    @property
    def _crumb(self) -> int:
        return max(1, self.total_bytes // CRUMBS)

    def _waiting(self, wants: Callable[[_Account], bool]) -> list[Part]:
        """Return the parts that want memory and have nothing on its way, those with least first."""
        found = [part for part, one in self._accounts.items() if one.fresh and one.ordered is None and wants(one)]
        return sorted(found, key=lambda part: (self._accounts[part].held, part))

    def _grow(self, part: Part, bytes: int) -> Resize:
        account = self._accounts[part]
        account.held += bytes
        account.ordered = account.held
        return Resize(part, account.held)

    def _taken_for(self, taker: Part, wanted: int, now_ms: float) -> list[Resize]:
        """Return an order for the part that can best do without, so that the taker can grow once it is confirmed."""
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
