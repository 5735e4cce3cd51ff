"""Sampler: next tokens of all rows of a round.

What a row costs depends on what it asks for: nothing special, an argmax; a temperature, some noise
(`weftline.engine.llm.sampling.drawing`); a penalty, as many logits as its text has different tokens
(`weftline.engine.llm.sampling.edits`). The host waits for the device once, when it fetches the tokens; a row whose
narrowing kept more than was sorted at first, and log-probabilities, make it wait again.

A row's token depends on its own logits, options, seed and place, and on nothing else in the round: not on the
company, nor on preemption, nor on guesses. Guesses are therefore right or wrong exactly as if nobody had guessed.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from weftline.engine.llm.sampling.drawing import DrawSettings, draw, draw_kernel, try_draw
from weftline.engine.llm.sampling.edits import Edits
from weftline.engine.llm.sampling.logprobs import tell
from weftline.engine.llm.sampling.staging import stage
from weftline.engine.llm.sampling.wants import Wants, next_count
from weftline.engine.llm.sequence import Sequence
from weftline.errors import WeftlineError

if TYPE_CHECKING:
    from weftline.engine.llm.grammar.matcher import Matcher

KEPT_MIN = 128
"""So many sequences' options and counts are kept ready, or twice a round's rows; the others' are made again."""


@dataclass(frozen=True, slots=True)
class Row:
    """A row of logits to choose from: what follows `sequence` and then `draft`, guesses that are taken as said.

    matcher: where the sequence stands in its grammar; such rows have no draft.
    """

    sequence: Sequence
    draft: tuple[int, ...] = ()
    matcher: Matcher | None = None


@dataclass(frozen=True, slots=True)
class TokenChoice:
    """A row's token.

    sound:   false when the row has a NaN or nothing finite, or options leave no token; `token` is then of no use.
    logprob: the token's log-probability before any option, if asked for; natural logarithm.
    top:     the likeliest tokens and their log-probabilities, the likeliest first.
    error:   why the row's grammar failed; not sound then.
    """

    token: int
    sound: bool
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()
    error: WeftlineError | None = None


class Sampler:
    """Chooses tokens. `ends` are the model's end-of-text tokens, `vocabulary` the columns of its logits."""

    def __init__(self, ends: frozenset[int], vocabulary: int) -> None:
        self._ends = ends
        self._vocabulary = vocabulary
        self._wants: OrderedDict[int, Wants] = OrderedDict()

    @torch.inference_mode()
    def pick(self, logits: Tensor, rows: SequenceOf[Row]) -> list[TokenChoice]:
        """Return the choice of each row of `logits`, float32 [rows, vocabulary], which may be changed."""
        wants = [self._wanted(row.sequence) for row in rows]
        while len(self._wants) > max(KEPT_MIN, 2 * len(rows)):
            self._wants.popitem(last=False)
        told = [at for at, row in enumerate(rows) if row.sequence.params.logprobs is not None]
        masked = any(row.matcher is not None for row in rows)
        edited = masked or any(one.edits for one in wants)
        own = _rows(logits, told, copy=edited) if told else logits
        sound = torch.isfinite(logits.amax(-1)) if edited else None
        errors = self._edit(logits, rows, wants, masked) if edited else {}
        choices = _choose(logits, rows, wants, sound)
        for at, error in errors.items():
            choices[at] = TokenChoice(choices[at].token, False, error=error)
        if told:
            tokens = stage(np.array([choices[at].token for at in told], np.int64), logits.device)
            tops = [rows[at].sequence.params.logprobs or 0 for at in told]
            for at, (logprob, top) in zip(told, tell(own, tokens, tops), strict=True):
                choices[at] = replace(choices[at], logprob=logprob, top=top)
        return choices

    @torch.inference_mode()
    def prompt_logprobs(self, logits: Tensor, tokens: list[int], top: int) -> list[TokenChoice]:
        """Return each of `tokens` with its log-probability in its row of `logits` [tokens, vocabulary], and the `top`
        likeliest tokens there with theirs.
        """
        if not tokens:
            return []
        told = tell(logits, stage(np.array(tokens, np.int64), logits.device), [top] * len(tokens))
        return [TokenChoice(token, True, *one) for token, one in zip(tokens, told, strict=True)]

    def is_plain(self, sequence: Sequence) -> bool:
        """Whether a sequence's tokens are drawn from the logits as they are, and nothing is told but the token."""
        return not self._wanted(sequence).edits and sequence.params.logprobs is None

    def _wanted(self, sequence: Sequence) -> Wants:
        wants = self._wants.get(sequence.order)
        if wants is None or wants.params is not sequence.params or wants.banned is not sequence.banned:
            wants = Wants(sequence.params, sequence.banned, self._ends, self._vocabulary)
            self._wants[sequence.order] = wants
        self._wants.move_to_end(sequence.order)
        return wants

    def _edit(
        self, logits: Tensor, rows: SequenceOf[Row], wants: SequenceOf[Wants], masked: bool
    ) -> dict[int, WeftlineError]:
        """Change `logits` as options and grammars ask; return whose grammar failed, and why."""
        edits = Edits(self._vocabulary)
        for at, (row, one) in enumerate(zip(rows, wants, strict=True)):
            if one.edits:
                edits.add(at, row.sequence, row.draft, one)
        edits.apply(logits)
        if not masked:
            return {}
        from weftline.engine.llm.grammar.masks import apply_masks

        return apply_masks(logits, [row.matcher for row in rows])


