"""The engine: requests in, tokens and text out, one round at a time.

    engine = Engine(Runner.open("models/shapes-chat"), Tokens.open("models/shapes-chat"))
    engine.add(1, [5, 6, 7], SamplingParams(tokens_max=20))
    while engine.busy:
        for update in engine.step(): ...

Time is told, in milliseconds on any one clock: by whoever gives requests deadlines or wants them to age.

`step` plans a round, computes it, and notes what came out: five lines, everything else is in the parts. A request that
fails takes nobody along: when a round raises, its shares are computed again one by one (they write the same keys and
values to the same pages), and only those that raise again fail.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, replace

from weftline.engine.llm.prefix import PrefixCache
from weftline.engine.llm.rounds import RoundLimits, Schedule, Share
from weftline.engine.llm.runner import Runner
from weftline.engine.llm.sampling import Sampler
from weftline.engine.llm.sequence import SamplingParams, Sequence, check_tokens
from weftline.engine.llm.stream import TextStream
from weftline.engine.llm.tokens import Tokens
from weftline.errors import DeadlineExceeded, InputError, LimitReached, StepError

WAITING_MAX = 4096
"""Most requests inside the engine; the pipeline's own limits refuse much earlier."""


@dataclass(frozen=True, slots=True)
class Update:
    """What a round brought one request.

    tokens: new tokens, end-of-text included.   text: new text; empty while a piece is held back.
    finish: why the answer ended, 'stop' or 'length'; None while it goes on.
    prompt_tokens, completion_tokens, cached_tokens: counts so far; cached ones were not computed but found.
    error:  why it failed; it is the last update, as with `finish`.
    """

    id: int
    tokens: tuple[int, ...] = ()
    text: str = ""
    finish: str | None = None
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    error: Exception | None = None


@dataclass(frozen=True, slots=True)
class EngineStats:
    """A snapshot: pages by state, requests by state, and what happened since the engine was made.

    paused: how many of those that run or wait are given nothing for now.
    """

    pages_free: int
    pages_idle: int
    pages_used: int
    running: int
    waiting: int
    rounds: int
    preemptions: int
    prefix_asked_tokens: int
    prefix_hit_tokens: int
    paused: int = 0


