"""Device memory that is taken for a dispatch and kept for the next."""

from __future__ import annotations

import pytest

from weftline.engine.worker.scratch import GRAIN_BYTES, Scratch
from weftline.shm.device.driver import DeviceOutOfMemory
from weftline.shm.device.fake import FakeGpu

MIB = 1 << 20


class Counting(FakeGpu):
    """A fake that notes what is allocated and freed."""

    def __init__(self, total_bytes: int = 64 * MIB) -> None:
        super().__init__("fake:0", total_bytes)
        self.allocated: list[int] = []
        self.freed = 0

    def allocate(self, size_bytes: int) -> int:
        address = super().allocate(size_bytes)
        self.allocated.append(size_bytes)
        return address

    def free(self, address: int) -> None:
        super().free(address)
        self.freed += 1


def test_what_was_given_back_is_used_by_whoever_needs_about_as_much() -> None:
    driver = Counting()
    scratch = Scratch(driver)
    piece = scratch.take(3 * MIB)
    scratch.give_back([piece])
    assert scratch.take(2 * MIB).address == piece.address
    assert scratch.kept_bytes == 0
    scratch.give_back([piece])
    assert scratch.take(MIB).address != piece.address, "it would hold three times what it needs"
    assert driver.allocated == [3 * MIB, MIB]


def test_the_smallest_that_is_large_enough_is_taken() -> None:
    scratch = Scratch(Counting())
    small, large = scratch.take(2 * MIB), scratch.take(3 * MIB)
    scratch.give_back([large, small])
    assert scratch.take(2 * MIB).address == small.address
    assert scratch.take(2 * MIB).address == large.address


def test_more_than_is_kept_goes_back_to_the_device() -> None:
    driver = Counting()
    scratch = Scratch(driver, kept_bytes_max=3 * MIB)
    scratch.give_back([scratch.take(2 * MIB), scratch.take(MIB)])
    assert driver.freed == 0 and scratch.kept_bytes == 3 * MIB
    scratch.give_back([scratch.take(GRAIN_BYTES)])
    assert driver.freed == 1 and scratch.kept_bytes == MIB + GRAIN_BYTES


def test_a_device_that_is_full_is_asked_again_without_what_is_kept() -> None:
    driver = Counting(8 * MIB)
    scratch = Scratch(driver)
    scratch.give_back([scratch.take(6 * MIB)])
    scratch.take(2 * MIB + GRAIN_BYTES)
    assert driver.freed == 1
    with pytest.raises(DeviceOutOfMemory):
        scratch.take(8 * MIB)
