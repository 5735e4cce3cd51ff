"""A worker's device as its steps use it: the driver, its arenas and events, and the streams that copies go on.

What lies in the worker's own arena it writes, what lies in the others' of its device it reads in place. Host memory is
page-locked where the driver agrees, so that copies of it run beside the host. Copies to the device have a stream of
their own and copies from it another, so that both overlap with the steps' work; each step's own stream is its caller's.
Nothing here decides what goes where: `device_work` does that for a dispatch, `giving` for what it answers.
"""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from weftline.engine.messages import AttachDevice, AttachFailed, Value
from weftline.engine.worker.scratch import Scratch
from weftline.errors import StepError
from weftline.shm.arena import HostArena
from weftline.shm.block import Block, Place
from weftline.shm.device.arena import DeviceArena
from weftline.shm.device.driver import DeviceLost, DriverError, GpuDriver
from weftline.shm.device.events import SharedEvents
from weftline.shm.device.foreign import as_device
from weftline.shm.device.names import index_of, is_fake
from weftline.shm.device.tensor import DeviceTensor
from weftline.shm.lease import EVENT_BYTES
from weftline.shm.spec import TensorSpec

OWN_DEVICE_ARENA = -1
"""The key of the worker's own device arena until the runtime tells its id; no arena's id is below 0."""

_log = logging.getLogger(__name__)


