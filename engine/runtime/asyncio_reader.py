"""Read worker messages in the asyncio loop in which all open requests wait, without a thread switch for each."""

from __future__ import annotations

import asyncio
import logging
import os
import threading
from collections.abc import Callable

_log = logging.getLogger("weftline.runtime")

ASYNCIO_LATE_S = 0.02
"""Time without a read after which the thread reads messages again; it looks as often."""


class AsyncioReader:
    """Reads worker messages in an asyncio loop while all open requests wait in that loop.

    Reading in the runtime's thread would cost two thread switches for each result: to that thread, and then to the
    asyncio loop. That loop therefore watches the workers' epoll itself. It stops when it has read nothing for
    ASYNCIO_LATE_S although a message waits, because it is busy, or while no request is open, and when another thread or
    loop submits a request. A pause shorter than that between two requests does not stop it: each change of the reader
    wakes the thread. Methods are called under the runtime's lock.

    read:   reads what is there without waiting; called in the loop's thread, without the lock.
    active: the loop reads messages.
    others: a thread, or another loop, may wait for a request.
    """

    def __init__(self, read: Callable[[], None]) -> None:
        self._read = read
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = 0
        self._fd = -1
        self._reads = 0
        self._reads_seen = -1  # at the thread's last look; -1: it has not looked since the loop began to read
        self._idle_since_ms = 0.0
        self._watched = False
        self._after_read: list[Callable[[], None]] | None = None  # None: it is not reading
        self.active = False
        self.others = False

    def start(self, loop: asyncio.AbstractEventLoop, epoll_fd: int) -> bool:
        """Let `loop` read; called in its thread. True when it did not before."""
        if self.active and self._loop is loop:
            return False
        if self._loop is not loop:
            self.close()
            fd = os.dup(epoll_fd)  # its own, so that its number is not reused while the loop still watches it
            self._loop, self._fd, self._thread = loop, fd, threading.get_ident()
        if not self._watched:
            try:
                loop.add_reader(self._fd, self._on_readable)
            except (NotImplementedError, OSError, RuntimeError):  # this kind of loop watches no descriptors
                os.close(self._fd)
                self._loop, self._fd = None, -1
                return False
            self._watched = True
        self.active = True
        self._reads_seen = -1
        return True

    def reads_alone(self, loop: asyncio.AbstractEventLoop) -> bool:
        """Return whether this loop reads, and no other loop or thread waits for a request."""
        return self.active and self._loop is loop and not self.others

    def serves_another(self, loop: asyncio.AbstractEventLoop | None) -> bool:
        """Return whether the loop that reads, or read last, is not this one."""
        return self._loop is not None and self._loop is not loop

    def stop(self) -> bool:
        """Let the runtime's thread read; True when that is a change."""
        was, self.active = self.active, False
        return was

    def is_idle(self, now_ms: float) -> bool:
        """Return whether the loop has read nothing for ASYNCIO_LATE_S, as seen by looks of the thread."""
        if self._reads != self._reads_seen:
            self._reads_seen, self._idle_since_ms = self._reads, now_ms
        return now_ms - self._idle_since_ms >= ASYNCIO_LATE_S * 1000

    def close(self) -> None:
        """Stop watching in the loop and close the descriptor."""
        loop, fd, self._loop, self._fd, self.active = self._loop, self._fd, None, -1, False
        self._watched = False
        if loop is None:
            return

        def detach() -> None:
            loop.remove_reader(fd)
            os.close(fd)

        if threading.get_ident() == self._thread and not loop.is_closed():
            detach()
            return
        try:
            loop.call_soon_threadsafe(detach)
        except RuntimeError:  # the loop is closed
            os.close(fd)

    def after_read(self, loop: asyncio.AbstractEventLoop, call: Callable[[], None]) -> bool:
        """Call a function when the current read in this loop is over; False if it does not read in this thread."""
        if self._after_read is None or loop is not self._loop or threading.get_ident() != self._thread:
            return False
        self._after_read.append(call)
        return True

    def _on_readable(self) -> None:
        if self.active:
            self._reads += 1
            calls: list[Callable[[], None]] = []
            self._after_read = calls
            try:
                self._read()
            finally:
                self._after_read = None
                for call in calls:
                    _call_and_log(call)
            return
        loop, fd = self._loop, self._fd  # the runtime's thread reads now
        if loop is not None:
            loop.remove_reader(fd)
            self._watched = False


def _call_and_log(call: Callable[[], None]) -> None:
    try:
        call()
    except Exception:
        _log.exception("the function that receives the end of a request failed")
