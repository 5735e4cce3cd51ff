"""Congestion window of a remote runner: limits the rows in flight, adapted to refusals.

The rule is that of congestion windows (RFC 5681): the window grows by one with each answer until the first refusal,
then by one with each windowful of answers; a refusal halves it, once for all rows that were under way together. Pure.
"""

from __future__ import annotations

from dataclasses import dataclass

START, MOST = 8, 128
"""Rows under way at first, and at most unless somebody says more: half of what `limits.requests_max` is when nobody
sets it, for usual requests need room too."""


@dataclass(slots=True)
class Window:
    """Counts what is under way.

    most:  largest size.
    fixed: the size never changes.
    """

    size: float = START
    most: int = MOST
    fixed: bool = False
    open: int = 0
    _sent: int = 0
    _cut: int = 0  # rows with a lower number were under way when the window was halved
    _calm: bool = True  # nothing was refused yet

    @property
    def full(self) -> bool:
        """Whether no row may be sent now."""
        return self.open >= int(self.size)

    def send(self) -> int:
        """Count a row out and return its number, which says what was under way together."""
        self.open += 1
        self._sent += 1
        return self._sent

    def back(self, answered: bool) -> None:
        """Count a row in. One that was answered while the window was full makes room for more."""
        grows = answered and self.full and not self.fixed
        self.open -= 1
        if grows:
            self.size = min(float(self.most), self.size + (1.0 if self._calm else 1.0 / self.size))

    def refuse(self, number: int) -> None:
        """Halve the window because the row of that number was refused, if it was sent since it was halved last."""
        if self.fixed or number <= self._cut:
            return
        self.size, self._calm, self._cut = max(1.0, self.size / 2), False, self._sent

    def begin_again(self) -> None:
        """Forget what was learnt: the server is another one now."""
        if not self.fixed:
            self.size, self._calm, self._cut = float(min(START, self.most)), True, self._sent
