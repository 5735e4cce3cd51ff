"""A round's integers and settings on the device, at addresses that never change.

Everything a round needs besides weights and pages lies in one piece of memory: filled on the host, in memory that the
device reads by itself, and sent with one copy. What kernels and CUDA graphs see are views of its counterpart on the
device. Page tables are sent as wide as the round's longest one and spread out to lines of full width there.

    host    [ tokens | positions | slots | ... | seeds | tables, packed ]   two of these, in turns
                         one copy
    device  [ tokens | positions | slots | ... | seeds | tables, packed ] -> tables [sequences_max, pages_max]

Rows and sequences that a round does not have are padding: a padding row has slot -1 and is written nowhere, a padding
sequence has no rows. Two host pieces let the next round be filled while the last one is still being sent.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from weftline.engine.llm.attention import Span

ALIGN_BYTES = 64
"""Each part begins at a multiple of so many bytes: wide loads, and no two parts in one cache line."""
NOWHERE = -1
"""The slot of a padding row, and the `tokens_from` of a row whose token is given."""


@dataclass(frozen=True, slots=True)
class BufferLimits:
    """rows_max: most tokens of a round. sequences_max: most sequences. pages_max: most pages of one sequence."""

    rows_max: int
    sequences_max: int
    pages_max: int


@dataclass(frozen=True, slots=True)
class Draw:
    """How one sequence's next token is drawn; as `SamplingParams` has it. position: how many tokens are known."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    typical_p: float = 1.0
    seed: int = 0
    position: int = 0


