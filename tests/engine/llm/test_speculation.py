"""Speculation: answers stay the same with any proposer and any draft tokens."""

from __future__ import annotations

import random

import pytest
import scipy.stats
import torch

from tests.engine.llm import tiny
from weftline.engine.llm.engine import Engine
from weftline.engine.llm.params import SamplingParams
from weftline.engine.llm.sampling.sampler import Sampler
from weftline.engine.llm.schedule import RoundLimits
from weftline.engine.llm.sequence import Sequence
from weftline.engine.llm.speculation import DraftModelProposer, NgramProposer, Speculation

GREEDY = {"tokens_max": 40, "ignore_eos": True}
DRAWN = {"tokens_max": 40, "ignore_eos": True, "temperature": 0.7, "top_p": 0.9, "repetition_penalty": 1.1}


class Wrong:
    """Guesses at random: nearly always wrong."""

    runners = ()

    def __init__(self) -> None:
        self._rng = random.Random(1)

    def propose(self, sequences):
        return [tuple(self._rng.randrange(tiny.VOCABULARY) for _ in range(count)) for _, count in sequences]

    def drop(self, sequence):
        pass


class Right:
    """Knows the answers beforehand."""

    runners = ()

    def __init__(self, prompts, answers) -> None:
        self._texts = [prompt + answer for prompt, answer in zip(prompts, answers)]

    def propose(self, sequences):
        found = []
        for sequence, count in sequences:
            known = len(sequence.tokens)
            text = next(text for text in self._texts if text[:known] == sequence.tokens)
            found.append(tuple(text[known : known + count]))
        return found

    def drop(self, sequence):
        pass


def _draft_model() -> DraftModelProposer:
    small = tiny.runner("llama", 40, 8)
    return DraftModelProposer(small, Sampler(small.ends, small.vocabulary), round_tokens_max=24)


def _answers(prompts, params, proposer=None, pages=64):
    speculation = Speculation(proposer, 5) if proposer is not None else None
    engine = Engine(tiny.runner("llama", pages), None, RoundLimits(48, 6), speculation=speculation)
    seeded = [SamplingParams(**params, seed=at) for at in range(len(prompts))]
    answers = [[] for _ in prompts]
    for at, prompt in enumerate(prompts):
        engine.add(at, prompt, seeded[at])
    while engine.busy:
        for update in engine.step():
            assert update.error is None
            answers[update.id] += update.tokens
        engine.check()
    return answers, engine.stats()


@pytest.mark.slow(but_first=1)
@pytest.mark.parametrize("params", [GREEDY, DRAWN], ids=["greedy", "drawn"])
def test_answers_are_the_same_with_any_draft_tokens(params):
    prompts = tiny.prompts(8, seed=4, longest=40)
    plain, _ = _answers(prompts, params)
    assert _answers(prompts, params, Wrong())[0] == plain
    assert _answers(prompts, params, NgramProposer())[0] == plain
    right, stats = _answers(prompts, params, Right(prompts, plain))
    assert right == plain
    assert stats.accepted == stats.drafted > 100
    assert stats.rounds < 60


@pytest.mark.slow(but_first=1)
@pytest.mark.parametrize("params", [GREEDY, DRAWN], ids=["greedy", "drawn"])
def test_the_model_as_its_own_draft_is_accepted_also_when_it_samples(params):
    prompts = tiny.prompts(6, seed=5, longest=40)
    plain, _ = _answers(prompts, params)
    drafted, stats = _answers(prompts, params, _draft_model())
    assert drafted == plain
    assert stats.drafted > 50
    assert stats.accepted > 0.8 * stats.drafted


def test_prompts_longer_than_a_round_of_the_draft_model_are_drafted():
    (prompt,) = tiny.prompts(1, seed=6, longest=60)
    prompt = (prompt * 60)[:60]
    small = tiny.runner("llama", 40, 8)
    drafts = []
    for tokens_max in (24, 128):
        proposer = DraftModelProposer(small, Sampler(small.ends, small.vocabulary), round_tokens_max=tokens_max)
        sequence = Sequence(1, list(prompt), len(prompt), len(prompt) + 8, SamplingParams(tokens_max=8), 1)
        drafts += proposer.propose([(sequence, 4)])
    assert len(drafts[0]) == 4 and drafts[0] == drafts[1]


