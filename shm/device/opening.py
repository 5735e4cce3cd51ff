"""From a device's name to its driver."""

from __future__ import annotations

from weftline.shm.device.driver import GpuDriver
from weftline.shm.device.names import is_fake


def open_driver(device: str) -> GpuDriver:
    """Return this process's driver of a device ('cuda:0', 'fake:0'); it makes the process's context there if it must.

    MissingPackage when the CUDA bindings are not installed, DriverError when the device does not answer.
    """
    if is_fake(device):
        from weftline.shm.device.fake import FakeGpu

        return FakeGpu(device)
    from weftline.shm.device.cuda import CudaDriver

    return CudaDriver(device)
