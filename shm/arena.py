"""Host arena: unnamed shared memory (memfd), writable in one process and read-only in the others.

An arena is a memfd: memory that only a file descriptor leads to, so there is nothing to guess and nothing to clean up
when a process is killed. Its writer creates it, reserves every byte at once (a full machine is an error at start, not a
bus error later), maps it, and seals it against shrinking, growing and any further writable mapping. Everybody else
attaches read-only. A forked child has none of these mappings (MADV_DONTFORK): it can neither write into an arena nor
keep one alive, and a view that it inherited is a segmentation fault there.

    with HostArena.create(64 << 20) as arena:
        send_descriptor(arena.fd)           # over a Unix socket
        arena.buffer[0:5] = b"hello"
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
from pathlib import Path
from types import TracebackType

from weftline.errors import LimitReached
from weftline.shm.block import PAGE_BYTES, align_up

MEMFD_NAME = "weftline"
"""Name of an arena's memory in /proc; it cannot be opened by name."""

F_SEAL_FUTURE_WRITE = 0x0010
"""Linux 5.1: mappings that exist stay writable, new ones may only read. Python 3.11's fcntl does not name it."""

_CLOSED = mmap.mmap(-1, PAGE_BYTES)
_CLOSED.close()
"""Stands for the mapping of an arena that was closed: every use of it is a ValueError."""


class HostArena:
    """One memory segment: writable for the process that created it, read-only for those that attach.

    buffer: the mapping; views into it keep it alive after `close`.
    fd:     the descriptor, owned by this object.
    """

    def __init__(self, fd: int, buffer: mmap.mmap, size_bytes: int, writable: bool) -> None:
        self.fd = fd
        self.buffer = buffer
        self.size_bytes = size_bytes
        self.writable = writable

    @classmethod
    def create(cls, size_bytes: int) -> HostArena:
        """Make, reserve, map and seal an arena of `size_bytes`, rounded up to a page.

        Raises LimitReached when the machine (or its control group) does not have the memory.
        """
        size = align_up(max(size_bytes, 1), PAGE_BYTES)
        fd = os.memfd_create(MEMFD_NAME, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(fd, size)
            os.posix_fallocate(fd, 0, size)
            buffer = mmap.mmap(fd, size, mmap.MAP_SHARED | mmap.MAP_POPULATE, mmap.PROT_READ | mmap.PROT_WRITE)
            buffer.madvise(mmap.MADV_DONTFORK)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | F_SEAL_FUTURE_WRITE)
        except OSError as error:
            os.close(fd)
            if error.errno in (errno.ENOSPC, errno.ENOMEM):
                raise LimitReached(
                    f"this machine cannot reserve {size} bytes of shared memory; lower limits.arena_bytes"
                ) from None
            raise
        return cls(fd, buffer, size, writable=True)

    @classmethod
    def attach(cls, fd: int, size_bytes: int) -> HostArena:
        """Map another process's arena read-only and take ownership of `fd`.

        Raises ValueError unless it is sealed and at least `size_bytes` long: memory that could shrink under a reader
        would kill it with a bus error.
        """
        try:
            seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
            if not seals & fcntl.F_SEAL_SHRINK:
                raise ValueError("the descriptor is not sealed against shrinking")
            if os.fstat(fd).st_size < size_bytes:
                raise ValueError(f"the descriptor is shorter than the {size_bytes} bytes announced")
            buffer = mmap.mmap(fd, size_bytes, mmap.MAP_SHARED, mmap.PROT_READ)
            buffer.madvise(mmap.MADV_DONTFORK)
        except BaseException:
            os.close(fd)
            raise
        return cls(fd, buffer, size_bytes, writable=False)

    @staticmethod
    def close_descriptors() -> None:
        """Close every descriptor of an arena that this process has: for a child that was forked and not executed."""
        for one in list(Path("/proc/self/fd").iterdir()):
            with contextlib.suppress(OSError):
                if str(one.readlink()).startswith(f"/memfd:{MEMFD_NAME}"):
                    os.close(int(one.name))

    def close(self) -> None:
        """Close the descriptor and drop the mapping; the memory is freed with its last view and process."""
        if self.fd < 0:
            return
        os.close(self.fd)
        self.fd = -1
        # The mapping ends with its last view. Closing it would not wait for numpy's: they keep the object, but do not
        # hold it open, and a later read of a view would kill the process.
        self.buffer = _CLOSED

    def __enter__(self) -> HostArena:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()
