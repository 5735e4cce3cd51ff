"""Between the scheduler and whoever it commands: whom it tells what, and when time passes."""

from __future__ import annotations

from typing import Any

from weftline.engine.alarm import GRACE_MS, PAUSE_MS
from weftline.engine.clock import ManualClock
from weftline.engine.conductor import Conductor
from weftline.engine.scheduling import events as ev


class Diary:
    """Stands for scheduler and fleet, and writes down what the conductor does with them."""

    def __init__(self, wake_at_ms: float | None) -> None:
        self.wake_at = wake_at_ms
        self.unread = 2
        self.done: list[str] = []

    def wake_at_ms(self) -> float | None:
        return self.wake_at

    def on(self, event: ev.Event, now_ms: float) -> list[ev.Command]:
        self.done.append(f"{type(event).__name__} {now_ms:.0f}")
        return []

    def wait_ready(self, nap_s: float) -> list[tuple[int, int]]:
        self.unread -= 1
        return [(5, 1)] if self.unread >= 0 else []

    def look(self, ready: list[tuple[int, int]], *, wakes: bool = True) -> None:
        self.done.append("look")


def conductor_with(diary: Diary, clock: ManualClock) -> Any:
    stand_in: Any = diary
    conductor: Any = Conductor(stand_in, stand_in, clock)
    conductor.alarm.until_ms = diary.wake_at
    return conductor


def test_time_passes_when_something_is_due_and_not_before() -> None:
    clock, diary = ManualClock(100), Diary(wake_at_ms=110)
    conductor = conductor_with(diary, clock)
    conductor.let_time_pass()
    assert conductor.alarm.until_ms == 110 and diary.done == []
    clock.advance(10)
    conductor.let_time_pass()
    assert diary.done == ["Tick 110"]


def test_who_comes_late_takes_in_what_was_said_before_time_passes() -> None:
    clock, diary = ManualClock(100), Diary(wake_at_ms=110)
    conductor = conductor_with(diary, clock)
    clock.advance(200)
    conductor.let_time_pass()
    assert diary.done == ["look", "look", "Tick 300"]


def test_after_a_long_pause_workers_get_a_moment_to_speak_and_then_time_passes_for_all() -> None:
    clock, diary = ManualClock(0), Diary(wake_at_ms=10)
    conductor = conductor_with(diary, clock)
    clock.advance(PAUSE_MS + 1000)
    conductor.let_time_pass()
    assert conductor.alarm.until_ms == PAUSE_MS + 1000 + GRACE_MS
    assert diary.done == ["look", "look"]
    clock.advance(GRACE_MS + PAUSE_MS)  # late again: a process that is always late goes on all the same
    conductor.let_time_pass()
    assert diary.done[-1].startswith("Tick")


def test_something_due_long_ago_that_nobody_slept_until_is_no_pause() -> None:
    diary = Diary(wake_at_ms=0)
    conductor = conductor_with(diary, ManualClock(1_000_000))
    conductor.alarm.until_ms = None
    conductor.let_time_pass()
    assert diary.done == ["Tick 1000000"]


def test_what_a_listener_answers_is_told_to_the_scheduler() -> None:
    diary = Diary(None)
    conductor = conductor_with(diary, ManualClock())
    conductor.callers.waiting[3] = lambda command: ev.Stalled(3)
    conductor.callers.tell(ev.PieceReady(3, "y", None))
    assert diary.done == ["Stalled 0"]


def test_a_listener_that_raises_loses_its_own_request() -> None:
    diary = Diary(None)
    conductor = conductor_with(diary, ManualClock())
    conductor.callers.waiting[3] = lambda command: 1 / 0
    conductor.callers.tell(ev.PieceReady(3, "y", None))
    assert diary.done == ["Withdrawn 0", "Delivered 0"] and 3 not in conductor.callers.waiting
