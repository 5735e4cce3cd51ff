"""A token bucket gives whole tokens only, and saves no more than its capacity; a rate limit refills it with time."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weftline.engine.token_bucket import RateLimit, TokenBucket


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
