"""Gated activation kernel: act(gate) * up from one merged product.

Shazeer 2020, GLU variants. Rounding is transformers': the activation is computed in float32 and rounded to the model's
dtype, then multiplied there.
"""

from __future__ import annotations

import triton.language as tl  # type: ignore[import-untyped]
from torch import Tensor

from weftline.engine.llm.kernels.launch import FLOATS, Launch, jit, need

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
    """Gate a piece (program axis 1) of one row (0)."""
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
    """Return silu(gate) * up, [rows, inner], of merged's dtype.

    merged:    [rows, 2 * inner], gates first; float16, bfloat16 or float32, dense rows.
    tanh_gelu: gelu in its tanh form, which Gemma has, instead of silu.   out: made when None.
    """
    out, launch = gate_launch(merged, tanh_gelu, out)
    launch.run()
    return out


def gate_launch(merged: Tensor, tanh_gelu: bool = False, out: Tensor | None = None) -> tuple[Tensor, Launch]:
    """Return the result's tensor, not yet filled, and the launch that fills it; see `silu_mul`."""
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
