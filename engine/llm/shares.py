"""Shares of callers in an LLM engine: places in rounds, pages, and the order of prompts.

Each caller has a counter of the tokens that rounds computed for it while others were there; a caller that arrives
starts at the least counter of those present, so that absence saves no credit. Prompts of the caller with the least
counter are computed first (Virtual Token Counter: Sheng et al., Fairness in Serving Large Language Models, OSDI 2024,
which is start-time fair queuing for costs that are known only afterwards). Pure; no cost while there is one caller.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence as SequenceOf

from weftline.engine.llm.sequence import Sequence


class CallerShares:
    """Callers with sequences in the engine, and what they used."""

    def __init__(self) -> None:
        self.contended = False  # whether there are several callers; no property: it is read for each chunk
        self._live: Counter[str] = Counter()
        self._used: dict[str, int] = {}

    def enter(self, caller: str) -> None:
        """Count a sequence of a caller."""
        if caller not in self._live:
            self._used[caller] = min(self._used.values(), default=0)
        self._live[caller] += 1
        self.contended = len(self._live) > 1

    def exit(self, caller: str) -> None:
        """Undo `enter`."""
        self._live[caller] -= 1
        if not self._live[caller]:
            del self._live[caller], self._used[caller]
            self.contended = len(self._live) > 1

    def charge(self, caller: str, tokens: int) -> None:
        """Count computed tokens."""
        self._used[caller] += tokens

    def order(self, sequence: Sequence) -> tuple[int, tuple[float, int]]:
        """Return the order of prompts: by the caller's counter, then by rank."""
        return self._used[sequence.caller], sequence.rank

    def share(self, places: int) -> int:
        """Return an equal share of `places`, at least 1."""
        return max(1, places // len(self._live))

    def choose(
        self, running: SequenceOf[Sequence], waiting: SequenceOf[Sequence], places: int
    ) -> tuple[list[Sequence], list[Sequence]]:
        """Divide running sequences into those of the next round and those that sit it out, each best rank first.

        running, waiting: best rank first. A caller below its share of places has one for each waiting sequence.
        """
        if len(running) + len(waiting) <= places:
            return list(running), []
        share, taken = self.share(places), Counter[str]()
        beyond: list[Sequence] = []
        for sequence in (*running, *waiting):
            taken[sequence.caller] += 1
            if taken[sequence.caller] > share:
                beyond.append(sequence)
        spare = max(0, places - (len(running) + len(waiting) - len(beyond)))
        out = {id(sequence) for sequence in beyond[spare:]}
        return [one for one in running if id(one) not in out], [one for one in running if id(one) in out]

    def occupied(self, caller: str, active: SequenceOf[Sequence], places: int) -> int:
        """Return the places that are not to be had for a further sequence of `caller`.

        Below its share, what other callers occupy beyond theirs does not count: rounds leave such sequences out.
        """
        counts, share = Counter(one.caller for one in active), self.share(places)
        if counts[caller] >= share:
            return len(active)
        return sum(count if name == caller else min(count, share) for name, count in counts.items())

    def surplus(self, caller: str, running: SequenceOf[Sequence], places: int, pages: int) -> list[Sequence]:
        """Return sequences that other callers hold beyond their shares of places or pages, worst rank first.

        Empty when `caller` has its share already. A sequence that was preempted before is spared: it would not end.
        """
        counts, held = Counter[str](), Counter[str]()
        for one in running:
            counts[one.caller] += 1
            held[one.caller] += len(one.table.pages)
        places, pages = self.share(places), self.share(pages)
        if counts[caller] >= places or held[caller] >= pages:
            return []
        found = []
        for one in sorted(running, key=lambda one: one.rank, reverse=True):
            over = counts[one.caller] > places or held[one.caller] > pages
            if one.caller != caller and over and not one.preemptions:
                counts[one.caller] -= 1
                held[one.caller] -= len(one.table.pages)
                found.append(one)
        return found
