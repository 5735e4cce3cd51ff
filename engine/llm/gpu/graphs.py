"""CUDA graphs of rounds, from tokens to logits, at padded sizes.

A round is padded to one of SIZES tokens and repeated from the graph of that size. One graph serves rounds that decode,
rounds that read prompts, and rounds that do both or verify draft tokens: which rows belong to which sequence lies in
`RoundBuffers`, as does everything else that differs between rounds (tokens, lengths, page tables, adapters, which rows
have logits). So no step's number is frozen in a graph; a test lets lengths grow beyond those of the recording.

    rows       a round of 73 tokens       padded to 80
    sequences  of at most sequences_max   padded to the fewer of 80 and sequences_max
    kept       rows with logits           padded to the fewer of 80 and kept_max

Tokens are drawn outside of the graph, from its logits:

    launch   starts a round of one row for each sequence, draws on the device, and returns at once
    tokens   waits for what was drawn
    logits   starts a round of any kind and returns its logits, for callers that draw on the host

Between the first two the host is free: to turn the last round's tokens into text, to plan. The next round may even be
launched before: its rows take their tokens from the newest ones on the device (`tokens_from`).

`record` makes the graphs of all sizes, largest first, before requests come. A size that is missing is recorded when a
round first needs it; where there is no graph at all, the largest is recorded before it, in whose temporary memory all
others fit. A size whose recording fails is computed without a graph, and `failures` says why. Graphs contain the
addresses of the KV memory: after it moved they must be dropped.
"""

from __future__ import annotations

import inspect
import logging
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from weftline.engine.llm.attention import Span
from weftline.engine.llm.gpu.attention import GpuAttention
from weftline.engine.llm.gpu.buffers import Draw, RoundView, input_tokens
from weftline.engine.llm.sampling.draw import DrawSettings, draw
from weftline.errors import first_line
from weftline.nodes.cuda_capture import Capture
from weftline.nodes.out_of_memory import is_out_of_memory

_log = logging.getLogger(__name__)

ROWS_MAX = 2048
"""Largest size: from about a thousand tokens on, the device takes longer for a round than Python for starting it."""
SIZES = (1, 2, 4, *range(8, 64, 8), *(part << octave for octave in range(3, 8) for part in range(8, 16)), ROWS_MAX)
"""Padded sizes. Up to 64 rows padding hardly shows, where weights are read for all rows once; beyond, eight sizes for
each power of two pad at most one row in eight."""
KEPT_MIN = 256
"""Rows with logits that large sizes have at least: each draft token to verify has one, beside its sequence's own."""
UNSOUND = -1
"""In the place of a token whose row of logits has a NaN or nothing finite."""

Forward = Callable[[Tensor, Tensor, RoundView], Tensor]
"""(tokens [rows], positions [rows], what the round sees) to logits [kept, vocabulary], of the rows in `keep`."""
DrawTokens = Callable[[Tensor, str, dict[str, Tensor]], Tensor]
"""(float32 logits [rows, vocabulary], one of KINDS, settings by name [rows]) to tokens int64 [rows]."""
Report = Callable[[int, int], None]
"""Called with how many graphs are recorded, and how many there will be."""
KINDS = ("greedy", "warm", "narrow")
"""Kinds of draws: the likeliest token; with noise; with noise among the tokens that top-k and the like leave."""


@dataclass(slots=True)
class Handle:
    """A launched round. Its tokens also stay in `RoundBuffers.drawn` until the next round."""

    _drawn: Tensor
    _count: int
    _event: Any = None

    def tokens(self) -> list[int]:
        """Wait for the round; return its tokens, UNSOUND for invalid rows. Call before two more rounds.

        In the order of the round's sequences.
        """
        if self._event is not None:
            self._event.synchronize()
        return [int(token) for token in self._drawn[: self._count].tolist()]


