"""The ledger counts readers, ignores what is stale, keeps what dead readers may read, and forgets retired arenas."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from weftline.shm.block import Block, Key
from weftline.shm.lease import DEVICE_ALIGN_BYTES, EVENT_BYTES, Ledger


def ledger(size: int = 4096) -> Ledger:
    made = Ledger()
    made.add_arena(1, size)
    return made


def test_the_last_reader_frees_the_block() -> None:
    books = ledger()
    block = books.try_lease(1, 1000, readers=2)
    assert block is not None
    place = block.place(0, 1000)
    assert books.holds(place)
    assert books.release(place.key) and books.holds(place)
    assert books.release(place.key) and not books.holds(place)
    assert books.stats().leased_bytes == 0


def test_a_release_too_many_is_counted_and_ignored() -> None:
    books = ledger()
    block = books.try_lease(1, 64)
    assert block is not None
    key = block.place(0, 64).key
    assert books.release(key)
    other = books.try_lease(1, 64)
    assert other is not None and other.offset == block.offset and other.generation > block.generation
    assert not books.release(key)
    assert books.stats().stale_total == 1 and books.holds(other.place(0, 64))


def test_side_by_side_places_share_their_block() -> None:
    books = ledger()
    block = books.try_lease(1, 256, readers=4)
    assert block is not None
    places = [block.place(64 * i, 64) for i in range(4)]
    assert [p.offset for p in places] == [block.offset + 64 * i for i in range(4)]
    for place in places:
        assert books.release(place.key)
    assert books.stats().blocks == 0


def test_a_place_outside_its_block_is_not_held() -> None:
    books = ledger()
    block = books.try_lease(1, 64)
    assert block is not None
    inside = block.place(0, 64)
    assert not books.holds(inside._replace(size_bytes=65))
    assert not books.holds(inside._replace(generation=inside.generation + 1))


def test_a_retired_arena_goes_with_its_last_lease() -> None:
    books = ledger()
    block = books.try_lease(1, 64)
    assert block is not None
    books.retire_arena(1)
    assert books.try_lease(1, 64) is None
    assert books.forget_empty() == []
    books.release(block.place(0, 64).key)
    assert books.forget_empty() == [1]
    assert books.stats().arenas == 0


def key_of(block: Block) -> Key:
    return (block.arena, block.offset, block.generation)


def test_what_a_dead_reader_held_is_not_free_before_the_owner_has_settled() -> None:
    books = ledger(1024)
    block = books.try_lease(1, 1024, readers=1)
    assert block is not None
    assert books.quarantine(key_of(block), 1, token=7)
    assert not books.holds(block.place(0, 1024)) and not books.hold(key_of(block))
    assert books.try_lease(1, 64) is None
    stats = books.stats()
    assert (stats.leased_bytes, stats.quarantined_bytes, books.quarantined_bytes(1)) == (0, 1024, 1024)
    books.check()
    assert books.settle(7)
    assert books.stats().quarantined_bytes == 0 and books.try_lease(1, 1024) is not None


def test_a_block_with_live_readers_is_leased_and_then_quarantined() -> None:
    books = ledger()
    block = books.try_lease(1, 256, readers=2)
    assert block is not None
    books.quarantine(key_of(block), 1, token=7)
    assert (books.stats().leased_bytes, books.stats().quarantined_bytes) == (256, 0)
    assert books.release(key_of(block))
    assert (books.stats().leased_bytes, books.stats().quarantined_bytes) == (0, 256)
    assert not books.release(key_of(block))


def test_live_readers_keep_a_block_after_its_quarantine() -> None:
    books = ledger()
    block = books.try_lease(1, 256, readers=2)
    assert block is not None
    books.quarantine(key_of(block), 1, token=7)
    assert books.settle(7) and books.holds(block.place(0, 256))
    assert books.release(key_of(block)) and books.stats().leased_bytes == 0


def test_each_of_two_tokens_keeps_the_block() -> None:
    books = ledger()
    block = books.try_lease(1, 256, readers=3)
    assert block is not None
    books.quarantine(key_of(block), 1, token=7)
    books.quarantine(key_of(block), 2, token=8)
    books.check()
    assert books.settle(7) and books.stats().quarantined_bytes == 256
    assert books.settle(8) and books.stats().quarantined_bytes == 0
    assert not books.settle(8)
    assert books.stats().stale_total == 1


def test_quarantine_of_more_than_is_held_is_counted_and_ignored() -> None:
    books = ledger()
    block = books.try_lease(1, 256)
    assert block is not None
    assert not books.quarantine(key_of(block), 2, token=7)
    assert not books.quarantine((1, 0, 99), 1, token=7)
    assert not books.quarantine(key_of(block), 0, token=7)
    assert books.stats().stale_total == 3 and books.holds(block.place(0, 256)) and not books.settle(7)


def test_quarantine_ends_with_its_arena() -> None:
    books = ledger()
    books.add_arena(2, 4096)
    here, there = books.try_lease(1, 256), books.try_lease(2, 256)
    late = books.try_lease(1, 256)
    assert here is not None and there is not None and late is not None
    books.quarantine(key_of(here), 1, token=7)
    books.quarantine(key_of(there), 1, token=7)
    books.retire_arena(1)
    books.check()
    assert books.quarantined_bytes(1) == 0 and books.quarantined_bytes(2) == 256
    assert books.quarantine(key_of(late), 1, token=8) and not books.settle(8)
    assert books.forget_empty() == [1]
    assert books.settle(7) and books.stats().quarantined_bytes == 0


def test_blocks_of_device_memory_start_at_multiples_of_256() -> None:
    books = Ledger()
    books.add_arena(3, 1 << 20, DEVICE_ALIGN_BYTES)
    blocks = [books.try_lease(3, size) for size in (1, 257, 70_000, 1)]
    assert all(block is not None and block.offset % DEVICE_ALIGN_BYTES == 0 for block in blocks)
    assert len({block.offset for block in blocks if block}) == 4
    assert books.taken_bytes(3) == 256 + 512 + 70_144 + 256


def test_events_are_leased_like_blocks_and_are_no_memory() -> None:
    books = ledger()
    books.add_arena(-1, 4 * EVENT_BYTES)
    events = [books.try_lease(-1, EVENT_BYTES) for _ in range(5)]
    assert [event.offset // EVENT_BYTES for event in events if event] == [0, 1, 2, 3] and events[4] is None
    stats = books.stats()
    assert (stats.arenas, stats.size_bytes, stats.leased_bytes, stats.blocks) == (1, 4096, 0, 4)


class LedgerMachine(RuleBasedStateMachine):
    """In any order of leases, ends, deaths and settlements, a block is free once no process may read it."""

    def __init__(self) -> None:
        super().__init__()
        self.books = ledger(4096)
        self.alive: dict[Key, int] = {}
        self.dead: dict[Key, dict[int, int]] = {}
        self.sizes: dict[Key, int] = {}

    @rule(size=st.integers(1, 1500), readers=st.integers(1, 3))
    def lease(self, size: int, readers: int) -> None:
        block = self.books.try_lease(1, size, readers)
        if block is None:
            return
        for arena, offset, generation in {*self.alive, *self.dead}:
            assert generation < block.generation
            end = offset + self.sizes[(arena, offset, generation)]
            assert block.offset + size <= offset or end <= block.offset
        self.alive[key_of(block)] = readers
        self.sizes[key_of(block)] = -(-size // 64) * 64

    @precondition(lambda self: self.alive)
    @rule(data=st.data(), token=st.none() | st.integers(1, 3))
    def end(self, data: st.DataObject, token: int | None) -> None:
        key = data.draw(st.sampled_from(sorted(self.alive)))
        readers = data.draw(st.integers(1, self.alive[key]))
        if token is None:
            assert self.books.release(key, readers)
        else:
            assert self.books.quarantine(key, readers, token)
            under = self.dead.setdefault(key, {})
            under[token] = under.get(token, 0) + readers
        self.alive[key] -= readers
        if not self.alive[key]:
            del self.alive[key]

    @rule(token=st.integers(1, 3))
    def settle(self, token: int) -> None:
        held = any(token in under for under in self.dead.values())
        assert self.books.settle(token) == held
        self.dead = {
            k: rest for k, under in self.dead.items() if (rest := {t: n for t, n in under.items() if t != token})
        }

    @invariant()
    def free_leased_and_quarantined_are_everything(self) -> None:
        self.books.check()
        stats = self.books.stats()
        assert stats.leased_bytes == sum(self.sizes[key] for key in self.alive)
        assert stats.quarantined_bytes == sum(self.sizes[key] for key in self.dead if key not in self.alive)
        assert self.books.taken_bytes(1) == stats.leased_bytes + stats.quarantined_bytes


TestLedgerMachine = LedgerMachine.TestCase
TestLedgerMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_readers_of_a_lease_are_at_least_one() -> None:
    with pytest.raises(ValueError, match="at least one"):
        ledger().try_lease(1, 64, readers=0)
