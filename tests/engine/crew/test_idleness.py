"""When steps go to sleep, what wakes them, and that nobody is forgotten in between."""

from __future__ import annotations

from typing import Any

import pytest

from tests.engine.desk import Desk
from weftline.engine import messages as msg
from weftline.engine.scheduling import events as ev
from weftline.engine.snapshot import snapshot
from weftline.pipelines.builder import Builder

IDLE_S = 10.0


def one_step(keep: str = "process", **more: Any) -> Builder:
    p = Builder("one-step")
    idle = {"after_s": IDLE_S, "keep": keep}
    p.output("y", p.step("a", "echo", type="json", value=p.input("x", "json"), idle=idle, **more).value)
    return p


def two_steps(keep: str = "process", worker: str | None = None, **second: Any) -> Builder:
    p = Builder("two-steps")
    idle = {"after_s": IDLE_S, "keep": keep}
    a = p.step("a", "echo", type="json", value=p.input("x", "json"), idle=idle, worker=worker)
    more = {"idle": idle, "worker": worker, **second}
    p.output("y", p.step("b", "echo", type="json", value=a.value, **more).value)
    return p


def asleep(pipeline: Builder) -> Desk:
    """Return a desk whose steps sleep, in processes that live."""
    desk = Desk(pipeline)
    desk.advance(IDLE_S * 1000)
    for worker, order in orders(desk, msg.Sleep):
        desk.hear(worker, msg.Slept(order.step, 100))
    return desk


def orders(desk: Desk, kind: type[Any], everything: bool = False) -> list[tuple[int, Any]]:
    """Return (worker, message) of a kind that the last event led to, or all since the start."""
    said = desk.all if everything else desk.said
    return [(one.worker, one.message) for one in said if isinstance(one, ev.Send) and isinstance(one.message, kind)]


def started(desk: Desk) -> list[int]:
    """Return the workers that are started when time next passes."""
    desk.advance(0)
    return [one.worker for one in desk.said if isinstance(one, ev.StartWorker)]


def idle(desk: Desk, step: str = "a") -> Any:
    return snapshot(desk.scheduler, 0, 0)["idle"][step]


def health(desk: Desk) -> dict[str, bool]:
    return desk.scheduler.health(desk.now_ms)


# going to sleep


def test_a_step_sleeps_when_nobody_has_asked_since_it_opened() -> None:
    desk = Desk(one_step("host"))
    desk.advance(IDLE_S * 1000 - 1)
    assert orders(desk, msg.Sleep) == []
    desk.advance(1)
    assert orders(desk, msg.Sleep) == [(0, msg.Sleep(0, "host"))]
    assert idle(desk)["state"] == "falling asleep"
    desk.hear(0, msg.Slept(0, 4096))
    assert idle(desk) == {"state": "asleep", "slept": 1, "woken": 0, "freed_bytes": 4096, "wake_ms": 0.0}
    assert health(desk) == {"a": True}


def test_idle_time_counts_from_the_last_answer_of_the_opened_pipeline() -> None:
    desk = Desk(two_steps(), up=False)
    desk.up(0)
    desk.advance(60_000)
    assert orders(desk, msg.Sleep) == [], "the other one is still opening"
    desk.up(1)
    desk.advance(4000)
    desk.submit(x=1)
    desk.advance(4000)
    desk.answer("a")
    desk.advance(IDLE_S * 1000 - 1)
    assert orders(desk, msg.Sleep, everything=True) == [], "b is still at work, and a had work until now"
    desk.advance(1)
    assert orders(desk, msg.Sleep) == [(0, msg.Sleep(0, "nothing"))]
    desk.answer("b")
    desk.advance(2 * IDLE_S * 1000)
    assert orders(desk, msg.Sleep) == [(1, msg.Sleep(1, "nothing"))]


def test_a_step_that_an_open_request_is_sure_to_need_stays_awake() -> None:
    desk = Desk(two_steps())
    desk.submit(x=1)
    desk.advance(5 * IDLE_S * 1000)
    assert orders(desk, msg.Sleep, everything=True) == []


