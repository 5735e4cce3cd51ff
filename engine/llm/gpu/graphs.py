"""Decoding rounds as CUDA graphs: one launch for a whole round, drawing included.

A round in which every sequence has one row, and wants one token drawn by settings alone, is padded to one of SIZES and
repeated from a graph, which is recorded when a size is first needed. All that differs between rounds (tokens, lengths,
page tables, adapters, settings) lies in `RoundBuffers`, so no step's number is frozen in a graph; a test lets lengths
grow beyond those of the recording.

    launch   fills the buffers, starts the round, and returns at once
    tokens   waits for what was drawn

Between the two the host is free: to turn the last round's tokens into text, to plan. The next round may even be
launched before: its rows take their tokens from the newest ones on the device (`tokens_from`).

A size whose recording fails is computed without a graph from then on, and `failures` says why. Graphs know the
addresses of the KV memory: after it moved they must be dropped.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from weftline.engine.llm.attention import Span
from weftline.engine.llm.gpu.attention import GpuAttention
from weftline.engine.llm.gpu.buffers import Draw, RoundView, input_tokens
from weftline.engine.llm.gpu.capture import Capture
from weftline.engine.llm.sampling.drawing import DrawSettings, draw
from weftline.nodes.hugging_face import first_line

SIZES = (1, 2, 4, *range(8, 257, 8))
"""Padded sizes of rounds: padding costs at most 7 rows, which hardly shows where weights are read for all rows once."""
UNSOUND = -1
"""In the place of a token whose row of logits has a NaN or nothing finite."""

Forward = Callable[[Tensor, Tensor, RoundView], Tensor]
"""(tokens [rows], positions [rows], what the round sees) to logits [rows, vocabulary]."""
DrawTokens = Callable[[Tensor, str, dict[str, Tensor]], Tensor]
"""(float32 logits [rows, vocabulary], one of KINDS, settings by name [rows]) to tokens int64 [rows]."""
KINDS = ("greedy", "warm", "narrow")
"""What a round's draws need: the likeliest token; noise; noise among what top-k and the like leave, which is a sort."""


@dataclass(slots=True)
class Handle:
    """A round on its way. Its tokens stay on the device too, in `RoundBuffers.drawn`, until the next round's."""

    _drawn: Tensor
    _count: int
    _event: Any = None

    def tokens(self) -> list[int]:
        """Wait for the round; return the tokens drawn, UNSOUND for rows that have none. Call it before two more rounds.

        In the order of the round's sequences.
        """
        if self._event is not None:
            self._event.synchronize()
        return [int(token) for token in self._drawn[: self._count].tolist()]


@dataclass(slots=True)
class _Graph:
    replay: Callable[[], None]
    drawn: Tensor


