"""The engine's answers are those of transformers' generate, whatever joins, leaves, gives way or is cancelled."""

from __future__ import annotations

import random

import pytest
import torch

from tests.engine.llm import tiny
from weftline.engine.llm.engine import Engine
from weftline.engine.llm.params import SamplingParams
from weftline.engine.llm.request import LlmRequestOptions
from weftline.engine.llm.schedule import RoundLimits
from weftline.engine.llm.tokens import Tokens
from weftline.errors import DeadlineExceeded, InputError, StepError

PROMPTS = 30
"""Prompts of each family; the same test with 200 is a parameter away."""


def _at_baseline(engine: Engine) -> None:
    engine.check()
    stats = engine.stats()
    assert (stats.pages_used, stats.running, stats.waiting) == (0, 0, 0)


@pytest.mark.slow(but_first=1)
@pytest.mark.parametrize("family", ["llama", "qwen3", "mistral"])
@pytest.mark.parametrize(("pages", "budget", "sequences"), [(64, 48, 12), (22, 13, 6)])
def test_greedy_answers_equal_generate_under_joins_preemption_and_cancels(family, pages, budget, sequences):
    rng = random.Random(budget)
    engine = Engine(tiny.runner(family, pages), None, RoundLimits(budget, sequences))
    prompts, wanted = tiny.prompts(PROMPTS, seed=budget), {}
    answers: dict[int, list[int]] = {}
    coming, finished, cancelled = list(range(PROMPTS)), set(), set()
    while coming or engine.busy:
        while coming and (not engine.busy or rng.random() < 0.5):
            at = coming.pop(0)
            wanted[at] = rng.randint(1, 24)
            engine.add(at, prompts[at], SamplingParams(tokens_max=wanted[at]))
            answers[at] = []
        if rng.random() < 0.04:
            gone = rng.choice(list(answers))
            engine.cancel(gone)
            cancelled |= {gone} - finished
        for update in engine.step():
            assert update.error is None
            answers[update.id] += update.tokens
            assert update.id not in cancelled
            finished |= {update.id} if update.finish else set()
        engine.check()
    _at_baseline(engine)
    assert finished | cancelled == set(range(PROMPTS))
    verdicts = [tiny.continues(family, prompts[at], answers[at], wanted[at]) for at in sorted(finished)]
    assert False not in verdicts
    assert verdicts.count(True) >= 0.9 * len(verdicts) > 15
    assert len({tuple(a) for a in answers.values()}) > 10  # the models do say different things
    stats = engine.stats()
    assert stats.prefix_hit_tokens > 0
    assert pages > 22 or stats.preemptions > 0


def test_sampled_answers_do_not_change_with_the_company_or_the_pages():
    prompts = tiny.prompts(8, seed=4)
    params = [SamplingParams(tokens_max=12, temperature=0.8, top_p=0.9, seed=s, ignore_eos=True) for s in range(8)]
    together = _answers(Engine(tiny.runner("llama", 24), None, RoundLimits(17, 8)), prompts, params)
    alone = [
        _answers(Engine(tiny.runner("llama"), None, RoundLimits(512, 1)), [prompt], [param])[0]
        for prompt, param in zip(prompts, params)
    ]
    assert together == alone


@pytest.mark.parametrize("pages", [64, 22])
def test_a_request_that_is_paused_at_times_returns_the_same_tokens(pages):
    prompts = tiny.prompts(6, seed=8)
    params = [SamplingParams(tokens_max=12, temperature=0.8, seed=s, ignore_eos=True) for s in range(6)]
    expected = _answers(Engine(tiny.runner("llama", 64), None, RoundLimits(33, 6)), prompts, params)
    engine, rng = Engine(tiny.runner("llama", pages), None, RoundLimits(33, 6)), random.Random(3)
    found: dict[int, list[int]] = {at: [] for at in range(6)}
    paused: set[int] = set()
    for at, (prompt, param) in enumerate(zip(prompts, params)):
        engine.add(at, prompt, param)
    while engine.stats().running + engine.stats().waiting:
        for at in found:
            if rng.random() < 0.3:
                (engine.resume if at in paused else engine.pause)(at)
                paused ^= {at}
        for update in engine.step():
            assert update.id not in paused
            found[update.id] += update.tokens
        engine.check()
    assert list(found.values()) == expected
    assert pages > 22 or engine.stats().preemptions > 0
    _at_baseline(engine)