def test_a_step_that_works_for_nobody_is_at_work_all_the_same() -> None:
    desk = Desk(one_step())
    desk.withdraw(desk.submit(x=1))
    desk.advance(3 * IDLE_S * 1000)
    assert orders(desk, msg.Sleep, everything=True) == []
    desk.answer("a")
    desk.advance(IDLE_S * 1000)
    assert orders(desk, msg.Sleep) == [(0, msg.Sleep(0, "nothing"))]


def test_a_step_without_idle_never_sleeps() -> None:
    desk = Desk(two_steps(idle=None))
    desk.advance(3 * IDLE_S * 1000)
    assert orders(desk, msg.Sleep, everything=True) == [(0, msg.Sleep(0, "nothing"))]
    assert "b" not in snapshot(desk.scheduler, 0, 0)["idle"]


def test_every_instance_of_a_step_sleeps_and_wakes() -> None:
    desk = Desk(one_step(instances=2))
    desk.advance(IDLE_S * 1000)
    assert orders(desk, msg.Sleep) == [(0, msg.Sleep(0, "nothing")), (1, msg.Sleep(0, "nothing"))]
    desk.hear(0, msg.Slept(0, 30))
    desk.hear(1, msg.Slept(0, 12))
    assert idle(desk)["freed_bytes"] == 42
    desk.submit(x=1)
    assert orders(desk, msg.Wake) == [(0, msg.Wake(0)), (1, msg.Wake(0))]
    desk.hear(1, msg.Awake(0, 5.0))
    assert desk.running() == ["a"], "the first that is awake has the task"


def test_steps_that_hand_over_inside_a_worker_are_used_together() -> None:
    desk = Desk(two_steps(worker="both"))
    desk.advance(6000)
    desk.submit(x=1)
    desk.answer("a")
    desk.advance(6000)
    assert orders(desk, msg.Sleep) == []
    desk.advance(4000)
    assert orders(desk, msg.Sleep) == [(0, msg.Sleep(0, "nothing")), (0, msg.Sleep(1, "nothing"))]
    desk.hear(0, msg.Slept(0, 0))
    desk.hear(0, msg.Slept(1, 0))
    one = desk.submit(x=2)
    assert orders(desk, msg.Wake) == [(0, msg.Wake(0)), (0, msg.Wake(1))]
    desk.hear(0, msg.Awake(0, 1.0))
    assert desk.running() == [], "the second is not awake"
    desk.hear(0, msg.Awake(1, 1.0))
    desk.answer("a")
    assert desk.output(one) == 2


# waking


def test_a_task_wakes_its_step_and_waits_for_it() -> None:
    desk = asleep(one_step())
    desk.advance(1000)
    one = desk.submit(x="hello")
    assert (desk.running(), orders(desk, msg.Wake)) == ([], [(0, msg.Wake(0))])
    assert (idle(desk)["state"], health(desk)) == ("waking", {"a": True})
    desk.advance(700)
    desk.hear(0, msg.Awake(0, 650.0))
    desk.answer("a")
    assert desk.output(one) == "hello"
    assert (idle(desk)["state"], idle(desk)["woken"], idle(desk)["wake_ms"]) == ("awake", 1, 700.0)
    desk.advance(IDLE_S * 1000)
    assert orders(desk, msg.Sleep) == [(0, msg.Sleep(0, "nothing"))]
    assert idle(desk)["slept"] == 2


def test_a_task_that_comes_while_its_step_falls_asleep_wakes_it_as_soon_as_it_has() -> None:
    desk = Desk(one_step())
    desk.advance(IDLE_S * 1000)
    one = desk.submit(x=1)
    assert orders(desk, msg.Wake) == []
    desk.hear(0, msg.Slept(0, 0))
    assert orders(desk, msg.Wake) == [(0, msg.Wake(0))]
    desk.hear(0, msg.Awake(0, 1.0))
    desk.answer("a")
    assert desk.output(one) == 1


