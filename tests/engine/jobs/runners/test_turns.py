"""Rows wait for room and go in their order; one that gives up waiting takes nobody's turn."""

from __future__ import annotations

import asyncio

from weftline.engine.jobs.runners.server_flow import Retry, Window, WindowQueue


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


def test_rows_go_in_their_order_whenever_they_came() -> None:
    async def go() -> None:
        turns, gone = WindowQueue(Window(1, 1, fixed=True)), list[int]()

        async def row(order: int) -> None:
            number = await turns.take(order)
            gone.append(order)
            await settle()
            turns.give(number, answered=True)

        first = await turns.take(9)
        rows = [asyncio.create_task(row(order)) for order in (7, 3, 8, 1, 5)]
        await settle()
        turns.give(first, answered=True)
        await asyncio.gather(*rows)
        assert gone == [1, 3, 5, 7, 8]
        assert turns.window.open == 0

    asyncio.run(asyncio.wait_for(go(), 10))


def test_one_that_gives_up_takes_nobodys_turn() -> None:
    async def go() -> None:
        turns = WindowQueue(Window(1, 1, fixed=True))
        number = await turns.take(0)
        waiting = [asyncio.create_task(turns.take(order)) for order in (1, 2, 3)]
        await settle()
        turns.give(number, answered=True)  # it is 1's turn, which is cancelled before it can take it
        waiting[0].cancel()
        waiting[2].cancel()
        assert await waiting[1] == 2
        assert turns.window.open == 1

    asyncio.run(asyncio.wait_for(go(), 10))


def test_ends_are_told_to_the_window() -> None:
    async def go() -> None:
        turns = WindowQueue(Window(4))
        numbers = [await turns.take(order) for order in range(4)]
        turns.give(numbers[0], False, Retry(0.1, "half"))
        assert turns.window.size == 2
        turns.give(numbers[1], False, Retry(0.1))
        assert turns.window.size == 2
        turns.give(numbers[2], False, Retry(0.1, "first"))
        assert turns.window.size == 8
        for _ in range(7):
            numbers.append(await turns.take(4))
        turns.give(numbers[3], answered=True)
        assert (turns.window.size, turns.window.open) == (9, 7)

    asyncio.run(asyncio.wait_for(go(), 10))
