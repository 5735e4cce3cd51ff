"""A worker has died: who is a suspect, who is answered all the same, and what is kept out from then on."""

from __future__ import annotations

import pytest

from tests.engine.desk import Desk
from weftline.engine import messages as msg
from weftline.engine.scheduling import events as ev
from weftline.errors import StepError
from weftline.pipelines.builder import Builder
from weftline.pipelines.policy import Limits


def one_step(items_max: int = 8, **more: object) -> Builder:
    p = Builder("one-step")
    batch = {"items_max": items_max}
    a = p.step("a", "echo", type="json", value=p.input("x", "json"), batch=batch, **more)  # type: ignore[arg-type]
    p.output("y", a.value)
    return p


def say_digests(desk: Desk) -> None:
    """The worker says what its suspects are made of: here, their values."""
    run = desk.inbox[0][0]
    digests = tuple(str(desk.value_of[item.id]).encode() for item in run.items)
    desk.hear(0, msg.Suspected(run.dispatch, digests))


def test_a_batch_of_eight_with_one_killer_costs_four_deaths_and_seven_are_answered() -> None:
    desk = Desk(one_step())
    first, *eight = desk.submit_all(["warm", 1, 2, 3, 4, "killer", 6, 7, 8])
    desk.answer("a")
    deaths = 0
    while desk.running():
        if desk.inbox[0][0].suspect:
            say_digests(desk)
        if "killer" in desk.batch("a"):
            deaths += 1
            desk.die_and_return(0)
        else:
            desk.answer("a")
    killer = eight.pop(4)
    assert deaths == 4 == desk.scheduler.counters.deaths
    assert [desk.output(one) for one in (first, *eight)] == ["warm", 1, 2, 3, 4, 6, 7, 8]
    assert desk.failure(killer).error == "WorkerDied"
    assert desk.failure(killer).message == "it took 4 workers along (signal 9); it is not tried again"
    assert desk.scheduler.counters.quarantined == 1
    assert msg.Quarantine(0, (b"killer",)) in desk.sent(msg.Quarantine, everything=True)
    assert desk.is_clean()


def test_a_killer_is_kept_out_of_every_later_incarnation() -> None:
    desk = Desk(one_step())
    desk.submit(x="killer")
    desk.die_and_return(0)
    say_digests(desk)
    desk.die_and_return(0)
    assert desk.sent(msg.Quarantine) == [msg.Quarantine(0, (b"killer",))]
    desk.die_and_return(0)
    assert desk.sent(msg.Quarantine) == [msg.Quarantine(0, (b"killer",))]


def test_the_other_instances_are_told_what_to_keep_out() -> None:
    desk = Desk(one_step(instances=2))
    desk.submit(x="killer")
    desk.die(0)
    run = desk.inbox[1][0]  # the other one tries it, alone
    desk.hear(1, msg.Suspected(run.dispatch, (b"killer",)))
    desk.advance((desk.scheduler.crew.members[0].start_ms or 0.0) - desk.now_ms + 0.001)
    desk.up(0)
    desk.die(1)
    assert desk.said.count(ev.Send(0, msg.Quarantine(0, (b"killer",)))) == 1


def test_a_batch_that_waited_behind_is_not_suspect() -> None:
    desk = Desk(one_step(items_max=2))
    for _ in range(4):  # quick enough for a second batch ahead
        desk.submit(x=0)
        desk.answer("a")
    desk.submit(x="running")
    waits = desk.submit_all(["b", "c"])
    assert len(desk.inbox[0]) == 2
    desk.die_and_return(0)
    say_digests(desk)
    desk.answer("a")
    assert desk.batch("a") == ["b", "c"]
    assert not desk.inbox[0][0].suspect
    desk.answer("a")
    assert [timing.outcome for end in map(desk.ended.get, waits) for timing in end.timings] == ["ok", "ok"]  # type: ignore[union-attr]
    assert desk.is_clean()


def test_work_that_must_not_run_twice_just_fails() -> None:
    desk = Desk(one_step(idempotent=False))
    one = desk.submit(x=1)
    desk.die(0)
    assert desk.failure(one).message == "its worker died while running it (signal 9)"
    assert desk.steps_of(one) == [("a", "lost")]
    assert desk.is_clean()


def test_what_a_dying_worker_leaves_is_answered_by_a_stand_in_when_it_is_not_tried_again() -> None:
    desk = Desk(one_step(idempotent=False, fallback={"value": "sorry"}))
    one = desk.submit(x=1)
    desk.die(0)
    assert desk.output(one) == "sorry"
    assert desk.is_clean()


