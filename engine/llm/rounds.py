"""LLM scheduling rule: tokens of each sequence in the next round.

A sequence has known and computed tokens. A round hands out the difference under one token budget:

    1. running sequences that need one token (they are decoding), with the guesses that somebody made for them;
    2. what is left of the budget goes to all others, best rank first: the running ones get a chunk each, and waiting
       ones join, each less what the prefix cache holds. After a want of memory it is no more than `plan` is told
       (`weftline.nodes.out_of_memory`).

A prompt that is longer than a round's budget is read in chunks. While others decode, such chunks get no more than the
`paced` tokens that `plan` is told, so that the others' rounds stay short (`weftline.engine.llm.pace`).

Pages are taken as tokens are handed out. When there are none, a running sequence gives its pages back and waits again
with everything it knows; it recomputes later, mostly from the prefix cache. That is a paused one before all others,
then the one of the worst rank. The best-ranked sequence can therefore always go on, and no request asks for more than
the pool has: everything finishes. A waiting sequence takes the place of running ones only when they are paused, or
less urgent by MARGIN_MS and more. Guesses never take a page from anybody.

A paused sequence is given nothing and keeps its pages as long as nobody needs them.

The schedule decides and computes nothing: `plan` returns a Round, somebody copies its pages and computes it, and
`advance` is told the tokens that came out. Sequences join, fork and leave between rounds only.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from operator import attrgetter

from weftline.engine.llm.prefix import PrefixCache
from weftline.engine.llm.sequence import UNKNOWN, Sequence

MARGIN_MS = 1000.0
"""How much more urgent a waiting sequence must be to take a running one's place: what that one computed is lost."""


@dataclass(frozen=True, slots=True)
class RoundLimits:
    """tokens_max: most tokens of one round. sequences_max: most sequences of one round; paused ones do not count."""

    tokens_max: int = 512
    sequences_max: int = 32


@dataclass(slots=True)
class Share:
    """What one sequence computes in a round: `count` tokens from token `start` on, `draft` being the last of them.

    samples: its last known token is among them, so the round gives the next one, and what follows each guess.
    """

    sequence: Sequence
    start: int
    count: int
    draft: tuple[int, ...] = ()
    samples: bool = True

    @property
    def plain(self) -> bool:
        """Whether it is what nearly all shares are: one token of a sequence that decodes, and no guesses."""
        return self.count == 1 and self.samples and not self.sequence.forks and not self.sequence.whole

    @property
    def tokens(self) -> list[int]:
        """The tokens it computes, guesses included."""
        return [*self.sequence.tokens[self.start : self.start + self.count - len(self.draft)], *self.draft]

    @property
    def rows(self) -> int:
        """For how many of its tokens, counted from the last, somebody wants to know what the model says next."""
        if self.sequence.whole and self.start < self.sequence.prompt:
            return self.count
        return 1 + len(self.draft) if self.samples else 0


@dataclass(frozen=True, slots=True)
class Round:
    """One pass of the model. Decoding sequences come first in `shares`.

    preempted: sequences that gave their pages back to make room.
    copies:    (from, to) pages to copy before anything is computed, in this order.
    decoding:  how many running sequences needed one token.
    """

    shares: tuple[Share, ...]
    preempted: tuple[Sequence, ...] = ()
    copies: tuple[tuple[int, int], ...] = ()
    decoding: int = 0

    @property
    def tokens(self) -> int:
        return sum(share.count for share in self.shares)


@dataclass(slots=True)
class _Draft:
    """A round being put together; shares and copies by their sequence's order.

    reserved: tokens of the budget that are for sequences whose turn comes yet; guesses get none of them.
    """

    budget: int
    paced: int
    reserved: int = 0
    shares: dict[int, Share] = field(default_factory=dict)
    preempted: list[Sequence] = field(default_factory=list)
    copies: dict[int, tuple[int, int]] = field(default_factory=dict)


