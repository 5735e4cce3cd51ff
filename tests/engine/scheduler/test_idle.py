"""Test idle steps: when they sleep, what wakes them, and that no request is lost in between."""

from __future__ import annotations

from typing import Any

import pytest

from tests.engine.scheduler_harness import SchedulerHarness
from weftline.engine.protocol import messages as msg
from weftline.engine.scheduler import events as ev
from weftline.pipelines.spec.builder import Builder

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


def asleep(pipeline: Builder) -> SchedulerHarness:
    """Return a harness whose steps sleep, in processes that live."""
    harness = SchedulerHarness(pipeline)
    harness.advance(IDLE_S * 1000)
    for worker, order in orders(harness, msg.Sleep):
        harness.receive(worker, msg.Asleep(order.step, 100))
    return harness


def orders(harness: SchedulerHarness, kind: type[Any], everything: bool = False) -> list[tuple[int, Any]]:
    """Return (worker, message) of a kind that the last event led to, or all since the start."""
    said = harness.all_commands if everything else harness.commands
    return [(one.worker, one.message) for one in said if isinstance(one, ev.Send) and isinstance(one.message, kind)]


def started(harness: SchedulerHarness) -> list[int]:
    """Return the workers that are started when time next passes."""
    harness.advance(0)
    return [one.worker for one in harness.commands if isinstance(one, ev.StartWorker)]


def idle(harness: SchedulerHarness, step: str = "a") -> Any:
    return harness.stats()["idle"][step]


def health(harness: SchedulerHarness) -> dict[str, bool]:
    return harness.scheduler.health(harness.now_ms)


# going to sleep


def test_a_step_sleeps_when_no_request_came_since_it_opened() -> None:
    harness = SchedulerHarness(one_step("host"))
    harness.advance(IDLE_S * 1000 - 1)
    assert orders(harness, msg.Sleep) == []
    harness.advance(1)
    assert orders(harness, msg.Sleep) == [(0, msg.Sleep(0, "host"))]
    assert idle(harness)["state"] == "falling asleep"
    harness.receive(0, msg.Asleep(0, 4096))
    assert idle(harness) == {"state": "asleep", "slept": 1, "woken": 0, "freed_bytes": 4096, "wake_ms": 0.0}
    assert health(harness) == {"a": True}


def test_idle_time_counts_from_the_last_answer_of_the_opened_pipeline() -> None:
    harness = SchedulerHarness(two_steps(), up=False)
    harness.start_worker(0)
    harness.advance(60_000)
    assert orders(harness, msg.Sleep) == [], "the other one is still opening"
    harness.start_worker(1)
    harness.advance(4000)
    harness.submit(x=1)
    harness.advance(4000)
    harness.answer("a")
    harness.advance(IDLE_S * 1000 - 1)
    assert orders(harness, msg.Sleep, everything=True) == [], "b is still at work, and a had work until now"
    harness.advance(1)
    assert orders(harness, msg.Sleep) == [(0, msg.Sleep(0, "nothing"))]
    harness.answer("b")
    harness.advance(2 * IDLE_S * 1000)
    assert orders(harness, msg.Sleep) == [(1, msg.Sleep(1, "nothing"))]


def test_a_step_that_an_open_request_is_sure_to_need_stays_awake() -> None:
    harness = SchedulerHarness(two_steps())
    harness.submit(x=1)
    harness.advance(5 * IDLE_S * 1000)
    assert orders(harness, msg.Sleep, everything=True) == []


def test_a_step_that_runs_a_withdrawn_request_counts_as_busy() -> None:
    harness = SchedulerHarness(one_step())
    harness.withdraw(harness.submit(x=1))
    harness.advance(3 * IDLE_S * 1000)
    assert orders(harness, msg.Sleep, everything=True) == []
    harness.answer("a")
    harness.advance(IDLE_S * 1000)
    assert orders(harness, msg.Sleep) == [(0, msg.Sleep(0, "nothing"))]


def test_a_step_without_idle_never_sleeps() -> None:
    harness = SchedulerHarness(two_steps(idle=None))
    harness.advance(3 * IDLE_S * 1000)
    assert orders(harness, msg.Sleep, everything=True) == [(0, msg.Sleep(0, "nothing"))]
    assert "b" not in harness.stats()["idle"]


