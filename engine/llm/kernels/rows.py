"""Row kernels between matrix products: RMS norm, fused residual addition, gated activation.

RMS norm: Zhang and Sennrich 2019. Sums are done in float32, and rounding happens where transformers' models do it, so
that both give the same numbers but for the order of a sum:

    usual   the normed row is rounded to the model's dtype, then multiplied with the weight in that dtype
    Gemma   the normed row is multiplied with 1 + weight in float32, and rounded once

Gated activation: act(gate) * up from one merged product (Shazeer 2020, GLU variants). As in transformers, the
activation is computed in float32 and rounded to the model's dtype before the multiplication.
"""

from __future__ import annotations

import torch
import triton.language as tl  # type: ignore[import-untyped]
from torch import Tensor

from weftline.engine.llm.kernels.launch import FLOATS, Launch, jit, need, power_of_two

WIDTH_MAX = 1 << 16
"""Widest row: it is held in registers, all of it."""


@jit
def norm_rows(
    x: tl.tensor,
    added: tl.tensor,
    weight: tl.tensor,
    out: tl.tensor,
    total: tl.tensor,
    epsilon: tl.tensor,
    x_row: tl.tensor,
    x_head: tl.tensor,
    added_row: tl.tensor,
    out_row: tl.tensor,
    out_head: tl.tensor,
    total_row: tl.tensor,
    WIDTH: tl.constexpr,
    WIDTH_TILE: tl.constexpr,
    PLUS_ONE: tl.constexpr,
) -> None:
    """Normalise one row (program axis 0) of one head (1); with `added`, x + added, stored to `total`."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1).to(tl.int64)
    at = tl.arange(0, WIDTH_TILE)
    numbers = tl.load(x + row * x_row + head * x_head + at, mask=at < WIDTH, other=0.0)
    dtype: tl.constexpr = numbers.dtype
    wide = numbers.to(tl.float32)
    if added is not None:
        wide += tl.load(added + row * added_row + at, mask=at < WIDTH, other=0.0).to(tl.float32)
        rounded = wide.to(dtype)
        tl.store(total + row * total_row + at, rounded, mask=at < WIDTH)
        wide = rounded.to(tl.float32)
    normed = wide * tl.rsqrt(tl.sum(wide * wide, 0) / WIDTH + epsilon)
    factor = tl.load(weight + at, mask=at < WIDTH, other=0.0)
    if PLUS_ONE:
        result = normed * (1.0 + factor.to(tl.float32))
    else:
        result = normed.to(dtype).to(tl.float32) * factor.to(tl.float32)
    tl.store(out + row * out_row + head * out_head + at, result.to(dtype), mask=at < WIDTH)


def rms_norm(x: Tensor, weight: Tensor, epsilon: float, plus_one: bool = False, out: Tensor | None = None) -> Tensor:
    """Compute the RMS norm of x, of x's shape and dtype.

    x:        [rows, width] or [rows, heads, width], float16, bfloat16 or float32; any strides with dense rows.
    weight:   [width], of x's dtype.   plus_one: the factor is 1 + weight, and rounding is Gemma's.
    out:      where the result goes; made when None; may be x itself.
    """
    out, launch = norm_launch(x, weight, epsilon, plus_one, out)
    launch.run()
    return out


def norm_launch(
    x: Tensor, weight: Tensor, epsilon: float, plus_one: bool = False, out: Tensor | None = None
) -> tuple[Tensor, Launch]:
    """Prepare the launch of `rms_norm`; return its uninitialised output and the launch."""
    out = torch.empty_like(x, memory_format=torch.contiguous_format) if out is None else out
    return out, _launch(x, None, weight, epsilon, plus_one, out, None)


def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, epsilon: float, plus_one: bool = False
) -> tuple[Tensor, Tensor]:
    """Return (norm of x + residual, x + residual), both [rows, width]; the sum is rounded before it is normed.

    x, residual: [rows, width] of the same dtype.   The rest as for `rms_norm`.
    """
    out, total, launch = add_norm_launch(x, residual, weight, epsilon, plus_one)
    launch.run()
    return out, total


def add_norm_launch(
    x: Tensor, residual: Tensor, weight: Tensor, epsilon: float, plus_one: bool = False
) -> tuple[Tensor, Tensor, Launch]:
    """Prepare the launch of `add_rms_norm`; return its uninitialised outputs and the launch."""
    need(x.dim() == 2 and residual.shape == x.shape, f"residual: wants {tuple(x.shape)}, is {tuple(residual.shape)}")
    need(residual.dtype == x.dtype and residual.stride(1) == 1, f"residual: wants dense rows of {x.dtype}")
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    total = torch.empty_like(out)
    return out, total, _launch(x, residual, weight, epsilon, plus_one, out, total)


def _launch(
    x: Tensor,
    added: Tensor | None,
    weight: Tensor,
    epsilon: float,
    plus_one: bool,
    out: Tensor,
    total: Tensor | None,
) -> Launch:
    width = x.shape[-1]
    need(x.dim() in (2, 3) and x.stride(-1) == 1, f"x: wants dense [rows, width] or [rows, heads, width], is {x.shape}")
    need(x.dtype in FLOATS, f"x: wants float16, bfloat16 or float32, is {x.dtype}")
    need(weight.shape == (width,) and weight.is_contiguous(), f"weight: wants [{width}], is {tuple(weight.shape)}")
    need(weight.dtype == x.dtype, f"weight: wants {x.dtype}, as x, is {weight.dtype}")
    need(width <= WIDTH_MAX, f"x: rows of {width}, at most {WIDTH_MAX}")
    need(
        out.shape == x.shape and out.dtype == x.dtype and out.stride(-1) == 1,
        f"out: wants {tuple(x.shape)} of {x.dtype}",
    )
    heads = x.shape[1] if x.dim() == 3 else 1
    arguments = {
        "x": x,
        "added": added,
        "weight": weight,
        "out": out,
        "total": total,
        "epsilon": float(epsilon),
        "x_row": x.stride(0),
        "x_head": x.stride(1) if heads > 1 else 0,
        "added_row": 0 if added is None else added.stride(0),
        "out_row": out.stride(0),
        "out_head": out.stride(1) if heads > 1 else 0,
        "total_row": 0 if total is None else total.stride(0),
        "WIDTH": width,
        "WIDTH_TILE": power_of_two(width),
        "PLUS_ONE": plus_one,
    }
    # a warp for each 512 numbers: 16 of them in a thread's registers, read as two loads of 16 bytes
    warps = min(max(power_of_two(width) // 512, 1), 16)
    return Launch(norm_rows, (x.shape[0], heads), arguments, warps)


TILE = 1024
"""Numbers of one program: with 4 warps, 8 for each thread, one load of 16 bytes of 16-bit numbers."""


@jit
def gate_rows(
    merged: tl.tensor,
    out: tl.tensor,
    merged_row: tl.tensor,
    out_row: tl.tensor,
    inner: tl.tensor,
    TILE: tl.constexpr,
    TANH_GELU: tl.constexpr,
) -> None:
    """Compute the gated activation of one tile (program axis 1) of one row (0)."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * TILE + tl.arange(0, TILE)
    gate = tl.load(merged + row * merged_row + at, mask=at < inner, other=0.0)
    up = tl.load(merged + row * merged_row + inner + at, mask=at < inner, other=0.0)
    dtype: tl.constexpr = gate.dtype
    x = gate.to(tl.float32)
    if TANH_GELU:
        # 0.5 x (1 + tanh(y)) with y = sqrt(2 / pi) (x + 0.044715 x**3) is x / (1 + exp(-2 y))
        active = x / (1.0 + tl.exp(-1.5957691216057308 * (x + 0.044715 * x * x * x)))
    else:
        active = x / (1.0 + tl.exp(-x))
    result = active.to(dtype).to(tl.float32) * up.to(tl.float32)
    tl.store(out + row * out_row + at, result.to(dtype), mask=at < inner)


