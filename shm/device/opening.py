"""The driver of a device, by the device's name."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module

from weftline.shm.device.driver import GpuDriver
from weftline.shm.device.names import is_fake

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