def test_draft_tokens_never_preempt():
    prompts = tiny.prompts(6, seed=6, longest=30)
    plain, before = _answers(prompts, GREEDY, pages=24)
    drafted, stats = _answers(prompts, GREEDY, Wrong(), pages=24)
    assert drafted == plain
    assert stats.preemptions <= before.preemptions + 2
    assert stats.pages_used == 0


def test_repeated_text_is_drafted_from_itself():
    prompts = [[5, 6, 7, 8] * 6]
    _, stats = _answers(prompts, {"tokens_max": 60, "ignore_eos": True}, NgramProposer())
    assert stats.drafted > 0


def _other_model():
    """A draft model that agrees with the large one sometimes: its weights, shaken."""
    other = tiny.fresh_runner("llama", 700, 8)
    generator = torch.Generator().manual_seed(2)
    with torch.inference_mode():
        for weight in other.model.parameters():
            weight += 0.05 * torch.randn(weight.shape, generator=generator)
    return DraftModelProposer(other, Sampler(other.ends, other.vocabulary), round_tokens_max=600)


@torch.inference_mode()
def _second_token(prompt: list[int]) -> torch.Tensor:
    """Return the probabilities of an answer's second token, whatever its first: float64 [vocabulary]."""
    model = tiny.reference("llama")
    first = model(torch.tensor([prompt])).logits[0, -1].double().softmax(-1)
    each = torch.tensor([[*prompt, token] for token in range(tiny.VOCABULARY)])
    return first @ model(each).logits[:, -1].double().softmax(-1)


@pytest.mark.slow
def test_sampled_tokens_keep_the_models_distribution_with_a_draft_model():
    prompt, answers = [5, 9, 17], 1800
    proposer = _other_model()
    runner = tiny.fresh_runner("llama", 700, 8)
    engine = Engine(runner, None, RoundLimits(600, 64), speculation=Speculation(proposer, 3))
    counts = torch.zeros(tiny.VOCABULARY, dtype=torch.float64)
    said: dict[tuple[int, int], list[int]] = {}
    for at in range(answers // 60):
        engine.add(at, prompt, SamplingParams(tokens_max=5, temperature=1.0, ignore_eos=True, seed=1000 + at, n=60))
    while engine.busy:
        for update in engine.step():
            said.setdefault((update.id, update.index), []).extend(update.tokens)
    for tokens in said.values():
        counts[tokens[1]] += 1
    stats = engine.stats()
    assert 0.05 * stats.drafted < stats.accepted < 0.95 * stats.drafted
    expected = _second_token(prompt) * answers
    usual = expected >= 5
    observed = torch.cat([counts[usual], counts[~usual].sum()[None]])
    wanted = torch.cat([expected[usual], expected[~usual].sum()[None]])
    assert scipy.stats.chisquare(observed.numpy(), wanted.numpy()).pvalue > 0.001


class Failing:
    """Guesses until it raises, as a draft model without memory would."""

    runners = ()

    def propose(self, sequences):
        raise MemoryError("no room")

    def drop(self, sequence):
        pass


def test_a_proposer_that_fails_costs_its_draft_tokens_only():
    prompts = tiny.prompts(4, seed=7, longest=30)
    plain, _ = _answers(prompts, GREEDY)
    assert _answers(prompts, GREEDY, Failing())[0] == plain


def test_draft_tokens_leave_other_sequences_the_token_they_need():
    prompts = [[5, 6, 7, at] for at in range(8, 14)]
    engine = Engine(tiny.runner("llama"), None, RoundLimits(6, 6), speculation=Speculation(Wrong(), 5))
    for at, prompt in enumerate(prompts):
        engine.add(at, prompt, SamplingParams(tokens_max=12, ignore_eos=True))
    while engine.busy:
        decoding = [s.id for s in engine._schedule.running if s.remaining == 1]
        got = {update.id for update in engine.step()}
        assert len(decoding) < 6 or set(decoding) <= got
