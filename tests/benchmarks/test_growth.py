"""What the soak takes for growth, on samples made up for it."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from benchmarks.growth import LEVELS, WINDOWS, Bar, Flatness, flatness, growth
from benchmarks.soak import BARS, verdict

BAR = Bar(an_hour=1e6, floor=6e6, unit="MB", divisor=1e6)
DAY_S, MINUTE_S = 86_400.0, 60.0


def samples(seconds: float, an_hour: float, noise: float = 3e6, seed: int = 1) -> list[tuple[float, float]]:
    """Return memory that fills up at first, is always a little and sometimes much higher than its least, and grows."""
    draws = random.Random(seed)
    made = []
    for place in range(600):
        at_s = seconds * place / 600
        warm = 40e6 * min(1.0, at_s / (0.2 * seconds))
        spike = 80e6 if draws.random() < 0.1 else 0.0
        made.append((at_s, 100e6 + warm + spike + draws.random() * noise + an_hour * at_s / 3600))
    return made


@pytest.mark.parametrize("seed", range(20))
def test_a_day_without_growth_is_flat_and_two_megabytes_an_hour_are_found(seed: int) -> None:
    assert not growth("memory", BAR, samples(DAY_S, 0.0, seed=seed)).found
    grown = growth("memory", BAR, samples(DAY_S, 2e6, seed=seed))
    assert grown.found and grown.an_hour == pytest.approx(2e6, rel=0.1)


def test_a_minute_finds_what_a_minute_can_show() -> None:
    assert not growth("memory", BAR, samples(MINUTE_S, 100e6)).found, "1.3 MB cannot be distinguished from noise"
    assert growth("memory", BAR, samples(MINUTE_S, 1e9)).found


def test_what_fills_up_and_stays_is_no_growth() -> None:
    steps = [(float(at), 100e6 if at < 20 else 150e6) for at in range(100)]
    assert not growth("memory", BAR, steps).found


def test_what_is_used_and_given_back_ever_more_is_no_growth() -> None:
    peaks = [(float(at), 100e6 + (at * 1e6 if at % 3 else 0)) for at in range(200)]
    assert not growth("memory", BAR, peaks).found


def test_what_shrinks_does_not_grow() -> None:
    assert not growth("memory", BAR, samples(DAY_S, -5e6)).found


def test_too_few_samples_are_refused() -> None:
    with pytest.raises(ValueError, match=f"expected {2 * WINDOWS}"):
        growth("memory", BAR, samples(MINUTE_S, 0.0)[:40])


def test_a_level_is_flat_although_workers_restart_and_requests_take_memory() -> None:
    dips = [(float(at), 1000e6 - (200e6 if at % 5 == 0 else 0) + (90e6 if at % 7 == 0 else 0)) for at in range(600)]
    assert flatness(dips, 120.0).share == 0.0


def test_a_level_that_moved_is_found_and_the_warm_up_counts_for_nothing() -> None:
    moved = [(float(at), 500e6 if at < 120 else 1000e6 if at < 400 else 1060e6) for at in range(600)]
    assert flatness(moved, 120.0) == Flatness(1000e6, 1000e6, 1060e6)
    assert flatness(moved, 120.0).share == pytest.approx(0.06)
    assert flatness(moved[:400], 120.0).share == 0.0


def test_a_level_of_too_few_samples_is_refused() -> None:
    with pytest.raises(ValueError, match=f"10 samples after 90 s, expected {2 * LEVELS}"):
        flatness([(float(at), 1.0) for at in range(100)], 90.0)


def test_a_verdict_names_what_grew_what_was_not_found_and_what_went_wrong() -> None:
    flat = [growth(name, bar, [(float(at), 1.0) for at in range(100)]) for name, bar in BARS.items()]
    grown = growth("memory", BARS["memory"], samples(DAY_S, 5e6))
    fine = Counter({"answered": 9, "WorkerDied": 1})
    assert verdict(flat, fine, "", "") == []
    assert verdict([grown, *flat[1:]], fine, "", "") == ["memory grows"]
    assert verdict([grown, *flat[1:]], fine, "", "memory") == []
    assert verdict(flat, fine, "", "memory") == ["the leak that was planted, memory, was not found"]
    assert verdict(flat, fine, "9 bytes leased", "") == ["left at the end: 9 bytes leased"]
    assert verdict(flat, fine, "9 bytes leased", "leases") == []
    assert verdict(flat, fine, "", "leases") == ["the leak that was planted, leases, was not found"]
    assert verdict(flat, fine, "", "", Flatness(100.0, 96.0, 101.0)) == []
    assert verdict(flat, fine, "", "", Flatness(100.0, 94.0, 101.0)) == [
        "the memory of all processes is not flat within 5%"
    ]
    assert verdict(flat, fine + Counter({"wrong answer": 1}), "", "") == ["1 requests ended with wrong answer"]
    assert verdict(flat, Counter({"StepError": 2}), "1 requests open", "") == [
        "2 requests ended with StepError",
        "nothing was answered",
        "left at the end: 1 requests open",
    ]
