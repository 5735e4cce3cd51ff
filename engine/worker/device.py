"""The device of a worker: driver, arenas, events, streams, scratch memory and the completion thread.

`WorkerDevice` owns the driver and the worker's own arena, and maps the arenas of other workers on the same device. The
own arena is written; the others are read in place. Host memory is page-locked if the driver supports it, so that copies
run asynchronously. Uploads and downloads have streams of their own, which overlap with the steps' streams. What one
dispatch does on the device is in device_dispatch.py.

`ScratchPool` caches device memory for uploads, stacked inputs and private copies, because allocating device memory is
slow and freeing it waits for the whole device. `CompletionThread` waits for events of dispatches that were answered
before their device work was done.

A worker without a usable driver runs without it: tensors pass through host memory, and nodes copy them to the device.
Too little device memory for the arena is an error, as it is for a model.
"""

from __future__ import annotations

import contextlib
import logging
import resource
import sys
import threading
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any, NamedTuple

import numpy as np

from weftline.engine.protocol.channel import ChannelClosed
from weftline.engine.protocol.messages import (
    REASON_CHARS_MAX,
    AttachDevice,
    AttachFailed,
    DeviceUp,
    FromWorker,
    OpenSteps,
    Released,
    Settled,
    Value,
)
from weftline.engine.worker.threads import EngineLock, call_unlocked
from weftline.errors import LimitReached, MissingPackage, StepError
from weftline.nodes.precision import compute_in_float32
from weftline.shm.arena import HostArena
from weftline.shm.block import Block, Place, align_up
from weftline.shm.device.arena import DeviceArena, probe
from weftline.shm.device.driver import DeviceLost, DeviceOutOfMemory, DriverError, GpuDriver, open_driver
from weftline.shm.device.events import SharedEvents
from weftline.shm.device.foreign import as_device
from weftline.shm.device.names import index_of, is_fake
from weftline.shm.device.tensor import DeviceTensor
from weftline.shm.lease import EVENT_BYTES
from weftline.shm.spec import TensorSpec

OWN_DEVICE_ARENA = -1
"""Id of the worker's own device arena until the runtime assigns one; assigned ids are not negative."""

_log = logging.getLogger(__name__)


