"""KV write kernel: keys and values of a round into pages.

Each row has its slot, or a negative number: it is padding then, and nothing is written. Float8 pages hold numbers
divided by a scale, which attention multiplies them with again.
"""

from __future__ import annotations

import torch
import triton.language as tl  # type: ignore[import-untyped]
from torch import Tensor

from weftline.engine.llm.kernels.float8 import scale_of, write_numbers
from weftline.engine.llm.kernels.launch import FLOAT8, FLOATS, Launch, arch_of, as_bytes, jit, need, power_of_two
from weftline.engine.llm.kernels.paged_attention import check_scale


@jit
def write_rows(
    key: tl.tensor,
    value: tl.tensor,
    keys: tl.tensor,
    values: tl.tensor,
    slots: tl.tensor,
    key_scale: tl.tensor,
    value_scale: tl.tensor,
    key_row: tl.tensor,
    key_head: tl.tensor,
    value_row: tl.tensor,
    value_head: tl.tensor,
    keys_head: tl.tensor,
    keys_slot: tl.tensor,
    values_head: tl.tensor,
    values_slot: tl.tensor,
    scale_head: tl.tensor,
    WIDTH: tl.constexpr,
    WIDTH_TILE: tl.constexpr,
    VALUE_WIDTH: tl.constexpr,
    VALUE_TILE: tl.constexpr,
    FLOAT8: tl.constexpr,
    BITS: tl.constexpr,
) -> None:
    """Write the key and value of one row (program axis 0) and key head (1)."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1).to(tl.int64)
    slot = tl.load(slots + row)
    if slot < 0:
        return
    at = tl.arange(0, WIDTH_TILE)
    k = tl.load(key + row * key_row + head * key_head + at, mask=at < WIDTH, other=0.0)
    place = keys + head * keys_head + slot * keys_slot + at
    write_numbers(place, k, scale_of(key_scale, head * scale_head), at < WIDTH, FLOAT8, BITS)
    at = tl.arange(0, VALUE_TILE)
    v = tl.load(value + row * value_row + head * value_head + at, mask=at < VALUE_WIDTH, other=0.0)
    place = values + head * values_head + slot * values_slot + at
    write_numbers(place, v, scale_of(value_scale, head * scale_head), at < VALUE_WIDTH, FLOAT8, BITS)


def write_pages(
    key: Tensor,
    value: Tensor,
    keys: Tensor,
    values: Tensor,
    slots: Tensor,
    key_scale: Tensor | None = None,
    value_scale: Tensor | None = None,
) -> None:
    """Write a round's keys and values to the slots of their rows.

    key:   [rows, kv_heads, width], value: [rows, kv_heads, value width]; any strides with dense heads.
    keys:  [kv_heads, slots, width], values: [kv_heads, slots, value width]; written to, in their own dtype.
    slots: int64 [rows]; rows of negative slots are padding and not written. No two rows have the same slot.
    key_scale, value_scale: float32 [1] or [kv_heads], for float8 pages: numbers are divided by them, and what is then
           more than 448 from zero becomes 448. Both or none.
    """
    write_launch(key, value, keys, values, slots, key_scale, value_scale).run()


def write_launch(
    key: Tensor,
    value: Tensor,
    keys: Tensor,
    values: Tensor,
    slots: Tensor,
    key_scale: Tensor | None = None,
    value_scale: Tensor | None = None,
    arch: int | None = None,
) -> Launch:
    """Prepare the launch of `write_pages`. arch: compile for it instead of the pages' device."""
    shared = write_arguments(key, value, keys, values, slots, key_scale, value_scale, arch)
    return Launch(write_rows, (key.shape[0], key.shape[1]), shared, warps=1)


def write_arguments(
    key: Tensor,
    value: Tensor,
    keys: Tensor,
    values: Tensor,
    slots: Tensor,
    key_scale: Tensor | None,
    value_scale: Tensor | None,
    arch: int | None,
) -> dict[str, object]:
    """Check the arguments of kernels that write pages; return them by parameter name."""
    rows, kv_heads, width = key.shape
    value_width = value.shape[2]
    need(
        key.dtype in FLOATS and key.stride(2) == value.stride(2) == 1, f"key, value: want dense heads, are {key.dtype}"
    )
    need(value.shape[:2] == key.shape[:2], f"value: wants {tuple(key.shape[:2])} rows and heads, is {value.shape}")
    need(
        keys.shape[0] == kv_heads and keys.shape[2] == width,
        f"keys: wants [{kv_heads}, slots, {width}], is {keys.shape}",
    )
    need(values.shape == (*keys.shape[:2], value_width), f"values: wants width {value_width}, is {tuple(values.shape)}")
    need(keys.dtype == values.dtype and keys.dtype in (*FLOATS, FLOAT8), f"keys, values: {keys.dtype}, {values.dtype}")
    need(keys.stride(2) == values.stride(2) == 1, "keys, values: want dense slots")
    need(
        slots.shape == (rows,) and slots.dtype == torch.int64 and slots.is_contiguous(), f"slots: wants int64 [{rows}]"
    )
    need((key_scale is None) == (value_scale is None), "key_scale, value_scale: both or none")
    for name, given in (("key_scale", key_scale), ("value_scale", value_scale)):
        check_scale(name, given, kv_heads)
        need(given is None or keys.dtype == FLOAT8, f"{name}: only float8 pages have scales, these are {keys.dtype}")
    lengths = {given.shape[0] for given in (key_scale, value_scale) if given is not None}
    need(len(lengths) < 2, "key_scale, value_scale: want the same length")
    arch = arch_of(keys.device) if arch is None else arch
    return {
        "key": key,
        "value": value,
        "keys": as_bytes(keys, arch),
        "values": as_bytes(values, arch),
        "slots": slots,
        "key_scale": key_scale,
        "value_scale": value_scale,
        "key_row": key.stride(0),
        "key_head": key.stride(1),
        "value_row": value.stride(0),
        "value_head": value.stride(1),
        "keys_head": keys.stride(0),
        "keys_slot": keys.stride(1),
        "values_head": values.stride(0),
        "values_slot": values.stride(1),
        "scale_head": int(max(lengths, default=1) > 1),
        "WIDTH": width,
        "WIDTH_TILE": power_of_two(width),
        "VALUE_WIDTH": value_width,
        "VALUE_TILE": power_of_two(value_width),
        "FLOAT8": keys.dtype == FLOAT8,
        "BITS": as_bytes(keys, arch).dtype == torch.uint8,
    }
