"""Test worker deaths: suspects, unaffected tasks and quarantined values."""

from __future__ import annotations

import pytest

from tests.engine.scheduler_harness import SchedulerHarness
from weftline.engine.protocol import messages as msg
from weftline.engine.scheduler import events as ev
from weftline.errors import StepError
from weftline.pipelines.spec.builder import Builder
from weftline.pipelines.spec.policy import Limits


def one_step(items_max: int = 8, **more: object) -> Builder:
    p = Builder("one-step")
    batch = {"items_max": items_max}
    a = p.step("a", "echo", type="json", value=p.input("x", "json"), batch=batch, **more)  # type: ignore[arg-type]
    p.output("y", a.value)
    return p


def say_digests(harness: SchedulerHarness) -> None:
    """Send the digests of the suspects: here, their values."""
    run = harness.inbox[0][0]
    digests = tuple(str(harness.value_of[item.id]).encode() for item in run.items)
    harness.receive(0, msg.Suspected(run.dispatch, digests))


def test_a_batch_of_eight_with_one_killer_costs_four_deaths() -> None:
    harness = SchedulerHarness(one_step())
    first, *eight = harness.submit_all(["warm", 1, 2, 3, 4, "killer", 6, 7, 8])
    harness.answer("a")
    deaths = 0
    while harness.running():
        if harness.inbox[0][0].suspect:
            say_digests(harness)
        if "killer" in harness.batch("a"):
            deaths += 1
            harness.die_and_return(0)
        else:
            harness.answer("a")
    killer = eight.pop(4)
    assert deaths == 4 == harness.scheduler.counters.deaths
    assert [harness.output(one) for one in (first, *eight)] == ["warm", 1, 2, 3, 4, 6, 7, 8]
    assert harness.failure(killer).error == "WorkerDied"
    assert harness.failure(killer).message == "4 workers died while running this item (signal 9); it is not retried"
    assert harness.scheduler.counters.quarantined == 1
    assert msg.QuarantineItems(0, (b"killer",)) in harness.sent(msg.QuarantineItems, everything=True)
    assert harness.is_clean()


def test_a_killer_is_kept_out_of_every_later_incarnation() -> None:
    harness = SchedulerHarness(one_step())
    harness.submit(x="killer")
    harness.die_and_return(0)
    say_digests(harness)
    harness.die_and_return(0)
    assert harness.sent(msg.QuarantineItems) == [msg.QuarantineItems(0, (b"killer",))]
    harness.die_and_return(0)
    assert harness.sent(msg.QuarantineItems) == [msg.QuarantineItems(0, (b"killer",))]


def test_the_other_instances_receive_the_quarantined_digest() -> None:
    harness = SchedulerHarness(one_step(instances=2))
    harness.submit(x="killer")
    harness.die(0)
    run = harness.inbox[1][0]  # the other one tries it, alone
    harness.receive(1, msg.Suspected(run.dispatch, (b"killer",)))
    harness.advance((harness.scheduler.workers[0].start_ms or 0.0) - harness.now_ms + 0.001)
    harness.start_worker(0)
    harness.die(1)
    assert harness.commands.count(ev.Send(0, msg.QuarantineItems(0, (b"killer",)))) == 1


def test_a_batch_that_waited_behind_is_not_suspect() -> None:
    harness = SchedulerHarness(one_step(items_max=2))
    for _ in range(4):  # quick enough for a second batch ahead
        harness.submit(x=0)
        harness.answer("a")
    harness.submit(x="running")
    waits = harness.submit_all(["b", "c"])
    assert len(harness.inbox[0]) == 2
    harness.die_and_return(0)
    say_digests(harness)
    harness.answer("a")
    assert harness.batch("a") == ["b", "c"]
    assert not harness.inbox[0][0].suspect
    harness.answer("a")
    assert [timing.outcome for end in map(harness.ended.get, waits) for timing in end.timings] == ["ok", "ok"]  # type: ignore[union-attr]
    assert harness.is_clean()


def test_work_that_must_not_run_twice_just_fails() -> None:
    harness = SchedulerHarness(one_step(idempotent=False))
    one = harness.submit(x=1)
    harness.die(0)
    assert harness.failure(one).message == "the worker died while running this item (signal 9)"
    assert harness.steps_of(one) == [("a", "lost")]
    assert harness.is_clean()


def test_tasks_of_a_dead_worker_run_their_fallback_when_not_retried() -> None:
    harness = SchedulerHarness(one_step(idempotent=False, fallback={"value": "sorry"}))
    one = harness.submit(x=1)
    harness.die(0)
    assert harness.output(one) == "sorry"
    assert harness.is_clean()


