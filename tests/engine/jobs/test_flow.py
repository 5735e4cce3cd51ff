"""Blocks under way: their order, how many there are at a time, and every way of ending."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

from weftline.engine.jobs.blocks import answered


class Later:
    """Answers when it is told to."""

    def __init__(self) -> None:
        self.open: dict[int, Future[str]] = {}
        self.most = 0
        self.asked = threading.Semaphore(0)

    def submit(self, block: int) -> Future[str]:
        self.open[block] = future = Future[str]()
        self.most = max(self.most, sum(not one.done() for one in self.open.values()))
        self.asked.release()
        return future


def test_answers_come_in_order_whichever_is_ready_first() -> None:
    later = Later()

    def answer_backwards() -> None:
        for _ in range(3):
            assert later.asked.acquire(timeout=10)
        for block in (2, 1, 0):
            later.open[block].set_result(f"answer {block}")

    other = threading.Thread(target=answer_backwards)
    other.start()
    assert list(answered(range(3), later.submit, 3)) == [(n, f"answer {n}") for n in range(3)]
    other.join()


def test_no_more_are_under_way_than_said() -> None:
    read, lock, most = [0], threading.Lock(), [0]
    given = [0]

    def blocks() -> Iterator[int]:
        for n in range(200):
            with lock:
                read[0] += 1
                most[0] = max(most[0], read[0] - given[0])
            yield n

    with ThreadPoolExecutor(4) as pool:
        for n, (block, answer) in enumerate(answered(blocks(), lambda n: pool.submit(str, n), 4)):
            assert (block, answer) == (n, str(n))
            with lock:
                given[0] += 1
    assert given[0] == 200
    assert most[0] <= 4 + 4 + 2  # asked, read and waiting, the one in hand on each side


@pytest.mark.parametrize("ahead", [1, 2, 5])
def test_what_reading_fails_with_is_raised_after_what_was_read(ahead: int) -> None:
    def blocks() -> Iterator[int]:
        yield 0
        yield 1
        raise ValueError("the third is broken")

    seen = []
    with ThreadPoolExecutor(1) as pool, pytest.raises(ValueError, match="the third is broken"):
        for block, _ in answered(blocks(), lambda n: pool.submit(str, n), ahead):
            seen.append(block)
    assert seen == [0, 1]


def test_what_answering_fails_with_is_raised_in_its_place() -> None:
    def fail_at_two(n: int) -> int:
        if n == 2:
            raise RuntimeError("nobody answers")
        return n

    seen = []
    with ThreadPoolExecutor(2) as pool, pytest.raises(RuntimeError, match="nobody answers"):
        for block, _ in answered(range(9), lambda n: pool.submit(fail_at_two, n), 3):
            seen.append(block)
    assert seen == [0, 1]


def test_a_stop_ends_it_and_lets_go_of_what_waits() -> None:
    later, stopped = Later(), threading.Event()
    flow = answered(range(100), later.submit, 2, stop=stopped.is_set)
    assert (
        threading.Thread(target=lambda: (later.asked.acquire(timeout=10), later.open[0].set_result("a"))).start()
        is None
    )
    assert next(flow) == (0, "a")
    stopped.set()
    assert list(flow) == []
    assert all(one.done() for one in later.open.values())  # answered or cancelled
    for thread in threading.enumerate():
        if thread.name == "weftline-read-ahead":
            thread.join(10)
            assert not thread.is_alive()


def test_somebody_is_told_while_nothing_happens() -> None:
    later, calls = Later(), [0]

    def idle() -> None:
        calls[0] += 1
        if calls[0] == 2:
            later.open[0].set_result("at last")

    assert list(answered([0], later.submit, 1, idle=idle)) == [(0, "at last")]
    assert calls[0] == 2


def test_nothing_to_answer() -> None:
    assert list(answered([], Later().submit, 3)) == []
