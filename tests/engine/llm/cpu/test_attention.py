"""Attention over pages agrees with plain attention, wherever the pages lie."""

from __future__ import annotations

import random

import pytest
import torch

from weftline.engine.llm.attention import LayerPages, RoundPages, Span, _slices, paged_attention
from weftline.engine.llm.pages import PageTable

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


@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize("window", [None, 6])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (6, 2)])
@pytest.mark.parametrize("scattered", [False, True])
def test_packed_rows_of_several_sequences_match_plain_attention(heads, kv_heads, window, softcap, scattered):
    torch.manual_seed(heads + (window or 0))
    torch.set_num_threads(1)
    width, rng = 8, random.Random(3)
    shares = [(0, 7), (9, 1), (5, 6), (0, 1), (18, 1), (3, 3)]  # (computed before, rows now) of each sequence
    free = list(range(40))
    if scattered:
        rng.shuffle(free)
    module = torch.nn.Module()
    layer = LayerPages(RoundPages(PAGE), kv_heads=kv_heads, widths=(width, width))
    layer.bind(40 * PAGE, torch.empty(0))
    layer.keys.fill_(torch.nan)  # reading a slot nobody wrote would show
    layer.values.fill_(torch.nan)
    module.weftline_pages = layer
    spans, row, queries, keys, values, expected = [], 0, [], [], [], []
    for start, count in shares:
        table = PageTable()
        for _ in range(-(-(start + count) // PAGE)):
            table._append(free.pop(0))
        q, k, v = (torch.randn(n, start + count, width) for n in (heads, kv_heads, kv_heads))
        for place in range(start):
            slot = table.pages[place // PAGE] * PAGE + place % PAGE
            layer.keys[:, slot], layer.values[:, slot] = k[:, place], v[:, place]
        spans.append(Span(row, start, count, table))
        row += count
        queries.append(q[:, start:]), keys.append(k[:, start:]), values.append(v[:, start:])
        expected.append(_plain(q[:, start:], k, v, start, 0.3, window, softcap))
    layer.round.fill(spans, torch.device("cpu"))
    packed = [torch.cat(parts, 1)[None] for parts in (queries, keys, values)]
    out, _ = paged_attention(module, *packed, scaling=0.3, sliding_window=window, softcap=softcap)
    torch.testing.assert_close(out[0].transpose(0, 1).double(), torch.cat(expected, 1), atol=2e-6, rtol=1e-5)


def test_neighbouring_pages_are_read_as_one_slice_and_others_as_few():
    table = PageTable()
    for page in (9, 3, 4, 5, 1):
        table._append(page)
    assert _slices(table, 0, 20, PAGE) == [slice(36, 40), slice(12, 24), slice(4, 8)]
    assert _slices(table, 17, 19, PAGE) == [slice(5, 7)]
    assert _slices(table, 5, 15, PAGE) == [slice(13, 23)]
