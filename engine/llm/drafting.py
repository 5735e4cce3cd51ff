"""Speculative decoding: draft source, draft length and acceptance rate.

    none      nobody guesses
    ngram     each sequence's own text (`weftline.engine.llm.lookup`)
    draft     a smaller model of the same vocabulary, with a KV memory of its own

The draft model draws its guesses with the sequence's own seed and places, the very noise with which the large model
draws: where the two agree about probabilities they draw the same token, so that guesses are right about as often as
can be (a coupling by common Gumbel noise; Daliri et al. 2025), and the answer is, token for token, the one that the
large model gives alone.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from weftline.engine.llm.lookup import GuessLength, Lookup
from weftline.engine.llm.sequence import Sequence

if TYPE_CHECKING:
    from weftline.engine.llm.runner import Runner
    from weftline.engine.llm.sampling.sampler import Sampler

GUESSES_DEFAULT = 5
"""Most tokens guessed at a time; more are seldom all right."""


@dataclass(slots=True)
class GuessCounts:
    """Tokens that were guessed, and how many of them were right."""

    guessed: int = 0
    right: int = 0


class Guesser(Protocol):
    """Offers tokens for sequences that decode, and forgets sequences that leave."""

    def propose(self, sequences: SequenceOf[tuple[Sequence, int]]) -> list[tuple[int, ...]]:
        """Return up to so many guesses for each of the sequences."""

    def forget(self, sequence: Sequence) -> None:
        """Let go of what is kept for a sequence."""

    @property
    def runners(self) -> tuple[Runner, ...]:
        """The models it guesses with."""

    def sleep(self) -> None:
        """Give back the device's memory until `wake`; no sequence is there."""

    def wake(self) -> None:
        """Be ready again after `sleep`."""


class NgramGuesser:
    """Guesses from each sequence's own tokens."""

    def __init__(self) -> None:
        self._lookups: dict[int, Lookup] = {}

    def propose(self, sequences: SequenceOf[tuple[Sequence, int]]) -> list[tuple[int, ...]]:
        return [
            self._lookups.setdefault(sequence.order, Lookup()).propose(sequence.tokens, count)
            for sequence, count in sequences
        ]

    def forget(self, sequence: Sequence) -> None:
        self._lookups.pop(sequence.order, None)

    @property
    def runners(self) -> tuple[Runner, ...]:
        return ()

    def sleep(self) -> None:
        """Nothing of it is on a device."""

    def wake(self) -> None:
        """It has what it needs."""


class DraftGuesser:
    """Guesses with a smaller model. Sequences for which its KV memory has no room get no guesses."""

    def __init__(self, runner: Runner, sampler: Sampler, round_tokens_max: int = 512) -> None:
        from weftline.engine.llm.pages import PagePool

        self._runner = runner
        self._sampler = sampler
        self._pool = PagePool(runner.pages, runner.page_tokens)
        self._shadows: dict[int, Sequence] = {}
        self._agreed: dict[int, int] = {}  # how many tokens of each were the large model's when last looked at
        self._tokens_max = round_tokens_max

    def propose(self, sequences: SequenceOf[tuple[Sequence, int]]) -> list[tuple[int, ...]]:
        found: dict[int, list[int]] = {sequence.order: [] for sequence, _ in sequences}
        open = [(self._shadow(sequence), sequence, count) for sequence, count in sequences if count]
        while open:
            open = [one for one in open if len(found[one[1].order]) < one[2]]
            open = self._round(open, found)
        return [tuple(found[sequence.order]) for sequence, _ in sequences]

    def forget(self, sequence: Sequence) -> None:
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
        """Return the draft model's own view of a sequence: the same tokens, other pages."""
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
            same += 1  # what it computed for wrong guesses is computed again
        shadow.tokens, shadow.computed = list(sequence.tokens), same
        self._agreed[sequence.order] = len(sequence.tokens)
        return shadow

    def _round(
        self, open: list[tuple[Sequence, Sequence, int]], found: dict[int, list[int]]
    ) -> list[tuple[Sequence, Sequence, int]]:
        """Compute one round of the draft model; return those that can go on."""
        from weftline.engine.llm.rounds import Share
        from weftline.engine.llm.sampling.sampler import Row

        budget, shares, going = self._tokens_max, [], []
        for shadow, sequence, count in open:
            take = min(shadow.remaining, budget)
            missing = self._pool.pages_for(shadow.computed + take) - len(shadow.table.pages)
            room = len(shadow.tokens) < self._runner.context_max
            if take < 1:
                going.append((shadow, sequence, count))
            elif room and self._pool.try_grow(shadow.table, max(missing, 0)):
                budget -= take
                shares.append(Share(shadow, shadow.computed, take))
                going.append((shadow, sequence, count))
        if not shares:
            return []
        logits = self._runner.run(shares)
        sampled = [share for share in shares if share.samples]
        choices = self._sampler.pick(logits, [Row(share.sequence) for share in sampled]) if sampled else []
        drawn = {share.sequence.order: choice.token for share, choice in zip(sampled, choices, strict=True)}
        for share in shares:
            share.sequence.computed += share.count
            token = drawn.get(share.sequence.order)
            if token is not None:
                share.sequence.tokens.append(token)
                found[share.sequence.order].append(token)
        return going


class Speculation:
    """Asks a guesser for as many tokens as have been worth it for each sequence, and counts what came of it."""

    def __init__(self, guesser: Guesser, guesses_max: int = GUESSES_DEFAULT) -> None:
        self._guesser = guesser
        self._most = guesses_max
        self._lengths: dict[int, GuessLength] = {}
        self.counts = GuessCounts()

    def guess(self, sequences: SequenceOf[Sequence]) -> None:
        """Set the drafts of sequences that decode; none reaches past its limit."""
        asked = []
        for sequence in sequences:
            length = self._lengths.setdefault(sequence.order, GuessLength(self._most))
            asked.append((sequence, max(0, min(length.ask(), sequence.limit - len(sequence.tokens) - 1))))
        for (sequence, _), guesses in zip(asked, self._guesser.propose(asked), strict=True):
            sequence.draft = guesses

    def learn(self, sequence: Sequence, guessed: int, right: int) -> None:
        """Note how many of a sequence's guesses were right."""
        sequence.draft = ()
        if guessed:
            self.counts.guessed += guessed
            self.counts.right += right
            sequence.guessed += guessed
            sequence.right += right
            self._lengths[sequence.order].learn(guessed, right)

    def forget(self, sequence: Sequence) -> None:
        self._lengths.pop(sequence.order, None)
        self._guesser.forget(sequence)

    @property
    def runners(self) -> tuple[Runner, ...]:
        """The models that the guesser guesses with."""
        return self._guesser.runners

    def sleep(self) -> None:
        """Have the guesser give back the device's memory until `wake`."""
        self._guesser.sleep()

    def wake(self) -> None:
        self._guesser.wake()
