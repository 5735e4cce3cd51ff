"""The ledger counts readers, ignores what is stale, and forgets retired arenas."""

from weftline.shm.lease import Ledger


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
