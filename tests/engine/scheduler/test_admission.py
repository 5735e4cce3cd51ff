"""Admission is bounded in requests and bytes, and a refusal names the limit and when to come again."""

import pytest

from weftline.engine.scheduler.admission import RETRY_AFTER_S_MAX, RETRY_AFTER_S_MIN, Admission
from weftline.errors import LimitReached
from weftline.pipelines.spec.policy import Limits


def full(**limits: int) -> Admission:
    gate = Admission(Limits(requests_max=2, **limits))
    gate.enter(10)
    gate.enter(10)
    return gate


def test_the_limit_on_open_requests_holds_and_is_released() -> None:
    gate = full()
    with pytest.raises(LimitReached, match=r"2 requests are open; limits\.requests_max is 2"):
        gate.check(10)
    gate.leave(10, 5.0)
    gate.check(10)
    assert (gate.requests, gate.size_bytes) == (1, 10)


def test_the_limit_on_the_bytes_of_all_open_requests_holds() -> None:
    gate = Admission(Limits(open_bytes_max=100))
    gate.enter(60)
    gate.check(40)
    with pytest.raises(LimitReached, match=r"take 60 bytes; limits\.open_bytes_max is 100"):
        gate.check(41)


def test_one_request_too_large_is_refused_without_a_retry_time() -> None:
    gate = Admission(Limits(request_bytes_max=100))
    with pytest.raises(LimitReached, match=r"take 101 bytes; limits\.request_bytes_max is 100") as refused:
        gate.check(101)
    assert refused.value.retry_after_s == 0


def refused_until(gate: Admission) -> float:
    with pytest.raises(LimitReached) as refused:
        gate.check(10)
    return refused.value.retry_after_s


def test_each_refused_caller_is_sent_behind_those_refused_before() -> None:
    gate = full()
    waits = [refused_until(gate) for _ in range(100)]
    assert waits[0] == pytest.approx(0.1)
    assert waits[1] == pytest.approx(0.2)
    assert waits[-1] == RETRY_AFTER_S_MAX


def test_the_queue_is_short_again_after_a_request_ended() -> None:
    gate = full()
    for _ in range(10):
        refused_until(gate)
    gate.leave(10, 0.0)
    gate.enter(10)
    assert refused_until(gate) == pytest.approx(0.1)


def test_the_wait_follows_how_quickly_requests_leave() -> None:
    gate = full()
    for turn in range(100):
        gate.leave(10, float(turn))
        gate.enter(10)
    assert refused_until(gate) == RETRY_AFTER_S_MIN
