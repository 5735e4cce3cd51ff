"""The reference that kernels are compared with agrees with torch and with transformers."""

from __future__ import annotations

import torch
from torch.nn import functional
from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm, apply_rotary_pos_emb

from weftline.engine.llm.kernels import reference


def test_attention_over_pages_is_torch_attention_of_each_sequence() -> None:
    torch.manual_seed(0)
    query = torch.randn(5, 4, 16, dtype=torch.float64)
    keys, values = torch.randn(2, 2, 12, 16, dtype=torch.float64)
    tables = torch.tensor([[2, 0], [1, 9]], dtype=torch.int32)
    out = reference.attention(query, keys, values, tables, torch.tensor([0, 4, 5]), torch.tensor([2, 3]), 4, 0.25)

    slots = torch.tensor([8, 9, 10, 11, 0, 1])  # tokens 0 to 5 of the first sequence: page 2, then page 0
    for row, seen in ((0, 3), (3, 6)):
        k, v = (t[:, slots[:seen]] for t in (keys, values))
        asked = query[row][:, None]
        expected = functional.scaled_dot_product_attention(asked[None], k[None], v[None], scale=0.25, enable_gqa=True)
        torch.testing.assert_close(out[row], expected[0, :, 0])
    k, v = (t[:, 4:8] for t in (keys, values))  # the second sequence: page 1
    expected = functional.scaled_dot_product_attention(
        query[4][None, :, None], k[None], v[None], scale=0.25, enable_gqa=True
    )
    torch.testing.assert_close(out[4], expected[0, :, 0])


def test_a_window_hides_what_lies_before_it() -> None:
    torch.manual_seed(1)
    query, keys = torch.randn(1, 1, 8), torch.randn(1, 8, 8)
    tables, row_starts, starts = torch.tensor([[0, 1]], dtype=torch.int32), torch.tensor([0, 1]), torch.tensor([6])
    given = (query, keys, keys, tables, row_starts, starts, 4, 1.0)
    torch.testing.assert_close(reference.attention(*given, window=1)[0, 0], keys[0, 6].double())
    assert not torch.allclose(reference.attention(*given, window=2)[0, 0], keys[0, 6].double())


def test_a_soft_cap_bounds_scores() -> None:
    keys = torch.eye(4)[None] * 1000
    given = (torch.ones(1, 1, 4), keys, torch.eye(4)[None], torch.tensor([[0]], dtype=torch.int32))
    out = reference.attention(*given, torch.tensor([0, 1]), torch.tensor([3]), 4, 1.0, softcap=2.0)
    torch.testing.assert_close(out[0, 0], torch.full((4,), 0.25, dtype=torch.float64))


def test_rotation_and_norms_are_transformers() -> None:
    torch.manual_seed(2)
    query = torch.randn(3, 2, 8)
    cos, sin = torch.randn(3, 4).repeat(1, 2).cos(), torch.randn(3, 4).repeat(1, 2).sin()
    theirs, _ = apply_rotary_pos_emb(query.transpose(0, 1)[None], query.transpose(0, 1)[None], cos[None], sin[None])
    torch.testing.assert_close(reference.rotated(query, cos, sin), theirs[0].transpose(0, 1).double())

    half = reference.rotated(query, cos[:, :4], sin[:, :4])
    torch.testing.assert_close(half[..., 4:], query[..., 4:].double())

    usual, gemma = LlamaRMSNorm(8, 1e-6), Gemma2RMSNorm(8, 1e-6)
    usual.weight.data.normal_()
    gemma.weight.data.normal_()
    with torch.no_grad():
        torch.testing.assert_close(reference.rms_normed(query, usual.weight, 1e-6, False), usual(query).double())
        torch.testing.assert_close(reference.rms_normed(query, gemma.weight, 1e-6, True), gemma(query).double())
