"""Narrowing keeps what transformers keeps, and a row's beginning is enough exactly when it says so."""

from __future__ import annotations

import pytest
import torch
from transformers.generation.logits_process import (
    MinPLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)

from weftline.engine.llm.sampling.draw import keep_likely, keep_typical

COLUMNS = 300


def _logits(rows: int = 40, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, COLUMNS, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * 3


def _kept(logits: torch.Tensor, typical_p: float = 1.0, count: int = COLUMNS, **options: float) -> torch.Tensor:
    """Return bool [rows, columns]: which columns narrowing keeps."""
    ordered, at = logits.topk(count)
    rows = len(logits)
    columns = {name: torch.full((rows,), value) for name, value in options.items()}
    mass = None if count == COLUMNS else logits.logsumexp(-1)
    ordered = keep_likely(ordered, mass, columns.get("top_k"), columns.get("top_p"), columns.get("min_p"))
    ordered = keep_typical(ordered, torch.full((rows,), typical_p)) if typical_p < 1 else ordered
    return torch.full_like(logits, -torch.inf).scatter_(1, at, ordered).isfinite()


@pytest.mark.parametrize("p", [0.05, 0.5, 0.9, 0.999])
def test_each_alone_keeps_what_transformers_keeps(p):
    logits = _logits()
    ids = torch.zeros(len(logits), 1, dtype=torch.long)
    assert torch.equal(_kept(logits, top_k=int(p * 200)), TopKLogitsWarper(int(p * 200))(ids, logits).isfinite())
    assert torch.equal(_kept(logits, top_p=p), TopPLogitsWarper(p)(ids, logits).isfinite())
    assert torch.equal(_kept(logits, min_p=p), MinPLogitsWarper(p)(ids, logits).isfinite())
    assert torch.equal(_kept(logits, typical_p=p), TypicalLogitsWarper(p)(ids, logits).isfinite())


def test_all_together_keep_what_transformers_keeps_in_its_order():
    logits = _logits(200, seed=1)
    ids = torch.zeros(len(logits), 1, dtype=torch.long)
    expected = logits
    for warper in (TopKLogitsWarper(60), TopPLogitsWarper(0.9), MinPLogitsWarper(0.02), TypicalLogitsWarper(0.8)):
        expected = warper(ids, expected)
    assert torch.equal(_kept(logits, top_k=60, top_p=0.9, min_p=0.02, typical_p=0.8), expected.isfinite())


@pytest.mark.parametrize("options", [{"top_k": 20}, {"top_p": 0.8}, {"min_p": 0.05}, {"top_k": 15, "top_p": 0.7}])
def test_a_beginning_is_enough_where_its_last_column_is_left_out(options):
    logits = _logits(200, seed=2)
    whole, part = _kept(logits, **options), _kept(logits, count=24, **options)
    enough = ~part.gather(1, logits.topk(24).indices[:, -1:])[:, 0]
    assert torch.equal(whole[enough], part[enough])
    assert enough.any() and (whole.sum(-1) < 24)[enough].all() and (whole.sum(-1) >= 24)[~enough].all()


def test_equal_logits_stay_or_go_together():
    logits = torch.tensor([[3.0, 2.0, 2.0, 2.0, 1.0]]).repeat(1, 60).double()
    assert _kept(logits, top_k=61).sum() == 240
    assert _kept(logits, top_k=60).sum() == 60
    assert _kept(logits, top_p=0.6).sum() == 240


@pytest.mark.parametrize(
    ("params", "kept"),
    [
        ({"top_k": 3}, 3),
        ({"top_k": 99}, 4),
        ({"top_k": 0}, 4),
        ({"top_p": 0.7}, 2),
        ({"top_p": 1e-6}, 1),
        ({"top_p": 1.0}, 4),
        ({"min_p": 0.5}, 2),
        ({"top_p": 0.9, "min_p": 0.35}, 2),
        ({"top_k": 2, "top_p": 0.6}, 1),
    ],
)
def test_small_rows_by_hand(params, kept):
    ordered = torch.tensor([[0.5, 0.3, 0.15, 0.05]]).log()
    columns = [torch.tensor([params[name]]) if name in params else None for name in ("top_k", "top_p", "min_p")]
    assert keep_likely(ordered, None, *columns).isfinite()[0].tolist() == [i < kept for i in range(4)]


def test_each_row_is_narrowed_by_its_own_options():
    ordered = torch.tensor([[0.5, 0.3, 0.15, 0.05]] * 4).log()
    top_k, top_p = torch.tensor([1, 0, 0, 0]), torch.tensor([1.0, 1.0, 0.6, 1.0])
    left = keep_typical(keep_likely(ordered, None, top_k, top_p, None), torch.tensor([1.0, 1.0, 1.0, 0.2]))
    assert left.isfinite().sum(-1).tolist() == [1, 4, 2, 1]


def test_likely_tokens_stay_when_all_but_one_are_forbidden():
    ordered = torch.tensor([[0.5, -torch.inf, -torch.inf]])
    left = keep_likely(ordered, None, torch.tensor([2]), torch.tensor([0.5]), torch.tensor([0.1]))
    assert keep_typical(left, torch.tensor([0.5])).isfinite()[0].tolist() == [True, False, False]


def test_off_keeps_every_token_even_when_one_has_all_the_probability():
    ordered, off = torch.tensor([[0.0, -20.0, -30.0]]), torch.tensor([1.0])
    assert keep_likely(ordered, None, None, off, None).isfinite().all()
    assert keep_typical(ordered, off).isfinite().all()
