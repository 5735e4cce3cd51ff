"""Fused rotary embedding and KV write kernel.

The rotation is that of transformers' Llama and its relatives: number i of a head turns with number i + half of the
rotary width (Su and others 2021, RoFormer, with the halves in that order). Products and their sum are rounded to the
model's dtype one by one, as transformers' are.
"""

from __future__ import annotations

import torch
import triton.language as tl  # type: ignore[import-untyped]
from torch import Tensor

from weftline.engine.llm.kernels.float8 import scale_of, write_numbers
from weftline.engine.llm.kernels.launch import Launch, jit, need
from weftline.engine.llm.kernels.write_pages import write_arguments


@jit
def turned(
    x: tl.tensor,
    cos: tl.tensor,
    sin: tl.tensor,
    at: tl.tensor,
    WIDTH: tl.constexpr,
    ROTARY: tl.constexpr,
) -> tl.tensor:
    """Load the head at `x` and rotate its first ROTARY elements, in its dtype."""
    HALF: tl.constexpr = ROTARY // 2
    kept = tl.load(x + at, mask=at < WIDTH, other=0.0)
    dtype: tl.constexpr = kept.dtype
    turning = at < ROTARY
    partner = tl.load(x + tl.where(at < HALF, at + HALF, at - HALF), mask=turning, other=0.0).to(tl.float32)
    partner = tl.where(at < HALF, -partner, partner)
    along = (kept.to(tl.float32) * tl.load(cos + at, mask=turning, other=0.0).to(tl.float32)).to(dtype)
    across = (partner * tl.load(sin + at, mask=turning, other=0.0).to(tl.float32)).to(dtype)
    return tl.where(turning, (along.to(tl.float32) + across.to(tl.float32)).to(dtype), kept)


@jit
def rotate_and_write_rows(
    query: tl.tensor,
    out: tl.tensor,
    key: tl.tensor,
    value: tl.tensor,
    cos: tl.tensor,
    sin: tl.tensor,
    keys: tl.tensor,
    values: tl.tensor,
    slots: tl.tensor,
    key_scale: tl.tensor,
    value_scale: tl.tensor,
    query_row: tl.tensor,
    query_head: tl.tensor,
    out_row: tl.tensor,
    out_head: tl.tensor,
    key_row: tl.tensor,
    key_head: tl.tensor,
    value_row: tl.tensor,
    value_head: tl.tensor,
    cos_row: tl.tensor,
    sin_row: tl.tensor,
    keys_head: tl.tensor,
    keys_slot: tl.tensor,
    values_head: tl.tensor,
    values_slot: tl.tensor,
    scale_head: tl.tensor,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    WIDTH_TILE: tl.constexpr,
    VALUE_WIDTH: tl.constexpr,
    VALUE_TILE: tl.constexpr,
    ROTARY: tl.constexpr,
    FLOAT8: tl.constexpr,
    BITS: tl.constexpr,
) -> None:
    """Rotate a query head, or rotate and write a key head; program axis 0: row, 1: head."""
    row = tl.program_id(0).to(tl.int64)
    job = tl.program_id(1)
    cos += row * cos_row
    sin += row * sin_row
    at = tl.arange(0, WIDTH_TILE)
    if job < HEADS:
        q = turned(query + row * query_row + job * query_head, cos, sin, at, WIDTH, ROTARY)
        tl.store(out + row * out_row + job * out_head + at, q, mask=at < WIDTH)
    else:
        slot = tl.load(slots + row)
        if slot >= 0:
            head = (job - HEADS).to(tl.int64)
            k = turned(key + row * key_row + head * key_head, cos, sin, at, WIDTH, ROTARY)
            place = keys + head * keys_head + slot * keys_slot + at
            write_numbers(place, k, scale_of(key_scale, head * scale_head), at < WIDTH, FLOAT8, BITS)
            at_value = tl.arange(0, VALUE_TILE)
            v = tl.load(value + row * value_row + head * value_head + at_value, mask=at_value < VALUE_WIDTH, other=0.0)
            place = values + head * values_head + slot * values_slot + at_value
            write_numbers(place, v, scale_of(value_scale, head * scale_head), at_value < VALUE_WIDTH, FLOAT8, BITS)


def rotate_and_write(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cos: Tensor,
    sin: Tensor,
    keys: Tensor,
    values: Tensor,
    slots: Tensor,
    key_scale: Tensor | None = None,
    value_scale: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Apply rotary embedding to query and key, write key and value to pages, return the query.

    query: [rows, heads, width]; any strides with dense heads.
    cos, sin: [rows, rotary width], of any float dtype; rotary width is even and at most width, numbers behind it stay.
    out: where the rotated query goes; made when None. It may not be the query itself.
    """
    out, launch = rotate_launch(query, key, value, cos, sin, keys, values, slots, key_scale, value_scale, out)
    launch.run()
    return out


def rotate_launch(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cos: Tensor,
    sin: Tensor,
    keys: Tensor,
    values: Tensor,
    slots: Tensor,
    key_scale: Tensor | None = None,
    value_scale: Tensor | None = None,
    out: Tensor | None = None,
    arch: int | None = None,
) -> tuple[Tensor, Launch]:
    """Prepare the launch of `rotate_and_write`; return its uninitialised output and the launch."""
    rows, heads, width = query.shape
    shared = write_arguments(key, value, keys, values, slots, key_scale, value_scale, arch)
    rotary = cos.shape[1]
    need(
        query.dtype == key.dtype and query.stride(2) == 1, f"query: wants dense heads of {key.dtype}, is {query.dtype}"
    )
    need(
        key.shape[0] == rows and key.shape[2] == width, f"key: wants [{rows}, kv_heads, {width}], is {tuple(key.shape)}"
    )
    need(
        cos.shape == sin.shape == (rows, rotary), f"cos, sin: want [{rows}, rotary width], are {cos.shape}, {sin.shape}"
    )
    need(0 < rotary <= width and rotary % 2 == 0, f"cos: wants an even width of at most {width}, is {rotary}")
    need(cos.stride(1) == sin.stride(1) == 1, "cos, sin: want dense rows")
    out = torch.empty_like(query, memory_format=torch.contiguous_format) if out is None else out
    need(out.shape == query.shape and out.stride(2) == 1 and out.dtype == query.dtype, "out: wants the query's shape")
    arguments = {
        **shared,
        "query": query,
        "out": out,
        "cos": cos,
        "sin": sin,
        "query_row": query.stride(0),
        "query_head": query.stride(1),
        "out_row": out.stride(0),
        "out_head": out.stride(1),
        "cos_row": cos.stride(0),
        "sin_row": sin.stride(0),
        "HEADS": heads,
        "ROTARY": rotary,
    }
    return out, Launch(rotate_and_write_rows, (rows, heads + key.shape[1]), arguments, warps=1)