class WorkerDevice:
    """The device of a worker. For one thread at a time.

    arena:   its own, None where no output is placed there or the device cannot share memory.
    shares_outputs: outputs are placed in the arena for other processes.
    events:  its own events, which mark its outputs; None with ordering 'host'.
    upload_stream, download_stream: the streams of copies to the device and from it.
    lock:    released while a stream is waited for, where steps have threads of their own; else None.
    """

    def __init__(self, driver: GpuDriver, arena: DeviceArena | None = None, events: SharedEvents | None = None) -> None:
        self.driver = driver
        self.name = driver.device
        self.arena = arena
        self.shares_outputs = arena is not None
        self.own_id = OWN_DEVICE_ARENA
        self.events = events
        self.scratch = ScratchPool(driver)
        self.upload_stream = driver.stream()
        self.download_stream = driver.stream()
        self._arenas: dict[int, DeviceArena] = {} if arena is None else {OWN_DEVICE_ARENA: arena}
        self._refused: dict[int, str] = {}
        self._lock_refused = False
        self._imported: dict[int, SharedEvents] = {}
        self._stream_events: dict[int, int] = {}  # by stream, the event that orders other streams after it
        self._streams = [self.upload_stream, self.download_stream]
        self._contexts: dict[int, Any] = {}
        self.lock: EngineLock | None = None

    # arenas

    def attach(self, message: AttachDevice, descriptor: int = -1) -> AttachFailed | None:
        """Map another worker's arena, or set the id of the own one; takes ownership of the descriptor.

        Returns AttachFailed when the driver refuses the arena or its events. Device-only values there, or values that
        are still being written, cannot be read in this process then; reading one raises StepError.
        """
        if not message.size_bytes:
            if self.arena is not None:
                self._arenas[message.arena] = self._arenas.pop(self.own_id)
                self.own_id = message.arena
            return None
        refused = message.arena
        try:
            arena = DeviceArena.attach(self.driver, message.size_bytes, message.share_mode, descriptor, message.handle)
            refused = -message.arena
            self._arenas[message.arena] = arena
            if message.events:
                self._imported[message.arena] = SharedEvents.attach(self.driver, message.events)
        except DeviceLost:
            raise
        except DriverError as error:
            self._refused[refused] = str(error)
            return AttachFailed(refused, str(error)[:REASON_CHARS_MAX])
        return None

    def retire(self, arena: int) -> None:
        """Detach an arena whose owner has ended; its mapping ends with its last view."""
        for refused in (arena, -arena):
            self._refused.pop(refused, None)
        events = self._imported.pop(arena, None)
        if events is not None:
            events.close()
        known = self._arenas.pop(arena, None)
        if known is not None:
            known.close()

    def can_read(self, value: Value) -> bool:
        """Return whether a value is in a mapped arena, and its ready event, if any, can be waited for."""
        if value.device_place is None or value.device_place.arena not in self._arenas:
            return False
        return value.ready is None or self._events(value.ready) is not None

    def view(self, value: Value) -> DeviceTensor:
        """Return a view of a tensor; StepError when its arena is not mapped here."""
        place = value.device_place
        if place is None or place.arena not in self._arenas:
            why = self._refused.get(place.arena if place else -1, "it belongs to another device")
            raise StepError(
                f"an input lies in device memory that cannot be read here ({why})\n"
                "    fix: keep the steps in one process (the same `worker`), or let processes share the device's memory"
            )
        return self._arenas[place.arena].view(place, TensorSpec(value.dtype, value.shape))

    def offset_of(self, tensor: DeviceTensor, arena: int) -> int | None:
        """Return the offset of a tensor in an arena, or None when it is elsewhere."""
        return self._arenas[arena].place_of(tensor) if arena in self._arenas else None

    def lock_pages(self, arena: HostArena) -> None:
        """Page-lock a host arena; logs the first refusal with its fix, since copies are then slower."""
        try:
            self.driver.lock_pages(_address(arena), arena.size_bytes, arena.writable)
        except DriverError as refused:
            if not self._lock_refused:
                self._lock_refused = True
                _log.warning("%s", _not_locked(self.name, arena.size_bytes, refused))

    def unlock_pages(self, arena: HostArena) -> None:
        """Unlock the pages of a host arena, before it is closed."""
        with contextlib.suppress(DriverError):  # locking was refused
            self.driver.unlock_pages(_address(arena))

    # streams

    def new_stream(self) -> int:
        """Create a stream for a step."""
        stream = self.driver.stream()
        self._streams.append(stream)
        return stream

    def order(self, first: int, then: int) -> None:
        """Order later work on stream `then` after the work on stream `first` so far."""
        if first == then:
            return
        if first not in self._stream_events:
            self._stream_events[first] = self.driver.event()
        self.driver.record(self._stream_events[first], first)
        self.driver.wait(then, self._stream_events[first])  # captures the current record: the event may be reused

    def event_of(self, ready: Block) -> int | None:
        """Return the worker's own event that was leased for a dispatch; None with ordering 'host'."""
        return None if self.events is None else self.events.at(ready.place(0, EVENT_BYTES))

    def wait_ready(self, stream: int, ready: Place) -> None:
        """Make a stream wait for the ready event of a value, of any worker."""
        events = self._events(ready)
        if events is None:
            why = self._refused.get(ready.arena, "its worker is not known here")
            raise StepError(f"an input is still being written on the device, and cannot be waited for here ({why})")
        self.driver.wait(stream, events.at(ready))

    def _events(self, ready: Place) -> SharedEvents | None:
        """Return the shared events that contain one; None when they are not imported here."""
        return self.events if -ready.arena == self.own_id else self._imported.get(-ready.arena)

    def record_all(self) -> list[int]:
        """Record a new event on every stream; the caller destroys them."""
        events = []
        for stream in self._streams:
            event = self.driver.event()
            self.driver.record(event, stream)
            events.append(event)
        return events

    def destroy_events(self, events: Sequence[int]) -> None:
        """Destroy events of `record_all`."""
        for event in events:
            self.driver.destroy_event(event)

    def sync_before_call(self, stream: int) -> None:
        """Make a node's call see the work on `stream` so far.

        A GPU queues the call's work on the stream. A fake device computes on the CPU at once, so its inputs must be
        complete; and the first call that imports torch uses torch's default stream, which is not ordered.
        """
        if is_fake(self.name) or _torch() is None:
            self.synchronize(stream)

    @contextlib.contextmanager
    def use_stream(self, stream: int) -> Iterator[None]:
        """Make `stream` torch's current stream inside, if torch is loaded and the device is a CUDA device."""
        if is_fake(self.name):
            yield
            return
        torch = _torch()
        if torch is None:
            yield
            if (torch := _torch()) is not None:
                torch.cuda.synchronize(index_of(self.name))  # this call imported it, and used its default stream
            return
        if not self._contexts:
            compute_in_float32(torch)
        if stream not in self._contexts:
            self._contexts[stream] = torch.cuda.ExternalStream(stream, device=index_of(self.name))
        with torch.cuda.stream(self._contexts[stream]):
            yield

    def synchronize(self, stream: int) -> None:
        """Wait for the work on a stream."""
        call_unlocked(self.lock, self.driver.synchronize, stream)

    def check(self) -> None:
        """Wait for all work on the device; DeviceLost when it is lost."""
        for stream in tuple(self._streams):
            self.synchronize(stream)

    # single values

    def as_tensor(self, value: Any, stream: int) -> DeviceTensor | None:
        """Return an output as a tensor if it is on this device; orders `stream` after its pending writes."""
        return as_device(value, self.name, self.driver, stream)

    def readable(self, tensor: DeviceTensor, stream: int) -> Any:
        """Return a tensor as a torch tensor, for work inside `use_stream(stream)`.

        If torch is not loaded, or built for the CPU only: a copy in host memory, ordered on `stream`.
        """
        if is_fake(self.name) or _torch() is not None:
            return tensor.torch()
        return tensor.host(self.driver, stream)

    def download(self, value: Value) -> np.ndarray:
        """Download a tensor; waits for the copy."""
        tensor = self.view(value)
        if value.ready is not None:
            self.wait_ready(self.download_stream, value.ready)
        return tensor.host(self.driver, self.download_stream)


