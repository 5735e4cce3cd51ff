"""Arenas that each worker may attach."""

from __future__ import annotations

from weftline.engine.runtime.arena_readers import ArenaReaders


def test_workers_read_the_arenas_of_their_programs_only() -> None:
    readers = ArenaReaders()
    assert readers.open_inputs(10, (0, 1)) == {0: {0, 1}, 1: {0, 1}}
    assert readers.open_inputs(11, (1, 2)) == {1: {2}, 2: {1, 2}}
    for worker in range(3):
        readers.add(20 + worker, worker)
    assert [readers.inputs_of(worker) for worker in range(3)] == [[10], [10, 11], [11]]
    assert [readers.owned_by(readers.peers(worker)) for worker in range(3)] == [[20, 21], [20, 21, 22], [21, 22]]


def test_a_program_over_the_same_workers_makes_no_new_peers() -> None:
    readers = ArenaReaders()
    readers.open_inputs(10, (0, 1))
    assert readers.open_inputs(11, (0, 1)) == {0: set(), 1: set()} and readers.inputs_of(0) == [10, 11]


def test_a_forgotten_arena_is_taken_from_those_that_read_it() -> None:
    readers = ArenaReaders()
    readers.open_inputs(10, (0, 1))
    readers.open_inputs(11, (1, 2))
    readers.add(20, 0)
    assert readers.forget(20) == {0, 1} and readers.owned_by({0, 1}) == []
    assert readers.forget(11) == {1, 2} and readers.inputs_of(1) == [10]
    assert readers.forget(11) == set() and readers.peers(5) == set()
