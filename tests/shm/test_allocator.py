"""The allocator hands out ranges that never overlap, and gets every byte back."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from weftline.shm.allocator import Allocator
from weftline.shm.block import ALIGN_BYTES, PAGE_ALIGN_FROM_BYTES, PAGE_BYTES

SIZE = 1 << 20


def test_a_new_arena_is_one_free_range() -> None:
    allocator = Allocator(SIZE)
    assert (allocator.free_bytes, allocator.largest_free_bytes) == (SIZE, SIZE)


def test_the_smallest_range_that_fits_is_taken() -> None:
    allocator = Allocator(4096)
    first, second, third = (allocator.try_take(1024) for _ in range(3))
    assert (first, second, third) == (0, 1024, 2048)
    allocator.give_back(0)
    assert allocator.try_take(512) == 0
    assert allocator.try_take(1024) == 3072


def test_neighbours_join_when_given_back_in_any_order() -> None:
    allocator = Allocator(4096)
    offsets = [allocator.try_take(1024) for _ in range(4)]
    for offset in (offsets[1], offsets[3], offsets[2], offsets[0]):
        assert offset is not None
        allocator.give_back(offset)
        allocator.check()
    assert allocator.largest_free_bytes == 4096


def test_large_blocks_start_on_a_page() -> None:
    allocator = Allocator(SIZE)
    allocator.try_take(1)
    offset = allocator.try_take(PAGE_ALIGN_FROM_BYTES)
    assert offset is not None and offset % PAGE_BYTES == 0
    allocator.check()


def test_a_full_arena_says_none_and_a_double_free_is_an_error() -> None:
    allocator = Allocator(1024)
    assert allocator.try_take(1024) == 0
    assert allocator.try_take(1) is None
    allocator.give_back(0)
    with pytest.raises(KeyError):
        allocator.give_back(0)


@given(st.integers(max_value=0) | st.integers(1, SIZE).filter(lambda n: n % ALIGN_BYTES != 0))
def test_a_size_that_is_no_multiple_is_refused(size: int) -> None:
    with pytest.raises(ValueError, match="multiple"):
        Allocator(size)


@pytest.mark.parametrize("align_bytes", [0, 32, 96])
def test_an_alignment_that_is_no_power_of_two_is_refused(align_bytes: int) -> None:
    with pytest.raises(ValueError, match="power of two"):
        Allocator(SIZE, align_bytes)


@pytest.mark.parametrize("align_bytes", [256, 2 * PAGE_BYTES])
def test_ranges_keep_to_a_coarser_alignment(align_bytes: int) -> None:
    allocator = Allocator(SIZE, align_bytes)
    offsets = [allocator.try_take(size) for size in (1, align_bytes + 1, PAGE_ALIGN_FROM_BYTES, 1)]
    assert all(offset is not None and offset % align_bytes == 0 for offset in offsets)
    allocator.check()
    with pytest.raises(ValueError, match=f"multiple of {align_bytes}"):
        Allocator(SIZE + 64, align_bytes)


class AllocatorMachine(RuleBasedStateMachine):
    """Any order of takes, trims and returns keeps the bookkeeping whole and ranges apart."""

    def __init__(self) -> None:
        super().__init__()
        self.allocator = Allocator(SIZE)
        self.taken: dict[int, int] = {}

    @rule(size=st.integers(0, 200_000))
    def take(self, size: int) -> None:
        offset = self.allocator.try_take(size)
        if offset is not None:
            assert offset % ALIGN_BYTES == 0
            self.taken[offset] = self.allocator.size_of(offset)
            assert self.taken[offset] >= size
        else:
            assert self.allocator.largest_free_bytes < size + PAGE_BYTES

    @precondition(lambda self: self.taken)
    @rule(data=st.data())
    def give_back(self, data: st.DataObject) -> None:
        offset = data.draw(st.sampled_from(sorted(self.taken)))
        del self.taken[offset]
        self.allocator.give_back(offset)

    @invariant()
    def nothing_overlaps_and_nothing_is_lost(self) -> None:
        self.allocator.check()
        at = 0
        for offset in sorted(self.taken):
            assert offset >= at
            at = offset + self.taken[offset]
        assert sum(self.taken.values()) + self.allocator.free_bytes == SIZE


TestAllocatorMachine = AllocatorMachine.TestCase
TestAllocatorMachine.settings = settings(max_examples=60, stateful_step_count=60, deadline=None)
