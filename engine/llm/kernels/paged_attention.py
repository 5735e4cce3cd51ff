"""Paged attention call: prefill, decode and mixed rounds in one launch.

What changes from round to round is read from tensors; the launch depends on the padded sizes of the round only and can
be captured in a CUDA graph. Padded sequences have no rows and cost nothing; padded rows belong to no sequence, and
their part of the result is 0. A model has two compiled forms for each kind of layer, decode's and prefill's, whatever
the sizes of its rounds.

    row_starts  0 3 4 4        sequence 0 has rows 0 to 2, sequence 1 has row 3, sequence 2 is padding
    starts      7 20 0         row 0 is token 7 of its sequence, row 3 is token 20; row 0 sees tokens 0 to 7
"""

from __future__ import annotations

import torch
from torch import Tensor

from weftline.engine.llm.kernels.attention_config import (
    SEQUENCES_TILE,
    SPLIT_ROWS,
    SPLITS_MAX,
    AttentionConfig,
    attention_config,
    split_keys_for,
    splits_for,
    width_tile,
)
from weftline.engine.llm.kernels.attention_kernel import attend_tiles, join_splits
from weftline.engine.llm.kernels.launch import FLOAT8, FLOATS, Launch, arch_of, as_bytes, need, run_all

WIDTH_MAX = 256
"""Widest head; wider ones would not fit into registers."""


def paged_attention(
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
    out: Tensor | None = None,
    splits: int | None = None,
) -> Tensor:
    """Compute softmax(q k' scale) v over KV pages, [rows, heads, value width] of the query's dtype.

    query:       [rows, heads, width], float16, bfloat16 or float32; any strides with dense heads.
    keys:        [kv_heads, slots, width], values: [kv_heads, slots, value width]; of those dtypes or float8_e4m3fn.
                 Token t of a sequence is at slot tables[sequence, t // page_tokens] * page_tokens + t % page_tokens.
    tables:      int32 [sequences, pages_max]; entries before a sequence's window or behind its last page are not read.
    row_starts:  int32 [sequences + 1], ascending from 0: sequence i has rows row_starts[i]:row_starts[i + 1].
    starts:      int32 [sequences], position of each sequence's first row; a row sees keys 0 to its position.
    window:      a row sees only keys > position - window; None: all.
    softcap:     scores become softcap * tanh(score / softcap); None: as they are.
    key_scale, value_scale: float32 [1] or [kv_heads], what stored numbers are multiplied with; None: 1.
    out:         where the result goes; made when None.   splits: at most so many per sequence; None: chosen.

    The keys and values of the round's own rows must be in the pages already. Raises ValueError for other shapes.
    """
    out, launches = attention_launches(
        query, keys, values, tables, row_starts, starts, page_tokens, scale, window, softcap,
        key_scale, value_scale, out, splits,
    )  # fmt: skip
    run_all(launches)
    return out


