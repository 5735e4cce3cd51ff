"""The runtime of the simulation: the real Ledger, and the lease protocol of device memory around it.

How a block lives: it is leased with the writer's ticket. When its writer says Done, one ticket is added for each
reader. In host ordering Done means that the device is done, and ends the tickets of what the dispatch read and wrote.
In event ordering they end with Released; the event that the block is ready by is leased, and held, as the block is.

How a worker dies: its arena is retired. What it may still read in others' arenas goes to quarantine, and to each owner
that lives a Settle, once the dead one has been reaped. Work that waits on the device for what it had not finished is
killed too.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from tests.shm.device.simulation_worker import (
    DISPATCHES_MAX,
    EVENTS,
    Done,
    Part,
    Released,
    Retire,
    Run,
    Settle,
    Settled,
    Shared,
    Worker,
    written_by,
)
from weftline.shm.block import Block, Key
from weftline.shm.lease import DEVICE_ALIGN_BYTES, EVENT_BYTES, Ledger
from weftline.testing.fake_gpu.watch import Watch


@dataclass(eq=False, slots=True)
class Task:
    """One dispatch of a request: it reads a part of what `source` writes, and writes for its own readers.

    part:   start and size of what it reads.
    state:  'waiting', 'queued', 'running', 'unfinished', 'ended'.
    """

    dispatch: int
    place: int
    size_bytes: int
    source: Task | None = None
    part: tuple[int, int] = (0, 0)
    readers: list[Task] = field(default_factory=list)
    state: str = "waiting"
    member: Worker | None = None
    block: Block | None = None
    ready: Block | None = None
    request: int = 0


def key_of(block: Block) -> Key:
    return (block.arena, block.offset, block.generation)


class Runtime:
    """Sends tasks to workers and keeps the books. `kill`: how it ends a worker that waits in vain."""

    def __init__(self, ordering: str, watch: Watch, arena_bytes: int, kill: Callable[[Worker], None]) -> None:
        self.ordering = ordering
        self.ledger = Ledger()
        self.members: dict[int, Worker] = {}
        self.introduced: dict[int, Shared] = {}
        self.requests: dict[int, list[Task]] = {}
        self.ended: dict[int, str] = {}
        self.queued: list[Task] = []
        self._watch = watch
        self._kill = kill
        self._arena_bytes = arena_bytes
        self._owners: dict[int, Worker] = {}
        self._running: dict[int, Task] = {}
        self._leased: set[Block] = set()
        self._tokens: dict[int, tuple[Worker, list[tuple[Block, int]]]] = {}
        self._settles: dict[Worker, list[int]] = {}  # tokens of dead workers that have not been reaped
        self.reaped: set[Worker] = set()
        self._next_token = 0

    @property
    def at_rest(self) -> bool:
        return not (self.queued or self._running or self._tokens or self._leased)

    def introduce(self, place: int, worker: Worker) -> None:
        """A worker has started and reported its arena."""
        self.members[place] = worker
        self._owners[worker.arena] = worker
        self.introduced[worker.arena] = worker.shared
        self.ledger.add_arena(worker.arena, self._arena_bytes, DEVICE_ALIGN_BYTES)
        self.ledger.add_arena(-worker.arena, EVENTS * EVENT_BYTES)

    def admit(self, request: int, tasks: list[Task]) -> None:
        self.requests[request] = tasks
        for task in tasks:
            task.request = request
        self._queue(tasks[0])

    def schedule(self) -> bool:
        """Send what can be sent; whether anything was."""
        return sum(self._try_send(task) for task in list(self.queued)) > 0

    def give_up_oldest(self) -> bool:
        """End the request that has waited longest for room, for nothing else can happen; False when none waits."""
        if self.queued:
            self._fail(self.queued[0].request, "no room")
            self.forget()
            return True
        return False

    # what workers say

    def on(self, worker: Worker, message: Done | Released | Settled) -> None:
        if isinstance(message, Settled):
            self.settle(message.token)
            return
        task = self._running[message.dispatch]
        if isinstance(message, Done):
            self._on_done(task, message.unfinished)
        else:
            self._end(task)

    def on_death(self, worker: Worker, place: int) -> None:
        """A worker's socket has closed; all its messages were handled."""
        self._retire(worker)
        tasks = [task for task in self._running.values() if task.member is worker]
        lost = [reader for task in tasks if task.ready is not None for reader in task.readers]
        tokens: dict[Worker, int] = {}
        for task in tasks:
            del self._running[task.dispatch]
            self._release(task.block, task.ready, reader=None)
            for block in self._read(task):
                self._quarantine(worker, block, tokens)
            task.state = "ended"
            self._fail(task.request, "a worker died")
        self._settles[worker] = list(tokens.values())
        self.kill_waiting(lost)
        if worker in self.reaped:
            self.on_reaped(worker)

    def on_reaped(self, worker: Worker) -> None:
        """The system has taken a dead worker's context down."""
        self.reaped.add(worker)
        for token in self._settles.pop(worker, []):
            if token in self._tokens:
                self.say_settle(self._tokens[token][0], token)

    def say_settle(self, owner: Worker, token: int) -> None:
        owner.inbox.append(Settle(token))

    def kill_waiting(self, readers: Iterable[Task]) -> None:
        """Kill workers whose streams wait for events that a dead one has not come to."""
        for member in dict.fromkeys(task.member for task in readers if task.state in ("running", "unfinished")):
            if member is not None:
                self._kill(member)

    def forget(self) -> None:
        """Close retired arenas without leases."""
        for arena in self.ledger.forget_empty():
            if arena > 0:
                os.close(self.introduced.pop(arena).descriptor)
                for member in self.members.values():
                    member.inbox.append(Retire(arena))

    # tasks

    def _queue(self, task: Task) -> None:
        task.state = "queued"
        self.queued.append(task)
        self._try_send(task)

    def _try_send(self, task: Task) -> bool:
        member = self.members.get(task.place)
        if member is None or sum(one.member is member for one in self._running.values()) >= DISPATCHES_MAX:
            return False
        if task.size_bytes:
            task.block = self._lease(member, member.arena, task.size_bytes)
            if task.block is None:
                return False
            if self.ordering == "event":
                task.ready = self._lease(member, -member.arena, EVENT_BYTES)
                if task.ready is None:
                    self._release(task.block, None, reader=None)
                    task.block = None
                    return False
        self.queued.remove(task)
        task.state, task.member = "running", member
        self._running[task.dispatch] = task
        parts: tuple[Part, ...] = ()
        if task.source is not None and task.source.block is not None:
            source, (start, size) = task.source, task.part
            checksum = zlib.crc32(written_by(source.dispatch, source.size_bytes)[start : start + size])
            parts = (Part(source.block, start, size, checksum, source.ready),)
            self._tell_reader(source.block, member)
        member.inbox.append(Run(task.dispatch, parts, task.block, task.ready))
        return True

    def _on_done(self, task: Task, unfinished: bool) -> None:
        task.state = "unfinished"
        if task.block is not None:
            owner = self._owners[task.block.arena]
            self._watch.published(owner.identity, task.block.offset, task.block.generation, unfinished)
        if task.request not in self.ended:
            for reader in task.readers:
                self.hold(task)
                self._queue(reader)
        if not unfinished:
            self._end(task)

    def hold(self, task: Task) -> None:
        """Add one reader's tickets of what a task writes."""
        for block in self.lent(task):
            self.ledger.hold(key_of(block))

    def _end(self, task: Task) -> None:
        del self._running[task.dispatch]
        task.state = "ended"
        self._release(*self._read(task), reader=task.member)
        self._release(task.block, task.ready, reader=None)
        tasks = self.requests[task.request]
        if task.request not in self.ended and all(one.state == "ended" for one in tasks):
            self.ended[task.request] = "answered"

    def _fail(self, request: int, why: str) -> None:
        """End a request; what runs of it ends as it would."""
        self.ended.setdefault(request, why)
        for task in self.requests[request]:
            if task.state == "queued":
                self.queued.remove(task)
                self._release(*self._read(task), reader=None)
            if task.state in ("queued", "waiting"):
                task.state = "ended"

    def _read(self, task: Task) -> tuple[Block, ...]:
        """Return the blocks that a task holds one reader's ticket of."""
        return () if task.source is None else self.lent(task.source)

    def lent(self, task: Task) -> tuple[Block, ...]:
        """Return what each reader of a task holds."""
        return tuple(block for block in (task.block, task.ready) if block is not None)

    # leases

    def _lease(self, member: Worker, arena: int, size_bytes: int) -> Block | None:
        block = self.ledger.try_lease(arena, size_bytes)
        if block is not None:
            self._leased.add(block)
            if arena > 0:
                self._watch.leased(member.identity, block.offset, size_bytes, block.generation, member.gpu.process[0])
            else:
                self._watch.event_leased(member.identity, member.slots_of_events[block.offset // EVENT_BYTES])
        return block

    def _tell_reader(self, block: Block, member: Worker) -> None:
        self._watch.read_by(self._owners[block.arena].identity, block.offset, block.generation, member.gpu.process[0])

    def _release(self, *blocks: Block | None, reader: Worker | None) -> None:
        for block in blocks:
            if block is not None:
                if reader is not None and block.arena > 0:
                    self._tell_ended(block, reader)
                self.ledger.release(key_of(block))
                self.see_free(block)

    def _tell_ended(self, block: Block, reader: Worker) -> None:
        owner = self._owners[block.arena]
        self._watch.ended(owner.identity, block.offset, block.generation, reader.gpu.process[0])

    def _quarantine(self, dead: Worker, block: Block, tokens: dict[Worker, int]) -> None:
        owner = self._owners[abs(block.arena)]
        if owner not in tokens:
            self._next_token += 1
            tokens[owner] = self._next_token
        self.ledger.quarantine(key_of(block), 1, tokens[owner])
        if self.ledger.arena_bytes(block.arena):  # not retired
            held = self._tokens.setdefault(tokens[owner], (owner, []))[1]
            held.append((block, dead.gpu.process[0]))
        self.see_free(block)

    def settle(self, token: int) -> None:
        if token in self._tokens:
            _, held = self._tokens.pop(token)
            self.ledger.settle(token)
            for block, reader in held:
                if block.arena > 0:
                    self._watch.ended(self._owners[block.arena].identity, block.offset, block.generation, reader)
                self.see_free(block)

    def _retire(self, worker: Worker) -> None:
        for arena in (worker.arena, -worker.arena):
            self.ledger.retire_arena(arena)
        for token in [token for token, (owner, _) in self._tokens.items() if owner is worker]:
            for block, _ in self._tokens.pop(token)[1]:
                self.see_free(block)

    def see_free(self, block: Block) -> None:
        """Look whether a block has become free, and tell the watch."""
        key = key_of(block)
        if block not in self._leased or key in self.ledger._readers or key in self.ledger._quarantined:
            return
        self._leased.discard(block)
        owner = self._owners[abs(block.arena)]
        if not self.ledger.arena_bytes(block.arena):
            return  # retired: it is never leased again, and the dead may use it for as long as they do
        if block.arena < 0:
            self._watch.event_freed(owner.identity, owner.slots_of_events[block.offset // EVENT_BYTES])
            return
        self._watch.freed(owner.identity, block.offset, block.generation)
        if owner.alive:
            owner.gpu.poison(owner.address + block.offset, block.size_bytes)
