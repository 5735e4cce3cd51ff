"""Latency model of a step: the expected time of a call by its number of items, learned online.

The model keeps a moving average for each batch size seen; neighbouring sizes share one. Between sizes it interpolates,
and beyond them it extrapolates along the non-negative line `fixed_ms + item_ms * items` of best fit. A single outlier
barely changes it; a lasting change is followed within about ten calls. After FRESH_MS without a call all averages are
only seeds, which the next calls replace: what a step took before may no longer be true. Times are in milliseconds and
are arguments.

A deployment has a model of all its calls, by which batches close. Where several steps use it, each has one of the calls
with items of its own, by which its requests are estimated and refused.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

FRESH_MS = 10_000.0
"""Age at which measurements expire: no work is refused because of older ones."""

CUT_FRESH_MS = 1_000.0
"""The same for a streaming step of which no answer has ended within its timeout: the next one may be shorter."""

SAMPLES_MIN = 3
"""Calls measured before work is refused because of them; the first calls are often slow."""

SHARE = 0.3
"""Weight of a new call in the moving average: after ten calls 97 % is new."""

ALONE_MAX = 1.5
"""A call that took more than twice as long as expected, with none like it just before, counts as at most 1.5 times."""

CLIP = 4.0
"""Calls in a row that are far off count as at most 4 times, and at least a quarter of, what was expected."""

FADE_CALLS = 4.0
"""Calls of other sizes after which the average of a size counts half when averages contradict each other."""

SPREAD_SHARE = 0.2
"""Weight of a new call in the spread."""

SHORT_SHARE = 0.05
"""Weight of a longer call in the time of the shortest ones, so that an old minimum decays slowly."""

SPREADS = 3.0
"""A likely time is this many mean deviations above the mean: about one call in a hundred takes longer."""

SEED_WEIGHT = 1e-6
"""Weight of a seed: any measurement outweighs it."""


@dataclass(slots=True)
class _Seen:
    """The calls of about one size: moving averages of their items and times, how many, and the number of the last."""

    items: float
    run_ms: float
    calls: int = 0
    last: int = 0
    slow: bool = False


@dataclass(slots=True)
class Spread:
    """Deviation of calls from their expected time: moving averages of actual over expected time.

    mean, deviation: of the ratio; a call counts as at most ALONE_MAX times the mean.
    """

    mean: float = 1.0
    deviation: float = 0.0

    def learn(self, ratio: float) -> None:
        """Add one call."""
        off = min(ratio, ALONE_MAX * self.mean) - self.mean
        self.mean += SPREAD_SHARE * off
        self.deviation += SPREAD_SHARE * (abs(off) - self.deviation)

    @property
    def likely(self) -> float:
        """The ratio that few calls exceed."""
        return self.mean + SPREADS * self.deviation


class Latency:
    """The learned run time of one step. The cost of a query does not grow with the calls seen.

    recent_ms: moving average of the calls seen, at the sizes they had; 0.0 is unknown.
    samples:   number of calls measured, without seeds.
    spread:    how far calls are from their expected time; learned by `learn_spread` only.
    """

    def __init__(self) -> None:
        self.recent_ms = 0.0
        self.samples = 0
        self.spread = Spread()
        self._shortest_ms = 0.0  # of a single item; 0.0 is unknown
        self._lately = 0  # calls since the last one that came after FRESH_MS without any
        self._learned_at_ms = -math.inf
        self._seen: dict[int, _Seen] = {}
        self._sizes: list[float] = []
        self._times: list[float] = []
        self._line = (0.0, 0.0)
        self._answers: dict[int, float] = {}
        self._fitted = True

    def learn(self, items: int, run_ms: float, now_ms: float) -> None:
        """Add one measured call: its number of items and its duration."""
        if items < 1 or not 0.0 <= run_ms < math.inf:
            return
        if now_ms - self._learned_at_ms > FRESH_MS:
            self._expire()
        bucket = _bucket(items)
        seen = self._seen.get(bucket)
        if seen is None or not seen.calls:
            taken = min(run_ms, self._most_ms(items))
            seen = self._seen[bucket] = _Seen(items, taken)
        elif seen.calls < SAMPLES_MIN:
            taken = run_ms
            seen.items, seen.run_ms = items, min(run_ms, seen.run_ms)
        else:
            taken = _clipped(run_ms, seen)
            seen.items += SHARE * (items - seen.items)
            seen.run_ms += SHARE * (taken - seen.run_ms)
        self.samples += 1
        self._lately += 1
        seen.calls += 1
        seen.last = self.samples
        self.recent_ms = self.recent_ms + SHARE * (taken - self.recent_ms) if self._lately > 1 else taken
        self._learned_at_ms = now_ms
        self._fitted = False

    def learn_spread(self, items: int, took_ms: float, now_ms: float) -> None:
        """Compare a call with what is expected of it. Call it before `learn`.

        took_ms: from when it was sent to when its result was back.
        """
        expected = self.run_ms(items)
        if took_ms <= 0.0:
            return
        if expected and self.fresh(now_ms):
            self.spread.learn(took_ms / expected)
        self._learn_shortest(took_ms * self.run_ms(1) / expected if expected else took_ms)

    def seed(self, items: int, run_ms: float) -> None:
        """Add an estimate, such as a warm-up's; measurements replace it, and it is never fresh."""
        seen = self._seen.get(_bucket(items))
        if items >= 1 and 0.0 < run_ms < math.inf and (seen is None or not seen.calls):
            self._seen[_bucket(items)] = _Seen(items, run_ms)
            self._fitted = False

    @property
    def items_max(self) -> int:
        """Size of the largest calls with a known time; 0 without any."""
        return round(max((seen.items for seen in self._seen.values()), default=0.0))

    def run_ms(self, items: int) -> float:
        """Return the expected time of a call with `items`, rising with items; 0.0 when unknown."""
        if not self._fitted:
            self._fit()
        known = self._answers.get(items)
        if known is None:
            known = self._answers[items] = self._read(items)
        return known

    def fresh(self, now_ms: float) -> bool:
        """Return True if there are enough recent measurements to refuse work by."""
        return self._lately >= SAMPLES_MIN and now_ms - self._learned_at_ms <= FRESH_MS

    def took_ms(self, items: int) -> float:
        """Return the expected time of a call from being sent to the result: the run time if that was not learned."""
        return self.run_ms(items) * self.spread.mean

    def likely_ms(self, items: int) -> float:
        """Return a time that few calls with `items` exceed, from being sent to the result; 0.0 when unknown."""
        return self.run_ms(items) * max(self.spread.likely, 1.0)

    def shortest_ms(self, items: int) -> float:
        """Return the time of the shortest recent calls with `items`; 0.0 when unknown."""
        expected, of_one = self.run_ms(items), self.run_ms(1)
        return min(expected, self._shortest_ms * expected / of_one) if of_one else expected

    @property
    def fixed_ms(self) -> float:
        """The part of a call's time that every call takes."""
        self.run_ms(1)
        return self._line[0]

    @property
    def item_ms(self) -> float:
        """The part of a call's time that each item adds."""
        self.run_ms(1)
        return self._line[1]

    def _learn_shortest(self, run_ms: float) -> None:
        shortest = self._shortest_ms
        self._shortest_ms = min(run_ms, shortest + SHORT_SHARE * (run_ms - shortest)) if shortest else run_ms

    def _expire(self) -> None:
        """Make all averages seeds."""
        self._lately = 0
        self._shortest_ms = 0.0
        for seen in self._seen.values():
            seen.calls = 0

    def _most_ms(self, items: int) -> float:
        """Return the most that a first call of a new size counts: 4 times what the known sizes let expect."""
        if self._lately < SAMPLES_MIN:
            return math.inf
        expected = self.run_ms(items)
        below = bisect_left(self._sizes, items) - 1
        if below >= 0:
            expected = max(expected, self._times[below] * items / self._sizes[below])
        return CLIP * expected if expected else math.inf

    def _fit(self) -> None:
        """Put the averages in order of size, make them rise, and lay the line through them."""
        order = [self._seen[bucket] for bucket in sorted(self._seen)]
        learned = [seen for seen in order if seen.calls]
        weights = [
            0.5 ** ((self.samples - s.last) / FADE_CALLS) + SEED_WEIGHT if s.calls else SEED_WEIGHT for s in order
        ]
        times = [seen.run_ms if seen.calls else _capped(seen, learned) for seen in order]
        self._sizes = [seen.items for seen in order]
        self._times = _rising(times, weights)
        self._line = _line(self._sizes, self._times, weights)
        self._answers = {}
        self._fitted = True

    def _read(self, items: int) -> float:
        sizes, times = self._sizes, self._times
        if not sizes:
            return 0.0
        above = bisect_left(sizes, items)
        if above == len(sizes):
            return times[-1] + self._line[1] * (items - sizes[-1])
        if sizes[above] == items:
            return times[above]
        if above == 0:
            return max(0.0, times[0] - self._line[1] * (sizes[0] - items))
        share = (items - sizes[above - 1]) / (sizes[above] - sizes[above - 1])
        return times[above - 1] + share * (times[above] - times[above - 1])


