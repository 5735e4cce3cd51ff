"""Ledger: reference-counted leases of the blocks of all arenas.

The runtime owns the only Ledger. It leases output blocks before work is dispatched, counts a block's readers, and frees
the block when the last of them is done. A block is identified by (arena, offset, generation); generations only rise, so
a late or repeated message about an old lease is recognised, counted and ignored.

An arena whose worker died is *retired*: nothing new is leased in it, and it is forgotten when its last lease ends.

A GPU may still execute reads of a process that has died. Its leases on other workers' device memory are therefore in
*quarantine*: they no longer count as readers, and their blocks are not free, until the arena's owner has settled the
work that was on the device at that time.

    free --try_lease--> leased --last release--> free
                           `--quarantine, last release--> quarantined --settle--> free

The events of a device arena A are leased like blocks, EVENT_BYTES each, in an arena with the id -A: these
leases are not memory, so `stats` excludes their bytes.
"""

from __future__ import annotations

from dataclasses import dataclass

from weftline.shm.allocator import Allocator
from weftline.shm.block import ALIGN_BYTES, Block, Key, Place

DEVICE_ALIGN_BYTES = 256
"""Blocks of device memory start at multiples of this: the alignment of cudaMalloc, required by vector loads."""

EVENT_BYTES = ALIGN_BYTES
"""Size of one event in an arena of events, the smallest lease: offset // EVENT_BYTES is its index."""


@dataclass(frozen=True, slots=True)
class LedgerStats:
    """A snapshot over all arenas; free are `size_bytes - leased_bytes - quarantined_bytes`.

    blocks:            leases that are held, events' included.
    stale_total:       number of ignored stale messages.
    quarantined_bytes: held for dead readers only.
    """

    arenas: int
    size_bytes: int
    leased_bytes: int
    blocks: int
    stale_total: int
    quarantined_bytes: int = 0


