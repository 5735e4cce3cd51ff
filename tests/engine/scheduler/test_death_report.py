"""A worker's death is one log line: step, cause, the tasks that it ran, and what happens next."""

from __future__ import annotations

import pytest

from tests.engine.scheduler.test_failures import one_step, say_digests
from tests.engine.scheduler_harness import SchedulerHarness
from weftline.engine.protocol import messages as msg
from weftline.engine.scheduler import events as ev
from weftline.engine.worker.main import DEVICE_LOST


def reports(harness: SchedulerHarness) -> list[tuple[str, str]]:
    """Return every report so far: the death, and what happens next."""
    return [(one.message, one.then) for one in harness.all_commands if isinstance(one, ev.LogDeath)]


def causes(harness: SchedulerHarness) -> dict[tuple[str, str], int]:
    return harness.scheduler.counters.deaths_by


def test_an_idle_worker_that_dies_is_reported_with_its_restart() -> None:
    harness = SchedulerHarness(one_step())
    harness.handle(ev.WorkerDied(0, harness.arena[0], "signal 11, SIGSEGV", cause="signal", last="Fatal: it broke"))
    ((message, then),) = reports(harness)
    name = harness.plan.workers[0].name
    assert message == (
        f"worker {name} died: signal 11, SIGSEGV (signal); step a; it ran no task; last line 'Fatal: it broke'"
    )
    assert then.startswith("restart in ") and then.endswith(" ms")
    assert causes(harness) == {("a", "signal"): 1}


def test_the_tasks_of_a_dead_worker_are_bisected_retried_and_quarantined() -> None:
    harness = SchedulerHarness(one_step())
    harness.submit_all(["warm", "killer", 2, 3])
    harness.answer("a")
    fates = []
    while harness.running():
        if harness.inbox[0][0].suspect:
            say_digests(harness)
        if "killer" in harness.batch("a"):
            harness.die_and_return(0)
            fates.append(reports(harness)[-1])
        else:
            harness.answer("a")
    assert "it ran 3 tasks (requests " in fates[0][0] and fates[0][1].startswith("3 tasks bisected; restart in ")
    assert "it ran 1 task (requests " in fates[-1][0]
    assert fates[-1][1].startswith("1 task failed; 1 input quarantined; restart in ")
    assert len(reports(harness)) == harness.scheduler.counters.deaths == len(fates)


def test_a_worker_that_keeps_failing_to_open_is_given_up() -> None:
    harness = SchedulerHarness(one_step())
    harness.die(0)
    while harness.scheduler.workers[0].state != "given_up":
        harness.advance((harness.scheduler.workers[0].start_ms or harness.now_ms) - harness.now_ms + 0.001)
        harness.receive(0, msg.Hello(1, 1 << 20))
        harness.receive(0, msg.OpenFailed("a", msg.Failure("ModelError", "no such file")))
        harness.die(0, "exit code 0")
    message, then = reports(harness)[-1]
    assert "died while it started: " in message and "no such file (open_failed)" in message
    assert then == "given up, because it keeps failing to start"
    assert causes(harness)["a", "open_failed"] == len(reports(harness)) - 1


def test_a_silent_worker_is_reported_as_a_timeout() -> None:
    harness = SchedulerHarness(one_step())
    harness.submit(x=1)
    harness.advance(harness.plan.limits.silence_max_ms + 1000, silent=[0])
    harness.die(0, "signal 9, SIGKILL")
    (message, then) = reports(harness)[-1]
    assert "died: it sent no heartbeat for " in message and "(timeout)" in message
    assert then.startswith("1 task retried; restart in ")
    assert causes(harness) == {("a", "timeout"): 1}


@pytest.mark.parametrize(
    ("how", "cause", "expected"),
    [
        ("exit code 3", "exit", "exit"),
        ("signal 9, SIGKILL; out of memory: ...", "out_of_memory", "out_of_memory"),
        (f"exit code {DEVICE_LOST}", "exit", "device_lost"),
        ("it sent an invalid message", "invalid_message", "invalid_message"),
    ],
)
def test_each_death_counts_under_one_known_cause(how: str, cause: str, expected: str) -> None:
    harness = SchedulerHarness(one_step())
    harness.handle(ev.WorkerDied(0, harness.arena[0], how, cause=cause))
    assert causes(harness) == {("a", expected): 1} and expected in ev.CAUSES
    assert f"died: {how} ({expected})" in reports(harness)[0][0]