def _torch() -> Any:
    """Return torch if it is loaded and built for CUDA; beside ONNX Runtime a CPU build may be loaded."""
    torch = sys.modules.get("torch")
    return torch if torch is not None and torch.backends.cuda.is_built() else None


def _not_locked(device: str, size_bytes: int, refused: DriverError) -> str:
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    most = "unlimited" if limit == resource.RLIM_INFINITY else f"{limit >> 10} KiB"
    return (
        f"device {device}: {size_bytes >> 20} MiB of host memory are not page-locked, so copies to and from the device "
        f"are slower and do not overlap with work: {refused}\n"
        f"    fix: raise the limit of locked memory, now {most} (ulimit -l unlimited; LimitMEMLOCK=infinity of a "
        "systemd unit; --ulimit memlock=-1 of a container)"
    )


def _address(arena: HostArena) -> int:
    return int(np.frombuffer(arena.buffer, np.uint8, 1).ctypes.data)


CACHED_BYTES_MAX = 256 << 20
"""Most unused memory that is cached: the default size of a device arena."""

GRAIN_BYTES = 64 << 10
"""Sizes are multiples of this, so that inputs of slightly different sizes reuse the same blocks."""

SPARE_FACTOR = 2
"""A cached block is reused for sizes of at least half of it."""


class ScratchBlock:
    """A block of device memory."""

    __slots__ = ("address", "size_bytes")

    def __init__(self, address: int, size_bytes: int) -> None:
        self.address = address
        self.size_bytes = size_bytes


class ScratchPool:
    """A caching allocator of device memory. Not thread-safe, as the driver is not."""

    def __init__(self, driver: GpuDriver, cached_bytes_max: int = CACHED_BYTES_MAX) -> None:
        self._driver = driver
        self._kept_bytes_max = cached_bytes_max
        self._cached: list[tuple[int, int]] = []  # (size, address), smallest first
        self.cached_bytes = 0

    def allocate(self, size_bytes: int) -> ScratchBlock:
        """Allocate at least `size_bytes`; frees the cache before it raises DeviceOutOfMemory."""
        size = align_up(max(size_bytes, 1), GRAIN_BYTES)
        at = bisect_left(self._cached, (size, 0))
        if at < len(self._cached) and self._cached[at][0] <= SPARE_FACTOR * size:
            size, address = self._cached.pop(at)
            self.cached_bytes -= size
            return ScratchBlock(address, size)
        try:
            return ScratchBlock(self._driver.allocate(size), size)
        except DeviceOutOfMemory:
            if not self._cached:
                raise
            self.trim()
            return ScratchBlock(self._driver.allocate(size), size)

    def free(self, blocks: Iterable[ScratchBlock]) -> None:
        """Return blocks to the cache; frees the largest blocks beyond the cache limit."""
        for block in blocks:
            insort(self._cached, (block.size_bytes, block.address))
            self.cached_bytes += block.size_bytes
        while self.cached_bytes > self._kept_bytes_max:
            self._free_largest()

    def trim(self) -> None:
        """Free the cache."""
        while self._cached:
            self._free_largest()

    def _free_largest(self) -> None:
        size, address = self._cached.pop()
        self.cached_bytes -= size
        self._driver.free(address)


@dataclass(frozen=True, slots=True)
class _PendingEvents:
    """Events of a dispatch, or with dispatch 0 of a Settle token."""

    events: Sequence[int]
    dispatch: int
    token: int
    free: Callable[[], None]


