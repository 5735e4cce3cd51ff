"""From a round's logits to its next tokens, all sequences at once.

A row that asks for nothing special costs an argmax. Drawing uses the Gumbel trick: the token with the largest
logit / temperature + noise is a draw from the softmax of logits / temperature. The noise comes from the request's seed
and the token's position alone, so an answer does not depend on who else was in the batch, nor on preemption.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence as SequenceOf

import torch
from torch import Tensor

from weftline.engine.llm.sequence import SamplingParams, Sequence

_MIX = 0x9E3779B97F4A7C15
"""2^64 / golden ratio: spreads positions over the seeds of the generator (Knuth, TAOCP 6.4)."""
_TINY = 1e-20
"""Keeps log() away from zero; far below the resolution of a float32 draw."""


class Sampler:
    """Chooses tokens. `ends` are the model's end-of-text tokens, which `tokens_min` holds off."""

    def __init__(self, ends: frozenset[int]) -> None:
        self._ends = ends
        self._generator = torch.Generator()

    @torch.inference_mode()
    def pick(self, logits: Tensor, sequences: SequenceOf[Sequence]) -> tuple[list[int], list[bool]]:
        """Return the next token of each sequence, and whether its row of `logits` [sequences, vocabulary] is sound.

        A row with a NaN, or with nothing but -inf, is not sound. `logits` is float32 and is overwritten.
        """
        for row, sequence in enumerate(sequences):
            self._penalise(logits[row], sequence)
        drawn = [row for row, sequence in enumerate(sequences) if sequence.params.temperature > 0]
        if drawn:
            self._add_noise(logits, drawn, [sequences[row] for row in drawn])
        best, token = logits.max(dim=-1)
        return token.tolist(), torch.isfinite(best).tolist()

    def _penalise(self, row: Tensor, sequence: Sequence) -> None:
        params = sequence.params
        if params.repetition_penalty != 1.0:
            seen = torch.tensor(sorted(set(sequence.tokens)), device=row.device)
            value = row[seen]
            row[seen] = torch.where(value < 0, value * params.repetition_penalty, value / params.repetition_penalty)
        answered = len(sequence.tokens) - sequence.prompt
        if answered and (params.presence_penalty or params.frequency_penalty):
            times = Counter(sequence.answer)
            seen = torch.tensor(list(times), device=row.device)
            count = torch.tensor(list(times.values()), device=row.device)
            row[seen] -= params.presence_penalty + params.frequency_penalty * count
        if answered < params.tokens_min:
            row[sorted({token for token in {*self._ends, *params.stop_token_ids} if token < len(row)})] = -torch.inf

    def _add_noise(self, logits: Tensor, rows: list[int], sequences: SequenceOf[Sequence]) -> None:
        chosen = logits[rows]
        params = [sequence.params for sequence in sequences]
        chosen /= _column([p.temperature for p in params], chosen)
        narrow(chosen, params)
        for row, sequence in enumerate(sequences):
            chosen[row] += self._noise(sequence, chosen.shape[1]).to(chosen.device)
        logits[rows] = chosen

    def _noise(self, sequence: Sequence, count: int) -> Tensor:
        seed = sequence.params.seed or 0
        self._generator.manual_seed((seed + len(sequence.tokens) * _MIX) % (1 << 63))
        waits = torch.empty(count).exponential_(generator=self._generator)
        return waits.clamp_min_(_TINY).log_().neg_()


def narrow(logits: Tensor, params: SequenceOf[SamplingParams]) -> None:
    """Set to -inf, in place, what top-k, top-p and min-p leave out of `logits` [rows, vocabulary]."""
    vocabulary = logits.shape[1]
    if any(p.min_p > 0 for p in params):
        floor = logits.max(dim=-1, keepdim=True).values + _column([p.min_p for p in params], logits).log()
        logits.masked_fill_(logits < floor, -torch.inf)
    rows = [row for row, p in enumerate(params) if 0 < p.top_k < vocabulary or p.top_p < 1.0]
    if not rows:
        return
    ordered, token = logits[rows].sort(dim=-1, descending=True)
    share = ordered.softmax(-1)
    before = share.cumsum(-1) - share
    beyond_p = before >= _column([params[row].top_p for row in rows], logits)
    kept = torch.tensor([params[row].top_k or vocabulary for row in rows], device=logits.device)[:, None]
    beyond_k = torch.arange(vocabulary, device=logits.device)[None] >= kept
    beyond_p[:, 0] = False  # rounding must not leave a row without any token
    ordered.masked_fill_(beyond_p | beyond_k, -torch.inf)
    logits[rows] = torch.empty_like(ordered).scatter_(1, token, ordered)


def _column(values: list[float], like: Tensor) -> Tensor:
    return torch.tensor(values, dtype=like.dtype, device=like.device)[:, None]