@dataclass(slots=True)
class DecodeGraphs:
    """CUDA graphs of one model's rounds.

    form:     its attention, with the buffers.      forward: its pass, from tokens to logits.
    draw:     from logits to tokens; must not wait for the device.
    capture:  how rounds are recorded; None: they are computed each time.
    sizes:    padded sizes in rows, ascending.
    failures: why there is no graph, by size.
    """

    form: GpuAttention
    forward: Forward
    draw: DrawTokens = field(default_factory=lambda: draw_tokens)
    capture: Capture | None = None
    sizes: Sequence[int] = SIZES
    failures: dict[int, str] = field(default_factory=dict)
    _graphs: dict[int, Callable[[], None]] = field(default_factory=dict)
    _out: Tensor | None = None  # float32 [kept_max, vocabulary]: every graph leaves its logits here, and keeps none
    _results: list[tuple[Tensor, Any]] = field(default_factory=list)
    _turn: int = 0
    _warned: bool = False

    def __post_init__(self) -> None:
        most = min(self.form.buffers.limits.rows_max, max(self.sizes))
        self.sizes = tuple(sorted({*(size for size in self.sizes if size < most), most}))
        on_gpu = self.form.buffers.device.type == "cuda"
        for _ in range(2):
            host = torch.zeros(self.sequences_max, dtype=torch.int64, pin_memory=on_gpu)
            self._results.append((host, _event() if on_gpu else None))

    @property
    def sequences_max(self) -> int:
        """Return the most sequences of a round."""
        return min(self.form.buffers.limits.sequences_max, self.sizes[-1])

    @property
    def kept_max(self) -> int:
        """Return the most rows with logits of a round."""
        return min(max(self.sequences_max, KEPT_MIN), self.sizes[-1])

    @property
    def recorded(self) -> tuple[int, ...]:
        """Return the sizes that have a graph."""
        return tuple(sorted(self._graphs))

    @property
    def complete(self) -> bool:
        """Return whether nothing is left for `record`."""
        return self.capture is None or len(self._graphs) + len(self.failures) == len(self.sizes)

    def drop(self) -> None:
        """Discard all graphs, after their memory moved; failed sizes are tried again."""
        self._graphs.clear()
        self.failures.clear()
        self._out = None
        if self.capture is not None:
            self.capture.forget()

    @torch.inference_mode()
    def record(self, report: Report = lambda done, all: None, most: int | None = None) -> None:
        """Record the missing sizes, or the `most` largest of them, with a round of padding.

        Writes to no page. Failures are in `failures`.
        """
        sizes = self._missing()[:most]
        for done, size in enumerate(sizes):
            report(done, len(sizes))
            if size not in self.failures:  # the one before may have shown that no size can be recorded
                self._fill(size, (), (), (), (), (), ())
                self._graph(size)

    @torch.inference_mode()
    def launch(
        self,
        spans: Sequence[Span],
        tokens: Sequence[int],
        draws: Sequence[Draw],
        tokens_from: Sequence[int] = (),
        adapters: Sequence[int] = (),
    ) -> Handle:
        """Launch a round of one row per sequence, sample on the device, and return without waiting.

        tokens:      the newest token of each.     draws: how its next one is drawn.
        tokens_from: for each NOWHERE, or its place in the round before, whose token is then taken on the device.
        adapters:    the LoRA slot of each.

        Pages to be copied must have been copied. ValueError: more sequences than `sequences_max`.
        """
        if not 0 < len(spans) <= self.sequences_max:
            raise ValueError(f"a round of {len(spans)} sequences, expected 1 to {self.sequences_max}")
        size = self.sizes[bisect_left(self.sizes, len(spans))]
        self._record_largest(size)
        view = self._fill(size, spans, tokens, tokens_from, adapters, range(len(spans)), draws)
        logits = self._pass(size)[: len(view.starts)]
        chosen = self.draw(logits, KINDS[max(map(_kind, draws), default=0)], view.draws)
        drawn = torch.where(torch.isfinite(logits.amax(dim=-1)), chosen, UNSOUND)
        # the next round's input must be a token, whatever became of this one
        self.form.buffers.drawn[: len(drawn)].copy_(drawn.clamp_min(0))
        host, event = self._results[self._turn]
        self._turn = 1 - self._turn
        host[: len(drawn)].copy_(drawn, non_blocking=True)
        if event is not None:
            event.record()
        return Handle(host, len(spans), event)

    @torch.inference_mode()
    def logits(
        self,
        spans: Sequence[Span],
        tokens: Sequence[int],
        keep: Sequence[int],
        adapters: Sequence[int] = (),
    ) -> Tensor | None:
        """Replay a round of any kind; return the logits of the rows `keep`, float32 [kept, vocabulary].

        None where there is no graph for it, nothing was started then, and the caller computes the round as it is.
        The tensor may be written to, and is valid until the next round.

        tokens, adapters: of each row.   Pages to be copied must have been copied.
        """
        fits = len(tokens) <= self.sizes[-1] and len(spans) <= self.sequences_max and len(keep) <= self.kept_max
        if self.capture is None or not fits:
            return None
        size = self.sizes[bisect_left(self.sizes, len(tokens))]
        self._record_largest(size)
        if size in self.failures:
            return None
        self._fill(size, spans, tokens, (), adapters, keep, ())
        graph = self._graph(size)
        if graph is None or self._out is None:
            return None
        graph()
        return self._out[: len(keep)]

    def _record_largest(self, size: int) -> None:
        """Record the largest size before any other, ahead of a round of `size`: rising, each would take new memory."""
        missing = self._missing()
        if not self._graphs and size in missing and size != missing[0]:
            self.record(most=1)

    def _missing(self) -> list[int]:
        """Return the sizes still to be recorded, largest first."""
        if self.capture is None:
            return []
        return [size for size in reversed(self.sizes) if size not in self._graphs and size not in self.failures]

    def _fill(
        self, size: int, spans: Sequence[Span], tokens: Sequence[int], tokens_from: Sequence[int],
        adapters: Sequence[int], keep: Sequence[int], draws: Sequence[Draw],
    ) -> RoundView:  # fmt: skip
        """Send a round padded to `size` to the device; return its views."""
        buffers, sequences = self.form.buffers, min(size, self.sequences_max)
        buffers.fill(spans, size, sequences, tokens, tokens_from, adapters, keep, draws)
        view = self.form.view = buffers.fixed(size, sequences, min(size, self.kept_max))
        return view

    def _pass(self, size: int) -> Tensor:
        """Launch the filled round, by its graph if recorded; return its logits [kept, vocabulary]."""
        graph = self._graph(size)
        if graph is None or self._out is None:
            return self._compute().float()
        graph()
        return self._out

    def _graph(self, size: int) -> Callable[[], None] | None:
        if self.capture is None or size in self.failures:
            return None
        if size not in self._graphs:
            # recording runs the round that is filled in more than once: keys and values are written again as they are
            try:
                self._graphs[size] = self._record(self.capture)
            except Exception as error:  # whatever the model's code does that cannot be recorded
                self._fail(size, error)
        return self._graphs.get(size)

    def _record(self, capture: Capture) -> Callable[[], None]:
        if self._out is None:
            width = self._compute().shape[1]  # what the graphs leave behind is no part of their memory
            self._out = torch.empty(self.kept_max, width, dtype=torch.float32, device=self.form.buffers.device)
        out = self._out

        def compute() -> Tensor:
            logits = self._compute()
            return out[: len(logits)].copy_(logits)

        return capture.record(compute)[0]

    def _fail(self, size: int, error: Exception) -> None:
        """Record why a size has no graph; other than out of memory, this holds for all missing sizes."""
        reason = f"{type(error).__name__}: {first_line(error):.300}"
        short = is_out_of_memory(error)
        self.failures |= dict.fromkeys([size] if short else self._missing(), reason)
        if not self._warned:
            self._warned = True
            which = f"of {size}" if short else "of any number of"
            _log.warning(
                "rounds %s tokens are computed without a CUDA graph, and take longer; recording one of %d failed: %s",
                which, size, reason,
            )  # fmt: skip

    def _compute(self) -> Tensor:
        """Compute the filled round without a graph; return its logits."""
        view = self.form.view
        if view is None:
            raise RuntimeError("there is no round to compute")
        return self.forward(input_tokens(view, self.form.buffers.drawn), view.positions, view)


