"""A GPU in host memory, for tests and trials: everything that `driver` asks of one, under rules stricter than a GPU's.

Memory is a memfd (`fake_memory`), events are counters in a page behind it (`fake_events`), streams are queues
(`fake_streams`). It works between real processes, and on a made-up machine (`fake_machine`), where a seed decides what
runs when and a watch looks on.

Whoever waits on the host sees when the process that has to record an event has died: that is DeviceLost, where a GPU
would hang. What CUDA leaves undefined is refused here: freeing what pending work uses, an event that its maker
destroyed, one memory imported twice, an allocation or an event opened by the one that made it. Reading outside of a
memory, or writing through a read-only map, loses the device for this process, as it does on a GPU. Addresses that are
in no memory of the device are taken for the host's.

'fake-legacy' makes no memory that is shared by descriptor, 'fake-alone' shares none at all, and 'fake-closed' lets
nobody bring in what others share. A handle of the older way is opened by asking the kernel for its maker's descriptor,
which it refuses between hardened processes (`fake_sharing`).
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from weftline.shm.device.driver import DriverError
from weftline.shm.device.fake_addresses import Addresses
from weftline.shm.device.fake_context import Context
from weftline.shm.device.fake_event_table import EventTable
from weftline.shm.device.fake_memories import GRANULARITY_BYTES, Memories
from weftline.shm.device.fake_process import Process
from weftline.shm.device.fake_queue import Queue, Span, Work
from weftline.shm.device.fake_streams import Streams
from weftline.shm.device.fake_watch import POISON

if TYPE_CHECKING:
    from weftline.shm.device.fake_machine import FakeMachine

TOTAL_BYTES = 8 << 30

Range = tuple[int, int]
"""An address of this process, and a number of bytes."""


class FakeGpu:
    """One process's way to one fake device.

    total_bytes: what this process may make there; what it imports does not count.
    machine, process: of a made-up machine, which gives them.
    """

    def __init__(
        self,
        device: str = "fake:0",
        total_bytes: int = TOTAL_BYTES,
        *,
        machine: FakeMachine | None = None,
        process: Process | None = None,
    ) -> None:
        self.device = device
        self._context = Context(device, machine, process)
        self._addresses = Addresses(self._context)
        self._streams = Streams(self._context)
        self._memories = Memories(self._context, total_bytes, self._addresses, self._streams)
        self._events = EventTable(self._context, self._memories)
        self._lock = self._context.lock

    # memory that can be shared by descriptor

    def granularity(self) -> int:
        return GRANULARITY_BYTES

    def create(self, size_bytes: int) -> int:
        with self._lock:
            return self._memories.create(size_bytes)

    def export(self, memory: int) -> int:
        with self._lock:
            return self._memories.export(memory)

    def import_memory(self, descriptor: int) -> int:
        with self._lock:
            return self._memories.bring_in(descriptor)

    def map(self, memory: int, size_bytes: int, writable: bool) -> int:
        with self._lock:
            return self._memories.map(memory, size_bytes, writable)

    def unmap(self, address: int, size_bytes: int) -> None:
        with self._lock:
            self._memories.unmap("unmap", address, "map", size_bytes)

    def release(self, memory: int) -> None:
        with self._lock:
            self._memories.release(memory)

    # memory of this process, and the older way of sharing it

    def allocate(self, size_bytes: int) -> int:
        with self._lock:
            return self._memories.allocate(size_bytes)

    def free(self, address: int) -> None:
        with self._lock:
            self._memories.unmap("free", address, "allocation")

    def share(self, address: int) -> bytes:
        with self._lock:
            return self._memories.share(address)

    def open_shared(self, handle: bytes) -> int:
        with self._lock:
            return self._memories.open_shared(handle)

    def close_shared(self, address: int) -> None:
        with self._lock:
            self._memories.unmap("close_shared", address, "shared")

    # streams

    def stream(self) -> int:
        with self._lock:
            return self._streams.make()

    def destroy_stream(self, stream: int) -> None:
        with self._lock:
            self._streams.destroy(stream)

    def copy(self, to: int, source: int, size_bytes: int, stream: int) -> None:
        """Put a copy on a stream.

        From host memory that is not page-locked it is taken at once, and to such memory it is waited for, as by CUDA.
        """
        with self._lock:
            queue = self._streams.queue("copy", stream)
            if not size_bytes:
                return
            read = self._addresses.span("copy", source, size_bytes)
            written = self._addresses.span("copy", to, size_bytes, writes=True)
            taken: int | bytes = source
            if read is None and not self._addresses.is_locked(source, size_bytes) and self._streams.is_behind(queue):
                taken = ctypes.string_at(source, size_bytes)

            def move() -> None:
                ctypes.memmove(to, taken, size_bytes)

            self._streams.put(queue, Work(move, _those(read), _those(written)))
            waits = bool(queue.works) and written is None and not self._addresses.is_locked(to, size_bytes)
        if waits:
            self.synchronize(stream)

    def launch(self, work: Callable[[], None], reads: Sequence[Range], writes: Sequence[Range], stream: int) -> None:
        """Put a kernel on a stream: `work` is called when it ends. Of fakes alone.

        reads, writes: device memory that it touches. A kernel that raises loses the device, as an illegal address does.
        """
        with self._lock:
            queue = self._streams.queue("launch", stream)
            read = [self._addresses.span("launch", *one) for one in reads]
            written = [self._addresses.span("launch", *one, writes=True) for one in writes]
            self._streams.put(queue, Work(work, _those(*read), _those(*written)))

    def delay(self, seconds: float, stream: int) -> None:
        """Put a kernel on a stream that does nothing for so long. Not for a made-up machine, which has no clock."""
        with self._lock:
            queue = self._streams.queue("delay", stream)
            self._streams.put(queue, Work(not_before_s=time.monotonic() + seconds))

    def synchronize(self, stream: int) -> None:
        with self._lock:
            queue = self._streams.queue("synchronize", stream)
        self._streams.wait("synchronize", lambda: not queue.works, lambda: self._streams.is_stuck(queue))

    # events

    def event(self, shared: bool = False) -> int:
        with self._lock:
            return self._events.make(shared)

    def export_event(self, event: int) -> bytes:
        """Return its handle. A fake's shared events lie behind memory: DriverError when this process shares none."""
        with self._lock:
            return self._events.export(event)

    def import_event(self, handle: bytes) -> int:
        """Open another process's event; DriverError before the memory that it lies behind was imported."""
        with self._lock:
            return self._events.bring_in(handle)

    def destroy_event(self, event: int) -> None:
        with self._lock:
            self._events.destroy(event)

    def record(self, event: int, stream: int) -> None:
        """Have an event mark what is on a stream so far; only the process that made it may."""
        with self._lock:
            queue = self._streams.queue("record", stream)
            self._streams.put(queue, Work(records=self._events.mark(event)))

    def wait(self, stream: int, event: int) -> None:
        with self._lock:
            queue = self._streams.queue("wait", stream)
            mark = self._events.latest("wait", event)
            if not mark.is_done:
                self._streams.put(queue, Work(waits=mark))

    def finished(self, event: int) -> bool:
        with self._lock:
            self._streams.advance()
            self._context.check_works("finished")
            return self._events.held("finished", event).latest().is_done

    def wait_event(self, event: int) -> None:
        with self._lock:
            mark = self._events.latest("wait_event", event)
        self._streams.wait("wait_event", lambda: mark.is_done, lambda: self._streams.never_comes(mark))

    # host memory, and facts

    def lock_pages(self, address: int, size_bytes: int, writable: bool) -> None:
        with self._lock:
            self._addresses.lock(address, size_bytes)

    def unlock_pages(self, address: int) -> None:
        with self._lock:
            self._addresses.unlock(address)

    def memory(self) -> tuple[int, int]:
        with self._lock:
            total = self._memories.total_bytes
            return total - self._memories.taken_bytes, total

    def close(self) -> None:
        with self._lock:
            self._streams.drop()
            self._memories.close()

    # what only a fake can tell, or be told

    @property
    def process(self) -> Process:
        return self._context.process

    @property
    def queues(self) -> list[Queue]:
        return self._streams.queues

    @property
    def is_stuck(self) -> bool:
        """Whether a stream waits for what a dead process would have had to record."""
        with self._lock:
            return any(self._streams.is_stuck(queue) for queue in self._streams.queues)

    def identity_of(self, address: int) -> int:
        """Return what the memory at an address is known by in every process."""
        mapping = self._addresses.around(address)
        if mapping is None:
            raise DriverError("identity_of", "INVALID_VALUE", "no memory of the device lies there")
        return mapping.memory.identity

    def slot_of(self, event: int) -> int:
        """Return an event's place in the page behind its memory."""
        return self._events.held("slot_of", event).slot

    def poison(self, address: int, size_bytes: int) -> None:
        """Overwrite a block that was freed, so that whoever still reads it reads nonsense."""
        if self._addresses.span("poison", address, size_bytes, writes=True) is not None:
            ctypes.memset(address, POISON, size_bytes)

    def fail(self, error: Exception) -> None:
        """Lose the device, as after a kernel that raised."""
        self._streams.fail(error)

    def abandon(self) -> None:
        """Let everything go, as the system does for a process that died."""
        self.close()
        self._addresses.clear()
        self._events.clear()


def _those(*spans: Span | None) -> tuple[Span, ...]:
    return tuple(span for span in spans if span is not None)
