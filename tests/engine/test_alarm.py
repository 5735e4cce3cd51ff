"""The moment the runtime's thread sleeps until, and how late it was."""

from __future__ import annotations

from weftline.engine.alarm import GRACE_MS, LATE_MS, NAP_S_MAX, PAUSE_MS, Alarm


def test_it_sleeps_until_something_is_due_and_never_longer_than_the_system_can_count() -> None:
    alarm = Alarm()
    assert alarm.nap_s(0) == -1
    alarm.set(1500)
    assert alarm.nap_s(1000) == 0.5 and alarm.nap_s(2000) == 0
    alarm.set(1e12)
    assert alarm.nap_s(0) == NAP_S_MAX


def test_only_a_sleeper_is_woken_and_once_for_what_is_due_before_it_would_come() -> None:
    alarm = Alarm()
    assert not alarm.sooner(5)  # it looks again before it sleeps
    alarm.set(10)
    assert not alarm.sooner(10) and not alarm.sooner(None)
    assert alarm.sooner(9) and not alarm.sooner(8)
    alarm.set(None)
    assert alarm.sooner(1e9)


def test_a_little_late_is_nothing_and_late_is_made_up_for_first() -> None:
    alarm = Alarm()
    alarm.set(100)
    assert not alarm.missed(100 + LATE_MS)
    assert alarm.missed(101 + LATE_MS) and alarm.quiet_until(101 + LATE_MS) is None
    alarm.set(None)
    assert not alarm.missed(1e9)  # nobody slept until that moment


def test_after_a_pause_there_is_one_moment_of_grace_and_the_next_pause_is_a_new_one() -> None:
    alarm = Alarm()
    alarm.set(0)
    now = PAUSE_MS + 1
    assert alarm.missed(now) and alarm.quiet_until(now) == now + GRACE_MS
    alarm.set(now + GRACE_MS)
    later = now + GRACE_MS + PAUSE_MS + 1
    assert alarm.missed(later) and alarm.quiet_until(later) is None  # late again, and not put off again
    alarm.passed()
    assert alarm.missed(later) and alarm.quiet_until(later) == later + GRACE_MS
