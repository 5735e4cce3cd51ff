"""The latency objective: answers over it are counted, and nothing fails."""

from __future__ import annotations

from tests.engine.scheduler_harness import SchedulerHarness, json
from weftline.engine.scheduler import events as ev
from weftline.engine.scheduler.objective import RECENT_MAX, LatencyObjective
from weftline.pipelines.spec.builder import Builder


def one_step(**slo: float) -> SchedulerHarness:
    p = Builder("one", slo=slo)
    p.output("y", p.step("a", "echo", type="json", value=p.input("x", "json")).value)
    return SchedulerHarness(p)


def test_answers_over_the_objective_are_counted_with_a_recent_p99() -> None:
    objective = LatencyObjective(100.0)
    for latency_ms in (*[10.0] * 98, 100.0, 250.0):
        objective.add(latency_ms)
    assert objective.stats() == {
        "latency_p99_ms": 100.0, "answers": 100, "over": 1, "recent": 100, "recent_p99_ms": 100.0, "met": True,
    }  # fmt: skip
    objective.add(101.0)
    assert objective.stats()["recent_p99_ms"] == 101.0 and objective.stats()["met"] is False


def test_old_answers_leave_the_p99_and_stay_counted() -> None:
    objective = LatencyObjective(100.0)
    for latency_ms in (*[500.0] * RECENT_MAX, *[10.0] * RECENT_MAX):
        objective.add(latency_ms)
    found = objective.stats()
    assert (found["answers"], found["over"], found["recent"]) == (2 * RECENT_MAX, RECENT_MAX, RECENT_MAX)
    assert found["recent_p99_ms"] == 10.0 and found["met"] is True


def test_before_the_first_answer_there_is_no_p99() -> None:
    found = LatencyObjective(100.0).stats()
    assert (found["answers"], found["recent_p99_ms"], found["met"]) == (0, None, None)


def test_without_an_objective_nothing_is_counted() -> None:
    objective = LatencyObjective(None)
    objective.add(5.0)
    assert objective.stats() == {}


def test_an_objective_fails_no_request_and_a_deadline_does() -> None:
    harness = one_step(latency_p99_ms=50)
    late, dead = harness.submit(x="late"), harness.submit(x="dead", deadline_ms=80)
    harness.advance(90)
    harness.answer("a")
    assert harness.output(late) == "late"
    assert harness.failure(dead).error == "DeadlineExceeded"
    found = harness.scheduler.program().objective.stats()
    assert (found["answers"], found["over"], found["recent_p99_ms"]) == (1, 1, 90.0)


def test_latency_counts_from_the_call() -> None:
    harness = one_step(latency_p99_ms=50)
    harness.now_ms = 100.0
    harness.handle(ev.Submitted(request=7, inputs={"x": json("x")}, called_ms=40.0))
    harness.answer("a")
    assert harness.scheduler.program().objective.stats()["recent_p99_ms"] == 60.0


def test_rows_of_jobs_do_not_count() -> None:
    harness = one_step(latency_p99_ms=50)
    harness.submit_group(["row"])
    harness.answer("a")
    assert harness.scheduler.program().objective.stats()["answers"] == 0