class ShortestLatency(Latency):
    """The latency of a streaming step: that of its short answers, however many run.

    One answer is short and another long: what the short ones take is all that is certain. Of an answer that was cut
    short by its timeout it is only known that it takes longer.
    """

    def __init__(self) -> None:
        super().__init__()
        self._ended = False  # an answer, since the measurements expired

    def learn_cut(self, run_ms: float, now_ms: float) -> None:
        """Add an answer that was cut short after `run_ms`."""
        ended = self._ended and now_ms - self._learned_at_ms <= FRESH_MS
        self.learn(1, run_ms, now_ms)
        self._ended = ended

    def fresh(self, now_ms: float) -> bool:
        """Return True if there are enough recent measurements to refuse work by."""
        return super().fresh(now_ms) and (self._ended or now_ms - self._learned_at_ms <= CUT_FRESH_MS)

    def learn(self, items: int, run_ms: float, now_ms: float) -> None:
        if now_ms - self._learned_at_ms > FRESH_MS:
            self._expire()
        self.samples += 1
        self._lately += 1
        self._ended = True
        self._learned_at_ms = now_ms
        self._learn_shortest(run_ms)

    def learn_spread(self, items: int, took_ms: float, now_ms: float) -> None:
        """Learn nothing: the shortest calls have no spread."""

    def run_ms(self, items: int) -> float:
        return self._shortest_ms


