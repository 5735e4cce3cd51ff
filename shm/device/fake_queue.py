"""What lies on a stream of a fake device: work, in order, each piece with the memory that it reads and writes."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from weftline.shm.device.fake_events import Mark
from weftline.shm.device.fake_memory import Mapping


class Span(NamedTuple):
    """A range of device memory, as this process has it mapped."""

    mapping: Mapping
    offset: int
    size_bytes: int

    @property
    def memory(self) -> int:
        return self.mapping.memory.identity

    def meets(self, other: Span) -> bool:
        return (
            self.offset < other.offset + other.size_bytes
            and other.offset < self.offset + self.size_bytes
            and self.memory == other.memory
        )

    def starts_or_ends_with(self, run: bytes) -> bool:
        """Whether it begins or ends with these bytes."""
        bytes_of, end = self.mapping.buffer, self.offset + self.size_bytes
        if self.size_bytes < len(run):
            return False
        return bytes_of[self.offset : self.offset + len(run)] == run or bytes_of[end - len(run) : end] == run


@dataclass(slots=True, eq=False)
class Work:
    """One piece: a kernel or a copy, which does something, or an event's record, or a wait for one.

    does:   what happens when it ends.
    begun:  it runs; only kernels and copies on a made-up machine are ever seen to.
    posted: how many pieces a made-up machine had been given before; 0 on a real one.
    not_before_s: on the monotonic clock; a delay ends then.
    leases: under which generation each of `reads` and `writes` was leased when it was put on the stream; a watch's.
    """

    does: Callable[[], None] | None = None
    reads: tuple[Span, ...] = ()
    writes: tuple[Span, ...] = ()
    records: Mark | None = None
    waits: Mark | None = None
    begun: bool = False
    posted: int = 0
    not_before_s: float = 0.0
    leases: tuple[int, ...] = ()

    @property
    def can_go_on(self) -> bool:
        return (self.waits is None or self.waits.is_done) and time.monotonic() >= self.not_before_s

    @property
    def spans(self) -> tuple[Span, ...]:
        return self.reads + self.writes

    def end(self) -> None:
        """Do it: everything before it on its stream is done."""
        if self.does is not None:
            self.does()
        if self.records is not None:
            self.records.event.finish(self.records.number)


@dataclass(slots=True, eq=False)
class Queue:
    """A stream: what is on it, oldest first. `closing`: destroyed, and it goes when it is empty."""

    works: deque[Work] = field(default_factory=deque)
    closing: bool = False

    @property
    def head(self) -> Work | None:
        return self.works[0] if self.works else None

    def advance(self) -> bool:
        """Do everything up to the first wait for something that is not done; whether anything was done."""
        did = False
        while self.works and self.works[0].can_go_on:
            self.works[0].end()
            self.works.popleft()
            did = True
        return did
