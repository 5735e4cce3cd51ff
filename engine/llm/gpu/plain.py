"""Paged attention in torch operations only, driven by device tensors.

It takes what the Triton kernels take and gives what they give, a round in one go and without looking at a value on the
host, so that tests on a CPU run the GPU's code with it, and a GPU on which the kernels cannot be used still has a form.
It collects every page of every sequence's table for every layer: right, and slow for long tables.
"""

from __future__ import annotations

import torch
from torch import Tensor


class PlainOps:
    """`PagedOps` in torch; see `weftline.engine.llm.gpu.attention`."""

    def write(self, key: Tensor, value: Tensor, keys: Tensor, values: Tensor, slots: Tensor) -> None:
        # a padding row writes again what the slot of row 0 gets, so that no shape depends on a value; when row 0 is
        # padding itself, all are, and slot 0 gets what it has
        place = torch.where(slots < 0, slots[:1].clamp_min(0), slots)
        for given, pages in ((key, keys), (value, values)):
            own = given.to(pages.dtype).transpose(0, 1)
            first = torch.where((slots[:1] < 0)[None, :, None], pages[:, place[:1]], own[:, :1])
            pages[:, place] = torch.where((slots < 0)[None, :, None], first, own)

    def turn_and_write(
        self, query: Tensor, key: Tensor, value: Tensor, cos: Tensor, sin: Tensor, keys: Tensor, values: Tensor,
        slots: Tensor,
    ) -> Tensor:  # fmt: skip
        query, key = _turn(query, cos, sin), _turn(key, cos, sin)
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


def _turn(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    width = cos.shape[-1]
    low, high = heads[..., :width].chunk(2, dim=-1)
    turned = heads[..., :width] * cos[:, None] + torch.cat((-high, low), dim=-1) * sin[:, None]
    return torch.cat((turned.to(heads.dtype), heads[..., width:]), dim=-1)
