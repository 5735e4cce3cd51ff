"""Multi-adapter LoRA linear layer: each row uses its own adapter.

The matrices of all adapters lie in one stack per layer, so that loading and dropping writes in place and an address
never changes while a CUDA graph may know it. There are two ways to add:

    by segments   rows are known on the host: one pair of products for each adapter that has rows.
    by slots      rows are known on the device only: all of them in products of fixed shapes, without a look at their
                  values, so that a CUDA graph can hold them. Few rows gather their matrices; many rows are multiplied
                  by all adapters' and what is not theirs becomes zero.

A layer that several were merged into (see `weftline.engine.llm.fusion.fuse`) has parts, each with matrices of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from weftline.errors import ModelError


@dataclass(frozen=True, slots=True)
class OutputSlice:
    """Output columns `start`:`stop` of a merged layer that belong to the trained layer `name`."""

    name: str
    start: int
    stop: int


@dataclass(slots=True, eq=False)
class AdapterRows:
    """Adapter of each row of the next round; shared by all layers.

    rows:     rows of the round; a layer that is given another number is no layer over the round's rows.
    segments: (rows, slot) of slots that have rows, for `_add_segments`.
    slots:    int64 [rows] on the device, for `_add_gathered` and `_add_masked`; 0 is the base model.
    owned:    bool [rows, slots_max], whose row it is; for `_add_masked`.
    """

    rows: int = 0
    segments: Sequence[tuple[slice | Tensor, int]] = ()
    slots: Tensor | None = None
    owned: Tensor | None = None

    @property
    def idle(self) -> bool:
        return not self.segments and self.slots is None

    @classmethod
    def by_slots(cls, slots: Tensor, slots_max: int) -> AdapterRows:
        """Build the selection from device slots, int64 [rows]; does not read their values."""
        known = torch.arange(1, slots_max + 1, device=slots.device)
        return cls(slots.shape[0], (), slots, slots[:, None] == known)


@dataclass(slots=True, eq=False)
class LoraLinear:
    """Adapter matrices of one layer.

    down: [slots_max + 1, parts, rank_max, in]; up: for each part [slots_max + 1, rank_max, out], scaled.
    Slot 0 is all zero, and so is what an adapter of a lower rank does not use.
    ranks_by_slot: by slot, the ranks of the parts that it has matrices for.
    """

    path: str
    base: Callable[[Tensor], Tensor]
    parts: tuple[OutputSlice, ...]
    choice: AdapterRows
    down: Tensor
    up: list[Tensor] = field(default_factory=list)
    ranks_by_slot: dict[int, dict[int, int]] = field(default_factory=dict)

    @classmethod
    def make(
        cls, path: str, base: Callable[[Tensor], Tensor], parts: Sequence[OutputSlice], choice: AdapterRows, width: int,
        slots_max: int, rank_max: int, like: Tensor,
    ) -> LoraLinear:  # fmt: skip
        """Allocate a layer for `slots_max` adapters. width: of the input. like: dtype and device."""
        down = like.new_zeros(slots_max + 1, len(parts), rank_max, width)
        up = [like.new_zeros(slots_max + 1, rank_max, part.stop - part.start) for part in parts]
        return cls(path, base, tuple(parts), choice, down, up)

    @property
    def rank_max(self) -> int:
        return self.down.shape[2]

    def write(self, slot: int, part: int, a: Tensor, b: Tensor, scale: float) -> None:
        """Write A [rank, in] and B [out, rank] of one part to `slot`."""
        rank = a.shape[0]
        self.down[slot, part, :rank] = a.to(self.down)
        self.up[part][slot, :rank] = (b.float().T * scale).to(self.up[part])
        self.ranks_by_slot.setdefault(slot, {})[part] = rank

    def clear(self, slot: int) -> None:
        for tensor in (self.down, *self.up):
            tensor[slot] = 0
        self.ranks_by_slot.pop(slot, None)

    def grow(self, rank_max: int) -> None:
        """Reallocate for a higher rank. Addresses change."""
        slots, parts, rank, width = self.down.shape
        down = self.down.new_zeros(slots, parts, rank_max, width)
        down[:, :, :rank] = self.down
        self.down = down
        for at, tensor in enumerate(self.up):
            up = tensor.new_zeros(slots, rank_max, tensor.shape[2])
            up[:, :rank] = tensor
            self.up[at] = up

    def forward(self, x: Tensor) -> Tensor:
        """Compute the layer's output [..., out] for x [..., in], with the adapters' products added."""
        out = self.base(x)
        choice = self.choice
        if choice.idle:
            return out
        rows = x.reshape(-1, x.shape[-1])
        if rows.shape[0] != choice.rows:
            raise ModelError(
                f"{self.path}: it was given {rows.shape[0]} rows of a round of {choice.rows}; adapters need all\n"
                "    fix: train the adapter without this layer"
            )
        flat = out.reshape(rows.shape[0], -1)
        if choice.slots is None or choice.owned is None:
            self._add_segments(rows, flat)
        elif choice.rows <= choice.owned.shape[1]:
            self._add_gathered(rows, flat, choice.slots)
        else:
            self._add_masked(rows, flat, choice.owned)
        return flat.view(out.shape)

    def _add_segments(self, rows: Tensor, out: Tensor) -> None:
        for where, slot in self.choice.segments:
            for part, rank in self.ranks_by_slot.get(slot, {}).items():
                columns = slice(self.parts[part].start, self.parts[part].stop)
                inner = rows[where] @ self.down[slot, part, :rank].T
                up = self.up[part][slot, :rank]
                if isinstance(where, slice):
                    out[where, columns].addmm_(inner, up)
                else:
                    out[:, columns].index_add_(0, where, inner @ up)

    def _add_gathered(self, rows: Tensor, out: Tensor, slots: Tensor) -> None:
        count, (_, parts, rank, width) = rows.shape[0], self.down.shape
        inner = torch.bmm(self.down[slots].view(count, parts * rank, width), rows[:, :, None]).view(count, parts, rank)
        for at, part in enumerate(self.parts):
            out[:, part.start : part.stop] += torch.bmm(inner[:, at, None], self.up[at][slots])[:, 0]

    def _add_masked(self, rows: Tensor, out: Tensor, owned: Tensor) -> None:
        slots, parts, rank, width = self.down.shape
        count, loaded = rows.shape[0], slots - 1
        inner = (rows @ self.down[1:].view(-1, width).T).view(count, loaded, parts, rank)
        inner = torch.where(owned[:, :, None, None], inner, 0.0)  # not a product: another's infinity stays out
        for at, part in enumerate(self.parts):
            up = self.up[at][1:].view(loaded * rank, -1)
            out[:, part.start : part.stop].addmm_(inner[:, :, at].reshape(count, -1), up)
