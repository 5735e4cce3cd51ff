"""Memory and kernels of fake devices, for tests."""

from __future__ import annotations

import ctypes

from weftline.shm.device.driver import GpuDriver
from weftline.testing.fake_gpu.gpu import GRANULARITY_BYTES, FakeGpu


def made(gpu: GpuDriver, size_bytes: int = GRANULARITY_BYTES) -> tuple[int, int]:
    """Return the handle and the address of new memory."""
    memory = gpu.create(size_bytes)
    return memory, gpu.map(memory, size_bytes, True)


def brought_in(gpu: GpuDriver, descriptor: int, size_bytes: int = GRANULARITY_BYTES) -> int:
    """Return where a reader has another one's memory."""
    memory = gpu.import_memory(descriptor)
    address = gpu.map(memory, size_bytes, False)
    gpu.release(memory)
    return address


def peek(address: int, size_bytes: int = 5) -> bytes:
    return ctypes.string_at(address, size_bytes)


def poke(address: int, data: bytes) -> None:
    ctypes.memmove(address, data, len(data))


def puts(gpu: FakeGpu, address: int, data: bytes, stream: int) -> None:
    """Put a kernel on a stream that writes `data`."""
    gpu.launch(lambda: poke(address, data), [], [(address, len(data))], stream)
