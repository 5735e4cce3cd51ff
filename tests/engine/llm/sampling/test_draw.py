"""Draws follow the distribution that narrowing leaves, and sorting a beginning draws the same."""

from __future__ import annotations

from dataclasses import astuple

import numpy as np
import pytest
import torch
from scipy import stats

from weftline.engine.llm.sampling.draw import DrawSettings, draw, try_draw

VOCABULARY = 12


def _settings(rows: int, temperature: float = 1.0, seed: int = 0, **options: float) -> DrawSettings:
    columns = {name: torch.full((rows,), value) for name, value in options.items()}
    return DrawSettings(
        torch.full((rows,), temperature), torch.full((rows,), seed), torch.arange(rows), **columns
    )  # fmt: skip


def _follows(tokens: torch.Tensor, shares: torch.Tensor) -> bool:
    seen = np.bincount(tokens.numpy(), minlength=len(shares))
    possible = shares.numpy() > 0
    return not seen[~possible].any() and (
        stats.chisquare(seen[possible], shares.double().numpy()[possible] * len(tokens)).pvalue > 1e-3
    )


def test_draws_over_places_follow_the_softmax_at_the_temperature():
    logits = torch.randn(1, VOCABULARY, generator=torch.Generator().manual_seed(0)).double()
    drawn = draw(logits.float().expand(20_000, -1), _settings(20_000, 0.7))
    assert _follows(drawn, (logits[0] / 0.7).softmax(-1))


def test_draws_over_seeds_follow_what_narrowing_leaves():
    logits = torch.randn(1, VOCABULARY, generator=torch.Generator().manual_seed(1)).double()
    left = logits[0].masked_fill(logits[0] < logits[0].topk(5).values[-1], -torch.inf)
    settings = _settings(20_000, top_k=5)
    seeds = DrawSettings(settings.temperature, settings.position, torch.full((20_000,), 9), settings.top_k)
    assert _follows(draw(logits.float().expand(20_000, -1), seeds), left.softmax(-1))


def test_draws_at_one_place_say_nothing_about_those_at_the_next():
    drawn = draw(torch.zeros(1, 8).expand(30_000, -1), _settings(30_000, seed=3))
    pairs = drawn[:-1] * 8 + drawn[1:]
    assert _follows(pairs[::2], torch.full((64,), 1 / 64, dtype=torch.float64))


def test_tokens_of_little_chance_get_it():
    logits = torch.zeros(1, 500)
    logits[0, 0] = 10.7  # the others together: 1.1 in a hundred
    drawn = draw(logits.expand(4000, -1), _settings(4000))
    rare = int((drawn > 0).sum())
    chance = 499 / (499 + float(torch.tensor(10.7).exp()))
    assert stats.binomtest(rare, 4000, chance).pvalue > 1e-3


def test_a_cold_row_takes_the_likeliest_among_drawn_ones():
    logits = torch.randn(50, VOCABULARY)
    cold = torch.arange(50) % 2 == 0
    settings = DrawSettings(torch.where(cold, 0.0, 9.0), torch.arange(50), torch.zeros(50, dtype=torch.int64))
    same = draw(logits, settings) == logits.argmax(-1)
    assert same[cold].all() and not same.all()


def test_a_beginning_draws_what_all_of_a_row_does_where_it_is_enough():
    logits = torch.randn(300, 500, generator=torch.Generator().manual_seed(2)) * 3
    for options in ({"top_p": 0.9}, {"min_p": 0.05, "typical_p": 0.9}, {"top_k": 20, "top_p": 0.9}):
        settings = _settings(300, 0.8, **options)
        found, enough = try_draw(logits, settings, 32)
        assert torch.equal(found[enough], draw(logits, settings)[enough]) and enough.any(), options
    assert not try_draw(logits, _settings(300, typical_p=0.9), 32)[1].any()


def test_no_rows_draw_nothing():
    assert draw(torch.empty(0, 5), _settings(0)).shape == (0,)


@pytest.mark.parametrize("options", [{}, {"top_k": 5, "top_p": 0.9, "min_p": 0.1, "typical_p": 0.9}])
def test_nothing_reads_what_the_device_holds(options):
    made = _settings(3, **options)
    settings = DrawSettings(*(one if one is None else one.to("meta") for one in astuple(made)))
    logits = torch.empty(3, 500, device="meta")  # tensors without contents: reading any raises
    assert draw(logits, settings).shape == (3,)
    assert try_draw(logits, settings, 32)[1].shape == (3,)
