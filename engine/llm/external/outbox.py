"""Chunks on their way from the calls' thread to the worker's thread, limited in size.

The calls' thread puts chunks and waits while there is no room. The worker's thread takes all of them at once. A
descriptor is readable while there are any.
"""

from __future__ import annotations

import asyncio
import os
import threading

from weftline.nodes.contract import Piece

OUTBOX_CHARS_MAX = 4 << 20
"""Characters above which calls stop reading their responses until the worker has taken what came."""


class Outbox:
    """The chunks of all calls. loop: the event loop of the calls' thread."""

    def __init__(self, loop: asyncio.AbstractEventLoop, chars_max: int = OUTBOX_CHARS_MAX) -> None:
        self.descriptor = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._loop = loop
        self._chars_max = chars_max
        self._lock = threading.Lock()
        self._pieces: list[Piece] = []
        self._chars = 0
        self._room = asyncio.Event()

    def __len__(self) -> int:
        return len(self._pieces)

    async def put(self, piece: Piece, chars: int = 0) -> None:
        """Add a chunk with so many characters, when there is room for it."""
        while self._chars >= self._chars_max:
            self._room.clear()
            if self._chars >= self._chars_max:  # not taken meanwhile
                await self._room.wait()
        self.add(piece, chars)

    def add(self, piece: Piece, chars: int = 0) -> None:
        """Add a chunk at once: the last one of a call, which is never held back."""
        with self._lock:
            self._pieces.append(piece)
            self._chars += chars
            if len(self._pieces) == 1:
                os.eventfd_write(self.descriptor, 1)

    def take(self) -> list[Piece]:
        """Remove and return all chunks; called by the worker's thread."""
        with self._lock:
            pieces, self._pieces = self._pieces, []
            was_full, self._chars = self._chars >= self._chars_max, 0
            if pieces:
                os.eventfd_read(self.descriptor)
        if was_full:
            self._loop.call_soon_threadsafe(self._room.set)
        return pieces

    def close(self) -> None:
        os.close(self.descriptor)
