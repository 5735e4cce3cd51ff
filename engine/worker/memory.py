"""Shared memory of a worker: the host arenas, the device, and reading values in either.

A value is read in place. A device-only value that is read as an array is downloaded once per dispatch. `find_in_host`
and `find_on_device` find outputs that are part of an input or were written into a preallocated block. Placement of
other outputs is in outputs.py. `fetch` copies device-only tensors to host memory for a process that cannot attach the
device arena. Those are few: the ones in transit when the first reader failed to attach it. From then on the worker
places all outputs in host memory (messages.UseHostOutputs).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from weftline.engine.protocol.messages import REASON_CHARS_MAX, Fetch, Fetched, Value
from weftline.engine.protocol.packed import Packed, Source
from weftline.engine.protocol.values import live
from weftline.engine.worker.device import WorkerDevice
from weftline.engine.worker.device_dispatch import DeviceDispatch
from weftline.engine.worker.threads import EngineLock
from weftline.errors import LimitReached, StepError
from weftline.shm.arena import HostArena
from weftline.shm.block import Block, Place
from weftline.shm.device.tensor import DeviceTensor
from weftline.shm.spec import TensorSpec
from weftline.shm.view import bytes_view, offset_in

Allocate = Callable[[Sequence[int], Sequence[int]], tuple[Sequence[Block], Sequence[Block]]]
"""Allocate one block of each size, in host memory and on the device; LimitReached when there is no memory."""


class Memory:
    """The attached host arenas by id, the worker's own arena, its device, and block allocation.

    device: the worker's device; None without one.
    work: what the dispatch in hand does there, or the last one if it goes on there; else None.
    copied_bytes: bytes copied into shared memory since this was last set to 0.
    lock: held while the engine's code runs, where steps have threads of their own; else None.
    """

    def __init__(
        self, arenas: dict[int, HostArena], own: int, allocate: Allocate, device: WorkerDevice | None = None
    ) -> None:
        self.arenas = arenas
        self.own_id = own
        self.allocate = allocate
        self.device = device
        self.dispatch: DeviceDispatch | None = None
        self.copied_bytes = 0
        self.lock: EngineLock | None = None
        self._copies: tuple[int, int] | None = None  # upload and download streams of a step thread
        self._thread_views: list[Memory] = []

    def for_thread(self, allocate: Allocate, lock: EngineLock) -> Memory:
        """Return the same memory for a step thread: with its own dispatch and copy streams."""
        view = Memory(self.arenas, self.own_id, allocate, self.device)
        view.lock = lock
        if self.device is not None:
            view._copies = self.device.new_stream(), self.device.new_stream()
        self._thread_views.append(view)
        return view

    @property
    def own_arena(self) -> HostArena:
        return self.arenas[self.own_id]

    # arenas

    def set_own_arena(self, arena: int, own: HostArena) -> None:
        """Set the worker's own arena and its id."""
        self.arenas[arena], self.own_id = own, arena

    def set_device(self, device: WorkerDevice) -> None:
        """Set the device: page-locks the host arenas, so that copies run asynchronously."""
        self.device = device
        for arena in self.arenas.values():
            device.lock_pages(arena)

    def set_own_id(self, arena: int) -> None:
        """Set the id of the worker's own arena."""
        self.arenas[arena] = self.arenas.pop(self.own_id)
        self.own_id = arena
        for view in self._thread_views:
            view.own_id = arena

    def attach(self, arena: int, other: HostArena) -> None:
        """Attach another process's arena; replaces one of the same id."""
        self.retire(arena)
        self.arenas[arena] = other
        if self.device is not None:
            self.device.lock_pages(other)

    def retire(self, arena: int) -> None:
        """Detach an arena whose owner has ended and that has no readers left."""
        known = self.arenas.pop(arena, None)
        if known is not None:
            if self.device is not None:
                self.device.unlock_pages(known)
            known.close()
        elif self.device is not None:
            self.device.retire(arena)

    # dispatches

    def begin_dispatch(self) -> None:
        """Begin a dispatch."""
        self.copied_bytes = 0
        if self.device is not None:
            self.dispatch = DeviceDispatch(self.device, self.arenas, self._copies)

    def end_dispatch(self, ready: Block | None = None) -> bool:
        """End a dispatch: wait for its device work, or record an event; returns whether the work is unfinished.

        ready: the event to record, if the work may stay unfinished; `dispatch` is then released after that event.
        """
        if self.dispatch is None or self.device is None:
            return False
        goes_on = self.dispatch.end(None if ready is None else self.device.event_of(ready))
        if not goes_on:
            self.dispatch = None
        return goes_on

    # values

    def live(self, source: Source) -> Any:
        """Return a value for a reader in this process; arrays are in host memory and read-only."""
        if self.device is None:
            return live(source, self.arenas)
        if source.items is not None:
            return [self.live(item) for item in source.items]
        if self._is_device_only(source):
            if self.dispatch is not None:
                return self.dispatch.to_host(source)
            if isinstance(source, Value):
                return self.device.download(source)
        return live(source, self.arenas)

    def find_in_host(self, packed: Packed, sources: Sequence[Source], block: Place | None = None) -> Value | None:
        """Find an array in shared memory: in the block `block`, or as (part of) one of `sources`."""
        if packed.array is None:
            return None
        if block is not None:
            offset = offset_in(self.own_arena, packed.array)
            if offset is not None and _within(offset, packed.size_bytes, block):
                return packed.at(block._replace(offset=offset, size_bytes=packed.size_bytes))
        for source in sources:
            if source.items:
                found = self.find_in_host(packed, source.items)
                if found is not None:
                    return found
            place = source.place if isinstance(source, Value) else None
            if place is not None:
                offset = offset_in(self.arenas[place.arena], packed.array)
                if offset is not None and _within(offset, packed.size_bytes, place):
                    return packed.at(place._replace(offset=offset, size_bytes=packed.size_bytes))
        return None

    def find_on_device(self, packed: Packed, sources: Sequence[Source], block: Place | None = None) -> Value | None:
        """Find a tensor in a device arena: in the block `block`, or as (part of) one of `sources`.

        A value in both memories has the same layout in both.
        """
        if packed.tensor is None or self.device is None:
            return None
        if block is not None:
            offset = self.device.offset_of(packed.tensor, self.device.own_id)
            if offset is not None and _within(offset, packed.size_bytes, block):
                place = block._replace(offset=offset, size_bytes=packed.size_bytes)
                return Value(packed.kind, packed.dtype, packed.shape, device_place=place)
        for source in sources:
            if source.items:
                found = self.find_on_device(packed, source.items)
                if found is not None:
                    return found
            device = source.device_place if isinstance(source, Value) else None
            if device is not None and isinstance(source, Value):
                offset = self.device.offset_of(packed.tensor, device.arena)
                if offset is not None and _within(offset, packed.size_bytes, device):
                    here = device._replace(offset=offset, size_bytes=packed.size_bytes)
                    host = source.place
                    if host is not None:
                        start = host.offset + offset - device.offset
                        host = host._replace(offset=start, size_bytes=packed.size_bytes)
                    return Value(packed.kind, packed.dtype, packed.shape, None, host, None, here, source.ready)
        return None

    def array_in(self, block: Place, dtype: np.dtype, shape: tuple[int, ...]) -> np.ndarray | None:
        """Return a writable array in a block, or None when the sizes differ."""
        if int(np.prod(shape)) * dtype.itemsize != block.size_bytes:
            return None
        return np.ndarray(shape, dtype, self.own_arena.buffer, block.offset)

    def tensor_in(self, block: Place, spec: TensorSpec) -> DeviceTensor | None:
        """Return a writable device tensor in a block, or None when the sizes differ."""
        if self.device is None or self.device.arena is None or spec.size_bytes != block.size_bytes:
            return None
        return self.device.arena.view(block, spec, writable=True)

    def _is_device_only(self, source: Source) -> bool:
        if isinstance(source, Packed):
            return source.tensor is not None and source.array is None
        return source.device_place is not None and source.place is None and source.data is None


