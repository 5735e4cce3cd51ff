"""Device buffers of a round's inputs at fixed addresses, as CUDA graphs require.

Everything a round needs besides weights and pages lies in one piece of memory: filled on the host, in memory that the
device reads by itself, and sent with one copy. What kernels and CUDA graphs see are views of its counterpart on the
device. Page tables stay on the device from round to round, each in a line of `stored`: only pages that are new in a
table are sent, and the lines of the round's sequences are collected there.

    host    [ tokens | positions | slots | ... | seeds | lines | changes ]   two of these, in turns
                         one copy
    device  [ tokens | positions | slots | ... | seeds | lines | changes ]
            changes -> stored [sequences_max, pages_max];  stored[lines] -> tables [sequences_max, pages_max]

Rows and sequences that a round does not have are padding: a padding row has slot -1 and is written nowhere, a padding
sequence has no rows. Two host pieces let the next round be filled while the last one is still being sent.
"""

from __future__ import annotations

from collections import OrderedDict
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


@dataclass(slots=True)  # not frozen: one is made for each stream and round, which takes a third of the time
class Draw:
    """Sampling settings of one sequence, as in `SamplingParams`. position: number of known tokens."""

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
    """Views of the device's buffers for a round of padded size.

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
    """Input buffers of one model on one device.

    drawn:      int64 [sequences_max] on the device, the tokens of the newest round; `tokens_from` points into it.
    pages_sent: entries of page tables that were converted and sent, of all rounds so far.
    """

    def __init__(self, limits: BufferLimits, page_tokens: int, device: torch.device) -> None:
        rows, sequences = limits.rows_max, limits.sequences_max
        sizes: list[tuple[str, torch.dtype, int]] = [
            ("tokens", torch.int64, rows), ("positions", torch.int64, rows), ("slots", torch.int64, rows),
            ("tokens_from", torch.int64, rows), ("adapters", torch.int64, rows), ("keep", torch.int64, rows),
            ("row_starts", torch.int32, sequences + 1), ("starts", torch.int32, sequences),
            *((name, dtype, sequences) for name, dtype in DRAW_DTYPES.items()),
            ("lines", torch.int32, sequences), ("changes", torch.int32, 2 * sequences * limits.pages_max),
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
        self._stored = torch.zeros_like(self._tables)
        self._lines = _TableLines(sequences, limits.pages_max)
        self.pages_sent = 0
        self.drawn = torch.zeros(sequences, dtype=torch.int64, device=device)

    @property
    def on_device(self) -> tuple[Tensor, ...]:
        """Return the device tensors. After zeroing them between rounds, call `forget`."""
        return self._device_bytes, self._tables, self._stored, self.drawn

    def forget(self) -> None:
        """Discard the device's page tables; the next rounds send them again."""
        self._lines.forget()

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
        """Write a round, padded to `rows` and `sequences`, copy it to the device, and return its view.

        spans:       the round's sequences; their rows follow each other from 0.
        tokens:      of each row; empty: the caller writes them.
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
        self._fill_sequences(host, spans, count, sequences, draws)
        for name, given, padding in (
            ("tokens", tokens, 0), ("tokens_from", tokens_from, NOWHERE), ("adapters", adapters, 0), ("keep", keep, 0),
        ):  # fmt: skip
            host[name][: len(given)] = given
            host[name][len(given) : rows] = padding
        try:
            self._send(self._lines.update(spans, host["lines"], host["changes"]), len(spans), sequences)
        except BaseException:  # the lines may not be what they are said to be
            self.forget()
            raise
        return self._view(rows, sequences, max(len(keep), 1))

    def fixed(self, rows: int, sequences: int | None = None, kept: int | None = None) -> RoundView:
        """Return the views of a round padded to these sizes, for a CUDA graph.

        sequences, kept: None: as many as rows. `kept` rows have logits.
        """
        return self._view(rows, rows if sequences is None else sequences, rows if kept is None else kept)

    def _fill_rows(self, host: dict[str, Any], spans: Sequence[Span], count: int, rows: int) -> None:
        size = self.page_tokens
        single = spans if count == len(spans) else [span for span in spans if span.count == 1]
        # of one row each, all by one list; a slice where they are neighbours, which they are but for prompts between
        at = slice(0, count) if single is spans else [span.row for span in single]
        host["positions"][at] = [span.start + span.shift for span in single]
        host["slots"][at] = [s.table.pages[s.start // size] * size + s.start % size for s in single]
        if single is not spans:
            self._fill_chunks(host, [span for span in spans if span.count != 1])
        host["positions"][count:rows] = 0
        host["slots"][count:rows] = NOWHERE

    def _fill_chunks(self, host: dict[str, Any], spans: Sequence[Span]) -> None:
        """Write the rows of prompts and of drafts to verify, all by a few array operations."""
        size = self.page_tokens
        pages: list[int] = []
        bases: list[int] = []
        for span in spans:
            first = span.start // size
            bases.append(len(pages) - first)
            pages += span.table.pages[first : (span.start + span.count - 1) // size + 1]
        about = [(span.count, span.row, span.start, span.shift, base) for span, base in zip(spans, bases)]
        counts, *of_spans = np.array(about, np.int64).T
        within = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
        row, start, shift, base = (np.repeat(one, counts) for one in of_spans)
        places, rows = start + within, row + within
        host["positions"][rows] = places + shift
        host["slots"][rows] = np.array(pages, np.int64)[base + places // size] * size + places % size

    def _fill_sequences(
        self, host: dict[str, Any], spans: Sequence[Span], count: int, sequences: int, draws: Sequence[Draw]
    ) -> None:
        known = len(spans)
        host["starts"][:known] = [span.start for span in spans]
        host["starts"][known:sequences] = 0
        host["row_starts"][:known] = [span.row for span in spans]
        host["row_starts"][known : sequences + 1] = count
        for name in DRAW_DTYPES:
            host[name][: len(draws)] = [getattr(draw, name) for draw in draws]
            host[name][len(draws) : sequences] = getattr(_GREEDY, name)

    def _send(self, changed: int, known: int, sequences: int) -> None:
        self._arrays[self._turn]["lines"][known:sequences] = 0  # padding: its table is not read
        stop = self._places["changes"].start + 2 * changed * torch.int32.itemsize
        self._device_bytes[:stop].copy_(self._hosts[self._turn][:stop], non_blocking=True)
        if self._sent[self._turn] is not None:
            self._sent[self._turn].record()
        if changed:
            changes = self._parts["changes"]
            self._stored.view(-1).index_copy_(0, changes[:changed].long(), changes[changed : 2 * changed])
        # entries behind a sequence's pages may be anything: they are not read
        torch.index_select(self._stored, 0, self._parts["lines"][:sequences], out=self._tables[:sequences])
        self.pages_sent += changed

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


class _TableLines:
    """Cache of page tables on the device: the line of each table and its sent pages.

    A table is known by its epoch, which is never another table's and changes whenever its pages change other than by
    adding some: of the same epoch, only pages behind those that are there can be new. When lines run out, the least
    recently used is given to another table.
    """

    def __init__(self, lines: int, width: int) -> None:
        self._count, self._width = lines, width
        self.forget()

    def forget(self) -> None:
        self._known: OrderedDict[int, list[int]] = (
            OrderedDict()
        )  # epoch: [line, pages in it]; least recently used first
        self._free = list(range(self._count))

    def update(self, spans: Sequence[Span], lines: Any, changes: Any) -> int:
        """Write the line of each span's table to `lines`; return the number of changed entries.

        changes: their places in the flattened lines, and behind these their pages.
        """
        known = self._known
        for span in spans:  # none of the round's own may give up its line
            if span.table.epoch in known:
                known.move_to_end(span.table.epoch)
        new: list[tuple[int, list[int]]] = []
        changed = 0
        for at, span in enumerate(spans):
            pages = span.table.pages
            entry = known.get(span.table.epoch)
            if entry is None:
                line = self._free.pop() if self._free else known.popitem(last=False)[1][0]
                entry = known[span.table.epoch] = [line, 0]
            line, there = entry
            lines[at] = line
            if len(pages) > there:
                new.append((line * self._width + there, pages[there:]))
                changed += len(pages) - there
                entry[1] = len(pages)
        place = 0
        for start, added in new:
            stop = place + len(added)
            changes[place:stop] = np.arange(start, start + len(added))
            changes[changed + place : changed + stop] = added
            place = stop
        return changed


_GREEDY = Draw()


def _event() -> Any:
    return torch.cuda.Event()  # type: ignore[no-untyped-call]


def input_tokens(view: RoundView, drawn: Tensor) -> Tensor:
    """Return the token of each row, int64 [rows]: given, or `drawn[tokens_from]`."""
    return torch.where(view.tokens_from < 0, view.tokens, drawn[view.tokens_from.clamp_min(0)])
