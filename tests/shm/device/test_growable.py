"""Memory that grows in place: addresses, contents and errors, on a fake device and by the calls of CUDA's driver."""

from __future__ import annotations

import gc
from types import ModuleType
from typing import Any, cast

import numpy as np
import pytest

from weftline.shm.device.driver import DeviceOutOfMemory, GpuDriver
from weftline.shm.device.growable import CHUNKS_MAX, GrowableMemory, mapped_bytes
from weftline.shm.device.tensor import DeviceTensor
from weftline.shm.spec import TensorSpec
from weftline.testing.fake_gpu.gpu import FakeGpu

MIB = 1 << 20


def _bytes(memory: GrowableMemory) -> np.ndarray:
    spec = TensorSpec("uint8", (memory.size_bytes,))
    return np.asarray(DeviceTensor(spec, memory.driver.device, memory.address, memory, writable=True))


def test_bytes_and_the_address_stay_while_memory_grows_and_shrinks() -> None:
    memory = GrowableMemory(FakeGpu(), 64 * MIB, 4 * MIB)
    memory.resize(4 * MIB)
    address, content = memory.address, np.arange(4 * MIB, dtype=np.uint32).view(np.uint8)[: 4 * MIB]
    _bytes(memory)[:] = content
    memory.resize(64 * MIB)
    _bytes(memory)[60 * MIB :] = 7
    memory.resize(3 * MIB)
    assert (memory.address, memory.size_bytes) == (address, 4 * MIB)
    assert np.array_equal(_bytes(memory), content)


class Ledger:
    """Counts mapped bytes as a device would; nothing is allocated."""

    device, reserved, taken = "ledger:0", 1 << 40, 0

    def __getattr__(self, name: str) -> Any:
        return lambda *arguments: None

    def granularity(self) -> int:
        return 2 * MIB

    def reserve(self, size_bytes: int) -> int:
        self.reserved += size_bytes
        return self.reserved - size_bytes

    def map(self, memory: int, size_bytes: int, writable: bool, at: int) -> int:
        self.taken += size_bytes
        return at

    def unmap(self, address: int, size_bytes: int, reserved: bool) -> None:
        self.taken -= size_bytes

    def memory(self) -> tuple[int, int]:
        return 80 * 1024 * MIB - self.taken, 80 * 1024 * MIB


def test_released_chunks_are_free_at_once_and_a_peak_is_the_target() -> None:
    gpu = cast(GpuDriver, Ledger())
    tensors = [GrowableMemory(gpu, 1 << 30, 625 * MIB) for _ in range(64)]  # 40 000 MiB of keys and values
    for tensor in tensors:
        tensor.resize(625 * MIB)
    before = gpu.memory()[0]
    for tensor in tensors:
        tensor.resize(547 * MIB)
    assert gpu.memory()[0] - before >= 4900 * MIB
    peak = 0
    for tensor in tensors:
        tensor.resize(625 * MIB)
        peak = max(peak, 80 * 1024 * MIB - gpu.memory()[0])
    assert peak <= 64 * 626 * MIB + tensors[0].chunk_bytes


@pytest.mark.parametrize("free_mib", [0, 2, 6])
def test_a_growth_that_fails_leaves_the_size_as_it_was(free_mib: int) -> None:
    gpu = FakeGpu(total_bytes=(8 + free_mib) * MIB)
    memory = GrowableMemory(gpu, 64 * MIB, 8 * MIB)
    memory.resize(8 * MIB)
    _bytes(memory)[:] = 5
    with pytest.raises(DeviceOutOfMemory):
        memory.resize(32 * MIB)
    assert (memory.size_bytes, gpu.memory()[0]) == (8 * MIB, free_mib * MIB)
    assert _bytes(memory).min() == 5


def test_a_size_beyond_the_reserved_range_is_refused() -> None:
    with pytest.raises(DeviceOutOfMemory, match="of a range of"):
        GrowableMemory(FakeGpu(), 4 * MIB, 2 * MIB).resize(6 * MIB)


def test_large_memory_has_few_chunks() -> None:
    memory = GrowableMemory(FakeGpu(total_bytes=80 << 30), 8 << 30, 3 << 30)
    assert (3 << 30) // memory.chunk_bytes <= CHUNKS_MAX


def test_memory_and_addresses_end_with_the_last_view() -> None:
    gpu = FakeGpu()
    memory = GrowableMemory(gpu, 8 * MIB, 8 * MIB)
    memory.resize(8 * MIB)
    view, mapped = _bytes(memory), mapped_bytes(gpu.device)
    del memory
    gc.collect()
    assert mapped_bytes(gpu.device) == mapped
    del view
    gc.collect()
    assert mapped_bytes(gpu.device) == mapped - 8 * MIB


def test_cudas_driver_maps_at_reserved_addresses_and_keeps_them() -> None:
    pytest.importorskip("cuda.bindings")
    from tests.shm.device.bindings import StandIn
    from weftline.shm.device.cuda import CudaDriver

    stand_in = StandIn()
    memory = GrowableMemory(CudaDriver("cuda:0", cast(ModuleType, stand_in)), 8 * MIB, 2 * MIB)
    memory.resize(4 * MIB)
    assert [int(at) - memory.address for at, *_ in stand_in.of("cuMemMap")] == [0, 2 * MIB]
    assert len(stand_in.of("cuMemRelease")) == 2
    memory.resize(2 * MIB)
    assert [(int(at) - memory.address, size) for at, size in stand_in.of("cuMemUnmap")] == [(2 * MIB, 2 * MIB)]
    assert not stand_in.of("cuMemAddressFree")
    memory.close()
    assert [size for _, size in stand_in.of("cuMemAddressFree")] == [8 * MIB]
