"""Send queue of rows for a server: waits for the window and keeps row order.

A row that is sent again goes before the rows behind it. For the coroutines of one event loop.
"""

from __future__ import annotations

import asyncio
import heapq

from weftline.engine.jobs.runners.tries import Again
from weftline.engine.jobs.runners.window import Window


class WindowQueue:
    """A window, and who waits for room in it."""

    def __init__(self, window: Window) -> None:
        self.window = window
        self._waiting: list[tuple[int, asyncio.Future[None]]] = []

    async def take(self, order: int) -> int:
        """Wait until one more row may be under way, and return its number; `give` it back whatever happens."""
        while self.window.full:
            turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            heapq.heappush(self._waiting, (order, turn))
            try:
                await turn
            except asyncio.CancelledError:
                self._wake()
                raise
        return self.window.send()

    def give(self, number: int, answered: bool, failed: Again | None = None) -> None:
        """Take a row back, and what its end says of the window."""
        if failed is not None and failed.window == "half":
            self.window.refuse(number)
        elif failed is not None and failed.window == "first":
            self.window.begin_again()
        self.window.back(answered)
        self._wake()

    def _wake(self) -> None:
        """Let as many rows go on as there is room for."""
        room = int(self.window.size) - self.window.open
        while room > 0 and self._waiting:
            turn = heapq.heappop(self._waiting)[1]
            if not turn.done():
                turn.set_result(None)
                room -= 1
