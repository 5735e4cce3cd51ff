"""Drawing follows the distribution that was asked for, and a seed means the same answer in any company."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from weftline.engine.llm.sampling import Sampler, narrow
from weftline.engine.llm.sequence import SamplingParams, Sequence

VOCABULARY = 12


def _sequence(tokens: list[int] | None = None, prompt: int = 2, **params: object) -> Sequence:
    known = tokens or [1, 2]
    return Sequence(1, known, prompt, 99, SamplingParams(**params), 0)


def _pick(logits: torch.Tensor, *sequences: Sequence, ends: frozenset[int] = frozenset()) -> list[int]:
    return Sampler(ends).pick(logits.clone(), sequences)[0]


def test_temperature_zero_takes_the_likeliest():
    logits = torch.randn(3, VOCABULARY)
    assert _pick(logits, *[_sequence() for _ in range(3)]) == logits.argmax(-1).tolist()


def test_draws_follow_the_softmax_at_the_temperature():
    torch.manual_seed(0)
    logits, draws = torch.randn(1, VOCABULARY), 4000
    sequences = [_sequence(temperature=0.7, seed=seed) for seed in range(draws)]
    seen = Counter(_pick(logits.expand(draws, -1), *sequences))
    expected = (logits[0] / 0.7).softmax(-1) * draws
    chi_square = sum((seen[t] - float(e)) ** 2 / float(e) for t, e in enumerate(expected))
    assert chi_square < 31.3  # 11 degrees of freedom, one in a thousand; the seeds are fixed, so it never flickers


def test_a_seeds_draw_does_not_depend_on_the_rest_of_the_batch():
    logits = torch.randn(5, VOCABULARY)
    alone = _pick(logits[2:3], _sequence(temperature=1.0, seed=42))
    others = [_sequence(temperature=1.3, seed=s, top_p=0.5) for s in (1, 2, 3, 4)]
    assert _pick(logits, *others[:2], _sequence(temperature=1.0, seed=42), *others[2:])[2] == alone[0]


def test_successive_tokens_of_one_seed_are_drawn_afresh():
    flat = torch.zeros(1, 1000)
    drawn = {_pick(flat, _sequence([1] * length, temperature=1.0, seed=7))[0] for length in range(2, 22)}
    assert len(drawn) > 15


@pytest.mark.parametrize(
    ("params", "kept"),
    [
        ({"top_k": 3}, 3),
        ({"top_k": 99}, 4),
        ({"top_p": 0.7}, 2),
        ({"top_p": 1e-6}, 1),
        ({"min_p": 0.5}, 2),
        ({"top_p": 0.9, "min_p": 0.35}, 2),
    ],
)
def test_what_is_left_out_has_no_chance(params, kept):
    logits = torch.tensor([[0.5, 0.3, 0.15, 0.05]]).log()
    narrow(logits, [SamplingParams(temperature=1.0, **params)])
    assert torch.isfinite(logits[0]).tolist() == [i < kept for i in range(4)]


def test_each_row_is_narrowed_by_its_own_params():
    logits = torch.tensor([[0.5, 0.3, 0.15, 0.05]] * 3).log()
    narrow(logits, [SamplingParams(top_k=1), SamplingParams(), SamplingParams(top_p=0.6)])
    assert torch.isfinite(logits).sum(-1).tolist() == [1, 4, 2]


def test_penalties_push_down_what_was_said():
    logits = torch.tensor([[2.0, 1.9, 1.8, -1.0]])
    assert _pick(logits, _sequence([0, 3], 2, repetition_penalty=1.2)) == [1]  # counts the prompt
    assert _pick(logits, _sequence([0, 3], 2, presence_penalty=1.0)) == [0]  # does not
    assert _pick(logits, _sequence([3, 0], 1, presence_penalty=1.0)) == [1]
    said = [3, 0, 0, 0, 1]
    assert _pick(logits, _sequence(said, 1, frequency_penalty=0.15)) == [2]


def test_ends_wait_for_the_least_length():
    logits = torch.tensor([[1.0, 3.0, 2.0, 0.0]])
    sampler_ends = frozenset({1})
    early = _sequence([0, 0], 2, tokens_min=1, stop_token_ids=[2])
    assert _pick(logits, early, ends=sampler_ends) == [0]
    late = _sequence([0, 0, 0], 2, tokens_min=1, stop_token_ids=[2])
    assert _pick(logits, late, ends=sampler_ends) == [1]


def test_a_row_without_usable_numbers_is_told_apart():
    logits = torch.randn(3, VOCABULARY)
    logits[1, 4] = torch.nan
    assert Sampler(frozenset()).pick(logits, [_sequence() for _ in range(3)])[1] == [True, False, True]