def test_steps_that_a_request_is_sure_to_need_wake_beside_each_other() -> None:
    desk = asleep(two_steps())
    desk.submit(x=1)
    assert orders(desk, msg.Wake) == [(0, msg.Wake(0)), (1, msg.Wake(1))]


def test_rows_of_a_job_that_come_together_wake_a_step_too() -> None:
    desk = asleep(one_step(batch={"items_max": 4}))
    desk.submit_together([1, 2])
    assert orders(desk, msg.Wake) == [(0, msg.Wake(0))]
    desk.hear(0, msg.Awake(0, 1.0))
    assert desk.answer("a") == [1, 2]


def test_rows_that_wait_for_each_other_before_a_sleeping_step_wake_it_when_they_go_on() -> None:
    p = Builder("maybe")
    x = p.input("x", "json")
    first = p.step("a", "echo", type="json", value=x, batch={"items_max": 1}, worker="a")
    rare = p.step("b", "echo", type="json", value=first.value, when=f"{x} > 0", idle=IDLE_S, worker="b")
    p.output("y", rare.value)
    desk = asleep(p)
    desk.submit_together([1, 2])
    desk.answer("a")
    desk.answer("a")
    assert orders(desk, msg.Wake) == [(1, msg.Wake(1))]


def test_a_step_behind_a_condition_sleeps_until_it_is_reached() -> None:
    p = Builder("maybe")
    x = p.input("x", "json")
    p.output("z", p.step("a", "echo", type="json", value=x).value)
    rare = p.step("b", "echo", type="json", value=x, when=f"{x} == 1", idle=IDLE_S)
    p.output("y", rare.value)
    desk = asleep(p)
    desk.submit(x=0)
    assert orders(desk, msg.Wake) == []
    desk.submit(x=1)
    assert len(orders(desk, msg.Wake)) == 1


def test_a_worker_is_given_nothing_else_while_one_of_its_steps_wakes() -> None:
    p = Builder("side-by-side")
    for name in "ab":
        idle_s = IDLE_S if name == "a" else None
        step = p.step(name, "echo", type="json", value=p.input(f"x{name}", "json"), idle=idle_s, worker="both")
        p.output(f"y{name}", step.value)
    desk = asleep(p)
    desk.submit(("yb",), xa=None, xb=1)
    assert desk.running() == ["b"], "its neighbour sleeps, and is in nobody's way"
    desk.answer("b")
    desk.submit(("ya",), xa=1, xb=None)
    desk.submit(("yb",), xa=None, xb=2)
    assert desk.running() == []
    desk.hear(0, msg.Awake(0, 1.0))
    assert desk.running() == ["a"]


def test_deadlines_hold_while_a_step_wakes_and_nothing_is_refused_for_it() -> None:
    desk = asleep(one_step())
    one = desk.submit(deadline_ms=50, x=1)
    desk.advance(60)
    assert desk.failure(one).error == "DeadlineExceeded"
    desk.hear(0, msg.Awake(0, 60.0))
    assert desk.running() == []
    assert desk.is_clean()


# without its process


def test_a_worker_whose_steps_are_all_idle_leaves_and_comes_back_on_demand() -> None:
    desk = Desk(two_steps("nothing", worker="both"))
    desk.advance(IDLE_S * 1000)
    assert (orders(desk, msg.Close), orders(desk, msg.Sleep)) == ([(0, msg.Close())], [])
    desk.die(0, "exit code 0")
    assert started(desk) == []
    desk.advance(60_000)
    assert (started(desk), health(desk)) == ([], {"a": True, "b": True})
    figures = snapshot(desk.scheduler, 0, 0)
    assert (figures["worker_deaths"], figures["worker_restarts"]) == (0, 0)
    assert figures["workers"]["a"] == {"ready": 0, "asleep": 1, "all": 1}
    one = desk.submit(x=1)
    assert started(desk) == [0]
    assert health(desk) == {"a": True, "b": True}, "whoever asks whether it can answer is told that it can"
    desk.advance(900)
    desk.up(0)
    desk.answer("a")
    assert desk.output(one) == 1
    assert (idle(desk, "b")["wake_ms"], snapshot(desk.scheduler, 0, 0)["worker_restarts"]) == (900.0, 0)


