"""Token counts of a sequence for penalties, updated incrementally.

Counting a long text anew in each round would cost more than the model's own arithmetic on a CPU. A `History` counts
what is new. When a sequence comes with another list of tokens, which differs from what was counted (a draft model's
guesses were wrong), they are counted again. Guesses are counted on top, and not kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

Ints = np.ndarray[Any, np.dtype[np.int64]]


class History:
    """The different tokens of one sequence, and how often each is in the answer."""

    def __init__(self) -> None:
        self._tokens: list[int] = []
        self._prompt = self._start = self._counted = 0
        self._place: dict[int, int] = {}
        self._ids: Ints = np.empty(16, np.int64)
        self._times: Ints = np.empty(16, np.int64)

    def count(
        self, tokens: list[int], prompt: int, draft: Sequence[int] = (), from_prompt: bool = True
    ) -> tuple[Ints, Ints]:
        """Return the different tokens, and how often each is in the answer; for reading only, until the next call.

        tokens: all known ones, the first `prompt` of which are the prompt's.   draft: guesses, counted as answer.
        from_prompt: whether tokens that stand in the prompt alone are among them, with 0 times.
        """
        self._follow(tokens, prompt, 0 if from_prompt else prompt)
        for at in range(self._counted, len(tokens)):
            self._add(tokens[at], int(at >= prompt))
        self._counted = len(tokens)
        size = len(self._place)
        ids, times = self._ids[:size], self._times[:size]
        return _with_draft(ids, times, self._place, draft) if draft else (ids, times)

    def _follow(self, tokens: list[int], prompt: int, start: int) -> None:
        """Begin anew unless `tokens` go on where the counted ones end; comparing runs at the speed of C."""
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


def _with_draft(ids: Ints, times: Ints, place: dict[int, int], draft: Sequence[int]) -> tuple[Ints, Ints]:
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
