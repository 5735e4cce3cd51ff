"""An event loop that takes in what workers say, so that its requests need no other thread.

When everybody who waits for a runtime waits in one asyncio loop, every message would wake the runtime's thread only for
it to wake the loop: two hand-overs of the interpreter for each answer. Instead the loop watches the runtime's epoll
itself, and the thread only keeps the time. It also keeps an eye on the loop: one that is busy with something else for
LOOK_S while a message waits loses the post, until it asks for something again. So does a loop that is not alone: a
caller in an ordinary thread must not wait for it.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable

LOOK_S = 0.02
"""How long a message may wait for the loop before the runtime's thread takes over."""


class LoopPump:
    """Which loop takes in messages, if one does. Its methods are called under the runtime's lock.

    take_in: reads what is there, without waiting; called in the loop's thread, not under the lock.
    active:  the loop has the post.
    others:  somebody who is not in the loop may wait for an answer.
    """

    def __init__(self, take_in: Callable[[], None]) -> None:
        self._take_in = take_in
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = 0
        self._fd = -1
        self._pumped = 0
        self._looked = 0
        self._watched = False
        self.active = False
        self.others = False

    def offer(self, loop: asyncio.AbstractEventLoop, epoll_fd: int) -> bool:
        """A request of `loop` comes, and nobody but the loop waits; True when the loop has just taken over."""
        if self.active and self._loop is loop:
            return False
        if self._loop is not loop:
            self.close()
            fd = os.dup(epoll_fd)  # its own, so that its number is not given away while the loop still knows it
            self._loop, self._fd, self._thread = loop, fd, threading.get_ident()
        if not self._watched:
            try:
                loop.add_reader(self._fd, self._readable)
            except (NotImplementedError, OSError, RuntimeError):  # a loop of another kind
                os.close(self._fd)
                self._loop, self._fd = None, -1
                return False
            self._watched = True
        self.active = True
        self._looked = self._pumped
        return True

    def serves_another(self, loop: asyncio.AbstractEventLoop | None) -> bool:
        """Whether the loop that has the post, or had it last, is not this one."""
        return self._loop is not None and self._loop is not loop

    def refuse(self) -> bool:
        """Somebody who is not in the loop waits: the thread takes messages in again; True when that is a change."""
        was, self.active = self.active, False
        return was

    def is_asleep(self) -> bool:
        """Whether the loop has taken nothing in since this was last asked; for when something is there to take in."""
        asleep, self._looked = self._pumped == self._looked, self._pumped
        return asleep

    def close(self) -> None:
        """Let the loop go."""
        loop, fd, self._loop, self._fd, self.active = self._loop, self._fd, None, -1, False
        self._watched = False
        if loop is None:
            return

        def part() -> None:
            loop.remove_reader(fd)
            os.close(fd)

        if threading.get_ident() == self._thread and not loop.is_closed():
            part()
            return
        try:
            loop.call_soon_threadsafe(part)
        except RuntimeError:  # the loop is closed
            os.close(fd)

    def _readable(self) -> None:
        if self.active:
            self._pumped += 1
            self._take_in()
            return
        loop, fd = self._loop, self._fd  # the thread has the post: what comes is no longer this loop's to look at
        if loop is not None:
            loop.remove_reader(fd)
            self._watched = False
