"""Share memory between requests: a wait queue that is fair by caller, and a counter of bytes behind one.

`WaitQueue` orders the waiting: a grant is attempted for the next one, and later ones do not overtake it.
`ByteBudget` is a number of bytes behind such a queue. A thread waits with `Ticket.wait`, a task with
`Ticket.wait_async`; both end after their time, and a task that is cancelled leaves the queue. What was granted to one
that left is released again.
"""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import Callable, Container, Hashable, Iterator
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager
from typing import Generic, TypeVar

from weftline.engine.fair_queue import FairQueue
from weftline.errors import LimitReached

T = TypeVar("T")

RETRY_S = 1.0
"""Retry delay of requests that waited too long, or that found too many others waiting."""


class Ticket(Generic[T]):
    """A place in a queue, or the grant that it got at once. caller: key of the caller in the queue."""

    def __init__(self, queue: WaitQueue[T], attempt: Callable[[], T | None], caller: Hashable) -> None:
        self._queue = queue
        self.attempt = attempt
        self.caller = caller
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
    """Callers that wait for a resource, in the order of start-time fair queuing; oldest first within one caller.

    lock:        held while a grant is attempted or released.
    release:     takes a grant back that its caller did not wait for.
    waiting_max: most that wait; above that, the newest of the caller with the most is refused with `full`.
    passed_over: callers that are granted nothing now, though they may be next.
    waiting:     the tickets that wait.
    """

    def __init__(
        self,
        lock: AbstractContextManager[object],
        release: Callable[[Ticket[T], T], None],
        waiting_max: int,
        full: str,
        passed_over: Container[Hashable] = (),
    ) -> None:
        self._lock = lock
        self._release = release
        self._full = full
        self._passed_over = passed_over
        self.waiting: FairQueue[Ticket[T]] = FairQueue(waiting_max)

    def enter(self, attempt: Callable[[], T | None], caller: Hashable = "", cost: float = 1.0) -> Ticket[T]:
        """Return a ticket, granted already where none is before it and there is room; LimitReached when too many wait.

        The caller holds the lock. attempt: returns a grant, None while there is no room, or raises.
        """
        ticket = Ticket(self, attempt, caller)
        is_next = caller not in self._passed_over and self.waiting.first(self._passed_over) is None
        if is_next and (grant := attempt()) is not None:
            self.waiting.charge(caller, cost)
            ticket.granted.set_result(grant)
            return ticket
        refused = self.waiting.add(ticket, caller, cost)
        if refused is not None:
            error = LimitReached(f"{self._full}, and {self.waiting.size} requests wait for it", RETRY_S)
            if refused is ticket:
                raise error
            refused.granted.set_exception(error)
        return ticket

    def stir(self) -> None:
        """Grant what there is room for now, in order. The caller holds the lock."""
        while (ticket := self.waiting.first(self._passed_over)) is not None:
            try:
                if (grant := ticket.attempt()) is None:
                    return
            except Exception as error:
                self.waiting.discard(ticket, ticket.caller)
                ticket.granted.set_exception(error)
                continue
            self.waiting.take(ticket, ticket.caller)
            ticket.granted.set_result(grant)

    def refuse_all(self, error: Callable[[], Exception]) -> None:
        """End the waiting of all, each with an error of its own. The caller holds the lock."""
        while self.waiting:
            self.waiting.pop().granted.set_exception(error())

    def leave(self, ticket: Ticket[T]) -> None:
        """Give a place up, or what was granted meanwhile."""
        with self._lock:
            if self.waiting.discard(ticket, ticket.caller):
                self.stir()
            elif ticket.granted.done() and ticket.granted.exception() is None:
                self._release(ticket, ticket.granted.result())


class ByteBudget:
    """So many bytes that several hold at a time. Thread-safe.

    name:                of the limit, for messages.
    holders_max:         most that hold some at a time.
    holders_max_of_each: the same for each caller; further ones of a caller do not delay those of others.
    """

    def __init__(
        self,
        name: str,
        bytes_max: int,
        *,
        holders_max: int = 1 << 30,
        holders_max_of_each: int = 1 << 30,
        waiting_max: int = 1 << 30,
    ) -> None:
        self.bytes_max = bytes_max
        self.held_bytes = 0
        self._name = name
        self._holders = 0
        self._holders_max = holders_max
        self._holders_max_of_each = holders_max_of_each
        self._holders_of: Counter[Hashable] = Counter()
        self._at_most: set[Hashable] = set()  # callers that hold as often as each may
        self._lock = threading.Lock()
        self._queue: WaitQueue[int] = WaitQueue(
            self._lock,
            lambda ticket, taken: self._give_back(taken, ticket.caller),
            waiting_max,
            f"{name} ({bytes_max} bytes) is fully in use",
            self._at_most,
        )

    @property
    def waiting(self) -> int:
        return self._queue.waiting.size

    def enter(self, size_bytes: int, caller: Hashable = "", cost: float = 1.0) -> Ticket[int]:
        """Return a ticket for so many bytes; LimitReached when they are more than there are, or too many wait.

        caller, cost: place in the queue, see `FairQueue.add`.
        """
        if size_bytes > self.bytes_max:
            raise LimitReached(f"{size_bytes} bytes are needed at once; {self._name} is {self.bytes_max}")
        with self._lock:
            return self._queue.enter(lambda: self._try_take(size_bytes, caller), caller, cost)

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

    def give_back(self, size_bytes: int, caller: Hashable = "") -> None:
        """Give back bytes of one holder, all of its own."""
        with self._lock:
            self._give_back(size_bytes, caller)

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

    def _try_take(self, size_bytes: int, caller: Hashable = "") -> int | None:
        if self.held_bytes + size_bytes > self.bytes_max or self._holders >= self._holders_max:
            return None
        if caller in self._at_most:
            return None
        self.held_bytes += size_bytes
        self._holders += 1
        self._holders_of[caller] += 1
        if self._holders_of[caller] >= self._holders_max_of_each:
            self._at_most.add(caller)
        return size_bytes

    def _give_back(self, size_bytes: int, caller: Hashable) -> None:
        self.held_bytes -= size_bytes
        self._holders -= 1
        self._holders_of[caller] -= 1
        self._at_most.discard(caller)
        if not self._holders_of[caller]:
            del self._holders_of[caller]
        self._queue.stir()
