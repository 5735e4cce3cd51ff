"""Which tokens the next round computes: one rule.

A sequence has known and computed tokens. A round hands out the difference under one token budget:

    1. running sequences that need one token (they are decoding);
    2. what is left of the budget goes to all others, best rank first: the running ones get a chunk each, and waiting
       ones join, each less what the prefix cache holds.

Pages are taken as tokens are handed out. When there are none, a running sequence gives its pages back and waits again
with everything it knows; it recomputes later, mostly from the prefix cache. That is a paused one before all others,
then the one of the worst rank. The best-ranked sequence can therefore always go on, and no request asks for more than
the pool has: everything finishes. A waiting sequence takes the place of running ones only when they are paused, or
less urgent by MARGIN_MS and more.

A paused sequence is given nothing and keeps its pages as long as nobody needs them.

The schedule decides and computes nothing: `plan` returns a Round, somebody computes it, and `advance` is told the
tokens that came out. Sequences join and leave between rounds only.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from weftline.engine.llm.prefix import PrefixCache
from weftline.engine.llm.sequence import Sequence

MARGIN_MS = 1000.0
"""How much more urgent a waiting sequence must be to take a running one's place: what that one computed is lost."""


@dataclass(frozen=True, slots=True)
class RoundLimits:
    """tokens_max: most tokens of one round. sequences_max: most sequences of one round; paused ones do not count."""

    tokens_max: int = 512
    sequences_max: int = 32


@dataclass(frozen=True, slots=True)
class Share:
    """What one sequence computes in a round: `count` tokens from token `start` on.

    samples: the last of them is the last known token, so the round gives the next one.
    """

    sequence: Sequence
    start: int
    count: int

    @property
    def samples(self) -> bool:
        return self.start + self.count == len(self.sequence.tokens)


@dataclass(frozen=True, slots=True)
class Round:
    """One pass of the model. Decoding sequences come first in `shares`.

    preempted: sequences that gave their pages back to make room.
    """

    shares: tuple[Share, ...]
    preempted: tuple[Sequence, ...] = ()

    @property
    def tokens(self) -> int:
        return sum(share.count for share in self.shares)


@dataclass(slots=True)
class _Draft:
    """A round being put together."""

    budget: int
    shares: dict[int, Share] = field(default_factory=dict)
    preempted: list[Sequence] = field(default_factory=list)


def _rank(sequence: Sequence) -> tuple[float, int]:
    return sequence.rank


def _gives_way(sequence: Sequence) -> tuple[bool, float, int]:
    """Who gives its pages back when there are none: the highest."""
    return (sequence.paused, *sequence.rank)


