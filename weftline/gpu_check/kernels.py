"""PTX kernels without a framework: a delay and an illegal write.

A delay holds a stream back, so that a reader that does not wait reads too early and is detected. A poke writes to an
unmapped address, as a faulty kernel does. Both are PTX, which the driver compiles. On a fake device they are a
delay and a copy to an unmapped address.
"""

from __future__ import annotations

import ctypes
from typing import Any, Protocol

from weftline.gpu_check.outcomes import Skipped
from weftline.shm.device.driver import DriverError, GpuDriver
from weftline.shm.device.names import is_fake

UNMAPPED_ADDRESS = 16
"""Below the first page, which no process maps and no device has."""

PTX = """
.version 7.0
.target sm_75
.address_size 64

.visible .entry delay(.param .u64 nanoseconds)
{
    .reg .pred %p<2>;
    .reg .b64 %rd<5>;
    ld.param.u64 %rd1, [nanoseconds];
    mov.u64 %rd2, %globaltimer;
AGAIN:
    mov.u64 %rd3, %globaltimer;
    sub.u64 %rd4, %rd3, %rd2;
    setp.lt.u64 %p1, %rd4, %rd1;
    @%p1 bra AGAIN;
    ret;
}

.visible .entry poke(.param .u64 address)
{
    .reg .b64 %rd<2>;
    .reg .b32 %r<2>;
    ld.param.u64 %rd1, [address];
    mov.u32 %r1, 1;
    st.global.u32 [%rd1], %r1;
    ret;
}
"""
"""For sm_75 and later; %globaltimer counts nanoseconds, in steps of a microsecond on most cards (PTX ISA)."""


class Kernels(Protocol):
    def delay(self, stream: int, microseconds: int) -> None:
        """Hold a stream back for so long."""

    def poke(self, stream: int) -> None:
        """Write to an unmapped address on a stream."""


def open_kernels(driver: GpuDriver) -> Kernels:
    """Return the kernels for a driver's device. Skipped when the CUDA bindings cannot load them."""
    return FakeKernels(driver) if is_fake(driver.device) else CudaKernels()


class CudaKernels:
    """On a card, through the driver; the process's context is current, as the driver left it."""

    def __init__(self, bindings: Any = None) -> None:
        """Load the kernels. bindings: for tests, what stands for `cuda.bindings.driver`."""
        cuda = self._cuda = bindings or _bindings()
        loaded = cuda.cuModuleLoadData(PTX.encode() + b"\0")
        if loaded[0] == cuda.CUresult.CUDA_ERROR_JIT_COMPILER_NOT_FOUND:
            raise Skipped("the driver's PTX compiler (libnvidia-ptxjitcompiler) is not here")
        module = self._done("cuModuleLoadData", loaded)
        self._functions = {
            name: self._done("cuModuleGetFunction", cuda.cuModuleGetFunction(module, name.encode()))
            for name in ("delay", "poke")
        }

    def delay(self, stream: int, microseconds: int) -> None:
        self._launch("delay", microseconds * 1000, stream)

    def poke(self, stream: int) -> None:
        self._launch("poke", UNMAPPED_ADDRESS, stream)

    def _launch(self, name: str, argument: int, stream: int) -> None:
        one, given = (1, 1, 1), ((argument,), (ctypes.c_uint64,))
        on = self._cuda.CUstream(stream)
        self._done("cuLaunchKernel", self._cuda.cuLaunchKernel(self._functions[name], *one, *one, 0, on, given, 0))

    def _done(self, call: str, answer: tuple[Any, ...]) -> Any:
        error, *found = answer
        if int(error) != 0:
            raise DriverError(call, error.name)
        return found[0] if found else None


def _bindings() -> Any:
    try:
        from cuda.bindings import driver
    except ImportError:
        raise Skipped("package cuda-bindings is not installed") from None
    return driver


class FakeKernels:
    """On a fake, whose streams know delays, and copies to where nothing is."""

    def __init__(self, driver: GpuDriver) -> None:
        self._driver: Any = driver
        self._bytes = ctypes.create_string_buffer(64)
        self._address = ctypes.addressof(self._bytes)

    def delay(self, stream: int, microseconds: int) -> None:
        self._driver.delay(microseconds / 1e6, stream)

    def poke(self, stream: int) -> None:
        self._driver.copy(UNMAPPED_ADDRESS, self._address, 4, stream)
