"""What becomes of work that failed or whose worker died, decided over plain tasks."""

from __future__ import annotations

import pytest

from tests.engine.scheduler_harness import SchedulerHarness, plan_of
from weftline.engine.scheduler.recovery import DIGESTS_MAX, KEPT_MS, TRIED_AGAIN, Quarantine, Recovery
from weftline.engine.scheduler.request import Request, Task
from weftline.pipelines.spec.builder import Builder


def tasks(count: int, **more: object) -> tuple[Recovery, list[Task]]:
    """Return a Recovery, and tasks of a step that is written with these keys."""
    p = Builder("one-step")
    p.output("y", p.step("a", "echo", value=p.input("x", "text"), **more).value)  # type: ignore[arg-type]
    plan = plan_of(p)
    program = SchedulerHarness(plan, up=False).scheduler.program()
    route = program.routes.route(None)
    request = Request(1, program, route, 0.0, None, 0, [])
    return Recovery(), [Task(id, request, 0, route.units[0], (), (), 0.0) for id in range(count)]


def test_a_group_is_halved_and_its_budget_is_its_own() -> None:
    recovery, eight = tasks(8)
    budget = eight[0].request.program.retries
    while budget.try_take():
        pass
    verdict = recovery.after_death(eight, "signal 9", 0.0)
    assert [[task.id for task in group] for group in verdict.groups] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert {task.deaths for task in eight} == {1} and {task.attempts for task in eight} == {2}


def test_a_lone_task_is_retried_once_and_then_failed_and_quarantined() -> None:
    recovery, (task,) = tasks(1)
    assert recovery.after_death([task], "signal 9", 0.0).groups == [[task]]
    task.digest = b"d"
    verdict = recovery.after_death([task], "signal 9", 0.0)
    assert verdict.failed == [(task, "2 workers died while running this item (signal 9); it is not retried")]
    assert verdict.kept_out == [(0, b"d", task.request.program)]


def test_a_killer_without_a_digest_fails_and_nothing_is_quarantined() -> None:
    recovery, (task,) = tasks(1)
    task.deaths = 1
    verdict = recovery.after_death([task], "signal 9", 0.0)
    assert len(verdict.failed) == 1 and verdict.kept_out == []


def test_among_mates_only_what_may_run_twice_is_tried_again() -> None:
    recovery, (one, other) = tasks(2)
    other.streamed = True
    verdict = recovery.after_death([one, other], "signal 9", 0.0)
    assert verdict.groups == [[one]]
    assert [task for task, _ in verdict.failed] == [other]


def test_deaths_do_not_use_up_the_attempts_that_a_step_allows() -> None:
    recovery, (task,) = tasks(1, retry=1)
    recovery.after_death([task], "signal 9", 0.0)
    assert recovery.try_again_in_ms(task, "StepError", False) == 0.0
    assert recovery.try_again_in_ms(task, "StepError", False) is None


def test_waits_double() -> None:
    recovery, (task,) = tasks(1, retry={"attempts": 3, "wait_ms": 10})
    assert [recovery.try_again_in_ms(task, "StepError", False) for _ in range(4)] == [10.0, 20.0, 40.0, None]


@pytest.mark.parametrize("error", sorted(TRIED_AGAIN))
def test_what_may_pass_is_tried_again(error: str) -> None:
    recovery, (task,) = tasks(1, retry=1)
    assert recovery.try_again_in_ms(task, error, False) == 0.0


@pytest.mark.parametrize("error", ["InputError", "RequestCancelled"])
def test_another_attempt_would_not_help(error: str) -> None:
    recovery, (task,) = tasks(1, retry=1)
    assert recovery.try_again_in_ms(task, error, False) is None


def test_a_stream_that_sent_chunks_is_not_retried() -> None:
    recovery, (task,) = tasks(1, retry=1)
    task.streamed = True
    assert recovery.try_again_in_ms(task, "StepError", False) is None


def test_work_that_must_not_run_twice_is_not_retried_while_it_may_run() -> None:
    recovery, (task,) = tasks(1, retry=1, timeout_ms=10, idempotent=False)
    assert recovery.try_again_in_ms(task, "DeadlineExceeded", True, at_work=True) is None
    assert recovery.try_again_in_ms(task, "DeadlineExceeded", True) == 0.0


def test_a_digest_is_kept_for_its_step_alone() -> None:
    quarantine = Quarantine()
    assert quarantine.add(1, b"a", 0.0)
    assert quarantine.add(2, b"b", 0.0)
    assert quarantine.digests(1) == (b"a",)
    assert quarantine.digests(3) == ()


def test_adding_it_again_is_no_news_and_begins_its_hour_anew() -> None:
    quarantine = Quarantine()
    quarantine.add(1, b"a", 0.0)
    quarantine.add(1, b"b", 1.0)
    assert not quarantine.add(1, b"a", 2.0)
    assert quarantine.digests(1) == (b"b", b"a")
    assert quarantine.forget(1.0 + KEPT_MS) == [1]
    assert quarantine.digests(1) == (b"a",)


def test_it_is_forgotten_after_an_hour() -> None:
    quarantine = Quarantine()
    quarantine.add(1, b"a", 0.0)
    assert quarantine.forget(KEPT_MS - 1) == []
    assert quarantine.add(2, b"b", KEPT_MS)
    assert quarantine.digests(1) == ()
    assert quarantine.add(1, b"a", KEPT_MS)


def test_the_oldest_goes_when_there_are_too_many() -> None:
    quarantine = Quarantine()
    for number in range(DIGESTS_MAX + 2):
        quarantine.add(1, b"%d" % number, 0.0)
    assert len(quarantine.digests(1)) == DIGESTS_MAX
    assert quarantine.digests(1)[0] == b"2"
