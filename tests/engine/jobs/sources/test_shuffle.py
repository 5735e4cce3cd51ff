import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from weftline.engine.jobs.sources.selection import left, permutation, share


@given(count=st.integers(0, 300), seed=st.integers(-(1 << 70), 1 << 70), turn=st.integers(0, 1 << 40))
def test_an_order_has_every_number_once(count: int, seed: int, turn: int) -> None:
    assert sorted(permutation(count, seed, turn).tolist()) == list(range(count))


def test_an_order_follows_from_seed_and_turn_for_ever() -> None:
    assert permutation(8, 1, 0).tolist() == [2, 4, 7, 5, 0, 6, 3, 1]
    assert permutation(8, 1, 1).tolist() != permutation(8, 1, 0).tolist()


def test_every_place_is_as_likely_as_any_other() -> None:
    firsts = [int(permutation(4, seed, 1)[0]) for seed in range(400)]
    assert np.bincount(firsts).min() > 70


@given(sizes=st.lists(st.integers(0, 20)), of=st.integers(1, 7), limit=st.none() | st.integers(0, 50))
def test_shares_part_the_rows_among_them(sizes: list[int], of: int, limit: int | None) -> None:
    total = sum(sizes)
    got = []
    for which in range(1, of + 1):
        mine, seen = [], 0
        for size in sizes:
            mine += [seen + row for row in _share(size, seen, which, of)]
            seen += size
        assert mine == list(range(which - 1, total, of))
        assert left(total, (which, of), None) == len(mine)
        got += mine
    assert sorted(got) == list(range(total))
    assert left(total, None, limit) == (total if limit is None else min(total, limit))


def _share(size: int, seen: int, which: int, of: int) -> list[int]:
    found = share(size, seen, (which, of))
    assert found is not None
    return [int(row) for row in found]


@pytest.mark.parametrize("size", [0, 5])
def test_without_shares_all_rows_are_given(size: int) -> None:
    assert share(size, 3, None) is None
