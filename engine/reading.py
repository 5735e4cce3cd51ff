"""What a streamed request's reader has not read yet, and when its producers have to wait for it.

Pieces are counted in bytes as they come. Above the limit the request is `Stalled`, below half of it `Resumed`: the
scheduler pauses and wakes the steps that produce them, so what lies here is bounded by the limit and one round more.
Whole outputs are not counted: there is one of each, and an arena bounds it.

    the runtime, under its lock       put(heard) -> an event for the scheduler, or None
    the reader, in its own thread     get(), and may_resume() -> an event or None, asked for under the runtime's lock
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from weakref import ref

from weftline.engine.scheduling import events as ev

PIECE_BYTES = 256
"""What a piece costs beside its value: the objects around it. A stream of single letters must not hide it."""


@dataclass(frozen=True, slots=True)
class StreamedOutput:
    """Part of a request's answer as it becomes known.

    last False: `value` is what is new on a streamed output (text to append).
    last True:  `value` is the whole value of the output.
    """

    output: str
    value: Any
    last: bool


Heard = StreamedOutput | ev.Command
"""What a reader gets: pieces, and at the end the command that ended the request."""


class Unread:
    """Pieces in the order they came, and how many bytes they take. The end stays: it is read again and again.

    Two threads use it: the runtime's side puts, the reader's side gets, and single operations of a deque and of an int
    are all they share. `stalled` is changed under the runtime's lock alone.
    """

    def __init__(self, request: int, bytes_max: int) -> None:
        self.request = request
        self.stalled = False
        self._bytes_max = bytes_max
        self._pieces: deque[tuple[StreamedOutput, int]] = deque()
        self._end: ev.Command | None = None
        self._put_bytes = 0  # each counter has one writer, so neither needs a lock
        self._read_bytes = 0

    @property
    def size_bytes(self) -> int:
        return self._put_bytes - self._read_bytes

    def put(self, heard: Heard, size_bytes: int) -> ev.Event | None:
        """Keep what was heard; Stalled when its reader has fallen behind by more than the limit just now."""
        if not isinstance(heard, StreamedOutput):
            self._end = heard
            return None
        counted = 0 if heard.last else size_bytes + PIECE_BYTES
        self._pieces.append((heard, counted))
        self._put_bytes += counted
        if self.stalled or self.size_bytes <= self._bytes_max:
            return None
        self.stalled = True
        return ev.Stalled(self.request)

    def try_get(self) -> Heard | None:
        """Return the oldest piece, then the end for ever; None when neither is there yet."""
        end = self._end  # looked at first: what came before it is then in the deque
        try:
            piece, counted = self._pieces.popleft()
        except IndexError:
            return end
        self._read_bytes += counted
        return piece

    @property
    def caught_up(self) -> bool:
        """Whether a stalled reader has read enough to go on."""
        return self.stalled and self.size_bytes * 2 < self._bytes_max

    def may_resume(self) -> ev.Event | None:
        """Resumed when the reader has caught up; to be called, and its answer told, under the runtime's lock."""
        if not self.caught_up:
            return None
        self.stalled = False
        return ev.Resumed(self.request)


class Reader:
    """Reads a request's pieces in ordinary threads.

    resume: called in the reader's thread when it has caught up.
    """

    def __init__(self, unread: Unread, resume: Callable[[], None]) -> None:
        self._unread = unread
        self._resume = resume
        self._news = threading.Condition()

    def put(self, heard: Heard, size_bytes: int) -> ev.Event | None:
        event = self._unread.put(heard, size_bytes)
        with self._news:
            self._news.notify_all()
        return event

    def get(self) -> Heard:
        """Wait for the next piece, or for the command that ends the request."""
        with self._news:
            while (heard := self._unread.try_get()) is None:
                self._news.wait()
        if self._unread.caught_up:
            self._resume()
        return heard


class AsyncReader:
    """Reads a request's pieces in one task of an event loop; `put` comes from other threads."""

    def __init__(self, unread: Unread, resume: Callable[[], None], loop: asyncio.AbstractEventLoop) -> None:
        self._unread = unread
        self._resume = resume
        self._loop = loop
        self._news = asyncio.Event()
        self._told = False  # a wake-up is on its way: one for a whole round of pieces

    def put(self, heard: Heard, size_bytes: int) -> ev.Event | None:
        event = self._unread.put(heard, size_bytes)
        if not self._told:
            self._told = True
            self._loop.call_soon_threadsafe(self._wake)
        return event

    async def get(self) -> Heard:
        """Wait for the next piece, or for the command that ends the request."""
        while (heard := self._unread.try_get()) is None:
            self._news.clear()
            await self._news.wait()
        if self._unread.caught_up:
            self._resume()
        return heard

    def _wake(self) -> None:
        self._told = False
        self._news.set()


class Mailbox:
    """Ends of requests on their way to the tasks of one event loop: many are handed over in one wake-up.

    Made in the loop's thread. It keeps neither the loop nor the futures alive: their tasks do that, and a loop that was
    closed with ends on their way leaves nothing behind.
    """

    def __init__(self) -> None:
        self._thread = threading.get_ident()
        self._ends: deque[tuple[ref[asyncio.Future[ev.Command]], ev.Command]] = deque()
        self._told = False

    def put(self, waiting: asyncio.Future[ev.Command], end: ev.Command) -> None:
        """Settle a future of the loop, from any thread; RuntimeError when the loop is closed."""
        if threading.get_ident() == self._thread:
            if not waiting.done():
                waiting.set_result(end)
            return
        self._ends.append((ref(waiting), end))
        if self._told:
            return
        self._told = True
        try:
            waiting.get_loop().call_soon_threadsafe(self._deliver)
        except RuntimeError:
            self._told = False
            raise

    def _deliver(self) -> None:
        self._told = False  # before the first is looked at: who comes later tells again
        while self._ends:
            known, end = self._ends.popleft()
            waiting = known()
            if waiting is not None and not waiting.done():
                waiting.set_result(end)