class LeastLatency(Latency):
    """The latency of items of several steps: the least that one of them expects. Read only."""

    def __init__(self, of: Sequence[Latency]) -> None:
        super().__init__()
        self._of = of

    def fresh(self, now_ms: float) -> bool:
        """Return True if work of every step may be refused by recent measurements."""
        return all(one.fresh(now_ms) for one in self._of)

    def run_ms(self, items: int) -> float:
        return min(one.run_ms(items) for one in self._of)

    def likely_ms(self, items: int) -> float:
        return min(one.likely_ms(items) for one in self._of)

    def shortest_ms(self, items: int) -> float:
        return min(one.shortest_ms(items) for one in self._of)


def _bucket(items: int) -> int:
    """Return `items` down to its two highest bits: 1, 2, 3, 4, 6, 8, 12, 16, 24, ... share an average each."""
    shift = max(0, items.bit_length() - 2)
    return items >> shift << shift


def _clipped(run_ms: float, seen: _Seen) -> float:
    """Return what a call counts, remembering in `seen` whether it was slow."""
    slow = run_ms > 2 * seen.run_ms
    most = CLIP if seen.slow or not slow else ALONE_MAX
    seen.slow = slow
    return min(max(run_ms, seen.run_ms / CLIP), seen.run_ms * most) if seen.run_ms else run_ms


def _capped(seed: _Seen, learned: list[_Seen]) -> float:
    """Return a seed's time, at most what its items would take in calls of a smaller size that was learned."""
    return min([seed.run_ms, *(s.run_ms * seed.items / s.items for s in learned if s.items < seed.items)])


def _rising(times: list[float], weights: list[float]) -> list[float]:
    """Return the non-decreasing numbers nearest to `times`, by weighted squares (pool adjacent violators)."""
    pools: list[tuple[float, float, int]] = []  # (mean, weight, how many)
    for mean, weight in zip(times, weights):
        count = 1
        while pools and pools[-1][0] > mean:
            before, heavy, many = pools.pop()
            mean = (before * heavy + mean * weight) / (heavy + weight)
            weight, count = heavy + weight, count + many
        pools.append((mean, weight, count))
    return [mean for mean, _, count in pools for _ in range(count)]


def _line(sizes: list[float], times: list[float], weights: list[float]) -> tuple[float, float]:
    """Return (fixed_ms, item_ms), neither negative, of the line nearest to the points, by weighted squares."""
    total = sum(weights)
    if not total:
        return 0.0, 0.0
    mean_size = sum(w * x for w, x in zip(weights, sizes)) / total
    mean_time = sum(w * y for w, y in zip(weights, times)) / total
    spread = sum(w * (x - mean_size) ** 2 for w, x in zip(weights, sizes))
    if not spread:
        return mean_time, 0.0
    slope = sum(w * (x - mean_size) * (y - mean_time) for w, x, y in zip(weights, sizes, times)) / spread
    slope = max(0.0, slope)
    if mean_time - slope * mean_size >= 0:
        return mean_time - slope * mean_size, slope
    squares = sum(w * x * x for w, x in zip(weights, sizes))
    return 0.0, sum(w * x * y for w, x, y in zip(weights, sizes, times)) / squares
