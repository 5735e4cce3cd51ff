"""Watch: a race detector that compares the engine's leases of device memory with the work on the device.

The engine reports every lease: the writer of a block, the end of writing, its readers, and its release. The fake device
reports all work when it is submitted, begins and ends. Each violated rule is kept as a Violation. Work carries the
lease generations at submission, so that work that runs after the end of its lease is detected even if the same process
has leased the same bytes again.

Real worker processes have no watch.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from weftline.testing.fake_gpu.queue import Queue, Span, Work

POISON = 0xDD
"""Byte that freed memory is filled with."""

POISON_RUN = bytes([POISON]) * 16
"""Number of poison bytes at either end of a read that count as a read of freed memory."""

EARLY = "read before ready was waited for"
LEASED = "write while leased to a reader"
WRITERS = "two writers"
STALE = "use of a stale generation"
FREED_TWICE = "double free"
IMPORTED_TWICE = "double import of one memory"
READ_ONLY = "write through a read-only map"
DEAD = "wait on a dead producer"
PENDING = "free or unmap with pending work"
POISONED = "reading poisoned bytes"
OUTSIDE = "outside of any memory"
RECORDED = "record of an event that may still be waited for"

RULES = (
    *(EARLY, LEASED, WRITERS, STALE, FREED_TWICE, IMPORTED_TWICE),
    *(READ_ONLY, DEAD, PENDING, POISONED, OUTSIDE, RECORDED),
)


@dataclass(frozen=True, slots=True)
class Violation:
    """A violated rule, with the process and the details."""

    rule: str
    process: int
    about: str = ""

    def __str__(self) -> str:
        return f"{self.rule} by process {self.process}" + (f": {self.about}" if self.about else "")


@dataclass(slots=True)
class _Lease:
    offset: int
    size_bytes: int
    generation: int
    writer: int
    published: bool = False
    readers: Counter[int] = field(default_factory=Counter)

    def holds(self, span: Span) -> bool:
        return self.offset <= span.offset and span.offset + span.size_bytes <= self.offset + self.size_bytes


class Watch:
    """Leases of memories and events by memory identity, and the violations found.

    Memory without leases, private to a process, is not watched.
    """

    def __init__(self) -> None:
        self.found: list[Violation] = []
        self._memories: dict[int, dict[int, _Lease]] = {}
        self._events: dict[tuple[int, int], bool] = {}  # leased events, and whether they have been recorded
        self._leased_once: set[tuple[int, int]] = set()
        self._unfinished: list[tuple[int, Queue, Work]] = []

    # reports of the engine

    def leased(self, memory: int, offset: int, size_bytes: int, generation: int, writer: int) -> None:
        """Report that a process may write a block."""
        self._memories.setdefault(memory, {})[offset] = _Lease(offset, size_bytes, generation, writer)

    def published(self, memory: int, offset: int, generation: int, ready: bool) -> None:
        """Report the end of writing; without a `ready` event all writes are complete."""
        lease = self._under(memory, offset, generation)
        if lease is None:
            return
        lease.published = True
        for process, _, work in [] if ready else self._unfinished:
            if any(span.memory == memory and lease.holds(span) for span in work.writes):
                self.find(EARLY, process, f"generation {generation} was published before its copy is done")

    def read_by(self, memory: int, offset: int, generation: int, reader: int) -> None:
        lease = self._under(memory, offset, generation)
        if lease is not None:
            lease.readers[reader] += 1

    def ended(self, memory: int, offset: int, generation: int, reader: int) -> None:
        """Report that a reader has finished."""
        lease = self._under(memory, offset, generation)
        if lease is not None:
            lease.readers[reader] -= 1
            lease.readers += Counter()

    def freed(self, memory: int, offset: int, generation: int) -> None:
        if self._under(memory, offset, generation) is not None:
            del self._memories[memory][offset]

    def event_leased(self, memory: int, slot: int) -> None:
        """Report an event lease: the event may be recorded once, and waited for, until it is freed."""
        self._events.setdefault((memory, slot), False)

    def event_freed(self, memory: int, slot: int) -> None:
        self._events.pop((memory, slot), None)
        self._leased_once.add((memory, slot))

    # reports of the device

    def find(self, rule: str, process: int, about: str = "") -> None:
        self.found.append(Violation(rule, process, about))

    def recorded(self, process: int, memory: int, slot: int) -> None:
        if self._events.get((memory, slot)):
            self.find(RECORDED, process, f"event {slot}")
        elif (memory, slot) in self._events:
            self._events[(memory, slot)] = True
        elif (memory, slot) in self._leased_once:
            self.find(STALE, process, f"it records event {slot}, which is free")

    def waited(self, process: int, memory: int, slot: int) -> None:
        if (memory, slot) not in self._events and (memory, slot) in self._leased_once:
            self.find(STALE, process, f"it waits for event {slot}, which is free")

    def posted(self, process: int, queue: Queue, work: Work) -> None:
        """Report that work was submitted to a stream."""
        noted = []
        for span, writes in [*((span, False) for span in work.reads), *((span, True) for span in work.writes)]:
            lease = self._lease_of(span)
            noted.append(lease.generation if lease else 0)
            if span.memory not in self._memories:
                continue
            if writes and lease is not None and lease.writer == process and lease.published:
                self.find(LEASED, process, f"generation {lease.generation}")
            elif not self._may(process, lease, writes):
                self._find_stale(process, lease, writes)
        work.leases = tuple(noted)
        self._unfinished.append((process, queue, work))

    def begins(self, process: int, queue: Queue, work: Work) -> None:
        self._check_leases(process, work)
        for span in work.reads:
            if span.memory in self._memories and span.starts_or_ends_with(POISON_RUN):
                self.find(POISONED, process, f"at {span.offset}")
        for _, elsewhere, other in self._unfinished:
            if elsewhere is queue or not other.writes:
                continue
            if any(read.meets(written) for read in work.reads for written in other.writes):
                self.find(EARLY, process, "what is read is still being written")
            if other.begun and any(mine.meets(theirs) for mine in work.writes for theirs in other.writes):
                self.find(WRITERS, process, "both at the same time")
        for _, elsewhere, other in self._unfinished:
            beside = elsewhere is not queue and other.begun
            if beside and any(written.meets(read) for written in work.writes for read in other.reads):
                self.find(LEASED, process, "what is written is being read")

    def ends(self, process: int, work: Work) -> None:
        self._check_leases(process, work)
        self.dropped(work)

    def dropped(self, work: Work) -> None:
        """Report that work ended or was dropped."""
        self._unfinished = [one for one in self._unfinished if one[2] is not work]

    def _check_leases(self, process: int, work: Work) -> None:
        """Detect work whose leases have changed since submission."""
        for index, (span, noted) in enumerate(zip(work.spans, work.leases)):
            if span.memory in self._memories:
                lease = self._lease_of(span)
                writes = index >= len(work.reads)
                if (lease.generation if lease else 0) != noted or not self._may(process, lease, writes):
                    self._find_stale(process, lease, writes)

    def _find_stale(self, process: int, lease: _Lease | None, writes: bool) -> None:
        verb = "writes" if writes else "reads"
        if lease is None:
            self.find(STALE, process, f"it {verb} what is free")
        else:
            rule = WRITERS if writes and lease.writer != process else STALE
            self.find(rule, process, f"it {verb} generation {lease.generation} of process {lease.writer}")

    def _may(self, process: int, lease: _Lease | None, writes: bool) -> bool:
        return lease is not None and (lease.writer == process or (not writes and lease.readers[process] > 0))

    def _lease_of(self, span: Span) -> _Lease | None:
        leases = self._memories.get(span.memory, {}).values()
        return next((lease for lease in leases if lease.holds(span)), None)

    def _under(self, memory: int, offset: int, generation: int) -> _Lease | None:
        lease = self._memories.get(memory, {}).get(offset)
        return lease if lease is not None and lease.generation == generation else None
