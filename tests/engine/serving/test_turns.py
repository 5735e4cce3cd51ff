"""Turns of connections with received work."""

from __future__ import annotations

import asyncio
import itertools
import time

import pytest

from weftline.engine.serving.turns import NEW_PAUSE, SHORT_TURN_S, TURN_S, Turns

TASK_S = 0.005


class Connection:
    """A connection whose received work starts tasks. at_s: when it went on."""

    def __init__(self, turns: Turns, new: bool) -> None:
        self.new = new
        self.at_s: list[float] = []
        self._turns = turns

    def work(self, turn_s: float) -> None:
        self.at_s.append(time.monotonic())
        asyncio.get_running_loop().call_soon(time.sleep, TASK_S)
        if len(self.at_s) < 4:
            self._turns.continue_soon(self)


def gaps(new: bool) -> list[float]:
    """Return the seconds between the turns of a connection."""

    async def run() -> list[float]:
        turns = Turns()
        one = Connection(turns, new)
        turns.continue_soon(one)
        while len(one.at_s) < 4:
            await asyncio.sleep(0.001)
        return one.at_s

    at_s = asyncio.run(run())
    return [later - earlier for earlier, later in itertools.pairwise(at_s)]


def test_new_connections_pause_for_what_their_requests_take_as_well() -> None:
    assert min(gaps(new=True)) >= (1 + NEW_PAUSE) * TASK_S


def test_connections_with_rights_do_not_pause() -> None:
    assert min(gaps(new=False)) < (1 + NEW_PAUSE) * TASK_S


def test_connections_that_receive_in_the_same_turn_share_its_time() -> None:
    async def run() -> None:
        turns = Turns()
        assert turns.turn_s(5.0) == pytest.approx(TURN_S)
        assert turns.turn_s(5.0 + TURN_S / 4) == pytest.approx(TURN_S * 3 / 4)
        assert turns.turn_s(5.0 + 2 * TURN_S) == 0.0
        await asyncio.sleep(0)
        assert turns.turn_s(6.0) == pytest.approx(TURN_S)
        turns.continue_soon(Connection(turns, False))
        assert turns.turn_s(6.0) == SHORT_TURN_S

    asyncio.run(run())