def _choose(logits: Tensor, rows: SequenceOf[Row], wants: SequenceOf[Wants], sound: Tensor | None) -> list[TokenChoice]:
    """Return what is drawn from `logits`, or their largest; `sound` says which rows were sound before."""
    greedy = [at for at, one in enumerate(wants) if not one.draws]
    drawn: dict[int, list[int]] = {}
    for at, one in enumerate(wants):
        if one.draws:
            drawn.setdefault(one.first, []).append(at)
    if len(drawn) > 1 and draw_kernel(logits.device) is not None:
        # one launch: each row pays only for its own narrowing, and whatever is sorted elsewhere is not here
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
            return [TokenChoice(token, bool(one)) for token, one in zip(fetched[0], fetched[1], strict=True)]
        counts = {at: next_count(count, logits.shape[1]) for count, group in drawn.items() for at in group}
        drawn = {}
        for at in short:
            drawn.setdefault(counts[at], []).append(at)


def _draw(logits: Tensor, rows: SequenceOf[Row], group: list[int], count: int, tokens: Tensor, enough: Tensor) -> None:
    """Draw for the rows in `group`: put their tokens into `tokens`, and into `enough` whether `count` sufficed."""
    settings = _settings([rows[at] for at in group], logits.device, narrows=count > 0)
    chosen = _rows(logits, group)
    if settings.narrows:
        found, sufficed = try_draw(chosen, settings, count)
        _put(enough, group, sufficed.to(enough.dtype))
    else:
        found = draw(chosen, settings)
    _put(tokens, group, found)


def _put(into: Tensor, rows: list[int], values: Tensor) -> None:
    into.index_copy_(0, stage(np.array(rows, np.int64), into.device), values)


def _settings(rows: SequenceOf[Row], device: torch.device, narrows: bool) -> DrawSettings:
    params = [row.sequence.params for row in rows]
    positions = [len(row.sequence.tokens) + len(row.draft) for row in rows]
    ints = np.array([[row.sequence.seed for row in rows], positions, [one.top_k for one in params]], np.int64)
    floats = np.array([(one.temperature, one.top_p, one.min_p, one.typical_p) for one in params], np.float32).T
    seed, position, top_k = stage(ints, device)
    temperature, top_p, min_p, typical_p = stage(np.ascontiguousarray(floats), device)
    if not narrows:  # a top-k of the whole vocabulary is none
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
    """Return the rows with these numbers, rising; `logits` itself where they are all, unless it has to be a copy."""
    if len(rows) == logits.shape[0]:
        return logits.clone() if copy else logits
    return logits.index_select(0, stage(np.array(rows, np.int64), logits.device))
