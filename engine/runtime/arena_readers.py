"""Arenas that each worker may attach: those for inputs of its programs, and those of the workers of these programs.

Pure. Workers that never run a program together are not shown each other's memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence


class ArenaReaders:
    """The readers of each arena. Workers and arenas are numbers."""

    def __init__(self) -> None:
        self._owners: dict[int, int] = {}  # the worker of each arena that is one's, dead ones included
        self._inputs: dict[int, frozenset[int]] = {}  # by arena for inputs: the workers of its program
        self._peers: dict[int, set[int]] = {}  # by worker: those it runs some program with, itself included

    def open_inputs(self, arena: int, workers: Sequence[int]) -> dict[int, set[int]]:
        """Add the arena for inputs of a program that these workers run; return the new peers of each."""
        self._inputs[arena] = frozenset(workers)
        found = {worker: set(workers) - self._peers.get(worker, set()) for worker in workers}
        for worker in workers:
            self._peers.setdefault(worker, set()).update(workers)
        return found

    def add(self, arena: int, worker: int) -> None:
        """Add a worker's own arena."""
        self._owners[arena] = worker

    def peers(self, worker: int) -> set[int]:
        """Return the workers that a worker runs some program with, itself included."""
        return self._peers.get(worker, set())

    def inputs_of(self, worker: int) -> list[int]:
        """Return the arenas for inputs that a worker reads."""
        return [arena for arena, workers in self._inputs.items() if worker in workers]

    def owned_by(self, workers: Iterable[int]) -> list[int]:
        """Return the arenas of these workers, of earlier processes of theirs too."""
        wanted = set(workers)
        return [arena for arena, worker in self._owners.items() if worker in wanted]

    def forget(self, arena: int) -> set[int]:
        """Remove an arena; return the workers that read it."""
        owner = self._owners.pop(arena, None)
        return set(self._inputs.pop(arena, ())) if owner is None else self.peers(owner)
