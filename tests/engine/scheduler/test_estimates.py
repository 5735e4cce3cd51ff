"""Test the estimate of queue time and the refusals based on it."""

from __future__ import annotations

from tests.engine.scheduler_harness import SchedulerHarness
from weftline.engine.scheduler.latency import FRESH_MS
from weftline.pipelines.spec.builder import Builder
from weftline.pipelines.spec.policy import Limits


def two_steps(**limits: object) -> SchedulerHarness:
    p = Builder("two", limits=Limits(**limits))  # type: ignore[arg-type]
    a = p.step("a", "echo", type="json", value=p.input("x", "json"), batch={"items_max": 1})
    p.output("y", p.step("b", "echo", type="json", value=a.value, batch={"items_max": 1}).value)
    return SchedulerHarness(p)


def serve(harness: SchedulerHarness, requests: int, a_ms: float, b_ms: float) -> SchedulerHarness:
    for _ in range(requests):
        harness.submit(x=0)
        for step, run_ms in (("a", a_ms), ("b", b_ms)):
            harness.now_ms += run_ms
            harness.answer(step, run_ms=run_ms)
    return harness


def test_an_impossible_deadline_is_refused_with_the_estimate() -> None:
    harness = serve(two_steps(), 4, 40.0, 60.0)
    one = harness.submit(x=1, deadline_ms=90)
    refused = harness.refusal(one)
    assert refused.error == "DeadlineExceeded"
    assert refused.message == "by recent measurements it needs about 101 ms and has 90 ms left; it was not started"
    assert refused.retry_after_s > 0
    assert harness.running() == []
    assert harness.is_clean()


def test_one_that_can_make_it_is_let_in() -> None:
    harness = serve(two_steps(), 4, 40.0, 60.0)
    harness.submit(x=1, deadline_ms=110)
    assert harness.running() == ["a"]


def test_unknown_times_refuse_no_request() -> None:
    harness = serve(two_steps(), 2, 40.0, 60.0)
    harness.submit(x=1, deadline_ms=1)
    assert harness.running() == ["a"]


def test_old_times_refuse_no_request() -> None:
    harness = serve(two_steps(), 4, 40.0, 60.0)
    harness.advance(FRESH_MS - 100)
    assert harness.submit(x=1, deadline_ms=50) in harness.ended
    harness.advance(200)
    harness.submit(x=1, deadline_ms=50)
    assert harness.running() == ["a"]


def test_a_request_without_early_refusal_is_not_refused_early() -> None:
    harness = serve(two_steps(refuse_early=False), 4, 40.0, 60.0)
    one = harness.submit(x=1, deadline_ms=20)
    assert harness.scheduler.counters.refused == 0
    assert "it was not started" in harness.failure(one).message  # its step would still have been too late


def test_what_waits_in_front_counts() -> None:
    harness = serve(two_steps(), 4, 40.0, 60.0)
    for _ in range(5):
        harness.submit(x=0)
    harness.now_ms += 2.0
    assert harness.submit(x=1, deadline_ms=150) in harness.ended


def test_a_task_is_due_early_enough_for_what_comes_after_it() -> None:
    harness = serve(two_steps(), 4, 40.0, 60.0)
    harness.submit(x=1, deadline_ms=200)
    (task,) = harness.scheduler.state.live.values()
    left_ms = task.due_ms - harness.now_ms
    assert 135 < left_ms < 141


def test_a_deadline_in_the_past_is_refused_with_the_limit_that_set_it() -> None:
    for harness in (serve(two_steps(), 4, 40.0, 60.0), two_steps(), two_steps(refuse_early=False)):
        one = harness.submit(x=1, deadline_ms=-7)
        if one not in harness.ended:
            harness.advance(1)
        reported = (harness.refusal(one) if harness.scheduler.counters.refused else harness.failure(one)).message
        assert reported.startswith(
            "its deadline had passed 7 ms before its inputs were ready (deadline_ms of the request"
        )
        assert "limits.deadline_ms" in reported and "0 ms and has" not in reported