def test_every_instance_of_a_step_sleeps_and_wakes() -> None:
    harness = SchedulerHarness(one_step(instances=2))
    harness.advance(IDLE_S * 1000)
    assert orders(harness, msg.Sleep) == [(0, msg.Sleep(0, "nothing")), (1, msg.Sleep(0, "nothing"))]
    harness.receive(0, msg.Asleep(0, 30))
    harness.receive(1, msg.Asleep(0, 12))
    assert idle(harness)["freed_bytes"] == 42
    harness.submit(x=1)
    assert orders(harness, msg.Wake) == [(0, msg.Wake(0)), (1, msg.Wake(0))]
    harness.receive(1, msg.Awake(0, 5.0))
    assert harness.running() == ["a"], "the first that is awake has the task"


def test_steps_that_hand_over_inside_a_worker_are_used_together() -> None:
    harness = SchedulerHarness(two_steps(worker="both"))
    harness.advance(6000)
    harness.submit(x=1)
    harness.answer("a")
    harness.advance(6000)
    assert orders(harness, msg.Sleep) == []
    harness.advance(4000)
    assert orders(harness, msg.Sleep) == [(0, msg.Sleep(0, "nothing")), (0, msg.Sleep(1, "nothing"))]
    harness.receive(0, msg.Asleep(0, 0))
    harness.receive(0, msg.Asleep(1, 0))
    one = harness.submit(x=2)
    assert orders(harness, msg.Wake) == [(0, msg.Wake(0)), (0, msg.Wake(1))]
    harness.receive(0, msg.Awake(0, 1.0))
    assert harness.running() == [], "the second is not awake"
    harness.receive(0, msg.Awake(1, 1.0))
    harness.answer("a")
    assert harness.output(one) == 2


# waking


def test_a_task_wakes_its_step_and_waits_for_it() -> None:
    harness = asleep(one_step())
    harness.advance(1000)
    one = harness.submit(x="hello")
    assert (harness.running(), orders(harness, msg.Wake)) == ([], [(0, msg.Wake(0))])
    assert (idle(harness)["state"], health(harness)) == ("waking", {"a": True})
    harness.advance(700)
    harness.receive(0, msg.Awake(0, 650.0))
    harness.answer("a")
    assert harness.output(one) == "hello"
    assert (idle(harness)["state"], idle(harness)["woken"], idle(harness)["wake_ms"]) == ("awake", 1, 700.0)
    harness.advance(IDLE_S * 1000)
    assert orders(harness, msg.Sleep) == [(0, msg.Sleep(0, "nothing"))]
    assert idle(harness)["slept"] == 2


def test_a_task_for_a_step_that_falls_asleep_wakes_it_afterwards() -> None:
    harness = SchedulerHarness(one_step())
    harness.advance(IDLE_S * 1000)
    one = harness.submit(x=1)
    assert orders(harness, msg.Wake) == []
    harness.receive(0, msg.Asleep(0, 0))
    assert orders(harness, msg.Wake) == [(0, msg.Wake(0))]
    harness.receive(0, msg.Awake(0, 1.0))
    harness.answer("a")
    assert harness.output(one) == 1


def test_steps_that_a_request_is_sure_to_need_wake_beside_each_other() -> None:
    harness = asleep(two_steps())
    harness.submit(x=1)
    assert orders(harness, msg.Wake) == [(0, msg.Wake(0)), (1, msg.Wake(1))]


def test_rows_of_a_job_that_come_together_wake_a_step_too() -> None:
    harness = asleep(one_step(batch={"items_max": 4}))
    harness.submit_group([1, 2])
    assert orders(harness, msg.Wake) == [(0, msg.Wake(0))]
    harness.receive(0, msg.Awake(0, 1.0))
    assert harness.answer("a") == [1, 2]


def test_rows_grouped_before_a_sleeping_step_wake_it() -> None:
    p = Builder("maybe")
    x = p.input("x", "json")
    first = p.step("a", "echo", type="json", value=x, batch={"items_max": 1}, worker="a")
    rare = p.step("b", "echo", type="json", value=first.value, when=f"{x} > 0", idle=IDLE_S, worker="b")
    p.output("y", rare.value)
    harness = asleep(p)
    harness.submit_group([1, 2])
    harness.answer("a")
    harness.answer("a")
    assert orders(harness, msg.Wake) == [(1, msg.Wake(1))]


def test_a_step_behind_a_condition_sleeps_until_it_is_reached() -> None:
    p = Builder("maybe")
    x = p.input("x", "json")
    p.output("z", p.step("a", "echo", type="json", value=x).value)
    rare = p.step("b", "echo", type="json", value=x, when=f"{x} == 1", idle=IDLE_S)
    p.output("y", rare.value)
    harness = asleep(p)
    harness.submit(x=0)
    assert orders(harness, msg.Wake) == []
    harness.submit(x=1)
    assert len(orders(harness, msg.Wake)) == 1


