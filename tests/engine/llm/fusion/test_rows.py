"""The small steps of a decoder give what transformers' own code gives, compiled or not, in every rounding order."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm, apply_rotary_pos_emb
from transformers.models.olmo2.modeling_olmo2 import Olmo2RMSNorm

from weftline.engine.llm.fusion import rows as fuse_rows
from weftline.engine.llm.fusion.match import is_candidate, recognise
from weftline.engine.llm.fusion.probe import Call
from weftline.engine.llm.fusion.rows import ROWS_MAX, add_rms_norm, gated, packed_rows, rms_norm, rotate

KINDS = {"llama": LlamaRMSNorm, "gemma": Gemma2RMSNorm, "olmo": Olmo2RMSNorm}
FORMS = {"llama": (False, True), "gemma": (True, False), "olmo": (False, False)}  # one more, rounded first


@pytest.fixture(params=[True, False], ids=["compiled", "torch"])
def compiled(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if not request.param:
        monkeypatch.setattr(fuse_rows, "_compiled", lambda: None)


def norm(kind: str, dtype: torch.dtype) -> torch.nn.Module:
    torch.manual_seed(2)
    made: torch.nn.Module = KINDS[kind](48, eps=1e-3).to(dtype)
    with torch.no_grad():
        made.weight.add_(torch.randn(48) * 0.3)
    return made.requires_grad_(False)


@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize("rows", [1, 7, ROWS_MAX + 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", KINDS)
@torch.inference_mode()
def test_norms_are_recognised_and_repeated(kind: str, dtype: torch.dtype, rows: int) -> None:
    module, given = norm(kind, dtype), torch.randn(1, rows, 48).to(dtype)
    assert is_candidate(module)
    form = recognise(module, Call((given,), {}, module(given)))
    assert not isinstance(form, str), form
    assert form.one_plus == FORMS[kind][0]
    if dtype is torch.bfloat16:  # in float32 the order does not show
        assert form.cast_first == FORMS[kind][1]
        assert torch.equal(rms_norm(given, form), module(given))
    torch.testing.assert_close(rms_norm(given, form), module(given))
    delta = torch.randn_like(given)
    wanted = given + delta
    total, normed = add_rms_norm(given, delta.clone(), form)
    torch.testing.assert_close(total, wanted)
    torch.testing.assert_close(normed, module(wanted))


@torch.inference_mode()
@pytest.mark.parametrize("shape", [(1, 9, 64), (1, 9, 8, 64), (9, 64), (9, 8, 64), (2, 9, 8, 64)], ids=str)
def test_the_norm_kernel_takes_rows_of_every_rank(shape: tuple[int, ...]) -> None:
    pytest.importorskip("triton")
    from weftline.engine.llm.kernels.rows import norm_launch

    weight = torch.ones(64, device="meta")
    merged = torch.empty(*shape[:-1], 192, device="meta")[..., :64]  # heads of a merged projection are not contiguous
    for values in (torch.empty(shape, device="meta"), merged):
        out, _ = norm_launch(packed_rows(values), weight, 1e-6)
        assert out.view(shape).shape == values.shape


def test_what_is_no_rms_norm_is_not_taken_for_one() -> None:
    plain, given = torch.nn.LayerNorm(48, bias=False), torch.randn(5, 48)
    assert is_candidate(plain)
    assert "differs" in str(recognise(plain, Call((given,), {}, plain(given))))
    assert not is_candidate(torch.nn.LayerNorm(48))
    assert not is_candidate(torch.nn.Linear(4, 4))


@torch.inference_mode()
def test_another_epsilon_is_noticed() -> None:
    module, given = norm("llama", torch.float32), torch.randn(5, 48)
    call = Call((given,), {}, module(given))

    class Doubled(LlamaRMSNorm):  # type: ignore[misc]
        def forward(self, hidden_states: Tensor) -> Tensor:
            self_eps, self.variance_epsilon = self.variance_epsilon, 2 * self.variance_epsilon
            out: Tensor = super().forward(hidden_states)
            self.variance_epsilon = self_eps
            return out

    other = Doubled(48, eps=1e-3).requires_grad_(False)
    other.weight.copy_(module.weight)
    assert not isinstance(recognise(module, call), str)
    assert "differs" in str(recognise(other, Call((given,), {}, other(given))))


@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize("width", [16, 8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@torch.inference_mode()
def test_heads_are_turned_as_llama_turns_them(dtype: torch.dtype, width: int) -> None:
    heads = torch.randn(9, 5, 16).to(dtype)
    angles = torch.randn(9, width // 2).repeat(1, 2)
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    first = heads[None, ..., :width].transpose(1, 2)
    expected = heads.clone()
    expected[..., :width] = apply_rotary_pos_emb(first, first, cos[None], sin[None])[0][0].transpose(0, 1)
    every = torch.cat((heads, heads), dim=1)  # a view with gaps, as queries and keys are in a merged product
    torch.testing.assert_close(rotate(every[:, :5], cos, sin), expected)
    torch.testing.assert_close(every[:, 5:], heads)


@torch.inference_mode()
def test_a_gate_opens_its_own_half() -> None:
    product = torch.randn(1, 3, 8)
    found = gated(product, torch.nn.functional.silu)
    torch.testing.assert_close(found, torch.nn.functional.silu(product[..., :4]) * product[..., 4:])