class Schedule:
    """Holds the live sequences; it alone moves them between states and gives and takes their pages."""

    def __init__(self, limits: RoundLimits, cache: PrefixCache) -> None:
        if limits.tokens_max < 1 or limits.sequences_max < 1:
            raise ValueError(f"{limits}: both limits are at least 1")
        self.limits = limits
        self.cache = cache
        self.pool = cache.pool
        self._places = min(limits.sequences_max, limits.tokens_max)  # each sequence of a round has at least one token
        self._waiting: list[Sequence] = []
        self._running: list[Sequence] = []

    @property
    def waiting(self) -> tuple[Sequence, ...]:
        return tuple(self._waiting)

    @property
    def running(self) -> tuple[Sequence, ...]:
        return tuple(self._running)

    def add(self, sequence: Sequence) -> None:
        """Let a sequence wait for its turn. Its limit must fit the pool, or it could never finish."""
        if self.pool.pages_for(sequence.limit) > self.pool.size:
            raise ValueError(f"sequence {sequence.id} may reach {sequence.limit} tokens, more than the pool holds")
        self._waiting.append(sequence)

    def leave(self, sequence: Sequence, event: str) -> None:
        """Take a sequence out for good; its pages are free or idle at once. event: finish, cancel or fail."""
        sequence.move(event)
        for group in (self._waiting, self._running):
            if sequence in group:
                group.remove(sequence)
        self.pool.drop(sequence.table)

    def expired(self, now_ms: float) -> list[Sequence]:
        """Return the sequences whose deadline has passed."""
        return [sequence for group in (self._running, self._waiting) for sequence in group if sequence.expired(now_ms)]

    def plan(self) -> Round:
        """Return what to compute next; empty when there is nothing."""
        draft = _Draft(self.limits.tokens_max)
        # A sequence that is resumed while others have its place in the round stays where it is until one of them ends.
        active = sorted((s for s in self._running if not s.paused), key=_rank)[: self._places]
        for sequence in active:
            if sequence.remaining == 1:
                self._hand_out(sequence, draft)
        others = [s for s in active if s.remaining > 1] + [s for s in self._waiting if not s.paused]
        joining = True
        for sequence in sorted(others, key=_rank):
            if sequence.state == "running":
                self._hand_out(sequence, draft)
            elif joining:
                joining = self._try_join(sequence, draft)
        shares = sorted(draft.shares.values(), key=lambda share: share.count > 1)
        return Round(tuple(shares), tuple(draft.preempted))

    def advance(self, share: Share, token: int | None) -> None:
        """Note that `share` was computed, and the next token when it gave one."""
        sequence = share.sequence
        sequence.computed += share.count
        self.cache.publish(sequence, share.start)
        if token is not None:
            sequence.tokens.append(token)

    def _hand_out(self, sequence: Sequence, draft: _Draft) -> None:
        count = min(sequence.remaining, draft.budget)
        if count < 1 or sequence.state != "running":
            return
        while not self._try_pages(sequence, count):
            victim = max(self._running, key=_gives_way)
            self._preempt(victim, draft)
            if victim is sequence:
                return
        draft.shares[sequence.id] = Share(sequence, sequence.computed, count)
        draft.budget -= count

    def _preempt(self, victim: Sequence, draft: _Draft) -> None:
        taken_back = draft.shares.pop(victim.id, None)
        draft.budget += taken_back.count if taken_back else 0
        draft.preempted.append(victim)
        victim.move("preempt")
        victim.preemptions += 1
        self._running.remove(victim)
        self._waiting.append(victim)
        self.pool.drop(victim.table)
        victim.computed = 0

    def _try_join(self, sequence: Sequence, draft: _Draft) -> bool:
        """Let a waiting sequence into the round; False when it must wait, and whoever ranks behind it too."""
        if draft.preempted:
            return False  # pages are short: those that were just given back are not handed out to the next in line
        self.cache.join(sequence)
        way = self._make_way(sequence, draft)
        count = min(sequence.remaining, draft.budget)
        if not way or not self._try_pages(sequence, count):
            self.pool.drop(sequence.table)
            sequence.computed = 0
            return False
        self.cache.count(sequence)
        if not sequence.preemptions:
            sequence.cached = sequence.computed
        sequence.move("join")
        self._waiting.remove(sequence)
        self._running.append(sequence)
        draft.shares[sequence.id] = Share(sequence, sequence.computed, count)
        draft.budget -= count
        return True

    def _make_way(self, sequence: Sequence, draft: _Draft) -> bool:
        """Whether a waiting sequence has a place, after taking it from running ones where they must give way to it."""
        if self._has_place(sequence, draft):
            return True
        victims = [s for s in self._running if s.paused or s.due_ms >= sequence.due_ms + MARGIN_MS]
        if not self._has_place(sequence, draft, victims):
            return False
        for victim in sorted(victims, key=_gives_way, reverse=True):
            if victim.paused and self._active() >= self._places:
                continue  # it has pages, but no place in the round that it could give
            self._preempt(victim, draft)
            if self._has_place(sequence, draft):
                return True
        return False

    def _has_place(self, sequence: Sequence, draft: _Draft, without: list[Sequence] | None = None) -> bool:
        """Whether the round and the pool have room for a waiting sequence, if those in `without` were gone."""
        gone = without or []
        active = self._active() - sum(not s.paused for s in gone)
        budget = draft.budget + sum(draft.shares[s.id].count for s in gone if s.id in draft.shares)
        if active >= self._places or budget < 1:
            return False
        # Each active sequence may soon need one more page: joining into the last ones would only bring preemption.
        needed = self._pages_missing(sequence, min(sequence.remaining, budget)) + active
        return needed <= self.pool.available + sum(len(s.table.pages) for s in gone)

    def _active(self) -> int:
        return sum(not sequence.paused for sequence in self._running)

    def _try_pages(self, sequence: Sequence, count: int) -> bool:
        missing = self._pages_missing(sequence, count)
        if not missing:
            return True
        room = self.pool.pages_for(sequence.limit) - self.pool.pages_for(sequence.computed + count)
        return self.pool.try_grow(sequence.table, missing, max(room, 0))

    def _pages_missing(self, sequence: Sequence, count: int) -> int:
        return max(self.pool.pages_for(sequence.computed + count) - len(sequence.table.pages), 0)
