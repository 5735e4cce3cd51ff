"""Copy tensors to host memory for workers that cannot import the device memory they lie in.

A worker may be unable to attach a device arena, or its events (AttachFailed). Values written there before that was
known are copied: the task is kept back, the arena's owner is sent Fetch with the tensors that exist only there, and the
task continues with the copies. A task that such a worker had already received fails there without having run; this
does not count as a failure, and the task is kept back then.

    dispatched to such a worker, or failed by it --Fetch--> kept back --Fetched--> queued again
                                                                     `--its owner dies, or lacks memory--> failed

Values in the arena of a dead worker cannot be copied: they are lost for such a reader.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from weftline.engine.protocol import messages as msg
from weftline.engine.protocol.messages import Value
from weftline.engine.scheduler import events as ev
from weftline.engine.scheduler import request_table, task_table, workers
from weftline.engine.scheduler.device_work import leaves
from weftline.engine.scheduler.message_check import foreign
from weftline.engine.scheduler.request import Task
from weftline.engine.scheduler.state import SchedulerState
from weftline.engine.scheduler.workers import WorkerState
from weftline.shm.block import Key, Place


@dataclass(frozen=True, slots=True, eq=False)
class HostCopy:
    """A requested copy to host memory: its task and values. `keys` stay leased until it is done."""

    task: Task
    values: tuple[Value, ...]
    keys: tuple[Key, ...]


def readable(state: SchedulerState, worker_id: int, tasks: list[Task]) -> list[Task]:
    """Return the tasks that a worker can read; request copies for the others, which are queued again afterwards."""
    worker = state.workers[worker_id]
    if not worker.cannot_import:
        return tasks
    lacking = [task for task in tasks if unreadable(worker, task.inputs)]
    for task in lacking:
        if task.id in state.live:  # one before it may have ended its request
            _request_copy(state, worker, task)
    return [task for task in tasks if task not in lacking and task.id in state.live]


def retry_with_copy(state: SchedulerState, worker_id: int, task: Task) -> bool:
    """Return whether a task failed because its worker cannot read it; request a copy then.

    Not for a chain whose first steps may have run and must not run twice, nor for a task that received chunks.
    """
    worker = state.workers[worker_id]
    if not worker.cannot_import or not unreadable(worker, task.inputs) or task.streamed:
        return False
    if task.unit.chain and not all(stage.planned.idempotent for stage in task.unit.stages):
        return False
    task.worker = -1
    _request_copy(state, worker, task)
    return True


def on_fetched(state: SchedulerState, worker_id: int, message: msg.Fetched) -> None:
    """Handle the copies that an owner made."""
    worker = state.workers[worker_id]
    if worker.fetches.pop(message.token, None) is None:
        workers.kill(state, worker_id, "it sent a host copy that was not requested")
        return
    asked = state.host_copies.pop(message.token)
    wrong = "" if message.refused else _misfit(state, worker, asked, message)
    task, refused = asked.task, message.refused or wrong
    request_table.release(state, asked.keys)
    if task.id in state.live:
        if refused:
            _fail(state, task, "LimitReached" if message.refused else "WorkerDied", refused)
        else:
            _replace(state, task, {_place(old): new for old, new in zip(asked.values, message.values)})
    request_table.release_blocks(state, worker.granted)
    worker.granted.clear()
    if wrong:
        workers.kill(state, worker_id, wrong)


def on_owner_death(state: SchedulerState, tokens: Sequence[int], why: str) -> None:
    """Fail the tasks whose copies were requested from a worker that died."""
    for token in tokens:
        asked = state.host_copies.pop(token)
        request_table.release(state, asked.keys)
        if asked.task.id in state.live:
            _fail(state, asked.task, "WorkerDied", _ended(why))


def _request_copy(state: SchedulerState, worker: WorkerState, task: Task) -> None:
    task.waits_for_copy = True
    if any(asked.task is task for asked in state.host_copies.values()):
        return  # it was tried again meanwhile
    values = tuple({_place(value): value for value in unreadable(worker, task.inputs)}.values())
    by_owner: dict[int, list[Value]] = {}
    for value in values:
        owner = workers.owner_on_device(state, _place(value).arena)
        if owner is None or state.workers[owner].why:
            _fail(state, task, "WorkerDied", _ended("other workers cannot attach its memory"))
            return
        by_owner.setdefault(owner, []).append(value)
    owner, first = next(iter(by_owner.items()))  # what others hold is seen to when the task comes back
    state.host_copy_tokens += 1
    keys = tuple(dict.fromkeys(key for value in first for key in value.keys))
    request_table.hold(state, keys)
    state.host_copies[state.host_copy_tokens] = HostCopy(task, tuple(first), keys)
    state.workers[owner].fetches[state.host_copy_tokens] = state.now_ms
    state.out.append(ev.Send(owner, msg.Fetch(state.host_copy_tokens, tuple(first))))


def _misfit(state: SchedulerState, worker: WorkerState, asked: HostCopy, message: msg.Fetched) -> str:
    fits = len(message.values) == len(asked.values) and all(
        new.device_place is None and new.place is not None and _same(new, old)
        for new, old in zip(message.values, asked.values)
    )
    return (
        ""
        if fits and request_table.holds_all(state, message.values) and not foreign(message.values, (), worker.granted)
        else "it sent a host copy of another tensor than requested"
    )


def _replace(state: SchedulerState, task: Task, by_place: dict[Place, Value]) -> None:
    """Replace a task's inputs by the copies. Its earlier leases last until it ends."""

    def put(value: Value) -> Value:
        if value.items is not None:
            return msgspec.structs.replace(value, items=tuple(map(put, value.items)))
        if value.device_place is None or value.place is not None:
            return value
        return by_place.get(value.device_place, value)

    task.inputs = tuple(map(put, task.inputs))
    keys = tuple(key for value in by_place.values() for key in value.keys)
    request_table.hold(state, keys)
    task.keys = (*task.keys, *keys)
    if task.waits_for_copy:
        task_table.enqueue(state, task)


def _fail(state: SchedulerState, task: Task, error: str, reason: str) -> None:
    task_table.fail(state, task, error, reason, task.unit.head.name)


def unreadable(worker: WorkerState, inputs: Sequence[Value]) -> list[Value]:
    """Return the tensors that lie only where a worker cannot read or wait for them."""
    found = (value for value in leaves(inputs) if value.device_place is not None and value.place is None)
    return [
        value
        for value in found
        if _place(value).arena in worker.cannot_import
        or (value.ready is not None and value.ready.arena in worker.cannot_import)
    ]


def _place(value: Value) -> Place:
    if value.device_place is None:
        raise ValueError(f"a value of kind {value.kind} lies on no device")
    return value.device_place


def _same(one: Value, other: Value) -> bool:
    known = one.kind == other.kind and one.dtype == other.dtype and one.shape == other.shape
    return known and one.size_bytes == other.size_bytes


def _ended(why: str) -> str:
    return f"a device tensor was lost when its worker died ({why})"
