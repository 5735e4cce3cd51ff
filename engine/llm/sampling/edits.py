"""Logits processing of a round: penalties, biases and masks.

In this order, each for all rows at once, and touching no more logits than there are entries:

    penalties  of the tokens in the text: logit / r or logit * r, the lower of both (Keskar et al. 2019), r from
               `repetition_penalty`; then - presence_penalty - frequency_penalty * times, if it is in the answer
    bias       added
    allowed    all others are -inf
    forbidden  -inf: ends before `tokens_min`, the last token of a banned word whose other tokens were just said

Grammars are applied elsewhere, after these.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf

import numpy as np
import torch
from torch import Tensor

from weftline.engine.llm.sampling.staging import stage
from weftline.engine.llm.sampling.wants import Floats, Ints, Wants
from weftline.engine.llm.sequence import Sequence


class Edits:
    """The entries of one round. `add` each row that has some, then `apply` once. vocabulary: columns of the logits."""

    def __init__(self, vocabulary: int) -> None:
        self._vocabulary = vocabulary
        self._said: list[tuple[int, Ints]] = []
        self._times: list[Ints] = []
        self._rates: list[tuple[float, float, float]] = []
        self._biased: list[tuple[int, Ints]] = []
        self._bias: list[Floats] = []
        self._allowed: list[tuple[int, Ints]] = []
        self._forbidden: list[tuple[int, Ints]] = []

    def add(self, row: int, sequence: Sequence, draft: SequenceOf[int], wants: Wants) -> None:
        """Note what row `row` asks for: `sequence` as it is, and `draft` after it."""
        if wants.penalises:
            ids, times = wants.count(sequence, draft)
            params = sequence.params
            self._said.append((row, ids))
            self._times.append(times)
            self._rates.append((params.repetition_penalty, params.presence_penalty, params.frequency_penalty))
        if wants.biased is not None:
            self._biased.append((row, wants.biased[0]))
            self._bias.append(wants.biased[1])
        if wants.allowed is not None:
            self._allowed.append((row, wants.allowed))
        self._forbidden += [(row, ids) for ids in wants.forbidden(sequence, draft)]

    def apply(self, logits: Tensor) -> None:
        """Change `logits`, float [rows, vocabulary] and contiguous, in place; waits for nothing."""
        flat, device = logits.view(-1), logits.device
        if self._said:
            self._penalise(flat)
        if self._biased:
            flat.index_add_(0, self._places(self._biased, device), stage(np.concatenate(self._bias), device).to(flat))
        if self._allowed:
            places = self._places(self._allowed, device)
            kept = flat[places]
            rows = stage(np.array([row for row, _ in self._allowed], np.int64), device)
            logits.index_fill_(0, rows, -torch.inf)
            flat.index_copy_(0, places, kept)
        if self._forbidden:
            flat.index_fill_(0, self._places(self._forbidden, device), -torch.inf)

    def _penalise(self, flat: Tensor) -> None:
        sizes = [len(ids) for _, ids in self._said]
        times = np.concatenate(self._times)
        repetition, presence, frequency = np.repeat(np.array(self._rates).T, sizes, axis=1)
        minus = presence * (times > 0) + frequency * times
        places = self._places(self._said, flat.device)
        rates = stage(np.stack([repetition, minus]), flat.device).to(flat.dtype)
        value = flat[places]
        value = torch.where(value < 0, value * rates[0], value / rates[0]) - rates[1]
        flat.index_copy_(0, places, value)

    def _places(self, entries: SequenceOf[tuple[int, Ints]], device: torch.device) -> Tensor:
        """Return int64 [entries], where (row, token ids) are in the flattened logits."""
        starts = np.array([row * self._vocabulary for row, _ in entries], np.int64)
        ids = np.concatenate([ids for _, ids in entries])
        return stage(ids + np.repeat(starts, [len(ids) for _, ids in entries]), device)
