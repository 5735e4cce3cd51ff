"""How a step of several instances rests as a whole, in a word and in figures."""

from __future__ import annotations

from tests.engine.scheduler_harness import SchedulerHarness
from weftline.engine.scheduler import idle
from weftline.engine.scheduler.state import SchedulerState
from weftline.pipelines.spec.builder import Builder


def resting() -> tuple[SchedulerState, SchedulerHarness]:
    """Return a scheduler with a step, 0, whose two instances are falling asleep; they live in workers 0 and 1."""
    p = Builder("two-instances")
    p.output("y", p.step("a", "echo", type="json", value=p.input("x", "json"), instances=2).value)
    harness = SchedulerHarness(p)
    state = harness.scheduler.state
    state.sleep.stats[0] = idle.StepSleep()
    for worker_state in harness.scheduler.workers:
        worker_state.sleep.move(0, "sleep")
        idle.note_sleep(state, 0)
    return state, harness


def goes_on(state: SchedulerState, now_ms: float) -> bool:
    state.now_ms = now_ms
    return idle.update_resting(state, 0)


def call(state: SchedulerState, now_ms: float) -> None:
    state.now_ms = now_ms
    idle.note_wake_request(state, 0)


def test_a_step_is_as_awake_as_the_one_of_its_instances_that_is_most() -> None:
    state, harness = resting()
    one, other = (worker_state.sleep for worker_state in harness.scheduler.workers)
    seen = [idle.step_state(state, 0)]
    for rest, event in ((one, "slept"), (other, "slept"), (one, "wake"), (one, "awake")):
        rest.move(0, event)
        seen.append(idle.step_state(state, 0))
    assert seen == ["falling asleep", "falling asleep", "asleep", "waking", "awake"]
    assert goes_on(state, 0.0), "the other one sleeps still"
    assert idle.asleep_steps(state) == ()


def test_both_instances_together_sleep_once_and_their_bytes_add_up() -> None:
    state, _ = resting()
    idle.note_freed(state, 0, 30)
    idle.note_freed(state, 0, 12)
    assert (idle.stats(state)["a"]["slept"], idle.stats(state)["a"]["freed_bytes"]) == (1, 42)


def test_a_step_is_awake_when_its_first_instance_can_answer() -> None:
    state, harness = resting()
    one, other = (worker_state.sleep for worker_state in harness.scheduler.workers)
    for rest in (one, other):
        rest.move(0, "slept")
        rest.move(0, "wake")
    call(state, 100.0)
    call(state, 150.0)
    assert goes_on(state, 160.0)
    one.move(0, "awake")
    assert goes_on(state, 170.0)
    call(state, 180.0)
    other.move(0, "awake")
    assert not goes_on(state, 400.0)
    assert (idle.stats(state)["a"]["woken"], idle.stats(state)["a"]["wake_ms"], state.sleep.resting) == (
        1,
        70.0,
        set(),
    )


def test_a_step_that_comes_back_unasked_was_not_woken() -> None:
    state, harness = resting()
    for worker in (0, 1):
        harness.die_and_return(worker)
    assert (goes_on(state, 50.0), idle.step_state(state, 0), idle.stats(state)["a"]["woken"]) == (
        False,
        "awake",
        0,
    )
