"""Randomised test cases of paged attention and their error against the reference.

Slots that belong to no token, or to one that no row sees, are filled with NaN; pages are in random order, and table
entries that must not be read lead to a page full of NaN.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from weftline.engine.llm.kernels import reference
from weftline.engine.llm.kernels.launch import FLOAT8, run_all
from weftline.engine.llm.kernels.paged_attention import attention_launches


@dataclass(frozen=True, slots=True)
class AttentionCase:
    """One round: `rows` of each sequence behind `starts` tokens that were there before; 0 rows is padding.

    arch: compile for it; 80 reads float8 pages bit by bit. None: the device's own.   spare_rows: padded rows.
    """

    name: str
    rows: tuple[int, ...]
    starts: tuple[int, ...]
    dtype: torch.dtype = torch.float32
    page_dtype: torch.dtype | None = None
    heads: int = 4
    kv_heads: int = 2
    width: int = 64
    value_width: int | None = None
    page_tokens: int = 16
    window: int | None = None
    softcap: float | None = None
    splits: int = 2
    scales: int = 0
    spare_rows: int = 0
    arch: int | None = None


def attention_error(case: AttentionCase, seed: int, device: torch.device) -> float:
    """Return the largest difference of a round's attention from the reference; inf where it has a NaN."""
    made = torch.Generator().manual_seed(seed)
    dtype, page_dtype = case.dtype, case.page_dtype or case.dtype
    value_width = case.value_width or case.width
    counts = [-(-(start + rows) // case.page_tokens) for start, rows in zip(case.starts, case.rows)]
    pages = torch.randperm(sum(counts) + 3, generator=made).tolist()
    slots = len(pages) * case.page_tokens
    keys = torch.full((case.kv_heads, slots, case.width), torch.nan)
    values = torch.full((case.kv_heads, slots, value_width), torch.nan)
    tables = torch.full((len(counts), max(counts) + 1), pages[-1], dtype=torch.int32)
    taken = 0
    for line, count in enumerate(counts):
        tables[line, :count] = torch.tensor(pages[taken : taken + count], dtype=torch.int32)
        taken += count
        seen_from = 0 if case.window is None else max(0, case.starts[line] - case.window + 1)
        tokens = torch.arange(seen_from, case.starts[line] + case.rows[line])
        if case.rows[line]:
            at = tables[line].long()[tokens // case.page_tokens] * case.page_tokens + tokens % case.page_tokens
            keys[:, at] = torch.randn(case.kv_heads, len(tokens), case.width, generator=made)
            values[:, at] = torch.randn(case.kv_heads, len(tokens), value_width, generator=made)
    total = sum(case.rows) + case.spare_rows
    query = torch.randn(case.heads, total, case.width, generator=made).to(dtype).transpose(0, 1).to(device)
    row_starts = torch.tensor([0, *case.rows]).cumsum(0).int().to(device)
    starts = torch.tensor(case.starts, dtype=torch.int32).to(device)
    scale = [torch.rand(case.scales, generator=made).add(0.5).to(device) if case.scales else None for _ in range(2)]
    k, v = (pages.to(page_dtype).to(device) for pages in (keys, values))
    where = (tables.to(device), row_starts, starts)
    given = (query, k, v, *where, case.page_tokens, case.width**-0.5, case.window, case.softcap, scale[0], scale[1])
    out, launches = attention_launches(*given, None, case.splits, case.arch)
    out.fill_(torch.nan)
    run_all(launches)
    if not torch.equal(out[sum(case.rows) :].float(), torch.zeros_like(out[sum(case.rows) :]).float()):
        return float("inf")  # padding must be 0
    expected = reference.attention(*given)
    return reference.difference(out[: sum(case.rows)], expected[: sum(case.rows)])


_F32, _F16, _B16 = torch.float32, torch.float16, torch.bfloat16

ATTENTION = (
    AttentionCase("decode", (1, 1, 1), (0, 37, 130)),
    AttentionCase("one long sequence in many splits", (1,), (900,), splits=8),
    AttentionCase("more splits than steps of keys", (1, 1), (600, 3), splits=8),
    AttentionCase("a prompt from its start", (70,), (0,)),
    AttentionCase("a chunk of a prompt behind others", (33, 5), (50, 19), dtype=_F16),
    AttentionCase("prompts and decoding in one round", (40, 1, 1, 9), (16, 77, 0, 300), splits=4),
    AttentionCase("padded sequences and rows", (3, 0, 1, 0, 0), (7, 0, 20, 0, 0), spare_rows=4),
    AttentionCase("padded sequences between others", (0, 2, 0, 5, 0), (0, 31, 0, 2, 0)),
    AttentionCase("few rows of a long sequence", (5, 1), (700, 290), splits=4),
    AttentionCase("few rows of split sequences among many rows", (4, 30, 1), (530, 0, 300), splits=4),
    AttentionCase("one head for each key head", (6, 1), (3, 40), heads=3, kv_heads=3),
    AttentionCase("seven heads for a key head", (6, 1), (3, 40), heads=14),
    AttentionCase("one key head for all", (6, 1), (3, 290), heads=20, kv_heads=1),
    AttentionCase("window shorter than a page", (20, 1), (90, 55), window=7),
    AttentionCase("window of many pages", (20, 1, 1), (190, 400, 20), window=100, splits=4),
    AttentionCase("window of one", (3, 1), (64, 5), window=1),
    AttentionCase("split window longer than a step", (4, 1), (800, 500), window=400, splits=4),
    AttentionCase("softcap", (12, 1), (30, 290), softcap=5.0),
    AttentionCase("softcap and window in bfloat16", (12, 1), (30, 90), softcap=30.0, window=24, dtype=_B16),
    AttentionCase("width 80", (5, 1), (21, 40), width=80, dtype=_F16),
    AttentionCase("width 96", (5, 1), (21, 40), width=96, dtype=_B16),
    AttentionCase("width 128", (40, 1), (21, 290), width=128, dtype=_B16, heads=8),
    AttentionCase("width 256", (5, 1), (21, 40), width=256),
    AttentionCase("values narrower than keys", (5, 1), (21, 300), width=96, value_width=64),
    AttentionCase("pages of 5 tokens", (5, 1), (21, 40), page_tokens=5),
    AttentionCase("pages of 256 tokens", (5, 1), (261, 40), page_tokens=256),
    AttentionCase("float16 pages, float32 queries", (5, 1), (21, 40), page_dtype=_F16),
    AttentionCase("float8 pages", (5, 1), (21, 300), dtype=_B16, page_dtype=FLOAT8),
    AttentionCase("float8 pages, one scale", (5, 1), (21, 40), dtype=_F16, page_dtype=FLOAT8, scales=1),
    AttentionCase("float8 pages, a scale per head", (5, 1), (21, 300), dtype=_B16, page_dtype=FLOAT8, scales=2),
    AttentionCase("float8 pages without instructions", (5, 1), (21, 40), dtype=_F16, page_dtype=FLOAT8, arch=80),
    AttentionCase(
        "float8 pages without instructions, split and scaled",
        *((1, 9), (300, 40)),
        dtype=_B16,
        page_dtype=FLOAT8,
        scales=2,
        arch=80,
        splits=4,
    ),
)


def random_attention(seed: int) -> AttentionCase:
    """Return a case of random shape."""
    made = torch.Generator().manual_seed(seed)

    def pick(low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (), generator=made))

    count = pick(1, 5)
    rows = tuple((0, 1, 1, pick(2, 9), pick(1, 60))[pick(0, 4)] for _ in range(count))
    starts = tuple((0, pick(0, 30), pick(0, 400))[pick(0, 2)] for _ in range(count))
    kv_heads = pick(1, 3)
    return AttentionCase(
        f"random {seed}",
        rows if sum(rows) else (1,) * count,
        starts,
        dtype=(_F32, _F16, _B16)[pick(0, 2)],
        heads=kv_heads * pick(1, 5),
        kv_heads=kv_heads,
        page_tokens=(1, 4, 16, 32)[pick(0, 3)],
        window=(None, None, pick(1, 300))[pick(0, 2)],
        softcap=(None, None, 10.0)[pick(0, 2)],
        splits=(1, 2, 4, 8)[pick(0, 3)],
        spare_rows=pick(0, 3),
    )
