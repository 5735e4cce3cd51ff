"""Arrival processes: open and closed loads, with seeded arrival times.

A closed load has N callers that each wait for their answer before the next request: it slows down with its target.
An open load has arrivals that do not depend on answers: either at random moments of an even rate
(Poisson), or in bursts.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

BURST_MS = 250.0
"""Mean duration of a burst."""

BURST_SHARE = 0.25
"""Share of the time that is inside bursts. All arrivals are, so that there the rate is four times the mean."""


@dataclass(frozen=True, slots=True)
class Closed:
    """N callers that each wait for their answer before the next request."""

    callers: int = 8

    def __str__(self) -> str:
        return f"closed, {self.callers} caller{'s' if self.callers != 1 else ''}"


@dataclass(frozen=True, slots=True)
class Open:
    """Arrivals at a mean rate, whatever becomes of those before.

    bursty: in bursts, four times the rate for a quarter of the time, instead of evenly at random.
    seed:   the same seed gives the same arrivals.
    """

    rate_per_s: float
    bursty: bool = False
    seed: int = 0

    def __str__(self) -> str:
        return f"open, {self.rate_per_s:g} requests/s, {'in bursts' if self.bursty else 'Poisson'}, seed {self.seed}"

    def arrivals(self, duration_s: float) -> Iterator[float]:
        """Yield arrival times in milliseconds from the start, rising, as long as they lie within the duration."""
        made = bursty if self.bursty else poisson
        return made(self.rate_per_s, duration_s, self.seed)


def poisson(rate_per_s: float, duration_s: float, seed: int) -> Iterator[float]:
    """Yield the times of a Poisson process, in milliseconds: gaps are exponential with mean 1 / rate."""
    draw = random.Random(seed)
    at_ms = 0.0
    while (at_ms := at_ms + draw.expovariate(rate_per_s) * 1000) < duration_s * 1000:
        yield at_ms


def bursty(rate_per_s: float, duration_s: float, seed: int) -> Iterator[float]:
    """Yield the times of a Poisson process that is switched on and off by a Markov chain, in milliseconds.

    Bursts and pauses last exponential times with means BURST_MS and BURST_MS * (1 / BURST_SHARE - 1); over a long time
    the rate is `rate_per_s`.
    """
    draw = random.Random(seed)
    pause_ms = BURST_MS * (1 / BURST_SHARE - 1)
    in_burst = draw.random() < BURST_SHARE
    start_ms, end_ms = 0.0, duration_s * 1000
    while start_ms < end_ms:
        stop_ms = start_ms + draw.expovariate(1 / (BURST_MS if in_burst else pause_ms))
        at_ms = start_ms
        while in_burst and (at_ms := at_ms + draw.expovariate(rate_per_s / BURST_SHARE) * 1000) < min(stop_ms, end_ms):
            yield at_ms
        start_ms, in_burst = stop_ms, not in_burst
