"""Test fixture: steps hosted on a fake device, with the worker's own device arena and another worker's."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import numpy as np

from tests.engine.hosted import ARENA_BYTES, OTHER, OWN, Bench, Calls
from weftline.engine.protocol import messages as msg
from weftline.engine.worker.batch import HostedStep
from weftline.engine.worker.device import WorkerDevice
from weftline.errors import LimitReached
from weftline.nodes.contract import Batch, Outputs
from weftline.pipelines.spec.policy import BatchPolicy, CallPolicy
from weftline.shm.block import Block, align_up
from weftline.shm.device.arena import DeviceArena
from weftline.shm.device.events import SharedEvents
from weftline.shm.lease import EVENT_BYTES
from weftline.shm.view import dtype_name
from weftline.testing.fake_gpu.gpu import FakeGpu
from weftline.testing.fake_gpu.machine import FakeMachine

OWN_DEVICE, OTHER_DEVICE = 3, 4
DEVICE_BYTES = 2 << 20
"""The allocation granularity of the fake device."""

__all__ = ["ARENA_BYTES", "DEVICE_BYTES", "OTHER", "OTHER_DEVICE", "OWN", "OWN_DEVICE", "DeviceBench"]


class Counting(FakeGpu):
    """A fake device that records the size of each copy."""

    def __init__(self) -> None:
        super().__init__("fake:0")
        self.copies: list[int] = []

    def copy(self, to: int, source: int, size_bytes: int, stream: int) -> None:
        self.copies.append(size_bytes)
        super().copy(to, source, size_bytes, stream)


class DeviceBench(Bench):
    """The memory of a worker with a device.

    shares:  it has an arena there, and sees another worker's; else its device shares nothing.
    machine: a made-up one that both are processes of; without it streams do at once what is put on them.
    """

    def __init__(self, shares: bool = True, marks: bool = False, machine: FakeMachine | None = None) -> None:
        super().__init__()
        self.counting = Counting()
        self.driver: FakeGpu = self.counting if machine is None else machine.process()
        self.theirs = FakeGpu("fake:0") if machine is None else machine.process()
        self.asked_device: list[list[int]] = []
        self._device_next = {OWN_DEVICE: 0, OTHER_DEVICE: 0}
        self.other: DeviceArena | None = None
        if not shares:
            self.device = WorkerDevice(self.driver)
        else:
            own = DeviceArena.create(self.driver, DEVICE_BYTES)
            self.device = WorkerDevice(self.driver, own, SharedEvents.create(self.driver, 4) if marks else None)
            self.device.attach(msg.AttachDevice(OWN_DEVICE, 0))
            self.other = DeviceArena.create(self.theirs, DEVICE_BYTES)
            self.their_events = SharedEvents.create(self.theirs, 2)
            message = msg.AttachDevice(OTHER_DEVICE, DEVICE_BYTES, "descriptor", events=self.their_events.handles)
            self.device.attach(message, os.dup(self.other.fd))
        self.memory.set_device(self.device)

    def device_block(self, size_bytes: int, arena: int = OWN_DEVICE) -> Block:
        """Lease a block on the device; LimitReached when the arena is full."""
        offset = self._device_next[arena]
        if offset + size_bytes > DEVICE_BYTES:
            raise LimitReached("no room")
        self._device_next[arena] = align_up(offset + size_bytes, 4096)
        return Block(arena, offset, size_bytes, offset + 1)

    @property
    def copies(self) -> list[int]:
        """Sizes of the copies of the worker's driver, in bytes."""
        return self.counting.copies

    def late_value(self, array: np.ndarray, event: int) -> msg.Value:
        """Return a value that another worker's stream is still writing; it has put that there, and marked it."""
        (value,) = self.device_values([np.zeros_like(array)])
        ready = Block(-OTHER_DEVICE, event * EVENT_BYTES, EVENT_BYTES, 50 + event).place(0, EVENT_BYTES)
        if self.other is None or value.device_place is None:
            raise RuntimeError("this device shares nothing")
        stream = self.theirs.stream()
        self.theirs.copy(self.other.address + value.device_place.offset, array.ctypes.data, array.nbytes, stream)
        self.theirs.record(self.their_events.at(ready), stream)
        return msgspec.structs.replace(value, ready=ready)

    def device_values(self, arrays: Sequence[np.ndarray], kind: str = "tensor", dtype: str = "") -> list[msg.Value]:
        """Return values that lie on the device alone, side by side in the other worker's arena."""
        if self.other is None:
            raise RuntimeError("this device shares nothing")
        size = arrays[0].nbytes
        block = self.device_block(size * len(arrays), OTHER_DEVICE)
        values = []
        for at, array in enumerate(arrays):
            place = block.place(at * size, size)
            ctypes.memmove(self.other.address + place.offset, np.ascontiguousarray(array).ctypes.data, size)
            values.append(msg.Value(kind, dtype or dtype_name(array.dtype), array.shape, device_place=place))
        return values

    def on_gpu(
        self,
        run: Callable[[Batch], Outputs],
        inputs: dict[str, str],
        outputs: dict[str, str],
        device_outputs: dict[str, str] | None = None,
        *,
        index: int = 0,
        items_max: int = 8,
        mutates_inputs: bool = False,
        device_inputs: Sequence[str] | None = None,
        finite: bool = False,
    ) -> HostedStep:
        """Return a step on the device; all inputs are there by default."""
        step = msg.StepToOpen(
            index,
            f"step{index}",
            "calls",
            {},
            tuple(inputs.items()),
            tuple(outputs.items()),
            "fake:0",
            BatchPolicy(items_max),
            mutates_inputs,
            device_inputs=tuple(inputs) if device_inputs is None else tuple(device_inputs),
            device_outputs=device_outputs or {},
            policy=CallPolicy(finite=finite),
        )
        return HostedStep(step, Calls(run), self.memory, self.cancels)

    def seen(self, value: msg.Value) -> np.ndarray:
        """Return the device memory of a value."""
        return np.array(np.asarray(self.device.view(value)))

    def made(self, shape: tuple[int, ...]) -> np.ndarray:
        """Return zeros in device memory of the worker's own, as a framework would have them."""
        size = int(np.prod(shape)) * 4
        held = (ctypes.c_uint8 * size).from_address(self.driver.allocate(size))
        array = np.frombuffer(held, np.float32).reshape(shape)
        array[:] = 0
        return array

    def event(self, index: int) -> Block:
        """Return one of the worker's own events, as it is leased."""
        return Block(-OWN_DEVICE, index * EVENT_BYTES, EVENT_BYTES, 100 + index)

    def close(self) -> None:
        super().close()
        if self.other is not None:
            self.other.close()
        if self.device.arena is not None:
            self.device.arena.close()

    def _need(self, sizes: Sequence[int], device: Sequence[int]) -> tuple[Sequence[Block], Sequence[Block]]:
        blocks, _ = super()._need(sizes, device)
        self.asked_device.append(list(device))
        return blocks, [self.device_block(size) for size in device]


def kinds(values: Sequence[Any]) -> list[str]:
    return [type(value).__name__ for value in values]
