"""Incremental rule matching over streamed text.

A place is *settled* when no text that follows can change what the rules find from there on: enough of it is there for
every rule (its `reach`), or the run of characters that it stands in has ended. Hits that start before it are those that
`find` has for the whole text, whatever the text was cut into.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

from weftline.nodes.rules import Hit, Rule, fold


class RuleScan:
    """The hits of `rules` in a growing text, and up to where they are settled. Places are those of the folded text."""

    def __init__(self, rules: Sequence[Rule]) -> None:
        self._rules = tuple(rules)
        self._from = [0] * len(self._rules)  # by rule: every match that starts before it has been reported
        self._folded = ""
        self._places: list[int] = []
        self._run = 0  # where the last run of ASCII characters without spaces begins
        self._length = 0
        self.settled = 0

    @property
    def length(self) -> int:
        """Length of the folded text in characters."""
        return len(self._folded)

    def place(self, at: int) -> int:
        """Return where a character of the folded text is in the text; its length for the end."""
        return self._places[at] if at < len(self._places) else self._length

    def index(self, place: int) -> int:
        """Return the first character of the folded text that is not before a place of the text."""
        return bisect_left(self._places, place)

    def add(self, text: str, whole: bool = False) -> list[tuple[int, Hit]]:
        """Append new text; return new, settled hits with their start in the folded text.

        whole: nothing follows, and everything is settled.
        """
        self._take(text)
        end = len(self._folded)
        found: list[tuple[int, Hit]] = []
        settled = end
        for index, rule in enumerate(self._rules):
            upto = end if whole else self._run if not rule.reach else max(0, end - rule.reach + 1)
            settled = min(settled, upto)
            at = self._from[index]
            if at >= upto:
                continue
            at = max(at, upto)
            for match in rule.pattern.finditer(self._folded, self._from[index]):
                start, stop = match.span()
                if start >= upto:
                    break
                at = max(at, stop)
                if stop > start and rule.holds(match.group()):
                    hit = Hit(rule.category, rule.name, self.place(start), self._places[stop - 1] + 1)
                    found.append((start, hit))
            self._from[index] = at
        self.settled = max(self.settled, settled)
        return sorted(found, key=lambda one: (one[0], -one[1].end))

    def _take(self, text: str) -> None:
        folded, places = fold(text)
        before = len(self._folded)
        self._folded += folded
        self._places += [self._length + place for place in places]
        self._length += len(text)
        for at in range(len(folded) - 1, -1, -1):
            if not folded[at].isascii() or folded[at].isspace():
                self._run = before + at + 1
                break
