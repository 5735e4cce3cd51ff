"""N-gram speculation: next tokens proposed from earlier text.

Answers repeat what was said before: names, code, quoted passages. `propose` looks for the last few tokens earlier in
the sequence and offers what followed them there (prompt lookup, Saxena 2023). `GuessLength` keeps the number of guesses
where they pay: a wrong guess costs a row of the next round.

Guesses change no answer: the model's own choice at each place is what counts, and a guess is kept where it is equal.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

MATCH_MAX = 4
"""Longest ending that is looked for; longer ones are found by their last tokens as well."""
MATCH_MIN = 2
"""Shortest ending that is looked for: a single token says little."""
LOOKBACK_TOKENS = 8192
"""How far back it is looked for, so that a long prompt does not make rounds slow."""


class Lookup:
    """An index of where the endings of one sequence stood; it grows with the sequence."""

    def __init__(self) -> None:
        self._seen: dict[tuple[int, ...], int] = {}
        self._indexed = 0

    def propose(self, tokens: SequenceOf[int], count: int) -> tuple[int, ...]:
        """Return up to `count` tokens that followed the longest ending of `tokens` where it stood last before."""
        self._index(tokens)
        for size in range(MATCH_MAX, MATCH_MIN - 1, -1):
            if len(tokens) <= size:
                continue
            after = self._seen.get(tuple(tokens[-size:]))
            if after is not None:
                return tuple(tokens[after : after + count])
        return ()

    def _index(self, tokens: SequenceOf[int]) -> None:
        """Note every ending but the very last: what follows it is known."""
        first = max(self._indexed, len(tokens) - LOOKBACK_TOKENS, MATCH_MIN)
        for end in range(first, len(tokens)):
            for size in range(MATCH_MIN, MATCH_MAX + 1):
                if end >= size:
                    self._seen[tuple(tokens[end - size : end])] = end
        self._indexed = len(tokens)


@dataclass(slots=True)
class GuessLength:
    """How many tokens to guess next: twice as many after all were right, half after none was, none for a while.

    most: never more than this.
    """

    most: int
    now: int = 2
    _rest: int = 0

    def ask(self) -> int:
        """Return how many to guess; 0 lets rounds pass after guesses that were wrong again and again."""
        if self._rest:
            self._rest -= 1
            return 0
        return min(self.now, self.most)

    def learn(self, guessed: int, right: int) -> None:
        if right == guessed:
            self.now = min(self.most, max(self.now * 2, 1))
        elif right == 0:
            if self.now <= 1:
                self._rest = 8
            self.now = max(1, self.now // 2)
        else:
            self.now = max(1, right + 1)
