"""What this machine has: cores this process may use, memory its control group allows, and NVIDIA devices.

Devices are counted through NVML, the driver's own library, so that no CUDA context is ever made here.
"""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

from weftline.pipelines.place import Device, Machine

NAME_BYTES = 96
"""NVML_DEVICE_NAME_V2_BUFFER_SIZE: room for the longest name of a device."""


class _Memory(ctypes.Structure):
    _fields_ = [("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong)]


def this_machine() -> Machine:
    """Return what a pipeline opened here can be placed on."""
    return Machine(_cores(), _memory_bytes(), _devices())


def _cores() -> int:
    """Return the cores this process may use: its affinity, or its control group's quota if that is lower."""
    allowed = len(os.sched_getaffinity(0))
    quota = Path("/sys/fs/cgroup/cpu.max")
    limit, _, period = quota.read_text().partition(" ") if quota.is_file() else ("max", "", "1")
    return min(allowed, max(1, int(limit) // int(period))) if limit.isdigit() else allowed


def _memory_bytes() -> int:
    """Return the machine's memory, or the control group's limit if that is lower."""
    installed = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = Path("/sys/fs/cgroup/memory.max")
    text = limit.read_text().strip() if limit.is_file() else "max"
    return min(installed, int(text)) if text.isdigit() else installed


def _devices() -> tuple[Device, ...]:
    """Return the GPUs in NVML's order, which is CUDA's when CUDA_DEVICE_ORDER=PCI_BUS_ID; none without a driver."""
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return ()
    count = ctypes.c_uint()
    if nvml.nvmlInit_v2() or nvml.nvmlDeviceGetCount_v2(ctypes.byref(count)):
        return ()
    devices: list[Device] = []
    for index in _visible(count.value):
        handle, memory = ctypes.c_void_p(), _Memory()
        if not nvml.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(handle)):
            nvml.nvmlDeviceGetMemoryInfo(handle, ctypes.byref(memory))
            name = ctypes.create_string_buffer(NAME_BYTES)
            unnamed = nvml.nvmlDeviceGetName(handle, name, NAME_BYTES)
            model = "" if unnamed else name.value.decode("utf-8", "replace")
            devices.append(Device(f"cuda:{len(devices)}", int(memory.total), model))
    nvml.nvmlShutdown()
    return tuple(devices)


def _visible(count: int) -> list[int]:
    """Return the devices that CUDA_VISIBLE_DEVICES leaves, in its order: CUDA numbers them anew from 0.

    As CUDA does, the list ends at the first entry that is no device. Entries that are UUIDs are not understood.
    """
    listed = os.environ.get("CUDA_VISIBLE_DEVICES")
    if listed is None:
        return list(range(count))
    visible = []
    for entry in listed.split(","):
        if not entry.strip().isdigit() or int(entry) >= count:
            break
        visible.append(int(entry))
    return visible
