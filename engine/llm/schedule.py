"""LLM scheduling: which tokens of which sequences the next round computes.

A sequence has known and computed tokens. A round assigns the difference under one token budget:

    1. running sequences that need one token (decoding), with their draft tokens;
    2. the rest of the budget goes to the others, best rank first: running ones get a chunk each, and waiting ones join,
       each less its cached prefix. After an out-of-memory error the budget is at most `prompts_max`
       (`weftline.nodes.out_of_memory`).

A prompt longer than a round's budget is computed in chunks. While others decode, such chunks get at most `pace(...)`
tokens together, so that rounds stay short (`weftline.engine.llm.prefill_pace`).

With several callers each has an equal share of places and pages, and the prompts of the caller that used the fewest
tokens come first (`weftline.engine.llm.shares`); ranks order the sequences of a caller. A sequence beyond its caller's
share sits rounds out, and is preempted at most once for the pages of a caller below its share.

Pages are allocated as tokens are scheduled. When none are left, a running sequence is preempted: it releases its pages,
waits with all its known tokens, and is recomputed later, mostly from the prefix cache. Paused sequences are preempted
first, then the worst rank. The best-ranked sequence can therefore always continue, and no request may need more than
the whole pool: everything finishes. A waiting sequence preempts running ones only when they are paused, or less urgent
by at least MARGIN_MS. Draft tokens never preempt.

A paused sequence is not scheduled and keeps its pages until another needs them.

The schedule only decides: `plan` returns a Round, the executor copies its pages and computes it, and `advance` records
the resulting tokens. Sequences join, fork and leave between rounds only.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field, replace
from operator import attrgetter

from weftline.engine.llm.kv_cache import PrefixCache
from weftline.engine.llm.sequence import UNKNOWN, Sequence
from weftline.engine.llm.shares import CallerShares

MARGIN_MS = 1000.0
"""Urgency by which a waiting sequence must exceed a running one to preempt it: preemption loses computed tokens."""


@dataclass(frozen=True, slots=True)
class RoundLimits:
    """tokens_max: most tokens of one round. sequences_max: most sequences of one round; paused ones do not count."""

    tokens_max: int = 512
    sequences_max: int = 32


@dataclass(slots=True)
class ScheduledChunk:
    """Tokens that one sequence computes in a round: `count` tokens from token `start` on, the last of them `draft`.

    samples:   its last known token is among them, so the round samples the next one, and one after each draft token.
    in_flight: the device computes it while the next round is planned.
    """

    sequence: Sequence
    start: int
    count: int
    draft: tuple[int, ...] = ()
    samples: bool = True
    in_flight: bool = False

    @property
    def plain(self) -> bool:
        """Return whether it is one token of a decoding sequence without draft tokens, as most chunks are."""
        sequence = self.sequence
        if self.count != 1 or not self.samples or sequence.forks or sequence.skips_prefix_cache:
            return False
        return not sequence.images or self.start >= sequence.prompt  # a prompt's last token may be a picture's

    @property
    def tokens(self) -> list[int]:
        """Return the tokens to compute, draft tokens included."""
        return [*self.sequence.tokens[self.start : self.start + self.count - len(self.draft)], *self.draft]

    @property
    def rows(self) -> int:
        """Return the number of its tokens, from the end, whose logits are needed."""
        if self.sequence.skips_prefix_cache and self.start < self.sequence.prompt:
            return self.count
        return 1 + len(self.draft) if self.samples else 0


@dataclass(frozen=True, slots=True)
class Round:
    """One pass of the model. Decoding sequences come first in `chunks`.

    preempted: sequences that released their pages.
    copies:    (from, to) pages to copy before anything is computed, in this order.
    decoding:  number of running sequences that needed one token.
    """

    chunks: tuple[ScheduledChunk, ...]
    preempted: tuple[Sequence, ...] = ()
    copies: tuple[tuple[int, int], ...] = ()
    decoding: int = 0

    @property
    def tokens(self) -> int:
        return sum(chunk.count for chunk in self.chunks)


@dataclass(slots=True)
class _RoundPlan:
    """A round under construction; chunks and copies by their sequence's order.

    fair:     by the shares of callers.
    reserved: tokens of the budget for decoding sequences still to be scheduled; draft tokens cannot use them.
    """

    budget: int
    paced: int
    fair: bool = False
    reserved: int = 0
    chunks: dict[int, ScheduledChunk] = field(default_factory=dict)
    preempted: list[Sequence] = field(default_factory=list)
    copies: dict[int, tuple[int, int]] = field(default_factory=dict)


_rank = attrgetter("rank")


def _preemption_key(sequence: Sequence) -> tuple[bool, float, int]:
    """Return the preemption order: the highest is preempted first."""
    return (sequence.paused, *sequence.rank)


class Schedule:
    """The live sequences; only the schedule changes their states and their pages."""

    def __init__(self, limits: RoundLimits, cache: PrefixCache) -> None:
        if limits.tokens_max < 1 or limits.sequences_max < 1:
            raise ValueError(f"{limits}: both limits are at least 1")
        self.limits = limits
        self.cache = cache
        self.pool = cache.pool
        self._places = min(limits.sequences_max, limits.tokens_max)  # each sequence of a round has at least one token
        self._waiting: list[Sequence] = []
        self._running: list[Sequence] = []
        self._shares = CallerShares()

    @property
    def waiting(self) -> tuple[Sequence, ...]:
        return tuple(self._waiting)

    @property
    def running(self) -> tuple[Sequence, ...]:
        return tuple(self._running)

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence. Its limit must fit the pool, or it could never finish."""
        if self.pool.pages_for(sequence.limit) > self.pool.size:
            raise ValueError(f"sequence {sequence.id} may reach {sequence.limit} tokens, more than the pool holds")
        self._waiting.append(sequence)
        self._shares.enter(sequence.caller)

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """Start `child`, whose tokens are `parent`'s, on the same pages."""
        for page in parent.table.pages:
            self.pool.share(child.table, page)
        child.computed = parent.computed
        child.cached = parent.cached
        child.move("join")
        self._running.append(child)
        self._shares.enter(child.caller)

    def leave(self, sequence: Sequence, event: str) -> None:
        """Remove a sequence; its pages are free or idle at once. event: finish, cancel or fail."""
        sequence.move(event)
        for group in (self._waiting, self._running):
            if sequence in group:
                group.remove(sequence)
                self._shares.exit(sequence.caller)
        self.pool.drop(sequence.table)

    def resize(self, pages: int) -> tuple[int, list[Sequence]]:
        """Resize the pool to `pages`, or to what its sequences may need; return its size and the preempted sequences.

        Sequences with pages beyond the new end are preempted.
        """
        least = max((self.pool.pages_for(s.limit) for s in [*self._running, *self._waiting]), default=1)
        pages, plan = max(pages, least), _RoundPlan(0, 0)
        for sequence in [s for s in self._running if any(page >= pages for page in s.table.pages)]:
            self._preempt(sequence, plan)
        return self.pool.resize(pages), plan.preempted

    def plan(self, pace: Callable[[int], int | None] = lambda decoding: None, prompts_max: int | None = None) -> Round:
        """Return the next round; empty when there is nothing to compute.

        pace: maps the number of decoding sequences to the most tokens for prompts longer than a round; None: no limit.
        prompts_max: most tokens for sequences that do not decode, after out-of-memory errors; None: no extra limit.
        """
        if not self._shares.contended:
            return self._plan(pace, prompts_max, False)
        round = self._plan(pace, prompts_max, True)
        if round.chunks:
            return round
        # by rank alone the best sequence can always continue, so that everything finishes
        other = self._plan(pace, prompts_max, False)
        return replace(other, preempted=round.preempted + other.preempted)

    def _plan(self, pace: Callable[[int], int | None], prompts_max: int | None, fair: bool) -> Round:
        """Return the next round; fair: by the shares of callers, otherwise by rank alone."""
        plan = _RoundPlan(self.limits.tokens_max, self.limits.tokens_max, fair)
        # A resumed sequence whose place in the round is occupied waits until another sequence ends.
        active = sorted((s for s in self._running if not s.paused), key=_rank)
        left_out: list[Sequence] = []
        if fair:
            waiting = sorted((s for s in self._waiting if not s.paused), key=_rank)
            active, left_out = self._shares.choose(active, waiting, self._places)
        active = active[: self._places]
        decoding: list[Sequence] = []
        others: list[Sequence] = []
        for sequence in active:
            if len(sequence.tokens) >= sequence.limit and sequence.tokens[-1] == UNKNOWN:
                continue  # its last token is in flight
            (decoding if len(sequence.tokens) - sequence.computed == 1 else others).append(sequence)
        plan.reserved = len(decoding)
        for sequence in decoding:
            plan.reserved -= 1
            if not self._try_schedule_one(sequence, plan):
                self._schedule_chunk(sequence, plan)
        if prompts_max is not None:
            plan.budget = min(plan.budget, max(1, prompts_max))
        paced = pace(len(decoding)) if others or self._waiting else None
        plan.paced = plan.budget if paced is None else max(1, paced)
        if self._waiting:
            others += (s for s in self._waiting if not s.paused)
        if self._waiting or fair:
            others.sort(key=self._shares.order if fair else _rank)
        joining = True
        for sequence in others:
            if sequence.state == "running":
                if len(plan.chunks) < self._places:
                    self._schedule_chunk(sequence, plan)
            elif joining:
                joining = self._try_join(sequence, plan)
        for sequence in left_out:
            if len(plan.chunks) >= self._places:
                break
            self._schedule_chunk(sequence, plan)  # in the place of one that could not join
        chunks = list(plan.chunks.values())
        if others or self._waiting:
            chunks.sort(key=lambda chunk: chunk.count - len(chunk.draft) > 1)
        return Round(tuple(chunks), tuple(plan.preempted), tuple(plan.copies.values()), len(decoding))

    def promise(self, chunk: ScheduledChunk) -> None:
        """Record that a decoding `chunk` is in flight: its sequence can be planned before the token is known."""
        chunk.in_flight = True
        chunk.sequence.computed += 1
        chunk.sequence.tokens.append(UNKNOWN)

    def advance(self, chunk: ScheduledChunk, tokens: SequenceOf[int] = ()) -> None:
        """Record a computed `chunk` and its new tokens: accepted draft tokens, then one more."""
        sequence = chunk.sequence
        if chunk.in_flight:  # one token, whose place is counted already
            end = chunk.start + 1
            sequence.tokens[end] = tokens[0]
            filled = end % self.pool.page_tokens == 0
            if filled and sequence.computed >= end:  # otherwise it was preempted meanwhile, and its pages are gone
                self.cache.publish(sequence, chunk.start, end)
            return
        rejected = len(chunk.draft) - max(len(tokens) - 1, 0)
        sequence.computed += chunk.count - rejected
        sequence.tokens += tokens
        if chunk.start // self.pool.page_tokens != sequence.computed // self.pool.page_tokens:
            self.cache.publish(sequence, chunk.start, sequence.computed)

    def _try_schedule_one(self, sequence: Sequence, plan: _RoundPlan) -> bool:
        """Schedule one token in the common case: the sequence has its page, unshared, and no draft tokens."""
        pages, index = sequence.table.pages, sequence.computed // self.pool.page_tokens
        if sequence.draft or index >= len(pages) or plan.budget < 1 or sequence.state != "running":
            return False
        if self.pool.references(pages[index]) != 1:
            return False
        plan.chunks[sequence.order] = ScheduledChunk(sequence, sequence.computed, 1)
        plan.budget -= 1
        if self._shares.contended:
            self._shares.charge(sequence.caller, 1)
        return True

    def _schedule_chunk(self, sequence: Sequence, plan: _RoundPlan) -> None:
        count = self._allowed(sequence, plan)
        if count < 1 or sequence.state != "running":
            return
        most = max(0, plan.budget - count - plan.reserved)
        drafted = sequence.draft[:most] if sequence.draft and count == sequence.remaining else ()
        if drafted and not self._try_pages(sequence, count + len(drafted), plan):
            drafted = ()
        while not self._try_pages(sequence, count, plan):
            victim = max(self._running, key=_preemption_key)
            self._preempt(victim, plan)
            if victim is sequence:
                return
        self._assign(sequence, count, drafted, plan)

    def _allowed(self, sequence: Sequence, plan: _RoundPlan) -> int:
        """Return the tokens that the budget allows a sequence."""
        budget = min(plan.budget, plan.paced) if self._is_long(sequence) else plan.budget
        return min(len(sequence.tokens) - sequence.computed, budget)

    def _is_long(self, sequence: Sequence) -> bool:
        return len(sequence.tokens) - sequence.computed > 1 and (
            len(sequence.tokens) - sequence.cached > self.limits.tokens_max
        )

    def _assign(self, sequence: Sequence, count: int, drafted: tuple[int, ...], plan: _RoundPlan) -> None:
        samples = sequence.computed + count == len(sequence.tokens)
        plan.chunks[sequence.order] = ScheduledChunk(
            sequence, sequence.computed, count + len(drafted), drafted, samples
        )
        plan.budget -= count + len(drafted)
        if self._shares.contended:
            self._shares.charge(sequence.caller, count + len(drafted))
        if self._is_long(sequence):
            plan.paced -= count

    def _preempt(self, victim: Sequence, plan: _RoundPlan) -> None:
        dropped = plan.chunks.pop(victim.order, None)
        plan.copies.pop(victim.order, None)
        plan.budget += dropped.count if dropped else 0
        plan.preempted.append(victim)
        victim.move("preempt")
        victim.preemptions += 1
        self._running.remove(victim)
        self._waiting.append(victim)
        self.pool.drop(victim.table)
        victim.computed = 0
        victim.draft = ()

    def _try_join(self, sequence: Sequence, plan: _RoundPlan) -> bool:
        """Add a waiting sequence to the round; False when it and all with a worse rank must wait."""
        if plan.preempted:
            return False  # pages are short: those just released must not go to a waiting sequence
        self.cache.join(sequence)
        if not sequence.preemptions:
            sequence.cached = sequence.computed
        fits = self._make_room(sequence, plan)
        count = self._allowed(sequence, plan)
        if count < 1 and fits and plan.budget:
            self.pool.drop(sequence.table)  # only the long prompts' budget is used up: others may still join
            sequence.computed = 0
            return True
        if not fits or not self._try_pages(sequence, count, plan):
            self.pool.drop(sequence.table)
            sequence.computed = 0
            return False
        self.cache.count(sequence)
        sequence.move("join")
        self._waiting.remove(sequence)
        self._running.append(sequence)
        self._assign(sequence, count, (), plan)
        return True

    def _make_room(self, sequence: Sequence, plan: _RoundPlan) -> bool:
        """Return whether a waiting sequence has a place, preempting running ones where it may."""
        if self._has_place(sequence, plan):
            return True
        victims = [s for s in self._running if s.paused or s.due_ms >= sequence.due_ms + MARGIN_MS]
        if plan.fair:
            surplus = self._shares.surplus(sequence.caller, self._running, self._places, self.pool.size)
            victims += [s for s in surplus if s not in victims]
        if not self._has_place(sequence, plan, victims):
            return False
        for victim in sorted(victims, key=_preemption_key, reverse=True):
            if victim.paused and self._active() >= self._places:
                continue  # it holds pages, but no place in the round
            self._preempt(victim, plan)
            if self._has_place(sequence, plan):
                return True
        return False

    def _has_place(self, sequence: Sequence, plan: _RoundPlan, without: list[Sequence] | None = None) -> bool:
        """Return whether round and pool have room for a waiting sequence, assuming `without` were preempted."""
        gone = without or []
        active = self._active() - sum(not s.paused for s in gone)
        budget = plan.budget + sum(plan.chunks[s.order].count for s in gone if s.order in plan.chunks)
        scheduled = len(plan.chunks) - sum(s.order in plan.chunks for s in gone)
        occupied = max(scheduled, self._occupied(sequence, active, gone, plan.fair))
        if occupied >= self._places or budget < 1:
            return False
        # Each active sequence may soon need one more page: joining on the last pages would only cause preemption.
        needed = self._pages_missing(sequence, min(sequence.remaining, budget)) + active
        held = Counter(page for s in gone for page in s.table.pages)  # shared pages stay while others refer to them
        return needed <= self.pool.available + sum(self.pool.references(page) == n for page, n in held.items())

    def _occupied(self, sequence: Sequence, active: int, gone: list[Sequence], fair: bool) -> int:
        """Return the places of a round that a waiting sequence cannot have, of `active` ones without `gone`."""
        if active < self._places or not fair:
            return active
        staying = [one for one in self._running if not one.paused and one not in gone]
        return self._shares.occupied(sequence.caller, staying, self._places)

    def _active(self) -> int:
        return sum(not sequence.paused for sequence in self._running)

    def _try_pages(self, sequence: Sequence, count: int, plan: _RoundPlan) -> bool:
        """Allocate pages for `count` more tokens, and a copy where the sequence would write to a shared page."""
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
            plan.copies[sequence.order] = copy
        return True

    def _pages_missing(self, sequence: Sequence, count: int) -> int:
        return max(self.pool.pages_for(sequence.computed + count) - len(sequence.table.pages), 0)