@dataclass(slots=True)
class DecodeGraphs:
    """Decoding rounds of one model.

    form:     its attention, with the buffers.      forward: its pass, from tokens to logits.
    draw:     from logits to tokens; must not wait for the device.
    capture:  how rounds are recorded; None: they are computed each time.
    sizes:    padded sizes, ascending.
    failures: why there is no graph, by size and kind.
    """

    form: GpuAttention
    forward: Forward
    draw: DrawTokens = field(default_factory=lambda: draw_tokens)
    capture: Capture | None = None
    sizes: Sequence[int] = SIZES
    failures: dict[tuple[int, str], str] = field(default_factory=dict)
    _graphs: dict[tuple[int, str], _Graph] = field(default_factory=dict)
    _results: list[tuple[Tensor, Any]] = field(default_factory=list)
    _turn: int = 0

    def __post_init__(self) -> None:
        limits = self.form.buffers.limits
        most = min(limits.sequences_max, limits.rows_max)
        self.sizes = tuple(size for size in self.sizes if size <= most) or (most,)
        on_gpu = self.form.buffers.device.type == "cuda"
        for _ in range(2):
            host = torch.zeros(max(self.sizes), dtype=torch.int64, pin_memory=on_gpu)
            self._results.append((host, _event() if on_gpu else None))

    @property
    def sequences_max(self) -> int:
        """Most sequences of a round; larger ones are somebody else's."""
        return self.sizes[-1]

    @property
    def recorded(self) -> tuple[tuple[int, str], ...]:
        """The sizes and kinds that have a graph."""
        return tuple(sorted(self._graphs))

    def drop(self) -> None:
        """Forget all graphs: the memory they know has moved. Sizes that failed are tried again."""
        self._graphs.clear()
        self.failures.clear()

    @torch.inference_mode()
    def launch(
        self,
        spans: Sequence[Span],
        tokens: Sequence[int],
        draws: Sequence[Draw],
        tokens_from: Sequence[int] = (),
        adapters: Sequence[int] = (),
    ) -> Handle:
        """Start a round of one row for each sequence and return at once.

        tokens:      the newest token of each.     draws: how its next one is drawn.
        tokens_from: for each NOWHERE, or its place in the round before, whose token is then taken on the device.
        adapters:    the LoRA slot of each.

        Pages to be copied must have been copied. ValueError: more sequences than `sequences_max`.
        """
        size = self._size(len(spans))
        buffers = self.form.buffers
        buffers.fill(spans, size, size, tokens, tokens_from, adapters, range(len(spans)), draws)
        self.form.view = buffers.fixed(size)
        kind = KINDS[max(map(_kind, draws), default=0)]
        graph = self._graph(size, kind)
        if graph is None:
            drawn = self._compute(size, kind)
        else:
            graph.replay()
            drawn = graph.drawn
        host, event = self._results[self._turn]
        self._turn = 1 - self._turn
        host[:size].copy_(drawn, non_blocking=True)
        if event is not None:
            event.record()
        return Handle(host, len(spans), event)

    def _size(self, count: int) -> int:
        at = bisect_left(self.sizes, count)
        if at == len(self.sizes) or count == 0:
            raise ValueError(f"a round of {count} sequences, expected 1 to {self.sizes[-1]}")
        return self.sizes[at]

    def _graph(self, size: int, kind: str) -> _Graph | None:
        key = (size, kind)
        if self.capture is None or key in self.failures:
            return None
        if key not in self._graphs:
            # recording runs the round more than once: keys and values are written again as they are, but tokens that
            # come from the round before must not come from this one
            drawn = self.form.buffers.drawn
            before = drawn.clone()
            try:
                recorded = self.capture.record(lambda: self._compute(size, kind), lambda: _put(drawn, before))
            except Exception as error:  # whatever the model's code does that cannot be recorded
                self.failures[key] = f"{type(error).__name__}: {first_line(error)}"
                drawn.copy_(before)
                return None
            self._graphs[key] = _Graph(*recorded)
        return self._graphs[key]

    def _compute(self, size: int, kind: str) -> Tensor:
        buffers = self.form.buffers
        view = buffers.fixed(size)
        logits = self.forward(input_tokens(view, buffers.drawn), view.positions, view).float()
        tokens = self.draw(logits, kind, view.draws)
        sound = torch.isfinite(logits.amax(dim=-1))
        drawn = torch.where(sound, tokens, UNSOUND)
        # the next round's input must be a token, whatever became of this one
        buffers.drawn[:size].copy_(drawn.clamp_min(0))
        return drawn


def draw_tokens(logits: Tensor, kind: str, settings: dict[str, Tensor]) -> Tensor:
    """Draw by `weftline.engine.llm.sampling.drawing`, with no more work than `kind` needs."""
    if kind == "greedy":
        return logits.argmax(dim=-1)
    names = tuple(settings) if kind == "narrow" else ("temperature", "seed", "position")
    return draw(logits, DrawSettings(**{name: settings[name] for name in names}))


def _kind(given: Draw) -> int:
    """Return the place in KINDS of what one sequence needs."""
    if given.temperature <= 0:
        return 0
    return 2 if given.top_k or given.top_p < 1 or given.min_p > 0 or given.typical_p < 1 else 1


def _put(target: Tensor, source: Tensor) -> None:
    target.copy_(source)


def _event() -> Any:
    return torch.cuda.Event()  # type: ignore[no-untyped-call]


def model_forward(model: Any, choose: Callable[[Tensor], None] | None = None) -> Forward:
    """Return the pass of a transformers decoder from tokens to the logits of every row.

    choose: told the LoRA slots int64 [rows] before each pass; must not look at their values.
    """

    def forward(tokens: Tensor, positions: Tensor, view: RoundView) -> Tensor:
        if choose is not None:
            choose(view.adapters)
        out = model(input_ids=tokens[None], position_ids=positions[None], use_cache=False)
        logits: Tensor = out.logits[0]
        return logits

    return forward
