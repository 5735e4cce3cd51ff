"""Unnamed shared buffer with one writer and one reader.

The engine makes both extents of an ingress process and hands them over as inherited descriptors, so a process that is
killed leaves nothing: the engine drops the mappings. The engine's own is sealed against any other writer. The one it
grants is written by the ingress process; the engine reads it as what it is, bytes that may change at any time: each is
copied once, into an arena that only the engine writes, before anyone looks at it.

A `SharedBuffer` is the writer's view of its extent: which bytes are free, and how values are laid there.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import mmap
import os
from collections.abc import Mapping
from typing import Any

from weftline.engine.protocol.messages import Value
from weftline.engine.protocol.packed import Layout, Packed
from weftline.engine.serving.frontend.messages import ARENA
from weftline.engine.serving.frontend.parcel import packed_of
from weftline.errors import LimitReached
from weftline.shm.allocator import Allocator
from weftline.shm.arena import F_SEAL_FUTURE_WRITE, HostArena
from weftline.shm.block import ALIGN_BYTES, PAGE_BYTES, Place, align_up
from weftline.shm.view import bytes_view

NO_BLOCK = -1
"""In messages: no value of this one lies in an extent."""

COPY_ASIDE_BYTES = 1 << 20
"""From so many bytes on, values are laid in a thread: a copy of 1 MiB takes about what the thread costs."""


def grant(size_bytes: int) -> HostArena:
    """Make an extent for somebody else to write, mapped read-only here; LimitReached when there is no memory for it.

    It is sealed against shrinking, which would kill its reader.
    """
    size = align_up(size_bytes, PAGE_BYTES)
    fd = os.memfd_create("weftline", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, size)
        os.posix_fallocate(fd, 0, size)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
        buffer = mmap.mmap(fd, size, mmap.MAP_SHARED, mmap.PROT_READ)
    except OSError as error:
        os.close(fd)
        if error.errno in (errno.ENOSPC, errno.ENOMEM):
            raise LimitReached(f"this machine cannot reserve {size} bytes of memory for an ingress process") from None
        raise
    return HostArena(fd, buffer, size, writable=False)


def take(fd: int) -> HostArena:
    """Map a granted extent for writing, as its only writer from now on, and take over `fd`."""
    size = os.fstat(fd).st_size
    buffer = mmap.mmap(fd, size, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, F_SEAL_FUTURE_WRITE)
    return HostArena(fd, buffer, size, writable=True)


def let_go(arena: HostArena) -> None:
    """Close an extent's descriptor. Its mapping ends with the last view of it, which may still be read in a thread.

    HostArena.close would not wait for arrays: numpy keeps the mapping's object, but does not hold it open.
    """
    fd, arena.fd = arena.fd, -1
    if fd >= 0:
        os.close(fd)


class SharedBuffer:
    """Lays values in an extent that this process writes. For one thread, but for `Laid.write`."""

    def __init__(self, arena: HostArena) -> None:
        self.arena = arena
        self._allocator = Allocator(arena.size_bytes - arena.size_bytes % ALIGN_BYTES)

    @property
    def taken_bytes(self) -> int:
        return self._allocator.taken_bytes

    def lay(self, values: Mapping[str, Any]) -> Laid:
        """Find a place for the large ones of `values`; InputError for what cannot travel.

        What finds no room travels inside its message instead: slower, and the socket then holds the sender up.
        """
        packed = {name: packed_of(value, name) for name, value in values.items()}
        large = [one for one in packed.values() if not one.travels_inline]
        if not large:
            return Laid(packed, {}, None, None, NO_BLOCK)
        layout = Layout(large)
        offset = self._allocator.try_take(layout.size_bytes)
        if offset is None:
            return Laid(packed, {}, None, None, NO_BLOCK)
        place = Place(ARENA, offset, layout.size_bytes, offset, 0)
        names = [name for name, one in packed.items() if not one.travels_inline]
        return Laid(
            packed, dict(zip(names, layout.at(place), strict=True)), layout, bytes_view(self.arena, place), offset
        )

    def free(self, block: int) -> None:
        """Give a block back; NO_BLOCK is nothing. KeyError: it was not taken, or given back before."""
        if block != NO_BLOCK:
            self._allocator.give_back(block)


class Laid:
    """Values that have their places; `write` puts them there. `block` is to be freed when they have been read."""

    __slots__ = ("_buffer", "_layout", "_packed", "_placed", "block")

    def __init__(
        self,
        packed: Mapping[str, Packed],
        placed: Mapping[str, Value],
        layout: Layout | None,
        buffer: memoryview | None,
        block: int,
    ) -> None:
        self._packed = packed
        self._placed = placed
        self._layout = layout
        self._buffer = buffer
        self.block = block

    @property
    def size_bytes(self) -> int:
        """How many bytes `write` copies."""
        return self._layout.size_bytes if self._layout is not None else 0

    async def awrite(self) -> dict[str, Value]:
        """`write`, in a thread when there is much to copy. Cancelled, it raises when nothing is copied any more."""
        if self.size_bytes < COPY_ASIDE_BYTES:
            return self.write()
        copying = asyncio.ensure_future(asyncio.to_thread(self.write))
        try:
            return await asyncio.shield(copying)
        except asyncio.CancelledError:
            while not copying.done():  # cancelled again meanwhile: the block is not to be freed any sooner
                with contextlib.suppress(asyncio.CancelledError):
                    await asyncio.wait([copying])
            raise

    def write(self) -> dict[str, Value]:
        """Copy the bytes to their places, or into messages, and return the values as they travel."""
        if self._layout is not None and self._buffer is not None:
            self._layout.write(self._buffer)
            self._buffer = None
        placed = self._placed
        return {name: placed[name] if name in placed else one.inline() for name, one in self._packed.items()}
