"""What falls with a worker that dies: values that will never be whole or cannot be read any more, and other workers.

With ordering 'host' nobody is told of a tensor before it is whole, so that nobody ever waits for a dead process. With
ordering 'event' readers wait on the device for events of the writer. The device never fires those of work that died
unfinished, and whoever waits for one waits for ever: producer and consumer are one fault domain, and the consumer is
killed too. One that reads in host memory what lies there as well waits for nothing, and goes on. What the producer had
finished stays readable, as long as its arena does: memory that was shared by descriptor outlives its maker, memory
shared by handle ends with it. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import msgspec

from weftline.engine.crew.member import WorkerState
from weftline.engine.crew.unfinished import Unfinished, read_there
from weftline.engine.messages import Value
from weftline.shm.block import Key
from weftline.shm.lease import Ledger

HANDLE = "handle"
"""The rung whose memory ends with the process that made it."""


@dataclass(frozen=True, slots=True)
class Fallen:
    """What ended with a worker.

    step_of: of each event that will never fire, the step whose work it marks, by index in the plan.
    arena:   its device arena, 0 for none; `gone` says that its memory ended too.
    """

    step_of: dict[Key, int]
    arena: int = 0
    gone: bool = False

    def __bool__(self) -> bool:
        return bool(self.arena)

    def has(self, value: Value) -> bool:
        """Whether a value, or a part of it, cannot be had any more; what lies in host memory is whole there."""
        if value.data is not None or value.place is not None:
            return False
        if value.items is not None:
            return any(map(self.has, value.items))
        if value.ready is not None and value.ready.key in self.step_of:
            return True
        return self.gone and value.near is not None and value.near.arena == self.arena

    def step(self, value: Value) -> int:
        """Return the step that gave the part of a value that cannot be had; -1 when nobody knows."""
        for key in value.keys:
            if key in self.step_of:
                return self.step_of[key]
        return -1

    def left_of(self, value: Value) -> Value:
        """Return what is left of a value that can be had; itself when nothing of it fell.

        Work that was finished needs no event any more, and events end with the process that made them. A value that
        lies in host memory too is read there when its place on the device is gone, or was not finished.
        """
        if value.items is not None:
            left = tuple(map(self.left_of, value.items))
            same = all(one is other for one, other in zip(left, value.items))
            return value if same else msgspec.structs.replace(value, items=left)
        if value.near is None:
            return value
        begun = value.ready is not None and value.ready.key in self.step_of
        if (begun and value.place is not None) or (self.gone and value.near.arena == self.arena):
            return msgspec.structs.replace(value, near=None, ready=None)
        if value.ready is not None and value.ready.arena == -self.arena and not begun:
            return msgspec.structs.replace(value, ready=None)
        return value

    def reaches(self, member: WorkerState, near: Sequence[frozenset[int]]) -> bool:
        """Whether a worker waits for what fell, or its device may still read what is gone.

        near: of each step, the positions of the inputs that it takes on its device.
        """
        tasks = [*(task for dispatch in member.running for task in dispatch.tasks), *member.streams.values()]
        read = (value for task in tasks for value in read_there(task.unit, task.inputs, near))
        if any(value.ready is not None and value.ready.key in self.step_of for value in read):
            return True
        unfinished = (key for one in member.unfinished.values() for key in one.device)
        return any(key in self.step_of or (self.gone and key[0] == self.arena) for key in unfinished)


class Past:
    """What ended with workers that died, as long as somebody who was told of it before may still pass it on.

    any: whether there is such a thing.
    """

    def __init__(self, ledger: Ledger) -> None:
        self.any = False
        self._ledger = ledger
        self._fallen: list[Fallen] = []

    def add(self, what: Fallen) -> None:
        held = self._ledger.taken_bytes
        self._fallen = [one for one in self._fallen if held(one.arena) or held(-one.arena)]
        self._fallen.append(what)
        self.any = True

    def has(self, value: Value) -> bool:
        """Whether a value, or a part of it, cannot be had any more."""
        return any(what.has(value) for what in self._fallen)

    def left_of(self, value: Value) -> Value:
        """Return what is left of a value that can be had; itself when nothing of it fell."""
        for what in self._fallen:
            value = what.left_of(value)
        return value


def fallen(unfinished: Iterable[Unfinished], near_arena: int, rung: str) -> Fallen:
    """Return what ended with a worker that had this in hand on its device."""
    return Fallen({one.ready: one.unit.steps[-1] for one in unfinished}, near_arena, rung == HANDLE)


def victims(what: Fallen, members: Sequence[WorkerState], near: Sequence[frozenset[int]]) -> Iterator[int]:
    """Yield the workers that must be ended with it; those that are about to be are left out. `near` as in `reaches`."""
    for worker, member in enumerate(members):
        if member.alive and not member.why and what.reaches(member, near):
            yield worker
