"""Row-wise dynamic quantisation to float8_e4m3fn.

A scale is the row's largest number over 448, in float32, and 1 for a row of zeros. In torch's operations the same takes
about eight launches before each product.
"""

from __future__ import annotations

import torch
import triton.language as tl  # type: ignore[import-untyped]
from torch import Tensor

from weftline.engine.llm.kernels.float8 import write_numbers
from weftline.engine.llm.kernels.launch import (
    FLOAT8,
    FLOAT8_MAX,
    FLOATS,
    Launch,
    arch_of,
    as_bytes,
    jit,
    need,
    power_of_two,
)

TILE_MAX = 8192
"""Numbers of a row read at a time; longer rows are read twice, the second time from a cache."""
_FLOAT8_MAX = tl.constexpr(FLOAT8_MAX)


@jit
def scale_rows(
    x: tl.tensor,
    out: tl.tensor,
    scales: tl.tensor,
    x_row: tl.tensor,
    out_row: tl.tensor,
    WIDTH: tl.constexpr,
    TILE: tl.constexpr,
    BITS: tl.constexpr,
) -> None:
    """Scale and round one row (program axis 0)."""
    row = tl.program_id(0).to(tl.int64)
    largest = tl.zeros([TILE], tl.float32)
    for start in tl.range(0, WIDTH, TILE):
        at = start + tl.arange(0, TILE)
        numbers = tl.load(x + row * x_row + at, mask=at < WIDTH, other=0.0).to(tl.float32)
        largest = tl.maximum(largest, tl.abs(numbers))
    top = tl.max(largest, 0)
    scale = tl.where(top == 0.0, 1.0, tl.maximum(tl.div_rn(top, _FLOAT8_MAX), 1e-37))
    tl.store(scales + row, scale)
    for start in tl.range(0, WIDTH, TILE):
        at = start + tl.arange(0, TILE)
        numbers = tl.load(x + row * x_row + at, mask=at < WIDTH, other=0.0)
        write_numbers(out + row * out_row + at, numbers, scale, at < WIDTH, True, BITS)


def quantise_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return (float8_e4m3fn [rows, width], float32 [rows, 1]): numbers, and what each row is multiplied with again.

    x: [rows, width], float16, bfloat16 or float32, dense rows.
    """
    out, scales, launch = quantise_launch(x)
    launch.run()
    return out, scales


def quantise_launch(x: Tensor, arch: int | None = None) -> tuple[Tensor, Tensor, Launch]:
    """Return both results' tensors, not yet filled, and the launch that fills them; see `quantise_rows`."""
    need(x.dim() == 2 and x.stride(1) == 1, f"x: wants dense rows [rows, width], is {tuple(x.shape)}")
    need(x.dtype in FLOATS, f"x: wants float16, bfloat16 or float32, is {x.dtype}")
    rows, width = x.shape
    arch = arch_of(x.device) if arch is None else arch
    out = torch.empty(rows, width, dtype=FLOAT8, device=x.device)
    scales = torch.empty(rows, 1, dtype=torch.float32, device=x.device)
    tile = min(power_of_two(width), TILE_MAX)
    arguments = {
        "x": x,
        "out": as_bytes(out, arch),
        "scales": scales,
        "x_row": x.stride(0),
        "out_row": width,
        "WIDTH": width,
        "TILE": tile,
        "BITS": as_bytes(out, arch).dtype == torch.uint8,
    }
    # a warp for each 512 numbers, as for norms
    return out, scales, Launch(scale_rows, (rows,), arguments, min(max(tile // 512, 1), 16))
