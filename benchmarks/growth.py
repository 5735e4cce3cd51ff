"""Does something grow? What a soak has to decide from samples that jump. Pure.

Memory that is used and given back again makes a sample high, never low, so of each of WINDOWS equal parts of the time
only the least is looked at. Through these goes the line whose slope is the median of the slopes between all pairs
(Theil 1950, Sen 1968): a few odd windows do not bend it. The first quarter is warm-up and counts for nothing.

Whether a level is flat is another question: there the medians of LEVELS windows are compared.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

WARM_UP = 0.25
"""Share of the time in which caches fill and allocators find their size."""

WINDOWS = 16
LEVELS = 8
"""In how many windows a level is looked at; each has to have two samples."""


@dataclass(frozen=True, slots=True)
class Bar:
    """How much something may grow.

    an_hour: most that it may grow in an hour.
    floor:   growth over the whole time that is below what can be distinguished from noise.
    unit:    what is counted, and by how much to divide it for a reader.
    """

    an_hour: float
    floor: float
    unit: str
    divisor: float = 1.0


@dataclass(frozen=True, slots=True)
class Growth:
    """What became of one thing. `grown` and `seconds` are those after the warm-up."""

    name: str
    bar: Bar
    grown: float
    seconds: float

    @property
    def an_hour(self) -> float:
        return self.grown / self.seconds * 3600

    @property
    def found(self) -> bool:
        """Whether it grows."""
        return self.grown > self.bar.floor and self.an_hour > self.bar.an_hour

    def __str__(self) -> str:
        least = max(self.bar.floor / self.seconds * 3600, self.bar.an_hour) / self.bar.divisor
        return (
            f"{self.name:22} {self.grown / self.bar.divisor:+10.2f} {self.bar.unit}"
            f"   {self.an_hour / self.bar.divisor:+10.2f} an hour   {'GROWS' if self.found else 'flat'}"
            f" (from {least:.2f} an hour on it would be seen)"
        )


def growth(name: str, bar: Bar, samples: Sequence[tuple[float, float]]) -> Growth:
    """Return how something grew; `samples` are (seconds, value) in order, at least two for each window."""
    first_s, last_s = samples[0][0], samples[-1][0]
    begin_s = first_s + WARM_UP * (last_s - first_s)
    kept = [one for one in samples if one[0] >= begin_s]
    if len(kept) < 2 * WINDOWS:
        raise ValueError(f"{name}: {len(kept)} samples after the warm-up, expected {2 * WINDOWS}: run it for longer")
    wide_s = (last_s - begin_s) / WINDOWS
    windows: dict[int, list[tuple[float, float]]] = {}
    for at_s, value in kept:
        windows.setdefault(min(int((at_s - begin_s) / wide_s), WINDOWS - 1), []).append((at_s, value))
    least = [min(window, key=lambda one: one[1]) for window in windows.values()]
    slopes = [(b[1] - a[1]) / (b[0] - a[0]) for a, b in itertools.combinations(least, 2)]
    return Growth(name, bar, statistics.median(slopes) * (last_s - begin_s), last_s - begin_s)


@dataclass(frozen=True, slots=True)
class Flatness:
    """How much the level of something differed: the least and the greatest median of its windows."""

    first: float
    least: float
    most: float

    @property
    def share(self) -> float:
        """Return the difference as a share of the first window."""
        return (self.most - self.least) / self.first

    def __str__(self) -> str:
        return f"{self.least / 1e6:.0f} to {self.most / 1e6:.0f} MB, which differ by {self.share:.1%}"


def flatness(samples: Sequence[tuple[float, float]], after_s: float) -> Flatness:
    """Return how far the level moved from `after_s` on; `samples` are (seconds, value) in order.

    A window's level is its median: single requests in flight and workers that restart do not move it.
    """
    kept = [one for one in samples if one[0] >= after_s]
    if len(kept) < 2 * LEVELS:
        raise ValueError(f"{len(kept)} samples after {after_s:.0f} s, expected {2 * LEVELS}: run it for longer")
    begin_s, wide_s = kept[0][0], (kept[-1][0] - kept[0][0]) / LEVELS
    windows: dict[int, list[float]] = {}
    for at_s, value in kept:
        windows.setdefault(min(int((at_s - begin_s) / wide_s), LEVELS - 1), []).append(value)
    levels = [statistics.median(window) for window in windows.values()]
    return Flatness(levels[0], min(levels), max(levels))
