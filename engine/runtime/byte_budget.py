"""Share memory between requests: a FIFO wait queue, and a counter of bytes behind one.

`WaitQueue` orders the waiting: a grant is attempted for the oldest first, and later ones do not overtake it.
`ByteBudget` is a number of bytes behind such a queue. A thread waits with `Ticket.wait`, a task with
`Ticket.wait_async`; both end after their time, and a task that is cancelled leaves the queue. What was granted to one
that left is released again.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import Future
from contextlib import AbstractContextManager, asynccontextmanager, contextmanager
from typing import Generic, TypeVar

from weftline.errors import LimitReached

T = TypeVar("T")

RETRY_S = 1.0
"""Retry delay of requests that waited too long, or that found too many others waiting."""


class Ticket(Generic[T]):
    """A place in a queue, or the grant that it got at once."""

    def __init__(self, queue: WaitQueue[T], attempt: Callable[[], T | None]) -> None:
        self._queue = queue
        self.attempt = attempt
        self.granted: Future[T] = Future()

    def wait(self, timeout_s: float) -> T:
        """Block until it is granted; TimeoutError when it was not in time, and the place is given up."""
        try:
            return self.granted.result(timeout_s)
        except BaseException:
            self._queue.leave(self)
            raise

    async def wait_async(self, timeout_s: float) -> T:
        """As `wait`, in a task, which may be cancelled."""
        if self.granted.done():
            return self.granted.result()
        try:
            return await asyncio.wait_for(asyncio.shield(asyncio.wrap_future(self.granted)), timeout_s)
        except BaseException:
            self._queue.leave(self)
            raise


class WaitQueue(Generic[T]):
    """Callers that wait for a resource, oldest first.

    lock:        held while a grant is attempted or released.
    release:     takes a grant back that its caller did not wait for.
    waiting_max: most that wait; more are refused with `full`.
    """

    def __init__(
        self, lock: AbstractContextManager[object], release: Callable[[T], None], waiting_max: int, full: str
    ) -> None:
        self._lock = lock
        self._release = release
        self._waiting_max = waiting_max
        self._full = full
        self.waiting: deque[Ticket[T]] = deque()

    def enter(self, attempt: Callable[[], T | None]) -> Ticket[T]:
        """Return a ticket, granted already where none waits and the bytes are free; LimitReached when too many wait.

        The caller holds the lock. attempt: returns a grant, None while there is no room, or raises.
        """
        ticket = Ticket(self, attempt)
        if not self.waiting and (grant := attempt()) is not None:
            ticket.granted.set_result(grant)
        elif len(self.waiting) >= self._waiting_max:
            raise LimitReached(f"{self._full}, and {len(self.waiting)} requests wait for it", RETRY_S)
        else:
            self.waiting.append(ticket)
        return ticket

    def stir(self) -> None:
        """Grant what there is room for now, in order. The caller holds the lock."""
        while self.waiting:
            ticket = self.waiting[0]
            try:
                if (grant := ticket.attempt()) is None:
                    return
            except Exception as error:
                self.waiting.popleft()
                ticket.granted.set_exception(error)
                continue
            self.waiting.popleft()
            ticket.granted.set_result(grant)

    def refuse_all(self, error: Exception) -> None:
        """End the waiting of all. The caller holds the lock."""
        while self.waiting:
            self.waiting.popleft().granted.set_exception(error)

    def leave(self, ticket: Ticket[T]) -> None:
        """Give a place up, or what was granted meanwhile."""
        with self._lock:
            if ticket in self.waiting:
                self.waiting.remove(ticket)
                self.stir()
            elif ticket.granted.done() and ticket.granted.exception() is None:
                self._release(ticket.granted.result())


class ByteBudget:
    """So many bytes that several hold at a time. Thread-safe.

    name:        of the limit, for messages.
    holders_max: most that hold some at a time.
    """

    def __init__(self, name: str, bytes_max: int, *, holders_max: int = 1 << 30, waiting_max: int = 1 << 30) -> None:
        self.bytes_max = bytes_max
        self.held_bytes = 0
        self._name = name
        self._holders = 0
        self._holders_max = holders_max
        self._lock = threading.Lock()
        self._queue: WaitQueue[int] = WaitQueue(
            self._lock, self._give_back, waiting_max, f"{name} ({bytes_max} bytes) is fully in use"
        )

    @property
    def waiting(self) -> int:
        return len(self._queue.waiting)

    def enter(self, size_bytes: int) -> Ticket[int]:
        """Return a ticket for so many bytes; LimitReached when they are more than there are, or too many wait."""
        if size_bytes > self.bytes_max:
            raise LimitReached(f"{size_bytes} bytes are needed at once; {self._name} is {self.bytes_max}")
        with self._lock:
            return self._queue.enter(lambda: self._try_take(size_bytes))

    @contextmanager
    def held_now(self, size_bytes: int) -> Iterator[None]:
        """Hold bytes meanwhile; LimitReached where there is no room now."""
        self.take_now(size_bytes)
        try:
            yield
        finally:
            self.give_back(size_bytes)

    def take_now(self, size_bytes: int) -> None:
        """Hold bytes until `give_back`; LimitReached where there is no room now."""
        with self._lock:
            if self._try_take(size_bytes) is None:
                most = f"{self._name} is {self.bytes_max}"
                raise LimitReached(
                    f"{self.held_bytes} bytes are in use and {size_bytes} more are needed; {most}", RETRY_S
                )

    def give_back(self, size_bytes: int) -> None:
        """Give back bytes of one holder, all of its own."""
        with self._lock:
            self._give_back(size_bytes)

    def shrink(self, size_bytes: int) -> None:
        """Release part of the bytes of one holder."""
        with self._lock:
            self.held_bytes -= size_bytes
            self._queue.stir()

    @contextmanager
    def held(self, size_bytes: int, timeout_s: float) -> Iterator[None]:
        """Hold bytes meanwhile; a thread waits for them, TimeoutError after `timeout_s`."""
        taken = self.enter(size_bytes).wait(timeout_s)
        try:
            yield
        finally:
            self.give_back(taken)

    @asynccontextmanager
    async def held_async(self, size_bytes: int, timeout_s: float) -> AsyncIterator[None]:
        """As `held`, in a task."""
        taken = await self.enter(size_bytes).wait_async(timeout_s)
        try:
            yield
        finally:
            self.give_back(taken)

    def _try_take(self, size_bytes: int) -> int | None:
        if self.held_bytes + size_bytes > self.bytes_max or self._holders >= self._holders_max:
            return None
        self.held_bytes += size_bytes
        self._holders += 1
        return size_bytes

    def _give_back(self, size_bytes: int) -> None:
        self.held_bytes -= size_bytes
        self._holders -= 1
        self._queue.stir()
