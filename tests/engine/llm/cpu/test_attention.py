"""Attention over pages agrees with plain attention, wherever the pages lie."""

from __future__ import annotations

import random

import pytest
import torch

from weftline.engine.llm.attention import LayerPages, Span, paged_attention
from weftline.engine.llm.cpu import attention as attention_cpu
from weftline.engine.llm.cpu.attention import CpuAttention, stretches
from weftline.engine.llm.kv_cache import PageTable
from weftline.engine.llm.kv_memory import torch_allocator

PAGE = 4


def _plain(q, k, v, start, scale, window, softcap):
    """Attend as the textbook has it: q [heads, rows, width] at positions start.. over k, v [kv_heads, keys, width]."""
    groups = q.shape[0] // k.shape[0]
    k, v = k.repeat_interleave(groups, 0).double(), v.repeat_interleave(groups, 0).double()
    scores = q.double() @ k.transpose(1, 2) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    queries = torch.arange(start, start + q.shape[1])[:, None]
    keys = torch.arange(k.shape[1])[None]
    hidden = keys > queries
    if window is not None:
        hidden |= keys <= queries - window
    return scores.masked_fill(hidden, -torch.inf).softmax(-1) @ v


def _table(pages) -> PageTable:
    table = PageTable()
    for page in pages:
        table._append(page)
    return table


