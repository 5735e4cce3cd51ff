"""Coordinator actor between driver and replicas: offered blocks, attempts and ready replicas.

One actor, on the driver's machine. Blocks themselves lie in Ray's object store; only references to them pass here.

    driver    offer, forget, close, wait_facts
    feed      wait_offered                          numbers of blocks, as they are offered
    replicas  arrive, opened, fail, begin, trying, end
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from weftline.engine.jobs.ray.trials import Attempt, Span, Trials

OPEN_DEATHS_MAX = 3
"""So many replicas may die while they open before the job gives up."""


class Desk:
    """All methods are called by way of Ray, in one event loop.

    replicas: how many there are at a time.
    """

    def __init__(self, replicas: int) -> None:
        self._replicas = replicas
        self._blocks: dict[int, tuple[Sequence[Any], Trials]] = {}
        self._offered = 0
        self._early: set[int] = set()
        self._facts: bytes | None = None
        self._failure = ""
        self._closed = False
        self._arrived = self._opened = 0
        self._news = asyncio.Condition()

    # the driver

    async def offer(self, number: int, rows: int, refs: Sequence[Any]) -> None:
        """Put a block up to be answered. Numbers go up from 0; they may come in another order."""
        self._blocks[number] = refs, Trials(rows)
        self._early.add(number)
        while self._offered in self._early:
            self._early.discard(self._offered)
            self._offered += 1
        await self._tell()

    async def forget(self, number: int) -> None:
        """Let go of a block whose answer has arrived."""
        self._blocks.pop(number, None)

    async def close(self) -> None:
        """Offer nothing more; what is not begun is not answered."""
        self._closed = True
        self._blocks.clear()
        await self._tell()

    async def wait_facts(self) -> bytes | None:
        """Wait for the first replica to open and return what it says of itself; None: none will, `failure` has why."""
        async with self._news:
            await self._news.wait_for(lambda: self._facts is not None or self._failure or self._closed)
        return self._facts

    async def failure(self) -> str:
        """Return why the replicas gave up; '' while they have not."""
        return self._failure

    # the feed

    async def wait_offered(self, number: int) -> bool:
        """Wait until a block of that number was offered; False: none ever will be."""
        async with self._news:
            await self._news.wait_for(lambda: number < self._offered or self._closed)
        return number < self._offered and not self._closed

    # the replicas

    async def arrive(self) -> str:
        """Note that a replica begins to open; says why it must not, '' when it may."""
        self._arrived += 1
        if self._arrived - self._opened > self._replicas + OPEN_DEATHS_MAX:
            found = f"{self._arrived - self._opened - 1} replicas died while they opened the pipeline"
            await self.fail(f"{found}\n    fix: look at the cluster's logs (ray logs); memory is the usual reason")
        return self._failure

    async def opened(self, facts: bytes) -> int:
        """Note that a replica is ready, and what it says of itself; returns how many were started so far."""
        self._opened += 1
        self._facts = self._facts or facts
        await self._tell()
        return self._arrived

    async def fail(self, why: str) -> None:
        """Note that a replica cannot go on, and that no other could; the first reason is kept."""
        self._failure = self._failure or why
        await self._tell()

    async def begin(self, number: int) -> tuple[Attempt, Sequence[Any]] | None:
        """Return what to do of a block, and references to it; None when nobody waits for it any more."""
        held = self._blocks.get(number)
        return None if held is None else (held[1].begin(), held[0])

    async def trying(self, number: int, span: Span) -> None:
        """As `Trials.trying`."""
        if number in self._blocks:
            self._blocks[number][1].trying(span)

    async def end(self, number: int) -> None:
        """As `Trials.end`."""
        if number in self._blocks:
            self._blocks[number][1].end()

    async def _tell(self) -> None:
        async with self._news:
            self._news.notify_all()
