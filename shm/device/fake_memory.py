"""Memory of a fake device: a memfd that says what it is.

What a program sees is `size_bytes` long. Behind it, from the next page on, lie the words of events, so that whoever has
the memory has the events too and neither needs a name:

    |<-- size_bytes -->| to a page |<-- HIDDEN_BYTES: 64 bytes of head, then 64 for each event -->|

Nothing is reserved: a fake device of 8 GiB takes what is written to it.
"""

from __future__ import annotations

import fcntl
import mmap
import os
from functools import cached_property

import numpy as np

from weftline.shm.block import PAGE_BYTES, align_up
from weftline.shm.device.driver import DriverError
from weftline.shm.device.fake_events import SLOT_WORDS, EventPage
from weftline.shm.device.fake_process import Process

HIDDEN_BYTES = 1 << 20
"""Room for 16,383 events: far more than an arena's owner makes."""

_MAGIC = int.from_bytes(b"weftfake", "little")


class FakeMemory:
    """One physical memory, as one process knows it.

    fd:       its descriptor, owned by this object, and closed with it.
    identity: what it is known by in every process; a random number that no other memory has.
    maker:    the process that made it, and that records the events behind it.
    made:     by this process; others are imported.
    lent:     made here, in a way that other processes may come by it.
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
        """Return the memory that a descriptor leads to, with a descriptor of its own; DriverError if it is no such."""
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
        """The events behind it; only its maker may write there."""
        protection = mmap.PROT_READ | (mmap.PROT_WRITE if self.made else 0)
        at = align_up(self.size_bytes, PAGE_BYTES)
        hidden = mmap.mmap(self.fd, HIDDEN_BYTES, mmap.MAP_SHARED, protection, offset=at)
        return EventPage(memoryview(hidden).cast("Q"), self.identity, self.maker)

    def map(self, size_bytes: int, writable: bool) -> mmap.mmap:
        protection = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
        return mmap.mmap(self.fd, size_bytes, mmap.MAP_SHARED, protection)

    def close(self) -> None:
        """Give up the descriptor; mappings and events stay until nobody refers to them."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def __del__(self) -> None:
        self.close()


class Mapping:
    """The first `size_bytes` of a memory at an address of this process.

    kind: how it came about, which says how it ends: 'map', 'allocation' or 'shared'.
    """

    __slots__ = ("address", "buffer", "end", "kind", "memory", "size_bytes", "writable")

    def __init__(self, memory: FakeMemory, size_bytes: int, writable: bool, kind: str) -> None:
        self.memory = memory
        self.size_bytes = size_bytes
        self.writable = writable
        self.kind = kind
        self.buffer = memory.map(size_bytes, writable)
        self.address = int(np.frombuffer(self.buffer, np.uint8).ctypes.data)
        self.end = self.address + size_bytes
