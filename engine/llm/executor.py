"""Execution of a round: forward pass, sampling, and retry of what failed.

When a round raises, its chunks are computed again one by one (they write the same keys and values to the same pages),
and only those that raise again fail. A prompt chunk that runs out of memory alone is halved until it fits, down to a
page: its result then covers the computed part, and the rest is left for later rounds. Draft tokens that do not fit are
dropped.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from traceback import clear_frames
from typing import TYPE_CHECKING, Any

from weftline.engine.llm.request import SampledToken, TokenUpdate
from weftline.engine.llm.request_grammars import RequestGrammars, constraint_error
from weftline.engine.llm.sampling.sampler import Row, Sampler
from weftline.engine.llm.schedule import Round, ScheduledChunk
from weftline.engine.llm.sequence import Sequence
from weftline.errors import LimitReached, StepError, WeftlineError, first_line
from weftline.nodes.out_of_memory import BatchSizeLimit, is_out_of_memory

if TYPE_CHECKING:
    from torch import Tensor

    from weftline.engine.llm.runner import Runner

_log = logging.getLogger(__name__)

ChunkResult = tuple[ScheduledChunk, list[TokenUpdate]]
"""A computed chunk, smaller than planned where memory was short, and its updates.

A chunk that samples has an update for its sequence, then one for each further answer to the same prompt. Others have
none, or one with log-probabilities of prompt tokens. A chunk that failed has one, with the error.
"""


@dataclass(frozen=True, slots=True)
class RoundInFlight:
    """A round that the device computes while the next one is planned; `handle` returns its tokens."""

    chunks: tuple[ScheduledChunk, ...]
    handle: Any

    def wait(self) -> list[ChunkResult]:
        """Wait for the device and return the results."""
        try:
            tokens = self.handle.tokens()
        except Exception as error:
            failure = StepError(f"the device failed on this round: {type(error).__name__}")
            failure.__cause__ = error
            return [(chunk, [_failed(chunk, failure)]) for chunk in self.chunks]
        unsound = StepError("the model produced no usable numbers (NaN) for this request")
        return [
            (chunk, [_one_token(chunk.sequence, token) if token >= 0 else _failed(chunk, unsound)])
            for chunk, token in zip(self.chunks, tokens, strict=True)
        ]


class RoundExecutor:
    """Runs rounds of `runner` and samples tokens. prefill_limit: limits the prompt tokens of a round."""

    def __init__(self, runner: Runner, grammars: RequestGrammars, prefill_limit: BatchSizeLimit) -> None:
        self._runner = runner
        self._grammars = grammars
        self._prefill_limit = prefill_limit
        self._sampler = Sampler(runner.ends, runner.vocabulary)
        self._launch_errors: set[str] = set()

    def compute(
        self, chunks: SequenceOf[ScheduledChunk], copies: SequenceOf[tuple[int, int]] = ()
    ) -> list[ChunkResult]:
        """Run a round, and raise the limit on prompt tokens again after enough rounds that fitted."""
        failures = self._prefill_limit.failures
        results = self.run(chunks, copies)
        if self._prefill_limit.failures == failures and self._prefill_limit.succeeded(prompt_tokens(chunks)):
            _log.info(
                "no recent out-of-memory errors; rounds have at most %d prompt tokens now", self._prefill_limit.size
            )
        return results

    def run(self, chunks: SequenceOf[ScheduledChunk], copies: SequenceOf[tuple[int, int]] = ()) -> list[ChunkResult]:
        """Copy pages, compute the chunks and sample; a failure is the result of its chunk and does not raise."""
        if not chunks:
            return []
        try:
            logits = self._runner.run(chunks, copies)
            return self._pool(chunks, logits) if self._runner.head is not None else self._sample(chunks, logits)
        except Exception as error:  # any error of a model must fail its own request only
            short = is_out_of_memory(error)
            retried = list(chunks) if len(chunks) > 1 else self._smaller(chunks[0]) if short else []
            if not retried:
                self._record_shortage(chunks, short)
                return [(chunks[0], [_failed(chunks[0], _failure(error, chunks[0].count if short else 0))])]
        # Outside the handler, where nothing references the exception and so the tensors of the failed pass: each chunk
        # alone may fit.
        self._record_shortage(chunks, short)
        return [result for chunk in retried for result in self.run([chunk])]

    def _smaller(self, chunk: ScheduledChunk) -> list[ScheduledChunk]:
        """Return the part of a chunk to retry after it ran out of memory; nothing where it cannot be smaller."""
        if chunk.draft:
            count = chunk.count - len(chunk.draft)
            return [ScheduledChunk(chunk.sequence, chunk.start, count, (), chunk.samples)]
        half = self._prefill_limit.half(chunk.count)
        return [ScheduledChunk(chunk.sequence, chunk.start, half, (), False)] if half else []

    def _record_shortage(self, chunks: SequenceOf[ScheduledChunk], short: bool) -> None:
        if not short:
            return
        tokens = prompt_tokens(chunks)
        if self._prefill_limit.out_of_memory(tokens):
            most = self._prefill_limit.size
            _log.warning("out of memory at %d tokens of prompts; rounds have at most %d from now on", tokens, most)

    def launch(self, round: Round) -> RoundInFlight | None:
        """Start a round without waiting for it; None where the device cannot sample all its tokens by itself."""
        runner = self._runner
        if runner.graphs is None or runner.head is not None or self._grammars.any:
            return None
        if not 0 < len(round.chunks) <= runner.graphs.sequences_max:
            return None
        if not all(chunk.plain and self._sampler.is_plain(chunk.sequence) for chunk in round.chunks):
            return None
        try:
            return RoundInFlight(round.chunks, runner.launch(round.chunks, round.copies))
        except Exception as error:  # `run` computes it instead, and finds the request that fails
            short = is_out_of_memory(error)  # sampling did; graphs have memory of their own
            self._log_launch(error, short)
            if not short:
                runner.graphs.drop()
            return None

    def _log_launch(self, error: Exception, short: bool) -> None:
        """Log why a round could not be launched, once for each type of error."""
        name = type(error).__name__
        if name in self._launch_errors:
            return
        self._launch_errors.add(name)
        graphs = "graphs are kept" if short else "graphs are recorded again"
        _log.warning(
            "a round could not be launched ahead, and its tokens are drawn by the host; %s: %s: %.300s",
            graphs, name, first_line(error), exc_info=None if short else error,
        )  # fmt: skip

    def _sample(self, chunks: SequenceOf[ScheduledChunk], logits: Tensor) -> list[ChunkResult]:
        if all(chunk.plain for chunk in chunks):
            return self._sample_plain(chunks, logits)
        rows, places, row = [], [], 0
        prompts: dict[int, tuple[SampledToken, ...]] = {}
        for chunk in chunks:
            sequence, last = chunk.sequence, row + chunk.rows
            if sequence.skips_prefix_cache and chunk.start < sequence.prompt:
                prompts[sequence.order] = self._prompt_logprobs(chunk, logits[row:last])
                row = last - 1
            if chunk.samples:
                for at in range(last - row):
                    rows.append(Row(sequence, chunk.draft[:at], self._grammars.matcher(sequence)))
                    places.append(row + at)
                for child in sequence.forks:
                    rows.append(Row(child, (), self._grammars.matcher(child)))
                    places.append(row)
            row = last
        if places != list(range(logits.shape[0])):
            logits = logits[places]
        sampled = iter(self._sampler.pick(logits, rows) if rows else ())
        results: list[ChunkResult] = []
        for chunk in chunks:
            updates = []
            if chunk.samples:
                count = 1 + len(chunk.draft) + len(chunk.sequence.forks)
                updates = self._to_updates(chunk, [next(sampled) for _ in range(count)])
            if prompt := prompts.get(chunk.sequence.order):
                updates = updates or [TokenUpdate(chunk.sequence.id)]
                updates[0].prompt_logprobs = prompt
            results.append((chunk, updates))
        return results

    def _sample_plain(self, chunks: SequenceOf[ScheduledChunk], logits: Tensor) -> list[ChunkResult]:
        """Sample a round that only decodes: most rounds, and the latency-critical ones."""
        if self._grammars.any:
            matcher = self._grammars.matcher
            sampled = self._sampler.pick(logits, [Row(c.sequence, (), matcher(c.sequence)) for c in chunks])
            return [(chunk, self._to_updates(chunk, [one])) for chunk, one in zip(chunks, sampled, strict=True)]
        results: list[ChunkResult] = []
        for chunk, one in zip(chunks, self._sampler.pick(logits, [Row(c.sequence) for c in chunks]), strict=True):
            simple = one.sound and one.logprob is None
            results.append(
                (chunk, [_one_token(chunk.sequence, one.token)] if simple else self._to_updates(chunk, [one]))
            )
        return results

    def _to_updates(self, chunk: ScheduledChunk, sampled: list[SampledToken]) -> list[TokenUpdate]:
        """Return the updates of a chunk that samples: draft tokens up to the first mismatch are accepted."""
        draft = chunk.draft
        accepted = next((at for at, token in enumerate(draft) if sampled[at].token != token), len(draft))
        own, forked = sampled[: accepted + 1], sampled[1 + len(draft) :]
        unsound = next((one for one in [*own, *forked] if not one.sound), None)
        if unsound is not None:
            if unsound.error is not None:
                return [_failed(chunk, constraint_error(unsound.error, chunk.sequence.params))]
            found = "the model produced no usable numbers, or the options exclude every token"
            return [_failed(chunk, StepError(f"no token can follow: {found}"))]
        try:
            children = zip(chunk.sequence.forks, forked, strict=True)
            return [self._update(chunk.sequence, own), *(self._update(child, [one]) for child, one in children)]
        except WeftlineError as error:  # a grammar move exceeded its limits
            return [_failed(chunk, constraint_error(error, chunk.sequence.params))]

    def _update(self, sequence: Sequence, sampled: list[SampledToken]) -> TokenUpdate:
        """Return the update of one answer; its grammar, if any, advances by the tokens."""
        update = TokenUpdate(sequence.id, tuple([one.token for one in sampled]), index=sequence.index)
        if sequence.params.logprobs is not None:
            update.logprobs = tuple(sampled)
        for token in update.tokens:
            self._grammars.accept(sequence, token)
        update.finish = "stop" if self._grammars.finished(sequence) else None
        return update

    def _prompt_logprobs(self, chunk: ScheduledChunk, logits: Tensor) -> tuple[SampledToken, ...]:
        tokens = chunk.sequence.tokens[chunk.start + 1 : min(chunk.start + chunk.count + 1, chunk.sequence.prompt)]
        top = chunk.sequence.params.prompt_logprobs or 0
        return tuple(self._sampler.prompt_logprobs(logits[: len(tokens)], tokens, top))

    def _pool(self, chunks: SequenceOf[ScheduledChunk], hidden: Tensor) -> list[ChunkResult]:
        head, row = self._runner.head, 0
        results: list[ChunkResult] = []
        for chunk in chunks:
            head.add(chunk.sequence, hidden[row : row + chunk.rows])
            row += chunk.rows
            pooled = [TokenUpdate(chunk.sequence.id, pooled=head.finish(chunk.sequence))] if chunk.samples else []
            results.append((chunk, pooled))
        for chunk in chunks:  # last, because all chunks are computed again when one fails
            if chunk.samples:
                head.end(chunk.sequence)
        return results


def prompt_tokens(chunks: SequenceOf[ScheduledChunk]) -> int:
    """Return the number of tokens in chunks whose sequences do not decode."""
    counts = (chunk.count - len(chunk.draft) for chunk in chunks)
    return sum(count for count in counts if count > 1)


def _one_token(sequence: Sequence, token: int) -> TokenUpdate:
    return TokenUpdate(sequence.id, (token,), index=sequence.index)


def _failed(chunk: ScheduledChunk, error: Exception) -> TokenUpdate:
    return TokenUpdate(chunk.sequence.id, error=error, last=True)


def _failure(error: Exception, short_at: int = 0) -> Exception:
    """Return the error of a request. The frames of the original drop their tensors: it outlives the retries of others.

    short_at: this number of tokens alone ran out of memory; 0: it failed for another reason.
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