def test_a_stream_is_retried_only_before_its_first_chunk() -> None:
    p = Builder("streams")
    p.output("y", p.step("a", "trickle", value=p.input("x", "text")).value)
    harness = SchedulerHarness(p)
    said, silent = (harness.submit(x=msg.Value("text", data=b"a")) for _ in range(2))
    harness.send_chunk(0, "to")
    harness.die_and_return(0)
    assert harness.failure(said).error == "WorkerDied"
    assert silent not in harness.ended
    harness.send_chunk(0, "together", last=True)
    assert harness.output(silent) == "together"
    assert harness.is_clean()


def test_a_suspect_that_fails_and_is_tried_again_stays_alone() -> None:
    harness = SchedulerHarness(one_step(retry=1))
    harness.submit(x="suspect")
    harness.die(0)
    harness.submit_all([1, 2])
    harness.advance(200)
    harness.start_worker(0)
    assert harness.answer("a", lambda x: StepError("drawn")) == ["suspect"]
    assert harness.answer("a") == ["suspect"]
    assert harness.answer("a") == [1, 2]
    assert harness.is_clean()


def test_a_withdrawn_item_dies_quietly_with_its_worker() -> None:
    harness = SchedulerHarness(one_step())
    block = harness.scheduler.try_reserve([1 << 17])[0]
    one = harness.submit(x=msg.Value("json", place=block.place(0, 1 << 17)))
    harness.withdraw(one)
    assert harness.scheduler.ledger.stats().blocks == 1
    harness.die(0)
    assert harness.failure(one).error == "RequestCancelled"
    assert harness.is_clean()


def test_a_death_reported_twice_counts_once() -> None:
    harness = SchedulerHarness(one_step())
    harness.die(0)
    harness.handle(ev.WorkerDied(0, harness.arena[0], "signal 9"))
    assert (harness.scheduler.counters.deaths, harness.scheduler.counters.stale) == (1, 1)


def test_lone_second_attempts_have_the_budget_of_retries() -> None:
    p = Builder("none", limits=Limits(retry_share=0.0))
    p.output("y", p.step("a", "echo", type="json", value=p.input("x", "json")).value)
    harness = SchedulerHarness(p)
    one = harness.submit(x=1)
    harness.die(0)
    assert "the retry budget is used up (limits.retry_share)" in harness.failure(one).message


def test_a_dead_workers_memory_is_forgotten_after_its_last_read() -> None:
    harness = SchedulerHarness(one_step())
    one = harness.submit(x=1)
    harness.receive(0, msg.BufferRequest((100_000,)))
    value = msg.Value("json", place=harness.sent(msg.OutputBuffer)[0].blocks[0].place(0, 100_000))
    harness.answer("a", lambda x: value)
    arena = harness.arena[0]
    harness.die(0)
    assert ev.ForgetArena(arena) not in harness.commands
    harness.handle(ev.Delivered(one))
    assert ev.ForgetArena(arena) in harness.commands


@pytest.mark.parametrize("ready", [True, False])
def test_only_deaths_before_ready_are_a_crash_loop(ready: bool) -> None:
    harness = SchedulerHarness(one_step())
    for _ in range(7):
        start_ms = harness.scheduler.workers[0].start_ms
        if start_ms is not None:
            harness.advance(start_ms - harness.now_ms + 0.001)
            if ready:
                harness.start_worker(0)
        harness.die(0)
    assert harness.scheduler.workers[0].state == ("dead" if ready else "given_up")


def test_a_worker_that_the_system_does_not_let_start_is_always_restarted() -> None:
    harness = SchedulerHarness(one_step())
    one = harness.submit(x=1)
    harness.die(0)
    for _ in range(20):
        harness.advance((harness.scheduler.workers[0].start_ms or 0.0) - harness.now_ms + 0.001)
        harness.die(0, "it could not be started: no process", refused=True)
        assert harness.scheduler.workers[0].state == "dead"
    harness.advance((harness.scheduler.workers[0].start_ms or 0.0) - harness.now_ms + 0.001)
    harness.start_worker(0)
    harness.answer("a")
    assert harness.output(one) == 1


def test_a_death_in_service_is_not_counted_with_those_before_ready() -> None:
    harness = SchedulerHarness(one_step())
    harness.die(0)
    for state in ("dead",) * 5 + ("given_up",):
        harness.advance((harness.scheduler.workers[0].start_ms or 0.0) - harness.now_ms + 0.001)
        harness.die(0)
        assert harness.scheduler.workers[0].state == state
