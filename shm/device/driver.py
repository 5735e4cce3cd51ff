"""`GpuDriver` protocol: shareable device memory, streams and interprocess events.

A `GpuDriver` is one process's access to one device. Three classes implement the protocol: `cuda.CudaDriver` calls the
CUDA driver; `fake.FakeGpu`, host memory under rules stricter than a GPU's; `recorder.Recorder`, which notes what either
is asked. `open_driver` chooses by the device's name.

Everything is a plain integer or bytes: addresses are device addresses (of a fake, addresses of this process), handles
of memory, streams and events are only valid for the driver that returned them. Sizes are bytes.

    create -> export -> (descriptor, to another process) -> import_memory       one physical memory, several processes
           -> map -> address -> unmap                                           seen by this process
    reserve -> address -> map(at=...) -> unmap(reserved=True) -> unreserve      memory that grows in place
           -> release                                                           memory is freed with its last user

Copies, records and waits are put on a stream and done in its order, later; `synchronize` and `wait_event` wait for them
on the host. Nothing here decides anything.

Error names of CUDA map to DriverError, DeviceOutOfMemory and DeviceLost. After most faults of a kernel the context is
lost: every later call of the process returns the same error, and its memory is gone (CUDA Driver API, CUresult). The
runtime API, which torch and ONNX Runtime call, uses the same numbers (cudaError_t).
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Protocol

from weftline.errors import WeftlineError
from weftline.shm.device.names import is_fake

EVENT_HANDLE_BYTES = 64
"""Length of an exported event, as CUDA has it."""

SHARE_HANDLE_BYTES = 64
"""Length of the handle of an allocation shared the older way, as CUDA has it."""


class DriverError(WeftlineError):
    """A GPU driver refused a call. `call` names it, `code` is the driver's own name of the reason."""

    def __init__(self, call: str, code: str, about: str = "") -> None:
        super().__init__(f"{call}: {code}" + (f" ({about})" if about else ""))
        self.call, self.code = call, code


class DeviceOutOfMemory(DriverError):
    """The device has too little free memory for the allocation."""


class DeviceLost(DriverError):
    """The device, or this process's context on it, cannot be used any more: an illegal address, a reset, a hang."""