def test_a_worker_receives_no_dispatch_while_one_of_its_steps_wakes() -> None:
    p = Builder("side-by-side")
    for name in "ab":
        idle_s = IDLE_S if name == "a" else None
        step = p.step(name, "echo", type="json", value=p.input(f"x{name}", "json"), idle=idle_s, worker="both")
        p.output(f"y{name}", step.value)
    harness = asleep(p)
    harness.submit(("yb",), xa=None, xb=1)
    assert harness.running() == ["b"], "its neighbour sleeps and blocks no work"
    harness.answer("b")
    harness.submit(("ya",), xa=1, xb=None)
    harness.submit(("yb",), xa=None, xb=2)
    assert harness.running() == []
    harness.receive(0, msg.Awake(0, 1.0))
    assert harness.running() == ["a"]


def test_deadlines_hold_while_a_step_wakes_and_nothing_is_refused_for_it() -> None:
    harness = asleep(one_step())
    one = harness.submit(deadline_ms=50, x=1)
    harness.advance(60)
    assert harness.failure(one).error == "DeadlineExceeded"
    harness.receive(0, msg.Awake(0, 60.0))
    assert harness.running() == []
    assert harness.is_clean()


# without its process


def test_a_worker_whose_steps_are_all_idle_leaves_and_comes_back_on_demand() -> None:
    harness = SchedulerHarness(two_steps("nothing", worker="both"))
    harness.advance(IDLE_S * 1000)
    assert (orders(harness, msg.Close), orders(harness, msg.Sleep)) == ([(0, msg.Close())], [])
    harness.die(0, "exit code 0")
    assert started(harness) == []
    harness.advance(60_000)
    assert (started(harness), health(harness)) == ([], {"a": True, "b": True})
    figures = harness.stats()
    assert (figures["worker_deaths"], figures["worker_restarts"]) == (0, 0)
    assert figures["workers"]["a"] == {"ready": 0, "asleep": 1, "all": 1}
    one = harness.submit(x=1)
    assert started(harness) == [0]
    assert health(harness) == {"a": True, "b": True}, "a sleeping step counts as healthy"
    harness.advance(900)
    harness.start_worker(0)
    harness.answer("a")
    assert harness.output(one) == 1
    assert (idle(harness, "b")["wake_ms"], harness.stats()["worker_restarts"]) == (900.0, 0)


def test_a_task_that_comes_while_a_worker_leaves_starts_the_next_one() -> None:
    harness = SchedulerHarness(one_step("nothing"))
    harness.advance(IDLE_S * 1000)
    one = harness.submit(x=1)
    assert (started(harness), orders(harness, msg.Wake)) == ([], [])
    harness.die(0, "exit code 0")
    assert started(harness) == [0]
    harness.start_worker(0)
    harness.answer("a")
    assert harness.output(one) == 1


def test_a_step_sleeps_in_its_process_until_the_others_there_are_idle_too() -> None:
    p = Builder("side-by-side")
    for name in "ab":
        idle = {"after_s": IDLE_S, "keep": "nothing"}
        step = p.step(name, "echo", type="json", value=p.input(f"x{name}", "json"), idle=idle, worker="both")
        p.output(f"y{name}", step.value)
    harness = SchedulerHarness(p)
    harness.advance(5000)
    harness.submit(("yb",), xa=None, xb=1)
    harness.answer("b")
    harness.advance(5000)
    assert orders(harness, msg.Sleep) == [(0, msg.Sleep(0, "nothing"))]
    harness.receive(0, msg.Asleep(0, 0))
    harness.advance(5000)
    assert orders(harness, msg.Close) == [(0, msg.Close())]


def test_a_worker_leaves_as_soon_as_the_last_of_its_steps_sleeps() -> None:
    p = Builder("side-by-side")
    for name, after_s in (("a", IDLE_S), ("b", IDLE_S + 1)):
        idle = {"after_s": after_s, "keep": "nothing"}
        step = p.step(name, "echo", type="json", value=p.input(f"x{name}", "json"), idle=idle, worker="both")
        p.output(f"y{name}", step.value)
    harness = SchedulerHarness(p)
    harness.advance(IDLE_S * 1000 + 1000)
    assert len(orders(harness, msg.Sleep)) == 2, "b could not leave: a was still on its way"
    harness.receive(0, msg.Asleep(0, 0))
    assert orders(harness, msg.Close) == []
    harness.receive(0, msg.Asleep(1, 0))
    assert orders(harness, msg.Close) == [(0, msg.Close())]