def silu_mul(merged: Tensor, tanh_gelu: bool = False, out: Tensor | None = None) -> Tensor:
    """Compute silu(gate) * up, [rows, inner], of merged's dtype.

    merged:    [rows, 2 * inner], gates first; float16, bfloat16 or float32, dense rows.
    tanh_gelu: gelu in its tanh form, which Gemma has, instead of silu.   out: made when None.
    """
    out, launch = gate_launch(merged, tanh_gelu, out)
    launch.run()
    return out


def gate_launch(merged: Tensor, tanh_gelu: bool = False, out: Tensor | None = None) -> tuple[Tensor, Launch]:
    """Prepare the launch of `silu_mul`; return its uninitialised output and the launch."""
    rows, both = merged.shape
    need(both % 2 == 0 and merged.stride(1) == 1, f"merged: wants dense [rows, 2 * inner], is {tuple(merged.shape)}")
    need(merged.dtype in FLOATS, f"merged: wants float16, bfloat16 or float32, is {merged.dtype}")
    inner = both // 2
    out = merged.new_empty(rows, inner) if out is None else out
    need(
        out.shape == (rows, inner) and out.dtype == merged.dtype and out.stride(1) == 1, f"out: wants [{rows}, {inner}]"
    )
    arguments = {
        "merged": merged,
        "out": out,
        "merged_row": merged.stride(0),
        "out_row": out.stride(0),
        "inner": inner,
        "TILE": TILE,
        "TANH_GELU": tanh_gelu,
    }
    return out, Launch(gate_rows, (rows, -(-inner // TILE)), arguments)
