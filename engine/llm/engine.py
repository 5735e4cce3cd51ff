"""LLM engine: continuous batching from requests to tokens and text, one round at a time.

    engine = Engine(Runner.open("models/shapes-chat"), Tokens.open("models/shapes-chat"))
    engine.add(1, [5, 6, 7], SamplingParams(tokens_max=20))
    while engine.busy:
        for update in engine.step(): ...

Time is told, in milliseconds on any one clock: by whoever gives requests deadlines, wants them to age, or wants long
prompts to leave others their pace.

`step` plans a round, has it computed (`weftline.engine.llm.compute`), and notes what came out. A request that fails
takes nobody along.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

from weftline.engine.llm.compute import Compute, Flight, Outcome, prompt_tokens
from weftline.engine.llm.constraints import Constraints
from weftline.engine.llm.drafting import Speculation
from weftline.engine.llm.events import KvEvents
from weftline.engine.llm.pace import BalancedPace, Pace, StretchedPace
from weftline.engine.llm.pages import PageCounts
from weftline.engine.llm.params import SamplingParams
from weftline.engine.llm.prefix import PrefixCache
from weftline.engine.llm.reply import Reply, Taken, TokenInfo
from weftline.engine.llm.request import USUAL, LlmRequest, Update, Wish, check_params, to_sequences, usage
from weftline.engine.llm.rounds import Round, RoundLimits, Schedule, Share
from weftline.engine.llm.runner import Runner
from weftline.engine.llm.sequence import Sequence
from weftline.engine.llm.tokens import Tokens
from weftline.errors import DeadlineExceeded, InputError, LimitReached, WeftlineError
from weftline.nodes.out_of_memory import BatchSizeLimit

_log = logging.getLogger(__name__)

WAITING_MAX = 4096
"""Most requests inside the engine; the pipeline's own limits refuse much earlier."""