def test_an_engine_of_paused_requests_is_not_busy_and_frees_pages():
    engine = Engine(tiny.runner("llama"), None, RoundLimits(16, 4), prefix_cache=False)
    engine.add(1, [5, 6, 7], SamplingParams(tokens_max=50, ignore_eos=True))
    engine.add(2, [5, 6, 8], SamplingParams(tokens_max=50, ignore_eos=True))
    engine.step()
    for id in (1, 1, 2, 99):
        engine.pause(id)
    assert not engine.busy
    assert engine.step() == []
    assert engine.stats().paused == 2
    engine.resume(2)
    assert engine.busy
    engine.cancel(1)
    engine.resume(1)
    assert [update.id for update in engine.step()] == [2]
    engine.pause(2)
    engine.cancel(2)
    _at_baseline(engine)
    assert engine.stats().paused == 0
    assert engine.stats().pages_free == 64


def test_a_request_past_its_deadline_fails_next_round_and_frees_its_pages():
    engine = Engine(tiny.runner("llama"), None, RoundLimits(16, 1), prefix_cache=False)
    long = SamplingParams(tokens_max=50, ignore_eos=True)
    engine.add(1, [5, 6, 7], long, LlmRequestOptions(deadline_ms=100.0))
    engine.add(2, [5, 6, 8], long, LlmRequestOptions(deadline_ms=90.0))
    engine.add(3, [5, 6, 9], SamplingParams(tokens_max=2, ignore_eos=True), now_ms=0.0)
    assert [update.id for update in engine.step(89.0)] == [2]
    updates = engine.step(90.0)
    assert [(update.id, type(update.error)) for update in updates] == [(2, DeadlineExceeded), (1, type(None))]
    assert "1 of at most 50 tokens" in str(updates[0].error)
    engine.pause(1)
    failed, answered = engine.step(100.0)
    assert (failed.id, type(failed.error)) == (1, DeadlineExceeded)
    assert answered.id == 3
    assert engine.step(1e9)[0].finish == "length"
    _at_baseline(engine)
    assert engine.stats().pages_free == 64


def test_the_higher_priority_answers_first():
    engine = Engine(tiny.runner("llama"), None, RoundLimits(16, 1))
    for id, priority in ((1, 0), (2, -5), (3, 5)):
        engine.add(id, [5, 6, id], SamplingParams(tokens_max=2, ignore_eos=True), LlmRequestOptions(priority=priority))
    finished = [update.id for _ in range(6) for update in engine.step() if update.finish]
    assert finished == [3, 1, 2]


def _answers(engine: Engine, prompts: list[list[int]], params: list[SamplingParams]) -> list[list[int]]:
    found: list[list[int]] = [[] for _ in prompts]
    for at, (prompt, param) in enumerate(zip(prompts, params)):
        engine.add(at, prompt, param)
    while engine.busy:
        for update in engine.step():
            assert update.error is None
            found[update.id] += update.tokens
    _at_baseline(engine)
    assert [len(tokens) for tokens in found] == [param.tokens_max for param in params]
    return found


def test_a_cached_prefix_changes_nothing_but_the_count():
    engine = Engine(tiny.runner("qwen3"), None, RoundLimits(64, 4))
    prompt, params = tiny.prompts(1, seed=9, longest=90)[0] * 3, SamplingParams(tokens_max=8)
    first = engine.generate([prompt], params)
    before = engine.stats().prefix_hit_tokens
    assert engine.generate([prompt], params) == first
    assert engine.stats().prefix_hit_tokens - before == (len(prompt) - 1) // 8 * 8
    engine.clear_prefixes()
    assert engine.stats().pages_idle == 0


def test_a_cancelled_requests_pages_are_free_at_once():
    engine = Engine(tiny.runner("llama"), None, RoundLimits(16, 4), prefix_cache=False)
    engine.add(1, list(range(3, 60)), SamplingParams(tokens_max=50))
    engine.add(2, [5, 6], SamplingParams(tokens_max=50))
    engine.step()
    assert engine.stats().pages_used > 0
    engine.cancel(1)
    engine.cancel(2)
    engine.cancel(77)
    _at_baseline(engine)
    assert engine.stats().pages_free == 64
    assert engine.step() == []


