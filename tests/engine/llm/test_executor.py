"""Rows of a round: prompt log-probabilities, several answers to one prompt, and failures."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch

from tests.engine.llm import tiny
from weftline.engine.llm.engine import Engine
from weftline.engine.llm.params import SamplingParams
from weftline.engine.llm.schedule import RoundLimits
from weftline.engine.llm.speculation import NgramProposer, Speculation
from weftline.errors import LimitReached

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
def test_several_answers_are_the_same_with_and_without_prompt_logprobs(n):
    # five answers want five rows, as many as the prompt has; each is of the prompt's last
    params = {"tokens_max": 3, "ignore_eos": True, "temperature": 1.0, "seed": 3, "n": n}
    with_logprobs = SamplingParams(**params, prompt_logprobs=0)
    assert _answers(_engine(), [5, 6, 7, 8, 9], with_logprobs) == _answers(
        _engine(), [5, 6, 7, 8, 9], SamplingParams(**params)
    )


@pytest.mark.parametrize("at_step", [2, 9], ids=["while its prompt is read", "while it answers"])
def test_prompt_logprobs_are_returned_once_despite_preemption(at_step):
    engine = _engine(20, budget=16)
    before = SamplingParams(tokens_max=60, ignore_eos=True)
    engine.add(1, [3, 4], before)
    engine.add(2, LONG, SamplingParams(tokens_max=8, ignore_eos=True, prompt_logprobs=0))
    with_logprobs, step = [], 0
    while engine.busy:
        if step == at_step:
            assert engine.resize(12) == 12
        for update in engine.step():
            if update.prompt_logprobs:
                with_logprobs.append([one.token for one in update.prompt_logprobs])
        step += 1
    assert engine.stats().preemptions > 0
    assert with_logprobs == [LONG[1:]]


def test_answers_that_fail_in_one_round_fail_only_their_request_once(monkeypatch):
    engine = _engine()
    run = engine.runner.run

    def breaks(chunks, copies=()):
        logits, row = run(chunks, copies), 0
        for chunk in chunks:
            if chunk.sequence.id == 1 and chunk.start > 4:
                logits[row : row + chunk.rows] = torch.nan
            row += chunk.rows
        return logits

    monkeypatch.setattr(engine.runner, "run", breaks)
    engine.add(1, [5, 6, 7], SamplingParams(tokens_max=9, n=3, temperature=1.0, seed=1, ignore_eos=True))
    engine.add(2, [8, 9], SamplingParams(tokens_max=9, ignore_eos=True))
    ended = []
    while engine.busy:
        ended += [(update.id, update.finish) for update in engine.step() if update.last]
        engine.check()
    assert ended == [(1, None), (2, "length")]


def test_a_pass_out_of_memory_holds_no_tensors_while_chunks_are_retried(monkeypatch):
    """Nor does one that fails alone, while those behind it are tried."""
    engine = _engine()
    run, held, passes = engine.runner.run, [], []

    def short(chunks, copies=()):
        passes.append([chunk.sequence.id for chunk in chunks])
        assert not any(one() is not None for one in held), "an earlier pass still holds its tensors"
        work = torch.empty(1 << 10)
        held.append(weakref.ref(work))
        if len(chunks) > 1 or chunks[0].sequence.id == 1:
            raise torch.OutOfMemoryError(f"CUDA out of memory. {work.shape}")
        return run(chunks, copies)

    monkeypatch.setattr(engine.runner, "run", short)
    for id in (1, 2, 3):
        engine.add(id, [5, 6, 7], SamplingParams(tokens_max=1, ignore_eos=True))
    ended = [(update.id, update.finish) for update in engine.step() if update.last]
    assert passes == [[1, 2, 3], [1], [2], [3]]
    assert ended == [(1, None), (2, "length"), (3, "length")]


class Short:
    """A device with memory for passes of `most` tokens, up to pass number `until`; every pass is written down."""

    def __init__(self, engine: Engine, most: int, until: int = 1 << 30) -> None:
        self.most, self.until = most, until
        self.passes: list[int] = []
        self._run = engine.runner.run
        engine.runner.run = self.run  # type: ignore[method-assign]

    def run(self, chunks: Any, copies: Any = ()) -> torch.Tensor:
        tokens = sum(chunk.count for chunk in chunks)
        self.passes.append(tokens)
        if tokens > self.most and len(self.passes) <= self.until:
            raise torch.OutOfMemoryError(f"CUDA out of memory. Tried to allocate {tokens} KiB")
        return self._run(chunks, copies)


def test_a_prompt_out_of_memory_is_computed_in_smaller_chunks_from_then_on(caplog):
    params = SamplingParams(tokens_max=5, ignore_eos=True)
    expected = _answers(_engine(budget=80), LONG, params)
    engine = _engine(budget=80)
    short = Short(engine, most=25)
    assert _answers(engine, LONG, params) == expected
    assert short.passes[:6] == [80, 40, 16, 16, 16, 16], "halves in whole pages, and what was learned is kept to"
    stats = engine.stats()
    assert (stats.out_of_memory, stats.prompts_max) == (2, 16)
    assert [record.getMessage() for record in caplog.records] == [
        "out of memory at 80 tokens of prompts; rounds have at most 40 from now on",
        "out of memory at 40 tokens of prompts; rounds have at most 16 from now on",
    ]
    engine.clear_prefixes()
    before = len(short.passes)
    assert _answers(engine, LONG, params) == expected
    assert max(short.passes[before:]) == 16 and engine.stats().out_of_memory == 2


@pytest.mark.parametrize(
    ("most", "more"),
    [(8, {"prompt_logprobs": 1}), (11, {"n": 3, "temperature": 1.0, "seed": 5}), (33, {"logprobs": 2})],
)
def test_answers_are_those_of_a_device_with_memory_in_whatever_company(most, more):
    asks = [(LONG, SamplingParams(tokens_max=6, ignore_eos=True, **more)), *(
        (prompt, SamplingParams(tokens_max=9, ignore_eos=True)) for prompt in tiny.prompts(5, seed=3, longest=60)
    )]  # fmt: skip

    def with_logprobs(engine: Engine) -> dict[Any, list[Any]]:
        found: dict[Any, list[Any]] = {}
        for at, (prompt, params) in enumerate(asks):
            engine.add(at, prompt, params)
        while engine.busy:
            for update in engine.step():
                assert update.error is None
                found.setdefault((update.id, update.index), []).extend(update.tokens)
                found.setdefault((update.id, "prompt"), []).extend(one.token for one in update.prompt_logprobs)
            engine.check()
        return found

    engine = _engine(pages=90, budget=100)
    short = Short(engine, most)
    assert with_logprobs(engine) == with_logprobs(_engine(pages=90, budget=100))
    assert engine.stats().out_of_memory > 0 and max(short.passes) > most


def test_what_was_learned_is_doubled_again_after_calm_full_rounds():
    engine = _engine(budget=16)
    short = Short(engine, most=12, until=1)
    params = SamplingParams(tokens_max=1, ignore_eos=True)
    for first in (3, 4):
        _answers(engine, [first, *LONG, *LONG, *LONG, *LONG], params)
    assert short.passes[0] == 16 and engine.stats().out_of_memory == 1
    counts = [short.passes.count(8), short.passes.count(16) - 1]
    assert counts[0] >= 64 and counts[1] >= 1 and engine.stats().prompts_max == 16


def test_a_request_without_memory_for_a_page_fails_alone_with_a_reason():
    engine = _engine()
    engine.add(1, LONG, SamplingParams(tokens_max=3, ignore_eos=True))
    engine.add(2, [5, 6], SamplingParams(tokens_max=3, ignore_eos=True))
    Short(engine, most=4)
    found = {}
    while engine.busy:
        found |= {update.id: update for update in engine.step() if update.last}
    assert isinstance(found[1].error, LimitReached)
    assert str(found[1].error) == "out of memory: there is none for 8 tokens of this request, alone in a round"
    assert found[2].finish == "length"
    engine.add(3, [5], SamplingParams(tokens_max=3, ignore_eos=True))
    Short(engine, most=0)
    (update,) = engine.step()
    assert str(update.error) == "out of memory: there is none for 1 token of this request, alone in a round"


def test_draft_tokens_without_memory_are_dropped_and_the_sequence_goes_on():
    runner = tiny.fresh_runner("llama", 60)
    prompt, params = [7, 8, 9] * 8, SamplingParams(tokens_max=30, ignore_eos=True)
    engine = Engine(runner, None, RoundLimits(48, 6), speculation=Speculation(NgramProposer()))
    expected = _answers(engine, prompt, params)
    assert engine.stats().drafted > 0
    engine.clear_prefixes()
    short = Short(engine, most=len(prompt))
    engine.add(1, prompt, params)
    found = [token for update in engine.step() for token in update.tokens]
    short.most = 1
    while engine.busy:
        found += [token for update in engine.step() for token in update.tokens]
    assert {0: found} == expected and engine.stats().out_of_memory > 0