def test_a_process_stays_while_another_step_in_it_keeps_more() -> None:
    harness = SchedulerHarness(two_steps("nothing", worker="both", idle={"after_s": IDLE_S, "keep": "host"}))
    harness.advance(IDLE_S * 1000)
    assert orders(harness, msg.Sleep) == [(0, msg.Sleep(0, "nothing")), (0, msg.Sleep(1, "host"))]
    harness.receive(0, msg.Asleep(0, 0))
    harness.receive(0, msg.Asleep(1, 0))
    harness.advance(5 * IDLE_S * 1000)
    assert orders(harness, msg.Close, everything=True) == []


def test_a_worker_that_does_not_exit_is_killed_without_blame() -> None:
    harness = SchedulerHarness(one_step("nothing"))
    harness.advance(IDLE_S * 1000)
    harness.advance(3000)
    assert harness.kill_reasons() == ["it did not close its nodes within 2 s"]
    harness.die(0)
    assert harness.stats()["worker_deaths"] == 0
    harness.submit(x=1)
    assert started(harness) == [0]


def test_a_process_whose_tensors_are_read_elsewhere_does_not_leave() -> None:
    harness = SchedulerHarness(one_step("nothing"))
    worker_state = harness.scheduler.workers[0]
    worker_state.device_arena = 77
    harness.scheduler.ledger.add_arena(77, 1 << 20)
    held = harness.scheduler.ledger.try_lease(77, 4096)
    assert held is not None
    harness.advance(IDLE_S * 1000)
    assert (orders(harness, msg.Close), orders(harness, msg.Sleep)) == ([], [(0, msg.Sleep(0, "nothing"))])
    harness.receive(0, msg.Asleep(0, 0))
    harness.advance(2 * IDLE_S * 1000)
    assert orders(harness, msg.Close, everything=True) == []
    harness.scheduler.give_up([held])
    harness.advance(IDLE_S * 1000)
    assert orders(harness, msg.Close) == [(0, msg.Close())]


# what goes wrong


def test_a_step_that_cannot_wake_is_opened_by_the_next_worker() -> None:
    harness = asleep(one_step())
    one = harness.submit(x=1)
    harness.receive(0, msg.Awake(0, 3.0, msg.Failure("ModelError", "its weights are gone")))
    assert harness.kill_reasons() == ["step a could not be woken: its weights are gone"]
    harness.die_and_return(0)
    harness.answer("a")
    assert harness.output(one) == 1
    assert harness.stats()["worker_deaths"] == 1


def test_a_worker_that_dies_asleep_is_started_when_it_is_needed() -> None:
    harness = asleep(one_step())
    harness.die(0)
    harness.advance(120_000)
    assert (started(harness), health(harness), idle(harness)["state"]) == ([], {"a": True}, "asleep")
    one = harness.submit(x=1)
    assert started(harness) == [0]
    harness.start_worker(0)
    harness.answer("a")
    assert harness.output(one) == 1


def test_a_worker_that_dies_before_its_sleep_restarts_and_sleeps_later() -> None:
    harness = SchedulerHarness(one_step())
    harness.advance(IDLE_S * 1000)
    harness.die_and_return(0)
    assert idle(harness)["state"] == "awake"
    harness.advance(IDLE_S * 1000)
    assert orders(harness, msg.Sleep) == [(0, msg.Sleep(0, "nothing"))]


def test_an_instance_that_comes_back_while_the_others_sleep_sleeps_too() -> None:
    harness = SchedulerHarness(one_step(instances=2))
    harness.advance(IDLE_S * 1000)
    harness.receive(0, msg.Asleep(0, 0))
    harness.die_and_return(1)
    harness.advance(IDLE_S * 1000)
    assert orders(harness, msg.Sleep) == [(1, msg.Sleep(0, "nothing"))]


def test_a_step_woken_for_a_cancelled_request_stays_awake_as_usual() -> None:
    harness = asleep(one_step())
    harness.withdraw(harness.submit(x=1))
    harness.advance(1.5 * IDLE_S * 1000)
    harness.receive(0, msg.Awake(0, 15_000.0))
    harness.advance(IDLE_S * 1000 - 1)
    assert orders(harness, msg.Sleep) == []
    harness.advance(1)
    assert orders(harness, msg.Sleep) == [(0, msg.Sleep(0, "nothing"))]


def test_a_worker_started_for_a_withdrawn_request_stops_again() -> None:
    harness = SchedulerHarness(one_step("nothing"))
    harness.advance(IDLE_S * 1000)
    harness.die(0, "exit code 0")
    one = harness.submit(x=1)
    assert started(harness) == [0]
    harness.withdraw(one)
    harness.advance(2 * IDLE_S * 1000)
    harness.start_worker(0)
    harness.advance(IDLE_S * 1000)
    assert orders(harness, msg.Close) == [(0, msg.Close())]


