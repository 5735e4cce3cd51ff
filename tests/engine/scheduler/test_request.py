"""Test the request state table; an illegal transition names the allowed ones."""

from __future__ import annotations

import pytest

from tests.engine.scheduler_harness import SchedulerHarness
from weftline.engine.protocol import messages as msg
from weftline.engine.scheduler import events as ev
from weftline.engine.scheduler.request import OPEN, TRANSITIONS, Request, StepTiming
from weftline.engine.scheduler.workers import TRANSITIONS as WORKER_TRANSITIONS
from weftline.errors import StepError
from weftline.pipelines.spec.builder import Builder


def opened() -> Request:
    p = Builder("one")
    p.output("y", p.step("a", "echo", value=p.input("x", "text")).value)
    program = SchedulerHarness(p, up=False).scheduler.program()
    route = program.routes.route(None)
    return Request(1, program, route, 0.0, None, 10, list(route.missing))


@pytest.mark.parametrize("event", [event for _, event in TRANSITIONS])
def test_every_end_is_final(event: str) -> None:
    request = opened()
    request.move(event)
    assert request.state == TRANSITIONS[(OPEN, event)]
    with pytest.raises(RuntimeError, match="allowed: nothing"):
        request.move("complete")


def test_an_unknown_event_names_the_known_ones() -> None:
    with pytest.raises(RuntimeError, match=r"request 1 is open and cannot vanish; allowed: .*complete"):
        opened().move("vanish")


def test_every_worker_state_can_be_reached() -> None:
    assert {state for state, _ in WORKER_TRANSITIONS} | {"given_up"} == set(WORKER_TRANSITIONS.values()) | {"starting"}


def timings(harness: SchedulerHarness, request: int) -> tuple[StepTiming, ...]:
    end = harness.ended[request]
    assert isinstance(end, ev.Finish | ev.Fail)
    return end.timings


def one_step(**more: object) -> SchedulerHarness:
    p = Builder("one-step")
    batch = {"items_max": 2, "wait_max_ms": 20}
    a = p.step("a", "echo", type="json", value=p.input("x", "json"), batch=batch, **more)  # type: ignore[arg-type]
    p.output("y", a.value)
    return SchedulerHarness(p)


def test_batch_wait_run_and_node_times_are_separate() -> None:
    harness = one_step()
    one = harness.submit(x=1)
    harness.advance(5)
    harness.submit(x=2)
    harness.now_ms += 8
    harness.answer("a", run_ms=7.0)
    (timing,) = timings(harness, one)
    assert timing == StepTiming("a", 5.0, 8.0, 2, 5.0, 7.0, "a", 5.0)


def test_time_in_which_the_worker_was_busy_is_no_wait_for_company() -> None:
    harness = one_step()
    harness.submit_all([1, 2])
    later = harness.submit_all([3, 4])[0]
    harness.now_ms += 8
    harness.answer("a")
    harness.now_ms += 8
    harness.answer("a")
    (timing,) = timings(harness, later)
    assert (timing.queued_ms, timing.batch_wait_ms, timing.run_ms) == (8.0, 0.0, 8.0)


def test_each_attempt_is_written_down_with_how_it_ended() -> None:
    harness = one_step(retry=1)
    one = harness.submit_all([1, 2])[0]
    harness.answer("a", lambda x: StepError("drawn"))
    harness.die_and_return(0)
    while harness.running():
        harness.answer("a")
    assert [(timing.outcome, timing.attempts) for timing in timings(harness, one)] == [
        ("failed", 1),
        ("lost", 2),
        ("ok", 3),
    ]


def chained() -> SchedulerHarness:
    p = Builder("chained")
    a = p.step("a", "echo", type="json", value=p.input("x", "json"), worker="w")
    b = p.step("b", "echo", type="json", value=a.value, worker="w")
    p.output("y", p.step("c", "echo", type="json", value=b.value, worker="w").value)
    return SchedulerHarness(p)


def done(harness: SchedulerHarness, result: msg.ItemResult | msg.Failure, stages: int = 3) -> None:
    run = harness.inbox[0].pop(0)
    ran = tuple(msg.StepRun(float(place + 1), 1, 1) for place in range(stages))
    harness.receive(0, msg.BatchDone(run.dispatch, (result,), ran))


def test_a_chain_has_a_timing_for_each_step() -> None:
    harness = chained()
    one = harness.submit(x=1)
    harness.now_ms += 10
    done(harness, msg.ItemResult((msg.Value("json", data=b"\x01"),)))
    reported = timings(harness, one)
    assert [(timing.step, timing.run_ms, timing.node_ms) for timing in reported] == [
        ("a", 5.0, 1.0), ("b", 2.0, 2.0), ("c", 3.0, 3.0),
    ]  # fmt: skip
    assert [timing.started_ms for timing in reported] == [0.0, 5.0, 7.0]
    assert [timing.batch for timing in reported] == [1, 1, 1]


def test_a_chain_that_failed_has_timings_up_to_the_step_that_did() -> None:
    harness = chained()
    one = harness.submit(x=1)
    done(harness, msg.Failure("StepError", "drawn", 1))
    assert [(timing.step, timing.outcome) for timing in timings(harness, one)] == [("a", "ok"), ("b", "failed")]


@pytest.mark.parametrize("waits", [True, False])
def test_a_lost_value_error_names_its_device(waits: bool) -> None:
    p = Builder("lost")
    a = p.step("a", "echo", type="json", value=p.input("x", "json"), timeout_ms=10, batch={"items_max": 1})
    p.output("y", a.value)
    harness = SchedulerHarness(p)
    first, second = harness.submit_all([1, 2])
    harness.advance(11)
    (timing,) = timings(harness, second if waits else first)
    assert timing.outcome == "lost"
    assert timing.worker == ("" if waits else "a")
    assert (timing.queued_ms, timing.run_ms) == ((10.0, 0.0) if waits else (0.0, 10.0))
