from __future__ import annotations

import asyncio
import contextlib
import threading
import time

import pytest

from weftline.engine.runtime.byte_budget import ByteBudget, WaitQueue
from weftline.errors import LimitReached, SessionClosed


def test_waiting_callers_get_bytes_in_order() -> None:
    async def main() -> None:
        budget = ByteBudget("limits.x", 100)
        first = budget.enter(80)
        large, small = budget.enter(60), budget.enter(10)
        assert first.granted.done() and not large.granted.done()
        assert not small.granted.done()  # there is room for it, but it came later
        budget.give_back(80)
        assert await large.wait_async(1) == 60
        assert await small.wait_async(1) == 10
        assert budget.held_bytes == 70

    asyncio.run(main())


def test_more_than_there_is_is_refused_by_the_limits_name() -> None:
    with pytest.raises(LimitReached, match=r"101 bytes .* limits\.x is 100"):
        ByteBudget("limits.x", 100).enter(101)


def test_so_many_wait_and_no_more() -> None:
    budget = ByteBudget("limits.x", 100, waiting_max=1)
    budget.enter(100)
    budget.enter(1)
    with pytest.raises(LimitReached, match="1 requests wait") as refused:
        budget.enter(1)
    assert refused.value.retry_after_s > 0


def test_so_many_hold_some_at_a_time() -> None:
    budget = ByteBudget("limits.x", 100, holders_max=1)
    budget.enter(1)
    second = budget.enter(1)
    assert not second.granted.done()
    budget.give_back(1)
    assert second.granted.done()


def test_a_thread_waits_for_its_time_and_leaves_the_queue() -> None:
    budget = ByteBudget("limits.x", 100)
    budget.enter(100)
    began = time.monotonic()
    with pytest.raises(TimeoutError), budget.held(1, 0.05):
        pass
    assert time.monotonic() - began < 5
    assert budget.waiting == 0
    threading.Timer(0.05, budget.give_back, [100]).start()
    with budget.held(100, 10):
        assert budget.held_bytes == 100
    assert budget.held_bytes == 0


def test_a_task_that_is_cancelled_leaves_the_queue_and_holds_nothing() -> None:
    async def main() -> None:
        budget = ByteBudget("limits.x", 100)
        budget.enter(100)
        gone = asyncio.create_task(budget.enter(50).wait_async(10))
        late = asyncio.create_task(budget.enter(50).wait_async(10))
        await asyncio.sleep(0.01)
        gone.cancel()
        await asyncio.sleep(0.01)
        assert budget.waiting == 1
        budget.give_back(100)
        late.cancel()  # in the moment in which it was granted
        await asyncio.gather(gone, late, return_exceptions=True)
        assert budget.held_bytes == (50 if not late.cancelled() else 0)

    asyncio.run(main())


def test_a_backlog_of_one_caller_delays_another_by_one() -> None:
    budget = ByteBudget("limit", 100)
    budget.take_now(100)
    first = [budget.enter(100, "a") for _ in range(5)]
    other = budget.enter(100, "b")
    budget.give_back(100)
    assert first[0].granted.done() and not other.granted.done()
    budget.give_back(100, "a")
    assert other.granted.done() and not first[1].granted.done()


def test_each_caller_holds_so_many_and_delays_no_other() -> None:
    budget = ByteBudget("limit", 100, holders_max=3, holders_max_of_each=2)
    own = [budget.enter(10, "a") for _ in range(4)]
    other = budget.enter(10, "b")
    assert [one.granted.done() for one in own] == [True, True, False, False] and other.granted.done()
    budget.give_back(10, "a")
    assert own[2].granted.done() and not own[3].granted.done()
    budget.give_back(10, "b")
    assert not own[3].granted.done()


def test_a_full_queue_refuses_the_caller_with_the_most() -> None:
    budget = ByteBudget("limit", 10, waiting_max=2)
    budget.take_now(10)
    own = [budget.enter(10, "a") for _ in range(2)]
    other = budget.enter(10, "b")
    with pytest.raises(LimitReached, match="wait for it"):
        own[1].wait(0)
    assert not own[0].granted.done() and not other.granted.done()


def test_each_that_waited_has_an_error_of_its_own_at_the_end() -> None:
    """Servers clear the frames of an answered error: of a shared one, also those of others that are suspended."""
    queue: WaitQueue[int] = WaitQueue(contextlib.nullcontext(), lambda ticket, grant: None, 10, "full")
    tickets = [queue.enter(lambda: None) for _ in range(2)]
    queue.refuse_all(lambda: SessionClosed("it ended"))
    first, second = (one.granted.exception() for one in tickets)
    assert isinstance(first, SessionClosed) and isinstance(second, SessionClosed) and first is not second