def test_a_stream_that_has_said_something_is_not_tried_again_and_one_that_has_not_is() -> None:
    p = Builder("streams")
    p.output("y", p.step("a", "trickle", value=p.input("x", "text")).value)
    desk = Desk(p)
    said, silent = (desk.submit(x=msg.Value("text", data=b"a")) for _ in range(2))
    desk.piece(0, "to")
    desk.die_and_return(0)
    assert desk.failure(said).error == "WorkerDied"
    assert silent not in desk.ended
    desk.piece(0, "together", last=True)
    assert desk.output(silent) == "together"
    assert desk.is_clean()


def test_a_suspect_that_fails_and_is_tried_again_stays_alone() -> None:
    desk = Desk(one_step(retry=1))
    desk.submit(x="suspect")
    desk.die(0)
    desk.submit_all([1, 2])
    desk.advance(200)
    desk.up(0)
    assert desk.answer("a", lambda x: StepError("drawn")) == ["suspect"]
    assert desk.answer("a") == ["suspect"]
    assert desk.answer("a") == [1, 2]
    assert desk.is_clean()


def test_a_withdrawn_item_dies_quietly_with_its_worker() -> None:
    desk = Desk(one_step())
    block = desk.scheduler.try_reserve([1 << 17])[0]
    one = desk.submit(x=msg.Value("json", place=block.place(0, 1 << 17)))
    desk.withdraw(one)
    assert desk.scheduler.ledger.stats().blocks == 1
    desk.die(0)
    assert desk.failure(one).error == "RequestCancelled"
    assert desk.is_clean()


def test_a_death_told_twice_counts_once() -> None:
    desk = Desk(one_step())
    desk.die(0)
    desk.tell(ev.WorkerDied(0, desk.arena[0], "signal 9"))
    assert (desk.scheduler.counters.deaths, desk.scheduler.counters.stale) == (1, 1)


def test_lone_second_attempts_have_the_budget_of_retries() -> None:
    p = Builder("none", limits=Limits(retry_share=0.0))
    p.output("y", p.step("a", "echo", type="json", value=p.input("x", "json")).value)
    desk = Desk(p)
    one = desk.submit(x=1)
    desk.die(0)
    assert "limits.retry_share is used up" in desk.failure(one).message


def test_a_dead_workers_memory_is_forgotten_when_nobody_reads_it_any_more() -> None:
    desk = Desk(one_step())
    one = desk.submit(x=1)
    desk.hear(0, msg.Need((100_000,)))
    value = msg.Value("json", place=desk.sent(msg.Room)[0].blocks[0].place(0, 100_000))
    desk.answer("a", lambda x: value)
    arena = desk.arena[0]
    desk.die(0)
    assert ev.ForgetArena(arena) not in desk.said
    desk.tell(ev.Delivered(one))
    assert ev.ForgetArena(arena) in desk.said


@pytest.mark.parametrize("ready", [True, False])
def test_only_deaths_before_ready_are_a_crash_loop(ready: bool) -> None:
    desk = Desk(one_step())
    for _ in range(7):
        start_ms = desk.scheduler.crew.members[0].start_ms
        if start_ms is not None:
            desk.advance(start_ms - desk.now_ms + 0.001)
            if ready:
                desk.up(0)
        desk.die(0)
    assert desk.scheduler.crew.members[0].state == ("dead" if ready else "given_up")


def test_a_worker_that_the_system_does_not_let_start_is_never_given_up() -> None:
    desk = Desk(one_step())
    one = desk.submit(x=1)
    desk.die(0)
    for _ in range(20):
        desk.advance((desk.scheduler.crew.members[0].start_ms or 0.0) - desk.now_ms + 0.001)
        desk.die(0, "it could not be started: no process", refused=True)
        assert desk.scheduler.crew.members[0].state == "dead"
    desk.advance((desk.scheduler.crew.members[0].start_ms or 0.0) - desk.now_ms + 0.001)
    desk.up(0)
    desk.answer("a")
    assert desk.output(one) == 1


def test_a_death_in_service_is_not_counted_with_those_before_ready() -> None:
    desk = Desk(one_step())
    desk.die(0)
    for state in ("dead",) * 5 + ("given_up",):
        desk.advance((desk.scheduler.crew.members[0].start_ms or 0.0) - desk.now_ms + 0.001)
        desk.die(0)
        assert desk.scheduler.crew.members[0].state == state