@dataclass(frozen=True, slots=True)
class EngineStats:
    """A snapshot: pages by state, requests by state, and what happened since the engine was made.

    paused:  how many of those that run or wait are given nothing for now.
    guessed: tokens guessed by speculation; right: how many of them were.
    page_bytes: what one page takes.
    prompts_max: most prompt tokens of a round for now; fewer than the options say after a want of memory.
    short:   passes for which there was no memory.
    graphs:  CUDA graphs of rounds; ungraphed: sizes of rounds for which none could be recorded.
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
    guessed: int = 0
    right: int = 0
    page_bytes: int = 0
    prompts_max: int = 0
    short: int = 0
    graphs: int = 0
    ungraphed: int = 0


class Engine:
    """A model with its pages and its requests. Without `tokens` it knows token ids only: no text, no stop strings."""

    def __init__(
        self,
        runner: Runner,
        tokens: Tokens | None = None,
        limits: RoundLimits | None = None,
        prefix_cache: bool = True,
        speculation: Speculation | None = None,
        constraints: Constraints | None = None,
    ) -> None:
        self.runner = runner
        self.tokens = tokens
        self._cache = PrefixCache(runner.pages, runner.page_tokens, prefix_cache)
        self._schedule = Schedule(limits or RoundLimits(), self._cache)
        self._speculation = speculation
        self._constraints = constraints or Constraints(None)
        self._chunks = BatchSizeLimit(self._schedule.limits.tokens_max, runner.page_tokens)
        self._compute = Compute(runner, self._constraints, self._chunks)
        self._pages_first = runner.pages
        on_cpu = runner.device.type == "cpu"
        self._pace: Pace = StretchedPace() if on_cpu else BalancedPace(self._schedule.limits.tokens_max)
        self._before: tuple[int, int, float] | None = None  # the last round: decoding, other tokens, when it began
        self._live: dict[int, LlmRequest] = {}
        self._held: dict[int, LlmRequest] = {}  # live, but their constraint is still being compiled
        self._paused: set[int] = set()
        self._timed: set[int] = set()  # those with a deadline
        self._replies: dict[int, Reply] = {}
        self._flight: Flight | None = None  # the round that the device computes while the next one is planned
        self._landed: list[Update] = []
        self._rounds = self._preemptions = self._arrived = 0

    @property
    def busy(self) -> bool:
        """Whether `step` has work to do: paused requests are none."""
        return len(self._live) > len(self._paused) or self._flight is not None or bool(self._landed)

    @property
    def limits(self) -> RoundLimits:
        return self._schedule.limits

    @property
    def context_max(self) -> int:
        """Longest prompt and answer together, in tokens: what the model was made for, or what the pages hold."""
        return min(self.runner.context_max, self._schedule.pool.size * self.runner.page_tokens)

    def add(
        self, id: int, prompt: SequenceOf[int], params: SamplingParams, wish: Wish = USUAL, *, now_ms: float = 0.0
    ) -> None:
        """Take a request; InputError or LimitReached says why it is refused, and nobody else is affected."""
        if self.runner.asleep:
            raise RuntimeError("the engine sleeps; it takes requests when it is awake")
        if id in self._live:
            raise InputError(f"request {id} is already running")
        if len(self._live) >= WAITING_MAX:
            raise LimitReached(f"the engine holds {WAITING_MAX} requests, its limit")
        check_params(params, self.runner.vocabulary, self.tokens is not None)
        if wish.pool != (self.runner.head is not None):
            raise InputError("this model answers prompts" if wish.pool else "this model has a head and answers nothing")
        slot, salt = self.runner.adapter(wish.adapter)
        sequences = to_sequences(
            id, prompt, params, wish, vocabulary=self.runner.vocabulary, context_max=self.context_max,
            arrived=self._arrived + 1, now_ms=now_ms, salt=salt, slot=slot, spell=self._spell,
        )  # fmt: skip
        if self.runner.head is not None:
            sequences[0].whole = self.runner.head.whole
        request = LlmRequest(id, sequences, wish.adapter)
        if self._constraints.start(request):
            self._held[id] = request
        else:
            self._schedule.add(sequences[0])
        self._arrived += len(sequences)
        self._live[id] = request
        if wish.deadline_ms is not None:
            self._timed.add(id)
        self.runner.hold_adapter(wish.adapter)
        for sequence in sequences:
            text = self.tokens.stream(params.stop, not params.skip_special_tokens) if self.tokens is not None else None
            echo = self.tokens.decode(prompt) if self.tokens is not None and params.echo else ""
            self._replies[sequence.order] = Reply(sequence, self.runner.ends, text, echo)

    def cancel(self, id: int) -> None:
        """Drop a request and free its pages at once; unknown and finished ones are ignored."""
        if id in self._live:
            self._end(self._live[id], "cancel")

    def pause(self, id: int) -> None:
        """Give a request no more tokens until `resume`; it keeps its pages while nobody needs them."""
        if id in self._live:
            self._paused.add(id)
            for sequence in self._live[id].sequences:
                sequence.paused = True

    def resume(self, id: int) -> None:
        """Go on with a paused request; its answer is the one it would have had."""
        if id in self._paused:
            self._paused.discard(id)
            for sequence in self._live[id].sequences:
                sequence.paused = False

    def step(self, now_ms: float = 0.0) -> list[Update]:
        """Compute one round; return what it brought, for the requests it brought something.

        A request whose deadline has passed at `now_ms` fails, and its pages are free for this round.
        """
        self._schedule.pool.now_ms = now_ms
        updates, self._landed = self._landed, []
        if self._timed:
            updates += self._expire(now_ms)
        if self._held:
            updates += self._release()
        if self._before is not None:
            decoding, other, began_ms = self._before
            self._pace.note(decoding, other, now_ms - began_ms)
        if self._speculation is not None:
            self._guess(self._speculation)
        short = self._chunks.failures
        round = self._schedule.plan(self._pace.chunk, self._chunks.size)
        self._preemptions += len(round.preempted)
        self._rounds += bool(round.shares)
        before, self._flight = self._flight, self._compute.launch(round) if self._speculation is None else None
        if self._flight is not None:  # while the device computes it, the one before is taken into the books
            for share in round.shares:
                self._schedule.promise(share)
        if before is not None:
            updates += self._land(before)
        if self._flight is None:
            updates += self._run(round)
        # Else there is nothing to learn about how long a round takes: none was computed, one was tried more than once,
        # or this step launched a round without waiting for one, or waited for one and computed another.
        one_round = (before is None) == (self._flight is None)
        follows = self.busy and round.shares and self._chunks.failures == short and one_round
        # a prompt of which all but one token was cached is like one that decodes
        other = round.tokens - round.decoding if any(share.count > 1 for share in round.shares) else 0
        self._before = (round.decoding, other, now_ms) if follows else None
        return updates

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

    def resize(self, pages: int) -> int:
        """Grow or shrink the KV memory between rounds; return the pages it has now.

        It never shrinks below what one of its requests may need. Requests whose pages go wait and are computed again;
        their answers do not change.
        """
        if self._flight is not None:
            self._landed += self._land(self._flight)
            self._flight = None
        held = max((request.sequences[0].limit for request in self._held.values()), default=1)
        pages = max(2, pages, self._schedule.pool.pages_for(held))
        if pages > self._schedule.pool.size:
            self.runner.resize(pages)
        have, preempted = self._schedule.resize(pages)
        self._preemptions += len(preempted)
        if have != self.runner.pages:
            self.runner.resize(have)
        return have

    def open_with(self, pages: int) -> None:
        """Set how many pages there are again after `sleep`."""
        self._pages_first = pages

    def sleep(self) -> None:
        """Give back the device's memory until `wake`; RuntimeError while requests are inside.

        Weights wait in the host's memory. Pages go, with every prefix that they held; there are as many again as there
        were at first.
        """
        if self._live:
            raise RuntimeError(f"{len(self._live)} requests are inside; an engine sleeps when there are none")
        if self._flight is not None:  # of requests that have left; the device must be done with it
            self._land(self._flight)
            self._flight = None
        self._landed.clear()
        self._before = None
        self._cache.clear()
        have, _ = self._schedule.resize(self._pages_first)
        self.runner.sleep(have)
        if self._speculation is not None:
            self._speculation.sleep()

    def wake(self) -> None:
        """Be as before `sleep`, with empty pages; ModelError when the device has no memory for it."""
        self.runner.wake()
        if self._speculation is not None:
            self._speculation.wake()

    def record(self, report: Callable[[int, int], None] = lambda done, all: None, most: int | None = None) -> bool:
        """Record CUDA graphs that are missing, of each model all or the `most` largest; return whether some are left.

        All are missing at first, after `wake`, and after `resize`. A round that needs a missing one records it, and its
        requests wait for that; to be called while there are none.
        """
        left = [runner.record(report, most) for runner in self._runners]
        return any(left)

    @property
    def recorded(self) -> bool:
        """Return whether no graph is left for `record`."""
        return self.runner.asleep or all(one.graphs is None or one.graphs.complete for one in self._runners)

    def kv_events(self, after: int = 0, most: int = 1000) -> KvEvents:
        """Return what happened to cached pages since event number `after`."""
        return self._cache.log.pull(after, most)

    def stats(self) -> EngineStats:
        pages = PageCounts(0, 0, 0) if self.runner.asleep else self._schedule.pool.counts()
        prefix = self._cache.counts()
        counts = self._speculation.counts if self._speculation is not None else None
        graphs = [one.graphs for one in self._runners if one.graphs is not None]
        return EngineStats(
            pages.free, pages.idle, pages.used, len(self._schedule.running),
            len(self._schedule.waiting) + len(self._held), self._rounds, self._preemptions,
            prefix.asked_tokens, prefix.hit_tokens, len(self._paused),
            counts.guessed if counts else 0, counts.right if counts else 0, self.runner.page_bytes,
            self._chunks.size, self._chunks.failures,
            sum(len(one.recorded) for one in graphs), sum(len(one.failures) for one in graphs),
        )  # fmt: skip

    def check(self) -> None:
        """Raise RuntimeError unless every page is accounted for; cheap enough to call when idle."""
        self._schedule.pool.check([s.table for request in self._live.values() for s in request.sequences])

    def close(self) -> None:
        """End what runs beside the engine: the compiler of grammars, and processes of a model that is split."""
        self._constraints.close()
        self.runner.close()

    def clear_prefixes(self) -> None:
        """Forget all cached prefixes that no request uses."""
        self._cache.clear()

    @property
    def _runners(self) -> tuple[Runner, ...]:
        return (self.runner, *(self._speculation.runners if self._speculation is not None else ()))

    def _spell(self, word: str) -> list[tuple[int, ...]]:
        if self.tokens is None:
            raise InputError("sampling.bad_words: this engine has no tokenizer")
        return self.tokens.spell(word)

    def _release(self) -> list[Update]:
        """Let requests in whose constraint is compiled; those with a bad one fail."""
        updates: list[Update] = []
        idle = self._live.keys() <= self._held.keys() | self._paused
        for id in list(self._held):
            request = self._held[id]
            try:
                ready = self._constraints.is_ready(request, wait=idle)
            except WeftlineError as error:
                self._end(request, "fail")
                updates.append(Update(id, error=error, last=True))
                continue
            if ready:
                self._schedule.add(self._held.pop(id).sequences[0])
        return updates

    def _guess(self, speculation: Speculation) -> None:
        """Have tokens guessed for whoever decodes freely; a guesser that fails only costs its guesses."""
        sequences = [
            s for s in self._schedule.running
            if s.remaining == 1 and len(s.tokens) > s.prompt and not s.paused and not s.params.constraint
        ]  # fmt: skip
        sequences = sequences[: self._schedule.limits.sequences_max]  # a draft model's round holds no more
        try:
            speculation.guess(sequences)
        except Exception:  # a draft model may raise whatever models raise
            _log.exception("speculation failed for a round of %d", len(sequences))
            for sequence in sequences:
                sequence.draft = ()

    def _run(self, round: Round) -> list[Update]:
        """Compute a round and take it into the books."""
        updates: list[Update] = []
        # What ended when the round before landed is no longer there, though it was planned.
        shares = [share for share in round.shares if share.sequence.state == "running"]
        short = self._chunks.failures
        for outcome in self._compute.run(shares, round.copies):
            if outcome.share.sequence.state != "running":
                continue  # another answer to the same request failed in this round
            if outcome.token >= 0:
                self._schedule.advance(outcome.share, (outcome.token,))
                updates.append(self._note_token(outcome.share, outcome.token))
            else:
                updates += self._note(outcome)
        if self._chunks.failures == short and self._chunks.succeeded(prompt_tokens(shares)):
            _log.info("no recent out-of-memory errors; rounds have at most %d prompt tokens now", self._chunks.size)
        return updates

    def _land(self, flight: Flight) -> list[Update]:
        """Wait for a round that was on its way, and take it into the books; whoever left meanwhile gets nothing."""
        updates = []
        for share, token in zip(flight.shares, flight.land(), strict=True):
            sequence = share.sequence
            if sequence.state not in ("running", "waiting"):
                continue
            if isinstance(token, Exception):
                self._end(self._live[sequence.id], "fail")
                updates.append(Update(sequence.id, error=token, last=True))
                continue
            self._schedule.settle(share, token)
            updates.append(self._note_token(share, token))
        return updates

    def _note_token(self, share: Share, token: int) -> Update:
        """Take in what nearly every share brings: one token."""
        sequence = share.sequence
        text, finish = self._replies[sequence.order].take_one(token)
        last = False
        if finish is not None:
            request = self._live[sequence.id]
            self._leave(request, sequence, "finish")
            last = not request.sequences
        return Update(
            sequence.id, (token,), text, finish, sequence.prompt, share.start + 2 - sequence.prompt,
            sequence.cached, None, sequence.index, last,
            guessed_tokens=sequence.guessed, right_tokens=sequence.right,
        )  # fmt: skip

    def _note(self, outcome: Outcome) -> Iterable[Update]:
        """Take one share's outcome into the books; yield what there is to tell."""
        share, sequence = outcome.share, outcome.share.sequence
        request = self._live[sequence.id]
        if outcome.error is not None:
            self._end(request, "fail")
            yield Update(sequence.id, error=outcome.error, last=True)
            return
        if outcome.prompt:  # a prompt that gave way is read anew
            request.prompt_logprobs[share.start :] = outcome.prompt
        if outcome.pooled is not None:
            self._schedule.advance(share)
            self._end(request, "finish")
            yield Update(sequence.id, finish="stop", last=True, pooled=outcome.pooled, **usage(sequence))
            return
        if not share.samples:
            self._schedule.advance(share)
            return
        children, sequence.forks = sequence.forks, ()
        sequence.whole = False  # its prompt has passed the model, and what was told of it is not told again
        reply = self._replies[sequence.order].take([one.token for one in outcome.tokens], outcome.complete)
        self._schedule.advance(share, reply.tokens)
        if self._speculation is not None:
            self._speculation.learn(sequence, len(share.draft), len(reply.tokens) - 1)
        for child in children:  # before anybody leaves: they share the prompt's pages
            self._schedule.fork(sequence, child)
        yield self._tell(request, sequence, reply, outcome.tokens)
        for child, infos in zip(children, outcome.forked, strict=True):
            answer = self._replies[child.order].take([one.token for one in infos], self._constraints.complete(child))
            child.tokens += answer.tokens
            yield self._tell(request, child, answer, infos)

    def _tell(self, request: LlmRequest, sequence: Sequence, reply: Taken, infos: SequenceOf[TokenInfo]) -> Update:
        prompt, request.prompt_logprobs = tuple(request.prompt_logprobs), []
        if reply.finish is not None:
            self._leave(request, sequence, "finish")
        logprobs = tuple(infos[: len(reply.tokens)]) if sequence.params.logprobs is not None else ()
        return Update(
            sequence.id, reply.tokens, reply.text, reply.finish, **usage(sequence), index=sequence.index,
            last=not request.sequences, logprobs=logprobs, prompt_logprobs=prompt,
        )  # fmt: skip

    def _expire(self, now_ms: float) -> list[Update]:
        expired = [r for id in self._timed if (r := self._live[id]).sequences[0].expired(now_ms)]
        updates = []
        for request in expired:
            sequence = request.sequences[0]
            so_far = f"{len(sequence.answer)} of at most {sequence.limit - sequence.prompt} tokens"
            self._end(request, "fail")
            error = DeadlineExceeded(f"the deadline passed after {so_far} of the answer")
            updates.append(Update(request.id, error=error, last=True))
        return updates

    def _end(self, request: LlmRequest, event: str) -> None:
        for sequence in list(request.sequences):
            self._leave(request, sequence, event)

    def _leave(self, request: LlmRequest, sequence: Sequence, event: str) -> None:
        """Let one answer go; with the last one the request goes too."""
        request.sequences.remove(sequence)
        self._schedule.leave(sequence, event)
        self._replies.pop(sequence.order)
        self._constraints.forget(sequence)
        if self._speculation is not None:
            self._speculation.forget(sequence)
        if not request.sequences:
            del self._live[request.id]
            self._held.pop(request.id, None)
            self._paused.discard(request.id)
            self._timed.discard(request.id)
            self.runner.release_adapter(request.adapter)
