"""Histogram with fixed bucket bounds."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field
from itertools import accumulate


@dataclass(slots=True)
class Histogram:
    """bounds: rising; a value belongs to the first that is not below it, or lies above them all."""

    bounds: tuple[float, ...]
    sum: float = 0.0
    counts: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        if not self.counts:
            self.counts = [0] * (len(self.bounds) + 1)

    def add(self, value: float, times: int = 1) -> None:
        """Record a value `times` times."""
        self.counts[bisect_left(self.bounds, value)] += times
        self.sum += value * times

    @property
    def count(self) -> int:
        return sum(self.counts)

    @property
    def cumulative(self) -> list[int]:
        """For each bound how many values were at most that, and last how many there were at all."""
        return list(accumulate(self.counts))

    def copy(self) -> Histogram:
        return Histogram(self.bounds, self.sum, self.counts.copy())
