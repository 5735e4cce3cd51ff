"""Device memory of a worker's own, for what lives no longer than a dispatch: uploads, stacked inputs, private copies.

Allocating device memory is slow, and freeing it waits for the whole device, so what was used is kept for the next who
needs about as much. Whoever takes a piece gives it back once nothing on the device uses it any more.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable

from weftline.shm.block import align_up
from weftline.shm.device.driver import DeviceOutOfMemory, GpuDriver

KEPT_BYTES_MAX = 256 << 20
"""Most that is kept while nobody uses it: as much as a device arena has unless told otherwise."""

GRAIN_BYTES = 64 << 10
"""Sizes are multiples of this, so that inputs of slightly different sizes find each other's memory."""

SPARE_FACTOR = 2
"""A kept piece is used for what takes at least the half of it."""


class ScratchPiece:
    """Memory on the device from `address` on, `size_bytes` long."""

    __slots__ = ("address", "size_bytes")

    def __init__(self, address: int, size_bytes: int) -> None:
        self.address = address
        self.size_bytes = size_bytes


class Scratch:
    """The memory of one driver that is taken and given back. Not thread-safe, as the driver is not."""

    def __init__(self, driver: GpuDriver, kept_bytes_max: int = KEPT_BYTES_MAX) -> None:
        self._driver = driver
        self._kept_bytes_max = kept_bytes_max
        self._kept: list[tuple[int, int]] = []  # (size, address), smallest first
        self.kept_bytes = 0

    def take(self, size_bytes: int) -> ScratchPiece:
        """Return at least so many bytes; DeviceOutOfMemory when there are none, not even without what is kept."""
        size = align_up(max(size_bytes, 1), GRAIN_BYTES)
        at = bisect_left(self._kept, (size, 0))
        if at < len(self._kept) and self._kept[at][0] <= SPARE_FACTOR * size:
            size, address = self._kept.pop(at)
            self.kept_bytes -= size
            return ScratchPiece(address, size)
        try:
            return ScratchPiece(self._driver.allocate(size), size)
        except DeviceOutOfMemory:
            if not self._kept:
                raise
            self.trim()
            return ScratchPiece(self._driver.allocate(size), size)

    def give_back(self, pieces: Iterable[ScratchPiece]) -> None:
        """Keep pieces for others; what is more than is kept goes back to the device, the largest first."""
        for piece in pieces:
            insort(self._kept, (piece.size_bytes, piece.address))
            self.kept_bytes += piece.size_bytes
        while self.kept_bytes > self._kept_bytes_max:
            self._free()

    def trim(self) -> None:
        """Give everything that is kept back to the device."""
        while self._kept:
            self._free()

    def _free(self) -> None:
        size, address = self._kept.pop()
        self.kept_bytes -= size
        self._driver.free(address)
