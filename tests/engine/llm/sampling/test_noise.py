"""The noise is the hash that its docstring says, and looks random along every direction."""

from __future__ import annotations

import math
import random

import numpy as np
import torch
from scipy import stats

from tests.engine.llm import plain_sampling
from weftline.engine.llm.sampling.draw import to_keys, to_log_waits, to_uniforms


def _uniforms(seeds: range, positions: range, tokens: int) -> torch.Tensor:
    pairs = torch.tensor([(seed, position) for seed in seeds for position in positions])
    return to_uniforms(to_keys(pairs[:, 0], pairs[:, 1]), torch.arange(tokens, dtype=torch.int32)[None])


def test_the_hash_is_that_of_whole_numbers_without_a_limit():
    chance = random.Random(1)
    for _ in range(200):
        seed, position, token = chance.randrange(1 << 63), chance.randrange(1 << 21), chance.randrange(1 << 31)
        keys = to_keys(torch.tensor([seed]), torch.tensor([position]))
        found = float(to_uniforms(keys, torch.tensor([[token]], dtype=torch.int32)))
        assert math.isclose(found, plain_sampling.uniform(seed, position, token), rel_tol=1e-6)


def test_uniforms_are_uniform_over_tokens_places_and_seeds():
    for sample in (
        _uniforms(range(1), range(1), 200_000),
        _uniforms(range(1), range(50_000), 1),
        _uniforms(range(50_000), range(1), 1),
    ):
        values = sample.flatten().double().numpy()
        assert values.min() > 0 and values.max() < 1
        assert stats.kstest(values, "uniform").pvalue > 1e-3


def test_neighbours_in_every_direction_are_independent():
    cube = _uniforms(range(40), range(40), 40).view(40, 40, 40).double()
    pairs = {
        "seeds": (cube[:-1], cube[1:]),
        "places": (cube[:, :-1], cube[:, 1:]),
        "tokens": (cube[..., :-1], cube[..., 1:]),
        "seed and place": (cube[:-1, 1:], cube[1:, :-1]),
        "place and token": (cube[:, :-1, 1:], cube[:, 1:, :-1]),
    }
    for name, (one, other) in pairs.items():
        table, *_ = np.histogram2d(one.flatten().numpy(), other.flatten().numpy(), bins=8, range=[[0, 1], [0, 1]])
        assert stats.chisquare(table.flatten()).pvalue > 1e-3, name


def test_a_seed_that_differs_in_one_bit_changes_half_of_the_bits():
    seeds = torch.randint(0, 1 << 62, (4000,), generator=torch.Generator().manual_seed(0))
    positions, token = torch.arange(4000), torch.tensor([[5]], dtype=torch.int32)
    before = to_uniforms(to_keys(seeds, positions), token)
    for bit in (0, 1, 31, 32, 61):
        after = to_uniforms(to_keys(seeds ^ (1 << bit), positions), token)
        for level in (2, 4, 256):  # the first, second and eighth binary digit
            changed = ((before * level).long() ^ (after * level).long()) & 1
            assert abs(float(changed.double().mean()) - 0.5) < 0.04, (bit, level)


def test_waits_are_exact_where_they_are_short_and_never_without_end():
    given = [2.0**-32, 1e-8, 1e-5, 2.0**-12, 0.001, 0.3, 0.9, 1 - 2.0**-24]
    found = to_log_waits(torch.tensor([given])).tolist()[0]
    for value, wait in zip(torch.tensor(given).tolist(), found, strict=True):
        assert math.isclose(wait, math.log(-math.log1p(-value)), rel_tol=2e-5, abs_tol=2e-5), value


def test_the_largest_hash_is_still_below_one():
    bits = (1 << 32) - 1  # go back from it to the token that has it, with keys of 0
    bits = (bits ^ bits >> 16) * pow(0x846CA68B, -1, 1 << 32) % (1 << 32)
    bits = (bits ^ bits >> 15 ^ bits >> 30) * pow(0x7FEB352D, -1, 1 << 32) % (1 << 32)
    token = (bits ^ bits >> 16) * pow(0x9E3779B1, -1, 1 << 32) % (1 << 32)
    tokens = torch.tensor([[token - (1 << 32) if token >> 31 else token]], dtype=torch.int32)
    found = float(to_uniforms(torch.zeros(1, 2, dtype=torch.int32), tokens))
    assert 0.9999999 < found < 1
