"""Several answers to one prompt, and requests that are refused."""

from __future__ import annotations

import pytest

from tests.engine.llm import tiny
from weftline.engine.llm.engine import Engine
from weftline.engine.llm.params import SamplingParams
from weftline.engine.llm.request import LlmRequestOptions
from weftline.engine.llm.schedule import RoundLimits
from weftline.errors import InputError


def _engine(pages: int = 64) -> Engine:
    return Engine(tiny.runner("llama", pages), None, RoundLimits(48, 8))


def _finish(engine: Engine) -> dict[tuple[int, int], list[int]]:
    answers: dict[tuple[int, int], list[int]] = {}
    while engine.busy:
        for update in engine.step():
            assert update.error is None
            answers.setdefault((update.id, update.index), []).extend(update.tokens)
        engine.check()
    return answers


@pytest.mark.parametrize("length", [16, 19, 33])
@pytest.mark.parametrize("pages", [64, 22])
def test_several_answers_to_one_prompt_are_those_of_so_many_requests(length, pages):
    prompt = [5 + at % 60 for at in range(length)]
    params = {"tokens_max": 12, "temperature": 1.0, "ignore_eos": True, "seed": 9}
    engine = _engine(pages)
    engine.add(1, prompt, SamplingParams(**params, n=4))
    engine.add(2, [7, 8, 9], SamplingParams(tokens_max=20, ignore_eos=True))
    answers = _finish(engine)
    seeds = [s.seed for s in _sequences(prompt, SamplingParams(**params, n=4))]
    alone = _engine()
    for at, seed in enumerate(seeds):
        alone.add(at, prompt, SamplingParams(**{**params, "seed": seed}))
    expected = _finish(alone)
    assert [answers[1, at] for at in range(4)] == [expected[at, 0] for at in range(4)]
    assert len({tuple(answers[1, at]) for at in range(4)}) > 1
    assert engine.stats().pages_used == 0


def _sequences(prompt, params):
    engine = _engine()
    engine.add(1, prompt, params)
    return engine._live[1].sequences


def test_the_prompt_of_several_answers_is_computed_and_kept_once():
    engine = _engine()
    engine.add(1, list(range(3, 43)), SamplingParams(tokens_max=4, n=6, temperature=1.0, ignore_eos=True, seed=1))
    engine.step()
    assert engine.stats().pages_used == 5
    engine.step()
    assert engine.stats().pages_used == 5 + 6 - (40 % 8 != 0)
    _finish(engine)


def test_answers_with_a_half_full_last_page_copy_it_when_they_write():
    engine = _engine()
    engine.add(1, list(range(3, 44)), SamplingParams(tokens_max=4, n=3, temperature=1.0, ignore_eos=True, seed=1))
    engine.step()
    assert engine.stats().pages_used == 6
    engine.step()
    assert engine.stats().pages_used == 8
    _finish(engine)


def test_a_cancel_and_a_deadline_end_all_answers_of_a_request():
    engine = _engine()
    many = SamplingParams(tokens_max=50, n=5, temperature=1.0, ignore_eos=True)
    engine.add(1, [5, 6, 7], many)
    engine.add(2, [5, 6, 8], many, LlmRequestOptions(deadline_ms=50.0))
    engine.add(3, [5, 6, 9], many)
    engine.cancel(3)
    for now_ms in range(5):
        engine.step(now_ms)
    engine.cancel(1)
    updates = engine.step(60.0)
    assert [(u.id, u.last) for u in updates if u.error] == [(2, True)]
    assert not engine.busy
    engine.check()
    assert engine.stats().pages_used == 0


@pytest.mark.parametrize(
    ("params", "named"),
    [
        ({"allowed_token_ids": [tiny.VOCABULARY]}, "allowed_token_ids"),
        ({"logit_bias": {"100000": 1.0}}, "logit_bias"),
        ({"bad_words": ["x"]}, "bad_words"),
        ({"echo": True}, "echo"),
        ({"regex": "a*"}, "regex"),
        ({"json_schema": {}}, "json_schema"),
    ],
)
def test_what_the_model_does_not_have_is_refused_and_others_are_unaffected(params, named):
    engine = _engine()
    engine.add(1, [5, 6], SamplingParams(tokens_max=2, ignore_eos=True))
    with pytest.raises(InputError, match=named):
        engine.add(2, [5, 6], SamplingParams(**params))
    assert list(_finish(engine)) == [(1, 0)]


def test_an_unknown_adapter_is_refused():
    with pytest.raises(InputError, match="no adapters"):
        _engine().add(1, [5, 6], SamplingParams(), LlmRequestOptions(adapter="legal"))
