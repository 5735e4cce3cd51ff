"""Memory of keys and values: tensors that a step resizes while it serves.

    VirtualKvMemory  device memory mapped at fixed addresses (`shm.device.growable`): a resize moves nothing, CUDA
                     graphs stay valid, and memory that a step gives up is free for other processes at once
    TorchKvMemory    torch's allocator: a resize copies into a new tensor; for the CPU, and for GPUs without the
                     driver's package

On a GPU tensors are [slots, kv_heads, width] in memory, so that slots are added at the end of one range; on a CPU they
are [kv_heads, slots, width], as its attention reads them. Both are seen as [kv_heads, slots, width].
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from weftline.errors import MissingPackage
from weftline.shm.device.driver import DriverError, GpuDriver, open_driver
from weftline.shm.device.growable import GrowableMemory
from weftline.shm.device.tensor import DeviceTensor
from weftline.shm.spec import TensorSpec

_log = logging.getLogger(__name__)


class KvMemory(Protocol):
    """Keys or values of one layer; its size is a multiple of `chunk_bytes`."""

    chunk_bytes: int

    def resize(self, slots: int) -> Tensor:
        """Return the memory with `slots` slots, [kv_heads, slots, width], the common ones kept, new ones zero.

        The tensor before stays valid until the caller drops it, but for slots that are gone. Raises an error for which
        `is_out_of_memory` is True when memory is missing; nothing has changed then.
        """

    def undo(self, slots: int, before: Tensor | None = None) -> None:
        """Return to `slots` slots after a `resize` whose result is not used; never fails.

        before: the tensor that is used further, where the caller has it; None: the common slots of the last one.
        """


KvAllocator = Callable[[int, int], KvMemory]
"""Makes the memory of one layer's keys or values, from the number of heads and their width."""


class TorchKvMemory:
    """Tensors of torch's allocator, like a given one in dtype and device."""

    chunk_bytes = 2 << 20  # granularity of CUDA allocations, and so of torch's large blocks

    def __init__(self, like: Tensor, heads: int, width: int) -> None:
        self._like = like
        self._shape = heads, width
        self._memory: Tensor | None = None

    def resize(self, slots: int) -> Tensor:
        heads, width = self._shape
        if self._like.device.type == "cpu":
            made = self._like.new_empty(heads, slots, width)
        else:
            made = self._like.new_empty(slots, heads, width).transpose(0, 1)
        kept = 0
        if self._memory is not None:
            kept = min(slots, self._memory.shape[1])
            made[:, :kept] = self._memory[:, :kept]
        made[:, kept:] = 0  # unwritten slots are read with weight 0, and NaN times 0 is NaN
        self._memory = made
        return made

    def undo(self, slots: int, before: Tensor | None = None) -> None:
        if before is not None:
            self._memory = before
        elif self._memory is not None:
            self._memory = self._memory[:, :slots] if slots else None


class VirtualKvMemory:
    """Memory mapped at fixed addresses of a device."""

    def __init__(self, memory: GrowableMemory, dtype: torch.dtype, heads: int, width: int) -> None:
        self.chunk_bytes = memory.chunk_bytes
        self._memory = memory
        self._slot_bytes = heads * width * dtype.itemsize
        spec = TensorSpec("uint8", (memory.reserved_bytes,))
        whole = DeviceTensor(spec, memory.driver.device, memory.address, memory, writable=True).torch()
        slots = memory.reserved_bytes // self._slot_bytes
        self._slots = whole[: slots * self._slot_bytes].view(dtype).view(slots, heads, width)
        self._written = 0

    def resize(self, slots: int) -> Tensor:
        self._memory.resize(slots * self._slot_bytes)
        try:
            if slots > self._written:
                self._slots[self._written : slots] = 0
        except BaseException:
            self._memory.resize(self._written * self._slot_bytes)
            raise
        self._written = slots
        return self._slots[:slots].transpose(0, 1)

    def undo(self, slots: int, before: Tensor | None = None) -> None:
        self._memory.resize(slots * self._slot_bytes)
        self._written = slots


def torch_allocator(like: Tensor) -> KvAllocator:
    """Return an allocator of tensors of the dtype and on the device of `like`."""
    return partial(TorchKvMemory, like)


def virtual_allocator(driver: GpuDriver, dtype: torch.dtype, token_bytes: int, first_slots: int) -> KvAllocator:
    """Return an allocator of memory that grows in place.

    token_bytes: bytes of a token in all layers: addresses are reserved for as many as the whole device could hold.
    first_slots: slots at first, from which follows the size of chunks.
    """
    slots_max = max(driver.memory()[1] // token_bytes, first_slots)

    def allocate(heads: int, width: int) -> KvMemory:
        slot_bytes = heads * width * dtype.itemsize
        memory = GrowableMemory(driver, slots_max * slot_bytes, first_slots * slot_bytes)
        return VirtualKvMemory(memory, dtype, heads, width)

    return allocate


def kv_driver(device: torch.device) -> GpuDriver | None:
    """Return the driver of a GPU that maps memory at reserved addresses; None for other devices and drivers."""
    if device.type != "cuda":
        return None
    try:
        driver = open_driver(f"cuda:{device.index or 0}")
        driver.unreserve(driver.reserve(driver.granularity()), driver.granularity())
    except (MissingPackage, DriverError) as error:
        _log.warning("every resize moves the KV memory, which takes time and free memory: %s", error)
        return None
    return driver
