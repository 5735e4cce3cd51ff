"""Precomputed logits-processing settings of one sequence.

Here stands who asks for what; `weftline.engine.llm.sampling.edits` carries it out for all rows of a round together.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from typing import Any

import numpy as np

from weftline.engine.llm.params import SamplingParams
from weftline.engine.llm.sampling.drawing import COLD
from weftline.engine.llm.sampling.penalties import History
from weftline.engine.llm.sequence import Sequence

Ints = np.ndarray[Any, np.dtype[np.int64]]
Floats = np.ndarray[Any, np.dtype[np.float64]]

_FEW = 128
"""How many of the largest logits are sorted at first; real distributions seldom leave more to a usual top-p."""
_MORE = 16
"""By how much that grows when it was not enough; measured to matter little."""


class Wants:
    """The options of one sequence, whose banned token sequences are `banned`.

    edits:     its logits are changed, or may be: some options depend on how far the answer is.
    draws:     the token is drawn, and not the likeliest.
    first:     how many of the largest logits to sort at first; 0 when nothing narrows the draw.
    penalises: it has penalties.
    biased:    token ids, and what is added to their logits.
    allowed:   token ids, the ends among them; None for all.
    """

    def __init__(
        self, params: SamplingParams, banned: tuple[tuple[int, ...], ...], ends: frozenset[int], vocabulary: int
    ) -> None:
        self.params, self.banned = params, banned
        self.history = History()
        self.penalises = bool(
            params.repetition_penalty != 1 or params.presence_penalty or params.frequency_penalty
        )  # fmt: skip
        self.biased: tuple[Ints, Floats] | None = None
        if params.logit_bias:
            ids, values = map(int, params.logit_bias), params.logit_bias.values()
            self.biased = np.fromiter(ids, np.int64), np.fromiter(values, np.float64)
        self.allowed = _ids({*params.allowed_token_ids, *ends}, vocabulary) if params.allowed_token_ids else None
        self._held = _ids({*ends, *params.stop_token_ids}, vocabulary) if params.tokens_min else None
        self._banned = _ids({one[0] for one in banned if len(one) == 1}, vocabulary)
        self._longer = [one for one in banned if len(one) > 1 and one[-1] < vocabulary]
        self._longest = max(map(len, self._longer), default=1)
        self.edits = bool(
            self.penalises or params.logit_bias or params.allowed_token_ids or params.tokens_min or banned
        )  # fmt: skip
        self.draws = params.temperature >= COLD
        self.first = first_count(params, vocabulary)

    def count(self, sequence: Sequence, draft: SequenceOf[int]) -> tuple[Ints, Ints]:
        """Return the tokens that penalties are for, and how often each is in the answer."""
        from_prompt = sequence.params.repetition_penalty != 1
        return self.history.count(sequence.tokens, sequence.prompt, draft, from_prompt)

    def forbidden(self, sequence: Sequence, draft: SequenceOf[int]) -> list[Ints]:
        """Return the tokens that cannot come next: ends that are too early, and last tokens of banned words."""
        found = [self._banned] if len(self._banned) else []
        if self._held is not None:
            answered = len(sequence.tokens) - sequence.prompt + len(draft)
            if answered < sequence.params.tokens_min:
                found.append(self._held)
        if self._longer:
            since = max(sequence.prompt, len(sequence.tokens) - self._longest + 1)
            said = (*sequence.tokens[since:], *draft)
            last = [one[-1] for one in self._longer if said[1 - len(one) :] == one[:-1]]
            if last:
                found.append(np.array(last, np.int64))
        return found


def first_count(params: SamplingParams, vocabulary: int) -> int:
    """Return how many of the largest logits to sort at first: 0 when nothing narrows the draw."""
    narrowed = 0 < params.top_k < vocabulary or params.top_p < 1 or params.min_p > 0
    if not narrowed:
        return vocabulary if params.typical_p < 1 else 0
    count = _FEW
    while count <= params.top_k < vocabulary:
        count *= _MORE
    return min(count, vocabulary)


def next_count(count: int, vocabulary: int) -> int:
    """Return how many to sort when `count` were not enough."""
    return min(count * _MORE, vocabulary)


def _ids(tokens: set[int], vocabulary: int) -> Ints:
    return np.array(sorted(token for token in tokens if token < vocabulary), np.int64)
