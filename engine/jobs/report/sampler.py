"""Selection of sample rows for the report: first rows, first failures and a spread.

What is kept depends on the rows' places and the seed alone, not on the order in which they are offered: each place has
a number drawn from the seed, and of the rows at large those with the smallest numbers stay (bottom-k sampling, which
is reservoir sampling without an order). What is kept is made small at once, so that memory is bounded by
`most` and not by the pictures in the data set.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from weftline.engine.jobs.progress import Sample
from weftline.engine.jobs.report.samples import small

MOST = 24
SHARES = 3
"""The first rows, the failed rows and the rows at large have a third each; what is not used is for rows at large."""

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def drawn(seed: int, places: np.ndarray) -> np.ndarray:
    """Return a number for each place, uint64[places]: splitmix64 (Steele, Lea and Flood, 2014) of seed and place."""
    with np.errstate(over="ignore"):
        z = (places.astype(np.uint64) + np.uint64(1)) * _GOLDEN + np.uint64(seed % (1 << 64))
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return z ^ (z >> np.uint64(31))


class _Lowest:
    """The samples with the lowest numbers, at most so many."""

    def __init__(self, most: int) -> None:
        self._most = most
        self.kept: dict[int, tuple[int, Sample]] = {}  # (number, sample) by place
        self._highest = -1  # the place that leaves next, when it is full

    @property
    def bound(self) -> int:
        """Numbers below this one are kept."""
        if len(self.kept) < self._most:
            return (1 << 64) - 1
        return self.kept[self._highest][0] if self.kept else 0

    def takes(self, number: int) -> bool:
        return number < self.bound

    def put(self, place: int, number: int, sample: Sample) -> None:
        if place not in self.kept and len(self.kept) >= self._most:
            del self.kept[self._highest]
        self.kept[place] = (number, sample)
        self._highest = max(self.kept, key=lambda one: self.kept[one][0])


class RowSampler:
    """Keeps rows. Not thread-safe."""

    def __init__(self, most: int = MOST, seed: int = 0) -> None:
        self._most, self._seed = most, seed
        self._first, self._failed = _Lowest(most // SHARES), _Lowest(most // SHARES)
        self._large = _Lowest(most)

    def offer(self, place: int, make: Callable[[], Sample], failed: bool = False) -> None:
        """Offer a row; `make` is called only when it is kept.

        failed: the row has an error.
        """
        if failed:
            wanted = [(self._failed, place)] if self._failed.takes(place) else []
        else:
            number = int(drawn(self._seed, np.array([place]))[0])
            pools = ((self._first, place), (self._large, number))
            wanted = [(pool, rank) for pool, rank in pools if pool.takes(rank)]
        if not wanted:
            return
        sample = small(make())
        for pool, rank in wanted:
            pool.put(place, rank, sample)

    def wanted(self, places: Sequence[int], failed: Sequence[bool] | None = None) -> list[int]:
        """Return which of these rows, by their number in `places`, are worth an offer: few of a block, and quickly.

        Offering them in this order leaves what offering all of them leaves.
        """
        at = np.fromiter(places, np.int64, len(places))
        bad = np.zeros(len(at), bool) if failed is None else np.fromiter(failed, bool, len(at))
        good = (drawn(self._seed, at) < _as_bound(self._large)) | (at.astype(np.uint64) < _as_bound(self._first))
        keep = np.where(bad, at.astype(np.uint64) < _as_bound(self._failed), good)
        return [int(row) for row in np.flatnonzero(keep)]

    def samples(self) -> list[Sample]:
        """Return what is kept, in the order of the rows."""
        chosen = {place: sample for pool in (self._first, self._failed) for place, (_, sample) in pool.kept.items()}
        for place, (_, sample) in sorted(self._large.kept.items(), key=lambda item: item[1][0]):
            if len(chosen) >= self._most:
                break
            chosen.setdefault(place, sample)
        return [chosen[place] for place in sorted(chosen)]


def _as_bound(pool: _Lowest) -> np.uint64:
    return np.uint64(pool.bound)
