"""How long what is ahead will take, and who is refused by it."""

from __future__ import annotations

from tests.engine.desk import Desk
from weftline.engine.batching.latency import FRESH_MS
from weftline.pipelines.builder import Builder
from weftline.pipelines.policy import Slo


def two_steps(**slo: object) -> Desk:
    p = Builder("two", slo=Slo(**slo))  # type: ignore[arg-type]
    a = p.step("a", "echo", type="json", value=p.input("x", "json"), batch={"items_max": 1})
    p.output("y", p.step("b", "echo", type="json", value=a.value, batch={"items_max": 1}).value)
    return Desk(p)


def serve(desk: Desk, requests: int, a_ms: float, b_ms: float) -> Desk:
    for _ in range(requests):
        desk.submit(x=0)
        for step, run_ms in (("a", a_ms), ("b", b_ms)):
            desk.now_ms += run_ms
            desk.answer(step, run_ms=run_ms)
    return desk


def test_a_request_that_cannot_make_its_deadline_is_refused_with_the_estimate() -> None:
    desk = serve(two_steps(), 4, 40.0, 60.0)
    one = desk.submit(x=1, deadline_ms=90)
    refused = desk.refusal(one)
    assert refused.error == "DeadlineExceeded"
    assert refused.message == "by recent times it needs about 101 ms and has 90 ms; it was not begun"
    assert refused.retry_after_s > 0
    assert desk.running() == []
    assert desk.is_clean()


def test_one_that_can_make_it_is_let_in() -> None:
    desk = serve(two_steps(), 4, 40.0, 60.0)
    desk.submit(x=1, deadline_ms=110)
    assert desk.running() == ["a"]


def test_nobody_is_refused_by_times_that_are_not_known() -> None:
    desk = serve(two_steps(), 2, 40.0, 60.0)
    desk.submit(x=1, deadline_ms=1)
    assert desk.running() == ["a"]


def test_nobody_is_refused_by_old_times() -> None:
    desk = serve(two_steps(), 4, 40.0, 60.0)
    desk.advance(FRESH_MS - 100)
    assert desk.submit(x=1, deadline_ms=50) in desk.ended
    desk.advance(200)
    desk.submit(x=1, deadline_ms=50)
    assert desk.running() == ["a"]


def test_nobody_is_refused_early_who_did_not_want_it() -> None:
    desk = serve(two_steps(refuse_early=False), 4, 40.0, 60.0)
    one = desk.submit(x=1, deadline_ms=20)
    assert desk.scheduler.counters.refused == 0
    assert "it was not begun" in desk.failure(one).message  # its step would still have been too late


def test_what_waits_in_front_counts() -> None:
    desk = serve(two_steps(), 4, 40.0, 60.0)
    for _ in range(5):
        desk.submit(x=0)
    desk.now_ms += 2.0
    assert desk.submit(x=1, deadline_ms=150) in desk.ended


def test_a_task_is_due_early_enough_for_what_comes_after_it() -> None:
    desk = serve(two_steps(), 4, 40.0, 60.0)
    desk.submit(x=1, deadline_ms=200)
    (task,) = desk.scheduler._tasks.live.values()
    left_ms = task.due_ms - desk.now_ms
    assert 135 < left_ms < 141