_rank = attrgetter("rank")


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

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """Let `child`, whose tokens are `parent`'s, run beside it on the same pages."""
        for page in parent.table.pages:
            self.pool.share(child.table, page)
        child.computed = parent.computed
        child.cached = parent.cached
        child.move("join")
        self._running.append(child)

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

    def resize(self, pages: int) -> tuple[int, list[Sequence]]:
        """Grow or shrink the pool to `pages`, or to what its sequences may need; return what it is, and who gave way.

        Sequences with pages beyond the new end give them back and wait again.
        """
        least = max((self.pool.pages_for(s.limit) for s in [*self._running, *self._waiting]), default=1)
        pages, draft = max(pages, least), _Draft(0, 0)
        for sequence in [s for s in self._running if any(page >= pages for page in s.table.pages)]:
            self._preempt(sequence, draft)
        return self.pool.resize(pages), draft.preempted

    def plan(self, pace: Callable[[int], int | None] = lambda decoding: None, prompts_max: int | None = None) -> Round:
        """Return what to compute next; empty when there is nothing.

        pace: from how many sequences decode to the most tokens for prompts longer than a round; None: no such limit.
        prompts_max: most tokens for sequences that do not decode, for want of memory; None: as the limits say.
        """
        draft = _Draft(self.limits.tokens_max, self.limits.tokens_max)
        # A sequence that is resumed while others have its place in the round stays where it is until one of them ends.
        active = sorted((s for s in self._running if not s.paused), key=_rank)[: self._places]
        decoding: list[Sequence] = []
        others: list[Sequence] = []
        for sequence in active:
            if len(sequence.tokens) >= sequence.limit and sequence.tokens[-1] == UNKNOWN:
                continue  # its last token is on its way
            (decoding if len(sequence.tokens) - sequence.computed == 1 else others).append(sequence)
        draft.reserved = len(decoding)
        for sequence in decoding:
            draft.reserved -= 1
            if not self._try_usual(sequence, draft):
                self._hand_out(sequence, draft)
        if prompts_max is not None:
            draft.budget = min(draft.budget, max(1, prompts_max))
        paced = pace(len(decoding)) if others or self._waiting else None
        draft.paced = draft.budget if paced is None else max(1, paced)
        if self._waiting:
            others = sorted([*others, *(s for s in self._waiting if not s.paused)], key=_rank)
        joining = True
        for sequence in others:
            if sequence.state == "running":
                self._hand_out(sequence, draft)
            elif joining:
                joining = self._try_join(sequence, draft)
        shares = list(draft.shares.values())
        if others or self._waiting:
            shares.sort(key=lambda share: share.count - len(share.draft) > 1)
        return Round(tuple(shares), tuple(draft.preempted), tuple(draft.copies.values()), len(decoding))

    def advance(self, share: Share, tokens: SequenceOf[int] = ()) -> None:
        """Note that `share` was computed, and the tokens that came after the known ones: right guesses, then one."""
        sequence = share.sequence
        wrong = len(share.draft) - max(len(tokens) - 1, 0)
        sequence.computed += share.count - wrong
        sequence.tokens += tokens
        if share.start // self.pool.page_tokens != sequence.computed // self.pool.page_tokens:
            self.cache.publish(sequence, share.start, sequence.computed)

    def promise(self, share: Share) -> None:
        """Note that a decoding `share` is on its way: its sequence can be planned further before the token is known."""
        share.sequence.computed += 1
        share.sequence.tokens.append(UNKNOWN)

    def settle(self, share: Share, token: int) -> None:
        """Note the token that was promised."""
        sequence, end = share.sequence, share.start + 1
        sequence.tokens[end] = token
        filled = end % self.pool.page_tokens == 0
        if filled and sequence.computed >= end:  # else it gave way meanwhile, and its pages are gone
            self.cache.publish(sequence, share.start, end)

    def _try_usual(self, sequence: Sequence, draft: _Draft) -> bool:
        """Hand out one token where nothing has to be decided: its page is there, and is the sequence's alone."""
        pages, index = sequence.table.pages, sequence.computed // self.pool.page_tokens
        if sequence.draft or index >= len(pages) or draft.budget < 1 or sequence.state != "running":
            return False
        if self.pool.references(pages[index]) != 1:
            return False
        draft.shares[sequence.order] = Share(sequence, sequence.computed, 1)
        draft.budget -= 1
        return True

    def _hand_out(self, sequence: Sequence, draft: _Draft) -> None:
        count = self._allowed(sequence, draft)
        if count < 1 or sequence.state != "running":
            return
        most = max(0, draft.budget - count - draft.reserved)
        guesses = sequence.draft[:most] if sequence.draft and count == sequence.remaining else ()
        if guesses and not self._try_pages(sequence, count + len(guesses), draft):
            guesses = ()
        while not self._try_pages(sequence, count, draft):
            victim = max(self._running, key=_gives_way)
            self._preempt(victim, draft)
            if victim is sequence:
                return
        self._give(sequence, count, guesses, draft)

    def _allowed(self, sequence: Sequence, draft: _Draft) -> int:
        """How many tokens the budget has for a sequence."""
        budget = min(draft.budget, draft.paced) if self._is_long(sequence) else draft.budget
        return min(len(sequence.tokens) - sequence.computed, budget)

    def _is_long(self, sequence: Sequence) -> bool:
        return len(sequence.tokens) - sequence.computed > 1 and (
            len(sequence.tokens) - sequence.cached > self.limits.tokens_max
        )

    def _give(self, sequence: Sequence, count: int, guesses: tuple[int, ...], draft: _Draft) -> None:
        samples = sequence.computed + count == len(sequence.tokens)
        draft.shares[sequence.order] = Share(sequence, sequence.computed, count + len(guesses), guesses, samples)
        draft.budget -= count + len(guesses)
        if self._is_long(sequence):
            draft.paced -= count

    def _preempt(self, victim: Sequence, draft: _Draft) -> None:
        taken_back = draft.shares.pop(victim.order, None)
        draft.copies.pop(victim.order, None)
        draft.budget += taken_back.count if taken_back else 0
        draft.preempted.append(victim)
        victim.move("preempt")
        victim.preemptions += 1
        self._running.remove(victim)
        self._waiting.append(victim)
        self.pool.drop(victim.table)
        victim.computed = 0
        victim.draft = ()

    def _try_join(self, sequence: Sequence, draft: _Draft) -> bool:
        """Let a waiting sequence into the round; False when it must wait, and whoever ranks behind it too."""
        if draft.preempted:
            return False  # pages are short: those that were just given back are not handed out to the next in line
        self.cache.join(sequence)
        if not sequence.preemptions:
            sequence.cached = sequence.computed
        way = self._make_way(sequence, draft)
        count = self._allowed(sequence, draft)
        if count < 1 and way and draft.budget:
            self.pool.drop(sequence.table)  # only the long prompts' part of the budget is spent: others may still join
            sequence.computed = 0
            return True
        if not way or not self._try_pages(sequence, count, draft):
            self.pool.drop(sequence.table)
            sequence.computed = 0
            return False
        self.cache.count(sequence)
        sequence.move("join")
        self._waiting.remove(sequence)
        self._running.append(sequence)
        self._give(sequence, count, (), draft)
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
        budget = draft.budget + sum(draft.shares[s.order].count for s in gone if s.order in draft.shares)
        if active >= self._places or budget < 1:
            return False
        # Each active sequence may soon need one more page: joining into the last ones would only bring preemption.
        needed = self._pages_missing(sequence, min(sequence.remaining, budget)) + active
        return needed <= self.pool.available + sum(len(s.table.pages) for s in gone)

    def _active(self) -> int:
        return sum(not sequence.paused for sequence in self._running)

    def _try_pages(self, sequence: Sequence, count: int, draft: _Draft) -> bool:
        """Give a sequence the pages for `count` more tokens, and one of its own where it would write a shared one."""
        pool, table, end = self.pool, sequence.table, sequence.computed + count
        missing = -(-end // pool.page_tokens) - len(table.pages)
        if missing > 0:
            room = pool.pages_for(sequence.limit) - pool.pages_for(end)
            if not pool.try_grow(table, missing, max(room, 0)):
                return False
        first = sequence.computed // pool.page_tokens
        if pool.is_shared(table, first):
            copy = pool.try_own(table, first)
            if copy is None:
                return False
            draft.copies[sequence.order] = copy
        return True

    def _pages_missing(self, sequence: Sequence, count: int) -> int:
        return max(self.pool.pages_for(sequence.computed + count) - len(sequence.table.pages), 0)
