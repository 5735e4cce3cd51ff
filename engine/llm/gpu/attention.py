"""Paged attention on a GPU: metadata in device buffers, computed by Triton kernels.

All layers read the same view of the buffers, so a round is transferred once. Nothing here reads device values, and
no number that changes from round to round is an argument of a kernel: a round of a given padded size can be captured
as a CUDA graph and replayed for any lengths (`weftline.engine.llm.gpu.graphs`).
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from weftline.engine.llm.attention import LayerPages, Span
from weftline.engine.llm.gpu.buffers import BufferLimits, RoundBuffers, RoundView

_log = logging.getLogger(__name__)


class PagedOps(Protocol):
    """The operations on KV pages; shapes as in `weftline.engine.llm.kernels`."""

    def write(self, key: Tensor, value: Tensor, keys: Tensor, values: Tensor, slots: Tensor) -> None:
        """Write key, value [rows, kv_heads, width] to `slots` int64 [rows]; negative ones are skipped."""

    def rotate_and_write(
        self, query: Tensor, key: Tensor, value: Tensor, cos: Tensor, sin: Tensor, keys: Tensor, values: Tensor,
        slots: Tensor,
    ) -> Tensor:  # fmt: skip
        """Apply rotary embedding cos, sin [rows, rotary width], write key and value, return the query."""

    def attend(
        self, query: Tensor, keys: Tensor, values: Tensor, tables: Tensor, row_starts: Tensor, starts: Tensor,
        page_tokens: int, scale: float, window: int | None, softcap: float | None,
    ) -> Tensor:  # fmt: skip
        """Compute attention, [rows, heads, value width]; padding rows are arbitrary but finite."""


class TritonOps:
    """`PagedOps` by the Triton kernels."""

    def __init__(self) -> None:
        from weftline.engine.llm.kernels import paged_attention, rotate, write_pages

        self._attend = paged_attention.paged_attention
        self._rotate = rotate.rotate_and_write
        self._write = write_pages.write_pages

    def write(self, key: Tensor, value: Tensor, keys: Tensor, values: Tensor, slots: Tensor) -> None:
        self._write(key, value, keys, values, slots)

    def rotate_and_write(
        self, query: Tensor, key: Tensor, value: Tensor, cos: Tensor, sin: Tensor, keys: Tensor, values: Tensor,
        slots: Tensor,
    ) -> Tensor:  # fmt: skip
        return self._rotate(query, key, value, cos, sin, keys, values, slots)

    def attend(
        self, query: Tensor, keys: Tensor, values: Tensor, tables: Tensor, row_starts: Tensor, starts: Tensor,
        page_tokens: int, scale: float, window: int | None, softcap: float | None,
    ) -> Tensor:  # fmt: skip
        return self._attend(query, keys, values, tables, row_starts, starts, page_tokens, scale, window, softcap)


def ops_for(device: torch.device) -> tuple[PagedOps, str | None]:
    """Return the fastest operations for `device`, and the reason if they are not the kernels."""
    from weftline.engine.llm.kernels.availability import available

    reason = available(device)
    return (TritonOps(), None) if reason is None else (PlainOps(), reason)


class GpuAttention:
    """Paged attention on a GPU, an `AttentionBackend`; also runs on a CPU, for tests."""

    def __init__(self, buffers: RoundBuffers, ops: PagedOps) -> None:
        self.buffers = buffers
        self.page_tokens = buffers.page_tokens
        self._ops = ops
        self.view: RoundView | None = None

    @classmethod
    def make(
        cls,
        page_tokens: int,
        context_max: int,
        rows_max: int,
        device: torch.device,
        ops: PagedOps | None = None,
        sequences_max: int = 512,
    ) -> GpuAttention:
        """Allocate buffers for rounds of `rows_max` tokens, `sequences_max` sequences and `context_max`.

        Tables have a line of 16 bytes for each page a sequence may have, for each of the sequences.
        """
        limits = BufferLimits(rows_max, min(sequences_max, rows_max), -(-context_max // page_tokens))
        if ops is None:
            ops, reason = ops_for(device)
            if reason is not None and device.type == "cuda":
                _log.warning("attention, norms and sampling run by torch's operations, which is slow: %s", reason)
        return cls(RoundBuffers(limits, page_tokens, device), ops)

    def fill(self, spans: Sequence[Span]) -> None:
        """Set the round without padding; the caller passes its tokens to the model."""
        self.view = self.buffers.fill(spans)

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
        keys, values, view = self._ready(layer)
        self._ops.write(key.transpose(0, 1), value.transpose(0, 1), keys, values, view.slots)
        return self._attend(query.transpose(0, 1), keys, values, view, scale, window, softcap)

    def attend_rotary(
        self,
        layer: LayerPages,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        cos: Tensor,
        sin: Tensor,
        scale: float,
        window: int | None,
        softcap: float | None,
    ) -> Tensor:
        """Apply rotary embedding and attend; query, key, value: [rows, heads, width]."""
        keys, values, view = self._ready(layer)
        query = self._ops.rotate_and_write(query, key, value, cos, sin, keys, values, view.slots)
        return self._attend(query, keys, values, view, scale, window, softcap)

    def _attend(
        self,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        view: RoundView,
        scale: float,
        window: int | None,
        softcap: float | None,
    ) -> Tensor:
        return self._ops.attend(
            query, keys, values, view.tables, view.row_starts, view.starts, self.page_tokens, scale, window, softcap
        )

    def _ready(self, layer: LayerPages) -> tuple[Tensor, Tensor, RoundView]:
        if layer.keys is None or layer.values is None or self.view is None:
            raise RuntimeError("a layer attends before it has pages and a round")
        return layer.keys, layer.values, self.view


class PlainOps:
    """`PagedOps` in torch operations: for tests on a CPU and GPUs without the kernels.

    Reads no device value on the host. Gathers every page of every table per layer, which is slow for long tables.
    """

    def write(self, key: Tensor, value: Tensor, keys: Tensor, values: Tensor, slots: Tensor) -> None:
        # a padding row writes again what the slot of row 0 gets, so that no shape depends on a value; when row 0 is
        # padding itself, all are, and slot 0 gets what it has
        place = torch.where(slots < 0, slots[:1].clamp_min(0), slots)
        for given, pages in ((key, keys), (value, values)):
            own = given.to(pages.dtype).transpose(0, 1)
            first = torch.where((slots[:1] < 0)[None, :, None], pages[:, place[:1]], own[:, :1])
            pages[:, place] = torch.where((slots < 0)[None, :, None], first, own)

    def rotate_and_write(
        self, query: Tensor, key: Tensor, value: Tensor, cos: Tensor, sin: Tensor, keys: Tensor, values: Tensor,
        slots: Tensor,
    ) -> Tensor:  # fmt: skip
        query, key = _rotated(query, cos, sin), _rotated(key, cos, sin)
        self.write(key, value, keys, values, slots)
        return query

    def attend(
        self, query: Tensor, keys: Tensor, values: Tensor, tables: Tensor, row_starts: Tensor, starts: Tensor,
        page_tokens: int, scale: float, window: int | None, softcap: float | None,
    ) -> Tensor:  # fmt: skip
        rows, heads, _ = query.shape
        sequences, group = len(starts), heads // keys.shape[0]
        row = torch.arange(rows, device=query.device)
        # padding rows belong to no sequence: they read the last one's keys, and nothing reads them
        owner = torch.searchsorted(row_starts[1:].long(), row, right=True).clamp_max(sequences - 1)
        position = starts.long()[owner] + row - row_starts.long()[owner]
        slots = (tables.long()[:, :, None] * page_tokens + torch.arange(page_tokens, device=query.device)).flatten(1)
        slots = slots.clamp_max(keys.shape[1] - 1)  # unused pages may lie beyond memory that shrank
        place = torch.arange(slots.shape[1], device=query.device)
        seen = place <= position[:, None]
        if window is not None:
            seen &= place > position[:, None] - window
        k = keys[:, slots][:, owner].to(query.dtype).repeat_interleave(group, dim=0)  # [heads, rows, places, width]
        v = values[:, slots][:, owner].to(query.dtype).repeat_interleave(group, dim=0)
        scores = torch.einsum("rhw,hrpw->rhp", query, k).float() * scale
        if softcap is not None:
            scores = torch.tanh(scores / softcap) * softcap
        weights = scores.masked_fill(~seen[:, None], float("-inf")).softmax(-1).nan_to_num(0.0)
        # unwritten slots may hold anything, and weight 0 times NaN would be NaN
        v = v.masked_fill(~seen[None, :, :, None], 0.0)
        return torch.einsum("rhp,hrpw->rhw", weights.to(query.dtype), v)


def _rotated(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    width = cos.shape[-1]
    low, high = heads[..., :width].chunk(2, dim=-1)
    turned = heads[..., :width] * cos[:, None] + torch.cat((-high, low), dim=-1) * sin[:, None]
    return torch.cat((turned.to(heads.dtype), heads[..., width:]), dim=-1)
