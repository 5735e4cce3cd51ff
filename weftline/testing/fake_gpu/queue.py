"""Work queues of the streams of a fake device, with the memory that each unit of work reads and writes."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from weftline.testing.fake_gpu.events import Mark
from weftline.testing.fake_gpu.memory import Mapping


class Span(NamedTuple):
    """A range of device memory in a mapping of this process."""

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
        """Return True when the memory of the range begins or ends with these bytes."""
        bytes_of, end = self.mapping.buffer, self.offset + self.size_bytes
        if self.size_bytes < len(run):
            return False
        return bytes_of[self.offset : self.offset + len(run)] == run or bytes_of[end - len(run) : end] == run


@dataclass(slots=True, eq=False)
class Work:
    """A unit of work: a kernel, a copy, the record of an event, or a wait for one.

    does:   function that is called when the work ends.
    begun:  a kernel or a copy is running; only on a simulated machine.
    posted: order of submission on a simulated machine; 0 on a real one.
    not_before_s: end of a delay, on the monotonic clock.
    leases: lease generations of `reads` and `writes` at submission; written by the watch.
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
        """Execute the work; all earlier work of its stream is complete."""
        if self.does is not None:
            self.does()
        if self.records is not None:
            self.records.event.finish(self.records.number)


@dataclass(slots=True, eq=False)
class Queue:
    """Pending work of a stream, oldest first. closing: the stream is destroyed when the queue is empty."""

    works: deque[Work] = field(default_factory=deque)
    closing: bool = False

    @property
    def head(self) -> Work | None:
        return self.works[0] if self.works else None

    def advance(self) -> bool:
        """Execute up to the first unfinished wait; return True if any work was executed."""
        did = False
        while self.works and self.works[0].can_go_on:
            self.works[0].end()
            self.works.popleft()
            did = True
        return did
