"""The desk without Ray: its methods in one event loop."""

from __future__ import annotations

import asyncio

import pytest

from weftline.engine.jobs.ray.coordinator import OPEN_DEATHS_MAX, Coordinator


def test_the_feed_hears_of_blocks_in_order_and_of_the_end() -> None:
    async def script() -> None:
        coordinator = Coordinator(1)
        waiting = asyncio.ensure_future(coordinator.wait_offered(0))
        await coordinator.offer(1, 4, ["ref 1"])
        await asyncio.sleep(0)
        assert not waiting.done()
        await coordinator.offer(0, 4, ["ref 0"])
        assert await waiting and await coordinator.wait_offered(1)
        ending = asyncio.ensure_future(coordinator.wait_offered(2))
        await asyncio.sleep(0)
        await coordinator.close()
        assert not await ending

    asyncio.run(script())


def test_a_block_is_begun_again_after_a_death_and_never_once_it_is_forgotten() -> None:
    async def script() -> None:
        coordinator = Coordinator(1)
        await coordinator.offer(0, 4, ["ref"])
        first, second = await coordinator.begin(0), await coordinator.begin(0)
        assert first is not None and second is not None
        assert (first[0].alone, second[0].alone, second[1]) == (False, True, ["ref"])
        await coordinator.trying(0, (0, 4))
        third = await coordinator.begin(0)
        assert third is not None and len(third[0].spans) == 4
        await coordinator.end(0)
        await coordinator.forget(0)
        assert await coordinator.begin(0) is None
        await coordinator.trying(0, (0, 4))  # a straggler
        await coordinator.end(0)

    asyncio.run(script())


def test_whoever_waits_for_the_first_replica_hears_of_it_or_of_why_there_is_none() -> None:
    async def script() -> None:
        coordinator = Coordinator(1)
        waiting = asyncio.ensure_future(coordinator.wait_info())
        await asyncio.sleep(0)
        await coordinator.opened(b"facts")
        await coordinator.opened(b"later")
        assert await waiting == b"facts"
        failing = Coordinator(1)
        await failing.fail("no model")
        await failing.fail("something else")
        assert await failing.wait_info() is None and await failing.failure() == "no model"
        assert await failing.arrive() == "no model"

    asyncio.run(script())


@pytest.mark.parametrize("replicas", [1, 3])
def test_replicas_that_die_while_they_open_are_not_started_for_ever(replicas: int) -> None:
    async def script() -> None:
        coordinator = Coordinator(replicas)
        assert [await coordinator.arrive() for _ in range(replicas + OPEN_DEATHS_MAX)] == [""] * (
            replicas + OPEN_DEATHS_MAX
        )
        assert "died while they opened" in await coordinator.arrive()
        working = Coordinator(replicas)
        for _ in range(50):
            assert await working.arrive() == ""
            await working.opened(b"facts")

    asyncio.run(script())
