"""A token bucket gives whole tokens only, and saves no more than its capacity; a rate limit refills it with time."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weftline.engine.token_bucket import START_TOKENS, RateLimit, RetryBudget, TokenBucket


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


def test_a_burst_passes_and_the_next_call_gets_a_waiting_time() -> None:
    bucket = RateLimit(per_s=10, burst=3)
    assert [bucket.try_take(100.0) for _ in range(3)] == [0.0, 0.0, 0.0]
    assert bucket.try_take(100.0) == pytest.approx(0.1)
    assert bucket.try_take(100.05) == pytest.approx(0.05)
    assert bucket.try_take(100.1001) == 0.0


def test_a_long_pause_gives_no_more_than_the_burst() -> None:
    bucket = RateLimit(per_s=10, burst=2)
    bucket.try_take(0.0)
    taken = [bucket.try_take(1e6) for _ in range(4)]
    assert taken.count(0.0) == 2


def test_a_clock_that_runs_backwards_gives_nothing() -> None:
    bucket = RateLimit(per_s=1, burst=1)
    bucket.try_take(50.0)
    assert bucket.try_take(0.0) > 0
    assert bucket.try_take(50.5) > 0
    assert bucket.try_take(51.1) == 0.0


@given(
    st.floats(0.1, 1000),
    st.floats(1, 100),
    st.lists(st.floats(0, 0.5), min_size=1, max_size=200),
)
def test_no_more_leaves_than_the_rate_and_one_burst(per_s: float, burst: float, pauses: list[float]) -> None:
    bucket, now_s, taken = RateLimit(per_s, burst), 7.0, 0
    for pause in pauses:
        now_s += pause
        wait_s = bucket.try_take(now_s)
        taken += wait_s == 0.0
        assert 0 <= wait_s <= 1 / per_s
    assert taken <= burst + (now_s - 7.0) * per_s + 1e-6


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
