"""Speculative decoding: draft proposers, draft length and acceptance.

    ngram     the sequence's own text: tokens that followed its last few tokens earlier (prompt lookup, Saxena 2023)
    draft     a smaller model of the same vocabulary, with a KV cache of its own

Speculation never changes an answer: at each position the target model's own token counts, and a draft token is accepted
where it is equal. The draft model draws with the sequence's own seed and positions, which is the noise of the target
model's draw: where their distributions agree they draw the same token (a coupling by common Gumbel noise; Daliri et
al. 2025). `DraftLength` adapts the number of draft tokens: a rejected one costs a row of the next round.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from weftline.engine.llm.sequence import Sequence

if TYPE_CHECKING:
    from weftline.engine.llm.runner import Runner
    from weftline.engine.llm.sampling.sampler import Sampler

_log = logging.getLogger(__name__)

DRAFT_DEFAULT = 5
"""Most draft tokens per round; more are seldom all accepted."""
MATCH_MAX = 4
"""Longest suffix that is matched; longer ones match by their last tokens."""
MATCH_MIN = 2
"""Shortest suffix that is matched: a single token predicts little."""
LOOKBACK_TOKENS = 8192
"""Tokens searched, counted from the end: bounds the time for a long prompt."""


@dataclass(slots=True)
class SpeculationCounts:
    """Draft tokens, and how many of them were accepted."""

    drafted: int = 0
    accepted: int = 0


class Proposer(Protocol):
    """Proposes draft tokens for decoding sequences."""

    def propose(self, sequences: SequenceOf[tuple[Sequence, int]]) -> list[tuple[int, ...]]:
        """Return draft tokens for each sequence, at most the given number."""

    def drop(self, sequence: Sequence) -> None:
        """Drop the state of a sequence."""

    @property
    def runners(self) -> tuple[Runner, ...]:
        """Return the draft models."""

    def sleep(self) -> None:
        """Release the device memory until `wake`; there are no sequences."""

    def wake(self) -> None:
        """Restore the state before `sleep`."""


class NgramProposer:
    """Proposes tokens that followed the same n-gram earlier in the sequence."""

    def __init__(self) -> None:
        self._indexes: dict[int, NgramIndex] = {}

    def propose(self, sequences: SequenceOf[tuple[Sequence, int]]) -> list[tuple[int, ...]]:
        return [
            self._indexes.setdefault(sequence.order, NgramIndex()).propose(sequence.tokens, count)
            for sequence, count in sequences
        ]

    def drop(self, sequence: Sequence) -> None:
        self._indexes.pop(sequence.order, None)

    @property
    def runners(self) -> tuple[Runner, ...]:
        return ()

    def sleep(self) -> None:
        """Do nothing: it uses no device memory."""

    def wake(self) -> None:
        """Do nothing."""


class DraftModelProposer:
    """Proposes tokens of a smaller model; none for sequences that do not fit its KV memory."""

    def __init__(self, runner: Runner, sampler: Sampler, round_tokens_max: int = 512) -> None:
        from weftline.engine.llm.kv_cache import PagePool

        self._runner = runner
        self._sampler = sampler
        self._pool = PagePool(runner.pages, runner.page_tokens)
        self._shadows: dict[int, Sequence] = {}
        self._agreed: dict[int, int] = {}  # tokens of each that the target model had confirmed at the last call
        self._tokens_max = round_tokens_max

    def propose(self, sequences: SequenceOf[tuple[Sequence, int]]) -> list[tuple[int, ...]]:
        found: dict[int, list[int]] = {sequence.order: [] for sequence, _ in sequences}
        open = [(self._shadow(sequence), sequence, count) for sequence, count in sequences if count]
        while open:
            open = [one for one in open if len(found[one[1].order]) < one[2]]
            open = self._round(open, found)
        return [tuple(found[sequence.order]) for sequence, _ in sequences]

    def drop(self, sequence: Sequence) -> None:
        self._agreed.pop(sequence.order, None)
        shadow = self._shadows.pop(sequence.order, None)
        if shadow is not None:
            self._pool.drop(shadow.table)

    @property
    def runners(self) -> tuple[Runner, ...]:
        return (self._runner,)

    def sleep(self) -> None:
        self._runner.sleep(self._runner.pages)

    def wake(self) -> None:
        self._runner.wake()

    def _shadow(self, sequence: Sequence) -> Sequence:
        """Return the draft model's copy of a sequence: the same tokens, other pages."""
        shadow = self._shadows.get(sequence.order)
        if shadow is None:
            shadow = Sequence(
                sequence.id, list(sequence.tokens), sequence.prompt, sequence.limit, sequence.params, sequence.order
            )
            shadow.seed = sequence.seed
            self._shadows[sequence.order] = shadow
        most = min(shadow.computed, len(sequence.tokens) - 1)
        same = min(self._agreed.get(sequence.order, 0), most)
        while same < most and shadow.tokens[same] == sequence.tokens[same]:
            same += 1  # keys and values of rejected tokens are recomputed
        shadow.tokens, shadow.computed = list(sequence.tokens), same
        self._agreed[sequence.order] = len(sequence.tokens)
        return shadow

    def _round(
        self, open: list[tuple[Sequence, Sequence, int]], found: dict[int, list[int]]
    ) -> list[tuple[Sequence, Sequence, int]]:
        """Compute one round of the draft model; return the sequences that continue."""
        from weftline.engine.llm.sampling.sampler import Row
        from weftline.engine.llm.schedule import ScheduledChunk

        budget, chunks, going = self._tokens_max, [], []
        for shadow, sequence, count in open:
            take = min(shadow.remaining, budget)
            missing = self._pool.pages_for(shadow.computed + take) - len(shadow.table.pages)
            room = len(shadow.tokens) < self._runner.context_max
            if take < 1:
                going.append((shadow, sequence, count))
            elif room and self._pool.try_grow(shadow.table, max(missing, 0)):
                budget -= take
                chunks.append(ScheduledChunk(shadow, shadow.computed, take, samples=take == shadow.remaining))
                going.append((shadow, sequence, count))
        if not chunks:
            return []
        logits = self._runner.run(chunks)
        sampled = [chunk for chunk in chunks if chunk.samples]
        choices = self._sampler.pick(logits, [Row(chunk.sequence) for chunk in sampled]) if sampled else []
        drawn = {chunk.sequence.order: choice.token for chunk, choice in zip(sampled, choices, strict=True)}
        for chunk in chunks:
            chunk.sequence.computed += chunk.count
            token = drawn.get(chunk.sequence.order)
            if token is not None:
                chunk.sequence.tokens.append(token)
                found[chunk.sequence.order].append(token)
        return going


