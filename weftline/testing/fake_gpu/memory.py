"""Memory of a fake device: a memfd with a header that identifies it.

The visible part has `size_bytes` bytes. The event page follows at the next page boundary, so that a process that
imports the memory has its events too, and neither needs a name:

    |<-- size_bytes -->| to a page |<-- HIDDEN_BYTES: 64 bytes of head, then 64 for each event -->|

Nothing is reserved: a fake device of 8 GiB uses only the memory that is written.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
from functools import cached_property

import numpy as np

from weftline.shm.block import PAGE_BYTES, align_up
from weftline.shm.device.driver import DriverError
from weftline.testing.fake_gpu.context import Process
from weftline.testing.fake_gpu.events import SLOT_WORDS, EventPage

HIDDEN_BYTES = 1 << 20
"""Size for 16,383 events, far more than the owner of an arena makes."""

PROT_NONE, MAP_FIXED, MAP_NORESERVE = 0, 0x10, 0x4000
"""Values of mmap(2) on Linux that Python's module does not have on every version."""
_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.mmap.restype = ctypes.c_void_p
_LIBC.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_LIBC.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]

_MAGIC = int.from_bytes(b"weftfake", "little")


class FakeMemory:
    """One physical memory in one process.

    fd:       its file descriptor, owned by this object and closed with it.
    identity: random number that identifies the memory in all processes.
    maker:    process that created the memory and records the events behind it.
    made:     created by this process; else imported.
    lent:     created by this process and shareable with others.
    """

    def __init__(self, fd: int, size_bytes: int, identity: int, maker: Process, made: bool) -> None:
        self.fd = fd
        self.size_bytes = size_bytes
        self.identity = identity
        self.maker = maker
        self.made = made
        self.lent = False

    @classmethod
    def create(cls, size_bytes: int, maker: Process) -> FakeMemory:
        identity = int.from_bytes(os.urandom(8), "little")
        at = align_up(size_bytes, PAGE_BYTES)
        fd = os.memfd_create("weftline-fake-gpu", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(fd, at + HIDDEN_BYTES)
            os.pwrite(fd, np.array([_MAGIC, identity, size_bytes, *maker], np.uint64).tobytes(), at)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
        except BaseException:
            os.close(fd)
            raise
        return cls(fd, size_bytes, identity, maker, True)

    @classmethod
    def brought_in(cls, descriptor: int, call: str) -> FakeMemory:
        """Import the memory of a descriptor, which is duplicated. DriverError: it is no fake device memory."""
        try:
            fd = os.dup(descriptor)
        except OSError:
            raise DriverError(call, "INVALID_HANDLE", "the descriptor is closed") from None
        at = os.fstat(fd).st_size - HIDDEN_BYTES
        if at > 0 and at % PAGE_BYTES == 0:
            head = np.frombuffer(os.pread(fd, 8 * SLOT_WORDS, at), np.uint64)
            magic, identity, size, number, born = (int(word) for word in head[:5])
            if magic == _MAGIC and size > 0 and align_up(size, PAGE_BYTES) == at:
                return cls(fd, size, identity, Process(number, born), False)
        os.close(fd)
        raise DriverError(call, "INVALID_HANDLE", "the descriptor leads to no memory of a fake device")

    @cached_property
    def page(self) -> EventPage:
        """Event page behind the memory; only the maker may write to it."""
        protection = mmap.PROT_READ | (mmap.PROT_WRITE if self.made else 0)
        at = align_up(self.size_bytes, PAGE_BYTES)
        hidden = mmap.mmap(self.fd, HIDDEN_BYTES, mmap.MAP_SHARED, protection, offset=at)
        return EventPage(memoryview(hidden).cast("Q"), self.identity, self.maker)

    def map(self, size_bytes: int, writable: bool) -> mmap.mmap:
        protection = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
        return mmap.mmap(self.fd, size_bytes, mmap.MAP_SHARED, protection)

    def close(self) -> None:
        """Close the descriptor; mappings and events remain while they are referenced."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def __del__(self) -> None:
        self.close()


class Mapping:
    """A mapping of the first `size_bytes` of a memory at an address of this process.

    kind: 'map', 'reserved', 'allocation' or 'shared', which selects the call that removes it.
    at:   address in reserved addresses; 0: wherever there is room.
    """

    __slots__ = ("address", "buffer", "end", "kind", "memory", "size_bytes", "writable")

    def __init__(self, memory: FakeMemory, size_bytes: int, writable: bool, kind: str, at: int = 0) -> None:
        self.memory = memory
        self.size_bytes = size_bytes
        self.writable = writable
        self.kind = kind
        self.buffer: mmap.mmap | memoryview
        if at:
            protection = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
            self.address = map_fixed(at, size_bytes, protection, memory.fd)
            self.buffer = memoryview((ctypes.c_char * size_bytes).from_address(at)).cast("B")
        else:
            self.buffer = memory.map(size_bytes, writable)
            self.address = int(np.frombuffer(self.buffer, np.uint8).ctypes.data)
        self.end = self.address + size_bytes

    def close(self) -> None:
        """Remove the mapping; addresses that were reserved before stay so."""
        if isinstance(self.buffer, mmap.mmap):
            self.buffer.close()
        else:
            self.buffer.release()
            map_fixed(self.address, self.size_bytes, PROT_NONE)


def map_fixed(at: int, size_bytes: int, protection: int, fd: int = -1) -> int:
    """Map at an address by mmap(2), which Python's module cannot; at 0: anywhere. fd -1: addresses without memory."""
    flags = (MAP_NORESERVE | mmap.MAP_ANONYMOUS | mmap.MAP_PRIVATE) if fd < 0 else mmap.MAP_SHARED
    found = _LIBC.mmap(at, size_bytes, protection, flags | (MAP_FIXED if at else 0), fd, 0)
    if found in (None, ctypes.c_void_p(-1).value):
        raise DriverError("map", "OUT_OF_ADDRESSES", os.strerror(ctypes.get_errno()))
    return int(found)


def unmap_range(at: int, size_bytes: int) -> None:
    _LIBC.munmap(at, size_bytes)
