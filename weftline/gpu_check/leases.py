"""V4: leases between a writer and a reader under delayed writes, compared byte by byte, in both orderings.

One dispatch is up to BATCH blocks of random sizes, leased in the runtime's ledger. While the reader compares one, the
writer writes the next, and the arena has room for little more than these two, so blocks are reused soon. In ordering
'event' a dispatch also leases the event that marks its work. At the end a reader that does not wait for events must be
detected: otherwise the delays have no effect on this card, and the results before prove nothing.
"""

from __future__ import annotations

import os
import random
import time
from dataclasses import dataclass
from typing import Any

from weftline.gpu_check.context import MIB, CheckContext
from weftline.gpu_check.device_worker import LONGEST_BYTES
from weftline.gpu_check.outcomes import RIGHT, CheckOutcome, Wrong, judged
from weftline.gpu_check.processes import ANSWER_MAX_S, Process
from weftline.shm.block import Block
from weftline.shm.lease import DEVICE_ALIGN_BYTES, EVENT_BYTES, Ledger

ORDERINGS = ("host", "event")
BATCH = 32
ARENA_BYTES = 6 * MIB
"""Two dispatches of average size and a half."""

EVENTS = 16
DELAYS_US = (0, 0, 0, 50, 1500)
"""Delays of the writer's stream before it writes; one of these, at random. The last is longer than a message takes, so
that a reader that does not wait finds the blocks' former bytes."""

FAKE_DELAYS_US = (0, 0, 0, 50, 30_000)
"""The same where the machine may be busy with other things, and no figure is at stake."""


class Spoilt(Wrong):
    """The bytes read differ from those written."""


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
    def made_by(cls, writer: Process, number: int, share_mode: str = "descriptor") -> Arena:
        made = writer.ask("make", arena=f"a{number}", size_bytes=ARENA_BYTES, share_mode=share_mode)
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
        """Write the next dispatch while the one before is read; Spoilt when the bytes read differ."""
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


LEASES = 1_000_000
"""Leases of each ordering with `--full`."""

QUICK_LEASES = 300
SECONDS = 20.0
"""Duration of each ordering without --quick and --full."""

CARELESS = 20
"""Dispatches in which a reader that does not wait has to be found out."""

REPORT_S = 5.0
"""Interval of progress lines."""


def check_leases(context: CheckContext) -> CheckOutcome:
    figures: dict[str, Any] = {}
    bars = []
    wanted = QUICK_LEASES if context.quick else LEASES
    with context.group() as group:
        writer, reader = group.start("the writer"), group.start("the reader")
        reader.ask("open")
        for number, ordering in enumerate(ORDERINGS, 1):
            arena = Arena.made_by(writer, number)
            try:
                arena.shown_to(reader)
                delays_us = FAKE_DELAYS_US if context.fake else DELAYS_US
                traffic = Traffic(Ledger(), arena, ordering, random.Random(11), delays_us=delays_us)
                seconds = _flow(context, traffic, writer, reader, wanted)
                if ordering == "event":
                    figures["a reader that does not wait"] = _found_out(arena, max(delays_us), writer, reader)
            finally:
                arena.close()
            traffic.ledger.check()
            figures[f"ordering {ordering}: leases"] = traffic.done
            figures[f"ordering {ordering}: leases_per_s"] = round(traffic.done / seconds)
            bars.append(judged(f"leases in ordering {ordering}", traffic.done, LEASES, "leases", at_least=True,
                           judge=context.judges and context.full))  # fmt: skip
    return CheckOutcome(context.part, RIGHT, figures=figures, bars=bars)


def _flow(context: CheckContext, traffic: Traffic, writer: Process, reader: Process, wanted: int) -> float:
    """Let so many leases flow, or as many as there is time for; returns the seconds it took."""
    started = reported_s = time.monotonic()
    until = context.until_s if context.full else min(context.until_s, started + SECONDS)
    while traffic.done < wanted and time.monotonic() < until:
        traffic.step(writer, reader)
        if time.monotonic() - reported_s > REPORT_S:
            reported_s = time.monotonic()
            context.progress(f"ordering {traffic.ordering}: {traffic.done} leases")
    traffic.read(reader)
    return time.monotonic() - started


def _found_out(arena: Arena, delay_us: int, writer: Process, reader: Process) -> str:
    """Return after how many dispatches a reader that does not wait is detected; Wrong when it never is."""
    careless = Traffic(Ledger(), arena, "event", random.Random(12), delays_us=(delay_us,), reader_waits=False)
    for count in range(1, CARELESS + 1):
        try:
            careless.step(writer, reader)
        except Spoilt:
            writer.answer("write")  # of the next dispatch, which has no reader
            return f"found out after {count - 1} dispatches"
    raise Wrong(f"a reader that does not wait was right {CARELESS} times: delays hold nothing back here")