class CompletionThread:
    """Waits for device events and sends Released and Settled; several dispatches in one message.

    The thread only waits and sends. The worker's own thread frees device memory (`reap`), because drivers are not
    thread-safe. When the device is lost, `lost` is called, which ends the process. `send`: thread-safe.
    """

    def __init__(
        self, driver: GpuDriver, send: Callable[[FromWorker], None], lost: Callable[[DriverError], None]
    ) -> None:
        self._driver = driver
        self._send = send
        self._lost = lost
        self._awaited: SimpleQueue[_PendingEvents | None] = SimpleQueue()
        self._done: deque[_PendingEvents] = deque()  # completed and not freed yet
        self._thread: threading.Thread | None = None

    def notify_released(self, dispatch: int, event: int, free: Callable[[], None]) -> None:
        """Send Released for a dispatch after its event; a later `reap` calls `free`."""
        self._put(_PendingEvents((event,), dispatch, 0, free))

    def notify_settled(self, token: int, events: Sequence[int], free: Callable[[], None]) -> None:
        """Send Settled after all of these events."""
        self._put(_PendingEvents(tuple(events), 0, token, free))

    def reap(self) -> None:
        """Free the memory of completed work; called by the thread that owns the driver."""
        while self._done:
            self._done.popleft().free()

    def stop(self) -> None:
        """Stop the thread after all pending events."""
        if self._thread is not None:
            self._awaited.put(None)
            self._thread.join()
            self.reap()

    def _put(self, awaited: _PendingEvents) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._serve, name="weftline-completion", daemon=True)
            self._thread.start()
        self._awaited.put(awaited)

    def _serve(self) -> None:
        try:
            self._wait_all()
        except ChannelClosed:
            return  # the runtime has ended; the worker's own thread ends the process
        except DriverError as error:
            self._lost(error)

    def _wait_all(self) -> None:
        waiting: deque[_PendingEvents] = deque()
        ended = False
        while waiting or not ended:
            if not waiting:
                ended = not self._enqueue(waiting, self._awaited.get())
                continue
            done = [waiting.popleft()]
            for event in done[0].events:
                self._driver.wait_event(event)
            while not ended and not self._awaited.empty():
                ended = not self._enqueue(waiting, self._awaited.get())
            while waiting and all(self._driver.finished(event) for event in waiting[0].events):
                done.append(waiting.popleft())
            self._notify(done)

    def _enqueue(self, waiting: deque[_PendingEvents], one: _PendingEvents | None) -> bool:
        if one is not None:
            waiting.append(one)
        return one is not None

    def _notify(self, done: Sequence[_PendingEvents]) -> None:
        self._done.extend(done)
        dispatches = tuple(one.dispatch for one in done if not one.token)
        if dispatches:
            self._send(Released(dispatches))
        for one in done:
            if one.token:
                self._send(Settled(one.token))


class OpenedDevice(NamedTuple):
    """A worker's device, the DeviceUp to send, and the arena's descriptor; each None where there is none."""

    device: WorkerDevice | None
    device_up: DeviceUp | None
    fd: int | None = None


def open_device(message: OpenSteps) -> OpenedDevice:
    """Open a worker's device and create its arena; LimitReached when the device has too little memory."""
    if not message.device:
        return OpenedDevice(None, None)
    try:
        driver = open_driver(message.device)
    except (MissingPackage, DriverError) as error:
        _log.warning("device %s: tensors pass through host memory: %s", message.device, error)
        device_up = (
            DeviceUp(message.device, 0, "host", why=str(error)[:REASON_CHARS_MAX])
            if message.device_arena_bytes
            else None
        )
        return OpenedDevice(None, device_up)
    if not message.device_arena_bytes:
        return OpenedDevice(WorkerDevice(driver), None)
    try:
        arena, share_mode, why = probe(driver, message.device_arena_bytes)
    except DeviceOutOfMemory as error:
        raise LimitReached(
            f"{message.device} has too little memory for an arena of {message.device_arena_bytes} bytes ({error})\n"
            "    fix: lower gpu.arena_bytes, or put fewer steps on this device"
        ) from None
    events = None
    if arena is not None and message.ordering == "event":
        try:
            events = SharedEvents.create(driver)
        except DriverError as error:
            why = "; ".join(filter(None, (why, f"events: {error}")))
    if why:
        _log.warning("device %s: tensors are shared by %s: %s", message.device, share_mode, why)
    device, why = WorkerDevice(driver, arena, events), why[:REASON_CHARS_MAX]
    if arena is None:
        return OpenedDevice(device, DeviceUp(message.device, 0, share_mode, why=why))
    handles = events.handles if events is not None else ()
    device_up = DeviceUp(message.device, arena.size_bytes, share_mode, arena.handle, handles, why)
    return OpenedDevice(device, device_up, arena.fd if arena.fd >= 0 else None)
