"""Concurrent requests with sibling cancellation: all answers in order, or the first error."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from typing import Any, TypeVar

T = TypeVar("T")


async def gathered(works: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """Return what all do, in order; when one fails the others are cancelled, and its error raised."""
    if len(works) == 1:
        return [await works[0]]
    tasks = [asyncio.ensure_future(one) for one in works]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
