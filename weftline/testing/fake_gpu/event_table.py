"""Events of one process on a fake device: its own and imported ones."""

from __future__ import annotations

from weftline.shm.device.driver import DriverError
from weftline.testing.fake_gpu import watch as rules
from weftline.testing.fake_gpu.context import Context
from weftline.testing.fake_gpu.events import EventHandle, EventPage, FakeEvent, Mark, private_page
from weftline.testing.fake_gpu.memories import Memories


class EventTable:
    """Events by handle. Shared events are stored behind the first memory that this process shares."""

    def __init__(self, context: Context, memories: Memories) -> None:
        self._context = context
        self._memories = memories
        self._events: dict[int, FakeEvent] = {}
        self._pages: list[EventPage] = []

    def make(self, shared: bool) -> int:
        page, slot = (self._shared_slot() if shared else None) or self._private_slot()
        return self._keep(FakeEvent(page, slot, shared=shared))

    def export(self, handle: int) -> bytes:
        """Return the handle of an event for other processes. DriverError: this process shares no memory."""
        self._context.check_kind("export_event", "fake", "fake-legacy", "fake-closed")
        event = self.held("export_event", handle)
        if not event.shared or not event.own:
            raise DriverError("export_event", "INVALID_VALUE", "the event was not made to be shared")
        if not event.page.identity:
            found = self._shared_slot()
            if found is None:
                raise DriverError(
                    "export_event", "NOT_READY", "share the memory first that other processes will bring in"
                )
            event.move(*found)
        return EventHandle(event.page.identity, event.slot, event.life).written()

    def bring_in(self, handle: bytes) -> int:
        self._context.check_kind("import_event", "fake", "fake-legacy", "fake-closed")
        ref = EventHandle.read(handle)
        for memory in self._memories.live():
            if memory.identity == ref.identity and not memory.made:
                event = FakeEvent(memory.page, ref.slot, ref.life, shared=True) if memory.page.has(ref.slot) else None
                if event is None or not event.lives:
                    raise DriverError("import_event", "INVALID_HANDLE", "its maker has destroyed the event")
                return self._keep(event)
        about = "this process has not imported the memory that the event lies behind"
        raise DriverError("import_event", "INVALID_CONTEXT", about)

    def destroy(self, handle: int) -> None:
        event = self._events.pop(handle, None)
        if event is None:
            raise self._context.refusal(rules.FREED_TWICE, "destroy_event", "INVALID_HANDLE", "there is no such event")
        if event.own:
            event.end()

    def mark(self, handle: int) -> Mark:
        """Count a record of an event. DriverError: another process made it; each word has one writer."""
        event = self.held("record", handle)
        if not event.own:
            raise DriverError("record", "NOT_PERMITTED", "a fake's event is recorded by the process that made it")
        if self._context.machine is not None:
            self._context.machine.watch.recorded(self._context.process.number, event.page.identity, event.slot)
        return event.mark()

    def latest(self, call: str, handle: int) -> Mark:
        """Return the latest record of an event, to wait for."""
        event = self.held(call, handle)
        if self._context.machine is not None:
            self._context.machine.watch.waited(self._context.process.number, event.page.identity, event.slot)
        return event.latest()

    def held(self, call: str, handle: int) -> FakeEvent:
        """Return an event. DriverError: there is none, or its maker has destroyed it."""
        event = self._events.get(handle)
        if event is None or not event.lives:
            raise DriverError(call, "INVALID_HANDLE", "this event does not exist, or was destroyed")
        return event

    def clear(self) -> None:
        self._events.clear()

    def _keep(self, event: FakeEvent) -> int:
        handle = self._context.handle()
        self._events[handle] = event
        return handle

    def _shared_slot(self) -> tuple[EventPage, int] | None:
        for memory in self._memories.live():
            slot = memory.page.try_take() if memory.lent else None
            if slot is not None:
                return memory.page, slot
        return None

    def _private_slot(self) -> tuple[EventPage, int]:
        for page in self._pages:
            slot = page.try_take()
            if slot is not None:
                return page, slot
        self._pages.append(private_page(self._context.process))
        return self._private_slot()