class Engine:
    """A model with its pages and its requests. Without `tokens` it knows token ids only: no text, no stop strings."""

    def __init__(
        self,
        runner: Runner,
        tokens: Tokens | None = None,
        limits: RoundLimits | None = None,
        prefix_cache: bool = True,
    ) -> None:
        self.runner = runner
        self.tokens = tokens
        self._cache = PrefixCache(runner.pages, runner.page_tokens, prefix_cache)
        self._schedule = Schedule(limits or RoundLimits(), self._cache)
        self._sampler = Sampler(runner.ends)
        self._live: dict[int, Sequence] = {}
        self._paused: set[int] = set()
        self._texts: dict[int, TextStream] = {}
        self._rounds = self._preemptions = self._arrived = 0

    @property
    def busy(self) -> bool:
        """Whether `step` has work to do: paused requests are none."""
        return len(self._live) > len(self._paused)

    @property
    def context_max(self) -> int:
        """Longest prompt and answer together, in tokens: what the model was made for, or what the pages hold."""
        return min(self.runner.context_max, self.runner.pages * self.runner.page_tokens)

    def add(
        self,
        id: int,
        prompt: SequenceOf[int],
        params: SamplingParams,
        *,
        priority: int = 0,
        deadline_ms: float | None = None,
        now_ms: float = 0.0,
        salt: bytes = b"",
    ) -> None:
        """Take a request; InputError or LimitReached says why it is refused, and nobody else is affected.

        priority: the higher goes first, but not for ever: see `nodes.urgency.PRIORITY_STEP_MS`.
        """
        if id in self._live:
            raise InputError(f"request {id} is already running")
        if len(self._live) >= WAITING_MAX:
            raise LimitReached(f"the engine holds {WAITING_MAX} requests, its limit")
        if len(prompt) >= self.context_max:
            raise InputError(f"prompt: found {len(prompt)} tokens, expected at most {self.context_max - 1}; shorten it")
        known = check_tokens(prompt, self.runner.vocabulary)
        for token in params.stop_token_ids:
            if token >= self.runner.vocabulary:
                raise InputError(f"sampling.stop_token_ids: found {token}, expected 0 to {self.runner.vocabulary - 1}")
        if params.stop and self.tokens is None:
            raise InputError("sampling.stop: this engine has no tokenizer; use stop_token_ids")
        if params.seed is None:
            params = replace(params, seed=secrets.randbits(62))
        limit = min(len(known) + params.tokens_max, self.context_max)
        self._arrived += 1
        sequence = Sequence(
            id, known, len(known), limit, params, self._arrived, priority, salt, now_ms, deadline_ms
        )  # fmt: skip
        self._schedule.add(sequence)
        self._live[id] = sequence
        if self.tokens is not None:
            self._texts[id] = self.tokens.stream(params.stop)

    def cancel(self, id: int) -> None:
        """Drop a request and free its pages at once; unknown and finished ones are ignored."""
        if id in self._live:
            self._leave(self._live[id], "cancel")

    def pause(self, id: int) -> None:
        """Give a request no more tokens until `resume`; it keeps its pages while nobody needs them."""
        if id in self._live:
            self._live[id].paused = True
            self._paused.add(id)

    def resume(self, id: int) -> None:
        """Go on with a paused request; its answer is the one it would have had."""
        if id in self._paused:
            self._live[id].paused = False
            self._paused.discard(id)

    def step(self, now_ms: float = 0.0) -> list[Update]:
        """Compute one round; return what it brought, for the requests it brought something.

        A request whose deadline has passed at `now_ms` fails, and its pages are free for this round.
        """
        expired = [self._expire(sequence) for sequence in self._schedule.expired(now_ms)]
        round = self._schedule.plan()
        self._preemptions += len(round.preempted)
        self._rounds += bool(round.shares)
        noted = (self._note(share, token) for share, token in self._compute(round.shares))
        return [*expired, *(update for update in noted if update is not None)]

    def generate(self, prompts: SequenceOf[SequenceOf[int]], params: SamplingParams) -> list[list[int]]:
        """Return the tokens of the answers to all prompts, computed together; raises what the first failure was."""
        answers: dict[int, list[int]] = {-1 - self._arrived - at: [] for at in range(len(prompts))}
        for id, prompt in zip(answers, prompts, strict=True):
            self.add(id, prompt, params)
        while self.busy:
            for update in self.step():
                if update.error is not None:
                    raise update.error
                answers[update.id] += update.tokens
        return list(answers.values())

    def stats(self) -> EngineStats:
        pages, prefix = self._schedule.pool.counts(), self._cache.counts()
        return EngineStats(
            pages.free, pages.idle, pages.used, len(self._schedule.running), len(self._schedule.waiting),
            self._rounds, self._preemptions, prefix.asked_tokens, prefix.hit_tokens,
            len(self._paused),
        )  # fmt: skip

    def check(self) -> None:
        """Raise RuntimeError unless every page is accounted for; cheap enough to call when idle."""
        self._schedule.pool.check([sequence.table for sequence in self._live.values()])

    def clear_prefixes(self) -> None:
        """Forget all cached prefixes that no request uses."""
        self._cache.clear()

    def _compute(self, shares: SequenceOf[Share]) -> list[tuple[Share, int | Exception | None]]:
        """Return each share's next token, None where it gives none yet, or what it failed with."""
        if not shares:
            return []
        sampled = [share for share in shares if share.samples]
        try:
            logits = self.runner.run(shares)
            picked, sound = self._sampler.pick(logits, [share.sequence for share in sampled]) if sampled else ([], [])
        except Exception as error:  # whatever a model raises must not take the other requests along
            if len(shares) > 1:
                return [outcome for share in shares for outcome in self._compute([share])]
            failure = StepError(f"the model failed on this request: {type(error).__name__}")
            failure.__cause__ = error
            return [(shares[0], failure)]
        broken = StepError("the model gave no usable numbers (NaN) for this request")
        tokens = {
            share.sequence.id: token if good else broken
            for share, token, good in zip(sampled, picked, sound, strict=True)
        }
        return [(share, tokens.get(share.sequence.id)) for share in shares]

    def _note(self, share: Share, token: int | Exception | None) -> Update | None:
        """Take one share's outcome into the books; None when there is nothing to tell yet."""
        sequence = share.sequence
        if isinstance(token, Exception):
            self._leave(sequence, "fail")
            return Update(sequence.id, error=token)
        self._schedule.advance(share, token)
        if token is None:
            return None
        params, answered = sequence.params, len(sequence.tokens) - sequence.prompt
        ended = token in params.stop_token_ids or (token in self.runner.ends and not params.ignore_eos)
        finish = "stop" if ended else "length" if len(sequence.tokens) >= sequence.limit else None
        text, stream = "", self._texts.get(sequence.id)
        if stream is not None:
            text = "" if ended else stream.push(token)
            if stream.stopped:
                finish = "stop"
            elif finish is not None:
                text += stream.finish()
                finish = "stop" if stream.stopped else finish
        if finish is not None:
            self._leave(sequence, "finish")
        return Update(sequence.id, (token,), text, finish, sequence.prompt, answered, sequence.cached)

    def _expire(self, sequence: Sequence) -> Update:
        self._leave(sequence, "fail")
        so_far = f"{len(sequence.answer)} of at most {sequence.limit - sequence.prompt} tokens"
        return Update(sequence.id, error=DeadlineExceeded(f"the deadline passed after {so_far} of the answer"))

    def _leave(self, sequence: Sequence, event: str) -> None:
        del self._live[sequence.id]
        self._paused.discard(sequence.id)
        self._texts.pop(sequence.id, None)
        self._schedule.leave(sequence, event)
