"""LLM engine: continuous batching from requests to tokens and text, one round at a time.

    engine = Engine(Runner.open("models/shapes-chat"), Tokens.open("models/shapes-chat"))
    engine.add(1, [5, 6, 7], SamplingParams(tokens_max=20))
    while engine.busy:
        for update in engine.step(): ...

Time is an argument, in milliseconds of any one clock. It is needed for deadlines, ageing, and the pace of long prompts.

`step` plans a round (`weftline.engine.llm.schedule`), has it computed (`weftline.engine.llm.executor`), and applies the
results. A failed request does not affect the others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from collections.abc import Sequence as SequenceOf

from weftline.engine.llm.counters import EngineStats
from weftline.engine.llm.executor import ChunkResult, RoundExecutor, RoundInFlight
from weftline.engine.llm.kv_cache import PageCounts, PrefixCache
from weftline.engine.llm.output import SequenceOutput
from weftline.engine.llm.params import SamplingParams, sampling_error
from weftline.engine.llm.prefill_pace import BalancedPace, Pace, RoundTimer, StretchedPace
from weftline.engine.llm.request import (
    DEFAULT_OPTIONS,
    LlmRequest,
    LlmRequestOptions,
    TokenUpdate,
    check_params,
    to_sequences,
)
from weftline.engine.llm.request_grammars import RequestGrammars
from weftline.engine.llm.runner import Runner
from weftline.engine.llm.schedule import Round, RoundLimits, Schedule, ScheduledChunk
from weftline.engine.llm.sequence import LIVE, Sequence
from weftline.engine.llm.speculation import Speculation
from weftline.engine.llm.tokens import Tokens
from weftline.errors import DeadlineExceeded, InputError, LimitReached, WeftlineError
from weftline.nodes.out_of_memory import BatchSizeLimit

WAITING_MAX = 4096
"""Most requests inside the engine; the pipeline's own limits are much lower."""


