"""A GPU in host memory, for tests and trials."""

from __future__ import annotations

import ctypes
import mmap
import os
import time
from dataclasses import dataclass, field

from weftline.shm.device.driver import DriverError

GRANULARITY_BYTES = 2 << 20
TOTAL_BYTES = 8 << 30


@dataclass
class FakeGpu:
    """First form: memory that is shared by descriptor, streams that do everything at once."""

    device: str = "fake:0"
    total_bytes: int = TOTAL_BYTES
    _memories: dict[int, int] = field(default_factory=dict)
    _mappings: dict[int, mmap.mmap] = field(default_factory=dict)
    _taken: int = 0
    _next: int = 1

    def granularity(self) -> int:
        return GRANULARITY_BYTES

    def create(self, size_bytes: int) -> int:
        fd = os.memfd_create("weftline-fake-gpu", os.MFD_CLOEXEC)
        os.ftruncate(fd, size_bytes)
        self._taken += size_bytes
        return self._keep(fd)

    def export(self, memory: int) -> int:
        return os.dup(self._memories[memory])

    def import_memory(self, descriptor: int) -> int:
        return self._keep(os.dup(descriptor))

    def map(self, memory: int, size_bytes: int, writable: bool) -> int:
        protection = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
        mapping = mmap.mmap(self._memories[memory], size_bytes, mmap.MAP_SHARED, protection)
        import numpy as np

        address = int(np.frombuffer(mapping, np.uint8).ctypes.data)
        self._mappings[address] = mapping
        return address

    def unmap(self, address: int, size_bytes: int) -> None:
        del self._mappings[address]

    def release(self, memory: int) -> None:
        os.close(self._memories.pop(memory))

    def allocate(self, size_bytes: int) -> int:
        return self.map(self.create(size_bytes), size_bytes, True)

    def free(self, address: int) -> None:
        del self._mappings[address]

    def share(self, address: int) -> bytes:
        raise DriverError("share", "NOT_SUPPORTED")

    def open_shared(self, handle: bytes) -> int:
        raise DriverError("open_shared", "NOT_SUPPORTED")

    def close_shared(self, address: int) -> None:
        raise DriverError("close_shared", "NOT_SUPPORTED")

    def stream(self) -> int:
        return self._number()

    def destroy_stream(self, stream: int) -> None: ...

    def copy(self, to: int, source: int, size_bytes: int, stream: int) -> None:
        ctypes.memmove(to, source, size_bytes)

    def synchronize(self, stream: int) -> None: ...

    def event(self, shared: bool = False) -> int:
        return self._number()

    def export_event(self, event: int) -> bytes:
        return event.to_bytes(64, "little")

    def import_event(self, handle: bytes) -> int:
        return int.from_bytes(handle, "little")

    def destroy_event(self, event: int) -> None: ...

    def record(self, event: int, stream: int) -> None: ...

    def wait(self, stream: int, event: int) -> None: ...

    def finished(self, event: int) -> bool:
        return True

    def wait_event(self, event: int) -> None:
        time.sleep(0)

    def lock_pages(self, address: int, size_bytes: int, writable: bool) -> None: ...

    def unlock_pages(self, address: int) -> None: ...

    def memory(self) -> tuple[int, int]:
        return self.total_bytes - self._taken, self.total_bytes

    def close(self) -> None:
        for fd in self._memories.values():
            os.close(fd)
        self._memories.clear()

    def _keep(self, fd: int) -> int:
        number = self._number()
        self._memories[number] = fd
        return number

    def _number(self) -> int:
        self._next += 1
        return self._next
