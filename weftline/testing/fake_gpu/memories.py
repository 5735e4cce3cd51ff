"""Memories of one process on a fake device: create, import, map and release.

Legacy sharing: a handle of 64 bytes names a process and its descriptor, and the opener duplicates the descriptor with
pidfd_getfd(2) (Linux 5.6). Workers are hardened (PR_SET_DUMPABLE 0), so that this fails between two of them unless they
have CAP_SYS_PTRACE.
"""

from __future__ import annotations

import ctypes
import os
from typing import NamedTuple

from weftline.shm.device.driver import SHARE_HANDLE_BYTES, DeviceOutOfMemory, DriverError
from weftline.testing.fake_gpu import watch as rules
from weftline.testing.fake_gpu.addresses import Addresses
from weftline.testing.fake_gpu.context import Context
from weftline.testing.fake_gpu.memory import PROT_NONE, FakeMemory, Mapping, map_fixed, unmap_range
from weftline.testing.fake_gpu.streams import Streams

_MAGIC = b"fakshare"
_PIDFD_GETFD = 438
"""Number of the system call pidfd_getfd on x86-64, arm64 and riscv64."""


class ShareHandle(NamedTuple):
    """Memory identity, and the maker's process and file descriptor."""

    identity: int
    pid: int
    descriptor: int

    def written(self) -> bytes:
        parts = [_MAGIC, *(number.to_bytes(8, "little") for number in self)]
        return b"".join(parts).ljust(SHARE_HANDLE_BYTES, b"\0")

    @classmethod
    def read(cls, handle: bytes) -> ShareHandle:
        if len(handle) != SHARE_HANDLE_BYTES or handle[:8] != _MAGIC:
            raise DriverError("open_shared", "INVALID_HANDLE", "this is no allocation of a fake device")
        identity, pid, descriptor = (int.from_bytes(handle[at : at + 8], "little") for at in (8, 16, 24))
        return cls(identity, pid, descriptor)

    def open(self) -> int:
        """Duplicate the maker's descriptor into this process. DriverError: the kernel refuses."""
        try:
            process = os.pidfd_open(self.pid)
        except (OSError, OverflowError):
            raise DriverError("open_shared", "INVALID_HANDLE", "the process that made the allocation is gone") from None
        try:
            libc = ctypes.CDLL(None, use_errno=True)
            opened = int(libc.syscall(_PIDFD_GETFD, process, ctypes.c_uint32(self.descriptor & 0xFFFFFFFF), 0))
        finally:
            os.close(process)
        if opened < 0:
            why = os.strerror(ctypes.get_errno())
            raise DriverError("open_shared", "NOT_SUPPORTED", f"the kernel does not lend its maker's descriptor: {why}")
        return opened


GRANULARITY_BYTES = 2 << 20
"""Allocation granularity of `create` and of memory that is shared by handle, as with CUDA."""


