"""Random engines, whose requests come, pause and leave, give each request the answer it gives alone."""

from __future__ import annotations

import random

import pytest

from tests.engine.llm import tiny
from tests.engine.llm.test_speculation import Wrong
from weftline.engine.llm.engine import Engine
from weftline.engine.llm.params import SamplingParams
from weftline.engine.llm.schedule import RoundLimits
from weftline.engine.llm.speculation import NgramProposer, Speculation

STEPS_MAX = 3000
"""Far more rounds than any of these engines needs: who is not done by then never will be."""


def _params(rng: random.Random) -> SamplingParams:
    options = {"tokens_max": rng.choice([1, 2, 6, 14]), "seed": rng.randrange(99), "ignore_eos": rng.random() < 0.6}
    for chance, more in (
        (0.5, {"temperature": 0.9}), (0.2, {"top_k": 20, "top_p": 0.9}), (0.2, {"repetition_penalty": 1.3}),
        (0.3, {"n": rng.choice([2, 3, 5])}), (0.2, {"prompt_logprobs": 0}), (0.2, {"tokens_min": 1}),
        (0.2, {"stop_token_ids": rng.sample(range(3, tiny.VOCABULARY), 20)}),
    ):  # fmt: skip
        options |= more if rng.random() < chance else {}
    return SamplingParams(**options)


def _alone(prompt: list[int], params: SamplingParams) -> dict[int, list[int]]:
    engine, answers = Engine(tiny.runner("llama", 200, 16, "cpu")), {}
    engine.add(0, prompt, params)
    while engine.busy:
        for update in engine.step():
            answers.setdefault(update.index, []).extend(update.tokens)
    return answers


def _engine(rng: random.Random) -> Engine:
    proposer = rng.choice([None, None, NgramProposer, Wrong])
    runner = tiny.fresh_runner("llama", rng.randint(12, 80), rng.choice([4, 8, 16]), rng.choice(["cpu", "gpu"]))
    limits = RoundLimits(rng.choice([3, 8, 48, 64]), rng.choice([1, 2, 6]))
    return Engine(runner, None, limits, rng.random() < 0.8, Speculation(proposer(), 4) if proposer else None)


@pytest.mark.slow(but_first=1)
@pytest.mark.parametrize("seed", range(5))
def test_any_engine_gives_each_request_the_answer_it_gives_alone(seed):
    rng, asked, answers, cancelled = random.Random(seed), {}, {}, set()
    engine = _engine(rng)
    longest = engine.context_max - 21
    for at in range(6):
        prompt = asked[at - 1][0][:20] if at % 3 == 2 else []
        prompt = (prompt + [rng.randrange(3, tiny.VOCABULARY) for _ in range(rng.randint(1, 50))])[:longest]
        asked[at] = (prompt, _params(rng))
        engine.add(at, *asked[at])
    for step in range(STEPS_MAX):
        if not engine.busy and not engine.stats().paused:
            break
        action, id = rng.random(), rng.randrange(6)
        if action < 0.05:
            engine.pause(id)
        elif action < 0.3 or not engine.busy:
            for paused in asked:
                engine.resume(paused)
        elif action < 0.35:
            engine.resize(rng.randint(1, 80))
        elif action < 0.36:
            engine.cancel(id)
            cancelled.add(id)
        for update in engine.step(step * 50.0):
            assert update.error is None
            found = answers.setdefault(update.id, {}).setdefault(update.index, [])
            found += update.tokens
            assert update.completion_tokens == len(found)
        engine.check()
    stats = engine.stats()
    assert (stats.pages_used, stats.running, stats.waiting, stats.paused) == (0, 0, 0, 0)
    for at in asked.keys() - cancelled:
        assert answers[at] == _alone(*asked[at])
