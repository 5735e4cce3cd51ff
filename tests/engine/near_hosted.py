"""A step hosted on a fake device, for tests: a device arena of its own, and one of another worker's."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import numpy as np

from tests.engine.hosted import ARENA_BYTES, OTHER, OWN, Bench, Calls
from weftline.engine import messages as msg
from weftline.engine.worker.hosting import HostedStep
from weftline.engine.worker.near import NearMemory
from weftline.errors import LimitReached
from weftline.nodes.contract import Batch, Outputs
from weftline.shm.block import Block, align_up
from weftline.shm.device.arena import DeviceArena
from weftline.shm.device.events import SharedEvents
from weftline.shm.device.fake import FakeGpu
from weftline.shm.device.fake_machine import FakeMachine
from weftline.shm.lease import EVENT_BYTES
from weftline.shm.view import dtype_name

OWN_NEAR, OTHER_NEAR = 3, 4
NEAR_BYTES = 2 << 20
"""What the fake device deals in at least."""

__all__ = ["ARENA_BYTES", "NEAR_BYTES", "OTHER", "OTHER_NEAR", "OWN", "OWN_NEAR", "NearBench"]


class Counting(FakeGpu):
    """A fake that notes its copies: how many bytes each moved."""

    def __init__(self) -> None:
        super().__init__("fake:0")
        self.copies: list[int] = []

    def copy(self, to: int, source: int, size_bytes: int, stream: int) -> None:
        self.copies.append(size_bytes)
        super().copy(to, source, size_bytes, stream)


class NearBench(Bench):
    """The memory of a worker with a device.

    shares:  it has an arena there, and sees another worker's; else its device shares nothing.
    machine: a made-up one that both are processes of; without it streams do at once what is put on them.
    """

    def __init__(self, shares: bool = True, marks: bool = False, machine: FakeMachine | None = None) -> None:
        super().__init__()
        self.counting = Counting()
        self.driver: FakeGpu = self.counting if machine is None else machine.process()
        self.theirs = FakeGpu("fake:0") if machine is None else machine.process()
        self.asked_near: list[list[int]] = []
        self._near_next = {OWN_NEAR: 0, OTHER_NEAR: 0}
        self.other: DeviceArena | None = None
        if not shares:
            self.near = NearMemory(self.driver)
        else:
            own = DeviceArena.create(self.driver, NEAR_BYTES)
            self.near = NearMemory(self.driver, own, SharedEvents.create(self.driver, 4) if marks else None)
            self.near.attach(msg.AttachDevice(OWN_NEAR, 0))
            self.other = DeviceArena.create(self.theirs, NEAR_BYTES)
            self.their_events = SharedEvents.create(self.theirs, 2)
            told = msg.AttachDevice(OTHER_NEAR, NEAR_BYTES, "descriptor", events=self.their_events.handles)
            self.near.attach(told, os.dup(self.other.fd))
        self.memory.use(self.near)

    def near_block(self, size_bytes: int, arena: int = OWN_NEAR) -> Block:
        """Lease a block on the device; LimitReached when the arena is full."""
        offset = self._near_next[arena]
        if offset + size_bytes > NEAR_BYTES:
            raise LimitReached("no room")
        self._near_next[arena] = align_up(offset + size_bytes, 4096)
        return Block(arena, offset, size_bytes, offset + 1)

    @property
    def copies(self) -> list[int]:
        """How many bytes each copy of the worker's driver moved."""
        return self.counting.copies

    def late_value(self, array: np.ndarray, event: int) -> msg.Value:
        """Return a value that another worker's stream is still writing; it has put that there, and marked it."""
        (value,) = self.near_values([np.zeros_like(array)])
        ready = Block(-OTHER_NEAR, event * EVENT_BYTES, EVENT_BYTES, 50 + event).place(0, EVENT_BYTES)
        if self.other is None or value.near is None:
            raise RuntimeError("this device shares nothing")
        stream = self.theirs.stream()
        self.theirs.copy(self.other.address + value.near.offset, array.ctypes.data, array.nbytes, stream)
        self.theirs.record(self.their_events.at(ready), stream)
        return msgspec.structs.replace(value, ready=ready)

    def near_values(self, arrays: Sequence[np.ndarray], kind: str = "tensor", dtype: str = "") -> list[msg.Value]:
        """Return values that lie on the device alone, side by side in the other worker's arena."""
        if self.other is None:
            raise RuntimeError("this device shares nothing")
        size = arrays[0].nbytes
        block = self.near_block(size * len(arrays), OTHER_NEAR)
        values = []
        for at, array in enumerate(arrays):
            place = block.place(at * size, size)
            ctypes.memmove(self.other.address + place.offset, np.ascontiguousarray(array).ctypes.data, size)
            values.append(msg.Value(kind, dtype or dtype_name(array.dtype), array.shape, near=place))
        return values

    def on_gpu(
        self,
        run: Callable[[Batch], Outputs],
        inputs: dict[str, str],
        outputs: dict[str, str],
        near_outputs: dict[str, str] | None = None,
        *,
        index: int = 0,
        items_max: int = 8,
        mutates_inputs: bool = False,
        near_inputs: Sequence[str] | None = None,
        finite: bool = False,
    ) -> HostedStep:
        """Return a step on the device; it takes all of its inputs there unless told otherwise."""
        step = msg.StepToOpen(
            index,
            f"step{index}",
            "calls",
            {},
            tuple(inputs.items()),
            tuple(outputs.items()),
            "fake:0",
            items_max,
            mutates_inputs,
            near_inputs=tuple(inputs) if near_inputs is None else tuple(near_inputs),
            near_outputs=near_outputs or {},
            finite=finite,
        )
        return HostedStep(step, Calls(run), self.memory, self.cancels)

    def seen(self, value: msg.Value) -> np.ndarray:
        """Return what lies on the device at a value's place."""
        return np.array(np.asarray(self.near.view(value)))

    def made(self, shape: tuple[int, ...]) -> np.ndarray:
        """Return zeros in device memory of the worker's own, as a framework would have them."""
        size = int(np.prod(shape)) * 4
        held = (ctypes.c_uint8 * size).from_address(self.driver.allocate(size))
        array = np.frombuffer(held, np.float32).reshape(shape)
        array[:] = 0
        return array

    def event(self, index: int) -> Block:
        """Return one of the worker's own events, as it is leased."""
        return Block(-OWN_NEAR, index * EVENT_BYTES, EVENT_BYTES, 100 + index)

    def close(self) -> None:
        super().close()
        if self.other is not None:
            self.other.close()
        if self.near.arena is not None:
            self.near.arena.close()

    def _need(self, sizes: Sequence[int], near: Sequence[int]) -> tuple[Sequence[Block], Sequence[Block]]:
        blocks, _ = super()._need(sizes, near)
        self.asked_near.append(list(near))
        return blocks, [self.near_block(size) for size in near]


def kinds(values: Sequence[Any]) -> list[str]:
    return [type(value).__name__ for value in values]
