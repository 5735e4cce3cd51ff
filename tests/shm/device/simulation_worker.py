"""Workers of the simulation: each makes an arena and events, runs what it is sent on its fake GPU, and says so.

They keep to the protocol of the engine's workers and decide nothing. A dispatch reads parts of other dispatches' blocks
and writes one of its own: a kernel computes into the worker's own memory on one stream, a copy brings that into the
arena on another.
"""

from __future__ import annotations

import ctypes
import zlib
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from weftline.shm.block import Block
from weftline.shm.lease import EVENT_BYTES
from weftline.testing.fake_gpu.gpu import GRANULARITY_BYTES, FakeGpu

SCRATCH_BYTES = 1024
"""Room for one dispatch in a worker's own memory, and the most that it writes."""

DISPATCHES_MAX = 4
"""Dispatches that a worker has at a time."""

SLOTS = 32
"""More room in its own memory than it needs: what is wrong should show elsewhere first."""

EVENTS = 6


@dataclass(frozen=True, slots=True)
class Part:
    """What a dispatch reads: a range of a block, the event to wait for first, and the checksum of what was written."""

    block: Block
    start: int
    size_bytes: int
    checksum: int
    ready: Block | None


@dataclass(frozen=True, slots=True)
class Run:
    dispatch: int
    reads: tuple[Part, ...]
    writes: Block | None
    ready: Block | None


@dataclass(frozen=True, slots=True)
class Settle:
    token: int


@dataclass(frozen=True, slots=True)
class Retire:
    arena: int


@dataclass(frozen=True, slots=True)
class Done:
    dispatch: int
    unfinished: bool


@dataclass(frozen=True, slots=True)
class Released:
    dispatch: int


@dataclass(frozen=True, slots=True)
class Settled:
    token: int


@dataclass(frozen=True, slots=True)
class Shared:
    """A worker's arena, as reported to the runtime: a descriptor, and handles of its events."""

    arena: int
    descriptor: int
    events: tuple[bytes, ...]


def written_by(dispatch: int, size_bytes: int) -> bytes:
    """Return what a dispatch writes: no two dispatches write the same."""
    return (b"%7d." % dispatch * (size_bytes // 8 + 1))[:size_bytes]


class Worker:
    """One incarnation of a worker.

    introduced: arenas that it may attach to, by id.
    misread:    called with a dispatch that did not read what was written.
    """

    def __init__(
        self, gpu: FakeGpu, arena: int, ordering: str, introduced: dict[int, Shared], misread: Callable[[int], None]
    ) -> None:
        self.gpu = gpu
        self.arena = arena
        self.ordering = ordering
        self.alive = True
        self.inbox: deque[Run | Settle | Retire] = deque()
        self.said: deque[Done | Released | Settled] = deque()
        self._introduced = introduced
        self._misread = misread
        memory = gpu.create(GRANULARITY_BYTES)
        self.address = gpu.map(memory, GRANULARITY_BYTES, True)
        self.events = [gpu.event(shared=True) for _ in range(EVENTS)]
        self.slots_of_events = [gpu.slot_of(event) for event in self.events]
        self.shared = Shared(arena, gpu.export(memory), tuple(map(gpu.export_event, self.events)))
        gpu.release(memory)
        self.identity = gpu.identity_of(self.address)
        self._seen: dict[int, tuple[int, list[int]]] = {arena: (self.address, self.events)}
        self._compute, self._copies = gpu.stream(), gpu.stream()
        self._scratch = gpu.allocate(SCRATCH_BYTES * SLOTS)
        self._slots = list(range(SLOTS))
        self._pending: list[tuple[tuple[int, ...], Done | Released | Settled, int | None]] = []

    @property
    def waits(self) -> bool:
        return bool(self._pending)

    def hear(self) -> None:
        message = self.inbox.popleft()
        if isinstance(message, Run):
            self._run(message)
        elif isinstance(message, Settle):
            self.settle(message.token)
        elif message.arena in self._seen:
            self.gpu.unmap(self._seen.pop(message.arena)[0], GRANULARITY_BYTES)

    def look(self) -> bool:
        """Say what is finished on the device; whether anything is."""
        finished = [one for one in self._pending if all(map(self.gpu.finished, one[0]))]
        for one in finished:
            self._pending.remove(one)
            marks, message, slot = one
            self.say(message)
            self.give_back(marks, slot)
        return bool(finished)

    def say(self, message: Done | Released | Settled) -> None:
        self.said.append(message)

    def give_back(self, marks: tuple[int, ...], slot: int | None) -> None:
        """Have the events and the room in its own memory for later dispatches."""
        for mark in marks:
            self.gpu.destroy_event(mark)
        if slot is not None:
            self._slots.append(slot)

    def _run(self, run: Run) -> None:
        gpu, stream = self.gpu, self._compute
        for part in run.reads:
            if part.ready is not None:
                self.wait_for(part.ready, stream)
        reads = [(self._at(part.block) + part.start, part.size_bytes) for part in run.reads]

        def look_through() -> None:
            for (address, size), part in zip(reads, run.reads):
                if zlib.crc32(ctypes.string_at(address, size)) != part.checksum:
                    self._misread(run.dispatch)

        slot = None
        if run.writes is None:
            gpu.launch(look_through, reads, [], stream)
        else:
            slot = self._slots.pop()
            scratch, data = self._scratch + slot * SCRATCH_BYTES, written_by(run.dispatch, run.writes.size_bytes)

            def compute() -> None:
                look_through()
                ctypes.memmove(scratch, data, len(data))

            gpu.launch(compute, reads, [(scratch, len(data))], stream)
            computed = self._marked(stream)
            stream = self._copies
            gpu.wait(stream, computed)
            gpu.destroy_event(computed)
            gpu.copy(self._at(run.writes), scratch, len(data), stream)
        if self.ordering == "event":
            if run.ready is not None:
                gpu.record(self.event_of(run.ready), stream)
            self.say(Done(run.dispatch, True))
            self._pending.append(((self._marked(stream),), Released(run.dispatch), slot))
        else:
            self.publish((self._marked(stream),), Done(run.dispatch, False), slot)

    def publish(self, marks: tuple[int, ...], done: Done, slot: int | None) -> None:
        """Report a dispatch as done once its work is: no other process waits for it."""
        self._pending.append((marks, done, slot))

    def event_of(self, ready: Block) -> int:
        return self.events[ready.offset // EVENT_BYTES]

    def wait_for(self, ready: Block, stream: int) -> None:
        self._attach(-ready.arena)
        self.gpu.wait(stream, self._seen[-ready.arena][1][ready.offset // EVENT_BYTES])

    def settle(self, token: int) -> None:
        self._pending.append(((self._marked(self._compute), self._marked(self._copies)), Settled(token), None))

    def _marked(self, stream: int) -> int:
        """Return an event of this worker's own that marks what is on a stream."""
        event = self.gpu.event()
        self.gpu.record(event, stream)
        return event

    def _at(self, block: Block) -> int:
        self._attach(block.arena)
        return self._seen[block.arena][0] + block.offset

    def _attach(self, arena: int) -> None:
        if arena not in self._seen:
            shared = self._introduced[arena]
            memory = self.gpu.import_memory(shared.descriptor)
            address = self.gpu.map(memory, GRANULARITY_BYTES, False)
            self.gpu.release(memory)
            self._seen[arena] = (address, [self.gpu.import_event(handle) for handle in shared.events])
