"""Load of each GPU, computed from measured times and the current placement.

A GPU is busy for its instances' work on a request, and for tensors between it and others: these go through host memory,
and each takes HOP_MS of both GPUs. Better is, in this order,

- less crowding: instances of one step on one GPU, or llm steps that take what is left of it;
- a busiest GPU that is less busy, and fewer that are as busy;
- fewer tensors that travel;
- less on GPUs that an llm step fills with its KV memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import MappingProxyType
from typing import NamedTuple

from weftline.pipelines.placement.loads import Chosen, Load, Room, Rooms
from weftline.pipelines.placement.needs import gpus_of
from weftline.pipelines.placement.traffic import Links

HOP_MS = 1.0
"""What a tensor between two GPUs is taken to cost each of them: assumed. A 1920x1080 picture in float32 has 25 MB, and
PCI Express 4.0 x16 carries 31.5 GB/s by its specification: 0.8 ms, and a copy for each way."""

DIGITS = 6
"""Busy times are compared in nanoseconds, so that the order in which they were added up decides nothing."""

Change = tuple[tuple[int, str], ...]
"""Loads, by index, and the GPUs that they go to."""


class Score(NamedTuple):
    """Quality of a placement, compared lexicographically; less is better.

    crowding: pairs, on one GPU, of instances of one step or of llm steps that take what is left.
    as_busy:  how many GPUs are as busy as the busiest.
    travel:   pairs of steps on different GPUs whose tensors could stay on one.
    company:  pairs, on one GPU, of an llm step that takes what is left and of something else.
    """

    crowding: int
    busiest_ms: float
    as_busy: int
    travel: int
    company: int


class Balance:
    """GPUs with loads on them.

    rooms:  the GPUs, empty.
    chosen: where instances go, by step and which it is; loads without are nowhere yet.
    """

    def __init__(
        self,
        loads: Sequence[Load],
        rooms: Rooms,
        links: Links,
        chosen: Chosen = MappingProxyType({}),
    ) -> None:
        self.loads = loads
        self.rooms = rooms
        self.links = links
        self.at: dict[int, str] = {}
        self.busy = dict.fromkeys(rooms, 0.0)
        self._ms = [{device: load.ms(device) for device in rooms} for load in loads]
        self.bound = self._bound()
        self._crowding = self._travel = self._company = 0
        for index, load in enumerate(loads):
            if load.members[0] in chosen:
                self.put(index, chosen[load.members[0]])

    @property
    def chosen(self) -> dict[tuple[str, int], str]:
        """Assignment of instances to GPUs, by step and instance index."""
        return {member: device for index, device in self.at.items() for member in self.loads[index].members}

    @property
    def score(self) -> Score:
        busy = [round(ms, DIGITS) for ms in self.busy.values()]
        peak = max(busy)
        return Score(self._crowding, peak, busy.count(peak), self._travel, self._company)

    def ms(self, index: int, device: str) -> float:
        """Return the work of a load on a GPU."""
        return self._ms[index][device]

    def longest(self, index: int) -> float:
        """Return the work of a load on the GPU that takes longest for it."""
        return max(self._ms[index].values())

    def put(self, index: int, device: str) -> None:
        """Put a load that is nowhere on a GPU, and its further ranks on those that follow."""
        load = self.loads[index]
        for gpu in self.gpus(index, device):
            room = self.rooms[gpu]
            self._crowding += self.crowds(load, room)
            self._company += room.plain if load.open_kv else room.fillers
            room.take(load)
            self.busy[gpu] += self._ms[index][gpu]
        self._join(index, device, 1)
        self.at[index] = device

    def lift(self, index: int) -> None:
        """Undo `put`, whatever else was put since."""
        load, device = self.loads[index], self.at.pop(index)
        for gpu in self.gpus(index, device):
            room = self.rooms[gpu]
            room.give_back(load)
            self._crowding -= self.crowds(load, room)
            self._company -= room.plain if load.open_kv else room.fillers
            self.busy[gpu] -= self._ms[index][gpu]
        self._join(index, device, -1)

    def has_room(self, index: int, device: str) -> bool:
        """Return True when an unplaced load fits on a GPU, and its further ranks on the next ones."""
        load = self.loads[index]
        gpus = gpus_of(device, load.ranks)
        return all(gpu in self.rooms and self.rooms[gpu].cost(load) <= self.rooms[gpu].free for gpu in gpus)

    def after(self, change: Change) -> Score | None:
        """Return what the score would be after a change; None when that does not fit."""
        before = tuple((index, self.at[index]) for index, _ in change)
        self.make(change)
        score = self.score if all(self.rooms[device].free >= 0 for _, device in change) else None
        self.make(before)
        return score

    def moves(self, index: int, to: str) -> tuple[float, float]:
        """Return how much less busy a move makes the GPU that a load is on, and how much busier the other."""
        at, less, more = self.at[index], self._ms[index][self.at[index]], self._ms[index][to]
        for other, count in self.links.get(index, {}).items():
            there, cost = self.at[other], count * HOP_MS
            less += -cost if there == at else cost
            more += -cost if there == to else cost
        return less, more

    def crowds(self, load: Load, room: Room) -> int:
        """Return with how many others a load would crowd a GPU that it is not on."""
        return sum(room.copies[name] for name in load.names) + (room.fillers if load.open_kv else 0)

    def far(self, index: int, device: str) -> int:
        """Return how many tensors would travel between a load on a GPU and what is on others."""
        return sum(count for other, count in self.links.get(index, {}).items() if self.at.get(other, device) != device)

    def make(self, change: Change) -> None:
        """Apply a set of moves at once."""
        for index, _ in change:
            self.lift(index)
        for index, device in change:
            self.put(index, device)

    def _bound(self) -> float:
        """Return a time that the busiest GPU is busy for at least, wherever everything is."""
        least = [min(ms.values()) for ms in self._ms]
        gpus = [len(gpus_of(next(iter(self.rooms)), load.ranks)) for load in self.loads]
        total = sum(ms * count for ms, count in zip(least, gpus, strict=True))
        return round(max(total / len(self.rooms), *least), DIGITS)

    def gpus(self, index: int, device: str) -> tuple[str, ...]:
        ranks = self.loads[index].ranks
        return (device,) if ranks == 1 else tuple(gpu for gpu in gpus_of(device, ranks) if gpu in self.rooms)

    def _join(self, index: int, device: str, sign: int) -> None:
        """Count tensors that travel between a load and others, when it comes to a GPU (1) or leaves it (-1)."""
        for other, count in self.links.get(index, {}).items():
            there = self.at.get(other, device)
            if there != device:
                self._travel += sign * count
                self.busy[device] += sign * count * HOP_MS
                self.busy[there] += sign * count * HOP_MS
