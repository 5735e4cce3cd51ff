"""Named moments: due in order, replaced by name, taken back at no cost."""

from weftline.engine.scheduler.timers import STALE_MAX, Timers


def test_what_is_due_is_returned_once_earliest_first() -> None:
    timers = Timers()
    timers.add(20.0, ("b", 1))
    timers.add(10.0, ("a", 1))
    timers.add(30.0, ("c", 1))
    assert timers.wake_at_ms() == 10.0
    assert timers.due(20.0) == [("a", 1), ("b", 1)]
    assert timers.due(20.0) == []
    assert timers.any
    assert timers.due(30.0) == [("c", 1)]
    assert not timers.any


def test_a_moment_of_the_same_name_is_replaced() -> None:
    timers = Timers()
    timers.add(10.0, ("a", 1))
    timers.add(20.0, ("a", 1))
    assert timers.due(15.0) == []
    assert ("a", 1) in timers
    assert timers.due(20.0) == [("a", 1)]
    assert ("a", 1) not in timers


def test_a_moment_that_was_taken_back_is_neither_due_nor_waited_for() -> None:
    timers = Timers()
    timers.add(10.0, ("a", 1))
    timers.add(20.0, ("b", 1))
    timers.discard(("a", 1))
    timers.discard(("unknown", 9))
    assert timers.wake_at_ms() == 20.0
    assert timers.due(15.0) == []


def test_a_moment_set_twice_for_the_same_time_is_due_once() -> None:
    timers = Timers()
    timers.add(10.0, ("a", 1))
    timers.discard(("a", 1))
    timers.add(10.0, ("a", 1))
    assert timers.due(10.0) == [("a", 1)]


def test_moments_taken_back_do_not_pile_up() -> None:
    timers = Timers()
    for id in range(10 * STALE_MAX):
        timers.add(1000.0 + id, ("a", id))
        timers.discard(("a", id))
    assert len(timers._heap) <= STALE_MAX + 2
    assert timers.wake_at_ms() is None
