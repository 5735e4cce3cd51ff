"""Findings of the watch of a connection, with time as a number."""

from __future__ import annotations

from weftline.engine.serving.grpc.watch import LATE, PING, ConnectionWatch
from weftline.engine.serving.unsent_budget import SLOW_BYTES_S


def test_a_client_has_a_time_for_its_greeting() -> None:
    watch = ConnectionWatch(10.0)
    assert not watch.is_silent(15.0, False, 5.0)
    assert watch.is_silent(15.1, False, 5.0)
    assert not watch.is_silent(99.0, True, 5.0)


def test_a_client_that_takes_nothing_of_the_buffer_is_stalled() -> None:
    watch = ConnectionWatch(0.0)
    watch.flushed_bytes = 100
    assert not watch.is_stalled(50.0, 0, 0, 5.0)  # nothing waited
    watch.flushed_bytes = 140
    assert not watch.is_stalled(54.0, 40, 0, 5.0)
    assert not watch.is_stalled(58.0, 39, 0, 5.0)  # it took a byte
    assert not watch.is_stalled(63.0, 39, 0, 5.0)
    assert watch.is_stalled(63.1, 39, 0, 5.0)


def test_a_client_that_opens_no_window_is_stalled() -> None:
    watch = ConnectionWatch(0.0)
    assert not watch.is_stalled(50.0, 0, 0, 5.0)
    assert not watch.is_stalled(55.0, 0, 1, 5.0)
    assert watch.is_stalled(55.1, 0, 1, 5.0)
    watch.sent_s = 55.0  # a part was sent
    assert not watch.is_stalled(56.0, 0, 1, 5.0)


def test_a_slow_reader_counts_only_while_others_wait() -> None:
    watch = ConnectionWatch(0.0)
    watch.flushed_bytes = 1 << 30
    assert not watch.is_slow(10.0, 1 << 29, False, 2.0)
    assert not watch.is_slow(11.0, 1 << 29, True, 2.0)  # from now on
    assert not watch.is_slow(12.9, 1 << 29, True, 2.0)
    assert watch.is_slow(13.0, 1 << 29, True, 2.0)
    assert not watch.is_slow(15.0, (1 << 29) - 2 * SLOW_BYTES_S, True, 2.0)  # quick enough
    assert not watch.is_slow(18.0, (1 << 29) - 2 * SLOW_BYTES_S, False, 2.0)
    assert not watch.is_slow(19.0, (1 << 29) - 2 * SLOW_BYTES_S, True, 2.0)


def test_one_ping_is_permitted_in_each_interval() -> None:
    watch = ConnectionWatch(0.0)
    assert [watch.may_be_pinged(at, 10.0) for at in (9.9, 10.0, 15.0, 20.0)] == [False, True, False, True]


def test_an_idle_connection_is_pinged_and_given_up_without_an_answer() -> None:
    watch = ConnectionWatch(0.0)
    assert watch.ping(10.0, 0, 10.0, 5.0) == ""
    assert watch.ping(10.1, 0, 10.0, 5.0) is PING
    assert watch.ping(15.1, 0, 10.0, 5.0) == ""
    assert watch.ping(15.2, 0, 10.0, 5.0) is LATE


def test_an_answer_or_any_bytes_end_the_wait_for_a_ping() -> None:
    for pongs, received_s in ((1, 0.0), (0, 11.0)):
        watch = ConnectionWatch(0.0)
        assert watch.ping(10.1, 0, 10.0, 5.0) is PING
        watch.received_s = received_s
        assert watch.ping(16.0, pongs, 10.0, 5.0) == ""
