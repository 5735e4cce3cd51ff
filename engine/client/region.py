"""Shared memory of a client: large inputs for a server of the same machine.

    region = SharedRegion.create(64 << 20)
    ... register region.name, region.key, region.size_bytes at the server ...
    region.unlink()                          # the server holds it open: from here on no name leads to it
    offset = region.try_place(data)          # sent with the request; region.give_back(offset) after it

A new file of POSIX shared memory, for this user alone. It is unlinked as soon as the server has opened it, so nothing
is left when this process is killed. Thread-safe.
"""

from __future__ import annotations

import mmap
import os
import secrets
import threading

from weftline.errors import LimitReached
from weftline.shm.allocator import Allocator
from weftline.shm.block import PAGE_BYTES, align_up

FOLDER = "/dev/shm"

PLACED_BYTES_MIN = 64 << 10
"""Smallest tensor that is placed: below it, a message takes as long."""


class SharedRegion:
    """One region, with an allocator of ranges for requests.

    name: what it is registered as. key: the file's name, as shm_open takes it.
    """

    def __init__(self, name: str, fd: int, size_bytes: int) -> None:
        self.name = name
        self.key = f"/{name}"
        self.size_bytes = size_bytes
        self._buffer = mmap.mmap(fd, size_bytes)
        self._ranges = Allocator(size_bytes)
        self._guard = threading.Lock()
        self._named = True

    @classmethod
    def create(cls, size_bytes: int) -> SharedRegion:
        """Create a region of `size_bytes`, rounded up to a page; LimitReached if the machine has no room for it.

        All of it is taken at once: a full machine is an error here, not a bus error at the first write.
        """
        size = align_up(max(size_bytes, 1), PAGE_BYTES)
        name = f"weftline-client-{secrets.token_hex(8)}"
        try:
            fd = os.open(f"{FOLDER}/{name}", os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise LimitReached(f"cannot make shared memory: {error.strerror}") from None
        try:
            os.posix_fallocate(fd, 0, size)
            return cls(name, fd, size)
        except OSError as error:
            os.unlink(f"{FOLDER}/{name}")  # noqa: PTH108 - beside the os.open above
            raise LimitReached(f"this machine cannot reserve {size} bytes of shared memory: {error.strerror}") from None
        finally:
            os.close(fd)

    def try_place(self, data: bytes | memoryview) -> int | None:
        """Copy `data` into a free range and return its offset; None without room."""
        with self._guard:
            offset = self._ranges.try_take(len(data))
        if offset is not None:
            memoryview(self._buffer)[offset : offset + len(data)] = data
        return offset

    def give_back(self, offset: int) -> None:
        """Free a range; KeyError if it is not in use."""
        with self._guard:
            self._ranges.give_back(offset)

    @property
    def taken_bytes(self) -> int:
        return self._ranges.taken_bytes

    def unlink(self) -> None:
        """Remove the name. Idempotent."""
        if self._named:
            self._named = False
            try:
                os.unlink(f"{FOLDER}/{self.name}")  # noqa: PTH108 - beside the os.open above
            except FileNotFoundError:
                pass

    def close(self) -> None:
        """Remove the name and free the memory. Idempotent."""
        self.unlink()
        self._buffer.close()

    def __del__(self) -> None:
        self.unlink()  # the client was not closed
