"""Arrival times: from a seed, rising, with the mean rate that was asked for, and as uneven as they should be."""

from collections.abc import Sequence
from itertools import pairwise
from statistics import fmean, pvariance

import pytest

from weftline.engine.bench.arrivals import Closed, Open


def in_windows(arrivals_ms: Sequence[float], window_ms: float, duration_s: float) -> list[int]:
    """Return how many arrivals lie in each window of the duration."""
    counts = [0] * int(duration_s * 1000 / window_ms)
    for at_ms in arrivals_ms:
        counts[int(at_ms / window_ms)] += 1
    return counts


@pytest.mark.parametrize("bursty", [False, True])
def test_a_seed_determines_rising_arrivals_within_the_duration(bursty: bool) -> None:
    arrivals = list(Open(50, bursty, seed=3).arrivals(20))
    assert arrivals == list(Open(50, bursty, seed=3).arrivals(20))
    assert arrivals != list(Open(50, bursty, seed=4).arrivals(20))
    assert arrivals == sorted(arrivals)
    assert arrivals[0] > 0 and arrivals[-1] < 20_000


@pytest.mark.parametrize("bursty", [False, True])
def test_the_mean_rate_is_the_one_asked_for(bursty: bool) -> None:
    counts = [sum(1 for _ in Open(100, bursty, seed).arrivals(100)) for seed in range(30)]
    assert fmean(counts) == pytest.approx(10_000, rel=0.05)


def test_gaps_of_a_poisson_load_are_exponential() -> None:
    arrivals = list(Open(100).arrivals(500))
    gaps = [after - before for before, after in pairwise(arrivals)]
    assert pvariance(gaps) ** 0.5 == pytest.approx(fmean(gaps), rel=0.05)


def test_a_bursty_load_is_far_less_even_than_a_poisson_load() -> None:
    def spread(bursty: bool) -> float:
        counts = in_windows(list(Open(100, bursty).arrivals(200)), 250, 200)
        return pvariance(counts) / fmean(counts)

    assert spread(False) == pytest.approx(1, rel=0.3)
    assert spread(True) > 10


def test_loads_say_what_they_are() -> None:
    assert str(Closed(1)) == "closed, 1 caller"
    assert str(Closed()) == "closed, 8 callers"
    assert str(Open(2.5)) == "open, 2.5 requests/s, Poisson, seed 0"
    assert str(Open(100, bursty=True, seed=7)) == "open, 100 requests/s, in bursts, seed 7"
