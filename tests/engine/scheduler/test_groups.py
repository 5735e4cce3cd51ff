"""Test ordered groups: order of rows, batches formed, and freedom from deadlock."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from typing import Any

import pytest

from tests.engine.scheduler_harness import SchedulerHarness, plan_of
from weftline.engine.protocol import messages as msg
from weftline.engine.scheduler import events as ev
from weftline.engine.scheduler.groups import ancestors
from weftline.errors import LimitReached
from weftline.pipelines.placement.plan import Plan
from weftline.pipelines.spec.builder import Builder


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
    harness = SchedulerHarness(alone(row_of_steps("a", items_max=3)))
    rows = harness.submit_group([5, 3, 4, 1, 2])
    assert harness.answer("a") == [5, 3, 4]
    assert harness.answer("a") == [1, 2]
    assert [harness.output(row) for row in rows] == [5, 3, 4, 1, 2]
    assert harness.is_clean()


def test_a_step_waits_for_all_rows_that_will_come() -> None:
    harness = SchedulerHarness(alone(row_of_steps("a", "b", items_max=3)))
    harness.submit_group([1, 2, 3, 4])
    harness.answer("a")
    assert harness.running() == ["a"]  # b has three rows, and waits for the fourth
    harness.answer("a")
    assert harness.answer("b") == [1, 2, 3]
    assert harness.answer("b") == [4]
    assert harness.is_clean()


def test_the_same_rows_form_the_same_batches_at_any_worker_speed() -> None:
    """Each step receives the same batches in every run, with random worker speeds and failures."""

    def batches(seed: int) -> list[tuple[str, list[Any]]]:
        draws = random.Random(seed)
        p = Builder("both")
        x = p.input("x", "json")
        one = p.step("one", "echo", type="json", value=x, batch={"items_max": 3}, instances=2)
        two = p.step("two", "echo", type="json", value=x, batch={"items_max": 2})
        both = p.step("both", "template", template="{{ a }} {{ b }}", a=one.value, b=two.value, batch={"items_max": 4})
        p.output("y", both.text)
        harness = SchedulerHarness(alone(p))
        harness.submit_group(range(10))
        seen = []
        while harness.running():
            step = draws.choice(harness.running())
            fails = {7} if step == "one" else set()
            given = harness.answer(
                step,
                lambda v, fails=fails: ValueError("drawn") if v in fails else v,  # type: ignore[misc]
            )
            seen.append((step, given))
        assert harness.is_clean()
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
    harness = SchedulerHarness(alone(p))
    rows = harness.submit_group(range(6))
    assert harness.answer("small") == [0, 1, 2]
    assert harness.answer("large") == [3, 4, 5]
    assert [harness.output(row) for row in rows] == list(range(6))
    assert harness.is_clean()


def test_a_group_waits_for_a_fallback_and_the_fallback_for_the_group() -> None:
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
    harness = SchedulerHarness(plan)
    rows = harness.submit_group(range(6))
    for _ in range(3):
        harness.answer("main", lambda v: ValueError("odd") if v % 2 else v)
    assert harness.running() == ["spare"]
    assert harness.answer("spare") == [1, 3, 5]
    assert harness.answer("end") == [0, 1, 2, 3, 4, 5]
    assert [harness.output(row) for row in rows] == list(range(6))
    assert harness.is_clean()


def test_rows_that_are_withdrawn_are_not_waited_for() -> None:
    harness = SchedulerHarness(alone(row_of_steps("a", "b", items_max=2)))
    rows = harness.submit_group([1, 2, 3, 4])
    harness.answer("a")
    harness.withdraw(rows[3])
    harness.withdraw(rows[0])  # held at b
    harness.answer("a")
    assert harness.answer("b") == [2, 3]
    assert harness.is_clean()


def test_a_death_does_not_change_the_order_of_a_group() -> None:
    harness = SchedulerHarness(alone(row_of_steps("a", "b", items_max=4)))
    rows = harness.submit_group([1, 2, 3, 4])
    harness.die_and_return(harness.worker_running("a"))
    while harness.running() == ["a"]:
        harness.answer("a")
    assert harness.answer("b") == [1, 2, 3, 4]
    assert [harness.output(row) for row in rows] == [1, 2, 3, 4]


def test_its_own_time_limit_counts_from_when_all_are_there() -> None:
    p = Builder("limit")
    a = p.step("a", "echo", type="json", value=p.input("x", "json"), batch={"items_max": 1})
    b = p.step("b", "echo", type="json", value=a.value, timeout_ms=50, batch={"items_max": 2})
    p.output("y", b.value)
    harness = SchedulerHarness(alone(p))
    rows = harness.submit_group([1, 2])
    harness.answer("a")
    harness.advance(500)  # the second takes its time in `a`; the first waits at b, and its time does not run
    harness.answer("a")
    harness.answer("b")
    assert [harness.output(row) for row in rows] == [1, 2]


def test_usual_requests_go_first_and_a_job_stays_off_reserved_instances() -> None:
    p = Builder("shared")
    a = p.step("a", "echo", type="json", value=p.input("x", "json"), instances=2, reserved=1, batch={"items_max": 1})
    p.output("y", a.value)
    harness = SchedulerHarness(p)
    harness.submit_group(["row 1", "row 2", "row 3"])
    assert [harness.batch("a")] == [["row 1"]]
    assert len(harness.running()) == 1
    usual = harness.submit(x="usual")
    assert len(harness.running()) == 2
    later = harness.submit(x="later")
    busy = harness.worker_running("a")
    free = next(worker for worker, runs in harness.inbox.items() if runs and worker != busy)
    job = free if harness.value_of[harness.inbox[free][0].items[0].id] == "row 1" else busy
    harness.answer("a", worker=job)
    assert harness.value_of[harness.inbox[job][0].items[0].id] == "later"
    assert usual and later


def test_a_job_beside_requests_has_one_bounded_batch_with_a_worker() -> None:
    p = row_of_steps("a", items_max=8)
    plan = plan_of(p)
    harness = SchedulerHarness(replace(plan, limits=replace(plan.limits, job_batch_ms=20.0)))
    for size in (1, 2, 4, 8):  # an item takes 5 ms
        for _ in range(20):
            harness.submit_all(range(size))
            while harness.running():
                run_ms = 5.0 * len(harness.batch("a"))
                harness.now_ms += run_ms
                harness.answer("a", run_ms=run_ms)
    harness.submit_group(range(8))
    assert sum(map(len, harness.inbox.values())) == 1
    assert 3 <= len(harness.batch("a")) <= 4


def test_single_rows_form_batches_as_they_leave() -> None:
    harness = SchedulerHarness(row_of_steps("a", items_max=3))
    for value in range(5):
        harness.handle(job_row(value + 1, value))
    assert [harness.answer("a") for _ in range(3)] == [[0], [1, 2, 3], [4]]
    assert harness.is_clean()


def job_row(request: int, value: int) -> Any:
    from tests.engine.scheduler_harness import json
    from weftline.engine.scheduler import events as ev

    return ev.Submitted(request=request, inputs={"x": json(value)}, job=True)


def test_the_seed_of_a_row_reaches_its_item() -> None:
    harness = SchedulerHarness(alone(row_of_steps("a")))
    harness.submit_group([1], seed=77)
    assert harness.inbox[0][0].items[0].metadata == msg.ItemMetadata(-100, None, seed=77)


@pytest.mark.parametrize("items_max", [1, 3])
def test_long_rows_share_batches_with_long_ones(items_max: int) -> None:
    harness = SchedulerHarness(alone(row_of_steps("a", items_max=items_max)))
    words = ["a" * 50, "b", "c" * 49, "d", "e", "f" * 48]
    rows = harness.submit_group(words)
    seen = []
    while harness.running():
        seen.append(harness.answer("a"))
    if items_max == 3:
        assert seen == [["b", "d", "e"], ["f" * 48, "c" * 49, "a" * 50]]
    assert [harness.output(row) for row in rows] == words


def test_inputs_of_jobs_leave_memory_for_usual_requests() -> None:
    plan = plan_of(row_of_steps("a"))
    harness, most = SchedulerHarness(plan), plan.limits.arena_bytes
    held = harness.scheduler.try_reserve([most // 4], job=True) + harness.scheduler.try_reserve([most // 4], job=True)
    with pytest.raises(LimitReached):
        harness.scheduler.try_reserve([1 << 16], job=True)
    held += harness.scheduler.try_reserve([most // 4])
    harness.scheduler.give_up(held)
    harness.scheduler.give_up(harness.scheduler.try_reserve([most // 4 * 3], job=True))  # larger than its share
    assert harness.is_clean()


def test_a_streaming_step_holds_few_rows_of_jobs_beside_usual_requests() -> None:
    p = Builder("streams")
    p.output("y", p.step("a", "trickle", value=p.input("x", "text")).value)
    harness = SchedulerHarness(p)
    text = [msg.Value("text", data=b"%d" % n) for n in range(100)]
    usual = harness.submit(x=msg.Value("text", data=b"usual"))
    rows = harness.submit_group(text)
    assert len(harness.streaming[0]) == 1 + 4
    harness.send_chunk(0, "done", last=True, position=1)
    assert len(harness.streaming[0]) == 1 + 4  # the next row of the job comes for the one that ended
    harness.send_chunk(0, "done", last=True, position=0)
    assert isinstance(harness.ended[usual], ev.Finish)
    assert len(harness.streaming[0]) == 4
    harness.advance(1900)
    assert len(harness.streaming[0]) == 4
    harness.advance(200)  # no usual request came for two seconds
    assert len(harness.streaming[0]) == 64
    while harness.streaming[0]:
        harness.send_chunk(0, "done", last=True)
    assert all(isinstance(harness.ended[row], ev.Finish) for row in rows)
    assert harness.is_clean()


def test_rows_of_jobs_at_another_step_of_the_worker_are_no_usual_requests() -> None:
    p = Builder("two-streams")
    x = p.input("x", "text")
    one = p.step("one", "trickle", value=x, worker="w")
    two = p.step("two", "trickle", value=x, worker="w")
    p.output("y", one.value)
    p.output("z", two.value)
    harness = SchedulerHarness(p)
    harness.submit_group([msg.Value("text", data=b"%d" % n) for n in range(10)])
    assert len(harness.streaming[0]) == 20