class NgramIndex:
    """Index from the last few tokens at each position of one sequence to that position; grows with the sequence."""

    def __init__(self) -> None:
        self._positions: dict[tuple[int, ...], int] = {}
        self._indexed = 0

    def propose(self, tokens: SequenceOf[int], count: int) -> tuple[int, ...]:
        """Return up to `count` tokens that followed the last earlier occurrence of the longest indexed suffix."""
        self._index(tokens)
        for size in range(MATCH_MAX, MATCH_MIN - 1, -1):
            if len(tokens) <= size:
                continue
            after = self._positions.get(tuple(tokens[-size:]))
            if after is not None:
                return tuple(tokens[after : after + count])
        return ()

    def _index(self, tokens: SequenceOf[int]) -> None:
        """Index every suffix but the last, which has no following token yet."""
        first = max(self._indexed, len(tokens) - LOOKBACK_TOKENS, MATCH_MIN)
        for end in range(first, len(tokens)):
            for size in range(MATCH_MIN, MATCH_MAX + 1):
                if end >= size:
                    self._positions[tuple(tokens[end - size : end])] = end
        self._indexed = len(tokens)


@dataclass(slots=True)
class DraftLength:
    """Number of draft tokens: doubled after all were accepted, halved after none was, then none for a while.

    most: upper bound.
    """

    most: int
    now: int = 2
    _skip: int = 0

    def next(self) -> int:
        """Return the number of draft tokens; 0 for a few rounds after repeated rejections."""
        if self._skip:
            self._skip -= 1
            return 0
        return min(self.now, self.most)

    def record(self, drafted: int, accepted: int) -> None:
        if accepted == drafted:
            self.now = min(self.most, max(self.now * 2, 1))
        elif accepted == 0:
            if self.now <= 1:
                self._skip = 8
            self.now = max(1, self.now // 2)
        else:
            self.now = max(1, accepted + 1)


class Speculation:
    """Drafts tokens for decoding sequences, as many for each as its acceptance justifies, and counts acceptance."""

    def __init__(self, proposer: Proposer, draft_max: int = DRAFT_DEFAULT) -> None:
        self._proposer = proposer
        self._most = draft_max
        self._lengths: dict[int, DraftLength] = {}
        self.counts = SpeculationCounts()

    def draft(self, running: SequenceOf[Sequence], sequences_max: int) -> None:
        """Set the draft tokens of sequences that decode without a constraint; none reaches past its limit.

        A proposer that fails only costs its draft tokens.
        """
        decoding = [
            s for s in running
            if s.remaining == 1 and len(s.tokens) > s.prompt and not s.paused and not s.params.constraint
        ]  # fmt: skip
        decoding = decoding[:sequences_max]  # a round of the draft model holds no more
        try:
            self.propose(decoding)
        except Exception:  # a draft model may raise any error
            _log.exception("speculation failed for a round of %d", len(decoding))
            for sequence in decoding:
                sequence.draft = ()

    def propose(self, sequences: SequenceOf[Sequence]) -> None:
        """Set the draft tokens of decoding sequences."""
        counted = []
        for sequence in sequences:
            length = self._lengths.setdefault(sequence.order, DraftLength(self._most))
            counted.append((sequence, max(0, min(length.next(), sequence.limit - len(sequence.tokens) - 1))))
        for (sequence, _), draft in zip(counted, self._proposer.propose(counted), strict=True):
            sequence.draft = draft

    def record(self, sequence: Sequence, drafted: int, accepted: int) -> None:
        """Record how many of a sequence's draft tokens were accepted, and clear them."""
        sequence.draft = ()
        if drafted:
            self.counts.drafted += drafted
            self.counts.accepted += accepted
            sequence.drafted += drafted
            sequence.accepted += accepted
            self._lengths[sequence.order].record(drafted, accepted)

    def drop(self, sequence: Sequence) -> None:
        self._lengths.pop(sequence.order, None)
        self._proposer.drop(sequence)

    @property
    def runners(self) -> tuple[Runner, ...]:
        """Return the draft models."""
        return self._proposer.runners

    def sleep(self) -> None:
        """Release the proposer's device memory until `wake`."""
        self._proposer.sleep()

    def wake(self) -> None:
        self._proposer.wake()
