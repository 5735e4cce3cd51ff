"""Cutting rows into blocks: the same row numbers for every way of reading, and marks that lead on."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weftline.engine.jobs.blocks import BlockRows, ResumePoint, cut, read_on, run_in_order
from weftline.engine.jobs.rows import Rows

pa = pytest.importorskip("pyarrow")


class Numbers:
    """A data set of the numbers below `count`, read in pieces of drawn sizes; a position is how many were read."""

    schema = pa.schema([("x", pa.int64())])

    def __init__(self, count: int, sizes: list[int]) -> None:
        self.expected = count
        self._sizes = sizes

    def fingerprint(self) -> Mapping[str, str]:
        return {}

    def read(self, after: Mapping[str, Any] | None = None, row_number: int = 0) -> Iterator[Rows]:
        at, turn = (after or {"read": 0})["read"], 0
        assert row_number == at
        while at < self.expected:
            size = min(self._sizes[turn % len(self._sizes)], self.expected - at)
            numbers = list(range(at, at + size))
            at, turn = at + size, turn + 1
            yield Rows(numbers[0] if numbers else at, [str(n) for n in numbers], pa.table({"x": numbers}), {"read": at})

    def close(self) -> None:
        pass


SIZES = st.lists(st.integers(1, 9), min_size=1, max_size=5)


def cuts(source: Numbers, mark: ResumePoint, row_number: int, part: int, block: int) -> list[BlockRows]:
    return list(cut(read_on(source, mark, row_number), part, block))


def as_tuples(found: list[BlockRows]) -> list[tuple[int, int, list[str], list[int]]]:
    return [(one.part, one.row_number, list(one.ids), one.table["x"].to_pylist()) for one in found]


@given(st.integers(0, 60), SIZES, SIZES, st.integers(1, 20), st.integers(1, 25))
def test_blocks_are_the_same_however_rows_are_read(
    count: int, sizes: list[int], others: list[int], part: int, block: int
) -> None:
    found = cuts(Numbers(count, sizes), ResumePoint(), 0, part, block)
    assert as_tuples(found) == as_tuples(cuts(Numbers(count, others), ResumePoint(), 0, part, block))
    assert [id for one in found for id in one.ids] == [str(n) for n in range(count)]
    for one in found:
        assert one.part == one.row_number // part == (one.end - 1) // part
        assert len(one.ids) <= block
        assert one.row_number % part % block == 0
        assert len(one.ids) == block or one.end % part == 0 or one.end == count


@given(st.integers(1, 60), SIZES, SIZES, st.integers(1, 20), st.integers(1, 25), st.data())
def test_every_mark_leads_on(
    count: int, sizes: list[int], others: list[int], part: int, block: int, data: st.DataObject
) -> None:
    found = cuts(Numbers(count, sizes), ResumePoint(), 0, part, block)
    at = data.draw(st.integers(0, len(found) - 1))
    mark = ResumePoint.from_json(found[at].after.to_json())
    assert mark.row_number <= found[at].end
    assert as_tuples(cuts(Numbers(count, others), mark, found[at].end, part, block)) == as_tuples(found[at + 1 :])


class Later:
    """Resolves futures on request."""

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
    assert list(run_in_order(range(3), later.submit, 3)) == [(n, f"answer {n}") for n in range(3)]
    other.join()


def test_blocks_in_flight_stay_within_the_limit() -> None:
    read, lock, most = [0], threading.Lock(), [0]
    given = [0]

    def blocks() -> Iterator[int]:
        for n in range(200):
            with lock:
                read[0] += 1
                most[0] = max(most[0], read[0] - given[0])
            yield n

    with ThreadPoolExecutor(4) as pool:
        for n, (block, answer) in enumerate(run_in_order(blocks(), lambda n: pool.submit(str, n), 4)):
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
        for block, _ in run_in_order(blocks(), lambda n: pool.submit(str, n), ahead):
            seen.append(block)
    assert seen == [0, 1]


def test_what_answering_fails_with_is_raised_in_its_place() -> None:
    def fail_at_two(n: int) -> int:
        if n == 2:
            raise RuntimeError("no runner")
        return n

    seen = []
    with ThreadPoolExecutor(2) as pool, pytest.raises(RuntimeError, match="no runner"):
        for block, _ in run_in_order(range(9), lambda n: pool.submit(fail_at_two, n), 3):
            seen.append(block)
    assert seen == [0, 1]


def test_a_stop_ends_it_and_lets_go_of_what_waits() -> None:
    later, stopped = Later(), threading.Event()
    flow = run_in_order(range(100), later.submit, 2, stop=stopped.is_set)
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


def test_idle_is_called_while_nothing_happens() -> None:
    later, calls = Later(), [0]

    def idle() -> None:
        calls[0] += 1
        if calls[0] == 2:
            later.open[0].set_result("at last")

    assert list(run_in_order([0], later.submit, 1, idle=idle)) == [(0, "at last")]
    assert calls[0] == 2


def test_nothing_to_answer() -> None:
    assert list(run_in_order([], Later().submit, 3)) == []
