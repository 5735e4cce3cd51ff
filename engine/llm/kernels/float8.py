"""float8_e4m3fn: conversion inside kernels, with and without hardware support, and quantisation of rows.

GPUs before compute capability 8.9 have none, and Triton refuses the type there. Pages then come as uint8, and the
conversions are done on bits. Both ways give the same numbers: reading is exact, writing rounds to the nearest, ties to
even, and what is too large becomes the largest. The format: 1 sign, 4 exponent (bias 7) and 3 mantissa bits, no
infinity, 0x7f is NaN (OCP 8-bit floating point specification, revision 1.0).

`quantise_rows` scales each row dynamically: its largest magnitude / 448 in float32, or 1 for a row of zeros. torch
needs about eight launches for the same.
"""

from __future__ import annotations

import torch
import triton.language as tl  # type: ignore[import-untyped]
from torch import Tensor

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


@jit
def read_float8_bits(bits: tl.tensor) -> tl.tensor:
    """Convert e4m3 `bits` (uint8) to float16; NaN becomes 480.

    The bits moved into a float16 have its bias of 15 instead of 7: the number is 2**8 too small, subnormals too.
    """
    wide = bits.to(tl.uint16)
    moved = ((wide & 0x80) << 8) | ((wide & 0x7F) << 7)
    return moved.to(tl.float16, bitcast=True) * 256.0


@jit
def float8_bits(numbers: tl.tensor) -> tl.tensor:
    """Convert float32 in [-448, 448] or NaN to e4m3 bits (uint8).

    From 2**-6 on: add half of what the 20 mantissa bits that go are worth (less one bit when that would break a tie
    away from even), cut them, and move the exponent's bias from 127 to 7. Below, numbers are multiples of 2**-9, which
    is the last bit of floats between 2**14 and 2**15: adding 2**14 rounds.
    """
    bits = numbers.to(tl.uint32, bitcast=True)
    sign = (bits >> 24) & 0x80
    size = bits & 0x7FFFFFFF
    normal = ((size + 0x7FFFF + ((size >> 20) & 1)) >> 20) - 960
    small = (tl.abs(numbers) + 16384.0).to(tl.uint32, bitcast=True) - 0x46800000
    found = tl.where(size < 0x3C800000, small, normal)
    found = tl.where(size > 0x7F800000, 0x7F, found)
    return (found | sign).to(tl.uint8)


@jit
def scale_of(scales: tl.tensor, offset: tl.tensor) -> tl.tensor:
    """Return the scale of a head's stored values; 1 without scales."""
    if scales is None:
        return 1.0
    else:
        return tl.load(scales + offset)


@jit
def read_numbers(pointers: tl.tensor, mask: tl.tensor, into: tl.constexpr, BITS: tl.constexpr) -> tl.tensor:
    """Load page elements as dtype `into`, 0 where masked. BITS: pages are float8 as uint8."""
    numbers = tl.load(pointers, mask=mask, other=0.0)
    if BITS:
        return read_float8_bits(numbers).to(into)
    else:
        return numbers.to(into)


@jit
def write_numbers(
    pointers: tl.tensor, numbers: tl.tensor, scale: tl.tensor, mask: tl.tensor, FLOAT8: tl.constexpr, BITS: tl.constexpr
) -> tl.tensor:
    """Store `numbers` at `pointers` of pages where `mask` is set; into float8 pages divided by `scale`."""
    if FLOAT8:
        scaled = tl.div_rn(numbers.to(tl.float32), scale)  # rounded as torch does, which `/` is not
        limited = tl.where(scaled > 448.0, 448.0, tl.where(scaled < -448.0, -448.0, scaled))  # NaN stays NaN
        if BITS:
            tl.store(pointers, float8_bits(limited), mask=mask)
        else:
            tl.store(pointers, limited.to(tl.float8e4nv), mask=mask)
    else:
        tl.store(pointers, numbers.to(pointers.dtype.element_ty), mask=mask)


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
    """Quantise one row (program axis 0) to float8."""
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
    """Quantise rows: return (float8_e4m3fn [rows, width], scales float32 [rows, 1]).

    x: [rows, width], float16, bfloat16 or float32, dense rows.
    """
    out, scales, launch = quantise_launch(x)
    launch.run()
    return out, scales


def quantise_launch(x: Tensor, arch: int | None = None) -> tuple[Tensor, Tensor, Launch]:
    """Prepare the launch of `quantise_rows`; return its uninitialised outputs and the launch."""
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