def test_a_task_that_comes_while_a_worker_leaves_starts_the_next_one() -> None:
    desk = Desk(one_step("nothing"))
    desk.advance(IDLE_S * 1000)
    one = desk.submit(x=1)
    assert (started(desk), orders(desk, msg.Wake)) == ([], [])
    desk.die(0, "exit code 0")
    assert started(desk) == [0]
    desk.up(0)
    desk.answer("a")
    assert desk.output(one) == 1


def test_a_step_sleeps_in_its_process_until_the_others_there_are_idle_too() -> None:
    p = Builder("side-by-side")
    for name in "ab":
        idle = {"after_s": IDLE_S, "keep": "nothing"}
        step = p.step(name, "echo", type="json", value=p.input(f"x{name}", "json"), idle=idle, worker="both")
        p.output(f"y{name}", step.value)
    desk = Desk(p)
    desk.advance(5000)
    desk.submit(("yb",), xa=None, xb=1)
    desk.answer("b")
    desk.advance(5000)
    assert orders(desk, msg.Sleep) == [(0, msg.Sleep(0, "nothing"))]
    desk.hear(0, msg.Slept(0, 0))
    desk.advance(5000)
    assert orders(desk, msg.Close) == [(0, msg.Close())]


def test_a_worker_leaves_as_soon_as_the_last_of_its_steps_sleeps() -> None:
    p = Builder("side-by-side")
    for name, after_s in (("a", IDLE_S), ("b", IDLE_S + 1)):
        idle = {"after_s": after_s, "keep": "nothing"}
        step = p.step(name, "echo", type="json", value=p.input(f"x{name}", "json"), idle=idle, worker="both")
        p.output(f"y{name}", step.value)
    desk = Desk(p)
    desk.advance(IDLE_S * 1000 + 1000)
    assert len(orders(desk, msg.Sleep)) == 2, "b could not leave: a was still on its way"
    desk.hear(0, msg.Slept(0, 0))
    assert orders(desk, msg.Close) == []
    desk.hear(0, msg.Slept(1, 0))
    assert orders(desk, msg.Close) == [(0, msg.Close())]


def test_a_process_stays_while_another_step_in_it_keeps_more() -> None:
    desk = Desk(two_steps("nothing", worker="both", idle={"after_s": IDLE_S, "keep": "host"}))
    desk.advance(IDLE_S * 1000)
    assert orders(desk, msg.Sleep) == [(0, msg.Sleep(0, "nothing")), (0, msg.Sleep(1, "host"))]
    desk.hear(0, msg.Slept(0, 0))
    desk.hear(0, msg.Slept(1, 0))
    desk.advance(5 * IDLE_S * 1000)
    assert orders(desk, msg.Close, everything=True) == []


def test_a_worker_that_does_not_leave_is_killed_and_nothing_is_held_against_it() -> None:
    desk = Desk(one_step("nothing"))
    desk.advance(IDLE_S * 1000)
    desk.advance(3000)
    assert desk.kills() == ["it did not close its nodes within 2 s"]
    desk.die(0)
    assert snapshot(desk.scheduler, 0, 0)["worker_deaths"] == 0
    desk.submit(x=1)
    assert started(desk) == [0]


