from __future__ import annotations

import asyncio
import threading
import time

import pytest

from weftline.engine.runtime.byte_budget import ByteBudget
from weftline.errors import LimitReached


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