def test_no_process_is_polled_after_every_one_of_a_step_has_ended() -> None:
    harness = SchedulerHarness(one_step("nothing"))
    harness.advance(IDLE_S * 1000)
    harness.die(0, "exit code 0")
    harness.advance(2 * IDLE_S * 1000)
    assert harness.scheduler.wake_at_ms() is None


def test_a_start_on_demand_that_fails_is_a_crash_like_any_other() -> None:
    harness = SchedulerHarness(one_step("nothing"))
    harness.advance(IDLE_S * 1000)
    harness.die(0, "exit code 0")
    one = harness.submit(x=1)
    assert started(harness) == [0]
    harness.die(0, "exit code 1")
    assert health(harness) == {"a": False}
    harness.crash(0)
    assert "keeps failing to start" in harness.failure(one).message


@pytest.mark.parametrize(
    ("message", "why"),
    [
        (msg.Asleep(0, 0), "it reported that a step sleeps, without a request to sleep"),
        (msg.Awake(0, 1.0), "it reported that a step is awake, without a request to wake"),
        (msg.Asleep(9, 0), "it reported that a step sleeps, without a request to sleep"),
    ],
)
def test_a_worker_that_sends_an_unrequested_reply_is_killed(message: msg.FromWorker, why: str) -> None:
    harness = SchedulerHarness(one_step())
    harness.receive(0, message)
    assert harness.kill_reasons() == [why]


@pytest.mark.parametrize(("until", "limit_s"), [("falling asleep", 300), ("waking", 1800)])
def test_a_step_that_never_gets_there_costs_its_worker_its_life(until: str, limit_s: float) -> None:
    harness = SchedulerHarness(one_step())
    harness.advance(IDLE_S * 1000)
    if until == "waking":
        harness.receive(0, msg.Asleep(0, 0))
        harness.submit(x=1)
    harness.advance(limit_s * 1000 - 1)
    assert harness.kill_reasons() == []
    harness.advance(1)
    assert harness.kill_reasons() == [f"step a was {until} for too long"]


def test_a_step_that_loads_silently_is_left_in_peace() -> None:
    harness = asleep(one_step())
    harness.submit(x=1)
    harness.advance(1)
    harness.receive(0, msg.OpenProgress("a", "waking", 0.0))
    harness.advance(60_000, silent=[0])
    assert (harness.kill_reasons(), health(harness)) == ([], {"a": True})
    harness.receive(0, msg.Awake(0, 60_000.0))
    harness.advance(60_000, silent=[0])
    assert harness.kill_reasons() == ["it sent no heartbeat for 3 s"]


def test_a_step_that_loads_silently_is_not_killed_for_its_neighbour() -> None:
    p = Builder("side-by-side")
    for name in "ab":
        step = p.step(name, "echo", type="json", value=p.input(f"x{name}", "json"), idle=IDLE_S, worker="both")
        p.output(f"y{name}", step.value)
    harness = asleep(p)
    harness.submit(("ya",), xa=1, xb=None)
    harness.advance(1)
    harness.receive(0, msg.OpenProgress("a", "waking", 0.0))
    harness.advance(1000, silent=[0])
    harness.submit(("yb",), xa=None, xb=1)
    assert orders(harness, msg.Wake) == [(0, msg.Wake(1))]
    harness.advance(60_000, silent=[0])
    assert harness.kill_reasons() == []


@pytest.mark.parametrize("until", ["falling asleep", "waking"])
def test_running_work_beside_a_waking_step_has_its_timeout_afterwards(until: str) -> None:
    harness = SchedulerHarness(one_step(run_max_ms=1000))
    worker_state = harness.scheduler.workers[0]
    harness.advance(IDLE_S * 1000)
    worker_state.settles[7] = harness.now_ms
    if until == "waking":
        harness.receive(0, msg.Asleep(0, 0))
        harness.submit(x=1)
    harness.advance(5000)
    assert harness.kill_reasons() == []
    harness.receive(0, msg.Awake(0, 1.0) if until == "waking" else msg.Asleep(0, 0))
    harness.advance(900)
    assert harness.kill_reasons() == []
    harness.advance(400)
    assert "run_max_ms" in harness.kill_reasons()[0]


def test_a_worker_lost_before_it_received_a_wake_up_is_not_waited_for() -> None:
    harness = asleep(one_step())
    harness.submit(x=1)
    harness.advance(1)
    harness.receive(0, msg.Heartbeat())
    harness.advance(4000, silent=[0])
    assert harness.kill_reasons() == ["it sent no heartbeat for 3 s"], "its heart beat, and it said nothing of waking"
