"""Work in a thread whose memory is accounted for until the thread is done."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


async def finish_in_thread(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Run a function in a thread; a cancelled caller waits for its end before it is cancelled.

    The caller holds the arguments' share of a byte budget. A cancelled `asyncio.to_thread` would release that share
    while the thread, or the queue of threads, still holds the arguments.
    """
    return await finished(asyncio.ensure_future(asyncio.to_thread(function, *args, **kwargs)))


async def finished(work: asyncio.Future[T]) -> T:
    """Return the result of work that is not cancelled; a cancelled caller waits for its end first."""
    try:
        return await asyncio.shield(work)
    except asyncio.CancelledError:
        while not work.done():
            try:
                await asyncio.wait([work])
            except asyncio.CancelledError:
                continue
        if not work.cancelled():
            work.exception()  # marks it as retrieved
        raise
