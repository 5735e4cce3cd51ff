"""Which tokens the next round computes: one rule.

A sequence has known and computed tokens. A round hands out the difference under one token budget:

    1. sequences that need one token (they are decoding), then the other running ones, a chunk each;
    2. what is left of the budget goes to waiting sequences, best rank first, each less what the prefix cache holds.

Pages are taken as tokens are handed out. When there are none, the running sequence of the worst rank gives its pages
back and waits again with everything it knows; it recomputes later, mostly from the prefix cache. The best-ranked
sequence can therefore always go on, and no request asks for more than the pool has: everything finishes.

The schedule decides and computes nothing: `plan` returns a Round, somebody computes it, and `advance` is told the
tokens that came out. Sequences join and leave between rounds only.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from weftline.engine.llm.prefix import PrefixCache
from weftline.engine.llm.sequence import Sequence


@dataclass(frozen=True, slots=True)
class RoundLimits:
    """tokens_max: most tokens of one round. sequences_max: most sequences that hold pages at a time."""

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


class Schedule:
    """Holds the live sequences; it alone moves them between states and gives and takes their pages."""

    def __init__(self, limits: RoundLimits, cache: PrefixCache) -> None:
        if limits.tokens_max < 1 or limits.sequences_max < 1:
            raise ValueError(f"{limits}: both limits are at least 1")
        self.limits = limits
        self.cache = cache
        self.pool = cache.pool
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

    def plan(self) -> Round:
        """Return what to compute next; empty when there is nothing."""
        draft = _Draft(self.limits.tokens_max)
        by_rank = sorted(self._running, key=lambda s: s.rank)
        for sequence in [s for s in by_rank if s.remaining == 1] + [s for s in by_rank if s.remaining > 1]:
            if draft.budget > 0 and sequence.state == "running":
                self._hand_out(sequence, draft)
        if not draft.preempted:
            self._join_waiting(draft)
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
        while not self._try_pages(sequence, count):
            victim = max(self._running, key=lambda s: s.rank)
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

    def _join_waiting(self, draft: _Draft) -> None:
        for sequence in sorted(self._waiting, key=lambda s: s.rank):
            if draft.budget < 1 or len(self._running) >= self.limits.sequences_max:
                return
            self.cache.join(sequence)
            count = min(sequence.remaining, draft.budget)
            # Each running sequence may soon need one more page: joining into the last ones would only bring preemption.
            spare = len(self._running)
            needed = self._pages_missing(sequence, count)
            if needed + spare > self.pool.available or not self._try_pages(sequence, count):
                self.pool.drop(sequence.table)
                sequence.computed = 0
                return
            self.cache.count(sequence)
            if not sequence.preemptions:
                sequence.cached = sequence.computed
            sequence.move("join")
            self._waiting.remove(sequence)
            self._running.append(sequence)
            draft.shares[sequence.id] = Share(sequence, sequence.computed, count)
            draft.budget -= count

    def _try_pages(self, sequence: Sequence, count: int) -> bool:
        missing = self._pages_missing(sequence, count)
        if not missing:
            return True
        room = self.pool.pages_for(sequence.limit) - self.pool.pages_for(sequence.computed + count)
        return self.pool.try_grow(sequence.table, missing, max(room, 0))

    def _pages_missing(self, sequence: Sequence, count: int) -> int:
        return max(self.pool.pages_for(sequence.computed + count) - len(sequence.table.pages), 0)
