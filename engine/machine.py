"""Hardware detection: usable cores, cgroup memory limit and NVIDIA devices.

Devices are counted through NVML, the driver's own library, so that no CUDA context is ever made here.
"""

from __future__ import annotations

import ctypes
import logging
import os
from pathlib import Path
from typing import Any

from weftline.pipelines.placement.place import Device, Machine

TEXT_BYTES = 96
"""NVML_DEVICE_NAME_V2_BUFFER_SIZE and NVML_DEVICE_UUID_V2_BUFFER_SIZE: room for the longest name and UUID."""

_log = logging.getLogger(__name__)


class NvmlMemory(ctypes.Structure):
    """nvmlMemory_t: `total` counts what the driver and the firmware keep for themselves."""

    _fields_ = [("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong)]


class _Memory2(ctypes.Structure):
    """nvmlMemory_v2_t: `reserved` is how much they keep."""

    _fields_ = [
        ("version", ctypes.c_uint),
        *((name, ctypes.c_ulonglong) for name in ("total", "reserved", "free", "used")),
    ]


_MEMORY_2 = ctypes.sizeof(_Memory2) | 2 << 24
"""NVML_STRUCT_VERSION(Memory, 2): which struct the driver is handed."""


def this_machine() -> Machine:
    """Return what a pipeline opened here can be placed on."""
    return Machine(_cores(), _memory_bytes(), _devices(), _swap_bytes())


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


def _swap_bytes() -> int:
    """Return the machine's swap space, or the control group's limit if that is lower; 0 if that cannot be read."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:  # no file descriptor is free
        return 0
    installed = next((int(line.split()[1]) << 10 for line in lines if line.startswith("SwapTotal:")), 0)
    limit = Path("/sys/fs/cgroup/memory.swap.max")
    text = limit.read_text().strip() if limit.is_file() else "max"
    return min(installed, int(text)) if text.isdigit() else installed


def _devices() -> tuple[Device, ...]:
    """Return the GPUs in NVML's order, which is CUDA's when CUDA_DEVICE_ORDER=PCI_BUS_ID; none without a driver."""
    nvml, handles = open_nvml()
    if nvml is None:
        return ()
    devices: list[Device] = []
    for handle in handles:
        name = ctypes.create_string_buffer(TEXT_BYTES)
        unnamed = nvml.nvmlDeviceGetName(handle, name, TEXT_BYTES)
        model = "" if unnamed else name.value.decode("utf-8", "replace")
        devices.append(Device(f"cuda:{len(devices)}", _allocatable_bytes(nvml, handle), model))
    nvml.nvmlShutdown()
    return tuple(devices)


def compute_modes() -> dict[str, int]:
    """Return NVML's compute mode of each GPU by name; without those whose driver has none, and MIG devices."""
    nvml, handles = open_nvml()
    if nvml is None:
        return {}
    modes, mode = {}, ctypes.c_int()
    for at, handle in enumerate(handles):
        ask = getattr(nvml, "nvmlDeviceGetComputeMode", None)
        if ask is not None and not ask(handle, ctypes.byref(mode)):
            modes[f"cuda:{at}"] = mode.value
    nvml.nvmlShutdown()
    return modes


def open_nvml() -> tuple[Any, list[ctypes.c_void_p]]:
    """Open NVML; return it and its handles of the devices that this process may use, in CUDA's order.

    (None, []) without the library or a driver. The caller ends it with nvmlShutdown where it is not kept.
    """
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return None, []
    count = ctypes.c_uint()
    if nvml.nvmlInit_v2() or nvml.nvmlDeviceGetCount_v2(ctypes.byref(count)):
        return None, []
    return nvml, _Gpus(nvml, count.value).visible(os.environ.get("CUDA_VISIBLE_DEVICES"))


def _allocatable_bytes(nvml: Any, handle: ctypes.c_void_p) -> int:
    """Return the memory of a GPU that CUDA can allocate: all of it, less what the driver and the firmware reserve.

    CUDA's own figure (cuDeviceTotalMem) is not asked for: it needs cuInit, after which a fork of this process could not
    use CUDA. Drivers before 510 do not say what is reserved; it is then counted as if it could be allocated.
    """
    memory, plain = _Memory2(version=_MEMORY_2), NvmlMemory()
    ask = getattr(nvml, "nvmlDeviceGetMemoryInfo_v2", None)
    if ask is not None and not ask(handle, ctypes.byref(memory)) and memory.reserved < memory.total:
        return int(memory.total - memory.reserved)
    nvml.nvmlDeviceGetMemoryInfo(handle, ctypes.byref(plain))
    return int(plain.total)


class _Gpus:
    """The GPUs that NVML counts, and the MIG devices that they are divided into; handles are NVML's."""

    def __init__(self, nvml: Any, count: int) -> None:
        self._nvml = nvml
        self._handles = []
        for index in range(count):
            handle = ctypes.c_void_p()
            found = not nvml.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(handle))
            self._handles.append(handle if found else None)

    def visible(self, listed: str | None) -> list[ctypes.c_void_p]:
        """Return the devices that CUDA_VISIBLE_DEVICES leaves, in its order: CUDA numbers them anew from 0.

        The rules are CUDA's (CUDA environment variables; MIG user guide): an entry is an index, a UUID or an
        unambiguous beginning of one. The list ends at the first entry that is no device, and a device named twice
        makes it empty. A GPU that is divided counts as its first MIG device, and a process sees one MIG device at most:
        where there is one, it sees nothing else.
        """
        if listed is None:
            found = [handle for handle in self._handles if handle is not None]
        else:
            found = []
            for entry in map(str.strip, listed.split(",")):
                handle = self._named(entry)
                if handle is None:
                    self._warn(entry)
                    break
                if any(one is handle for one in found):
                    _log.warning("CUDA_VISIBLE_DEVICES=%s names a device twice: CUDA then shows none", listed)
                    return []
                found.append(handle)
        parts = [part for handle in found for part in self._parts_seen(handle)]
        return parts[:1] or [handle for handle in found if not self._is_divided(handle)]

    def _named(self, entry: str) -> ctypes.c_void_p | None:
        if entry.isascii() and entry.isdigit():
            return self._handles[int(entry)] if int(entry) < len(self._handles) else None
        if entry.startswith("GPU-"):
            named = [handle for handle in self._handles if handle is not None and self._uuid(handle).startswith(entry)]
            return named[0] if len(named) == 1 else None
        if entry.startswith("MIG-"):
            parts = [part for handle in self._handles if handle is not None for part in self._parts(handle)]
            named = [part for names, part in parts if any(name.startswith(entry) for name in names)]
            return named[0] if len(named) == 1 else None
        return None

    def _parts_seen(self, handle: ctypes.c_void_p) -> list[ctypes.c_void_p]:
        """Return the MIG device that is seen for an entry; empty for a GPU that is not divided."""
        if self._is_part(handle):
            return [handle]
        return [part for _, part in self._parts(handle)][:1]

    def _parts(self, handle: ctypes.c_void_p) -> list[tuple[tuple[str, ...], ctypes.c_void_p]]:
        """Return the MIG devices of a GPU with their names, of which drivers before 470 had only the longer one."""
        most = ctypes.c_uint()
        if not self._is_divided(handle) or not self._ask("nvmlDeviceGetMaxMigDeviceCount", handle, ctypes.byref(most)):
            return []
        parts: list[tuple[tuple[str, ...], ctypes.c_void_p]] = []
        for index in range(most.value):
            part = ctypes.c_void_p()
            if self._ask("nvmlDeviceGetMigDeviceHandleByIndex", handle, index, ctypes.byref(part)):
                gpu, compute = ctypes.c_uint(), ctypes.c_uint()
                self._ask("nvmlDeviceGetGpuInstanceId", part, ctypes.byref(gpu))
                self._ask("nvmlDeviceGetComputeInstanceId", part, ctypes.byref(compute))
                older = f"MIG-{self._uuid(handle)}/{gpu.value}/{compute.value}"
                parts.append(((self._uuid(part), older), part))
        return parts

    def _is_divided(self, handle: ctypes.c_void_p) -> bool:
        now, pending = ctypes.c_uint(), ctypes.c_uint()
        return self._ask("nvmlDeviceGetMigMode", handle, ctypes.byref(now), ctypes.byref(pending)) and now.value == 1

    def _is_part(self, handle: ctypes.c_void_p) -> bool:
        return self._uuid(handle).startswith("MIG-")

    def _uuid(self, handle: ctypes.c_void_p) -> str:
        text = ctypes.create_string_buffer(TEXT_BYTES)
        return text.value.decode() if self._ask("nvmlDeviceGetUUID", handle, text, TEXT_BYTES) else ""

    def _ask(self, call: str, *arguments: Any) -> bool:
        """Make a call that an older driver's library may not have, or a GPU may refuse; return whether it worked."""
        function = getattr(self._nvml, call, None)
        return function is not None and not function(*arguments)

    def _warn(self, entry: str) -> None:
        """Log that an entry ended the list, unless it is one that is written to hide all GPUs."""
        if entry.startswith(("GPU-", "MIG-")) or entry.isdigit():
            _log.warning(
                "CUDA_VISIBLE_DEVICES: %.80s is none of this machine's %d GPUs, or several of them: as by CUDA, it and "
                "what follows it are not used; nvidia-smi -L shows their UUIDs",
                entry, len(self._handles),
            )  # fmt: skip
