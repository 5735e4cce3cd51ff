"""When the event loop wakes next, and how late it woke."""

from __future__ import annotations

from weftline.engine.runtime.timer import GRACE_MS, LATE_MS, PAUSE_MS, SLEEP_MAX_S, WakeTimer


def test_the_timer_sleeps_until_an_event_is_due_within_system_limits() -> None:
    timer = WakeTimer()
    assert timer.sleep_s(None, 0) == -1
    assert timer.sleep_s(1500, 1000) == 0.5 and timer.sleep_s(1500, 2000) == 0
    assert timer.sleep_s(1e12, 0) == SLEEP_MAX_S


def test_only_a_sleeping_thread_is_woken_and_only_once() -> None:
    timer = WakeTimer()
    assert not timer.wakes_for(5)  # it looks again before it sleeps
    timer.sleep_s(10, 0)
    assert not timer.wakes_for(10) and not timer.wakes_for(None)
    assert timer.wakes_for(9) and not timer.wakes_for(8)
    timer.sleep_s(None, 0)
    assert timer.wakes_for(1e9)


def test_a_little_late_is_nothing_and_late_reads_messages_first() -> None:
    timer = WakeTimer()
    timer.sleep_s(100, 0)
    assert not timer.late(100 + LATE_MS)
    assert timer.late(101 + LATE_MS) and timer.grace_until_ms(101 + LATE_MS) is None
    timer.sleep_s(None, 0)
    assert not timer.late(1e9)  # no thread slept until that moment


def test_each_pause_has_one_grace_period() -> None:
    timer = WakeTimer()
    timer.sleep_s(0, 0)
    now = PAUSE_MS + 1
    assert timer.late(now) and timer.grace_until_ms(now) == now + GRACE_MS
    timer.sleep_s(now + GRACE_MS, now)
    later = now + GRACE_MS + PAUSE_MS + 1
    assert timer.late(later) and timer.grace_until_ms(later) is None  # late again, and not put off again
    timer.advanced()
    assert timer.late(later) and timer.grace_until_ms(later) == later + GRACE_MS