DRAW_DTYPES: dict[str, torch.dtype] = {
    "temperature": torch.float32, "top_k": torch.int64, "top_p": torch.float32, "min_p": torch.float32,
    "typical_p": torch.float32, "seed": torch.int64, "position": torch.int64,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class RoundView:
    """What a round of padded size sees: views of the device's buffers.

    tokens, positions, slots, tokens_from, adapters: int64 [rows].
    tables: int32 [sequences, pages].   row_starts: int32 [sequences + 1].   starts: int32 [sequences].
    keep:   int64 [kept], the rows whose logits are wanted.
    draws:  by name, [sequences] each, see DRAW_DTYPES.
    """

    tokens: Tensor
    positions: Tensor
    slots: Tensor
    tokens_from: Tensor
    adapters: Tensor
    tables: Tensor
    row_starts: Tensor
    starts: Tensor
    keep: Tensor
    draws: dict[str, Tensor]


class RoundBuffers:
    """The buffers of one model on one device.

    drawn: int64 [sequences_max] on the device, the tokens that the newest round drew; `tokens_from` points into it.
    """

    def __init__(self, limits: BufferLimits, page_tokens: int, device: torch.device) -> None:
        rows, sequences = limits.rows_max, limits.sequences_max
        sizes: list[tuple[str, torch.dtype, int]] = [
            ("tokens", torch.int64, rows), ("positions", torch.int64, rows), ("slots", torch.int64, rows),
            ("tokens_from", torch.int64, rows), ("adapters", torch.int64, rows), ("keep", torch.int64, rows),
            ("row_starts", torch.int32, sequences + 1), ("starts", torch.int32, sequences),
            *((name, dtype, sequences) for name, dtype in DRAW_DTYPES.items()),
            ("packed", torch.int32, sequences * limits.pages_max),
        ]  # fmt: skip
        self.limits, self.page_tokens, self.device = limits, page_tokens, device
        self._places: dict[str, slice] = {}
        at = 0
        for name, dtype, count in sizes:
            self._places[name] = slice(at, at + count * dtype.itemsize)
            at += -(-count * dtype.itemsize // ALIGN_BYTES) * ALIGN_BYTES
        self._dtypes = {name: dtype for name, dtype, _ in sizes}
        on_gpu = device.type == "cuda"
        self._hosts = [torch.zeros(at, dtype=torch.uint8, pin_memory=on_gpu) for _ in range(2 if on_gpu else 1)]
        self._arrays: list[dict[str, Any]] = [
            {name: host[place].view(self._dtypes[name]).numpy() for name, place in self._places.items()}
            for host in self._hosts
        ]
        self._sent: list[Any] = [_event() if on_gpu else None for _ in self._hosts]
        self._turn = 0
        self._device_bytes = torch.zeros(at, dtype=torch.uint8, device=device)
        self._parts = {n: self._device_bytes[place].view(self._dtypes[n]) for n, place in self._places.items()}
        self._tables = torch.zeros(sequences, limits.pages_max, dtype=torch.int32, device=device)
        self.drawn = torch.zeros(sequences, dtype=torch.int64, device=device)

    @property
    def on_device(self) -> tuple[Tensor, ...]:
        """What the buffers have of the device. Between rounds its content matters to nobody, as long as it is zeros."""
        return self._device_bytes, self._tables, self.drawn

    def fill(
        self,
        spans: Sequence[Span],
        rows: int | None = None,
        sequences: int | None = None,
        tokens: Sequence[int] = (),
        tokens_from: Sequence[int] = (),
        adapters: Sequence[int] = (),
        keep: Sequence[int] = (),
        draws: Sequence[Draw] = (),
    ) -> RoundView:
        """Take in a round, padded to `rows` and `sequences`, send it, and return what it sees.

        spans:       the round's sequences; their rows follow each other from 0.
        tokens:      of each row; empty: somebody else brings them.
        tokens_from: for each row NOWHERE, or the place in `drawn` from which its token is taken instead.
        adapters:    the LoRA slot of each row; empty: none.
        draws:       of each sequence; empty: greedy.

        ValueError says which limit a round exceeds. Does not wait for the device, except that the host's memory of the
        round before the last must have been sent.
        """
        count = sum(span.count for span in spans)
        rows = count if rows is None else rows
        sequences = len(spans) if sequences is None else sequences
        width = max((len(span.table.pages) for span in spans), default=0)
        self._check(count, rows, len(spans), sequences, width)
        self._turn = (self._turn + 1) % len(self._hosts)
        if self._sent[self._turn] is not None:
            self._sent[self._turn].synchronize()
        host = self._arrays[self._turn]
        self._fill_rows(host, spans, count, rows)
        self._fill_sequences(host, spans, count, sequences, width, draws)
        for name, given, padding in (
            ("tokens", tokens, 0), ("tokens_from", tokens_from, NOWHERE), ("adapters", adapters, 0), ("keep", keep, 0),
        ):  # fmt: skip
            host[name][: len(given)] = given
            host[name][len(given) : rows] = padding
        self._send(sequences * width, sequences, width)
        return self._view(rows, sequences, max(len(keep), 1))

    def fixed(self, size: int) -> RoundView:
        """Return what a round of one row for each of `size` sequences sees, whatever the pages: for a CUDA graph."""
        return self._view(size, size, size)

    def _fill_rows(self, host: dict[str, Any], spans: Sequence[Span], count: int, rows: int) -> None:
        size = self.page_tokens
        if count == len(spans):
            starts = [span.start for span in spans]
            host["positions"][:count] = starts
            host["slots"][:count] = [s.table.pages[s.start // size] * size + s.start % size for s in spans]
        else:
            row = 0
            for span in spans:
                places = np.arange(span.start, span.start + span.count)
                pages = np.asarray(span.table.pages, np.int64)
                host["positions"][row : row + span.count] = places
                host["slots"][row : row + span.count] = pages[places // size] * size + places % size
                row += span.count
        host["positions"][count:rows] = 0
        host["slots"][count:rows] = NOWHERE

    def _fill_sequences(
        self, host: dict[str, Any], spans: Sequence[Span], count: int, sequences: int, width: int, draws: Sequence[Draw]
    ) -> None:
        known = len(spans)
        host["starts"][:known] = [span.start for span in spans]
        host["starts"][known:sequences] = 0
        host["row_starts"][:known] = [span.row for span in spans]
        host["row_starts"][known : sequences + 1] = count
        for name in DRAW_DTYPES:
            host[name][: len(draws)] = [getattr(draw, name) for draw in draws]
            host[name][len(draws) : sequences] = getattr(_GREEDY, name)
        packed = host["packed"][: sequences * width].reshape(sequences, width)
        for line, span in enumerate(spans):
            pages = span.table.pages
            packed[line, : len(pages)] = pages

    def _send(self, tables: int, sequences: int, width: int) -> None:
        stop = self._places["packed"].start + tables * torch.int32.itemsize
        self._device_bytes[:stop].copy_(self._hosts[self._turn][:stop], non_blocking=True)
        if self._sent[self._turn] is not None:
            self._sent[self._turn].record()
        # entries behind a sequence's pages keep what they had: nobody reads them
        self._tables[:sequences, :width].copy_(self._parts["packed"][:tables].view(sequences, width))

    def _view(self, rows: int, sequences: int, kept: int) -> RoundView:
        part = self._parts
        return RoundView(
            part["tokens"][:rows], part["positions"][:rows], part["slots"][:rows], part["tokens_from"][:rows],
            part["adapters"][:rows], self._tables[:sequences], part["row_starts"][: sequences + 1],
            part["starts"][:sequences], part["keep"][:kept], {name: part[name][:sequences] for name in DRAW_DTYPES},
        )  # fmt: skip

    def _check(self, count: int, rows: int, known: int, sequences: int, width: int) -> None:
        limits = self.limits
        if not count <= rows <= limits.rows_max:
            raise ValueError(f"a round of {count} tokens, padded to {rows}; the buffers hold {limits.rows_max}")
        if not known <= sequences <= limits.sequences_max:
            raise ValueError(f"{known} sequences, padded to {sequences}; the buffers hold {limits.sequences_max}")
        if width > limits.pages_max:
            raise ValueError(f"a sequence of {width} pages; the buffers hold {limits.pages_max}")


_GREEDY = Draw()


def _event() -> Any:
    return torch.cuda.Event()  # type: ignore[no-untyped-call]


def input_tokens(view: RoundView, drawn: Tensor) -> Tensor:
    """Return int64 [rows], each row's token: given, or taken from `drawn` where `tokens_from` points into it."""
    return torch.where(view.tokens_from < 0, view.tokens, drawn[view.tokens_from.clamp_min(0)])
