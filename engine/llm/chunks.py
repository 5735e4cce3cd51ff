"""How many tokens of prompts a round may have, as want of memory taught.

What a round takes of the device beside weights and pages grows with its tokens, and those of prompts are nearly all of
them: a sequence that decodes adds one. A round for which there was no memory halves the limit, down to one page; after
CALM_ROUNDS rounds as large as the limit, all of which went well, it is doubled again, as batches of other steps are.
It decides, and is told what happened: pure.
"""

from __future__ import annotations

from dataclasses import dataclass, field

CALM_ROUNDS = 64
"""So many full rounds without a shortage, before twice as much is tried; as many as steps with batches wait for. A try
that fails costs one pass and loses no request."""


@dataclass(slots=True)
class ChunkLimit:
    """most: tokens of a round by the step's options. page_tokens: below a page nothing is halved.

    tokens: most prompt tokens of a round for now.
    short:  how often there was no memory for a pass.
    """

    most: int
    page_tokens: int
    tokens: int = field(init=False)
    short: int = field(default=0, init=False)
    _calm: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        self.tokens = self.most

    def fell_short(self, tokens: int) -> bool:
        """There was no memory for a pass with so many prompt tokens. Whether rounds are smaller from now on."""
        self.short += 1
        self._calm = 0
        smaller = min(self.tokens, self.half(min(tokens, self.tokens)) or self.tokens)
        changed, self.tokens = smaller != self.tokens, smaller
        return changed

    def went_well(self, tokens: int) -> bool:
        """A round with so many prompt tokens was computed. Whether rounds may be larger from now on."""
        if self.tokens == self.most or tokens < self.tokens:
            return False
        self._calm += 1
        if self._calm < CALM_ROUNDS:
            return False
        self._calm = 0
        self.tokens = min(self.most, 2 * self.tokens)
        return True

    def half(self, tokens: int) -> int:
        """Return half of a chunk in whole pages, at least one; 0 when it is no more than a page."""
        if tokens <= self.page_tokens:
            return 0
        return max(1, tokens // 2 // self.page_tokens) * self.page_tokens
