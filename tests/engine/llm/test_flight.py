"""Rounds launched before the previous one has finished: the same answers, and no token too many.

Run on a CPU with the form of attention that a GPU has; only the recording of graphs is missing.
"""

from __future__ import annotations

import random

import pytest

from tests.engine.llm import tiny
from weftline.engine.llm.engine import Engine
from weftline.engine.llm.executor import RoundInFlight
from weftline.engine.llm.params import SamplingParams
from weftline.engine.llm.request import LlmRequestOptions
from weftline.engine.llm.schedule import RoundLimits
from weftline.errors import DeadlineExceeded


def _engine(pages: int = 80, form: str = "gpu") -> Engine:
    return Engine(tiny.fresh_runner("llama", pages, form=form), None, RoundLimits(48, 6))


def _answers(engine: Engine, asks, at_step=lambda engine, step: None):
    answers = {}
    for at, (prompt, params) in enumerate(asks):
        engine.add(at, prompt, params)
    step = 0
    while engine.busy:
        at_step(engine, step)
        for update in engine.step(float(step)):
            answers.setdefault((update.id, update.index), []).extend(update.tokens)
            assert update.error is None
            if update.finish:
                assert update.completion_tokens == len(answers[update.id, update.index])
        engine.check()
        step += 1
    assert engine.stats().pages_used == 0
    return answers


def _asks(seed: int):
    rng = random.Random(seed)
    asks = []
    for at, prompt in enumerate(tiny.prompts(14, seed=seed, longest=50)):
        params = {"tokens_max": rng.randint(1, 25), "seed": at, "ignore_eos": at % 3 > 0}
        kind = at % 5
        if kind == 1:
            params |= {"temperature": 0.8}
        elif kind == 2:
            params |= {"temperature": 0.9, "top_p": 0.8, "top_k": 20}
        elif kind == 3:
            params |= {"repetition_penalty": 1.2}
        elif kind == 4 and at % 2:
            params |= {"n": 3, "temperature": 1.0}
        asks.append((prompt, SamplingParams(**params)))
    return asks


@pytest.mark.slow(but_first=1)
@pytest.mark.parametrize("pages", [80, 20])
def test_answers_are_those_of_rounds_one_after_the_other(pages):
    asks = _asks(3)
    ahead = _engine(pages)
    flown = []
    launch = ahead._executor.launch
    ahead._executor.launch = lambda round: flown.append(launch(round)) or flown[-1]
    assert _answers(ahead, asks) == _answers(_engine(pages, form="cpu"), asks)
    assert sum(flight is not None for flight in flown) > 8


def test_memory_that_changes_meanwhile_changes_no_answer():
    asks = _asks(4)
    sizes = {6: 14, 15: 60, 22: 16}
    resized = _answers(_engine(), asks, lambda engine, step: step in sizes and engine.resize(sizes[step]))
    assert resized == _answers(_engine(form="cpu"), asks)


def test_a_request_that_ends_during_a_round_in_flight_gets_no_more_tokens():
    engine = _engine()
    long = SamplingParams(tokens_max=40, ignore_eos=True)
    for at in range(4):
        engine.add(at, [5, 6, 7 + at], long, LlmRequestOptions(deadline_ms=8.0) if at == 3 else LlmRequestOptions())
    got = {at: [] for at in range(4)}
    errors, step = {}, 0
    while engine.busy:
        if step == 5:
            engine.cancel(1)
        for update in engine.step(float(step)):
            assert update.id != 1 or step < 5
            got[update.id] += update.tokens
            if update.error:
                errors[update.id] = update.error
        step += 1
    assert isinstance(errors[3], DeadlineExceeded)
    assert [len(got[at]) for at in (0, 2)] == [40, 40]
    assert -1 not in [token for tokens in got.values() for token in tokens]
    engine.check()
    assert engine.stats().pages_used == 0


def test_a_prefix_is_found_again_only_as_far_as_its_tokens_were_known():
    prompt, params = list(range(3, 40)), SamplingParams(tokens_max=30, ignore_eos=True)
    engine = _engine()
    first = _answers(engine, [(prompt, params)])[0, 0]
    follow = [*prompt, *first, 50, 51]
    assert _answers(engine, [(follow, params)]) == _answers(_engine(form="cpu"), [(follow, params)])
    assert engine.stats().prefix_hit_tokens >= 56


def test_a_device_that_fails_fails_the_round_and_not_the_engine():
    engine = _engine()
    engine.add(1, [5, 6, 7], SamplingParams(tokens_max=9, ignore_eos=True))
    for _ in range(3):
        engine.step()
    engine._in_flight = RoundInFlight(engine._in_flight.chunks, None)
    updates = [update for _ in range(2) for update in engine.step()]
    assert [(update.id, update.last) for update in updates if update.error] == [(1, True)]
    assert len(_answers(engine, [([5, 6], SamplingParams(tokens_max=4, ignore_eos=True))])[0, 0]) == 4


class Clock:
    """A device on which a decoding round takes 6 ms and any other 15 ms, and that works beside the host."""

    def __init__(self, engine: Engine) -> None:
        self.now_ms = self.idle_ms = 0.0
        self.noted: list[tuple[int, float]] = []
        runner, launch, run = engine.runner, engine.runner.launch, engine.runner.run

        def later(chunks, copies=()):
            self.idle_ms = max(self.idle_ms, self.now_ms) + 6
            return Landing(self, launch(chunks, copies), self.idle_ms)

        def now(chunks, copies=()):
            self.now_ms = self.idle_ms = max(self.idle_ms, self.now_ms) + 15
            return run(chunks, copies)

        runner.launch, runner.run = later, now
        engine._pace.note = lambda decoding, chunk, ms: self.noted.append((chunk, ms))


class Landing:
    def __init__(self, clock: Clock, handle, at_ms: float) -> None:
        self._clock, self._handle, self._at_ms = clock, handle, at_ms

    def tokens(self) -> list[int]:
        self._clock.now_ms = max(self._clock.now_ms, self._at_ms)
        return self._handle.tokens()


def test_the_pace_learns_of_whole_rounds_only():
    engine = _engine()
    clock = Clock(engine)
    engine.add(1, [5, 6], SamplingParams(tokens_max=40, ignore_eos=True))
    step = 0
    while engine.busy:
        if step in (5, 9, 10, 20):
            engine.add(1 + step, list(range(3, 60)), SamplingParams(tokens_max=1, ignore_eos=True))
        engine.step(clock.now_ms)
        step += 1
    quiet = [ms for chunk, ms in clock.noted if not chunk]
    mixed = [ms for chunk, ms in clock.noted if chunk]
    assert quiet and set(quiet) == {6.0}, "no launch without a landing counts as a round"
    assert mixed and set(mixed) == {15.0}, "nor what was left of the round before"


def test_a_request_cancelled_after_its_round_was_landed_gets_no_update():
    engine = _engine()
    for at in range(2):
        engine.add(at, [5, 6, 7 + at], SamplingParams(tokens_max=40, ignore_eos=True))
    while engine._in_flight is None:
        engine.step(0.0)
    engine.resize(60)  # waits for the round; the next step returns its updates
    assert {update.id for update in engine._ready} == {0, 1}
    engine.cancel(1)
    assert {update.id for update in engine.step(1.0)} == {0}
