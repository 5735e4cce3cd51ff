"""FakeGpu: a driver for a GPU in host memory, with stricter rules than a real GPU.

Memory is a memfd (`memory`), events are counters in a shared page (`events`), and streams are queues (`streams`). The
device works between real processes. It also works on a simulated machine (`machine`), where a seed decides the order of
execution and a watch checks the engine's leases.

Differences from CUDA:

- A host wait for an event whose recording process has died raises DeviceLost; a GPU would hang.
- Undefined behaviour is an error: freeing memory that pending work uses, using a destroyed event, importing a memory
  twice, opening an allocation or an event in the process that made it.
- Reading outside a memory, or writing through a read-only mapping, loses the device for this process, as on a GPU.
- Addresses in no device memory are host addresses.

'fake-legacy' shares no memory by file descriptor, 'fake-alone' shares none, and other processes cannot import the
memory of 'fake-closed'. A legacy handle is opened through the kernel with the maker's descriptor, which the kernel
refuses between hardened processes (`sharing`).
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from weftline.shm.device.driver import DriverError
from weftline.testing.fake_gpu.addresses import Addresses
from weftline.testing.fake_gpu.context import Context, Process
from weftline.testing.fake_gpu.event_table import EventTable
from weftline.testing.fake_gpu.memories import GRANULARITY_BYTES, Memories
from weftline.testing.fake_gpu.queue import Queue, Span, Work
from weftline.testing.fake_gpu.streams import Streams
from weftline.testing.fake_gpu.watch import POISON

if TYPE_CHECKING:
    from weftline.testing.fake_gpu.machine import FakeMachine

TOTAL_BYTES = 8 << 30
"""Default size of a fake device's memory; nothing is reserved."""

Range = tuple[int, int]
"""An address of this process, and a size in bytes."""


class FakeGpu:
    """Driver of a fake GPU in host memory; it has every method of `GpuDriver`, and those below.

    device:      'fake:0', 'fake-legacy:0', 'fake-alone:0' or 'fake-closed:0', with any number.
    total_bytes: device memory that this process may allocate; imported memory does not count.
    machine:     simulated machine; None: this one.
    process:     process of the simulated machine.
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

    def map(self, memory: int, size_bytes: int, writable: bool, at: int = 0) -> int:
        with self._lock:
            return self._memories.map(memory, size_bytes, writable, at)

    def unmap(self, address: int, size_bytes: int, reserved: bool = False) -> None:
        with self._lock:
            self._memories.unmap("unmap", address, "reserved" if reserved else "map", size_bytes)

    def reserve(self, size_bytes: int) -> int:
        with self._lock:
            return self._memories.reserve(size_bytes)

    def unreserve(self, address: int, size_bytes: int) -> None:
        with self._lock:
            self._memories.unreserve(address, size_bytes)

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
        """Enqueue a copy of `size_bytes` on a stream.

        As with CUDA, a copy from pageable host memory reads the source at once, and a copy to pageable host memory
        blocks until it is complete.
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
        """Enqueue a kernel on a stream; `work` is called when it ends.

        reads, writes: device memory that the kernel uses: addresses with sizes in bytes.

        An exception of `work` loses the device, as an illegal address does on a GPU.
        """
        with self._lock:
            queue = self._streams.queue("launch", stream)
            read = [self._addresses.span("launch", *one) for one in reads]
            written = [self._addresses.span("launch", *one, writes=True) for one in writes]
            self._streams.put(queue, Work(work, _those(*read), _those(*written)))

    def delay(self, seconds: float, stream: int) -> None:
        """Enqueue an empty kernel of this duration in seconds; not on a simulated machine, which has no clock."""
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
        """Return the handle of a shared event. DriverError: this process shares no memory that could hold it."""
        with self._lock:
            return self._events.export(event)

    def import_event(self, handle: bytes) -> int:
        """Open another process's event. DriverError: the memory that holds it has not been imported."""
        with self._lock:
            return self._events.bring_in(handle)

    def destroy_event(self, event: int) -> None:
        with self._lock:
            self._events.destroy(event)

    def record(self, event: int, stream: int) -> None:
        """Record an event on a stream. DriverError: another process made the event."""
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

    # methods of fakes only

    @property
    def process(self) -> Process:
        """Identity of this process on the device."""
        return self._context.process

    @property
    def queues(self) -> list[Queue]:
        """Pending work of every stream."""
        return self._streams.queues

    @property
    def is_stuck(self) -> bool:
        """Return True while a stream waits for an event of a dead process."""
        with self._lock:
            return any(self._streams.is_stuck(queue) for queue in self._streams.queues)

    def identity_of(self, address: int) -> int:
        """Return the identity of the memory at an address, equal in all processes. DriverError: no device memory."""
        mapping = self._addresses.around(address)
        if mapping is None:
            raise DriverError("identity_of", "INVALID_VALUE", "no memory of the device lies there")
        return mapping.memory.identity

    def slot_of(self, event: int) -> int:
        """Return the index of an event in the event page of its memory."""
        return self._events.held("slot_of", event).slot

    def poison(self, address: int, size_bytes: int) -> None:
        """Overwrite a freed block, so that late reads are detected."""
        if self._addresses.span("poison", address, size_bytes, writes=True) is not None:
            ctypes.memset(address, POISON, size_bytes)

    def fail(self, error: Exception) -> None:
        """Lose the device with an error, as after a failed kernel."""
        self._streams.fail(error)

    def abandon(self) -> None:
        """Release everything, as the operating system does for a dead process."""
        self.close()
        self._addresses.clear()
        self._events.clear()


def _those(*spans: Span | None) -> tuple[Span, ...]:
    return tuple(span for span in spans if span is not None)
