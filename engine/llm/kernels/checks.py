"""Kernel checks against the reference: test cases and their errors.

They run in Triton's interpreter in the tests, and on a GPU in `weftline.engine.llm.kernels.gpu_check`.

Attention cases fill unused and invisible slots with NaN, use pages in random order, and let table entries that must not
be read point to a page of NaN. The sampling kernel's reference is `weftline.engine.llm.sampling.draw` on a CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from weftline.engine.llm.kernels import reference
from weftline.engine.llm.kernels.draw import TILE, draw_launch
from weftline.engine.llm.kernels.float8 import quantise_launch
from weftline.engine.llm.kernels.launch import FLOAT8, FLOAT8_ARCH, FLOAT8_MAX, arch_of, run_all
from weftline.engine.llm.kernels.paged_attention import attention_launches
from weftline.engine.llm.kernels.rotate import rotate_launch
from weftline.engine.llm.kernels.rows import add_rms_norm, rms_norm, silu_mul
from weftline.engine.llm.kernels.write_pages import write_launch
from weftline.engine.llm.sampling.draw import DrawSettings, draw

TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
"""Largest difference from the reference, relative to numbers of size 1, by dtype: a few units in the last place."""


@dataclass(frozen=True, slots=True)
class Check:
    """One check: passes if the result of `error` is at most `allowed`."""

    name: str
    error: Callable[[], float]
    allowed: float


def all_checks(device: torch.device, random_rounds: int) -> list[Check]:
    """Return all checks, with `random_rounds` random attention cases besides the fixed ones."""
    rounds = [*ATTENTION, *(random_attention(seed) for seed in range(random_rounds))]
    checks = [
        Check(f"attention: {case.name}", partial(attention_error, case, seed, device), TOLERANCE[case.dtype])
        for seed, case in enumerate(rounds)
    ]
    # Triton's interpreter cuts where it should round, so that conversion by instructions can be checked on a GPU only
    archs = (80, 90) if device.type == "cuda" and arch_of(device) >= FLOAT8_ARCH else (80,)
    for arch in archs:
        how = "instructions" if arch >= FLOAT8_ARCH else "bits"
        checks.append(Check(f"float8 by {how} equals torch's", partial(float8_error, arch, device), 0))
        checks.append(Check(f"quantise rows by {how}", partial(quantise_error, arch, device), 0))
        checks.append(Check(f"write: float8 by {how}", partial(write_error, torch.bfloat16, FLOAT8, arch, device), 0))
    for dtype, allowed in TOLERANCE.items():
        kind = str(dtype).removeprefix("torch.")
        checks.append(Check(f"write: {kind}", partial(write_error, dtype, dtype, None, device), 0))
        for rotary in (64, 32):
            checks.append(
                Check(f"rotate {rotary} of 64: {kind}", partial(rotate_error, dtype, rotary, device), allowed)
            )
        for shape in ((5, 96), (3, 2048), (4, 3, 64)):
            for plus_one in (False, True):
                name = f"norm {list(shape)}{' plus one' if plus_one else ''}: {kind}"
                checks.append(Check(name, partial(norm_error, dtype, shape, plus_one, device), allowed))
        for inner in (48, 1500):
            for tanh_gelu in (False, True):
                name = f"gate {inner}{' gelu' if tanh_gelu else ''}: {kind}"
                checks.append(Check(name, partial(gate_error, dtype, inner, tanh_gelu, device), allowed))
    for name, made in draw_cases().items():
        checks.append(Check(f"draw: {name}", partial(drawn_error, made, device), 0))
    return checks


def write_error(dtype: torch.dtype, page_dtype: torch.dtype, arch: int | None, device: torch.device) -> float:
    """Count wrong elements of pages, among written and untouched slots."""
    made = torch.Generator().manual_seed(5)
    rows, kv_heads, slots, widths = 9, 2, 40, (80, 64)
    key, value = (torch.randn(rows, kv_heads, width, generator=made).mul(200).to(dtype).to(device) for width in widths)
    place = torch.randperm(slots, generator=made)[:rows]
    place[3] = place[7] = -1
    scales = torch.tensor([0.4, 1.7]).to(device) if page_dtype == FLOAT8 else None
    pages = [torch.zeros(kv_heads, slots, width).to(page_dtype).to(device) for width in widths]
    expected = [page.clone() for page in pages]
    for fresh, page in zip((key, value), expected):
        scaled = fresh.float() if scales is None else (fresh.float() / scales[:, None]).clamp(-FLOAT8_MAX, FLOAT8_MAX)
        for row, slot in enumerate(place.tolist()):
            if slot >= 0:
                page.view(page.dtype)[:, slot] = scaled[row].to(page_dtype)
    write_launch(key, value, pages[0], pages[1], place.to(device), scales, scales, arch).run()
    return float(sum((page.float() != right.float()).sum() for page, right in zip(pages, expected)))


def float8_error(arch: int, device: torch.device) -> float:
    """Count float32 values converted to another float8 than torch's: all float8 values, ties, and a range."""
    exact = torch.arange(0, 0x7F, dtype=torch.uint8).view(FLOAT8).float()
    ties = (exact[1:] + exact[:-1]) / 2
    near = torch.cat([ties * (1 + 2**-20), ties * (1 - 2**-20)])
    spread = torch.randn(500, generator=torch.Generator().manual_seed(2)).mul(4).exp().clamp(max=FLOAT8_MAX)
    numbers = torch.cat([exact, ties, near, spread, torch.tensor([1e-12, 0.0])])
    numbers = torch.cat([numbers, -numbers])
    fresh = torch.nn.functional.pad(numbers, (0, -len(numbers) % 64)).reshape(-1, 1, 64).to(device)
    pages = [torch.zeros(1, len(fresh), 64).to(FLOAT8).to(device) for _ in range(2)]
    write_launch(fresh, fresh, pages[0], pages[1], torch.arange(len(fresh)).to(device), arch=arch).run()
    return float((pages[0].view(torch.uint8) != fresh.transpose(0, 1).to(FLOAT8).view(torch.uint8)).sum())


