"""Address map of one process on a fake device: device mappings and page-locked host memory."""

from __future__ import annotations

from bisect import bisect_right, insort
from collections.abc import Iterable

from weftline.shm.device.driver import DriverError
from weftline.testing.fake_gpu import watch as rules
from weftline.testing.fake_gpu.context import Context
from weftline.testing.fake_gpu.memory import Mapping
from weftline.testing.fake_gpu.queue import Span


class Addresses:
    """Mappings by address, and page-locked host ranges; no two of a kind overlap."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._mappings: dict[int, Mapping] = {}
        self._starts: list[int] = []
        self._locked: dict[int, int] = {}

    @property
    def mappings(self) -> Iterable[Mapping]:
        return self._mappings.values()

    def add(self, mapping: Mapping) -> None:
        self._mappings[mapping.address] = mapping
        insort(self._starts, mapping.address)

    def starting_at(self, address: int, kind: str) -> Mapping | None:
        mapping = self._mappings.get(address)
        return mapping if mapping is not None and mapping.kind == kind else None

    def remove(self, mapping: Mapping) -> None:
        del self._mappings[mapping.address]
        self._starts.remove(mapping.address)

    def overlap(self, address: int, size_bytes: int) -> bool:
        """Return True if a mapping lies in these addresses, wholly or in part."""
        following = bisect_right(self._starts, address)
        begins = following < len(self._starts) and self._starts[following] < address + size_bytes
        return begins or self.around(address) is not None

    def around(self, address: int) -> Mapping | None:
        """Return the mapping that contains an address; None for a host address."""
        before = bisect_right(self._starts, address)
        if not before:
            return None
        mapping = self._mappings[self._starts[before - 1]]
        return mapping if address < mapping.end else None

    def span(self, call: str, address: int, size_bytes: int, writes: bool = False) -> Span | None:
        """Return the device memory at an address, or None for host memory. DeviceLost: the access is invalid."""
        mapping = self.around(address)
        if mapping is None:
            return None
        if address + size_bytes > mapping.end:
            raise self._context.loss(rules.OUTSIDE, call, f"{address + size_bytes - mapping.end} bytes beyond its end")
        if writes and not mapping.writable:
            raise self._context.loss(rules.READ_ONLY, call, f"{size_bytes} bytes")
        return Span(mapping, address - mapping.address, size_bytes)

    def lock(self, address: int, size_bytes: int) -> None:
        if size_bytes <= 0:
            raise DriverError("lock_pages", "INVALID_VALUE", f"{size_bytes} bytes")
        for start, end in self._locked.items():
            if address < end and start < address + size_bytes:
                raise DriverError("lock_pages", "HOST_MEMORY_ALREADY_REGISTERED", "part of it is page-locked")
        self._locked[address] = address + size_bytes

    def unlock(self, address: int) -> None:
        if self._locked.pop(address, None) is None:
            raise DriverError("unlock_pages", "HOST_MEMORY_NOT_REGISTERED", "nothing was page-locked there")

    def is_locked(self, address: int, size_bytes: int) -> bool:
        return any(start <= address and address + size_bytes <= end for start, end in self._locked.items())

    def clear(self) -> None:
        self._mappings.clear()
        self._starts.clear()
        self._locked.clear()
