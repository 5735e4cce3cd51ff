"""Paged attention kernels: tiles of rows, and the reduction of split sequences.

A *tile* is up to `TILE_ROWS` neighbouring rows of one sequence with all query heads that share a key head. Sequence i
owns the tiles from row_starts[i] // TILE_ROWS + i on: these numbers never collide, leave few gaps, and can be found
from `row_starts` alone, so that the grid depends on padded sizes only. Padding rows count as one more sequence behind
the last, whose result is 0. Padded sizes are arguments, so that all share one compiled form. A program walks over the
keys that its tile sees, `STEP_KEYS` at a time, and keeps the running maximum, sum and weighted values (online softmax:
Milakov and Gimelshein 2018; FlashAttention: Dao and others 2022).

A sequence of few rows has few tiles; its keys are cut into *splits*, each walked by a program of its own that leaves
its part and the logarithm of its weight, and `join_splits` puts the parts together (Flash-Decoding: Dao and others
2023). How many splits are in use follows from the sequence's length, read from tensors; programs left over end at once.

Keys outside of what a tile sees are never read: what lies in their slots, NaN included, cannot matter.
"""

from __future__ import annotations

import triton.language as tl  # type: ignore[import-untyped]

from weftline.engine.llm.kernels.float8 import read_numbers
from weftline.engine.llm.kernels.launch import jit, jit_unspecialised


@jit
def seen_steps(
    first_position: tl.tensor, last_position: tl.tensor, WINDOW: tl.constexpr, STEP_KEYS: tl.constexpr
) -> tl.tensor:
    """Return (first visible key, first key of the loop, loop steps) of rows at these positions."""
    low = 0
    if WINDOW > 0:
        low = tl.maximum(first_position - WINDOW + 1, 0)
    begin = low // STEP_KEYS * STEP_KEYS
    return low, begin, (last_position + 1 - begin + STEP_KEYS - 1) // STEP_KEYS


@jit
def split_plan(
    rows: tl.tensor, steps: tl.tensor, splits: tl.tensor, split_steps: tl.tensor, SPLIT_ROWS: tl.constexpr
) -> tl.tensor:
    """Return (used splits, steps per split) for a tile of `rows` that loops over `steps`."""
    wanted = tl.minimum((steps + split_steps - 1) // split_steps, splits)
    wanted = tl.where(rows <= SPLIT_ROWS, tl.maximum(wanted, 1), 1)
    each = (steps + wanted - 1) // wanted
    return (steps + each - 1) // each, each


@jit
def product(
    a: tl.tensor, b: tl.tensor, sum_so_far: tl.tensor, PRECISION: tl.constexpr, WIDEN: tl.constexpr
) -> tl.tensor:
    """Return a @ b + sum_so_far in float32. WIDEN: multiply as float32, for the interpreter, which has no bfloat16."""
    if WIDEN:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), sum_so_far)
    else:
        return tl.dot(a, b, sum_so_far, input_precision=PRECISION)


