"""Which rows are kept for the report."""

import random
from collections.abc import Sequence

import numpy as np
import pytest

from weftline.engine.jobs.progress import Sample
from weftline.engine.jobs.report.samples import RowSampler, SampleValue


def offered(order: Sequence[int], failed: Sequence[int] = (), seed: int = 0, most: int = 24) -> list[int]:
    """Return the places that are kept when rows are offered in this order."""
    sampler, bad = RowSampler(most, seed), set(failed)
    for place in order:
        sampler.offer(place, lambda place=place: Sample(str(place), {}, {}), place in bad)  # type: ignore[misc]
    return [int(one.id) for one in sampler.samples()]


def test_the_first_rows_the_first_failed_rows_and_some_of_all_the_job_are_kept() -> None:
    failed = range(500, 3000, 100)
    kept = offered(range(10_000), failed)
    assert len(kept) == 24 and kept == sorted(set(kept))
    assert kept[:8] == list(range(8))
    assert set(list(failed)[:8]) < set(kept)
    spread = set(kept) - set(range(8)) - set(failed)
    assert len(spread) == 8 and max(spread) > 5000


def test_what_nobody_uses_goes_to_rows_at_large_and_a_short_job_is_kept_whole() -> None:
    assert len(offered(range(10_000))) == 24
    assert offered(range(24)) == list(range(24))
    assert offered(range(5), [2]) == [0, 1, 2, 3, 4]
    assert offered([]) == []
    assert offered(range(100), most=0) == []
    assert len(offered(range(100), range(100))) == 8


def test_the_order_of_offers_does_not_matter_and_the_seed_does() -> None:
    order = list(range(2000))
    random.Random(3).shuffle(order)
    failed = [5, 900, 1999, 44]
    assert offered(order, failed) == offered(range(2000), failed)
    assert offered(range(2000), seed=1) != offered(range(2000), seed=2)
    assert offered(range(2000), seed=-1) == offered(range(2000), seed=-1)


def test_a_row_that_is_offered_twice_is_kept_once() -> None:
    assert offered([*range(30), *range(30)]) == offered(range(30))
    assert offered([*range(30), 3, 20], [20]) == offered(range(30), [20])
    assert [offered([*range(300), place]) for place in range(8)] == [offered(range(300))] * 8


@pytest.mark.slow
def test_rows_at_large_are_spread_evenly() -> None:
    tenths = [0] * 10
    for seed in range(100):
        for place in offered(range(1000), seed=seed)[8:]:
            tenths[place // 100] += 1
    assert sum(tenths) == 1600 and min(tenths) > 110 and max(tenths) < 210, tenths


def test_what_is_kept_is_small() -> None:
    sampler = RowSampler()
    sampler.offer(0, lambda: Sample("0", {"image": np.zeros((2000, 2000, 3), np.uint8)}, {}))
    assert all(isinstance(value, SampleValue) for value in sampler.samples()[0].inputs.values())


def test_rows_that_are_not_kept_are_not_made() -> None:
    sampler, made = RowSampler(), []
    for place in range(20_000):
        sampler.offer(place, lambda place=place: made.append(place) or Sample(str(place), {}, {}))  # type: ignore[misc]
    assert 24 <= len(made) < 400


@pytest.mark.parametrize("block", [1, 7, 1000])
def test_a_block_says_at_once_which_of_its_rows_are_worth_an_offer(block: int) -> None:
    sampler, failed = RowSampler(seed=4), {3, 1500, 2500}
    offers = 0
    for start in range(0, 3000, block):
        places = range(start, min(start + block, 3000))
        for row in sampler.wanted(places, [place in failed for place in places]):
            place = places[row]
            sampler.offer(place, lambda place=place: Sample(str(place), {}, {}), place in failed)  # type: ignore[misc]
            offers += 1
    assert [int(one.id) for one in sampler.samples()] == offered(range(3000), sorted(failed), seed=4)
    assert offers < 1400
