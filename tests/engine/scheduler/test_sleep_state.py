"""Test the sleep state table, and the worker's flag for steps in transition."""

import pytest

from weftline.engine.scheduler.sleep_state import ASLEEP, AWAKE, FALLING, TRANSITIONS, WAKING, SleepState


def test_a_step_falls_asleep_sleeps_wakes_and_leaves_nothing() -> None:
    rest, seen = SleepState(), []
    for event in ("sleep", "slept", "wake", "awake"):
        rest.move(3, event)
        seen.append((rest.state(3), rest.moving, rest.any))
    assert seen == [(FALLING, True, True), (ASLEEP, False, True), (WAKING, True, True), (AWAKE, False, False)]


def test_a_move_that_the_table_does_not_have_is_refused() -> None:
    rest = SleepState()
    for event in ("slept", "wake", "awake"):
        with pytest.raises(ValueError, match=f"a step that is awake has no event {event}"):
            rest.move(0, event)
    assert {state for state, _ in TRANSITIONS} == {AWAKE, FALLING, ASLEEP, WAKING}


def test_all_of_several_steps_sleep_or_not() -> None:
    rest = SleepState()
    assert not rest.asleep(())
    for step in (0, 1):
        rest.move(step, "sleep")
        assert not rest.asleep((0, 1))
        rest.move(step, "slept")
    assert rest.asleep((0, 1)) and not rest.asleep((0, 1, 2))
    rest.clear()
    assert (rest.state(0), rest.moving, rest.any) == (AWAKE, False, False)


def test_a_worker_is_loading_from_a_wake_until_the_step_is_awake() -> None:
    rest = SleepState()
    for step in (0, 1):
        rest.move(step, "sleep")
        rest.move(step, "slept")
        rest.begin(step)
        assert not rest.loading, "no wake was sent"
        rest.move(step, "wake")
    assert not rest.loading, "the wake was sent, and has not begun"
    rest.begin(0)
    assert rest.loading
    rest.move(0, "awake")
    assert not rest.loading, "the next one is still to be come to"
    rest.begin(1)
    rest.clear()
    assert not rest.loading
