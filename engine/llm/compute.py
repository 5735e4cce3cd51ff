"""Execution of one round: forward pass and sampling.

When a round raises, its shares are computed again one by one (they write the same keys and values to the same pages),
and only those that raise again fail. A chunk of a prompt for which there is no memory even alone is halved until there
is, down to a page: its outcome is then about the part that was computed, and the rest is left for later rounds. Guesses
for which there is none are given up.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from traceback import clear_frames
from typing import TYPE_CHECKING, Any

from weftline.engine.llm.constraints import Constraints
from weftline.engine.llm.reply import TokenInfo
from weftline.engine.llm.rounds import Round, Share
from weftline.engine.llm.sampling.sampler import Row, Sampler
from weftline.errors import LimitReached, StepError, WeftlineError
from weftline.nodes.out_of_memory import BatchSizeLimit, is_out_of_memory

if TYPE_CHECKING:
    from torch import Tensor

    from weftline.engine.llm.runner import Runner

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class Outcome:
    """What a share came to: the tokens after its known ones (right guesses, then one more), or why it failed.

    share:    what was computed; less than what was asked for where memory was short.
    token:    the only token of a plain share that asks for nothing else; `tokens` is then empty.
    forked:   the first token of each further answer to the same prompt.
    complete: a constraint on the answer allows nothing after these tokens.
    prompt:   what is told of prompt tokens, when it was asked for.
    pooled:   what the model's head made of the prompt.
    """

    share: Share
    tokens: tuple[TokenInfo, ...] = ()
    forked: tuple[tuple[TokenInfo, ...], ...] = ()
    complete: bool = False
    prompt: tuple[TokenInfo, ...] = ()
    pooled: Any = None
    error: Exception | None = None
    token: int = -1


@dataclass(frozen=True, slots=True)
class Flight:
    """A round on its way; its shares' tokens come from `handle`."""

    shares: tuple[Share, ...]
    handle: Any

    def land(self) -> list[int | Exception]:
        """Wait for the round; return each share's token, or why it has none."""
        try:
            tokens = self.handle.tokens()
        except Exception as error:
            failure = StepError(f"the device failed on this round: {type(error).__name__}")
            failure.__cause__ = error
            return [failure] * len(self.shares)
        broken = StepError("the model gave no usable numbers (NaN) for this request")
        return [token if token >= 0 else broken for token in tokens]


