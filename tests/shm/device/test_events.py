"""Shared events: made once, found by where their lease lies, and never destroyed under those who wait."""

import pytest

from weftline.shm.block import Block, Place
from weftline.shm.device.driver import DriverError
from weftline.shm.device.events import EVENTS_MAX, SharedEvents, index_of
from weftline.shm.lease import EVENT_BYTES, Ledger
from weftline.testing.fake_gpu.gpu import FakeGpu
from weftline.testing.fake_gpu.machine import FakeMachine


def place(index: int) -> Place:
    return Block(-3, index * EVENT_BYTES, EVENT_BYTES, 1).place(0, EVENT_BYTES)


def test_every_lease_of_an_arena_of_events_is_another_event() -> None:
    ledger = Ledger()
    ledger.add_arena(-3, EVENTS_MAX * EVENT_BYTES)
    leased = [ledger.try_lease(-3, EVENT_BYTES) for _ in range(EVENTS_MAX)]
    indexes = [index_of(block.place(0, EVENT_BYTES), EVENTS_MAX) for block in leased if block is not None]
    assert sorted(indexes) == list(range(EVENTS_MAX))
    assert ledger.try_lease(-3, EVENT_BYTES) is None


@pytest.mark.parametrize(
    "wrong", [Place(-3, 32, 64, 0, 1), Place(-3, 64, 32, 64, 1), place(4), Place(-3, -64, 64, 0, 1)]
)
def test_a_place_that_means_no_event_is_refused(wrong: Place) -> None:
    with pytest.raises(ValueError, match="none of 4 events"):
        index_of(wrong, 4)


def test_what_the_owner_records_its_guests_wait_for_by_the_same_place() -> None:
    machine = FakeMachine()
    owner, guest = machine.process(), machine.process()
    memory = guest.import_memory(owner.export(owner.create(owner.granularity())))  # a fake's events lie beside it
    events = SharedEvents.create(owner, 4)
    theirs = SharedEvents.attach(guest, events.handles)
    assert (len(events), events.size_bytes, len(theirs.handles)) == (4, 256, 0)
    writing, reading, seen = owner.stream(), guest.stream(), guest.event()
    owner.record(events.at(place(2)), writing)
    guest.wait(reading, theirs.at(place(2)))
    guest.record(seen, reading)
    assert not guest.finished(seen)
    machine.settle()
    assert guest.finished(seen)
    assert theirs.at(place(2)) != theirs.at(place(1))
    theirs.close()
    guest.release(memory)


class Counting(FakeGpu):
    """Refuses events after the first two, and counts which are destroyed."""

    def __init__(self) -> None:
        super().__init__("fake:0")
        self.create(self.granularity())  # a fake's events lie beside its memory
        self.made: list[int] = []
        self.destroyed: list[int] = []

    def event(self, shared: bool = False) -> int:
        if len(self.made) == 2:
            raise DriverError("cuEventCreate", "CUDA_ERROR_NOT_SUPPORTED")
        self.made.append(super().event(shared))
        return self.made[-1]

    def import_event(self, handle: bytes) -> int:
        return self.event()

    def destroy_event(self, event: int) -> None:
        self.destroyed.append(event)
        super().destroy_event(event)


def test_nothing_is_left_behind_when_the_driver_refuses() -> None:
    driver = Counting()
    with pytest.raises(DriverError):
        SharedEvents.create(driver, 3)
    assert driver.destroyed == driver.made
    driver = Counting()
    with pytest.raises(DriverError):
        SharedEvents.attach(driver, [bytes(64)] * 3)
    assert driver.destroyed == driver.made


def test_a_guest_closes_its_events_and_the_owner_keeps_them() -> None:
    owner = Counting()
    with SharedEvents.create(owner, 2) as events:
        assert len(events.handles) == 2
    assert owner.destroyed == []
    with pytest.raises(ValueError, match="none of 0 events"):
        events.at(place(0))
    guest = Counting()
    SharedEvents.attach(guest, events.handles).close()
    assert guest.destroyed == guest.made
