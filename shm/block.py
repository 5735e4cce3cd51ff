"""Block and place: addresses in shared memory as they travel in messages.

A *block* is what the ledger leases: a run of bytes in one arena, with the generation it was leased under. A *place* is
where one value lies: a range inside a block. Most blocks hold one value; the outputs of a batch lie side by side in one
block, so that the next step sees them as one array.

    arena 3   |........[ block 4096 .. 8192, generation 17 ]........|
                        [ item 0 ][ item 1 ][ item 2 ][ item 3 ]       four places

Both are tuples, so that they travel as short arrays and compare by value.
"""

from __future__ import annotations

from typing import NamedTuple

ALIGN_BYTES = 64
"""Every block starts at a multiple of this: a cache line, and what vector instructions like."""

PAGE_BYTES = 4096
"""Blocks of PAGE_ALIGN_FROM_BYTES and more start on a page of the operating system."""

PAGE_ALIGN_FROM_BYTES = 64 * 1024

INLINE_BYTES_MAX = 16 * 1024
"""Values up to this size travel inside the message: cheaper there than a block's bookkeeping."""


def align_up(value: int, to: int) -> int:
    """Return the smallest multiple of `to` that is at least `value`."""
    return -(-value // to) * to


class Block(NamedTuple):
    """A leased run of bytes: [offset, offset + size_bytes) of `arena`. `generation` rises with every lease."""

    arena: int
    offset: int
    size_bytes: int
    generation: int

    @property
    def key(self) -> tuple[int, int, int]:
        """Key of the block in the ledger: (arena, start of the block, generation)."""
        return (self.arena, self.offset, self.generation)

    def place(self, start_bytes: int, size_bytes: int) -> Place:
        """Return the place `start_bytes` into this block; ValueError when it does not fit."""
        if start_bytes < 0 or size_bytes < 0 or start_bytes + size_bytes > self.size_bytes:
            raise ValueError(
                f"bytes {start_bytes}..{start_bytes + size_bytes} do not lie in a block of {self.size_bytes}"
            )
        return Place(self.arena, self.offset + start_bytes, size_bytes, self.offset, self.generation)


Key = tuple[int, int, int]
"""Ledger key of a block: (arena, start of the block, generation)."""


class Place(NamedTuple):
    """Address of one value: [offset, offset + size_bytes) of `arena`, in the block that starts at `block`."""

    arena: int
    offset: int
    size_bytes: int
    block: int
    generation: int

    @property
    def key(self) -> tuple[int, int, int]:
        """Key of the block in the ledger: (arena, start of the block, generation)."""
        return (self.arena, self.block, self.generation)

    def check_inside(self, arena_bytes: int) -> None:
        """Raise ValueError unless this place lies inside an arena of `arena_bytes`; asked of all that arrive."""
        if not 0 <= self.block <= self.offset or self.size_bytes < 0 or self.offset + self.size_bytes > arena_bytes:
            raise ValueError(
                f"a place at {self.offset} of {self.size_bytes} bytes is outside an arena of {arena_bytes}"
            )