class GpuDriver(Protocol):
    """One process's way to one device. Not thread-safe but for `finished` and `wait_event`.

    Every call may raise DriverError; DeviceOutOfMemory and DeviceLost say what they are.
    """

    device: str

    # memory that can be shared by descriptor

    def granularity(self) -> int:
        """Return what sizes of shareable memory must be multiples of."""

    def create(self, size_bytes: int) -> int:
        """Make physical memory of this device that can be exported, and return its handle."""

    def export(self, memory: int) -> int:
        """Return a descriptor that leads to the memory, owned by the caller; it keeps the memory alive by itself."""

    def import_memory(self, descriptor: int) -> int:
        """Return a handle of memory that another process exported; the descriptor stays the caller's."""

    def map(self, memory: int, size_bytes: int, writable: bool, at: int = 0) -> int:
        """Map memory into this process's device addresses and return where; read-only if not `writable`.

        at: a free address of a range of `reserve`; 0: wherever there is room.
        """

    def unmap(self, address: int, size_bytes: int, reserved: bool = False) -> None:
        """Undo `map`; nothing on a stream may still use it. reserved: the addresses stay reserved."""

    def reserve(self, size_bytes: int) -> int:
        """Reserve a range of this process's device addresses, without memory, and return its start."""

    def unreserve(self, address: int, size_bytes: int) -> None:
        """Undo `reserve`; nothing may be mapped there."""

    def release(self, memory: int) -> None:
        """Release a handle. Memory is freed with its last handle, mapping and descriptor."""

    # memory of this process, and the older way of sharing it

    def allocate(self, size_bytes: int) -> int:
        """Allocate device memory of this process and return its address."""

    def free(self, address: int) -> None: ...

    def share(self, address: int) -> bytes:
        """Return the handle (SHARE_HANDLE_BYTES) by which another process opens a whole allocation."""

    def open_shared(self, handle: bytes) -> int:
        """Return where another process's allocation lies here."""

    def close_shared(self, address: int) -> None: ...

    # streams

    def stream(self) -> int:
        """Make a stream that waits for no other one."""

    def destroy_stream(self, stream: int) -> None: ...

    def copy(self, to: int, source: int, size_bytes: int, stream: int) -> None:
        """Put a copy on a stream, between any two of device memory, page-locked and other host memory."""

    def synchronize(self, stream: int) -> None:
        """Wait until everything on a stream is done; DeviceLost when it never will be."""

    # events

    def event(self, shared: bool = False) -> int:
        """Make an event; a shared one can be exported."""

    def export_event(self, event: int) -> bytes:
        """Return the handle (EVENT_HANDLE_BYTES) by which another process opens an event."""

    def import_event(self, handle: bytes) -> int: ...

    def destroy_event(self, event: int) -> None: ...

    def record(self, event: int, stream: int) -> None:
        """Have an event mark what is on a stream so far; what it marked before is forgotten."""

    def wait(self, stream: int, event: int) -> None:
        """Have a stream wait for what an event marks now, in whichever process it was recorded; waits not itself."""

    def finished(self, event: int) -> bool:
        """Return True when the work before an event is done. Thread-safe."""

    def wait_event(self, event: int) -> None:
        """Wait on the host until what an event marks is done. May be called from any thread."""

    # host memory, and facts

    def lock_pages(self, address: int, size_bytes: int, writable: bool) -> None:
        """Page-lock host memory of this process, so that copies of it run beside the host."""

    def unlock_pages(self, address: int) -> None: ...

    def memory(self) -> tuple[int, int]:
        """Return the device's free and total bytes, as this process sees them."""

    def close(self) -> None:
        """Release the driver's own resources. The caller ends memory, streams and events before."""


DRIVERS: Mapping[str, str] = {
    "cuda": "weftline.shm.device.cuda:CudaDriver",
    "fake": "weftline.testing.fake_gpu.gpu:FakeGpu",
}
"""Import path of each driver, imported when a device is opened; 'fake' is every kind of fake device."""


def open_driver(device: str) -> GpuDriver:
    """Open a device ('cuda:0', 'fake:0') in this process; creates the process's context on it if necessary.

    MissingPackage: the CUDA bindings are not installed. DriverError: the device does not answer.
    """
    module, _, name = DRIVERS["fake" if is_fake(device) else "cuda"].partition(":")
    driver: GpuDriver = getattr(import_module(module), name)(device)
    return driver


OUT_OF_MEMORY = "CUDA_ERROR_OUT_OF_MEMORY"
NOT_READY = "CUDA_ERROR_NOT_READY"
"""No error: what was asked about is not done yet."""

NO_DRIVER = "NO_DRIVER"
"""Not a name of CUDA's: the driver's library is not there, or is too old to know the call."""

