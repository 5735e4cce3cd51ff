"""Pool of interprocess events, created at worker start.

Making and destroying shared events while work is under way has blocked drivers, and an operation on an event that its
maker destroyed is undefined. So the owner of a device arena makes EVENTS_MAX of them, the others open each of them
once, and from then on an event is an index. The ledger leases them like blocks, in an arena of their own beside the
device arena, EVENT_BYTES for each:

    arena -7  |  0 |  1 |  2 |  3 | ...          index = offset // EVENT_BYTES

An event is recorded anew with every lease. That is safe because a lease ends only when every reader has reported its
work as done: no process waits for the old record any more.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType

from weftline.shm.block import Place
from weftline.shm.device.driver import GpuDriver
from weftline.shm.lease import EVENT_BYTES

EVENTS_MAX = 128
"""Events of one worker, one for each dispatch that is unfinished or still read. A worker of eight steps with four
dispatches each under way has 32; twice that while their readers work, and twice again for slow ones. torch keeps a
process to 1000 shared events, far below where drivers fail: enough for the events of seven workers on one device.
Their handles are 8 KiB in the message that tells of them."""


def index_of(place: Place, count: int) -> int:
    """Return which of `count` events a place in their arena means; ValueError when it means none."""
    index, rest = divmod(place.offset, EVENT_BYTES)
    if rest or place.size_bytes != EVENT_BYTES or not 0 <= index < count:
        raise ValueError(f"a place at {place.offset} of {place.size_bytes} bytes is none of {count} events")
    return index


class SharedEvents:
    """The events of one device arena: made by its owner, opened by the others.

    handles: what others open them by, in order; empty for a guest.
    """

    def __init__(self, driver: GpuDriver, events: Sequence[int], handles: Sequence[bytes] = ()) -> None:
        self.handles = tuple(handles)
        self._driver = driver
        self._events = list(events)

    @classmethod
    def create(cls, driver: GpuDriver, count: int = EVENTS_MAX) -> SharedEvents:
        """Make the events of this process's arena. DriverError when the driver shares none; nothing is left behind."""
        events: list[int] = []
        try:
            for _ in range(count):
                events.append(driver.event(shared=True))
            return cls(driver, events, [driver.export_event(event) for event in events])
        except BaseException:
            _destroy(driver, events)
            raise

    @classmethod
    def attach(cls, driver: GpuDriver, handles: Sequence[bytes]) -> SharedEvents:
        """Open the events of another process's arena. DriverError when the driver refuses one of them."""
        events: list[int] = []
        try:
            for handle in handles:
                events.append(driver.import_event(handle))
            return cls(driver, events)
        except BaseException:
            _destroy(driver, events)
            raise

    def __len__(self) -> int:
        return len(self._events)

    @property
    def size_bytes(self) -> int:
        """Size of the arena that the ledger leases them in."""
        return len(self._events) * EVENT_BYTES

    def at(self, place: Place) -> int:
        """Return the driver's event that a place means; ValueError when it means none."""
        return self._events[index_of(place, len(self._events))]

    def close(self) -> None:
        """Close imported events. An owner's events stay until its process ends: other processes may have them open."""
        if not self.handles:
            _destroy(self._driver, self._events)
        self._events = []

    def __enter__(self) -> SharedEvents:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()


def _destroy(driver: GpuDriver, events: Sequence[int]) -> None:
    for event in events:
        driver.destroy_event(event)
