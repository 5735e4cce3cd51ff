"""Paged attention on a CPU; the reference for the other backends.

Rows of two kinds, each done in the way that is quickest for it:

    single rows   decoding, and the few rows of verified draft tokens: all in one compiled call (`attend_rows`), which
                  reads keys where they lie. Without numba, or for other numbers than float32, one call of torch each.
    prompts       one sequence at a time, with torch's own attention. What was there before the chunk and the chunk
                  itself are attended apart and put together by their log-sum-exp, so that no mask is needed: a mask of
                  512 rows over 100 000 tokens would be 200 MB.

Keys are collected into one piece only where their pages are scattered; long stretches are read in place.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from weftline.engine.llm.attention import LayerPages, Span
from weftline.engine.llm.kv_cache import PageTable

FEW_ROWS = 8
"""Spans of so many rows are done row by row: more would read the same keys too often."""
STRETCH_TOKENS = 256
"""Neighbouring tokens that are worth a call of their own; shorter stretches are collected into one piece."""
TILE_BYTES = 32 << 20
"""Most memory for scores where torch's own attention cannot be used and they are computed in full."""


@cache
def _rows_kernel() -> Callable[..., None] | None:
    try:
        from weftline.engine.llm.cpu.kernels import attend_rows
    except ImportError:  # numba is not there: slower, the same numbers
        return None
    return attend_rows


def set_threads(threads: int) -> None:
    """Let compiled rows use so many threads, as torch does."""
    if _rows_kernel() is not None:
        import numba

        most: int = numba.config.NUMBA_NUM_THREADS  # type: ignore[attr-defined]
        numba.set_num_threads(max(1, min(threads, most)))


@dataclass(slots=True)
class _Rows:
    """The single rows of a round: their places among all rows, and what each of them sees."""

    at: Tensor | slice
    pages: Any
    owner: Any
    stop: Any
    firsts: dict[int | None, Any] = field(default_factory=dict)

    def first(self, window: int | None) -> Any:
        """Return the first token each row sees; made once for all layers with this window."""
        if window not in self.firsts:
            zero = np.zeros_like(self.stop)
            self.firsts[window] = zero if window is None else np.maximum(self.stop - window, 0)
        return self.firsts[window]


