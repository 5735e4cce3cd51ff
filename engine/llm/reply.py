"""Incremental answer of one sequence: text and finish condition.

A round brings a sequence some tokens, several when guesses were right. A `Reply` takes them one by one, says which is
the last and why, and turns them into text. Text can be made later than tokens are taken, since only stop strings need
it at once.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

from weftline.engine.llm.sequence import Sequence
from weftline.engine.llm.stream import TextStream


@dataclass(frozen=True, slots=True)
class TokenInfo:
    """A token with its log-probability before any sampling option, and the likeliest ones at its place."""

    token: int
    logprob: float | None
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Taken:
    """What a reply took: tokens up to the last one that counts, their text, and why the answer has ended, if it has."""

    tokens: tuple[int, ...]
    text: str
    finish: str | None


class Reply:
    """Takes the tokens of `sequence`. text: makes text of them, and looks for stop strings; None: tokens only.

    ends: the model's end-of-text tokens.
    """

    def __init__(self, sequence: Sequence, ends: frozenset[int], text: TextStream | None, echo: str = "") -> None:
        params = sequence.params
        self._stops = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else ends)
        self._text = text
        self._echo = echo
        self._known = len(sequence.tokens)
        self._limit = sequence.limit

    def take_one(self, token: int) -> tuple[str, str | None]:
        """Take one token, as nearly all rounds bring it; return its text, and why the answer has ended, if it has."""
        if self._echo or token in self._stops:
            taken = self.take((token,))
            return taken.text, taken.finish
        self._known += 1
        finish = "length" if self._known >= self._limit else None
        stream = self._text
        if stream is None:
            return "", finish
        text = stream.push(token)
        if stream.stopped:
            return text, "stop"
        if finish is not None:
            text += stream.finish()  # what was held back may complete a stop text
            finish = "stop" if stream.stopped else finish
        return text, finish

    def take(self, tokens: SequenceOf[int], complete: bool = False) -> Taken:
        """Take the tokens that come next; complete: a constraint allows nothing after the last of them."""
        text, self._echo = self._echo, ""
        taken: list[int] = []
        for token in tokens:
            taken.append(token)
            self._known += 1
            ended = token in self._stops
            last = complete and len(taken) == len(tokens)
            finish = "stop" if ended or last else "length" if self._known >= self._limit else None
            if self._text is not None:
                text += "" if ended else self._text.push(token)
                if finish is not None and not self._text.stopped:
                    text += self._text.finish()
                finish = "stop" if self._text.stopped else finish
            if finish is not None:
                return Taken(tuple(taken), text, finish)
        return Taken(tuple(taken), text, None)