def test_a_process_whose_tensors_are_read_elsewhere_does_not_leave() -> None:
    desk = Desk(one_step("nothing"))
    member = desk.scheduler.crew.members[0]
    member.near_arena = 77
    desk.scheduler.ledger.add_arena(77, 1 << 20)
    held = desk.scheduler.ledger.try_lease(77, 4096)
    assert held is not None
    desk.advance(IDLE_S * 1000)
    assert (orders(desk, msg.Close), orders(desk, msg.Sleep)) == ([], [(0, msg.Sleep(0, "nothing"))])
    desk.hear(0, msg.Slept(0, 0))
    desk.advance(2 * IDLE_S * 1000)
    assert orders(desk, msg.Close, everything=True) == []
    desk.scheduler.give_up([held])
    desk.advance(IDLE_S * 1000)
    assert orders(desk, msg.Close) == [(0, msg.Close())]


# what goes wrong


def test_a_step_that_cannot_be_woken_costs_its_worker_its_life_and_is_opened_by_the_next() -> None:
    desk = asleep(one_step())
    one = desk.submit(x=1)
    desk.hear(0, msg.Awake(0, 3.0, msg.Failure("ModelError", "its weights are gone")))
    assert desk.kills() == ["step a could not be woken: its weights are gone"]
    desk.die_and_return(0)
    desk.answer("a")
    assert desk.output(one) == 1
    assert snapshot(desk.scheduler, 0, 0)["worker_deaths"] == 1


def test_a_worker_that_dies_asleep_is_started_when_it_is_needed() -> None:
    desk = asleep(one_step())
    desk.die(0)
    desk.advance(120_000)
    assert (started(desk), health(desk), idle(desk)["state"]) == ([], {"a": True}, "asleep")
    one = desk.submit(x=1)
    assert started(desk) == [0]
    desk.up(0)
    desk.answer("a")
    assert desk.output(one) == 1


def test_a_worker_that_dies_on_the_way_to_sleep_is_started_again_and_sleeps_later() -> None:
    desk = Desk(one_step())
    desk.advance(IDLE_S * 1000)
    desk.die_and_return(0)
    assert idle(desk)["state"] == "awake"
    desk.advance(IDLE_S * 1000)
    assert orders(desk, msg.Sleep) == [(0, msg.Sleep(0, "nothing"))]


def test_an_instance_that_comes_back_while_the_others_sleep_sleeps_too() -> None:
    desk = Desk(one_step(instances=2))
    desk.advance(IDLE_S * 1000)
    desk.hear(0, msg.Slept(0, 0))
    desk.die_and_return(1)
    desk.advance(IDLE_S * 1000)
    assert orders(desk, msg.Sleep) == [(1, msg.Sleep(0, "nothing"))]


def test_a_step_that_was_woken_for_nobody_any_more_stays_awake_for_as_long_as_any() -> None:
    desk = asleep(one_step())
    desk.withdraw(desk.submit(x=1))
    desk.advance(1.5 * IDLE_S * 1000)
    desk.hear(0, msg.Awake(0, 15_000.0))
    desk.advance(IDLE_S * 1000 - 1)
    assert orders(desk, msg.Sleep) == []
    desk.advance(1)
    assert orders(desk, msg.Sleep) == [(0, msg.Sleep(0, "nothing"))]


def test_a_worker_that_was_started_for_nobody_any_more_leaves_again() -> None:
    desk = Desk(one_step("nothing"))
    desk.advance(IDLE_S * 1000)
    desk.die(0, "exit code 0")
    one = desk.submit(x=1)
    assert started(desk) == [0]
    desk.withdraw(one)
    desk.advance(2 * IDLE_S * 1000)
    desk.up(0)
    desk.advance(IDLE_S * 1000)
    assert orders(desk, msg.Close) == [(0, msg.Close())]


def test_nothing_is_looked_at_for_ever_once_every_process_of_a_step_has_ended() -> None:
    desk = Desk(one_step("nothing"))
    desk.advance(IDLE_S * 1000)
    desk.die(0, "exit code 0")
    desk.advance(2 * IDLE_S * 1000)
    assert desk.scheduler.wake_at_ms() is None