def draw_tokens(logits: Tensor, kind: str, settings: dict[str, Tensor]) -> Tensor:
    """Sample tokens by `weftline.engine.llm.sampling.draw`, with the work that `kind` needs."""
    if kind == "greedy":
        return logits.argmax(dim=-1)
    names = tuple(settings) if kind == "narrow" else ("temperature", "seed", "position")
    return draw(logits, DrawSettings(**{name: settings[name] for name in names}))


def _kind(given: Draw) -> int:
    """Return the index in KINDS of a sequence's sampling."""
    if given.temperature <= 0:
        return 0
    return 2 if given.top_k or given.top_p < 1 or given.min_p > 0 or given.typical_p < 1 else 1


def _event() -> Any:
    return torch.cuda.Event()  # type: ignore[no-untyped-call]


def model_forward(model: Any, choose: Callable[[Tensor], None] | None = None) -> Forward:
    """Return a transformers decoder's forward, from tokens to the logits of the rows `keep`.

    choose: called with the LoRA slots int64 [rows] before each pass; must not read their values.
    """
    keeps = "logits_to_keep" in inspect.signature(model.forward).parameters

    def forward(tokens: Tensor, positions: Tensor, view: RoundView) -> Tensor:
        if choose is not None:
            choose(view.adapters)
        options = {"logits_to_keep": view.keep} if keeps else {}
        out = model(input_ids=tokens[None], position_ids=positions[None], use_cache=False, **options)
        logits: Tensor = out.logits[0]
        return logits if keeps else logits[view.keep]

    return forward
