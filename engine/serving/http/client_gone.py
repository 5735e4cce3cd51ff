"""Clients that disconnect: the work for their requests is cancelled."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Any, TypeVar

from starlette.types import Scope

from weftline.engine.serving.http.connection import CONNECTION, LimitedProtocol

T = TypeVar("T")


class ClientGone(Exception):
    """The client closed its connection."""


async def while_connected(scope: Scope, work: Awaitable[T]) -> T:
    """Await `work`; when the client disconnects first, cancel it and raise ClientGone.

    The request's body must have been read. `work` has ended when this returns or raises. It runs in the current task,
    which the connection cancels; an error of work that was cancelled is dropped.
    """
    connection: LimitedProtocol = scope[CONNECTION]
    task = asyncio.current_task()
    if task is None:
        raise RuntimeError("a request has no task")
    watch = ClientWatch(task)
    connection.watch(watch)
    try:
        result = await work
    except (Exception, asyncio.CancelledError):
        if watch.ended_it():
            raise ClientGone from None
        raise
    finally:
        connection.unwatch(watch)
    if watch.ended_it():  # and `work` has returned all the same
        raise ClientGone
    return result


class ClientWatch:
    """Cancels the task of a request once, when its client has disconnected."""

    __slots__ = ("_cancelled_before", "_gone", "_task")

    def __init__(self, task: asyncio.Task[Any]) -> None:
        self._task = task
        self._cancelled_before = task.cancelling()
        self._gone = False

    def cancel(self) -> None:
        self._gone = True
        self._task.cancel()

    def ended_it(self) -> bool:
        """Return True if the client has disconnected and nothing else has cancelled the task."""
        return self._gone and self._task.uncancel() <= self._cancelled_before