class NearMemory:
    """What a worker sees of its device's memory. For the worker's own thread alone.

    arena:   its own, None where it gives nothing there or the device shares nothing.
    gives:   tensors are placed there for readers in other processes.
    events:  those of its own that mark what it gives; None with ordering 'host'.
    into, out: the streams of copies to the device and from it.
    """

    def __init__(self, driver: GpuDriver, arena: DeviceArena | None = None, events: SharedEvents | None = None) -> None:
        self.driver = driver
        self.device = driver.device
        self.arena = arena
        self.gives = arena is not None
        self.own = OWN_DEVICE_ARENA
        self.events = events
        self.scratch = Scratch(driver)
        self.into = driver.stream()
        self.out = driver.stream()
        self._arenas: dict[int, DeviceArena] = {} if arena is None else {OWN_DEVICE_ARENA: arena}
        self._refused: dict[int, str] = {}
        self._imported: dict[int, SharedEvents] = {}
        self._marks: dict[int, int] = {}  # by stream, the event that tells other streams how far it is
        self._streams = [self.into, self.out]
        self._contexts: dict[int, Any] = {}

    # arenas

    def attach(self, message: AttachDevice, descriptor: int = -1) -> AttachFailed | None:
        """Map another worker's arena, or learn the id of the own one; takes over the descriptor.

        Returns what to say when the driver refuses the arena, or its events: what lies there alone, or is still being
        written, cannot be read here, and who needs it is told why.
        """
        if not message.size_bytes:
            if self.arena is not None:
                self._arenas[message.arena] = self._arenas.pop(self.own)
                self.own = message.arena
            return None
        refused = message.arena
        try:
            arena = DeviceArena.attach(self.driver, message.size_bytes, message.rung, descriptor, message.handle)
            refused = -message.arena
            self._arenas[message.arena] = arena
            if message.events:
                self._imported[message.arena] = SharedEvents.attach(self.driver, message.events)
        except DeviceLost:
            raise
        except DriverError as error:
            self._refused[refused] = str(error)
            return AttachFailed(refused, str(error))
        return None

    def retire(self, arena: int) -> None:
        """Let an arena go whose owner is gone; its mapping ends with the last look at it."""
        for refused in (arena, -arena):
            self._refused.pop(refused, None)
        events = self._imported.pop(arena, None)
        if events is not None:
            events.close()
        known = self._arenas.pop(arena, None)
        if known is not None:
            known.close()

    def sees(self, value: Value) -> bool:
        """Whether a value lies in an arena that is mapped here, and can be waited for if it is still being written."""
        if value.near is None or value.near.arena not in self._arenas:
            return False
        return value.ready is None or self._events(value.ready) is not None

    def view(self, value: Value) -> DeviceTensor:
        """Return a tensor where it lies; StepError when its arena is not mapped here."""
        place = value.near
        if place is None or place.arena not in self._arenas:
            why = self._refused.get(place.arena if place else -1, "it belongs to another device")
            raise StepError(
                f"an input lies in device memory that cannot be read here ({why})\n"
                "    fix: keep the steps in one process (the same `worker`), or let processes share the device's memory"
            )
        return self._arenas[place.arena].view(place, TensorSpec(value.dtype, value.shape))

    def offset_of(self, tensor: DeviceTensor, arena: int) -> int | None:
        """Return where in an arena a tensor's bytes begin, or None when they lie elsewhere."""
        return self._arenas[arena].place_of(tensor) if arena in self._arenas else None

    def lock_pages(self, arena: HostArena) -> None:
        """Page-lock a host arena; a refusal makes copies slower and is noted."""
        try:
            self.driver.lock_pages(_address(arena), arena.size_bytes, arena.writable)
        except DriverError as refused:
            _log.info("host memory is not page-locked: %s", refused)

    def unlock_pages(self, arena: HostArena) -> None:
        """Undo `lock_pages`, before the arena is closed."""
        with contextlib.suppress(DriverError):  # it was refused
            self.driver.unlock_pages(_address(arena))

    # streams

    def stream(self) -> int:
        """Make a stream for a step's own work."""
        stream = self.driver.stream()
        self._streams.append(stream)
        return stream

    def order(self, first: int, then: int) -> None:
        """Have what is put on stream `then` from now on wait for what is on stream `first` so far."""
        if first == then:
            return
        if first not in self._marks:
            self._marks[first] = self.driver.event()
        self.driver.record(self._marks[first], first)
        self.driver.wait(then, self._marks[first])  # captures what is marked now: the event may be used again

    def mark_of(self, ready: Block) -> int | None:
        """Return the worker's own event that was leased to mark a dispatch; None with ordering 'host'."""
        return None if self.events is None else self.events.at(ready.place(0, EVENT_BYTES))

    def wait_ready(self, stream: int, ready: Place) -> None:
        """Have a stream wait for what the event at `ready` marks, in whichever worker it was recorded."""
        events = self._events(ready)
        if events is None:
            why = self._refused.get(ready.arena, "its worker is not known here")
            raise StepError(f"an input is still being written on the device, and cannot be waited for here ({why})")
        self.driver.wait(stream, events.at(ready))

    def _events(self, ready: Place) -> SharedEvents | None:
        """Return the events that one is among; None when they cannot be had here."""
        return self.events if -ready.arena == self.own else self._imported.get(-ready.arena)

    def marks_now(self) -> list[int]:
        """Return events, to be destroyed by the caller, that mark all there is on every stream now."""
        events = []
        for stream in self._streams:
            event = self.driver.event()
            self.driver.record(event, stream)
            events.append(event)
        return events

    def destroy(self, events: Sequence[int]) -> None:
        """Be done with events of `marks_now`."""
        for event in events:
            self.driver.destroy_event(event)

    def meet(self, stream: int) -> None:
        """See to it that a node's call finds on its device what is on `stream` so far.

        A GPU takes the call's work in its turn. On a fake device the CPU computes at once, so that what it reads must
        be there by then; and a call that is the first to load torch works on torch's own stream, which waits for none.
        """
        if is_fake(self.device) or _torch() is None:
            self.driver.synchronize(stream)

    @contextlib.contextmanager
    def on(self, stream: int) -> Iterator[None]:
        """Have torch put its work on `stream` meanwhile, where it is loaded and the device is CUDA's."""
        if is_fake(self.device):
            yield
            return
        torch = _torch()
        if torch is None:
            yield
            if (torch := _torch()) is not None:
                torch.cuda.synchronize(index_of(self.device))  # it was loaded by this call, and used its own stream
            return
        if stream not in self._contexts:
            self._contexts[stream] = torch.cuda.ExternalStream(stream, device=index_of(self.device))
        with torch.cuda.stream(self._contexts[stream]):
            yield

    def check(self) -> None:
        """Wait for everything on the device; DeviceLost when it cannot be used any more."""
        for stream in self._streams:
            self.driver.synchronize(stream)

    # single values

    def on_device(self, value: Any, stream: int) -> DeviceTensor | None:
        """Return what a node gave, if it lies on this device; what still writes it is put before `stream`."""
        return as_device(value, self.device, self.driver, stream)

    def look(self, tensor: DeviceTensor, stream: int) -> Any:
        """Return a tensor as torch sees it, for work inside `on(stream)`.

        Where torch is not loaded, or is made for the CPU alone: a copy in host memory, taken when `stream` comes to it.
        """
        if is_fake(self.device) or _torch() is not None:
            return tensor.torch()
        return tensor.host(self.driver, stream)

    def bring(self, value: Value) -> np.ndarray:
        """Return a copy in host memory of a tensor that lies on the device; waits for it."""
        tensor = self.view(value)
        if value.ready is not None:
            self.wait_ready(self.out, value.ready)
        return tensor.host(self.driver, self.out)


def _torch() -> Any:
    """Return torch, if it is loaded and made for CUDA; beside ONNX Runtime it may be there for the CPU alone."""
    torch = sys.modules.get("torch")
    return torch if torch is not None and torch.backends.cuda.is_built() else None


def _address(arena: HostArena) -> int:
    return int(np.frombuffer(arena.buffer, np.uint8, 1).ctypes.data)
