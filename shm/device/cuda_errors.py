"""Table from CUDA error names to the errors of `driver`; pure.

After most faults of a kernel the context is lost: every later call of the process returns the same error, and its
memory is gone with it. These are DeviceLost, and say what happened in words (CUDA Driver API, CUresult). CUDA's runtime
API, which torch and ONNX Runtime call, gives these errors the same numbers (cudaError_t).
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