def attention_launches(
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
    out: Tensor | None = None,
    splits: int | None = None,
    arch: int | None = None,
    config: AttentionConfig | None = None,
) -> tuple[Tensor, list[Launch]]:
    """Prepare the launches of `paged_attention`; return its uninitialised output and the launches.

    arch: compile for it instead of the query's device.   config: sizes other than the table's.
    """
    _check(query, keys, values, tables, row_starts, starts, page_tokens, window, softcap)
    rows, heads, width = query.shape
    kv_heads, _, value_width = values.shape
    sequences, group = starts.shape[0], heads // kv_heads
    for name, given in (("key_scale", key_scale), ("value_scale", value_scale)):
        check_scale(name, given, kv_heads)
    if out is None:
        out = query.new_empty(rows, heads, value_width)
    need(out.shape == (rows, heads, value_width) and out.stride(2) == 1, f"out is {tuple(out.shape)}")
    arch = arch_of(query.device) if arch is None else arch
    bits = as_bytes(keys, arch).dtype == torch.uint8
    if config is None:
        widest = max(width, value_width)
        config = attention_config(rows, sequences, group, widest, query.dtype.itemsize, arch, bits)
    tile_rows = config.lanes // group
    splits = splits_for(sequences, kv_heads) if splits is None else splits
    need(0 < splits <= SPLITS_MAX, f"splits is {splits}, 1 to {SPLITS_MAX}")
    split_rows = min(tile_rows, SPLIT_ROWS)
    part_rows = min(rows, sequences * split_rows)
    parts = part_rows if splits > 1 else 0  # of one split none are written, but the kernel is compiled for both
    shared = {
        "out": out,
        "part_out": query.new_empty(parts, heads, splits, value_width, dtype=torch.float32),
        "part_weight": query.new_empty(parts, heads, splits, dtype=torch.float32),
        "row_starts": row_starts,
        "starts": starts,
        "out_row": out.stride(0),
        "out_head": out.stride(1),
        "VALUE_WIDTH": value_width,
        "VALUE_TILE": width_tile(value_width),
        "STEP_KEYS": config.step_keys,
        "WINDOW": window or 0,
        "SPLIT_ROWS": split_rows,
        "splits": splits,
        "split_steps": max(split_keys_for(sequences, kv_heads) // config.step_keys, 1),
        "parts_by_row": int(part_rows == rows),
    }
    attend = {
        **shared,
        "query": query,
        "keys": as_bytes(keys, arch),
        "values": as_bytes(values, arch),
        "tables": tables,
        "key_scale": key_scale,
        "value_scale": value_scale,
        "scale": float(scale),
        "softcap": float(softcap or 0.0),
        "sequences": sequences,
        "padded_rows": rows,
        "query_row": query.stride(0),
        "query_head": query.stride(1),
        "keys_head": keys.stride(0),
        "keys_slot": keys.stride(1),
        "values_head": values.stride(0),
        "values_slot": values.stride(1),
        "tables_row": tables.stride(0),
        "key_scale_head": int(key_scale is not None and key_scale.shape[0] > 1),
        "value_scale_head": int(value_scale is not None and value_scale.shape[0] > 1),
        "SEQUENCES_TILE": SEQUENCES_TILE,
        "GROUP": group,
        "WIDTH": width,
        "WIDTH_TILE": width_tile(width),
        "PAGE": page_tokens,
        "TILE_ROWS": tile_rows,
        "LANES": config.lanes,
        "SOFTCAP": bool(softcap),
        "PRECISION": "tf32x3" if query.dtype == torch.float32 else "tf32",
        "BITS": bits,
        "WIDEN": query.dtype == torch.bfloat16 and query.device.type == "cpu",
    }
    tiles = rows // tile_rows + sequences + 1
    launches = [Launch(attend_tiles, (tiles, kv_heads, splits), attend, config.warps, config.stages)]
    if splits > 1:
        join = {**shared, "SPLITS_TILE": SPLITS_MAX}
        launches.append(Launch(join_splits, (sequences, heads), join))
    return out, launches if rows else []


def check_scale(name: str, scale: Tensor | None, kv_heads: int) -> None:
    """Raise ValueError unless `scale` is None or float32 with one element in all or per key head."""
    good = scale is None or (scale.dtype == torch.float32 and scale.dim() == 1 and scale.shape[0] in (1, kv_heads))
    need(good and (scale is None or scale.is_contiguous()), f"{name}: wants dense float32 [1] or [{kv_heads}]")


def _check(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    tables: Tensor,
    row_starts: Tensor,
    starts: Tensor,
    page_tokens: int,
    window: int | None,
    softcap: float | None,
) -> None:
    need(query.dim() == 3 and query.stride(2) == 1, f"query: wants dense heads [rows, heads, width], is {query.shape}")
    need(query.dtype in FLOATS, f"query: wants float16, bfloat16 or float32, is {query.dtype}")
    kv_heads, width = keys.shape[0], query.shape[2]
    need(query.shape[1] % kv_heads == 0, f"query: {query.shape[1]} heads cannot share {kv_heads} key heads")
    need(keys.shape[2] == width, f"keys: wants width {width} as the query, is {keys.shape[2]}")
    need(values.shape[:2] == keys.shape[:2], f"values: wants {keys.shape[:2]} heads and slots, is {values.shape[:2]}")
    need(max(width, values.shape[2]) <= WIDTH_MAX, f"keys, values: wider than {WIDTH_MAX}, the most there is")
    need(keys.dtype == values.dtype, f"keys are {keys.dtype} and values {values.dtype}; wants the same")
    need(keys.dtype in (*FLOATS, FLOAT8), f"keys: wants float16, bfloat16, float32 or float8_e4m3fn, is {keys.dtype}")
    need(keys.stride(2) == values.stride(2) == 1, "keys, values: wants dense slots")
    need(
        tables.dtype == torch.int32 and tables.dim() == 2 and tables.stride(1) == 1,
        "tables: wants int32 [sequences, pages]",
    )
    sequences = starts.shape[0]
    need(tables.shape[0] == sequences > 0, f"tables: wants {sequences} lines, as starts, and at least 1")
    need(
        row_starts.shape == (sequences + 1,), f"row_starts: wants {sequences + 1} numbers, is {tuple(row_starts.shape)}"
    )
    for name, numbers in (("row_starts", row_starts), ("starts", starts)):
        need(numbers.dtype == torch.int32 and numbers.is_contiguous(), f"{name}: wants dense int32, is {numbers.dtype}")
    need(page_tokens > 0, f"page_tokens is {page_tokens}, at least 1")
    need(window is None or window > 0, f"window is {window}; at least 1, or None")
    need(softcap is None or softcap > 0, f"softcap is {softcap}; more than 0, or None")
