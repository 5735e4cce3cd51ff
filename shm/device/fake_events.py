"""Events of a fake device: counters in a page, shared with the memory that the page lies behind.

Each event has a slot of 64 bytes with three words. `recorded` counts how often it was recorded, `done` up to which
record everything is done, `life` rises when it is made and when it is destroyed, so that a handle of an earlier one is
recognised. Only the process that made an event writes its words, each by one aligned store of eight bytes, which other
processes see whole and in order (on x86-64; other machines promise less, and a fake is for trials).

Other processes see an event's records done in their order, also where they lie on different streams: a GPU forgets the
earlier ones, a fake is stricter.
"""

from __future__ import annotations

from typing import NamedTuple

from weftline.shm.device.driver import EVENT_HANDLE_BYTES, DriverError
from weftline.shm.device.fake_process import Process

SLOT_WORDS = 8
"""Words of 8 bytes in a slot; the first slot is the head of the memory."""

_RECORDED, _DONE, _LIFE = range(3)
_MAGIC = b"fakeevnt"


class EventPage:
    """Slots for events.

    identity: of the memory that they lie behind; 0 of those that never leave their process.
    maker:    the process that writes there.
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
        """Return a slot that no event has, or None."""
        return self._back.pop() if self._back else next(self._free, None)

    def give_back(self, slot: int) -> None:
        self._back.append(slot)


def private_page(maker: Process, slots: int = 64) -> EventPage:
    """Return a page for events that are not shared."""
    return EventPage(memoryview(bytearray(8 * SLOT_WORDS * (slots + 1))).cast("Q"), 0, maker)


class FakeEvent:
    """An event, as one process knows it: one of its own, or one that it imported."""

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
        """Whether its maker has not destroyed it."""
        return self._word(_LIFE) == self.life

    def mark(self) -> Mark:
        """Count one more record, and return it; its maker only."""
        number = self._word(_RECORDED) + 1
        self.pending.add(number)
        self._store(_RECORDED, number)
        return Mark(self, number)

    def latest(self) -> Mark:
        """Return the latest record; number 0 is always done."""
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
        """Destroy it; its slot is taken again once nothing pending can write there."""
        self._store(_LIFE, self.life + 1)
        if not self.pending:
            self.page.give_back(self.slot)

    def move(self, page: EventPage, slot: int) -> None:
        """Go on in another page, with everything that was recorded."""
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
    """One record of an event: what a stream waits for."""

    event: FakeEvent
    number: int

    @property
    def is_done(self) -> bool:
        return self.event.is_done(self.number)


class EventHandle(NamedTuple):
    """What an exported event says: the memory it lies behind, its slot there, and its life."""

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