LOST = {
    "CUDA_ERROR_ILLEGAL_ADDRESS": "a kernel read or wrote memory that is not mapped, or may not be written",
    "CUDA_ERROR_MISALIGNED_ADDRESS": "a kernel used an address that is not a multiple of the element's size",
    "CUDA_ERROR_INVALID_ADDRESS_SPACE": "a kernel used an address of the wrong kind of memory",
    "CUDA_ERROR_INVALID_PC": "a kernel ran off its code",
    "CUDA_ERROR_ILLEGAL_INSTRUCTION": "a kernel met an instruction that the device does not know",
    "CUDA_ERROR_HARDWARE_STACK_ERROR": "a kernel overran its stack",
    "CUDA_ERROR_ASSERT": "an assertion in a kernel failed",
    "CUDA_ERROR_LAUNCH_FAILED": "a kernel ended with an exception",
    "CUDA_ERROR_LAUNCH_TIMEOUT": "a kernel took longer than the system allows",
    "CUDA_ERROR_TENSOR_MEMORY_LEAK": "a kernel kept tensor memory that it had to give back",
    "CUDA_ERROR_ECC_UNCORRECTABLE": "the device's memory has an error that could not be corrected",
    "CUDA_ERROR_NVLINK_UNCORRECTABLE": "the link between devices had an error that could not be corrected",
    "CUDA_ERROR_CONTAINED": "the device contained a fault of its memory and ended what it touched",
    "CUDA_ERROR_EXTERNAL_DEVICE": "a device that work depended on failed",
    "CUDA_ERROR_CONTEXT_IS_DESTROYED": "this process's context on the device was destroyed or never made",
    "CUDA_ERROR_DEINITIALIZED": "the driver is shutting down with the process",
    "CUDA_ERROR_MPS_CLIENT_TERMINATED": "the MPS server ended this process, or another of its clients faulted",
    "CUDA_ERROR_MPS_RPC_FAILURE": "the MPS server does not answer any more",
    "CUDA_ERROR_UNKNOWN": "the driver failed for a reason that it does not know; the device may have left the bus",
}
"""Errors after which the process cannot use the device again, and what each of them says.

These are all for which the driver's documentation says that the process must be ended and started again, and:

- ASSERT and CONTEXT_IS_DESTROYED: their documentation says that the context cannot be used any more;
- ECC_UNCORRECTABLE, NVLINK_UNCORRECTABLE, DEINITIALIZED and MPS_RPC_FAILURE: what the context needs is gone;
- UNKNOWN: nothing is said of the context, every later call fails in practice, and a new process costs little.

Absent on purpose: DEVICE_UNAVAILABLE, SYSTEM_NOT_READY and NO_DEVICE are answers to a process that makes its first
context, which fails to open. INVALID_CONTEXT is also the answer to opening one's own allocation or event (see
`fake_memories`), OPERATING_SYSTEM where the operating system refuses a shared handle.
"""

NUMBERS = {
    2: OUT_OF_MEMORY, 4: "CUDA_ERROR_DEINITIALIZED", 214: "CUDA_ERROR_ECC_UNCORRECTABLE",
    220: "CUDA_ERROR_NVLINK_UNCORRECTABLE", 226: "CUDA_ERROR_CONTAINED", 700: "CUDA_ERROR_ILLEGAL_ADDRESS",
    702: "CUDA_ERROR_LAUNCH_TIMEOUT", 709: "CUDA_ERROR_CONTEXT_IS_DESTROYED", 710: "CUDA_ERROR_ASSERT",
    714: "CUDA_ERROR_HARDWARE_STACK_ERROR", 715: "CUDA_ERROR_ILLEGAL_INSTRUCTION",
    716: "CUDA_ERROR_MISALIGNED_ADDRESS", 717: "CUDA_ERROR_INVALID_ADDRESS_SPACE", 718: "CUDA_ERROR_INVALID_PC",
    719: "CUDA_ERROR_LAUNCH_FAILED", 721: "CUDA_ERROR_TENSOR_MEMORY_LEAK", 806: "CUDA_ERROR_MPS_RPC_FAILURE",
    810: "CUDA_ERROR_MPS_CLIENT_TERMINATED", 911: "CUDA_ERROR_EXTERNAL_DEVICE", 999: "CUDA_ERROR_UNKNOWN",
}  # fmt: skip
"""Numbers of those errors, and of a want of memory: what frameworks give instead of the driver's names."""


def error_of(call: str, code: str, about: str = "") -> DriverError:
    """Return the error for a call that was refused; `about` is the driver's own description of the code."""
    if code == OUT_OF_MEMORY:
        return DeviceOutOfMemory(call, code, about)
    if code in LOST:
        return DeviceLost(call, code, LOST[code])
    return DriverError(call, code, about)
