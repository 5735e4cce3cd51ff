"""Lifecycle of a server: start, ready, drain, stop; and concurrent requests with sibling cancellation.

    server = GrpcServer(config, backend, gate, memory)     # or HttpServer
    port = await server.start()
    server.set_serving(False)                              # drain: not ready, new work refused, open requests finish
    await server.stop(grace_s=30)

A transport implements `_listen` and `_close`; everything else about starting and stopping is here.
"""

from __future__ import annotations

import asyncio
import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, TypeVar

from weftline.engine.serving.json_parser import JsonParser
from weftline.errors import SessionClosed

RETRY_S = 1.0
"""Retry time in refusals of a draining server; by then another server listens at the address, or soon will."""

T = TypeVar("T")


def loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """Return what creates the event loop of a server process: uvloop's where it is installed, else None (asyncio's)."""
    with contextlib.suppress(ImportError):
        import uvloop

        factory: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop
        return factory
    return None


class DrainSwitch:
    """Accepting state of a server, with notification of long calls that must end on drain.

    on: new work is accepted; changed by `set` alone.
    """

    def __init__(self) -> None:
        self.on = True
        self._listeners: set[Callable[[], None]] = set()

    def set(self, on: bool) -> None:
        """Accept new work, or refuse it and call the listeners."""
        self.on = on
        if not on:
            for listener in tuple(self._listeners):
                listener()

    def listen(self, listener: Callable[[], None]) -> None:
        """Call `listener` whenever new work is no longer accepted."""
        self._listeners.add(listener)

    def unlisten(self, listener: Callable[[], None]) -> None:
        self._listeners.discard(listener)


class NetworkServer(ABC):
    """A server of one transport, in the event loop that starts it.

    serving: accepting state, read by the transport's handlers.
    json:    parser of JSON in requests; closed with the server.
    """

    def __init__(self) -> None:
        self.serving = DrainSwitch()
        self.json = JsonParser()
        self._started = False

    async def start(self) -> int:
        """Listen, and return the port; 0 for a Unix socket. ModelError or OSError when the address is unavailable."""
        self._started = True
        return await self._listen()

    def set_serving(self, serving: bool) -> None:
        """Accept new work, or refuse it (UNAVAILABLE, 503) with a retry time while open requests finish."""
        self.serving.set(serving)

    async def stop(self, grace_s: float = 0.0) -> None:
        """Drain for at most `grace_s`, cancel open requests, and close. Safe to call twice."""
        self.set_serving(False)
        if not self._started:
            return
        try:
            await self._close(grace_s)
        finally:
            self.json.close()

    @abstractmethod
    async def _listen(self) -> int:
        """Start listening and return the port."""

    @abstractmethod
    async def _close(self, grace_s: float) -> None:
        """Close the listening socket, wait `grace_s` for open requests, and cancel the rest."""


def draining_error() -> SessionClosed:
    """Return the error of new work while a server drains."""
    error = SessionClosed("the server is shutting down; retry in a moment")
    error.retry_after_s = RETRY_S
    return error


async def gather_or_cancel(
    works: Sequence[Coroutine[Any, Any, T]], discard: Callable[[T], None] = lambda result: None
) -> list[T]:
    """Run coroutines concurrently and return their results in order; the first error cancels the others.

    discard: releases the results of those that had finished when another failed.
    """
    if len(works) == 1:
        return [await works[0]]
    tasks = [asyncio.ensure_future(one) for one in works]
    try:
        return list(await asyncio.gather(*tasks))
    except BaseException:
        for task in tasks:
            task.cancel()
        for result in await asyncio.gather(*tasks, return_exceptions=True):
            if not isinstance(result, BaseException):
                discard(result)
        raise
