"""A KV memory that grows and shrinks while requests run."""

from __future__ import annotations

import random

from tests.engine.llm import tiny
from weftline.engine.llm.engine import Engine
from weftline.engine.llm.kv_cache import PagePool, PageTable
from weftline.engine.llm.params import SamplingParams
from weftline.engine.llm.schedule import RoundLimits

PARAMS = {"tokens_max": 30, "ignore_eos": True, "temperature": 0.8}


def _run(resizes: dict[int, int], n: int = 1) -> tuple[list[list[int]], Engine, list[int]]:
    prompts = tiny.prompts(10, seed=12, longest=60)
    engine = Engine(tiny.fresh_runner("llama", 80), None, RoundLimits(48, 6))
    answers = [[[] for _ in range(n)] for _ in prompts]
    for at, prompt in enumerate(prompts):
        engine.add(at, prompt, SamplingParams(**PARAMS, seed=at, n=n))
    step, sizes = 0, []
    while engine.busy:
        if step in resizes:
            sizes.append(engine.resize(resizes[step]))
            assert engine.runner.pages == sizes[-1]
            assert engine.runner._layers[0].keys.shape[1] == sizes[-1] * 8
        for update in engine.step():
            assert update.error is None
            answers[update.id][update.index] += update.tokens
        engine.check()
        step += 1
    return answers, engine, sizes


def test_answers_are_the_same_whatever_the_memory_does_meanwhile():
    plain, _, _ = _run({})
    resized, engine, sizes = _run({5: 14, 20: 60, 30: 20, 40: 100, 50: 2})
    assert resized == plain
    assert sizes[0] < 30
    assert sizes[3] == 100
    assert engine.stats().preemptions > 0
    assert engine.stats().pages_used == 0


def test_answers_that_share_their_prompts_pages_are_the_same_too():
    plain, _, _ = _run({}, n=3)
    resized, _, _ = _run({4: 16, 9: 80, 12: 16, 30: 50}, n=3)
    assert resized == plain


def test_it_never_shrinks_below_a_requests_need_and_evicts_idle_pages():
    engine = Engine(tiny.fresh_runner("llama", 64), None, RoundLimits(48, 6))
    engine.add(1, list(range(3, 83)), SamplingParams(tokens_max=16, ignore_eos=True))
    engine.step()
    assert engine.resize(1) == 12
    while engine.busy:
        engine.step()
    assert engine.resize(4) == 4
    assert engine.context_max == 32
    assert engine.stats().pages_free + engine.stats().pages_idle == 4
    assert engine.resize(64) == 64


def test_the_books_of_a_pool_balance_through_any_resizes():
    rng, pool, tables = random.Random(5), PagePool(40, 4), [PageTable() for _ in range(6)]
    for step in range(2000):
        table = rng.choice(tables)
        action = rng.random()
        if action < 0.4:
            pool.try_grow(table, rng.randint(1, 4), rng.randint(0, 6))
        elif action < 0.6:
            for page in table.pages[:2]:
                pool.keep(page)
            pool.drop(table)
        elif action < 0.7 and table.pages:
            pool.share(rng.choice(tables), table.pages[0])
        elif action < 0.8 and table.pages:
            if pool.is_shared(table, len(table.pages) - 1):
                pool.try_own(table, len(table.pages) - 1)
        elif step % 7 == 0:
            pool.resize(rng.randint(1, 60))
        pool.check(tables)
        assert all(page < pool.size for one in tables for page in one.pages)
