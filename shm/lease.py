"""Who still needs a block: the one ledger of every arena.

The runtime owns the only Ledger. It leases output room before work is dispatched, counts a block's readers, and gives
the bytes back when the last of them is done. A block is known by (arena, offset, generation); generations only rise, so
a late or repeated message about an old lease is recognised, counted and ignored, never acted on.

An arena whose worker died is *retired*: nothing new is leased in it, and it is forgotten when its last lease ends.
"""

from __future__ import annotations

from dataclasses import dataclass

from weftline.shm.allocator import Allocator
from weftline.shm.block import Block, Place

Key = tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class LedgerStats:
    """A snapshot: bytes and blocks over all arenas, and how many stale messages were ignored."""

    arenas: int
    size_bytes: int
    leased_bytes: int
    blocks: int
    stale_total: int


class Ledger:
    """Leases blocks in arenas, counted by reader. Pure bookkeeping: it touches no shared memory."""

    def __init__(self) -> None:
        self._allocators: dict[int, Allocator] = {}
        self._readers: dict[Key, int] = {}
        self._retired: set[int] = set()
        self._generation = 0
        self._stale_total = 0

    def add_arena(self, arena: int, size_bytes: int) -> None:
        """Start leasing in `arena`; ids are never used twice."""
        if arena in self._allocators:
            raise ValueError(f"arena {arena} is already in the ledger")
        self._allocators[arena] = Allocator(size_bytes)

    def retire_arena(self, arena: int) -> None:
        """Lease nothing more in `arena`; `forget_empty` names it once its last lease has ended."""
        self._retired.add(arena)

    def arena_bytes(self, arena: int) -> int:
        """Return the arena's size; 0 when it is unknown, forgotten or retired."""
        return 0 if arena in self._retired or arena not in self._allocators else self._allocators[arena].size_bytes

    def taken_bytes(self, arena: int) -> int:
        """Return how much of an arena is leased; 0 when it is unknown."""
        return self._allocators[arena].taken_bytes if arena in self._allocators else 0

    def try_lease(self, arena: int, size_bytes: int, readers: int = 1) -> Block | None:
        """Lease `size_bytes` for `readers` readers, or return None when nothing fits now."""
        if readers < 1:
            raise ValueError(f"a lease for {readers} readers; a block needs at least one")
        if arena in self._retired or arena not in self._allocators:
            return None
        offset = self._allocators[arena].try_take(size_bytes)
        if offset is None:
            return None
        self._generation += 1
        block = Block(arena, offset, size_bytes, self._generation)
        self._readers[(arena, offset, block.generation)] = readers
        return block

    def holds(self, place: Place) -> bool:
        """Whether the place's block is leased under this very generation, and the place lies inside it."""
        if place.key not in self._readers:
            return False
        end = place.block + self._allocators[place.arena].size_of(place.block)
        return place.block <= place.offset and place.offset + place.size_bytes <= end

    def hold(self, key: Key, readers: int = 1) -> bool:
        """Add readers to a live lease; False (and counted) when it is stale."""
        if key not in self._readers:
            self._stale_total += 1
            return False
        self._readers[key] += readers
        return True

    def release(self, key: Key, readers: int = 1) -> bool:
        """End `readers` readers' interest; the last one frees the block. False (and counted) when it is stale."""
        held = self._readers.get(key, 0)
        if held < readers:
            self._stale_total += 1
            return False
        if held > readers:
            self._readers[key] = held - readers
            return True
        del self._readers[key]
        arena, offset, _ = key
        self._allocators[arena].give_back(offset)
        return True

    def forget_empty(self) -> list[int]:
        """Forget retired arenas whose last lease has ended, and return their ids."""
        if not self._retired:
            return []
        return [arena for arena in sorted(self._retired) if self._forget_if_empty(arena)]

    def stats(self) -> LedgerStats:
        allocators = self._allocators.values()
        return LedgerStats(
            len(self._allocators),
            sum(a.size_bytes for a in allocators),
            sum(a.taken_bytes for a in allocators),
            len(self._readers),
            self._stale_total,
        )

    def check(self) -> None:
        """Raise RuntimeError unless every arena's ranges tile it and the leases are exactly what is taken."""
        for arena, allocator in self._allocators.items():
            allocator.check()
            leased = sum(allocator.size_of(offset) for a, offset, _ in self._readers if a == arena)
            if leased != allocator.taken_bytes:
                raise RuntimeError(f"arena {arena}: {allocator.taken_bytes} bytes taken, {leased} leased")

    def _forget_if_empty(self, arena: int) -> bool:
        allocator = self._allocators.get(arena)
        if allocator is not None and allocator.taken_bytes:
            return False
        self._allocators.pop(arena, None)
        self._retired.discard(arena)
        return True
