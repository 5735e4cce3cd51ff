"""Interface of client-registered memory; `auth/shared_memory.py` implements it."""

from __future__ import annotations

from typing import Protocol


class Regions(Protocol):
    """Registered regions by name. Nothing here can fail but by InputError: a name or a range that is not there."""

    def check(self, name: str, offset: int, size_bytes: int) -> None:
        """Raise InputError unless the range lies inside the region."""

    def read_into(self, name: str, offset: int, buffer: memoryview) -> None:
        """Fill `buffer` from the region: one copy, and none of it can change afterwards."""

    def write(self, name: str, offset: int, data: bytes | memoryview) -> None:
        """Write `data` into the region."""
