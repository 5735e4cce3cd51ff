"""Reference implementations of the kernels in float64.

Nothing here is quick, and nothing shares code with the kernels.
"""

from __future__ import annotations

import torch
from torch import Tensor


def attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    tables: Tensor,
    row_starts: Tensor,
    starts: Tensor,
    page_tokens: int,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    key_scale: Tensor | None = None,
    value_scale: Tensor | None = None,
) -> Tensor:
    """Compute paged attention in float64, [rows, heads, value width]; arguments of `paged_attention`.

    Rows of no sequence are NaN.
    """
    rows, heads, _ = query.shape
    kv_heads, _, value_width = values.shape
    out = torch.full((rows, heads, value_width), torch.nan, dtype=torch.float64, device=query.device)
    first_rows, first_tokens = row_starts.tolist(), starts.tolist()
    for sequence, start in enumerate(first_tokens):
        mine = slice(first_rows[sequence], first_rows[sequence + 1])
        count = mine.stop - mine.start
        if count == 0:
            continue
        tokens = torch.arange(start + count, device=query.device)
        low = 0 if window is None else max(0, start - window + 1)
        tokens = tokens[low:]
        slots = tables[sequence].long()[tokens // page_tokens] * page_tokens + tokens % page_tokens
        k = (
            keys[:, slots].double()
            if key_scale is None
            else keys[:, slots].double() * key_scale.double()[:, None, None]
        )
        v = values[:, slots].double()
        v = v if value_scale is None else v * value_scale.double()[:, None, None]
        q = query[mine].double().transpose(0, 1).reshape(kv_heads, heads // kv_heads, count, -1)
        scores = torch.einsum("kgrw,ktw->kgrt", q, k) * scale
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        own = start + torch.arange(count, device=query.device)[:, None]
        hidden = tokens > own if window is None else (tokens > own) | (tokens <= own - window)
        weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
        out[mine] = torch.einsum("kgrt,ktw->kgrw", weights, v).reshape(heads, count, -1).transpose(0, 1)
    return out


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply rotary embedding cos, sin [rows, rotary width] to x [rows, heads, width], in float64.

    In halves: number i turns with number i + rotary width / 2 (Su and others 2021, in the order of the Llama weights).
    """
    turning, rest = x.double()[..., : cos.shape[1]], x.double()[..., cos.shape[1] :]
    one, two = turning.chunk(2, -1)
    turned = turning * cos.double()[:, None] + torch.cat([-two, one], -1) * sin.double()[:, None]
    return torch.cat([turned, rest], -1)


def rms_normed(x: Tensor, weight: Tensor, epsilon: float, plus_one: bool) -> Tensor:
    """Compute the RMS norm (Zhang and Sennrich 2019) in float64."""
    wide = x.double()
    factor = weight.double() + 1 if plus_one else weight.double()
    return wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + epsilon) * factor


def gated(merged: Tensor, tanh_gelu: bool) -> Tensor:
    """Compute act(gate) * up of merged [rows, 2 * inner], in float64."""
    gate, up = merged.double().chunk(2, -1)
    if tanh_gelu:
        return torch.nn.functional.gelu(gate, approximate="tanh") * up
    return torch.nn.functional.silu(gate) * up


def difference(found: Tensor, expected: Tensor) -> float:
    """Return the largest error, relative above magnitude 1; inf if a value is not finite."""
    if not (torch.isfinite(found).all() and torch.isfinite(expected).all()):
        return float("inf")
    return float(((found.double() - expected).abs() / expected.abs().clamp(min=1.0)).max()) if found.numel() else 0.0
