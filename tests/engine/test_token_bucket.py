"""A token bucket gives whole tokens only, and saves no more than its capacity."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weftline.engine.token_bucket import START_TOKENS, RetryBudget, TokenBucket


def test_each_permit_takes_a_whole_token() -> None:
    bucket = TokenBucket(5.0, 2.5)
    assert [bucket.try_take() for _ in range(3)] == [True, True, False]
    assert bucket.tokens == 0.5, "a refused permit takes nothing"
    bucket.add(0.5)
    assert bucket.try_take() and not bucket.try_take()


def test_what_is_above_the_capacity_is_dropped() -> None:
    bucket = TokenBucket(2.0, 1.0)
    bucket.add(100.0)
    assert [bucket.try_take() for _ in range(3)] == [True, True, False]


def test_a_quiet_system_may_try_again_a_few_times() -> None:
    budget = RetryBudget(0.1)
    assert [budget.try_take() for _ in range(11)] == [True] * 10 + [False]


def test_ten_first_attempts_pay_for_a_further_one() -> None:
    budget = RetryBudget(0.125)
    while budget.try_take():
        pass
    budget.first(7)
    assert not budget.try_take()
    budget.first()
    assert budget.try_take() and not budget.try_take()


def test_a_share_of_nothing_allows_nothing() -> None:
    budget = RetryBudget(0.0)
    budget.first(1000)
    assert not budget.try_take()


def test_a_quiet_hour_does_not_pay_for_a_storm() -> None:
    budget = RetryBudget(0.1)
    budget.first(1_000_000)
    assert sum(budget.try_take() for _ in range(1000)) == 10


@given(
    st.sampled_from([0.01, 0.1, 0.25, 1.0]), st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30)), max_size=60)
)
def test_attempts_stay_below_one_plus_the_share(share: float, storm: list[tuple[int, int]]) -> None:
    budget, first, further = RetryBudget(share), 0, 0
    for fresh, wanted in storm:
        budget.first(fresh)
        first += fresh
        further += sum(budget.try_take() for _ in range(wanted))
        assert further <= first * share + START_TOKENS + 1e-6


@pytest.mark.parametrize("share", [0.1, 0.5])
def test_a_system_where_everything_fails_uses_its_whole_share(share: float) -> None:
    budget, further = RetryBudget(share), 0
    for _ in range(10_000):
        budget.first()
        further += budget.try_take()
    assert math.isclose(further, 10_000 * share, abs_tol=START_TOKENS + 1)


def test_a_loan_is_paid_back_before_first_attempts_earn() -> None:
    budget = RetryBudget(0.25, start=3, loan=True)
    assert [budget.try_take() for _ in range(4)] == [True, True, True, False]
    budget.first(15)
    assert not budget.try_take()
    budget.first()
    assert [budget.try_take() for _ in range(2)] == [True, False]
