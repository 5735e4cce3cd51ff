"""Best-fit allocator for the bytes of an arena; arithmetic only, pure.

Best fit with immediate coalescing. The smallest free range that is large enough is taken; what is given back joins its
free neighbours at once, so two neighbouring free ranges never exist. Free ranges are kept three ways, always the same
set:

    by start    {start: end}          to join a range with the one after it
    by end      {end: start}          to join a range with the one before it
    by size     sorted [(size, start)] to find the best fit by bisection

Costs are O(log n) comparisons and one memmove in the number of free ranges.
"""

from __future__ import annotations

from bisect import bisect_left, insort

from weftline.shm.block import ALIGN_BYTES, PAGE_ALIGN_FROM_BYTES, PAGE_BYTES, align_up


class Allocator:
    """Hands out aligned ranges of [0, size_bytes). One owner; not thread-safe.

    align_bytes: every range starts and ends at a multiple of this, a power of two of at least ALIGN_BYTES.
    """

    def __init__(self, size_bytes: int, align_bytes: int = ALIGN_BYTES) -> None:
        if align_bytes < ALIGN_BYTES or align_bytes & (align_bytes - 1):
            raise ValueError(f"ranges aligned to {align_bytes} bytes; expected a power of two from {ALIGN_BYTES} on")
        if size_bytes <= 0 or size_bytes % align_bytes:
            raise ValueError(f"an arena of {size_bytes} bytes; the size must be a positive multiple of {align_bytes}")
        self.size_bytes = size_bytes
        self.align_bytes = align_bytes
        self._taken: dict[int, int] = {}
        self._end_of: dict[int, int] = {}
        self._start_of: dict[int, int] = {}
        self._by_size: list[tuple[int, int]] = []
        self._free_bytes = 0
        self._add_free(0, size_bytes)

    @property
    def free_bytes(self) -> int:
        return self._free_bytes

    @property
    def taken_bytes(self) -> int:
        return self.size_bytes - self._free_bytes

    @property
    def largest_free_bytes(self) -> int:
        return self._by_size[-1][0] if self._by_size else 0

    def size_of(self, offset: int) -> int:
        """Return the bytes taken at `offset`, rounded up as they were; KeyError when nothing is taken there."""
        return self._taken[offset]

    def try_take(self, size_bytes: int) -> int | None:
        """Return the offset of `size_bytes` rounded up to the alignment (zero counts as one); None: nothing fits."""
        size = align_up(max(size_bytes, 1), self.align_bytes)
        align = PAGE_BYTES if size >= PAGE_ALIGN_FROM_BYTES else self.align_bytes
        for index in range(bisect_left(self._by_size, (size, 0)), len(self._by_size)):
            _, start = self._by_size[index]
            at = align_up(start, align)
            end = self._end_of[start]
            if at + size > end:
                continue
            self._remove_free(start, end)
            if at > start:
                self._add_free(start, at)
            if at + size < end:
                self._add_free(at + size, end)
            self._taken[at] = size
            return at
        return None

    def give_back(self, offset: int) -> None:
        """Free what was taken at `offset`; KeyError when nothing is taken there (a double free)."""
        size = self._taken.pop(offset)
        self._give(offset, offset + size)

    def check(self) -> None:
        """Raise RuntimeError unless free and taken ranges tile the arena exactly and no two free ranges touch."""
        taken = [(start, start + size, True) for start, size in self._taken.items()]
        ranges = sorted([(start, end, False) for start, end in self._end_of.items()] + taken)
        at, was_free = 0, False
        for start, end, is_taken in ranges:
            if start != at or end <= start or (was_free and not is_taken):
                raise RuntimeError(f"arena bookkeeping is broken at offset {start}: expected a range from {at}")
            at, was_free = end, not is_taken
        indexed = sorted((end - start, start) for start, end in self._end_of.items())
        if at != self.size_bytes or indexed != self._by_size or sum(size for size, _ in indexed) != self._free_bytes:
            raise RuntimeError("arena bookkeeping is broken: the indexes of free ranges disagree")

    def _give(self, start: int, end: int) -> None:
        if start in self._start_of:
            before = self._start_of[start]
            self._remove_free(before, start)
            start = before
        if end in self._end_of:
            after = self._end_of[end]
            self._remove_free(end, after)
            end = after
        self._add_free(start, end)

    def _add_free(self, start: int, end: int) -> None:
        self._end_of[start] = end
        self._start_of[end] = start
        insort(self._by_size, (end - start, start))
        self._free_bytes += end - start

    def _remove_free(self, start: int, end: int) -> None:
        del self._end_of[start]
        del self._start_of[end]
        del self._by_size[bisect_left(self._by_size, (end - start, start))]
        self._free_bytes -= end - start
