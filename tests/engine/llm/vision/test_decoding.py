"""Pictures are decoded in a thread of their own, which is never far ahead."""

from __future__ import annotations

import os
import threading
import time
from typing import Any

from tests import hostile_media as media
from weftline.engine.llm.vision.decoding import AHEAD_MAX, NICE, DecodingThread
from weftline.errors import InputError, StepError


def _all(thread: DecodingThread[str, Any], count: int) -> list[tuple[str, Any]]:
    found: list[tuple[str, Any]] = []
    until = time.monotonic() + 10
    while len(found) < count and time.monotonic() < until:
        found += thread.finished(idle=True)
    return found


def test_requests_come_back_in_order_with_what_was_decoded():
    thread: DecodingThread[str, Any] = DecodingThread()
    names: set[str] = set()
    for item in range(9):
        thread.add(item, f"request {item}", lambda _, item=item: (names.add(threading.current_thread().name), item)[1])
    assert len(thread) == 9
    assert _all(thread, 9) == [(f"request {item}", item) for item in range(9)]
    assert not thread
    assert all(name.startswith("pictures") for name in names)
    thread.close()


def test_failures_are_results():
    def wrong(cancelled: Any) -> None:
        raise InputError("bad")

    thread: DecodingThread[str, Any] = DecodingThread()
    thread.add(1, "a", wrong)
    thread.add(2, "b", lambda _: 1 // 0)
    (_, first), (_, second) = _all(thread, 2)
    assert isinstance(first, InputError)
    assert isinstance(second, StepError)
    assert "ZeroDivisionError" in str(second)
    thread.close()


def test_a_cancelled_request_does_not_come_back_and_frees_its_turn():
    gate, thread = threading.Event(), DecodingThread[str, Any]()
    thread.add(0, "blocked", lambda _: gate.wait())
    for item in range(1, 3 * AHEAD_MAX):
        thread.add(item, f"{item}", lambda _: None)
    for item in range(2 * AHEAD_MAX):
        assert thread.cancel(item)
    assert not thread.cancel(0)
    gate.set()
    assert [request for request, _ in _all(thread, AHEAD_MAX)] == [f"{n}" for n in range(2 * AHEAD_MAX, 3 * AHEAD_MAX)]
    thread.close()


def test_decoding_ends_early_where_its_request_is_cancelled():
    begun, ended, thread = threading.Event(), threading.Event(), DecodingThread[str, Any]()

    def decode(cancelled: Any) -> None:
        begun.set()
        while not cancelled():
            time.sleep(0.001)
        ended.set()

    for end in (lambda: thread.cancel(0), thread.close):
        thread.add(0, "long", decode)
        assert begun.wait(10)
        end()
        assert ended.wait(10)
        begun.clear()
        ended.clear()


def test_the_thread_has_a_lower_priority():
    thread: DecodingThread[str, Any] = DecodingThread()
    thread.add(0, "a", lambda _: os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))
    ((_, nice),) = _all(thread, 1)
    assert nice == min(19, os.getpriority(os.PRIO_PROCESS, threading.get_native_id()) + NICE)
    thread.close()


def test_the_most_urgent_request_is_decoded_first():
    gate, thread = threading.Event(), DecodingThread[str, Any]()
    thread.add(0, "blocked", lambda _: gate.wait())
    for item, due_ms in ((1, 30.0), (2, 10.0), (3, 20.0), (4, 10.0)):
        thread.add(item, f"{item}", lambda _: time.monotonic(), due_ms)
    gate.set()
    found = sorted(_all(thread, 5)[1:], key=lambda one: one[1])
    assert [request for request, _ in found] == ["2", "4", "3", "1"]
    thread.close()


def test_the_thread_waits_until_results_are_fetched():
    done: list[int] = []
    thread: DecodingThread[str, Any] = DecodingThread()
    for item in range(3 * AHEAD_MAX):
        thread.add(item, f"{item}", lambda _, item=item: done.append(item))
    until = time.monotonic() + 10
    while len(done) < AHEAD_MAX and time.monotonic() < until:
        time.sleep(0.001)
    time.sleep(0.05)
    assert len(done) == AHEAD_MAX
    assert len(_all(thread, 3 * AHEAD_MAX)) == 3 * AHEAD_MAX
    thread.close()


def test_a_closed_thread_ends():
    thread: DecodingThread[str, Any] = DecodingThread()
    for item in range(3 * AHEAD_MAX):
        thread.add(item, f"{item}", lambda _: None)
    thread.close()
    (worker,) = thread._pool._threads
    worker.join(10)
    assert not worker.is_alive()


def test_a_backlog_of_one_caller_delays_another_by_one_request():
    gate, thread, order = threading.Event(), DecodingThread[str, Any](), list[str]()
    thread.add(0, "blocked", lambda _: gate.wait())
    for item in range(1, 4):
        thread.add(item, "a", lambda _: order.append("a"), caller="a", cost=5.0)
    for item in range(4, 6):
        thread.add(item, "b", lambda _: order.append("b"), caller="b")
    gate.set()
    assert len(_all(thread, 6)) == 6
    assert order[:3] in (["a", "b", "b"], ["b", "a", "b"], ["b", "b", "a"])
    thread.close()


def test_a_slow_picture_ends_when_its_request_is_cancelled():
    slow = media.bmp_of_ends(6_000_000)
    thread: DecodingThread[str, Any] = DecodingThread()
    thread.add(0, "slow", lambda cancelled: thread.decode_picture(slow, 16_000_000, cancelled))
    time.sleep(0.3)
    assert thread.cancel(0)
    began = time.monotonic()
    thread.add(1, "next", lambda cancelled: thread.decode_picture(media.jpeg(), 16_000_000, cancelled))
    ((request, pixels),) = _all(thread, 1)
    assert request == "next" and pixels.shape == (64, 64, 3) and time.monotonic() - began < 1.0
    thread.close()
