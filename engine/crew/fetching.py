"""Tasks whose inputs lie where their worker cannot read them: they wait until the owner has copied those to the host.

A worker that cannot attach a device arena, or its events (AttachFailed), is *blind* there. What was given in that arena
before that was known is fetched: the task is kept back, the arena's owner is sent Fetch with the tensors that lie there
alone, and with what it answers the task goes on from where it stood. A blind worker that was given such a task earlier
fails it without having run it; that counts for nothing, and the task is kept back then.

    dispatched to a blind worker, or failed by one --Fetch--> kept back --Fetched--> queued again
                                                                       `--its owner dies, or has no room--> failed

What lies in the arena of a dead worker cannot be fetched by anybody: it ended with it, for such a reader. Pure; owned
by the scheduler.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec

from weftline.engine import messages as msg
from weftline.engine.crew.crew import Crew
from weftline.engine.crew.member import WorkerState
from weftline.engine.crew.unfinished import leaves
from weftline.engine.messages import Value
from weftline.engine.scheduling import events as ev
from weftline.engine.scheduling.book import Book
from weftline.engine.scheduling.request import Task
from weftline.engine.scheduling.tasks import Tasks
from weftline.shm.block import Key, Place


@dataclass(frozen=True, slots=True, eq=False)
class _Fetched:
    """What an owner was asked to copy, for which task; `keys` are held for it meanwhile."""

    task: Task
    values: tuple[Value, ...]
    keys: tuple[Key, ...]


class Fetching:
    """Keeps back what cannot be read where it would be run."""

    def __init__(self, tasks: Tasks, book: Book, crew: Crew, emit: Callable[[ev.Command], None]) -> None:
        self._tasks = tasks
        self._book = book
        self._crew = crew
        self._emit = emit
        self._asked: dict[int, _Fetched] = {}  # by token
        self._tokens = 0

    def readable(self, worker: int, tasks: list[Task]) -> list[Task]:
        """Return the tasks that a worker can read; what the others lack is fetched, and they are queued again then."""
        member = self._crew.members[worker]
        if not member.blind:
            return tasks
        lacking = [task for task in tasks if unseen(member, task.inputs)]
        for task in lacking:
            if task.id in self._tasks.live:  # one before it may have ended its request
                self._keep_back(member, task)
        return [task for task in tasks if task not in lacking and task.id in self._tasks.live]

    def was_unseen(self, worker: int, task: Task) -> bool:
        """Whether a task failed because its worker cannot read it; it is kept back then.

        Not of a chain whose first steps may have run and must not run twice, nor of one that was given pieces.
        """
        member = self._crew.members[worker]
        if not member.blind or not unseen(member, task.inputs) or task.said:
            return False
        if task.unit.chain and not all(self._tasks.lanes[step].step.idempotent for step in task.unit.steps):
            return False
        task.worker = -1
        self._keep_back(member, task)
        return True

    def fetched(self, worker: int, message: msg.Fetched) -> str:
        """An owner has answered; '' or why it cannot have said that."""
        member = self._crew.members[worker]
        if member.fetches.pop(message.token, None) is None:
            return "it fetched what it was not asked for"
        asked = self._asked.pop(message.token)
        wrong = "" if message.refused else self._misfit(asked, message)
        task, refused = asked.task, message.refused or wrong
        self._book.release(asked.keys)
        if task.id in self._tasks.live:
            if refused:
                self._fail(task, "LimitReached" if message.refused else "WorkerDied", refused)
            else:
                self._replace(task, {_place(old): new for old, new in zip(asked.values, message.values)})
        self._book.release_blocks(member.granted)
        member.granted.clear()
        return wrong

    def died(self, tokens: Sequence[int], why: str) -> None:
        """An owner has died with these in hand."""
        for token in tokens:
            asked = self._asked.pop(token)
            self._book.release(asked.keys)
            if asked.task.id in self._tasks.live:
                self._fail(asked.task, "WorkerDied", _ended(why))

    def _keep_back(self, member: WorkerState, task: Task) -> None:
        task.kept = True
        if any(asked.task is task for asked in self._asked.values()):
            return  # it was tried again meanwhile
        values = tuple({_place(value): value for value in unseen(member, task.inputs)}.values())
        by_owner: dict[int, list[Value]] = {}
        for value in values:
            owner = self._crew.owner_on_device(_place(value).arena)
            if owner is None or self._crew.members[owner].why:
                self._fail(task, "WorkerDied", _ended("its memory cannot be attached by others"))
                return
            by_owner.setdefault(owner, []).append(value)
        owner, first = next(iter(by_owner.items()))  # what others hold is seen to when the task comes back
        self._tokens += 1
        keys = tuple(dict.fromkeys(key for value in first for key in value.keys))
        self._book.hold(keys)
        self._asked[self._tokens] = _Fetched(task, tuple(first), keys)
        self._crew.members[owner].fetches[self._tokens] = self._book.now_ms
        self._emit(ev.Send(owner, msg.Fetch(self._tokens, tuple(first))))

    def _misfit(self, asked: _Fetched, message: msg.Fetched) -> str:
        fits = len(message.values) == len(asked.values) and all(
            new.near is None and new.place is not None and _same(new, old)
            for new, old in zip(message.values, asked.values)
        )
        return "" if fits and self._book.holds_all(message.values) else "it fetched something else than was asked for"

    def _replace(self, task: Task, by_place: dict[Place, Value]) -> None:
        """Have a task read what was fetched; what it held before stays leased until it ends, which is soon."""

        def put(value: Value) -> Value:
            if value.items is not None:
                return msgspec.structs.replace(value, items=tuple(map(put, value.items)))
            if value.near is None or value.place is not None:
                return value
            return by_place.get(value.near, value)

        task.inputs = tuple(map(put, task.inputs))
        keys = tuple(key for value in by_place.values() for key in value.keys)
        self._book.hold(keys)
        task.keys = (*task.keys, *keys)
        if task.kept:
            self._tasks.enqueue(task)

    def _fail(self, task: Task, error: str, told: str) -> None:
        name = self._tasks.lanes[task.unit.step].name
        self._tasks.fail(task, error, told, name)


def unseen(member: WorkerState, inputs: Sequence[Value]) -> list[Value]:
    """Return the tensors among these values that lie only where a worker is blind, or cannot wait for them."""
    found = (value for value in leaves(inputs) if value.near is not None and value.place is None)
    return [
        value
        for value in found
        if _place(value).arena in member.blind or (value.ready is not None and value.ready.arena in member.blind)
    ]


def _place(value: Value) -> Place:
    if value.near is None:
        raise ValueError(f"a value of kind {value.kind} lies on no device")
    return value.near


def _same(one: Value, other: Value) -> bool:
    known = one.kind == other.kind and one.dtype == other.dtype and one.shape == other.shape
    return known and one.size_bytes == other.size_bytes


def _ended(why: str) -> str:
    return f"a tensor on the device ended with the worker that held it ({why})"