class Compute:
    """Run rounds of `runner` and sample tokens. chunks: limits the prompt tokens of a round."""

    def __init__(self, runner: Runner, constraints: Constraints, chunks: BatchSizeLimit) -> None:
        self._runner = runner
        self._constraints = constraints
        self._chunks = chunks
        self._sampler = Sampler(runner.ends, runner.vocabulary)

    def run(self, shares: SequenceOf[Share], copies: SequenceOf[tuple[int, int]] = ()) -> list[Outcome]:
        if not shares:
            return []
        try:
            logits = self._runner.run(shares, copies)
            return self._pool(shares, logits) if self._runner.head is not None else self._sample(shares, logits)
        except Exception as error:  # whatever a model raises must not take the other requests along
            short = is_out_of_memory(error)
            again = list(shares) if len(shares) > 1 else self._less(shares[0]) if short else []
            if not again:
                self._note_shortage(shares, short)
                return [Outcome(shares[0], error=_failure(error, shares[0].count if short else 0))]
        # Here, where nothing holds on to the exception and so to the tensors of the pass that failed: there may be
        # memory for each alone.
        self._note_shortage(shares, short)
        return [outcome for share in again for outcome in self.run([share])]

    def _less(self, share: Share) -> list[Share]:
        """Return what may be computed of a share for which there is no memory; nothing where it cannot be less."""
        if share.draft:
            return [Share(share.sequence, share.start, share.count - len(share.draft), (), share.samples)]
        half = self._chunks.half(share.count)
        return [Share(share.sequence, share.start, half, (), False)] if half else []

    def _note_shortage(self, shares: SequenceOf[Share], short: bool) -> None:
        if not short:
            return
        tokens = prompt_tokens(shares)
        if self._chunks.out_of_memory(tokens):
            most = self._chunks.size
            _log.warning("out of memory at %d tokens of prompts; rounds have at most %d from now on", tokens, most)

    def launch(self, round: Round) -> Flight | None:
        """Start a round and return at once, where the device draws all its tokens by itself; None where it does not."""
        runner = self._runner
        if runner.graphs is None or runner.head is not None or self._constraints.any:
            return None
        if not 0 < len(round.shares) <= runner.graphs.sequences_max:
            return None
        if not all(share.plain and self._sampler.is_plain(share.sequence) for share in round.shares):
            return None
        try:
            return Flight(round.shares, runner.launch(round.shares, round.copies))
        except Exception as error:  # it is computed in the other way, which finds out whose fault it was
            if not is_out_of_memory(error):  # there is none for drawing; graphs have theirs
                runner.graphs.drop()
            return None

    def _sample(self, shares: SequenceOf[Share], logits: Tensor) -> list[Outcome]:
        if all(share.plain for share in shares):
            return self._sample_plain(shares, logits)
        rows, places, told = [], [], {}
        row = 0
        for share in shares:
            sequence, last = share.sequence, row + share.rows
            if sequence.whole and share.start < sequence.prompt:
                told[sequence.order] = self._tell_prompt(share, logits[row:last])
                row = last - 1
            if share.samples:
                for at in range(last - row):
                    rows.append(Row(sequence, share.draft[:at], self._constraints.matcher(sequence)))
                    places.append(row + at)
                for child in sequence.forks:
                    rows.append(Row(child, (), self._constraints.matcher(child)))
                    places.append(row)
            row = last
        if places != list(range(logits.shape[0])):
            logits = logits[places]
        choices = iter(self._sampler.pick(logits, rows) if rows else ())
        outcomes = []
        for share in shares:
            outcome = Outcome(share, prompt=told.get(share.sequence.order, ()))
            if share.samples:
                drawn = [next(choices) for _ in range(1 + len(share.draft) + len(share.sequence.forks))]
                self._take(outcome, drawn)
            outcomes.append(outcome)
        return outcomes

    def _sample_plain(self, shares: SequenceOf[Share], logits: Tensor) -> list[Outcome]:
        """Do the same for a round in which everybody decodes: most rounds, and the ones in which time counts."""
        matcher = self._constraints.matcher if self._constraints.any else None
        rows = [Row(s.sequence, (), matcher(s.sequence)) if matcher else Row(s.sequence) for s in shares]
        outcomes = []
        for share, choice in zip(shares, self._sampler.pick(logits, rows), strict=True):
            outcome = Outcome(share)
            if choice.sound and choice.logprob is None and not matcher:
                outcome.token = choice.token
            else:
                self._take(outcome, [choice])
            outcomes.append(outcome)
        return outcomes

    def _take(self, outcome: Outcome, drawn: list[Any]) -> None:
        """Note what was drawn: guesses count as long as they are what the model itself draws."""
        share, draft = outcome.share, outcome.share.draft
        right = next((at for at, guess in enumerate(draft) if drawn[at].token != guess), len(draft))
        own = drawn[: right + 1]
        bad = next((choice for choice in [*own, *drawn[1 + len(draft) :]] if not choice.sound), None)
        if bad is not None:
            outcome.error = bad.error or StepError(
                "no token can follow: the model gave no usable numbers, or the options leave none"
            )
            return
        outcome.tokens = tuple(TokenInfo(c.token, c.logprob, c.top) for c in own)
        outcome.forked = tuple((TokenInfo(c.token, c.logprob, c.top),) for c in drawn[1 + len(draft) :])
        sequence = share.sequence
        try:
            for one in outcome.tokens:
                self._constraints.accept(sequence, one.token)
            for child, infos in zip(sequence.forks, outcome.forked, strict=True):
                self._constraints.accept(child, infos[0].token)
        except WeftlineError as error:  # a move took more than its limit
            outcome.error = error
        outcome.complete = self._constraints.complete(sequence)

    def _tell_prompt(self, share: Share, logits: Tensor) -> tuple[TokenInfo, ...]:
        tokens = share.sequence.tokens[share.start + 1 : min(share.start + share.count + 1, share.sequence.prompt)]
        top = share.sequence.params.prompt_logprobs or 0
        return tuple(
            TokenInfo(one.token, one.logprob, one.top)
            for one in self._sampler.prompt_logprobs(logits[: len(tokens)], tokens, top)
        )

    def _pool(self, shares: SequenceOf[Share], hidden: Tensor) -> list[Outcome]:
        head, row, outcomes = self._runner.head, 0, []
        for share in shares:
            head.add(share.sequence, hidden[row : row + share.rows])
            row += share.rows
            pooled = head.finish(share.sequence) if share.samples else None
            outcomes.append(Outcome(share, pooled=pooled))
        for share in shares:  # not before: where one of them fails, all are computed again
            if share.samples:
                head.end(share.sequence)
        return outcomes


def prompt_tokens(shares: SequenceOf[Share]) -> int:
    """Return how many tokens of shares are of sequences that do not decode."""
    counts = (share.count - len(share.draft) for share in shares)
    return sum(count for count in counts if count > 1)


def _failure(error: Exception, short_at: int = 0) -> Exception:
    """Return what is told of an exception. Its frames give up their tensors: others are computed while it is kept.

    short_at: for so many tokens alone there was no memory; 0: that is not what it was.
    """
    clear_frames(error.__traceback__)
    if isinstance(error, WeftlineError):
        return error
    failure: WeftlineError = StepError(f"the model failed on this request: {type(error).__name__}")
    if short_at:
        tokens = f"{short_at} token{'s' if short_at > 1 else ''}"
        failure = LimitReached(f"out of memory: there is none for {tokens} of this request, alone in a round")
    failure.__cause__ = error
    return failure
