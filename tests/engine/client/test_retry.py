"""Retries: conditions, delays and budget."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weftline.engine.client.retry import LOAN, RetryState, SharedRetryBudget


def retry_state(retries: int = 3, until_ms: float | None = None) -> RetryState:
    return RetryState(SharedRetryBudget(), retries, until_ms)


def test_a_moment_of_trouble_is_waited_out_longer_each_time() -> None:
    one = retry_state()
    assert [one.after("UNAVAILABLE", None, 0, 0.5) for _ in range(3)] == [50, 100, 200]
    assert one.after("UNAVAILABLE", None, 0, 0.5) is None


def test_chance_spreads_callers_that_were_refused_together() -> None:
    assert retry_state().after("UNAVAILABLE", None, 0, 0.0) == 25
    assert retry_state().after("UNAVAILABLE", None, 0, 0.999) == pytest.approx(75, abs=0.1)


def test_pushback_is_never_undercut() -> None:
    assert retry_state().after("UNAVAILABLE", 300, 0, 0.0) == 300
    assert retry_state().after("RESOURCE_EXHAUSTED", 300, 0, 1.0) == 375
    assert retry_state().after("UNAVAILABLE", -1, 0, 0.5) is None


@pytest.mark.parametrize("status", ["INVALID_ARGUMENT", "INTERNAL", "DEADLINE_EXCEEDED", "RESOURCE_EXHAUSTED"])
def test_what_would_fail_again_is_not_sent_again(status: str) -> None:
    assert retry_state().after(status, None, 0, 0.5) is None


def test_a_retry_that_would_come_after_the_deadline_is_none() -> None:
    one = retry_state(until_ms=1000)
    assert one.after("UNAVAILABLE", None, 940, 0.5) == 50
    assert one.after("UNAVAILABLE", None, 940, 0.5) is None


def test_no_retries_are_no_retries() -> None:
    assert retry_state(retries=0).after("UNAVAILABLE", 1, 0, 0.5) is None


@given(st.integers(0, 3000))
def test_a_storm_is_amplified_by_a_tenth_at_most(requests: int) -> None:
    budget, sent = SharedRetryBudget(), 0
    for _ in range(requests):
        budget.first()
        one = RetryState(budget, 3)
        sent += 1
        while one.after("UNAVAILABLE", None, 0, 0.5) is not None:
            sent += 1
    assert sent - requests <= max(LOAN, requests * 0.1)


def test_a_quiet_time_does_not_pay_for_a_storm() -> None:
    budget = SharedRetryBudget()
    for _ in range(100_000):
        budget.first()
    assert sum(budget.try_take() for _ in range(1000)) == 10