class Engine:
    """A model with its pages and its requests. Without `tokens` it handles token ids only: no text, no stop strings."""

    def __init__(
        self,
        runner: Runner,
        tokens: Tokens | None = None,
        limits: RoundLimits | None = None,
        prefix_cache: bool = True,
        speculation: Speculation | None = None,
        grammars: RequestGrammars | None = None,
    ) -> None:
        self.runner = runner
        self.tokens = tokens
        self._cache = PrefixCache(runner.pages, runner.page_tokens, prefix_cache)
        self._schedule = Schedule(limits or RoundLimits(), self._cache)
        self._speculation = speculation
        self._grammars = grammars or RequestGrammars(None)
        self._prefill_limit = BatchSizeLimit(self._schedule.limits.tokens_max, runner.page_tokens)
        self._executor = RoundExecutor(runner, self._grammars, self._prefill_limit)
        self._pages_at_wake = runner.pages
        on_cpu = runner.device.type == "cpu"
        self._pace: Pace = StretchedPace() if on_cpu else BalancedPace(self._schedule.limits.tokens_max)
        self._timer = RoundTimer(self._pace)
        self._live: dict[int, LlmRequest] = {}
        self._compiling: dict[int, LlmRequest] = {}  # live, but their grammar is not compiled yet
        self._paused: set[int] = set()
        self._timed: set[int] = set()  # requests with a deadline
        self._outputs: dict[int, SequenceOutput] = {}
        self._in_flight: RoundInFlight | None = None
        self._ready: list[TokenUpdate] = []  # for the next step to return
        self._rounds = self._preemptions = self._arrived = 0

    @property
    def busy(self) -> bool:
        """Return whether `step` has work to do; paused requests have none."""
        return len(self._live) > len(self._paused) or self._in_flight is not None or bool(self._ready)

    @property
    def limits(self) -> RoundLimits:
        return self._schedule.limits

    @property
    def context_max(self) -> int:
        """Return the most tokens of prompt and answer together: the model's context, or what the pages hold."""
        return min(self.runner.context_max, self._schedule.pool.size * self.runner.page_tokens)

    def add(
        self,
        id: int,
        prompt: SequenceOf[int],
        params: SamplingParams,
        options: LlmRequestOptions = DEFAULT_OPTIONS,
        *,
        now_ms: float = 0.0,
    ) -> None:
        """Queue a request; InputError or LimitReached where it is refused."""
        self._check_add(id, params, options)
        slot, salt = self.runner.adapter_slot_and_salt(options.adapter)
        sequences = to_sequences(
            id, prompt, params, options, vocabulary=self.runner.vocabulary, context_max=self.context_max,
            arrived=self._arrived + 1, now_ms=now_ms, salt=salt, slot=slot, spell=self._spell,
        )  # fmt: skip
        if self.runner.head is not None:
            sequences[0].skips_prefix_cache = self.runner.head.whole
        request = LlmRequest(id, sequences, options.adapter)
        if self._grammars.start(request):
            self._compiling[id] = request
        else:
            self._schedule.add(sequences[0])
        self._arrived += len(sequences)
        self._live[id] = request
        if options.deadline_ms is not None:
            self._timed.add(id)
        self.runner.hold_adapter(options.adapter)
        self.runner.hold_images(id, options.salt, options.images)
        for sequence in sequences:
            text = self.tokens.stream(params.stop, not params.skip_special_tokens) if self.tokens is not None else None
            echo = self.tokens.decode(prompt) if self.tokens is not None and params.echo else ""
            self._outputs[sequence.order] = SequenceOutput(sequence, self.runner.ends, text, echo)

    def cancel(self, id: int) -> None:
        """Drop a request and free its pages at once; unknown and finished ones are ignored."""
        self._ready = [update for update in self._ready if update.id != id]
        if id in self._live:
            self._end(self._live[id], "cancel")

    def pause(self, id: int) -> None:
        """Stop scheduling a request until `resume`; it keeps its pages until another request needs them."""
        if id in self._live:
            self._paused.add(id)
            for sequence in self._live[id].sequences:
                sequence.paused = True

    def resume(self, id: int) -> None:
        """Schedule a paused request again; its answer is the same as without the pause."""
        if id in self._paused:
            self._paused.discard(id)
            for sequence in self._live[id].sequences:
                sequence.paused = False

    def step(self, now_ms: float = 0.0) -> list[TokenUpdate]:
        """Compute one round and return the updates of its requests.

        Requests whose deadline has passed at `now_ms` fail first, and their pages are free for this round.
        """
        self._schedule.pool.now_ms = now_ms
        self._timer.start(now_ms)
        updates, self._ready = self._ready, []
        updates += self._expire(now_ms)
        updates += self._add_compiled()
        failures = self._prefill_limit.failures
        round = self._plan()
        previous, self._in_flight = self._in_flight, self._launch(round)
        if previous is not None:  # while the device computes the new round
            updates += self._take_results(previous.wait())
        if self._in_flight is None:
            updates += self._take_results(self._compute(round))
        # Timed is a round that this step computed alone and once: none was launched without its wait, or retried.
        once = (previous is None) == (self._in_flight is None) and self._prefill_limit.failures == failures
        self._timer.stop(round if once and self.busy else None)
        return updates

    def generate(self, prompts: SequenceOf[SequenceOf[int]], params: SamplingParams) -> list[list[int]]:
        """Return the tokens of the answers to all prompts, computed together; raises the first failure."""
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
        """Grow or shrink the KV memory between rounds; return the number of pages.

        It never shrinks below what one of its requests may need. Requests that lose their pages wait and are
        recomputed; their answers do not change.
        """
        self._land()
        longest = max((request.sequences[0].limit for request in self._compiling.values()), default=1)
        pages = max(2, pages, self._schedule.pool.pages_for(longest))
        if pages > self._schedule.pool.size:
            self.runner.resize(pages)
        have, preempted = self._schedule.resize(pages)
        self._preemptions += len(preempted)
        if have != self.runner.pages:
            self.runner.resize(have)
        return have

    def set_pages_at_wake(self, pages: int) -> None:
        """Set the number of pages after `sleep` and `wake`."""
        self._pages_at_wake = pages

    def sleep(self) -> None:
        """Release the device's memory until `wake`; RuntimeError while requests are inside.

        Weights move to host memory. Pages are dropped with the prefix cache; `wake` allocates the original number.
        """
        if self._live:
            raise RuntimeError(f"{len(self._live)} requests are inside; an engine sleeps when there are none")
        self._land()  # a round of cancelled requests; the device must be done with it
        self._ready.clear()
        self._timer.stop(None)
        self._cache.clear()
        have, _ = self._schedule.resize(self._pages_at_wake)
        self.runner.sleep(have)
        if self._speculation is not None:
            self._speculation.sleep()

    def wake(self) -> None:
        """Restore the state before `sleep`, with empty pages; ModelError when the device has no memory for it."""
        self.runner.wake()
        if self._speculation is not None:
            self._speculation.wake()

    def record(self, report: Callable[[int, int], None] = lambda done, all: None, most: int | None = None) -> bool:
        """Record missing CUDA graphs, of each model all or the `most` largest; return whether some are left.

        All are missing at first, after `wake`, and after `resize`. A round that needs a missing one records it, which
        delays its requests; call this while there are none.
        """
        left = [runner.record(report, most) for runner in self._runners]
        return any(left)

    @property
    def recorded(self) -> bool:
        """Return whether no graph is left for `record`."""
        return self.runner.asleep or all(one.graphs is None or one.graphs.complete for one in self._runners)

    def stats(self) -> EngineStats:
        pages = PageCounts(0, 0, 0) if self.runner.asleep else self._schedule.pool.counts()
        prefix = self._cache.counts()
        counts = self._speculation.counts if self._speculation is not None else None
        graphs = [one.graphs for one in self._runners if one.graphs is not None]
        return EngineStats(
            pages.free, pages.idle, pages.used, len(self._schedule.running),
            len(self._schedule.waiting) + len(self._compiling), self._rounds, self._preemptions,
            prefix.asked_tokens, prefix.hit_tokens, len(self._paused),
            counts.drafted if counts else 0, counts.accepted if counts else 0, self.runner.page_bytes,
            self._prefill_limit.size, self._prefill_limit.failures,
            sum(len(one.recorded) for one in graphs), sum(len(one.failures) for one in graphs),
        )  # fmt: skip

    def check(self) -> None:
        """Raise RuntimeError unless every page is accounted for; cheap enough to call when idle."""
        self._schedule.pool.check([s.table for request in self._live.values() for s in request.sequences])

    def close(self) -> None:
        """End the grammar compiler and the processes of a tensor-parallel model."""
        self._grammars.close()
        self.runner.close()

    def clear_prefixes(self) -> None:
        """Evict all cached prefixes that no request uses."""
        self._cache.clear()

    @property
    def _runners(self) -> tuple[Runner, ...]:
        return (self.runner, *(self._speculation.runners if self._speculation is not None else ()))

    def _check_add(self, id: int, params: SamplingParams, options: LlmRequestOptions) -> None:
        if self.runner.asleep:
            raise RuntimeError("the engine sleeps; requests can be added when it is awake")
        if id in self._live:
            raise InputError(f"request {id} is already running")
        if len(self._live) >= WAITING_MAX:
            raise LimitReached(f"the engine holds {WAITING_MAX} requests, its limit")
        check_params(params, self.runner.vocabulary, self.tokens is not None)
        if options.pool != (self.runner.head is not None):
            raise InputError("this model answers prompts" if options.pool else "this model has a head and no answers")

    def _spell(self, word: str) -> list[tuple[int, ...]]:
        if self.tokens is None:
            raise sampling_error("bad_words", "this engine has no tokenizer")
        return self.tokens.spell(word)

    def _expire(self, now_ms: float) -> list[TokenUpdate]:
        """Fail the requests whose deadline has passed."""
        if not self._timed:
            return []
        updates = []
        for request in [r for id in self._timed if (r := self._live[id]).sequences[0].expired(now_ms)]:
            sequence = request.sequences[0]
            so_far = f"{len(sequence.answer)} of at most {sequence.limit - sequence.prompt} tokens"
            error = DeadlineExceeded(f"the deadline passed after {so_far} of the answer")
            updates.append(self._fail(request, TokenUpdate(request.id, error=error, last=True)))
        return updates

    def _add_compiled(self) -> list[TokenUpdate]:
        """Schedule requests whose grammar is compiled; fail those with an invalid one."""
        if not self._compiling:
            return []
        updates: list[TokenUpdate] = []
        idle = self._live.keys() <= self._compiling.keys() | self._paused
        for id in list(self._compiling):
            request = self._compiling[id]
            try:
                ready = self._grammars.is_ready(request, wait=idle)
            except WeftlineError as error:
                updates.append(self._fail(request, TokenUpdate(id, error=error, last=True)))
                continue
            if ready:
                self._schedule.add(self._compiling.pop(id).sequences[0])
        return updates

    def _plan(self) -> Round:
        """Return the next round, with draft tokens where speculation has some."""
        if self._speculation is not None:
            self._speculation.draft(self._schedule.running, self._schedule.limits.sequences_max)
        round = self._schedule.plan(self._pace.chunk, self._prefill_limit.size)
        self._preemptions += len(round.preempted)
        self._rounds += bool(round.chunks)
        return round

    def _launch(self, round: Round) -> RoundInFlight | None:
        """Start a round whose tokens the device samples by itself; None where it must be computed here."""
        started = self._executor.launch(round) if self._speculation is None else None
        if started is not None:
            for chunk in round.chunks:
                self._schedule.promise(chunk)
        return started

    def _compute(self, round: Round) -> list[ChunkResult]:
        """Compute a round, without sequences that ended since it was planned."""
        return self._executor.compute([chunk for chunk in round.chunks if chunk.sequence.state in LIVE], round.copies)

    def _land(self) -> None:
        """Wait for the round in flight, if any; the next step returns its updates."""
        if self._in_flight is not None:
            previous, self._in_flight = self._in_flight, None
            self._ready += self._take_results(previous.wait())

    def _take_results(self, results: Iterable[ChunkResult]) -> list[TokenUpdate]:
        """Advance sequences by their results; return the updates for the callers."""
        updates: list[TokenUpdate] = []
        for chunk, produced in results:
            if chunk.sequence.state not in LIVE:  # cancelled, or another answer of the request failed
                continue
            request = self._live[chunk.sequence.id]
            if produced and produced[0].error is not None:
                updates.append(self._fail(request, produced[0]))
                continue
            if produced and produced[0].prompt_logprobs:  # from its start: a preempted prompt is computed again
                request.prompt_logprobs[chunk.start :] = produced[0].prompt_logprobs
                produced[0].prompt_logprobs = ()
            if chunk.samples:
                updates += self._take_samples(request, chunk, produced)
            else:
                self._schedule.advance(chunk)
        return updates

    def _take_samples(
        self, request: LlmRequest, chunk: ScheduledChunk, produced: list[TokenUpdate]
    ) -> Iterable[TokenUpdate]:
        """Apply the updates of a sequence, and of the answers that fork from it."""
        sequence, update = chunk.sequence, produced[0]
        if update.pooled is not None:
            self._schedule.advance(chunk)
            update.finish = "stop"
            return [self._finish(request, sequence, chunk, update)]
        sequence.skips_prefix_cache = False  # its prompt has passed the model; log-probabilities are returned once
        self._outputs[sequence.order].add(update)
        self._schedule.advance(chunk, update.tokens)
        if self._speculation is not None:
            self._speculation.record(sequence, len(chunk.draft), len(update.tokens) - 1)
        if not sequence.forks:
            return [self._finish(request, sequence, chunk, update)]
        children, sequence.forks = sequence.forks, ()
        for child in children:  # before any of them ends: they share the prompt's pages
            self._schedule.fork(sequence, child)
        updates = [self._finish(request, sequence, chunk, update)]
        for child, own in zip(children, produced[1:], strict=True):
            self._outputs[child.order].add(own)
            child.tokens += own.tokens
            updates.append(self._finish(request, child, chunk, own))
        return updates

    def _finish(
        self, request: LlmRequest, sequence: Sequence, chunk: ScheduledChunk, update: TokenUpdate
    ) -> TokenUpdate:
        """Complete an update with its counts; an answer that has ended leaves the engine."""
        drafted = len(chunk.draft) if chunk.draft else 0  # no call for the usual chunk: this runs once a token
        known = chunk.start + chunk.count - drafted  # before this round
        update.prompt_tokens = sequence.prompt
        update.completion_tokens = known + len(update.tokens) - sequence.prompt
        update.cached_tokens = sequence.cached
        update.drafted_tokens, update.accepted_tokens = sequence.drafted, sequence.accepted
        if request.prompt_logprobs:
            update.prompt_logprobs, request.prompt_logprobs = tuple(request.prompt_logprobs), []
        if update.finish is not None:
            if sequence.params.tokens_max == 0:  # the prompt alone was asked for
                update.tokens, update.completion_tokens = (), 0
            self._leave(request, sequence, "finish")
            update.last = not request.sequences
        return update

    def _fail(self, request: LlmRequest, update: TokenUpdate) -> TokenUpdate:
        self._end(request, "fail")
        return update

    def _end(self, request: LlmRequest, event: str) -> None:
        for sequence in list(request.sequences):
            self._leave(request, sequence, event)

    def _leave(self, request: LlmRequest, sequence: Sequence, event: str) -> None:
        """Remove one answer; the last one removes its request."""
        request.sequences.remove(sequence)
        self._schedule.leave(sequence, event)
        self._outputs.pop(sequence.order)
        self._grammars.drop(sequence)
        if self._speculation is not None:
            self._speculation.drop(sequence)
        if not request.sequences:
            del self._live[request.id]
            self._compiling.pop(request.id, None)
            self._paused.discard(request.id)
            self._timed.discard(request.id)
            self.runner.release_adapter(request.adapter)
            self.runner.release_images(request.id, sequence.images)