class Memories:
    """Memories by handle and mappings by address; the last of both frees the memory in this process."""

    def __init__(self, context: Context, total_bytes: int, addresses: Addresses, streams: Streams) -> None:
        self.total_bytes = total_bytes
        self._context = context
        self._addresses = addresses
        self._streams = streams
        self._by_handle: dict[int, FakeMemory] = {}
        self._reserved: dict[int, int] = {}  # size of each reserved range, by its start

    @property
    def taken_bytes(self) -> int:
        """Size in bytes of the memory that this process has created and not freed."""
        return sum(memory.size_bytes for memory in self.live() if memory.made)

    def live(self) -> list[FakeMemory]:
        mapped = (mapping.memory for mapping in self._addresses.mappings)
        return list(dict.fromkeys([*self._by_handle.values(), *mapped]))

    def create(self, size_bytes: int) -> int:
        self._context.check_kind("create", "fake", "fake-closed")
        _check_granularity("create", size_bytes)
        memory = self._made("create", size_bytes)
        memory.lent = True
        return self._keep(memory)

    def export(self, handle: int) -> int:
        self._context.check_kind("export", "fake", "fake-closed")
        return os.dup(self._held("export", handle).fd)

    def bring_in(self, descriptor: int) -> int:
        self._context.check_kind("import_memory", "fake", "fake-closed")
        memory = FakeMemory.brought_in(descriptor, "import_memory")
        if self._context.kind == "fake-closed" and not any(one.identity == memory.identity for one in self.live()):
            memory.close()
            raise DriverError("import_memory", "NOT_PERMITTED", "another process's memory is not let in on this device")
        return self._keep(self._new("import_memory", memory))

    def map(self, handle: int, size_bytes: int, writable: bool, at: int = 0) -> int:
        held = self._held("map", handle)
        _check_granularity("map", size_bytes)
        if size_bytes > held.size_bytes:
            raise DriverError("map", "INVALID_VALUE", f"{size_bytes} bytes of a memory of {held.size_bytes}")
        if at:
            self._check_free(at, size_bytes)
        return self._map(held, size_bytes, writable, "reserved" if at else "map", at)

    def reserve(self, size_bytes: int) -> int:
        _check_granularity("reserve", size_bytes)
        address = map_fixed(0, size_bytes, PROT_NONE)
        self._reserved[address] = size_bytes
        return address

    def unreserve(self, address: int, size_bytes: int) -> None:
        if self._reserved.get(address) != size_bytes:
            raise DriverError("unreserve", "INVALID_VALUE", "no range of that size was reserved there")
        if self._addresses.overlap(address, size_bytes):
            raise DriverError("unreserve", "INVALID_VALUE", "memory is mapped there")
        del self._reserved[address]
        unmap_range(address, size_bytes)

    def release(self, handle: int) -> None:
        if self._by_handle.pop(handle, None) is None:
            raise self._context.refusal(rules.FREED_TWICE, "release", "INVALID_HANDLE", "there is no such memory")

    def allocate(self, size_bytes: int) -> int:
        if size_bytes <= 0:
            raise DriverError("allocate", "INVALID_VALUE", f"{size_bytes} bytes")
        return self._map(self._made("allocate", size_bytes), size_bytes, True, "allocation")

    def share(self, address: int) -> bytes:
        self._context.check_kind("share", "fake", "fake-legacy")
        mapping = self._addresses.starting_at(address, "allocation")
        if mapping is None:
            raise DriverError("share", "INVALID_VALUE", "no allocation starts there")
        _check_granularity("share", mapping.size_bytes)
        mapping.memory.lent = True
        return ShareHandle(mapping.memory.identity, os.getpid(), mapping.memory.fd).written()

    def open_shared(self, handle: bytes) -> int:
        self._context.check_kind("open_shared", "fake", "fake-legacy")
        parsed = ShareHandle.read(handle)
        if any(memory.made and memory.identity == parsed.identity for memory in self.live()):
            raise DriverError("open_shared", "INVALID_CONTEXT", "this process made the allocation itself")
        descriptor = parsed.open()
        try:
            memory = FakeMemory.brought_in(descriptor, "open_shared")
        finally:
            os.close(descriptor)
        if memory.identity != parsed.identity:
            memory.close()
            raise DriverError("open_shared", "INVALID_HANDLE", "the allocation was freed")
        return self._map(self._new("open_shared", memory), memory.size_bytes, True, "shared")

    def unmap(self, call: str, address: int, kind: str, size_bytes: int = 0) -> None:
        """Remove a mapping made by `map`, `allocate` or `open_shared`; `size_bytes` must match unless it is 0."""
        mapping = self._addresses.starting_at(address, kind)
        if mapping is None:
            raise self._context.refusal(rules.FREED_TWICE, call, "INVALID_VALUE", "nothing of that kind starts there")
        if size_bytes not in (0, mapping.size_bytes):
            raise DriverError(call, "INVALID_VALUE", f"{size_bytes} bytes of a mapping of {mapping.size_bytes}")
        self._streams.advance()
        if self._streams.uses(mapping):
            raise self._context.refusal(rules.PENDING, call, "BUSY", "work on a stream still uses it")
        self._addresses.remove(mapping)
        mapping.close()

    def close(self) -> None:
        """Close all descriptors; mappings remain."""
        for memory in self.live():
            memory.close()
        self._by_handle.clear()

    def _made(self, call: str, size_bytes: int) -> FakeMemory:
        self._context.check_works(call)
        free = self.total_bytes - self.taken_bytes
        if size_bytes > free:
            raise DeviceOutOfMemory(call, "OUT_OF_MEMORY", f"{size_bytes} bytes asked for, {free} are free")
        return FakeMemory.create(size_bytes, self._context.process)

    def _new(self, call: str, memory: FakeMemory) -> FakeMemory:
        """Register imported memory. DriverError: this process has imported it already; the copy is closed."""
        if any(not other.made and other.identity == memory.identity for other in self.live()):
            memory.close()
            about = "this process has imported this memory already"
            raise self._context.refusal(rules.IMPORTED_TWICE, call, "ALREADY_MAPPED", about)
        return memory

    def _keep(self, memory: FakeMemory) -> int:
        handle = self._context.handle()
        self._by_handle[handle] = memory
        return handle

    def _held(self, call: str, handle: int) -> FakeMemory:
        memory = self._by_handle.get(handle)
        if memory is None:
            raise DriverError(call, "INVALID_HANDLE", "this memory does not exist, or was released")
        return memory

    def _check_free(self, at: int, size_bytes: int) -> None:
        """DriverError unless the addresses are reserved, aligned and unused."""
        inside = any(start <= at and at + size_bytes <= start + size for start, size in self._reserved.items())
        if not inside:
            raise DriverError("map", "INVALID_VALUE", "these addresses are not reserved")
        if self._addresses.overlap(at, size_bytes):
            raise DriverError("map", "ALREADY_MAPPED", "memory is mapped there already")

    def _map(self, memory: FakeMemory, size_bytes: int, writable: bool, kind: str, at: int = 0) -> int:
        mapping = Mapping(memory, size_bytes, writable, kind, at)
        self._addresses.add(mapping)
        return mapping.address


def _check_granularity(call: str, size_bytes: int) -> None:
    if size_bytes <= 0 or size_bytes % GRANULARITY_BYTES:
        raise DriverError(call, "INVALID_VALUE", f"{size_bytes} bytes are no positive multiple of {GRANULARITY_BYTES}")
