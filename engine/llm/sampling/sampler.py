"""Sampler: next tokens of all rows of a round.

A row costs what its options need: argmax when greedy, noise with a temperature (`weftline.engine.llm.sampling.draw`),
and as many logits as its text has distinct tokens with a penalty (`weftline.engine.llm.sampling.logits_processing`).
The host waits for the device once, to fetch the tokens, and again for rows whose filters kept more than was sorted at
first, and for log-probabilities.

A row's token depends on its own logits, options, seed and position only: not on other rows, preemption or draft tokens.
Speculation therefore never changes an answer.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from weftline.engine.llm.request import SampledToken
from weftline.engine.llm.sampling.draw import DrawSettings, draw, draw_kernel, token_logprobs, try_draw
from weftline.engine.llm.sampling.logits_processing import LogitsProcessor, LogitsSettings, next_count, stage
from weftline.engine.llm.sequence import Sequence
from weftline.errors import WeftlineError

if TYPE_CHECKING:
    from weftline.engine.llm.grammar.matcher import Matcher

KEPT_MIN = 128
"""Sequences whose settings and counts are cached, or twice a round's rows; others are computed again."""


@dataclass(frozen=True, slots=True)
class Row:
    """A row of logits to sample: the token after `sequence` and the draft tokens `draft`.

    matcher: grammar state of the sequence; such rows have no draft.
    """

    sequence: Sequence
    draft: tuple[int, ...] = ()
    matcher: Matcher | None = None


class Sampler:
    """Samples tokens. `ends` are the model's end-of-text tokens, `vocabulary` the columns of its logits."""

    def __init__(self, ends: frozenset[int], vocabulary: int) -> None:
        self._ends = ends
        self._vocabulary = vocabulary
        self._settings: OrderedDict[int, LogitsSettings] = OrderedDict()

    @torch.inference_mode()
    def pick(self, logits: Tensor, rows: SequenceOf[Row]) -> list[SampledToken]:
        """Sample a token for each row of `logits`, float32 [rows, vocabulary]; `logits` may be changed."""
        settings = [self._settings_of(row.sequence) for row in rows]
        while len(self._settings) > max(KEPT_MIN, 2 * len(rows)):
            self._settings.popitem(last=False)
        logprob_rows = [at for at, row in enumerate(rows) if row.sequence.params.logprobs is not None]
        masked = any(row.matcher is not None for row in rows)
        edited = masked or any(one.edits for one in settings)
        own = _rows(logits, logprob_rows, copy=edited) if logprob_rows else logits
        sound = torch.isfinite(logits.amax(-1)) if edited else None
        errors = self._process(logits, rows, settings, masked) if edited else {}
        sampled = _sample(logits, rows, settings, sound)
        for at, error in errors.items():
            sampled[at] = SampledToken(sampled[at].token, False, error=error)
        if logprob_rows:
            tokens = stage(np.array([sampled[at].token for at in logprob_rows], np.int64), logits.device)
            tops = [rows[at].sequence.params.logprobs or 0 for at in logprob_rows]
            for at, (logprob, top) in zip(logprob_rows, token_logprobs(own, tokens, tops), strict=True):
                sampled[at] = replace(sampled[at], logprob=logprob, top=top)
        return sampled

    @torch.inference_mode()
    def prompt_logprobs(self, logits: Tensor, tokens: list[int], top: int) -> list[SampledToken]:
        """Return each of `tokens` with its log-probability in its row of `logits`, and the `top` likeliest tokens."""
        if not tokens:
            return []
        logprobs = token_logprobs(logits, stage(np.array(tokens, np.int64), logits.device), [top] * len(tokens))
        return [SampledToken(token, True, *one) for token, one in zip(tokens, logprobs, strict=True)]

    def is_plain(self, sequence: Sequence) -> bool:
        """Return whether a sequence needs no logits processing and no log-probabilities."""
        return not self._settings_of(sequence).edits and sequence.params.logprobs is None

    def _settings_of(self, sequence: Sequence) -> LogitsSettings:
        settings = self._settings.get(sequence.order)
        if settings is None or settings.params is not sequence.params or settings.banned is not sequence.banned:
            settings = LogitsSettings(sequence.params, sequence.banned, self._ends, self._vocabulary)
            self._settings[sequence.order] = settings
        self._settings.move_to_end(sequence.order)
        return settings

    def _process(
        self, logits: Tensor, rows: SequenceOf[Row], settings: SequenceOf[LogitsSettings], masked: bool
    ) -> dict[int, WeftlineError]:
        """Apply options and grammars to `logits`; return the errors of failed grammars by row."""
        processor = LogitsProcessor(self._vocabulary)
        for at, (row, one) in enumerate(zip(rows, settings, strict=True)):
            if one.edits:
                processor.add(at, row.sequence, row.draft, one)
        processor.apply(logits)
        if not masked:
            return {}
        from weftline.engine.llm.grammar.masks import apply_masks

        return apply_masks(logits, [row.matcher for row in rows])