def test_a_start_on_demand_that_fails_is_a_crash_like_any_other() -> None:
    desk = Desk(one_step("nothing"))
    desk.advance(IDLE_S * 1000)
    desk.die(0, "exit code 0")
    one = desk.submit(x=1)
    assert started(desk) == [0]
    desk.die(0, "exit code 1")
    assert health(desk) == {"a": False}
    desk.crash(0)
    assert "keeps failing to start" in desk.failure(one).message


@pytest.mark.parametrize(
    ("message", "why"),
    [
        (msg.Slept(0, 0), "it said that a step sleeps which was not told to"),
        (msg.Awake(0, 1.0), "it said that a step is awake which was not told to wake"),
        (msg.Slept(9, 0), "it said that a step sleeps which was not told to"),
    ],
)
def test_a_worker_that_says_what_it_was_not_told_loses_its_life(message: msg.FromWorker, why: str) -> None:
    desk = Desk(one_step())
    desk.hear(0, message)
    assert desk.kills() == [why]


@pytest.mark.parametrize(("until", "limit_s"), [("falling asleep", 300), ("waking", 1800)])
def test_a_step_that_never_gets_there_costs_its_worker_its_life(until: str, limit_s: float) -> None:
    desk = Desk(one_step())
    desk.advance(IDLE_S * 1000)
    if until == "waking":
        desk.hear(0, msg.Slept(0, 0))
        desk.submit(x=1)
    desk.advance(limit_s * 1000 - 1)
    assert desk.kills() == []
    desk.advance(1)
    assert desk.kills() == [f"step a was {until} for too long"]


def test_a_step_that_loads_silently_is_left_in_peace() -> None:
    desk = asleep(one_step())
    desk.submit(x=1)
    desk.advance(1)
    desk.hear(0, msg.Progress("a", "waking", 0.0))
    desk.advance(60_000, silent=[0])
    assert (desk.kills(), health(desk)) == ([], {"a": True})
    desk.hear(0, msg.Awake(0, 60_000.0))
    desk.advance(60_000, silent=[0])
    assert desk.kills() == ["it gave no sign of life for 3 s"]


def test_a_step_that_loads_silently_is_left_in_peace_when_its_neighbour_is_to_wake_too() -> None:
    p = Builder("side-by-side")
    for name in "ab":
        step = p.step(name, "echo", type="json", value=p.input(f"x{name}", "json"), idle=IDLE_S, worker="both")
        p.output(f"y{name}", step.value)
    desk = asleep(p)
    desk.submit(("ya",), xa=1, xb=None)
    desk.advance(1)
    desk.hear(0, msg.Progress("a", "waking", 0.0))
    desk.advance(1000, silent=[0])
    desk.submit(("yb",), xa=None, xb=1)
    assert orders(desk, msg.Wake) == [(0, msg.Wake(1))]
    desk.advance(60_000, silent=[0])
    assert desk.kills() == []


@pytest.mark.parametrize("until", ["falling asleep", "waking"])
def test_what_a_worker_has_in_hand_beside_a_step_on_its_way_has_its_time_afterwards(until: str) -> None:
    desk = Desk(one_step(run_max_ms=1000))
    member = desk.scheduler.crew.members[0]
    desk.advance(IDLE_S * 1000)
    member.settles[7] = desk.now_ms
    if until == "waking":
        desk.hear(0, msg.Slept(0, 0))
        desk.submit(x=1)
    desk.advance(5000)
    assert desk.kills() == []
    desk.hear(0, msg.Awake(0, 1.0) if until == "waking" else msg.Slept(0, 0))
    desk.advance(900)
    assert desk.kills() == []
    desk.advance(400)
    assert "run_max_ms" in desk.kills()[0]


def test_a_worker_that_was_lost_before_it_heard_that_a_step_is_to_wake_is_not_waited_for() -> None:
    desk = asleep(one_step())
    desk.submit(x=1)
    desk.advance(1)
    desk.hear(0, msg.Beat())
    desk.advance(4000, silent=[0])
    assert desk.kills() == ["it gave no sign of life for 3 s"], "its heart beat, and it said nothing of waking"
