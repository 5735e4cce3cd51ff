"""How long each step took, as its request is told."""

from __future__ import annotations

import pytest

from tests.engine.desk import Desk
from weftline.engine import messages as msg
from weftline.engine.scheduling import events as ev
from weftline.engine.scheduling.request import StepTiming
from weftline.errors import StepError
from weftline.pipelines.builder import Builder


def timings(desk: Desk, request: int) -> tuple[StepTiming, ...]:
    end = desk.ended[request]
    assert isinstance(end, ev.Finish | ev.Fail)
    return end.timings


def one_step(**more: object) -> Desk:
    p = Builder("one-step")
    batch = {"items_max": 2, "wait_max_ms": 20}
    a = p.step("a", "echo", type="json", value=p.input("x", "json"), batch=batch, **more)  # type: ignore[arg-type]
    p.output("y", a.value)
    return Desk(p)


def test_waiting_for_company_running_and_the_nodes_own_time_are_told_apart() -> None:
    desk = one_step()
    one = desk.submit(x=1)
    desk.advance(5)
    desk.submit(x=2)
    desk.now_ms += 8
    desk.answer("a", run_ms=7.0)
    (timing,) = timings(desk, one)
    assert timing == StepTiming("a", 5.0, 8.0, 2, 5.0, 7.0, "a", 5.0)


def test_time_in_which_the_worker_was_busy_is_no_wait_for_company() -> None:
    desk = one_step()
    desk.submit_all([1, 2])
    later = desk.submit_all([3, 4])[0]
    desk.now_ms += 8
    desk.answer("a")
    desk.now_ms += 8
    desk.answer("a")
    (timing,) = timings(desk, later)
    assert (timing.queued_ms, timing.batch_wait_ms, timing.run_ms) == (8.0, 0.0, 8.0)


def test_each_attempt_is_written_down_with_how_it_ended() -> None:
    desk = one_step(retry=1)
    one = desk.submit_all([1, 2])[0]
    desk.answer("a", lambda x: StepError("drawn"))
    desk.die_and_return(0)
    while desk.running():
        desk.answer("a")
    assert [(timing.outcome, timing.attempts) for timing in timings(desk, one)] == [
        ("failed", 1),
        ("lost", 2),
        ("ok", 3),
    ]


def chained() -> Desk:
    p = Builder("chained")
    a = p.step("a", "echo", type="json", value=p.input("x", "json"), worker="w")
    b = p.step("b", "echo", type="json", value=a.value, worker="w")
    p.output("y", p.step("c", "echo", type="json", value=b.value, worker="w").value)
    return Desk(p)


def done(desk: Desk, result: msg.Given | msg.Failure, stages: int = 3) -> None:
    run = desk.inbox[0].pop(0)
    ran = tuple(msg.Ran(float(place + 1), 2, 3) for place in range(stages))
    desk.hear(0, msg.Done(run.dispatch, (result,), ran))


def test_a_chain_has_a_timing_for_each_step_and_messages_are_charged_to_the_first() -> None:
    desk = chained()
    one = desk.submit(x=1)
    desk.now_ms += 10
    done(desk, msg.Given((msg.Value("json", data=b"\x01"),)))
    told = timings(desk, one)
    assert [(timing.step, timing.run_ms, timing.node_ms) for timing in told] == [
        ("a", 5.0, 1.0), ("b", 2.0, 2.0), ("c", 3.0, 3.0),
    ]  # fmt: skip
    assert [timing.started_ms for timing in told] == [0.0, 5.0, 7.0]
    assert [timing.batch for timing in told] == [2, 2, 2]


def test_a_chain_that_failed_has_timings_up_to_the_step_that_did() -> None:
    desk = chained()
    one = desk.submit(x=1)
    done(desk, msg.Failure("StepError", "drawn", 1))
    assert [(timing.step, timing.outcome) for timing in timings(desk, one)] == [("a", "ok"), ("b", "failed")]


@pytest.mark.parametrize("waits", [True, False])
def test_what_was_lost_says_where_it_was(waits: bool) -> None:
    p = Builder("lost")
    a = p.step("a", "echo", type="json", value=p.input("x", "json"), timeout_ms=10, batch={"items_max": 1})
    p.output("y", a.value)
    desk = Desk(p)
    first, second = desk.submit_all([1, 2])
    desk.advance(11)
    (timing,) = timings(desk, second if waits else first)
    assert timing.outcome == "lost"
    assert timing.worker == ("" if waits else "a")
    assert (timing.queued_ms, timing.run_ms) == ((10.0, 0.0) if waits else (0.0, 10.0))
