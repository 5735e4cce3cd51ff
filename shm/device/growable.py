"""Device memory that grows and shrinks in place.

A range of device addresses is reserved once, for the largest size. Physical memory is mapped from its start on, in
chunks:

    address                 size_bytes                              reserved_bytes
    |  chunk  |  chunk  |  chunk  |      no memory: must not be used      |

Growing and shrinking move no byte and change no address, so that views and CUDA graphs of the range stay valid, and
what is unmapped is free for other processes at once (CUDA Driver API, Virtual Memory Management). The owner orders
its use: nothing on a stream may use what a call unmaps.
"""

from __future__ import annotations

import contextlib
import weakref

from weftline.shm.block import align_up
from weftline.shm.device.driver import OUT_OF_MEMORY, DeviceOutOfMemory, DriverError, GpuDriver

CHUNKS_MAX = 512
"""Most chunks of the first size: a chunk takes some 40 us to map (vAttention, Prabhu et al. 2024, table 9)."""


def chunk_size(granularity: int, first_bytes: int) -> int:
    """Return the chunk size of memory of `first_bytes`, a power of two times the granularity."""
    chunk = granularity
    while chunk * CHUNKS_MAX < first_bytes:
        chunk *= 2
    return chunk


class GrowableMemory:
    """Memory of one device at fixed addresses; `size_bytes` of `reserved_bytes` are mapped."""

    def __init__(self, driver: GpuDriver, reserved_bytes: int, first_bytes: int) -> None:
        """Reserve addresses, and map nothing. first_bytes: expected first size, which decides the size of chunks."""
        self.driver = driver
        self.size_bytes = 0
        self.chunk_bytes = chunk_size(driver.granularity(), first_bytes)
        self.reserved_bytes = align_up(max(reserved_bytes, first_bytes), self.chunk_bytes)
        self.address = driver.reserve(self.reserved_bytes)
        _live.add(self)

    def resize(self, size_bytes: int) -> None:
        """Map or unmap chunks until at least `size_bytes` are mapped, and less than a chunk more.

        DeviceOutOfMemory: more than the device has free, or than was reserved; the size is what it was.
        """
        if size_bytes > self.reserved_bytes:
            raise DeviceOutOfMemory("resize", OUT_OF_MEMORY, f"{size_bytes} bytes of a range of {self.reserved_bytes}")
        before, wanted = self.size_bytes, align_up(size_bytes, self.chunk_bytes)
        try:
            while self.size_bytes < wanted:
                self._add_chunk()
        except DriverError:
            self._shrink(before)
            raise
        self._shrink(wanted)

    def close(self) -> None:
        """Unmap everything and release the addresses."""
        if self.address:
            self._shrink(0)
            self.driver.unreserve(self.address, self.reserved_bytes)
            self.address = 0

    def _add_chunk(self) -> None:
        memory = self.driver.create(self.chunk_bytes)
        try:
            self.driver.map(memory, self.chunk_bytes, True, self.address + self.size_bytes)
        finally:
            self.driver.release(memory)  # the mapping keeps it
        self.size_bytes += self.chunk_bytes

    def _shrink(self, size_bytes: int) -> None:
        while self.size_bytes > size_bytes:
            self.driver.unmap(self.address + self.size_bytes - self.chunk_bytes, self.chunk_bytes, True)
            self.size_bytes -= self.chunk_bytes

    def __del__(self) -> None:
        with contextlib.suppress(Exception):  # a lost device took the memory along; the interpreter may be closing
            self.close()


_live: weakref.WeakSet[GrowableMemory] = weakref.WeakSet()


def mapped_bytes(device: str) -> int:
    """Return the bytes of growable memory that this process has mapped on a device."""
    return sum(memory.size_bytes for memory in _live if memory.driver.device == device)
