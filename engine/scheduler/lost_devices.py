"""Device memory and events lost with a worker, and fencing of memory that it was still reading.

With ordering 'host' a value is passed on only when it is complete, so no reader ever waits for a dead process. With
ordering 'event' readers wait on the device for events of the writer. The device never fires the events of work that
died unfinished: producer and consumer are one fault domain, and the consumer is killed too. A reader of a copy in host
memory waits for nothing and goes on. Finished values stay readable as long as the arena does: memory shared by
descriptor outlives its maker, memory shared by handle ends with it.

A GPU may continue the reads of a process that has died. The ledger quarantines what it read of another worker's arena,
under one token per owner. The owner answers Settle(token) with Settled(token) once everything is done that was on its
streams. When the owner dies first the quarantine ends with its arena.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import msgspec

from weftline.engine.protocol import messages as msg
from weftline.engine.protocol.messages import Value
from weftline.engine.scheduler import events as ev
from weftline.engine.scheduler import workers
from weftline.engine.scheduler.device_work import Unfinished, read_there
from weftline.engine.scheduler.state import SchedulerState
from weftline.engine.scheduler.workers import WorkerState
from weftline.shm.block import Key

HANDLE = "handle"
"""The sharing mode whose memory ends with the process that created it."""


@dataclass(frozen=True, slots=True)
class LostDevice:
    """Device memory and events lost with a worker.

    step_of: by event that will never fire, the names of the steps whose work it marks, by request.
    arena:   its device arena, 0 for none.
    gone:    the memory of the arena is freed too.
    """

    step_of: dict[Key, dict[int, str]]
    arena: int = 0
    gone: bool = False

    def __bool__(self) -> bool:
        return bool(self.arena)

    def has(self, value: Value) -> bool:
        """Return True if a value, or a part of it, is lost. A copy in host memory is always complete."""
        if value.data is not None or value.place is not None:
            return False
        if value.items is not None:
            return any(map(self.has, value.items))
        if value.ready is not None and value.ready.key in self.step_of:
            return True
        return self.gone and value.device_place is not None and value.device_place.arena == self.arena

    def step(self, value: Value, request: int) -> str:
        """Return the name of the request's step that produced the lost part of a value; '' if unknown."""
        return next((self.step_of[key].get(request, "") for key in value.keys if key in self.step_of), "")

    def remaining(self, value: Value) -> Value:
        """Return a value without its lost parts; the same value if none is lost.

        Finished work needs no event any more, and events end with the process that created them. A value with a copy in
        host memory is read there if its device memory is freed, or was not completely written.
        """
        if value.items is not None:
            left = tuple(map(self.remaining, value.items))
            same = all(one is other for one, other in zip(left, value.items))
            return value if same else msgspec.structs.replace(value, items=left)
        if value.device_place is None:
            return value
        begun = value.ready is not None and value.ready.key in self.step_of
        if (begun and value.place is not None) or (self.gone and value.device_place.arena == self.arena):
            return msgspec.structs.replace(value, device_place=None, ready=None)
        if value.ready is not None and value.ready.arena == -self.arena and not begun:
            return msgspec.structs.replace(value, ready=None)
        return value

    def reaches(self, worker: WorkerState, device_inputs: Sequence[frozenset[int]]) -> bool:
        """Return True if a worker waits for a lost event, or its device may still read freed memory.

        device_inputs: by step, the positions of the inputs that it reads on its device.
        """
        tasks = [*(task for dispatch in worker.running for task in dispatch.tasks), *worker.streams.values()]
        read = (value for task in tasks for value in read_there(task.unit, task.inputs, device_inputs))
        if any(value.ready is not None and value.ready.key in self.step_of for value in read):
            return True
        unfinished = (key for one in worker.unfinished.values() for key in one.device)
        return any(key in self.step_of or (self.gone and key[0] == self.arena) for key in unfinished)


def add(state: SchedulerState, what: LostDevice) -> None:
    """Record what was lost; forget earlier losses whose arenas hold no lease any more."""
    held = state.ledger.taken_bytes
    state.lost_devices = [one for one in state.lost_devices if held(one.arena) or held(-one.arena)]
    state.lost_devices.append(what)


def has(state: SchedulerState, value: Value) -> bool:
    """Return whether a value, or a part of it, was lost."""
    return any(what.has(value) for what in state.lost_devices)


def remaining(state: SchedulerState, value: Value) -> Value:
    """Return a value without its lost parts; the same value if none is lost."""
    for what in state.lost_devices:
        value = what.remaining(value)
    return value


def lost_with(unfinished: Iterable[Unfinished], device_arena: int, share_mode: str) -> LostDevice:
    """Return the LostDevice of a worker with this unfinished work on its device."""
    step_of = {one.ready: {task.request.id: task.unit.stages[-1].name for task in one.tasks} for one in unfinished}
    return LostDevice(step_of, device_arena, share_mode == HANDLE)


def dependent_workers(
    what: LostDevice, among: Sequence[WorkerState], device_inputs: Sequence[frozenset[int]]
) -> Iterator[int]:
    """Yield the workers that must be killed too, except those already being killed. device_inputs: as in `reaches`."""
    for worker_id, worker in enumerate(among):
        if worker.alive and not worker.why and what.reaches(worker, device_inputs):
            yield worker_id


def fence_reads(state: SchedulerState, keys: Iterable[Key]) -> None:
    """Release a dead reader's leases, one per key; quarantine those in device arenas of live workers."""
    token_of: dict[int, int] = {}
    for key in keys:
        owner = workers.owner_on_device(state, key[0])
        if owner is None:
            state.ledger.release(key)
            continue
        if owner not in token_of:
            state.fence_tokens += 1
            token_of[owner] = state.fence_tokens
            state.workers[owner].settles[state.fence_tokens] = state.now_ms
            state.out.append(ev.Send(owner, msg.Settle(state.fence_tokens)))
        state.ledger.quarantine(key, 1, token_of[owner])


def end_fence(state: SchedulerState, worker_id: int, token: int) -> bool:
    """End a quarantine after its owner's Settled. Return False if no such fence is open."""
    if state.workers[worker_id].settles.pop(token, None) is None:
        return False
    state.ledger.settle(token)
    return True
