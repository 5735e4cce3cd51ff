"""Leases between a writer and a reader, kept in the runtime's ledger.

One dispatch is up to BATCH blocks of random sizes. While the reader compares one, the writer writes the next, and the
arena has room for little more than these two: every block is soon another's. In ordering 'event' a dispatch also
leases the event that its work is marked by.
"""

from __future__ import annotations

import os
import random
from dataclasses import dataclass

from weftline.gpu_check.pattern import LONGEST_BYTES
from weftline.gpu_check.processes import ANSWER_MAX_S, Process
from weftline.gpu_check.running import Wrong
from weftline.gpu_check.trial import MIB
from weftline.shm.block import Block
from weftline.shm.lease import DEVICE_ALIGN_BYTES, EVENT_BYTES, Ledger

ORDERINGS = ("host", "event")
BATCH = 32
ARENA_BYTES = 6 * MIB
"""Two dispatches of average size and a half."""

EVENTS = 16
DELAYS_US = (0, 0, 0, 50, 1500)
"""How long the writer's stream is held back before it writes; one of these, at random. The last is longer than it takes
to tell the reader, so that one that does not wait finds what the blocks held before."""

FAKE_DELAYS_US = (0, 0, 0, 50, 30_000)
"""The same where the machine may be busy with other things, and no figure is at stake."""


class Spoilt(Wrong):
    """What was read is not what was written."""


@dataclass(slots=True)
class BlockGroup:
    """Blocks that are written and read together, and the event that says when they are written."""

    blocks: list[Block]
    event: Block | None = None

    @property
    def leases(self) -> list[tuple[int, int, int]]:
        return [(block.offset, block.size_bytes, block.generation) for block in self.blocks]

    @property
    def number(self) -> int | None:
        """The event's index in the writer's pool."""
        return None if self.event is None else self.event.offset // EVENT_BYTES


@dataclass
class Arena:
    """The writer's arena as the runtime knows it; its descriptor, if it has one, is this process's own."""

    number: int
    size_bytes: int
    fds: list[int]
    handle: str
    handles: list[str]

    @classmethod
    def made_by(cls, writer: Process, number: int, rung: str = "descriptor") -> Arena:
        made = writer.ask("make", arena=f"a{number}", size_bytes=ARENA_BYTES, rung=rung)
        handles = writer.ask("make_events", count=EVENTS)["handles"]
        writer.ask("put_bank")
        return cls(number, made["size_bytes"], made["fds"], made["handle"], handles)

    @property
    def name(self) -> str:
        return f"a{self.number}"

    def shown_to(self, reader: Process) -> None:
        reader.ask("attach", self.fds, arena=self.name, size_bytes=self.size_bytes, handle=self.handle)
        reader.ask("open_events", handles=self.handles)

    def close(self) -> None:
        while self.fds:
            os.close(self.fds.pop())


@dataclass
class Traffic:
    """Dispatches one after the other; `done` counts leases that were written, read and found right.

    reader_waits: for the event of a dispatch; False to see that it is found out.
    """

    ledger: Ledger
    arena: Arena
    ordering: str
    draw: random.Random
    writing: BlockGroup | None = None
    reading: BlockGroup | None = None
    done: int = 0
    delays_us: tuple[int, ...] = DELAYS_US
    answer_max_s: float = ANSWER_MAX_S
    reader_waits: bool = True

    def __post_init__(self) -> None:
        self.ledger.add_arena(self.arena.number, ARENA_BYTES, DEVICE_ALIGN_BYTES)
        self.ledger.add_arena(-self.arena.number, EVENTS * EVENT_BYTES)

    def step(self, writer: Process, reader: Process) -> None:
        """Have the next dispatch written while the one before is read; Spoilt when what is read is not as written."""
        self.writing = self._lease()
        leases, event = self.writing.leases, self.writing.number
        delay_us = self.draw.choice(self.delays_us)
        writer.tell("write", arena=self.arena.name, leases=leases, delay_us=delay_us, event=event)
        self.read(reader)
        writer.answer("write", self.answer_max_s)
        self.writing, self.reading = None, self.writing
        waited_for = event if self.reader_waits else None
        reader.tell("check", arena=self.arena.name, leases=leases, event=waited_for)

    def read(self, reader: Process) -> None:
        """Take what the reader says of the dispatch that it has, and give its blocks back."""
        if self.reading is None:
            return
        answer = reader.answer("check", self.answer_max_s)
        dispatch, self.reading = self.reading, None
        self.free(dispatch)
        if answer["wrong"]:
            raise Spoilt(
                f"ordering {self.ordering}: {answer['wrong']} of {len(dispatch.blocks)} leases are not as written "
                f"({answer['first']})"
            )
        self.done += len(dispatch.blocks)

    def free(self, dispatch: BlockGroup) -> None:
        for block in self.held(dispatch):
            if not self.ledger.release((block.arena, block.offset, block.generation)):
                raise Wrong(f"the ledger does not know the lease {block.generation}")

    def held(self, dispatch: BlockGroup) -> list[Block]:
        return dispatch.blocks + ([] if dispatch.event is None else [dispatch.event])

    def _lease(self) -> BlockGroup:
        blocks: list[Block] = []
        for _ in range(BATCH):
            block = self.ledger.try_lease(self.arena.number, self.draw.randint(1, LONGEST_BYTES))
            if block is not None:
                blocks.append(block)
        event = self.ledger.try_lease(-self.arena.number, EVENT_BYTES) if self.ordering == "event" else None
        if not blocks or (self.ordering == "event" and event is None):
            raise Wrong("the ledger has no room left: leases that ended were not given back")
        return BlockGroup(blocks, event)
