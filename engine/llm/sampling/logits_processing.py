"""Logits processing of a round: penalties, biases, allowed and banned tokens.

Each step runs once for all rows and touches only the logits that it changes, in this order:

    penalties  tokens of the text: logit / r or logit * r, the lower of both (Keskar et al. 2019), r from
               `repetition_penalty`; then - presence_penalty - frequency_penalty * count for tokens of the answer
    bias       added
    allowed    all other tokens are -inf
    banned     -inf: end tokens before `tokens_min`, and the last token of a banned word whose other tokens precede it

`LogitsSettings` holds the precomputed settings of one sequence, `TokenCounts` the token counts for its penalties, and
`LogitsProcessor` collects and applies the changes of one round. Grammar masks are applied afterwards.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from typing import Any

import numpy as np
import torch
from torch import Tensor

from weftline.engine.llm.params import SamplingParams
from weftline.engine.llm.sampling.draw import COLD
from weftline.engine.llm.sequence import Sequence

Ints = np.ndarray[Any, np.dtype[np.int64]]
Floats = np.ndarray[Any, np.dtype[np.float64]]

_SORTED_FIRST = 128
"""Number of largest logits to sort at first; typical distributions seldom leave more to a usual top-p."""
_SORTED_FACTOR = 16
"""Growth of that number when it did not suffice; measured to matter little."""


class LogitsSettings:
    """Precomputed sampling settings of one sequence, whose banned token sequences are `banned`.

    edits:     its logits change, or may change at some point of the answer.
    draws:     the token is drawn at random instead of the argmax.
    first:     number of largest logits to sort at first; 0 without a filter.
    penalises: it has penalties.
    biased:    token ids, and the biases added to their logits.
    allowed:   allowed token ids, end tokens included; None for all.
    """

    def __init__(
        self, params: SamplingParams, banned: tuple[tuple[int, ...], ...], ends: frozenset[int], vocabulary: int
    ) -> None:
        self.params, self.banned = params, banned
        self.counts = TokenCounts()
        self.penalises = bool(
            params.repetition_penalty != 1 or params.presence_penalty or params.frequency_penalty
        )  # fmt: skip
        self.biased: tuple[Ints, Floats] | None = None
        if params.logit_bias:
            ids, values = map(int, params.logit_bias), params.logit_bias.values()
            self.biased = np.fromiter(ids, np.int64), np.fromiter(values, np.float64)
        self.allowed = _ids({*params.allowed_token_ids, *ends}, vocabulary) if params.allowed_token_ids else None
        self._early_ends = _ids({*ends, *params.stop_token_ids}, vocabulary) if params.tokens_min else None
        self._banned = _ids({one[0] for one in banned if len(one) == 1}, vocabulary)
        self._longer = [one for one in banned if len(one) > 1 and one[-1] < vocabulary]
        self._longest = max(map(len, self._longer), default=1)
        self.edits = bool(
            self.penalises or params.logit_bias or params.allowed_token_ids or params.tokens_min or banned
        )  # fmt: skip
        self.draws = params.temperature >= COLD
        self.first = first_count(params, vocabulary)

    def count(self, sequence: Sequence, draft: SequenceOf[int]) -> tuple[Ints, Ints]:
        """Return the tokens with penalties, and the count of each in the answer."""
        from_prompt = sequence.params.repetition_penalty != 1
        return self.counts.count(sequence.tokens, sequence.prompt, draft, from_prompt)

    def banned_ids(self, sequence: Sequence, draft: SequenceOf[int]) -> list[Ints]:
        """Return tokens that must not follow: end tokens before `tokens_min`, and last tokens of banned words."""
        found = [self._banned] if len(self._banned) else []
        if self._early_ends is not None:
            answered = len(sequence.tokens) - sequence.prompt + len(draft)
            if answered < sequence.params.tokens_min:
                found.append(self._early_ends)
        if self._longer:
            since = max(sequence.prompt, len(sequence.tokens) - self._longest + 1)
            before = (*sequence.tokens[since:], *draft)
            last = [one[-1] for one in self._longer if before[1 - len(one) :] == one[:-1]]
            if last:
                found.append(np.array(last, np.int64))
        return found


def first_count(params: SamplingParams, vocabulary: int) -> int:
    """Return the number of largest logits to sort at first; 0 without a filter."""
    narrowed = 0 < params.top_k < vocabulary or params.top_p < 1 or params.min_p > 0
    if not narrowed:
        return vocabulary if params.typical_p < 1 else 0
    count = _SORTED_FIRST
    while count <= params.top_k < vocabulary:
        count *= _SORTED_FACTOR
    return min(count, vocabulary)


def next_count(count: int, vocabulary: int) -> int:
    """Return the number of logits to sort after `count` did not suffice."""
    return min(count * _SORTED_FACTOR, vocabulary)


def _ids(tokens: set[int], vocabulary: int) -> Ints:
    return np.array(sorted(token for token in tokens if token < vocabulary), np.int64)


class TokenCounts:
    """Distinct tokens of one sequence, with their counts in the answer, updated incrementally.

    Recounting a long text in each round would cost more than the model itself on a CPU, so only new tokens are counted.
    A sequence whose earlier tokens changed (rejected draft tokens) is recounted. Draft tokens are counted on top and
    not kept.
    """

    def __init__(self) -> None:
        self._tokens: list[int] = []
        self._prompt = self._start = self._counted = 0
        self._place: dict[int, int] = {}
        self._ids: Ints = np.empty(16, np.int64)
        self._times: Ints = np.empty(16, np.int64)

    def count(
        self, tokens: list[int], prompt: int, draft: SequenceOf[int] = (), from_prompt: bool = True
    ) -> tuple[Ints, Ints]:
        """Return the distinct tokens and their counts in the answer, read-only until the next call.

        tokens: all known tokens, the first `prompt` being the prompt.   draft: draft tokens, counted as answer.
        from_prompt: include tokens that occur in the prompt only, with count 0.
        """
        self._reset_if_changed(tokens, prompt, 0 if from_prompt else prompt)
        for at in range(self._counted, len(tokens)):
            self._add(tokens[at], int(at >= prompt))
        self._counted = len(tokens)
        size = len(self._place)
        ids, times = self._ids[:size], self._times[:size]
        return _with_draft(ids, times, self._place, draft) if draft else (ids, times)

    def _reset_if_changed(self, tokens: list[int], prompt: int, start: int) -> None:
        """Reset the counts unless `tokens` extend the counted ones; the comparison runs at the speed of C."""
        same = (prompt, start) == (self._prompt, self._start) and self._counted <= len(tokens)
        if not same or (tokens is not self._tokens and tokens[: self._counted] != self._tokens[: self._counted]):
            self._place.clear()
            self._prompt, self._start, self._counted = prompt, start, start
        self._tokens = tokens

    def _add(self, token: int, times: int) -> None:
        place = self._place.get(token)
        if place is not None:
            self._times[place] += times
            return
        place = self._place[token] = len(self._place)
        if place == len(self._ids):
            self._ids = np.concatenate([self._ids, np.empty_like(self._ids)])
            self._times = np.concatenate([self._times, np.empty_like(self._times)])
        self._ids[place], self._times[place] = token, times


def _with_draft(ids: Ints, times: Ints, place: dict[int, int], draft: SequenceOf[int]) -> tuple[Ints, Ints]:
    times = times.copy()
    new: dict[int, int] = {}
    for token in draft:
        if token in place:
            times[place[token]] += 1
        else:
            new[token] = new.get(token, 0) + 1
    if not new:
        return ids, times
    return (
        np.concatenate([ids, np.fromiter(new, np.int64, len(new))]),
        np.concatenate([times, np.fromiter(new.values(), np.int64, len(new))]),
    )


class LogitsProcessor:
    """Changes to the logits of one round: `add` each row that has some, then `apply` once. vocabulary: columns."""

    def __init__(self, vocabulary: int) -> None:
        self._vocabulary = vocabulary
        self._penalised: list[tuple[int, Ints]] = []
        self._times: list[Ints] = []
        self._rates: list[tuple[float, float, float]] = []
        self._biased: list[tuple[int, Ints]] = []
        self._bias: list[Floats] = []
        self._allowed: list[tuple[int, Ints]] = []
        self._banned_ids: list[tuple[int, Ints]] = []

    def add(self, row: int, sequence: Sequence, draft: SequenceOf[int], settings: LogitsSettings) -> None:
        """Collect the changes of row `row`, which follows the tokens of `sequence` and `draft`."""
        if settings.penalises:
            ids, times = settings.count(sequence, draft)
            params = sequence.params
            self._penalised.append((row, ids))
            self._times.append(times)
            self._rates.append((params.repetition_penalty, params.presence_penalty, params.frequency_penalty))
        if settings.biased is not None:
            self._biased.append((row, settings.biased[0]))
            self._bias.append(settings.biased[1])
        if settings.allowed is not None:
            self._allowed.append((row, settings.allowed))
        self._banned_ids += [(row, ids) for ids in settings.banned_ids(sequence, draft)]

    def apply(self, logits: Tensor) -> None:
        """Change `logits` in place, float [rows, vocabulary] and contiguous; does not wait for the device."""
        flat, device = logits.view(-1), logits.device
        if self._penalised:
            self._penalise(flat)
        if self._biased:
            flat.index_add_(0, self._indices(self._biased, device), stage(np.concatenate(self._bias), device).to(flat))
        if self._allowed:
            places = self._indices(self._allowed, device)
            kept = flat[places]
            rows = stage(np.array([row for row, _ in self._allowed], np.int64), device)
            logits.index_fill_(0, rows, -torch.inf)
            flat.index_copy_(0, places, kept)
        if self._banned_ids:
            flat.index_fill_(0, self._indices(self._banned_ids, device), -torch.inf)

    def _penalise(self, flat: Tensor) -> None:
        sizes = [len(ids) for _, ids in self._penalised]
        times = np.concatenate(self._times)
        repetition, presence, frequency = np.repeat(np.array(self._rates).T, sizes, axis=1)
        minus = presence * (times > 0) + frequency * times
        places = self._indices(self._penalised, flat.device)
        rates = stage(np.stack([repetition, minus]), flat.device).to(flat.dtype)
        value = flat[places]
        value = torch.where(value < 0, value * rates[0], value / rates[0]) - rates[1]
        flat.index_copy_(0, places, value)

    def _indices(self, entries: SequenceOf[tuple[int, Ints]], device: torch.device) -> Tensor:
        """Return int64 [entries]: indices of (row, token ids) in the flattened logits."""
        starts = np.array([row * self._vocabulary for row, _ in entries], np.int64)
        ids = np.concatenate([ids for _, ids in entries])
        return stage(ids + np.repeat(starts, [len(ids) for _, ids in entries]), device)


def stage(values: np.ndarray[Any, Any], device: torch.device) -> Tensor:
    """Copy `values` to `device` asynchronously, in stream order; the array must not change afterwards."""
    tensor = torch.from_numpy(values)
    if device.type == "cpu":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)