def _within(offset: int, size_bytes: int, place: Place) -> bool:
    return place.offset <= offset and offset + size_bytes <= place.offset + place.size_bytes


def fetch(memory: Memory, message: Fetch) -> Fetched:
    """Copy device-only tensors to the host arena; waits for the blocks and for the copies."""
    if memory.device is None:
        return Fetched(message.token, (), "its worker has no device driver")
    try:
        return Fetched(message.token, _copied(memory, memory.device, message.values))
    except (LimitReached, StepError) as error:
        return Fetched(message.token, (), str(error)[:REASON_CHARS_MAX])


def _copied(memory: Memory, device: WorkerDevice, values: tuple[Value, ...]) -> tuple[Value, ...]:
    tensors = [device.view(value) for value in values]
    blocks, _ = memory.allocate([tensor.nbytes for tensor in tensors], ())
    placed = []
    for value, tensor, block in zip(values, tensors, blocks, strict=True):
        place = block.place(0, tensor.nbytes)
        if value.ready is not None:
            device.wait_ready(device.download_stream, value.ready)
        host = np.frombuffer(bytes_view(memory.own_arena, place), np.uint8)
        device.driver.copy(int(host.ctypes.data), tensor.address, tensor.nbytes, device.download_stream)
        placed.append(Value(value.kind, value.dtype, value.shape, place=place))
    device.driver.synchronize(device.download_stream)
    return tuple(placed)