@pytest.mark.parametrize(
    ("prompt", "params"),
    [
        ([], {}),
        ([tiny.VOCABULARY], {}),
        ([-1], {}),
        ([3] * 512, {}),
        ([3], {"stop_token_ids": [tiny.VOCABULARY]}),
        ([3], {"stop": ["x"]}),
    ],
)
def test_a_bad_request_is_refused_and_the_others_answer(prompt, params):
    engine = Engine(tiny.runner("llama"), None, RoundLimits(16, 4))
    engine.add(1, [5, 6, 7], SamplingParams(tokens_max=4, ignore_eos=True))
    with pytest.raises(InputError):
        engine.add(2, prompt, SamplingParams(**params))
    tokens = [token for _ in range(6) for update in engine.step() for token in update.tokens]
    assert len(tokens) == 4
    _at_baseline(engine)


def test_an_answer_ends_at_the_context():
    engine = Engine(tiny.runner("llama"), None, RoundLimits(512, 4))
    answer = engine.generate([[3] * 508], SamplingParams(tokens_max=100, ignore_eos=True))[0]
    assert len(answer) == 4


def test_stop_tokens_end_an_answer_with_reason_stop():
    engine = Engine(tiny.runner("llama"), None, RoundLimits(64, 4))
    whole = engine.generate([[9, 8, 7]], SamplingParams(tokens_max=6, ignore_eos=True))[0]
    stop = next(token for token in whole if whole.index(token) >= 1)
    engine.add(1, [9, 8, 7], SamplingParams(tokens_max=6, ignore_eos=True, stop_token_ids=[stop]))
    updates = [update for _ in range(8) for update in engine.step()]
    assert [u.finish for u in updates][-1] == "stop"
    assert [t for u in updates for t in u.tokens] == whole[: whole.index(stop) + 1]


def test_a_stop_string_ends_the_text_before_it():
    words = tiny.tokenizer()
    engine = Engine(tiny.runner("llama"), Tokens(words, 512), RoundLimits(64, 4))
    prompt, params = [40, 50, 60], {"tokens_max": 24, "ignore_eos": True}
    engine.add(1, prompt, SamplingParams(**params))
    text = "".join(u.text for _ in range(30) for u in engine.step())
    stop = text[4:7]
    engine.add(2, prompt, SamplingParams(**params, stop=[stop]))
    updates = [u for _ in range(30) for u in engine.step()]
    assert "".join(u.text for u in updates) == text[: text.find(stop)]
    assert updates[-1].finish == "stop"
    _at_baseline(engine)


class _Faulty:
    """A runner that raises, or gives NaN, whenever a token is in the round: a fault one request brings along."""

    def __init__(self, real, token: int, nan: bool) -> None:
        self._real, self._token, self._nan = real, token, nan

    def __getattr__(self, name: str):
        return getattr(self._real, name)

    def run(self, chunks, copies=()):
        hit = [self._token in s.sequence.tokens for s in chunks]
        if any(hit) and not self._nan:
            raise RuntimeError("the kernel did not like it")
        logits = self._real.run(chunks, copies).clone()
        sampled = [h for h, s in zip(hit, chunks) if s.samples]
        logits[torch.tensor(sampled, dtype=torch.bool)] = torch.nan
        return logits


@pytest.mark.parametrize("nan", [False, True])
def test_a_request_that_breaks_the_model_fails_alone(nan):
    prompts = [[5, 6, 7], [5, 6, 7, 8], [30, 31, 190], [40, 41]]
    params = SamplingParams(tokens_max=5, ignore_eos=True)
    expected = Engine(tiny.runner("llama"), None, RoundLimits(64, 8)).generate(prompts, params)
    engine = Engine(_Faulty(tiny.runner("llama"), 190, nan), None, RoundLimits(64, 8))
    for at, prompt in enumerate(prompts):
        engine.add(at, prompt, params)
    answers, errors = {at: [] for at in range(4)}, {}
    while engine.busy:
        for update in engine.step():
            answers[update.id] += update.tokens
            if update.error:
                errors[update.id] = update.error
    assert list(errors) == [2]
    assert isinstance(errors[2], StepError)
    assert [answers[at] for at in (0, 1, 3)] == [expected[at] for at in (0, 1, 3)]
    _at_baseline(engine)