class Ledger:
    """Leases blocks in arenas, counted by reader. Pure bookkeeping: it touches no shared memory."""

    def __init__(self) -> None:
        self._allocators: dict[int, Allocator] = {}
        self._readers: dict[Key, int] = {}
        self._quarantined: dict[Key, int] = {}  # tickets of dead readers, under all tokens
        self._tokens: dict[int, dict[Key, int]] = {}  # the same by token
        self.retired: set[int] = set()
        self._generation = 0
        self._stale_total = 0

    def add_arena(self, arena: int, size_bytes: int, align_bytes: int = ALIGN_BYTES) -> None:
        """Start leasing in `arena`, in multiples of `align_bytes`; ids are never used twice."""
        if arena in self._allocators:
            raise ValueError(f"arena {arena} is already in the ledger")
        self._allocators[arena] = Allocator(size_bytes, align_bytes)

    def retire_arena(self, arena: int) -> None:
        """Lease nothing more in `arena`; `forget_empty` names it once its last lease has ended.

        Its quarantine ends: no process writes where a dead reader may still read.
        """
        self.retired.add(arena)
        for token in [token for token, keys in self._tokens.items() if any(key[0] == arena for key in keys)]:
            self._leave(token, [key for key in self._tokens[token] if key[0] == arena])

    def arena_bytes(self, arena: int) -> int:
        """Return the arena's size; 0 when it is unknown, forgotten or retired."""
        return 0 if arena in self.retired or arena not in self._allocators else self._allocators[arena].size_bytes

    def knows(self, arena: int) -> bool:
        """Return True while leases in an arena are possible: it was added and not forgotten."""
        return arena in self._allocators

    def taken_bytes(self, arena: int) -> int:
        """Return how much of an arena is leased; 0 when it is unknown."""
        return self._allocators[arena].taken_bytes if arena in self._allocators else 0

    def try_lease(self, arena: int, size_bytes: int, readers: int = 1) -> Block | None:
        """Lease `size_bytes` for `readers` readers, or return None when nothing fits now."""
        if readers < 1:
            raise ValueError(f"a lease for {readers} readers; a block needs at least one")
        if arena in self.retired or arena not in self._allocators:
            return None
        offset = self._allocators[arena].try_take(size_bytes)
        if offset is None:
            return None
        self._generation += 1
        block = Block(arena, offset, size_bytes, self._generation)
        self._readers[(arena, offset, block.generation)] = readers
        return block

    def holds(self, place: Place) -> bool:
        """Return True when the place lies in a block leased under this generation."""
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
        if key not in self._quarantined:
            self._allocators[key[0]].give_back(key[1])
        return True

    def quarantine(self, key: Key, readers: int, token: int) -> bool:
        """End the interest of `readers` readers that died; the block is not free before `settle(token)`.

        A token may hold several blocks. In a retired arena this is `release`. False (and counted) when it is stale.
        """
        if key[0] in self.retired:
            return self.release(key, readers)
        held = self._readers.get(key, 0)
        if readers < 1 or held < readers:
            self._stale_total += 1
            return False
        self._quarantined[key] = self._quarantined.get(key, 0) + readers
        keys = self._tokens.setdefault(token, {})
        keys[key] = keys.get(key, 0) + readers
        return self.release(key, readers)

    def settle(self, token: int) -> bool:
        """End the quarantine under `token`; False (and counted) when there is none, or its arena has been retired."""
        if token not in self._tokens:
            self._stale_total += 1
            return False
        self._leave(token, list(self._tokens[token]))
        return True

    def quarantined_bytes(self, arena: int) -> int:
        """Return how much of an arena is held for dead readers alone."""
        return sum(self._allocators[a].size_of(offset) for a, offset, _ in self._held_for_the_dead() if a == arena)

    def forget_empty(self) -> list[int]:
        """Forget retired arenas whose last lease has ended, and return their ids."""
        if not self.retired:
            return []
        return [arena for arena in sorted(self.retired) if self._forget_if_empty(arena)]

    def stats(self) -> LedgerStats:
        memories = {arena: allocator for arena, allocator in self._allocators.items() if arena >= 0}
        quarantined = sum(memories[a].size_of(offset) for a, offset, _ in self._held_for_the_dead() if a in memories)
        return LedgerStats(
            len(memories),
            sum(allocator.size_bytes for allocator in memories.values()),
            sum(allocator.taken_bytes for allocator in memories.values()) - quarantined,
            len(self._readers),
            self._stale_total,
            quarantined,
        )

    def check(self) -> None:
        """Raise RuntimeError unless ranges tile every arena, and what is taken is what is leased or quarantined."""
        for arena, allocator in self._allocators.items():
            allocator.check()
            leased = sum(allocator.size_of(offset) for a, offset, _ in self._readers if a == arena)
            quarantined = self.quarantined_bytes(arena)
            if leased + quarantined != allocator.taken_bytes:
                raise RuntimeError(
                    f"arena {arena}: {allocator.taken_bytes} bytes taken, {leased} leased, {quarantined} quarantined"
                )
        under: dict[Key, int] = {}
        for keys in self._tokens.values():
            for key, readers in keys.items():
                under[key] = under.get(key, 0) + readers
        if under != self._quarantined:
            raise RuntimeError("the ledger is broken: its quarantine by block and by token disagree")

    def _held_for_the_dead(self) -> list[Key]:
        return [key for key in self._quarantined if key not in self._readers]

    def _leave(self, token: int, keys: list[Key]) -> None:
        """Remove these blocks from the quarantine under `token` and free those without other holders."""
        under = self._tokens[token]
        for key in keys:
            left = self._quarantined[key] - under.pop(key)
            if left:
                self._quarantined[key] = left
                continue
            del self._quarantined[key]
            if key not in self._readers:
                self._allocators[key[0]].give_back(key[1])
        if not under:
            del self._tokens[token]

    def _forget_if_empty(self, arena: int) -> bool:
        allocator = self._allocators.get(arena)
        if allocator is not None and allocator.taken_bytes:
            return False
        self._allocators.pop(arena, None)
        self.retired.discard(arena)
        return True
