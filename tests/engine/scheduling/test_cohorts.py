"""Rows that came together: who waits for whom, which batches they form, and that nothing stands still for ever."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from typing import Any

import pytest

from tests.engine.desk import Desk, plan_of
from weftline.engine import messages as msg
from weftline.engine.scheduling import events as ev
from weftline.engine.scheduling.cohorts import ancestors
from weftline.errors import LimitReached
from weftline.pipelines.builder import Builder
from weftline.pipelines.plan import Plan


def alone(pipeline: Builder) -> Plan:
    """Return a plan that answers nothing but a job."""
    plan = plan_of(pipeline)
    return replace(plan, limits=replace(plan.limits, job_batch_ms=math.inf))


def row_of_steps(*names: str, items_max: int = 4) -> Builder:
    p = Builder("row")
    value = p.input("x", "json")
    for name in names:
        value = p.step(name, "echo", type="json", value=value, batch={"items_max": items_max}).value
    p.output("y", value)
    return p


def test_batches_are_formed_in_row_order() -> None:
    desk = Desk(alone(row_of_steps("a", items_max=3)))
    rows = desk.submit_together([5, 3, 4, 1, 2])
    assert desk.answer("a") == [5, 3, 4]
    assert desk.answer("a") == [1, 2]
    assert [desk.output(row) for row in rows] == [5, 3, 4, 1, 2]
    assert desk.is_clean()


def test_a_step_waits_for_all_rows_that_will_come() -> None:
    desk = Desk(alone(row_of_steps("a", "b", items_max=3)))
    desk.submit_together([1, 2, 3, 4])
    desk.answer("a")
    assert desk.running() == ["a"]  # b has three rows, and waits for the fourth
    desk.answer("a")
    assert desk.answer("b") == [1, 2, 3]
    assert desk.answer("b") == [4]
    assert desk.is_clean()


def test_the_same_rows_form_the_same_batches_whoever_is_quick() -> None:
    """Random workers, random failures: what each step was given is the same in every run."""

    def batches(seed: int) -> list[tuple[str, list[Any]]]:
        draws = random.Random(seed)
        p = Builder("both")
        x = p.input("x", "json")
        one = p.step("one", "echo", type="json", value=x, batch={"items_max": 3}, instances=2)
        two = p.step("two", "echo", type="json", value=x, batch={"items_max": 2})
        both = p.step("both", "template", template="{{ a }} {{ b }}", a=one.value, b=two.value, batch={"items_max": 4})
        p.output("y", both.text)
        desk = Desk(alone(p))
        desk.submit_together(range(10))
        seen = []
        while desk.running():
            step = draws.choice(desk.running())
            fails = {7} if step == "one" else set()
            given = desk.answer(
                step,
                lambda v, fails=fails: ValueError("drawn") if v in fails else v,  # type: ignore[misc]
            )
            seen.append((step, given))
        assert desk.is_clean()
        return sorted(seen, key=str)

    first = batches(0)
    assert [given for step, given in first if step == "both"] == [[0, 1, 2, 3], [4, 5, 6, 8], [9]]
    assert all(batches(seed) == first for seed in range(1, 30))


def test_rows_that_take_another_way_are_not_waited_for() -> None:
    p = Builder("branches")
    x = p.input("x", "json")
    small = p.step("small", "echo", type="json", value=x, when="x < 3", batch={"items_max": 8})
    large = p.step("large", "echo", type="json", value=x, when="x >= 3", batch={"items_max": 8})
    p.output("y", p.step("either", "first", a=small.value, b=large.value).value)
    desk = Desk(alone(p))
    rows = desk.submit_together(range(6))
    assert desk.answer("small") == [0, 1, 2]
    assert desk.answer("large") == [3, 4, 5]
    assert [desk.output(row) for row in rows] == list(range(6))
    assert desk.is_clean()


def test_a_stand_in_is_waited_for_and_waits() -> None:
    p = Builder("stand-in")
    x = p.input("x", "json")
    spare = p.step("spare", "echo", type="json", value=x, batch={"items_max": 8})
    main = p.step("main", "echo", type="json", value=x, fallback="spare", batch={"items_max": 2})
    p.output("y", p.step("end", "echo", type="json", value=main.value, batch={"items_max": 8}).value)
    assert spare is not None
    plan = alone(p)
    index = {step.name: at for at, step in enumerate(plan.steps)}
    assert index["main"] in ancestors(plan)[index["spare"]]
    assert index["spare"] in ancestors(plan)[index["end"]]
    desk = Desk(plan)
    rows = desk.submit_together(range(6))
    for _ in range(3):
        desk.answer("main", lambda v: ValueError("odd") if v % 2 else v)
    assert desk.running() == ["spare"]
    assert desk.answer("spare") == [1, 3, 5]
    assert desk.answer("end") == [0, 1, 2, 3, 4, 5]
    assert [desk.output(row) for row in rows] == list(range(6))
    assert desk.is_clean()


def test_rows_that_are_withdrawn_are_not_waited_for() -> None:
    desk = Desk(alone(row_of_steps("a", "b", items_max=2)))
    rows = desk.submit_together([1, 2, 3, 4])
    desk.answer("a")
    desk.withdraw(rows[3])
    desk.withdraw(rows[0])  # held at b
    desk.answer("a")
    assert desk.answer("b") == [2, 3]
    assert desk.is_clean()


def test_a_death_does_not_change_who_waits_for_whom() -> None:
    desk = Desk(alone(row_of_steps("a", "b", items_max=4)))
    rows = desk.submit_together([1, 2, 3, 4])
    desk.die_and_return(desk.at("a"))
    while desk.running() == ["a"]:
        desk.answer("a")
    assert desk.answer("b") == [1, 2, 3, 4]
    assert [desk.output(row) for row in rows] == [1, 2, 3, 4]


def test_its_own_time_limit_counts_from_when_all_are_there() -> None:
    p = Builder("limit")
    a = p.step("a", "echo", type="json", value=p.input("x", "json"), batch={"items_max": 1})
    b = p.step("b", "echo", type="json", value=a.value, timeout_ms=50, batch={"items_max": 2})
    p.output("y", b.value)
    desk = Desk(alone(p))
    rows = desk.submit_together([1, 2])
    desk.answer("a")
    desk.advance(500)  # the second takes its time in `a`; the first waits at b, and its time does not run
    desk.answer("a")
    desk.answer("b")
    assert [desk.output(row) for row in rows] == [1, 2]


def test_usual_requests_go_first_and_a_job_stays_off_reserved_instances() -> None:
    p = Builder("shared")
    a = p.step("a", "echo", type="json", value=p.input("x", "json"), instances=2, reserved=1, batch={"items_max": 1})
    p.output("y", a.value)
    desk = Desk(p)
    desk.submit_together(["row 1", "row 2", "row 3"])
    assert [desk.batch("a")] == [["row 1"]]
    assert len(desk.running()) == 1
    usual = desk.submit(x="usual")
    assert len(desk.running()) == 2
    later = desk.submit(x="later")
    busy = desk.at("a")
    free = next(worker for worker, runs in desk.inbox.items() if runs and worker != busy)
    job = free if desk.value_of[desk.inbox[free][0].items[0].id] == "row 1" else busy
    desk.answer("a", worker=job)
    assert desk.value_of[desk.inbox[job][0].items[0].id] == "later"
    assert usual and later


def test_a_job_beside_usual_requests_has_one_batch_with_a_worker_and_no_longer_one_than_stated() -> None:
    p = row_of_steps("a", items_max=8)
    plan = plan_of(p)
    desk = Desk(replace(plan, limits=replace(plan.limits, job_batch_ms=20.0)))
    for size in (1, 2, 4, 8):  # an item takes 5 ms
        for _ in range(20):
            desk.submit_all(range(size))
            while desk.running():
                run_ms = 5.0 * len(desk.batch("a"))
                desk.now_ms += run_ms
                desk.answer("a", run_ms=run_ms)
    desk.submit_together(range(8))
    assert sum(map(len, desk.inbox.values())) == 1
    assert 3 <= len(desk.batch("a")) <= 4


def test_single_rows_form_batches_as_they_leave() -> None:
    desk = Desk(row_of_steps("a", items_max=3))
    for value in range(5):
        desk.tell(desk_row(value + 1, value))
    assert [desk.answer("a") for _ in range(3)] == [[0], [1, 2, 3], [4]]
    assert desk.is_clean()


def desk_row(request: int, value: int) -> Any:
    from tests.engine.desk import json
    from weftline.engine.scheduling import events as ev

    return ev.Submitted(request, {"x": json(value)}, job=True)


def test_the_seed_of_a_row_reaches_its_item() -> None:
    desk = Desk(alone(row_of_steps("a")))
    desk.submit_together([1], seed=77)
    assert desk.inbox[0][0].items[0].brought == msg.Brought(-100, None, seed=77)


@pytest.mark.parametrize("items_max", [1, 3])
def test_long_rows_share_batches_with_long_ones(items_max: int) -> None:
    desk = Desk(alone(row_of_steps("a", items_max=items_max)))
    words = ["a" * 50, "b", "c" * 49, "d", "e", "f" * 48]
    rows = desk.submit_together(words)
    seen = []
    while desk.running():
        seen.append(desk.answer("a"))
    if items_max == 3:
        assert seen == [["b", "d", "e"], ["f" * 48, "c" * 49, "a" * 50]]
    assert [desk.output(row) for row in rows] == words


def test_inputs_of_jobs_leave_usual_requests_room() -> None:
    plan = plan_of(row_of_steps("a"))
    desk, most = Desk(plan), plan.limits.arena_bytes
    held = desk.scheduler.try_reserve([most // 4], job=True) + desk.scheduler.try_reserve([most // 4], job=True)
    with pytest.raises(LimitReached):
        desk.scheduler.try_reserve([1 << 16], job=True)
    held += desk.scheduler.try_reserve([most // 4])
    desk.scheduler.give_up(held)
    desk.scheduler.give_up(desk.scheduler.try_reserve([most // 4 * 3], job=True))  # larger than its share
    assert desk.is_clean()


def test_a_streaming_step_holds_few_rows_of_jobs_beside_usual_requests() -> None:
    p = Builder("streams")
    p.output("y", p.step("a", "trickle", value=p.input("x", "text")).value)
    desk = Desk(p)
    text = [msg.Value("text", data=b"%d" % n) for n in range(100)]
    usual = desk.submit(x=msg.Value("text", data=b"usual"))
    rows = desk.submit_together(text)
    assert len(desk.held[0]) == 1 + 4
    desk.piece(0, "done", last=True, position=1)
    assert len(desk.held[0]) == 1 + 4  # the next row of the job comes for the one that ended
    desk.piece(0, "done", last=True, position=0)
    assert isinstance(desk.ended[usual], ev.Finish)
    assert len(desk.held[0]) == 4
    desk.advance(1900)
    assert len(desk.held[0]) == 4
    desk.advance(200)  # no usual request came for two seconds
    assert len(desk.held[0]) == 64
    while desk.held[0]:
        desk.piece(0, "done", last=True)
    assert all(isinstance(desk.ended[row], ev.Finish) for row in rows)
    assert desk.is_clean()


def test_rows_of_jobs_at_another_step_of_the_worker_are_no_usual_requests() -> None:
    p = Builder("two-streams")
    x = p.input("x", "text")
    one = p.step("one", "trickle", value=x, worker="w")
    two = p.step("two", "trickle", value=x, worker="w")
    p.output("y", one.value)
    p.output("z", two.value)
    desk = Desk(p)
    desk.submit_together([msg.Value("text", data=b"%d" % n) for n in range(10)])
    assert len(desk.held[0]) == 20
