"""Retry policy after a replica's death: bisection of the block down to single rows; pure.

    in company --died--> alone, whole --died--> PIECES pieces --died--> their pieces ... --> a row, ROW_DEATHS_MAX times

Several blocks are answered beside each other in a replica, and a death accuses all of them. So from the second attempt
on a block is answered with nothing beside it, and a span of rows is only divided, or a row given up, for a death that
nothing else can have caused. Pure: who dies and when is told from outside.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

PIECES = 8
"""A span that killed its replica is divided into so many: finding one row of 1 000 takes four more deaths, not ten."""

ROW_DEATHS_MAX = 2
"""A row that ended so many replicas, alone, is an error. More than one, because machines are taken away, too."""

Span = tuple[int, int]
"""Rows of a block from the first number up to, not including, the second."""


@dataclass(frozen=True, slots=True)
class Attempt:
    """What to do now.

    alone: answer nothing beside it in the same process, and tell of each span before it is tried.
    spans: what to answer, in this order; those that are suspected come first.
    lost:  rows that are given up.
    """

    alone: bool
    spans: Sequence[Span]
    lost: Sequence[int]


class Trials:
    """The attempts at one block. `begin` for each of them, `trying` before each span, `end` when it is answered."""

    def __init__(self, rows: int) -> None:
        self._spans: list[Span] = [(0, rows)]
        self._lost: list[int] = []
        self._deaths: dict[int, int] = {}
        self._trying: Span | None = None
        self._attempts = 0

    def begin(self) -> Attempt:
        """Return what to do in a new attempt; that there is one says that the one before has died, unless it ended."""
        if self._trying is not None:
            self._blame(self._trying)
        self._trying = None
        self._attempts += 1
        return Attempt(self._attempts > 1, tuple(self._spans), tuple(sorted(self._lost)))

    def trying(self, span: Span) -> None:
        """Note that a span is about to be answered alone; the one before it has not killed anybody."""
        if self._trying is not None:
            self._spans.remove(self._trying)
            self._spans.append(self._trying)
        self._trying = span

    def end(self) -> None:
        """Note that all was answered; another attempt then means that the answer was lost on its way."""
        self._trying = None

    def _blame(self, span: Span) -> None:
        start, stop = span
        if stop - start > 1:
            self._spans.remove(span)
            self._spans[:0] = divided(span, PIECES)
            return
        self._deaths[start] = self._deaths.get(start, 0) + 1
        if self._deaths[start] >= ROW_DEATHS_MAX:
            self._spans.remove(span)
            self._lost.append(start)


def divided(span: Span, pieces: int) -> list[Span]:
    """Return a span as at most so many spans of about the same length, none of them empty."""
    start, stop = span
    pieces = min(pieces, stop - start)
    edges = [start + (stop - start) * place // pieces for place in range(pieces + 1)]
    return list(itertools.pairwise(edges))
