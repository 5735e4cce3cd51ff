"""Events of a fake device: counters in a page behind a memory, shared with it.

Each event has a slot of 64 bytes with three words. `recorded` counts its records. `done` is the last record that is
complete. `life` increases when the event is made and when it is destroyed, so that stale handles are detected. Only the
process that made an event writes its words, each with one aligned store of eight bytes. On x86-64 other processes see
these stores whole and in order.

Records of an event complete in order, even on different streams; a GPU keeps only the latest record.
"""

from __future__ import annotations

from typing import NamedTuple

from weftline.shm.device.driver import EVENT_HANDLE_BYTES, DriverError
from weftline.testing.fake_gpu.context import Process

SLOT_WORDS = 8
"""Words of 8 bytes per slot; the first slot is the header of the memory."""

_RECORDED, _DONE, _LIFE = range(3)
_MAGIC = b"fakeevnt"


class EventPage:
    """A page of event slots.

    identity: identity of the memory in front of the page; 0: events that are not shared.
    maker:    process that writes the page.
    """

    def __init__(self, words: memoryview, identity: int, maker: Process) -> None:
        self.words = words
        self.identity = identity
        self.maker = maker
        self._free = iter(range(1, len(words) // SLOT_WORDS))
        self._back: list[int] = []

    def has(self, slot: int) -> bool:
        return 0 < slot < len(self.words) // SLOT_WORDS

    def try_take(self) -> int | None:
        """Return an unused slot, or None."""
        return self._back.pop() if self._back else next(self._free, None)

    def give_back(self, slot: int) -> None:
        self._back.append(slot)


def private_page(maker: Process, slots: int = 64) -> EventPage:
    """Create a page for events that are not shared."""
    return EventPage(memoryview(bytearray(8 * SLOT_WORDS * (slots + 1))).cast("Q"), 0, maker)


class FakeEvent:
    """An event of one process: its own or an imported one."""

    def __init__(self, page: EventPage, slot: int, life: int | None = None, shared: bool = False) -> None:
        self.page = page
        self.slot = slot
        self.own = life is None
        self.shared = shared
        self.pending: set[int] = set()
        if life is None:
            at = slot * SLOT_WORDS
            page.words[at + _RECORDED] = page.words[at + _DONE] = 0
            page.words[at + _LIFE] += 1
        self.life = page.words[slot * SLOT_WORDS + _LIFE] if life is None else life

    @property
    def lives(self) -> bool:
        """Return True until the event's creator destroys it."""
        return self._word(_LIFE) == self.life

    def mark(self) -> Mark:
        """Add a record and return it; only in the maker's process."""
        number = self._word(_RECORDED) + 1
        self.pending.add(number)
        self._store(_RECORDED, number)
        return Mark(self, number)

    def latest(self) -> Mark:
        """Return the latest record; record 0 is always complete."""
        return Mark(self, self._word(_RECORDED))

    def is_done(self, number: int) -> bool:
        if self.own:
            return number not in self.pending
        return not number or (self.lives and self._word(_DONE) >= number)

    def finish(self, number: int) -> None:
        self.pending.discard(number)
        if self.lives:
            self._store(_DONE, min(self.pending) - 1 if self.pending else self._word(_RECORDED))
        elif not self.pending:
            self.page.give_back(self.slot)

    def end(self) -> None:
        """Destroy the event; its slot is reused when no pending work can write there."""
        self._store(_LIFE, self.life + 1)
        if not self.pending:
            self.page.give_back(self.slot)

    def move(self, page: EventPage, slot: int) -> None:
        """Move the event to another page, with its records."""
        recorded, done = self._word(_RECORDED), self._word(_DONE)
        self._store(_LIFE, self.life + 1)
        self.page.give_back(self.slot)
        self.page, self.slot = page, slot
        self.life = self._word(_LIFE) + 1
        for word, value in ((_RECORDED, recorded), (_DONE, done), (_LIFE, self.life)):
            self._store(word, value)

    def _word(self, word: int) -> int:
        return self.page.words[self.slot * SLOT_WORDS + word]

    def _store(self, word: int, value: int) -> None:
        self.page.words[self.slot * SLOT_WORDS + word] = value


class Mark(NamedTuple):
    """One record of an event; a stream can wait for it."""

    event: FakeEvent
    number: int

    @property
    def is_done(self) -> bool:
        return self.event.is_done(self.number)


class EventHandle(NamedTuple):
    """Handle of an exported event: memory identity, slot and life."""

    identity: int
    slot: int
    life: int

    def written(self) -> bytes:
        parts = [_MAGIC, *(number.to_bytes(8, "little") for number in self)]
        return b"".join(parts).ljust(EVENT_HANDLE_BYTES, b"\0")

    @classmethod
    def read(cls, handle: bytes) -> EventHandle:
        if len(handle) != EVENT_HANDLE_BYTES or handle[:8] != _MAGIC:
            raise DriverError("import_event", "INVALID_HANDLE", "this is no event of a fake device")
        identity, slot, life = (int.from_bytes(handle[at : at + 8], "little") for at in (8, 16, 24))
        return cls(identity, slot, life)