@jit_unspecialised("sequences", "padded_rows", "splits", "split_steps", "parts_by_row")
def attend_tiles(
    query: tl.tensor,
    keys: tl.tensor,
    values: tl.tensor,
    out: tl.tensor,
    part_out: tl.tensor,
    part_weight: tl.tensor,
    tables: tl.tensor,
    row_starts: tl.tensor,
    starts: tl.tensor,
    key_scale: tl.tensor,
    value_scale: tl.tensor,
    scale: tl.tensor,
    softcap: tl.tensor,
    sequences: tl.tensor,
    padded_rows: tl.tensor,
    splits: tl.tensor,
    split_steps: tl.tensor,
    parts_by_row: tl.tensor,
    query_row: tl.tensor,
    query_head: tl.tensor,
    keys_head: tl.tensor,
    keys_slot: tl.tensor,
    values_head: tl.tensor,
    values_slot: tl.tensor,
    out_row: tl.tensor,
    out_head: tl.tensor,
    tables_row: tl.tensor,
    key_scale_head: tl.tensor,
    value_scale_head: tl.tensor,
    SEQUENCES_TILE: tl.constexpr,
    GROUP: tl.constexpr,
    WIDTH: tl.constexpr,
    WIDTH_TILE: tl.constexpr,
    VALUE_WIDTH: tl.constexpr,
    VALUE_TILE: tl.constexpr,
    PAGE: tl.constexpr,
    LANES: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    STEP_KEYS: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    SPLIT_ROWS: tl.constexpr,
    PRECISION: tl.constexpr,
    BITS: tl.constexpr,
    WIDEN: tl.constexpr,
) -> None:
    """Compute attention of one tile (program axis 0, longest first), key head (1) and split (2)."""
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    kv_head = tl.program_id(1)
    split = tl.program_id(2)

    sequence = tl.full((), -1, tl.int32)
    for first in tl.range(0, sequences + 1, SEQUENCES_TILE):
        numbers = first + tl.arange(0, SEQUENCES_TILE)
        firsts = tl.load(row_starts + numbers, mask=numbers <= sequences, other=0)
        owned = (numbers <= sequences) & (firsts // TILE_ROWS + numbers <= tile)
        sequence += tl.sum(owned.to(tl.int32), 0)
    row_start = tl.load(row_starts + sequence)
    # padding rows are those of one more sequence, behind the last
    rows = tl.load(row_starts + sequence + 1, mask=sequence < sequences, other=padded_rows) - row_start
    row = (tile - row_start // TILE_ROWS - sequence) * TILE_ROWS
    if row >= rows:
        return
    lanes = tl.arange(0, LANES)
    lane_row = lanes // GROUP
    lane_head = kv_head * GROUP + lanes % GROUP
    alive = (lane_row < TILE_ROWS) & (row + lane_row < rows)
    packed_row = (row_start + row + lane_row).to(tl.int64)
    value_widths = tl.arange(0, VALUE_TILE)
    if sequence == sequences:
        if split == 0:
            nothing = tl.zeros([LANES, VALUE_TILE], out.dtype.element_ty)
            place = out + packed_row[:, None] * out_row + lane_head[:, None] * out_head
            tl.store(
                place + value_widths[None, :], nothing, mask=alive[:, None] & (value_widths < VALUE_WIDTH)[None, :]
            )
        return
    position = tl.load(starts + sequence) + row
    last_position = position + tl.minimum(TILE_ROWS, rows - row) - 1
    low, begin, steps = seen_steps(position, last_position, WINDOW, STEP_KEYS)
    used, each = split_plan(rows, steps, splits, split_steps, SPLIT_ROWS)
    if split >= used:
        return

    widths = tl.arange(0, WIDTH_TILE)
    asked = tl.load(
        query + packed_row[:, None] * query_row + lane_head[:, None] * query_head + widths[None, :],
        mask=alive[:, None] & (widths < WIDTH)[None, :],
        other=0.0,
    )
    lane_position = position + lane_row
    # weights are powers of two: one instruction, where powers of e are two
    to_log2 = 1.4426950408889634
    score_scale = scale
    if key_scale is not None:
        score_scale = scale * tl.load(key_scale + kv_head * key_scale_head)
    keys_here = keys + kv_head.to(tl.int64) * keys_head + widths[None, :]
    values_here = values + kv_head.to(tl.int64) * values_head + value_widths[None, :]
    table = tables + sequence.to(tl.int64) * tables_row

    best = tl.full([LANES], float("-inf"), tl.float32)
    total = tl.zeros([LANES], tl.float32)
    answer = tl.zeros([LANES, VALUE_TILE], tl.float32)
    walk = begin + split * each * STEP_KEYS
    stop = tl.minimum(begin + (split + 1) * each * STEP_KEYS, last_position + 1)
    for step in tl.range(walk, stop, STEP_KEYS):
        key = step + tl.arange(0, STEP_KEYS)
        there = (key >= low) & (key < stop)
        page = tl.load(table + key // PAGE, mask=there, other=0)
        slot = page.to(tl.int64) * PAGE + key % PAGE
        k = read_numbers(
            keys_here + slot[:, None] * keys_slot,
            there[:, None] & (widths < WIDTH)[None, :],
            query.dtype.element_ty,
            BITS,
        )
        scores = product(asked, tl.trans(k), tl.zeros([LANES, STEP_KEYS], tl.float32), PRECISION, WIDEN) * score_scale
        if SOFTCAP:
            scores = softcap * (1.0 - 2.0 / (tl.exp2(scores * (2.0 * to_log2 / softcap)) + 1.0))
        seen = there[None, :] & (key[None, :] <= lane_position[:, None])
        if WINDOW > 0:
            seen = seen & (key[None, :] > lane_position[:, None] - WINDOW)
        scores = tl.where(seen, scores * to_log2, float("-inf"))
        higher = tl.maximum(best, tl.max(scores, 1))
        # a row that has seen no key yet has no maximum: minus infinity less itself would be NaN
        level = tl.where(higher == float("-inf"), 0.0, higher)
        weights = tl.exp2(scores - level[:, None])
        shrink = tl.exp2(best - level)
        total = total * shrink + tl.sum(weights, 1)
        v = read_numbers(
            values_here + slot[:, None] * values_slot,
            there[:, None] & (value_widths < VALUE_WIDTH)[None, :],
            query.dtype.element_ty,
            BITS,
        )
        answer = product(weights.to(v.dtype), v, answer * shrink[:, None], PRECISION, WIDEN)
        best = higher

    answer = answer / tl.where(total == 0.0, 1.0, total)[:, None]
    if value_scale is not None:
        answer = answer * tl.load(value_scale + kv_head * value_scale_head)
    shown = alive[:, None] & (value_widths < VALUE_WIDTH)[None, :]
    if used == 1:
        place = out + packed_row[:, None] * out_row + lane_head[:, None] * out_head
        tl.store(place + value_widths[None, :], answer.to(out.dtype.element_ty), mask=shown)
    else:
        first_part = tl.where(parts_by_row != 0, row_start, sequence * SPLIT_ROWS)
        heads = tl.num_programs(1) * GROUP
        part = ((first_part + row + lane_row).to(tl.int64) * heads + lane_head) * splits + split
        tl.store(part_out + part[:, None] * VALUE_WIDTH + value_widths[None, :], answer, mask=shown)
        tl.store(part_weight + part, best + tl.log2(total), mask=alive)


@jit_unspecialised("splits", "split_steps", "parts_by_row")
def join_splits(
    out: tl.tensor,
    part_out: tl.tensor,
    part_weight: tl.tensor,
    row_starts: tl.tensor,
    starts: tl.tensor,
    splits: tl.tensor,
    split_steps: tl.tensor,
    parts_by_row: tl.tensor,
    out_row: tl.tensor,
    out_head: tl.tensor,
    VALUE_WIDTH: tl.constexpr,
    VALUE_TILE: tl.constexpr,
    STEP_KEYS: tl.constexpr,
    WINDOW: tl.constexpr,
    SPLITS_TILE: tl.constexpr,
    SPLIT_ROWS: tl.constexpr,
) -> None:
    """Combine the splits of one sequence (program axis 0) and query head (1) by their log-sum-exp."""
    sequence = tl.program_id(0)
    head = tl.program_id(1)
    row_start = tl.load(row_starts + sequence)
    rows = tl.load(row_starts + sequence + 1) - row_start
    if (rows > SPLIT_ROWS) | (rows < 1):
        return
    position = tl.load(starts + sequence)
    _low, _begin, steps = seen_steps(position, position + rows - 1, WINDOW, STEP_KEYS)
    used, _each = split_plan(rows, steps, splits, split_steps, SPLIT_ROWS)
    if used == 1:
        return
    numbers = tl.arange(0, SPLITS_TILE)
    widths = tl.arange(0, VALUE_TILE)
    for row in tl.range(0, rows):
        first_part = tl.where(parts_by_row != 0, row_start, sequence * SPLIT_ROWS)
        parts = ((first_part + row).to(tl.int64) * tl.num_programs(1) + head) * splits + numbers
        weight = tl.load(part_weight + parts, mask=numbers < used, other=float("-inf"))
        share = tl.exp2(weight - tl.max(weight, 0))
        part = tl.load(
            part_out + parts[:, None] * VALUE_WIDTH + widths[None, :],
            mask=(numbers < used)[:, None] & (widths < VALUE_WIDTH)[None, :],
            other=0.0,
        )
        answer = tl.sum(part * share[:, None], 0) / tl.sum(share, 0)
        place = out + (row_start + row).to(tl.int64) * out_row + head * out_head
        tl.store(place + widths, answer.to(out.dtype.element_ty), mask=widths < VALUE_WIDTH)
