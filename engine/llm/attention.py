"""Attention over pages, as one of transformers' attention functions.

Any model that lets its attention be chosen by name runs with ours. A round's tokens come packed in one row, whatever
sequences they belong to; positions are right for each, and who may see whom is decided here:

    query  [1, heads, rows, width]      rows: one per token of the round
    key    [1, kv_heads, rows, width]   written to the pages of the layer first, then read back with what was there
    keys   [kv_heads, slots, width]     a layer's pages; token t is at slot pages[t // size] * size + t % size

Heads come first in the pages so that a sequence whose pages are neighbours is, for each head, one dense piece of
memory: it is attended in place. Others are collected piece by piece into one, for the time of one layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from weftline.engine.llm.pages import PageTable
from weftline.errors import ModelError

NAME = "weftline_paged"
"""The name under which transformers finds `paged_attention`."""

_REFUSED = ("s_aux", "sinks", "position_bias", "head_mask")
"""Arguments that change the result and that this form does not have; a model that passes one is refused at load."""


@dataclass(frozen=True, slots=True)
class Span:
    """The rows of one sequence: `count` from `row` on are its tokens from `start` on."""

    row: int
    start: int
    count: int
    table: PageTable


@dataclass(frozen=True, slots=True)
class Read:
    """What one span attends to: tokens `first` to the span's last, as slices of slots in order.

    mask: float [count, keys], 0 where a token may look and -inf elsewhere; None when it may look everywhere or, with
          `causal`, at itself and all before it.
    """

    span: Span
    slices: tuple[slice, ...]
    mask: Tensor | None
    causal: bool


@dataclass(slots=True)
class RoundPages:
    """Where the tokens of the current round are written and read; shared by all layers, refilled every round."""

    page_tokens: int
    slots: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.long))
    spans: Sequence[Span] = ()
    _reads: dict[int | None, list[Read]] = field(default_factory=dict)

    def fill(self, spans: Sequence[Span], device: torch.device) -> None:
        size = self.page_tokens
        slots = [
            span.table.pages[place // size] * size + place % size
            for span in spans
            for place in range(span.start, span.start + span.count)
        ]
        self.slots = torch.tensor(slots, dtype=torch.long, device=device)
        self.spans = spans
        self._reads.clear()

    def reads(self, window: int | None, like: Tensor) -> list[Read]:
        """Return what each span reads in a layer that looks `window` tokens back; made once for all such layers."""
        found = self._reads.get(window)
        if found is None:
            found = self._reads[window] = [self._read(span, window, like) for span in self.spans]
        return found

    def _read(self, span: Span, window: int | None, like: Tensor) -> Read:
        first = 0 if window is None else max(0, span.start - window + 1)
        stop = span.start + span.count
        slices = tuple(_slices(span.table, first, stop, self.page_tokens))
        if span.count == 1:
            return Read(span, slices, None, causal=False)
        if span.start == 0 and (window is None or stop <= window):
            return Read(span, slices, None, causal=True)
        queries = torch.arange(span.start, stop, device=like.device)[:, None]
        keys = torch.arange(first, stop, device=like.device)[None, :]
        hidden = keys > queries if window is None else (keys > queries) | (keys <= queries - window)
        mask = torch.zeros(hidden.shape, dtype=like.dtype, device=like.device).masked_fill_(hidden, float("-inf"))
        return Read(span, slices, mask, causal=False)


def _slices(table: PageTable, first: int, stop: int, size: int) -> list[slice]:
    """Return the slots of tokens `first` to `stop` as few slices: one when their pages are neighbours."""
    pages = table.pages
    if first // size >= table.run:
        begin = pages[first // size] * size + first % size
        return [slice(begin, begin + stop - first)]
    found: list[slice] = []
    place = first
    while place < stop:
        begin = pages[place // size] * size + place % size
        length = min(size - place % size, stop - place)
        if found and found[-1].stop == begin:
            found[-1] = slice(found[-1].start, begin + length)
        else:
            found.append(slice(begin, begin + length))
        place += length
    return found


@dataclass(slots=True)
class LayerPages:
    """One layer's part of the KV memory; sits on its attention module.

    keys, values: [kv_heads, slots, width], None until the layer's sizes were seen.
    seen:         how often the layer attended before it had pages; a decoder layer does so once.
    """

    round: RoundPages
    keys: Tensor | None = None
    values: Tensor | None = None
    seen: int = 0
    kv_heads: int = 0
    widths: tuple[int, int] = (0, 0)

    def bind(self, slots: int, like: Tensor) -> None:
        """Allocate room for `slots` tokens, of the dtype and on the device of `like`."""
        self.keys, self.values = (like.new_zeros(self.kv_heads, slots, width) for width in self.widths)


def seat_all(model: torch.nn.Module, round: RoundPages) -> list[LayerPages]:
    """Put a LayerPages on every module of `model`; those that attend will have been `seen` after one forward."""
    seats = []
    for module in model.modules():
        layer = LayerPages(round)
        module.weftline_pages = layer  # type: ignore[assignment]
        seats.append(layer)
    return seats


def unseat_others(model: torch.nn.Module, layers: Sequence[LayerPages]) -> None:
    """Take the LayerPages from every module whose own is not among `layers`."""
    kept = {id(layer) for layer in layers}
    for module in model.modules():
        if id(module.weftline_pages) not in kept:
            del module.weftline_pages


def register() -> None:
    """Tell transformers about `paged_attention`; done at load, since importing must not touch transformers."""
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, paged_attention)


def paged_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Write the round's keys and values to the layer's pages and attend; returns [1, rows, heads, value width]."""
    layer: LayerPages = module.weftline_pages  # type: ignore[assignment]
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    rows, heads = query.shape[2], query.shape[1]
    if layer.keys is None or layer.values is None:
        refused = [name for name in _REFUSED if options.get(name) is not None]
        if refused:
            raise ModelError(f"its attention uses {', '.join(refused)}, which the paged form does not have")
        layer.seen += 1
        layer.kv_heads, layer.widths = key.shape[1], (key.shape[3], value.shape[3])
        return query.new_zeros(1, rows, heads, value.shape[3]), None
    keys, values = layer.keys, layer.values
    keys.index_copy_(1, layer.round.slots, key[0])
    values.index_copy_(1, layer.round.slots, value[0])
    out = query.new_empty(1, rows, heads, value.shape[3])
    for read in layer.round.reads(sliding_window, query):
        if len(read.slices) == 1:
            k, v = keys[:, read.slices[0]], values[:, read.slices[0]]
        else:
            k = torch.cat([keys[:, part] for part in read.slices], 1)
            v = torch.cat([values[:, part] for part in read.slices], 1)
        row, count = read.span.row, read.span.count
        if count == 1:
            # The heads that share a key head are as good as so many queries of it: keys are read once, not copied.
            grouped = query[:, :, row].reshape(1, k.shape[0], -1, query.shape[3])
            answer = attend(grouped, k[None], v[None], scale, None, False, softcap)
            out[0, row] = answer.reshape(heads, -1)
        else:
            answer = attend(query[:, :, row : row + count], k[None], v[None], scale, read.mask, read.causal, softcap)
            out[0, row : row + count] = answer[0].transpose(0, 1)
    return out, None


def attend(
    q: Tensor, k: Tensor, v: Tensor, scale: float, mask: Tensor | None, causal: bool, softcap: float | None
) -> Tensor:
    """Return softmax(q k' scale) v, [1, heads, rows, width]; a head of k and v may serve a group of q's heads."""
    shared = q.shape[1] != k.shape[1]
    if softcap is None:
        return functional.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=causal, scale=scale, enable_gqa=shared
        )
    if shared:
        k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], dim=1) for t in (k, v))
    scores = torch.tanh(q @ k.transpose(2, 3) * (scale / softcap)) * softcap
    if causal:
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
        scores = scores.masked_fill(hidden, float("-inf"))
    elif mask is not None:
        scores = scores + mask
    return scores.softmax(-1, dtype=torch.float32).to(q.dtype) @ v
