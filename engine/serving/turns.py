"""Turns of the event loop for connections with received work, so that many of them delay another client little.

In a turn one connection goes on for TURN_S. Connections on which no call with rights has begun (`new`) have a quarter
of the time in all.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from typing import Protocol

TURN_S, SHORT_TURN_S = 0.001, 0.00025
"""Work of one connection in one turn of the event loop: alone, and while other connections have more work."""

NEW_PAUSE, NEW_PAUSE_MAX_S = 3, 0.05
"""Pause between turns of new connections, in turns, and its limit: those without a call with rights have a quarter of
the time."""


class Working(Protocol):
    """A connection with received work. new: no call with rights has begun on it."""

    new: bool

    def work(self, turn_s: float) -> None:
        """Go on for about `turn_s`."""


class Turns:
    """The connections of one server that have more work.

    short: one that goes on has SHORT_TURN_S even where no other has more work.
    """

    def __init__(self, short: bool = False) -> None:
        self._short = short
        self._loop: asyncio.AbstractEventLoop | None = None
        self._until_s: float | None = None  # end of the time for connections that have just received bytes
        self._backlog: deque[Working] = deque()
        self._new_backlog: deque[Working] = deque()

    def turn_s(self, now_s: float) -> float:
        """Return the time for the work of a connection that has just received bytes: all share TURN_S in a turn."""
        if self._until_s is None:
            self._until_s = now_s + TURN_S
            self._loop = self._loop or asyncio.get_running_loop()  # which makes a system call
            self._loop.call_soon(self._end_turn)
        left_s = max(0.0, self._until_s - now_s)
        return min(left_s, SHORT_TURN_S) if self._backlog or self._new_backlog else left_s

    def _end_turn(self) -> None:
        self._until_s = None

    def continue_soon(self, connection: Working) -> None:
        """Let a connection go on with received work; one connection does in each turn of the loop, new ones in some."""
        if connection.new:
            if not self._new_backlog:
                asyncio.get_running_loop().call_soon(self._continue_new)
            self._new_backlog.append(connection)
            return
        if not self._backlog:
            asyncio.get_running_loop().call_soon(self._continue_one)
        self._backlog.append(connection)

    def _continue_one(self) -> None:
        connection = self._backlog.popleft()
        if self._backlog:
            asyncio.get_running_loop().call_soon(self._continue_one)
        connection.work(SHORT_TURN_S if self._short else TURN_S)

    def _continue_new(self) -> None:
        """Let a new connection go on, and the next one after a pause."""
        started_s = time.monotonic()
        try:
            self._new_backlog[0].work(TURN_S)  # stays there: no second timer is started
        finally:
            asyncio.get_running_loop().call_soon(self._pause_new, started_s)  # behind the tasks that this has started

    def _pause_new(self, started_s: float) -> None:
        self._new_backlog.popleft()
        if self._new_backlog:
            pause_s = min(NEW_PAUSE * (time.monotonic() - started_s), NEW_PAUSE_MAX_S)
            asyncio.get_running_loop().call_later(pause_s, self._continue_new)
