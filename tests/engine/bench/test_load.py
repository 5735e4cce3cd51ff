"""A session under load, from Python: what it reports, and what it refuses."""

from collections.abc import Iterator

import pytest

from weftline.engine.bench.arrivals import Closed, Open
from weftline.engine.bench.load import bench, run_closed, run_open
from weftline.engine.session import Session, load
from weftline.errors import InputError
from weftline.pipelines.spec.builder import Builder


@pytest.fixture(scope="module")
def session() -> Iterator[Session]:
    pipeline = Builder("two", limits={"requests_max": 4, "deadline_ms": 5000}, slo={"latency_p99_ms": 4000})
    first = pipeline.step("first", "echo", value=pipeline.input("x", "text"))
    second = pipeline.step("second", "fail", value=first.value, equals="bad", delay_ms=2)
    pipeline.output("y", first.value)
    pipeline.output("z", second.value)
    with load(pipeline).open() as opened:
        yield opened


def hello(number: int) -> dict[str, str]:
    return {"x": f"hello {number}"}


def test_a_closed_load_reports_every_step(session: Session) -> None:
    report = bench(session, hello, Closed(2), duration_s=0.3, warm_up_s=0.1)
    assert report.ok == report.sent > 10 and report.stopped == ""
    assert [step.step for step in report.steps] == ["first", "second"]
    assert all(step.count == report.sent for step in report.steps)
    second = report.steps[1]
    assert second.run.p50 >= second.node.p50 >= 2
    assert 0.3 <= report.seconds < 1
    assert (report.deadline_ms, report.objective_ms, report.objective_met) == (5000, 4000, True)  # the pipeline's own
    busy = {worker.worker: worker.busy for worker in report.workers}
    assert busy["second"] > busy["first"] > 0
    assert sum(step.total_ms for step in report.where.steps) + sum(report.where.outside.values()) == pytest.approx(
        report.latency.mean
    )
    assert [path.steps for path in report.where.paths] == [("first", "second")]


@pytest.mark.slow
def test_an_open_load_over_the_limit_is_refused_and_goes_on(session: Session) -> None:
    report = bench(session, hello, Open(2000), duration_s=0.2, warm_up_s=0.0)
    assert report.refused > 0 and report.ok > 0
    assert report.refused + report.ok == report.sent
    assert report.errors[0].message.startswith("4 requests are open; limits.requests_max is 4")


@pytest.mark.slow
def test_failed_requests_bring_the_timings_of_what_had_run(session: Session) -> None:
    report = bench(session, lambda number: {"x": "bad"}, Closed(1), duration_s=0.1, warm_up_s=0.0)
    assert report.ok == 0
    assert [(one.error, one.count) for one in report.errors] == [("StepError", report.sent)]
    assert [step.step for step in report.steps] == ["first", "second"]
    assert report.steps[1].failed == report.sent


@pytest.mark.slow
def test_only_the_wanted_outputs_are_loaded_and_the_load_can_be_cut_short(session: Session) -> None:
    report = bench(session, hello, Closed(1), duration_s=60, warm_up_s=0.0, requests_max=5, outputs=["y"], priority=3)
    assert [(step.step, step.count) for step in report.steps] == [("first", 5)]
    assert (report.sent, report.stopped) == (5, "after 5 requests")
    report = bench(session, hello, Open(200), duration_s=60, warm_up_s=0.1, requests_max=5)
    assert (report.sent, report.stopped) == (5, "after 5 requests")


@pytest.mark.slow
def test_outcomes_are_what_became_of_each_request(session: Session) -> None:
    outcomes = run_open(session, [0.0, 5.0, 10.0], hello, deadline_ms=1000)
    assert [one.ok for one in outcomes] == [True] * 3
    assert all([timing.step for timing in one.timings] == ["first", "second"] for one in outcomes)
    assert all(one.timings[0].started_ms >= one.sent_ms for one in outcomes)  # the same clock
    assert all(one.ended_ms >= one.timings[-1].started_ms + one.timings[-1].run_ms for one in outcomes)
    assert [one.error for one in run_open(session, [0.0], hello, deadline_ms=0)] == ["DeadlineExceeded"]
    assert all(one.ok for one in run_closed(session, 2, hello, duration_s=0.1))


@pytest.mark.parametrize(
    ("inputs", "shape", "said"),
    [
        ({"x": 5}, Closed(1), "input x"),
        ({"z": "hello"}, Closed(1), "unknown: z"),
        ({"x": "hello"}, Closed(0), "0 callers; a closed load has 1 to 1024"),
        ({"x": "hello"}, Open(0), "a rate of 0 requests/s"),
    ],
)
def test_what_cannot_be_sent_is_refused_before_the_load(session: Session, inputs, shape, said: str) -> None:
    with pytest.raises(InputError, match=said):
        bench(session, lambda number: inputs, shape, duration_s=60)
