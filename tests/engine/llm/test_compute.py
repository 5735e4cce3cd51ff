"""What a round's rows are for: prompts that are told of, several answers to one prompt, and those that fail."""

from __future__ import annotations

import weakref

import pytest
import torch

from tests.engine.llm import tiny
from weftline.engine.llm.engine import Engine
from weftline.engine.llm.params import SamplingParams
from weftline.engine.llm.rounds import RoundLimits

LONG = list(range(3, 83))


def _engine(pages: int = 60, budget: int = 48) -> Engine:
    return Engine(tiny.fresh_runner("llama", pages), None, RoundLimits(budget, 6))


def _answers(engine: Engine, prompt: list[int], params: SamplingParams) -> dict[int, list[int]]:
    answers: dict[int, list[int]] = {}
    engine.add(1, prompt, params)
    while engine.busy:
        for update in engine.step():
            answers.setdefault(update.index, []).extend(update.tokens)
    return answers


@pytest.mark.parametrize("n", [4, 5, 6])
def test_several_answers_are_the_same_whether_their_prompt_is_told_of_or_not(n):
    # five answers want five rows, as many as the prompt has; each is of the prompt's last
    params = {"tokens_max": 3, "ignore_eos": True, "temperature": 1.0, "seed": 3, "n": n}
    told = SamplingParams(**params, prompt_logprobs=0)
    assert _answers(_engine(), [5, 6, 7, 8, 9], told) == _answers(_engine(), [5, 6, 7, 8, 9], SamplingParams(**params))


@pytest.mark.parametrize("at_step", [2, 9], ids=["while its prompt is read", "while it answers"])
def test_a_prompt_is_told_of_once_though_its_request_gave_way(at_step):
    engine = _engine(20, budget=16)
    before = SamplingParams(tokens_max=60, ignore_eos=True)
    engine.add(1, [3, 4], before)
    engine.add(2, LONG, SamplingParams(tokens_max=8, ignore_eos=True, prompt_logprobs=0))
    told, step = [], 0
    while engine.busy:
        if step == at_step:
            assert engine.resize(12) == 12
        for update in engine.step():
            if update.prompt_logprobs:
                told.append([one.token for one in update.prompt_logprobs])
        step += 1
    assert engine.stats().preemptions > 0
    assert told == [LONG[1:]]


def test_answers_of_one_request_that_fail_in_one_round_fail_it_once_and_nobody_else(monkeypatch):
    engine = _engine()
    run = engine.runner.run

    def breaks(shares, copies=()):
        logits, row = run(shares, copies), 0
        for share in shares:
            if share.sequence.id == 1 and share.start > 4:
                logits[row : row + share.rows] = torch.nan
            row += share.rows
        return logits

    monkeypatch.setattr(engine.runner, "run", breaks)
    engine.add(1, [5, 6, 7], SamplingParams(tokens_max=9, n=3, temperature=1.0, seed=1, ignore_eos=True))
    engine.add(2, [8, 9], SamplingParams(tokens_max=9, ignore_eos=True))
    ended = []
    while engine.busy:
        ended += [(update.id, update.finish) for update in engine.step() if update.last]
        engine.check()
    assert ended == [(1, None), (2, "length")]


def test_a_pass_for_which_there_was_no_memory_holds_none_while_each_is_tried_alone(monkeypatch):
    """Nor does one that fails alone, while those behind it are tried."""
    engine = _engine()
    run, held, passes = engine.runner.run, [], []

    def short(shares, copies=()):
        passes.append([share.sequence.id for share in shares])
        assert not any(one() is not None for one in held), "an earlier pass still holds its tensors"
        work = torch.empty(1 << 10)
        held.append(weakref.ref(work))
        if len(shares) > 1 or shares[0].sequence.id == 1:
            raise torch.OutOfMemoryError(f"CUDA out of memory. {work.shape}")
        return run(shares, copies)

    monkeypatch.setattr(engine.runner, "run", short)
    for id in (1, 2, 3):
        engine.add(id, [5, 6, 7], SamplingParams(tokens_max=1, ignore_eos=True))
    ended = [(update.id, update.finish) for update in engine.step() if update.last]
    assert passes == [[1, 2, 3], [1], [2], [3]]
    assert ended == [(1, None), (2, "length"), (3, "length")]