class _PageLines:
    """Page tables as lines of one array, kept from round to round: mostly nothing is new, or one page at the end."""

    def __init__(self) -> None:
        self.lines = np.zeros((0, 0), np.int32)
        self._known: dict[int, tuple[int, int]] = {}  # epoch of a table: its line, and how many pages are in it

    def update(self, spans: Sequence[Span]) -> list[int]:
        """Return the line of each span's table."""
        longest = max(len(span.table.pages) for span in spans)
        if longest > self.lines.shape[1] or len(self._known) + len(spans) > len(self.lines):
            self._known.clear()
            self.lines = np.zeros((4 * len(spans) + 16, longest + longest // 2 + 8), np.int32)
        found = []
        for span in spans:
            pages, epoch = span.table.pages, span.table.epoch
            line, filled = self._known.get(epoch, (-1, 0))
            if filled != len(pages):
                line = len(self._known) if line < 0 else line
                self.lines[line, filled : len(pages)] = pages[filled:]
                self._known[epoch] = (line, len(pages))
            found.append(line)
        return found


class CpuAttention:
    """Paged attention on a CPU; an `AttentionBackend`."""

    def __init__(self, page_tokens: int) -> None:
        self.page_tokens = page_tokens
        self._slots = torch.empty(0, dtype=torch.long)
        self._lines = _PageLines()
        self._rows: _Rows | None = None
        self._few: list[Span] = []
        self._long: list[Span] = []

    def fill(self, spans: Sequence[Span]) -> None:
        self._few = [span for span in spans if span.count <= FEW_ROWS]
        self._long = [span for span in spans if span.count > FEW_ROWS]
        self._slots = torch.from_numpy(_slots(spans, self.page_tokens))
        self._rows = self._single(sum(span.count for span in spans)) if self._few and _rows_kernel() else None

    def attend(
        self,
        layer: LayerPages,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scale: float,
        window: int | None,
        softcap: float | None,
    ) -> Tensor:
        keys, values = layer.keys, layer.values
        if keys is None or values is None:
            raise RuntimeError("a layer attends before it has pages")
        keys[:, self._slots] = key.to(keys.dtype)
        values[:, self._slots] = value.to(values.dtype)
        out = query.new_empty(query.shape[1], query.shape[0], value.shape[2])
        long = self._long
        if self._rows is not None and query.dtype == keys.dtype == torch.float32:
            self._attend_rows(self._rows, query, keys, values, scale, window, softcap, out)
        else:
            long = [*self._few, *long]
        for span in long:
            rows = slice(span.row, span.row + span.count)
            out[rows] = self._attend_span(span, query[:, rows], keys, values, scale, window, softcap).transpose(0, 1)
        return out

    def _single(self, rows: int) -> _Rows:
        counts = [span.count for span in self._few]
        lines = np.array(self._lines.update(self._few), np.int32)
        pages = self._lines.lines
        if sum(counts) == len(counts):
            owner = lines
            stop = np.array([span.start + 1 for span in self._few], np.int64)
            places = [span.row for span in self._few]
        else:
            owner = np.repeat(lines, counts)
            stop = np.array([s.start + at + 1 for s in self._few for at in range(s.count)], np.int64)
            places = [span.row + at for span in self._few for at in range(span.count)]
        dense = len(places) == rows
        return _Rows(slice(0, rows) if dense else torch.tensor(places), pages, owner, stop)

    def _attend_rows(
        self,
        rows: _Rows,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        scale: float,
        window: int | None,
        softcap: float | None,
        out: Tensor,
    ) -> None:
        kernel = _rows_kernel()
        if kernel is None:
            raise RuntimeError("rows without a kernel")
        asked = query.transpose(0, 1)[rows.at].contiguous()
        answer = out if isinstance(rows.at, slice) else out.new_empty(len(rows.stop), *out.shape[1:])
        kernel(
            asked.numpy(), keys.numpy(), values.numpy(), rows.pages, self.page_tokens, rows.owner,
            rows.first(window), rows.stop, np.float32(scale), np.float32(softcap or 0.0), answer.numpy(),
        )  # fmt: skip
        if not isinstance(rows.at, slice):
            out[rows.at] = answer

    def _attend_span(
        self,
        span: Span,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        scale: float,
        window: int | None,
        softcap: float | None,
    ) -> Tensor:
        """Return [heads, rows, width] of one sequence's rows."""
        stop, size = span.start + span.count, self.page_tokens
        masked = window is not None and stop > window
        if masked or softcap is not None:
            first = 0 if window is None else max(0, span.start - window + 1)
            k, v = _collect(keys, values, stretches(span.table, first, stop, size), query.dtype)
            return _full(query, k, v, scale, span.start, first, window, softcap)
        k, v = _collect(keys, values, stretches(span.table, span.start, stop, size), query.dtype)
        out, weight = _flash(query, k, v, scale, causal=True)
        for k, v in _pieces(keys, values, stretches(span.table, 0, span.start, size), query.dtype):
            before, before_weight = _flash(query, k, v, scale, causal=False)
            out, weight = _join(out, weight, before, before_weight)
        return out


def _slots(spans: Sequence[Span], size: int) -> Any:
    """Return the slot of every row, int64 [rows]."""
    if all(span.count == 1 for span in spans):
        return np.array([s.table.pages[s.start // size] * size + s.start % size for s in spans], np.int64)
    parts = []
    for span in spans:
        places = np.arange(span.start, span.start + span.count)
        parts.append(np.asarray(span.table.pages, np.int64)[places // size] * size + places % size)
    return np.concatenate(parts) if parts else np.empty(0, np.int64)


def stretches(table: PageTable, first: int, stop: int, size: int) -> list[slice]:
    """Return the slots of tokens `first` to `stop` as few slices: one when their pages are neighbours."""
    pages = table.pages
    if first >= stop:
        return []
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


def _collect(keys: Tensor, values: Tensor, parts: list[slice], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return the slots' keys and values in one piece each, in place where they are one stretch."""
    k = keys[:, parts[0]] if len(parts) == 1 else torch.cat([keys[:, part] for part in parts], 1)
    v = values[:, parts[0]] if len(parts) == 1 else torch.cat([values[:, part] for part in parts], 1)
    return k.to(dtype), v.to(dtype)


def _pieces(keys: Tensor, values: Tensor, parts: list[slice], dtype: torch.dtype) -> list[tuple[Tensor, Tensor]]:
    """Return the slots' keys and values as pieces: long stretches in place, all short ones together."""
    long = [part for part in parts if part.stop - part.start >= STRETCH_TOKENS or len(parts) == 1]
    short = [part for part in parts if part not in long]
    groups = [[part] for part in long] + ([short] if short else [])
    return [_collect(keys, values, group, dtype) for group in groups]


def _flash(query: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool) -> tuple[Tensor, Tensor]:
    """Return attention [heads, rows, width] and the logarithm of each row's summed weights [heads, rows, 1]."""
    heads, rows, width = query.shape
    group = heads // k.shape[0]
    if causal and group > 1:
        k, v = (t.repeat_interleave(group, dim=0) for t in (k, v))
    elif group > 1:  # heads that share a key head are as good as so many more rows of it
        query = query.reshape(k.shape[0], group * rows, width)
    out, weight = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        query[None], k[None], v[None], 0.0, causal, scale=scale
    )
    # [1, heads, rows, width] and [1, heads, rows], whatever order their memory has
    return out[0].reshape(heads, rows, v.shape[2]), weight[0].reshape(heads, rows, 1)


def _join(a: Tensor, a_weight: Tensor, b: Tensor, b_weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return the attention over two sets of keys from that over each (Milakov and Gimelshein 2018, online softmax)."""
    weight = torch.logaddexp(a_weight, b_weight)
    return (a * (a_weight - weight).exp() + b * (b_weight - weight).exp()).to(a.dtype), weight


def _full(
    query: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    start: int,
    first: int,
    window: int | None,
    softcap: float | None,
) -> Tensor:
    """Return attention with all scores computed, a tile of rows at a time: for windows and soft caps."""
    heads, rows, _ = query.shape
    if k.shape[0] != heads:
        k, v = (t.repeat_interleave(heads // t.shape[0], dim=0) for t in (k, v))
    places = torch.arange(first, first + k.shape[1])[None, :]
    tile = max(1, TILE_BYTES // (4 * heads * k.shape[1]))
    parts = []
    for begin in range(0, rows, tile):
        asked = query[:, begin : begin + tile]
        own = torch.arange(start + begin, start + begin + asked.shape[1])[:, None]
        hidden = places > own if window is None else (places > own) | (places <= own - window)
        if softcap is None:
            mask = torch.zeros(hidden.shape, dtype=query.dtype).masked_fill_(hidden, float("-inf"))
            out = functional.scaled_dot_product_attention(asked[None], k[None], v[None], attn_mask=mask, scale=scale)[0]
        else:
            scores = torch.tanh(asked @ k.transpose(1, 2) * (scale / softcap)) * softcap
            weights = scores.masked_fill(hidden, float("-inf")).softmax(-1, dtype=torch.float32)
            out = weights.to(query.dtype) @ v
        parts.append(out)
    return parts[0] if len(parts) == 1 else torch.cat(parts, 1)