def drawn_error(made: Callable[[], list[tuple[torch.Tensor, dict[str, float]]]], device: torch.device) -> float:
    """Count tokens of the round made by `made` that differ from the reference."""
    return draw_error(made(), device)


def quantise_error(arch: int, device: torch.device) -> float:
    """Count scales and float8 elements that differ from torch's."""
    wrong = 0
    for dtype, width in ((torch.bfloat16, 96), (torch.float16, 256), (torch.float32, 9000)):
        x = torch.randn(5, width, generator=torch.Generator().manual_seed(9)).mul(30).to(dtype)
        x[1], x[2, 5:], x[3, 7] = 0, 0, 60000
        out, scales, launch = quantise_launch(x.to(device), arch)
        launch.run()
        largest = x.float().abs().amax(1, keepdim=True)
        expected = torch.where(largest == 0, 1.0, largest / FLOAT8_MAX)
        wrong += int((scales.cpu() != expected).sum())
        rounded = (x.float() / expected).clamp(-FLOAT8_MAX, FLOAT8_MAX).to(FLOAT8)
        wrong += int((out.cpu().float() != rounded.float()).sum())
    return float(wrong)


def rotate_error(dtype: torch.dtype, rotary: int, device: torch.device) -> float:
    """Return the largest error of rotated queries and written keys and values; inf if padding was written."""
    made = torch.Generator().manual_seed(6)
    rows, heads, kv_heads, width = 7, 4, 2, 64
    merged = torch.randn(rows, heads + 2 * kv_heads, width, generator=made).to(dtype).to(device)
    query, key, value = torch.split(merged, [heads, kv_heads, kv_heads], 1)
    angles = torch.rand(rows, rotary // 2, generator=made).mul(6).repeat(1, 2)
    cos, sin = angles.cos().to(dtype).to(device), angles.sin().to(dtype).to(device)
    pages = [torch.zeros(kv_heads, 30, width, dtype=dtype, device=device) for _ in range(2)]
    place = torch.tensor([4, 9, -1, 29, 0, 17, 2])
    out, launch = rotate_launch(query, key, value, cos, sin, pages[0], pages[1], place.to(device))
    launch.run()
    real = place >= 0
    written = [page[:, place[real]].transpose(0, 1) for page in pages]
    for page in pages:
        page[:, place[real]] = 0
    if any(bool(page.any()) for page in pages):
        return float("inf")
    return max(
        reference.difference(out, reference.rotated(query, cos, sin)),
        reference.difference(written[0], reference.rotated(key, cos, sin)[real]),
        reference.difference(written[1], value[real].double()),
    )


def norm_error(dtype: torch.dtype, shape: tuple[int, ...], plus_one: bool, device: torch.device) -> float:
    """Return the largest error of a norm and, for rows without heads, of the fused addition and norm."""
    made = torch.Generator().manual_seed(7)
    x = torch.randn(*shape, generator=made).mul(3).to(dtype).to(device)
    weight = torch.randn(shape[-1], generator=made).to(dtype).to(device)
    error = reference.difference(rms_norm(x, weight, 1e-6, plus_one), reference.rms_normed(x, weight, 1e-6, plus_one))
    if len(shape) == 2:
        residual = torch.randn(*shape, generator=made).to(dtype).to(device)
        out, total = add_rms_norm(x, residual, weight, 1e-6, plus_one)
        error = max(error, reference.difference(total, x.double() + residual.double()))
        error = max(error, reference.difference(out, reference.rms_normed(total, weight, 1e-6, plus_one)))
    return error


def gate_error(dtype: torch.dtype, inner: int, tanh_gelu: bool, device: torch.device) -> float:
    """Return the largest error of a gated activation, over ordinary and very large values."""
    merged = torch.randn(5, 2 * inner, generator=torch.Generator().manual_seed(8)).to(dtype)
    merged[0] *= 50
    merged = merged.to(device)
    return reference.difference(silu_mul(merged, tanh_gelu), reference.gated(merged, tanh_gelu))


@dataclass(frozen=True, slots=True)
class AttentionCase:
    """An attention round: `rows` new tokens of each sequence after `starts` cached ones; 0 rows: padding.

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
    """Return the largest error of a round's attention against the reference; inf for NaN."""
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
    """Generate a case of random shape."""
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


VOCABULARY = 250
"""More than one of the interpreter's tiles, and no multiple of them."""
INTERPRETED_TILE = 128
Options = dict[str, float]


def draw_error(rows: Sequence[tuple[Tensor, Options]], device: torch.device) -> float:
    """Count rows with a wrong token.

    Where the row's largest logit is not finite, any token of a logit that is not finite is right.
    """
    logits = torch.stack([row for row, _ in rows])
    settings = _settings([options for _, options in rows])
    expected = draw(logits, settings)
    given: dict[str, Any] = {
        name: None if one is None else one.to(device)
        for name in ("temperature", "seed", "position", "top_k", "top_p", "min_p", "typical_p")
        for one in (getattr(settings, name),)
    }
    tile = TILE if device.type == "cuda" else INTERPRETED_TILE
    out, launch = draw_launch(logits.to(device), **given, tile=tile)
    launch.run()
    found = out.cpu()
    wrong = 0
    for row, token, right in zip(logits, found.tolist(), expected.tolist()):
        if not 0 <= token < len(row):
            wrong += 1
        elif torch.isfinite(row.amax()):
            wrong += token != right
        else:
            wrong += bool(torch.isfinite(row[token]))
    return float(wrong)


def _settings(options: Sequence[Options]) -> DrawSettings:
    def column(name: str, off: float, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.tensor([one.get(name, off) for one in options], dtype=dtype)

    rows = torch.arange(len(options))
    seed, position = rows * 6364136223846793005 - 77, rows * 31 + 5
    temperature = column("temperature", 0.8)
    if not any(name != "temperature" for one in options for name in one):
        return DrawSettings(temperature, seed, position)
    narrowing = (column("top_k", 0, torch.int64), column("top_p", 1), column("min_p", 0), column("typical_p", 1))
    return DrawSettings(temperature, seed, position, *narrowing)


def _random(seed: int, scale: float = 3.0) -> Tensor:
    return torch.randn(VOCABULARY, generator=torch.Generator().manual_seed(seed)) * scale


def _few(count: int) -> Tensor:
    row = torch.full((VOCABULARY,), -torch.inf)
    row[7 : 7 + 60 * count : 60] = torch.arange(count) / 3
    return row


def _with(row: Tensor, value: float, *at: int) -> Tensor:
    row = row.clone()
    row[list(at)] = value
    return row


_TIES = _random(3).round()
_BROAD = _random(4, 0.1)
_PEAK = _with(torch.zeros(VOCABULARY), 60.0, 190)
_EACH: tuple[Options, ...] = (
    {"top_k": 1}, {"top_k": 20}, {"top_k": VOCABULARY - 1}, {"top_k": 1 << 40}, {"top_p": 1e-6}, {"top_p": 0.9},
    {"top_p": 0.9999}, {"min_p": 0.05}, {"min_p": 1.0}, {"typical_p": 0.9}, {"typical_p": 1e-9},
    {"top_k": 40, "top_p": 0.9, "min_p": 0.01, "typical_p": 0.9}, {"top_k": 40, "top_p": 0.9, "temperature": 0.0},
)  # fmt: skip


_SOME = (_EACH[1], _EACH[5], _EACH[9], _EACH[11])


def _rounds_of(row: Tensor) -> list[tuple[Tensor, Options]]:
    return [(row, options) for options in (_SOME if len(set(row.tolist())) > 2 else _SOME[:2])]


def draw_cases() -> dict[str, Callable[[], list[tuple[Tensor, Options]]]]:
    """Return factories of sampling rounds by name."""
    whole: dict[str, Callable[[], list[tuple[Tensor, Options]]]] = {
        "nothing narrows": lambda: [(_random(at), {"temperature": (0.0, 0.7, 2.0)[at % 3]}) for at in range(9)],
        "each row its own": lambda: (
            [(_random(at), options) for at, options in enumerate(_EACH)]
            + [(_random(99), {}), (_random(99), {"temperature": 0.0})]
        ),
    }
    rows = {
        "ties": _TIES, "a broad distribution": _BROAD, "uniform": torch.zeros(VOCABULARY), "one peak": _PEAK,
        "both zeros": _with(torch.zeros(VOCABULARY), -0.0, *range(0, VOCABULARY, 3)),
        "few tokens are possible": _few(4), "one token is possible": _few(1),
        "far from zero": _random(5) + 3e4, "very large": _random(6) * 1e36,
    }  # fmt: skip
    for name, row in rows.items():
        whole[name] = partial(_rounds_of, row)
    nothing = torch.full((VOCABULARY,), -torch.inf)
    unsound = (_with(_random(7), torch.nan, 3, 200), _with(_random(7), torch.inf, 5), nothing)
    whole["no usable numbers"] = lambda: [(row, options) for row in unsound for options in (*_SOME[:3], {})]
    return whole
