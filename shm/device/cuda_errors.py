"""What CUDA's refusals mean: a pure table from the driver's own names to the errors of `driver`.

After most faults of a kernel the context is lost: every later call of the process returns the same error, and its
memory is gone with it. These are DeviceLost, and say what happened in words (CUDA Driver API, CUresult).
"""

from __future__ import annotations

from weftline.shm.device.driver import DeviceLost, DeviceOutOfMemory, DriverError

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
}
"""Errors after which the process cannot use the device again, and what each of them says."""


def error_of(call: str, code: str, about: str = "") -> DriverError:
    """Return the error for a call that was refused; `about` is the driver's own description of the code."""
    if code == OUT_OF_MEMORY:
        return DeviceOutOfMemory(call, code, about)
    if code in LOST:
        return DeviceLost(call, code, LOST[code])
    return DriverError(call, code, about)