def _sample(
    logits: Tensor, rows: SequenceOf[Row], settings: SequenceOf[LogitsSettings], sound: Tensor | None
) -> list[SampledToken]:
    """Return the drawn or largest token of each row; `sound`: rows that were sound before processing."""
    greedy = [at for at, one in enumerate(settings) if not one.draws]
    drawn: dict[int, list[int]] = {}
    for at, one in enumerate(settings):
        if one.draws:
            drawn.setdefault(one.first, []).append(at)
    if len(drawn) > 1 and draw_kernel(logits.device) is not None:
        # one launch: the kernel sorts nothing, and each row pays only for its own filters
        drawn = {logits.shape[1]: sorted(at for group in drawn.values() for at in group)}
    tokens = torch.zeros(len(rows), dtype=torch.int64, device=logits.device)
    if greedy:
        _put(tokens, greedy, _rows(logits, greedy).argmax(-1))
    while True:
        enough = torch.ones_like(tokens)
        for count, group in drawn.items():
            _draw(logits, rows, group, count, tokens, enough)
        best = torch.isfinite(logits.gather(1, tokens[:, None])[:, 0])
        fetched = torch.stack([tokens, best if sound is None else sound & best, enough]).tolist()
        short = [at for at, one in enumerate(fetched[2]) if not one and fetched[1][at]]
        if not short:
            return [SampledToken(token, bool(one)) for token, one in zip(fetched[0], fetched[1], strict=True)]
        counts = {at: next_count(count, logits.shape[1]) for count, group in drawn.items() for at in group}
        drawn = {}
        for at in short:
            drawn.setdefault(counts[at], []).append(at)


def _draw(logits: Tensor, rows: SequenceOf[Row], group: list[int], count: int, tokens: Tensor, enough: Tensor) -> None:
    """Draw for the rows in `group`; write their tokens to `tokens`, and to `enough` whether `count` sufficed."""
    draw_settings = _draw_settings([rows[at] for at in group], logits.device, narrows=count > 0)
    chosen = _rows(logits, group)
    if draw_settings.narrows:
        found, sufficed = try_draw(chosen, draw_settings, count)
        _put(enough, group, sufficed.to(enough.dtype))
    else:
        found = draw(chosen, draw_settings)
    _put(tokens, group, found)


def _put(into: Tensor, rows: list[int], values: Tensor) -> None:
    into.index_copy_(0, stage(np.array(rows, np.int64), into.device), values)


def _draw_settings(rows: SequenceOf[Row], device: torch.device, narrows: bool) -> DrawSettings:
    params = [row.sequence.params for row in rows]
    positions = [len(row.sequence.tokens) + len(row.draft) for row in rows]
    ints = np.array([[row.sequence.seed for row in rows], positions, [one.top_k for one in params]], np.int64)
    floats = np.array([(one.temperature, one.top_p, one.min_p, one.typical_p) for one in params], np.float32).T
    seed, position, top_k = stage(ints, device)
    temperature, top_p, min_p, typical_p = stage(np.ascontiguousarray(floats), device)
    if not narrows:  # a top-k of the whole vocabulary filters nothing
        return DrawSettings(temperature, seed, position)
    return DrawSettings(
        temperature,
        seed,
        position,
        top_k if ints[2].any() else None,
        top_p if (floats[1] < 1).any() else None,
        min_p if floats[2].any() else None,
        typical_p if (floats[3] < 1).any() else None,
    )


def _rows(logits: Tensor, rows: list[int], copy: bool = False) -> Tensor:
    """Return the rows with these ascending numbers; `logits` itself where they are all of them, unless `copy`."""
    if len(rows) == logits.shape[0]:
        return logits.clone() if copy else logits
    return logits.index_select(0, stage(np.array(rows, np.int64), logits.device))
