"""What a worker sees of shared memory: host arenas, and its device where it has one.

A value is read where it lies. What lies on the device alone and is read as an array is brought down, once in a
dispatch. Outputs that are part of an input, or were written where they will be read from, are found again here; how the
others get to their places is `giving`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from weftline.engine.messages import Value
from weftline.engine.packed import Packed, Source
from weftline.engine.values import live
from weftline.engine.worker.device_work import DeviceWork
from weftline.engine.worker.near import NearMemory
from weftline.shm.arena import HostArena
from weftline.shm.block import Block, Place
from weftline.shm.device.tensor import DeviceTensor
from weftline.shm.spec import TensorSpec
from weftline.shm.view import offset_in

Need = Callable[[Sequence[int], Sequence[int]], tuple[Sequence[Block], Sequence[Block]]]
"""Ask for one block of each size, in host memory and on the device; LimitReached when there is no room."""


class Memory:
    """Every attached arena by id, the id of the worker's own, and how to ask for room in it.

    near: the worker's device; None without one.
    work: what the dispatch in hand does there, or the last one if it goes on there; else None.
    copied_bytes: bytes copied into shared memory since somebody last set it to 0.
    """

    def __init__(self, arenas: dict[int, HostArena], own: int, need: Need, near: NearMemory | None = None) -> None:
        self.arenas = arenas
        self.own = own
        self.need = need
        self.near = near
        self.work: DeviceWork | None = None
        self.copied_bytes = 0

    @property
    def own_arena(self) -> HostArena:
        return self.arenas[self.own]

    # arenas come and go

    def make(self, arena: int, own: HostArena) -> None:
        """Take the worker's own arena, known by `arena` from now on."""
        self.arenas[arena], self.own = own, arena

    def use(self, near: NearMemory) -> None:
        """Have a device from now on: host arenas are page-locked, so that copies between both run beside the host."""
        self.near = near
        for arena in self.arenas.values():
            near.lock_pages(arena)

    def name(self, arena: int) -> None:
        """Learn the id of the worker's own arena."""
        self.arenas[arena] = self.arenas.pop(self.own)
        self.own = arena

    def attach(self, arena: int, other: HostArena) -> None:
        """Take another process's arena, in place of one of that id."""
        self.retire(arena)
        self.arenas[arena] = other
        if self.near is not None:
            self.near.lock_pages(other)

    def retire(self, arena: int) -> None:
        """Let an arena go: its writer is gone and nobody needs its bytes."""
        known = self.arenas.pop(arena, None)
        if known is not None:
            if self.near is not None:
                self.near.unlock_pages(known)
            known.close()
        elif self.near is not None:
            self.near.retire(arena)

    # a dispatch

    def begin(self) -> None:
        """A dispatch, or a round of a stream, begins."""
        self.copied_bytes = 0
        if self.near is not None:
            self.work = DeviceWork(self.near, self.arenas)

    def end(self, ready: Block | None = None) -> bool:
        """A dispatch is over: wait for its work on the device, or leave it there; whether it goes on.

        ready: the event to mark it with, if it may go on; `work` stays then, to be released once that has come.
        """
        if self.work is None or self.near is None:
            return False
        goes_on = self.work.end(None if ready is None else self.near.mark_of(ready))
        if not goes_on:
            self.work = None
        return goes_on

    # values

    def live(self, source: Source) -> Any:
        """Return what a reader in this process sees of a value, arrays in host memory and read-only."""
        if self.near is None:
            return live(source, self.arenas)
        if source.items is not None:
            return [self.live(item) for item in source.items]
        if self._is_near_alone(source):
            if self.work is not None:
                return self.work.brought(source)
            if isinstance(source, Value):
                return self.near.bring(source)
        return live(source, self.arenas)

    def lies_at(self, packed: Packed, sources: Sequence[Source], room: Place | None = None) -> Value | None:
        """Return an array as it lies in shared memory already: in `room`, or as (part of) one of `sources`."""
        if packed.array is None:
            return None
        if room is not None:
            offset = offset_in(self.own_arena, packed.array)
            if offset is not None and _within(offset, packed.size_bytes, room):
                return packed.at(room._replace(offset=offset, size_bytes=packed.size_bytes))
        for source in sources:
            if source.items:
                found = self.lies_at(packed, source.items)
                if found is not None:
                    return found
            place = source.place if isinstance(source, Value) else None
            if place is not None:
                offset = offset_in(self.arenas[place.arena], packed.array)
                if offset is not None and _within(offset, packed.size_bytes, place):
                    return packed.at(place._replace(offset=offset, size_bytes=packed.size_bytes))
        return None

    def lies_near(self, packed: Packed, sources: Sequence[Source], room: Place | None = None) -> Value | None:
        """Return a tensor as it lies in a device arena already: in `room`, or as (part of) one of `sources`.

        A part of a value that lies in host memory too lies there in the same part.
        """
        if packed.near is None or self.near is None:
            return None
        if room is not None:
            offset = self.near.offset_of(packed.near, self.near.own)
            if offset is not None and _within(offset, packed.size_bytes, room):
                place = room._replace(offset=offset, size_bytes=packed.size_bytes)
                return Value(packed.kind, packed.dtype, packed.shape, near=place)
        for source in sources:
            if source.items:
                found = self.lies_near(packed, source.items)
                if found is not None:
                    return found
            near = source.near if isinstance(source, Value) else None
            if near is not None and isinstance(source, Value):
                offset = self.near.offset_of(packed.near, near.arena)
                if offset is not None and _within(offset, packed.size_bytes, near):
                    here = near._replace(offset=offset, size_bytes=packed.size_bytes)
                    host = source.place
                    if host is not None:
                        start = host.offset + offset - near.offset
                        host = host._replace(offset=start, size_bytes=packed.size_bytes)
                    return Value(packed.kind, packed.dtype, packed.shape, None, host, None, here, source.ready)
        return None

    def array_in(self, room: Place, dtype: np.dtype, shape: tuple[int, ...]) -> np.ndarray | None:
        """Return a writable array that fills `room`, or None when it does not fill it exactly."""
        if int(np.prod(shape)) * dtype.itemsize != room.size_bytes:
            return None
        return np.ndarray(shape, dtype, self.own_arena.buffer, room.offset)

    def tensor_in(self, room: Place, spec: TensorSpec) -> DeviceTensor | None:
        """Return a writable tensor on the device that fills `room`, or None when it does not fill it exactly."""
        if self.near is None or self.near.arena is None or spec.size_bytes != room.size_bytes:
            return None
        return self.near.arena.view(room, spec, writable=True)

    def _is_near_alone(self, source: Source) -> bool:
        if isinstance(source, Packed):
            return source.near is not None and source.array is None
        return source.near is not None and source.place is None and source.data is None


def _within(offset: int, size_bytes: int, place: Place) -> bool:
    return place.offset <= offset and offset + size_bytes <= place.offset + place.size_bytes