def _attend(shares, heads, kv_heads, window, softcap, scattered, dtype=torch.float32, kv_dtype=None, width=8):
    """Attend for shares (computed before, rows now) over pages in any order; return what came out, and should have."""
    torch.set_num_threads(1)
    torch.manual_seed(heads + (window or 0))
    pages = sum(-(-(start + count) // PAGE) for start, count in shares) + 5
    free = list(range(pages))
    if scattered:
        random.Random(3).shuffle(free)
    module, form = torch.nn.Module(), CpuAttention(PAGE)
    layer = LayerPages(form, kv_heads=kv_heads, widths=(width, width))
    layer.bind(pages * PAGE, torch_allocator(torch.empty(0, dtype=kv_dtype or dtype)))
    layer.keys.fill_(torch.nan)  # reading an unwritten slot would show
    layer.values.fill_(torch.nan)
    module.weftline_pages = layer
    spans, row, queries, keys, values, expected = [], 0, [], [], [], []
    for start, count in shares:
        table = _table(free[: -(-(start + count) // PAGE)])
        del free[: len(table.pages)]
        q, k, v = (torch.randn(n, start + count, width).to(dtype) for n in (heads, kv_heads, kv_heads))
        for place in range(start):
            slot = table.pages[place // PAGE] * PAGE + place % PAGE
            layer.keys[:, slot], layer.values[:, slot] = (
                k[:, place].to(layer.keys.dtype),
                v[:, place].to(layer.keys.dtype),
            )
        spans.append(Span(row, start, count, table))
        row += count
        queries.append(q[:, start:]), keys.append(k[:, start:]), values.append(v[:, start:])
        expected.append(_plain(q[:, start:], k, v, start, 0.3, window, softcap))
    packed = [torch.cat(parts, 1)[None] for parts in (queries, keys, values)]
    form.fill(spans)
    out, _ = paged_attention(module, *packed, scaling=0.3, sliding_window=window, softcap=softcap)
    form.fill(spans)  # a second layer, and a second round with the same tables
    again, _ = paged_attention(module, *packed, scaling=0.3, sliding_window=window, softcap=softcap)
    assert torch.equal(out, again)
    return out[0].transpose(0, 1).double(), torch.cat(expected, 1)


MIXED = [(0, 7), (9, 1), (5, 6), (0, 1), (18, 1), (3, 3), (2, 15), (33, 12), (11, 2)]


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize("window", [None, 6])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (6, 2)])
@pytest.mark.parametrize("scattered", [False, True])
def test_packed_rows_of_several_sequences_match_plain_attention(
    heads, kv_heads, window, softcap, scattered, compiled, monkeypatch
):
    if not compiled:
        monkeypatch.setattr(attention_cpu, "_rows_kernel", lambda: None)
    out, expected = _attend(MIXED, heads, kv_heads, window, softcap, scattered)
    torch.testing.assert_close(out, expected, atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("compiled", [True, False])
def test_a_round_in_which_everybody_decodes_matches_plain_attention(compiled, monkeypatch):
    if not compiled:
        monkeypatch.setattr(attention_cpu, "_rows_kernel", lambda: None)
    out, expected = _attend([(at, 1) for at in range(40)], 4, 2, None, None, True)
    torch.testing.assert_close(out, expected, atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("scattered", [False, True])
def test_a_chunk_late_in_a_long_prompt_matches_plain_attention(scattered, monkeypatch):
    monkeypatch.setattr(attention_cpu, "STRETCH_TOKENS", 64)
    out, expected = _attend([(700, 40), (130, 20)], 4, 2, None, None, scattered)
    torch.testing.assert_close(out, expected, atol=2e-6, rtol=1e-5)


def test_scores_in_tiles_are_the_scores_in_one_piece(monkeypatch):
    whole, expected = _attend([(60, 50)], 4, 2, 30, 5.0, True)
    monkeypatch.setattr(attention_cpu, "TILE_BYTES", 4 * 4 * 110 * 7)
    tiled, _ = _attend([(60, 50)], 4, 2, 30, 5.0, True)
    torch.testing.assert_close(tiled, whole)
    torch.testing.assert_close(tiled, expected, atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize(
    ("dtype", "kv_dtype", "error"),
    [
        (torch.bfloat16, None, 0.02),
        (torch.float32, torch.float8_e4m3fn, 0.3),
        (torch.bfloat16, torch.float8_e4m3fn, 0.3),
    ],
)
@pytest.mark.parametrize("window", [None, 6])
def test_other_number_formats_come_as_near_as_they_can(dtype, kv_dtype, error, window):
    out, expected = _attend(MIXED, 4, 2, window, None, True, dtype, kv_dtype)
    assert torch.isfinite(out).all()
    assert (out - expected).abs().max() < error


def test_page_tables_that_grow_shrink_and_change_are_read_as_they_are_now():
    form, tables = CpuAttention(PAGE), [_table([at]) for at in range(6)]
    rng, next_page = random.Random(7), 100
    for _ in range(60):
        for table in tables:
            if rng.random() < 0.3:
                table._append(next_page)
            elif rng.random() < 0.1:
                table._replace(rng.randrange(len(table.pages)), next_page)
            next_page += 1
        if rng.random() < 0.2:
            tables[rng.randrange(6)] = _table([next_page])
        chosen = rng.sample(tables, rng.randint(1, 6))
        form.fill([Span(row, (len(t.pages) - 1) * PAGE, 1, t) for row, t in enumerate(chosen)])
        for row, table in enumerate(chosen):
            line = form._rows.pages[form._rows.owner[row]]
            assert line[: len(table.pages)].tolist() == table.pages


def test_memory_that_grows_and_shrinks_keeps_what_lies_below_both_ends():
    layer = LayerPages(CpuAttention(PAGE), kv_heads=2, widths=(4, 3))
    layer.bind(8, torch_allocator(torch.empty(0)))
    layer.keys.copy_(torch.arange(64.0).view(2, 8, 4))
    before = layer.keys[:, :6].clone()
    layer.resize(20)
    assert layer.keys.shape == (2, 20, 4)
    assert layer.values.shape == (2, 20, 3)
    assert torch.equal(layer.keys[:, :6], before)
    layer.resize(6)
    assert torch.equal(layer.keys, before)
    layer.copy(slice(0, 2), slice(4, 6))
    assert torch.equal(layer.keys[:, 4:6], before[:, 0:2])


def test_neighbouring_pages_are_read_as_one_slice_and_others_as_few():
    table = _table((9, 3, 4, 5, 1))
    assert stretches(table, 0, 20, PAGE) == [slice(36, 40), slice(12, 24), slice(4, 8)]
    assert stretches(table, 17, 19, PAGE) == [slice(5, 7)]
    assert stretches(table, 5, 15, PAGE) == [slice(13, 23)]
    assert stretches(table, 5, 5, PAGE) == []
