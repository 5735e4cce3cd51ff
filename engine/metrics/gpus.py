"""NVIDIA GPU metrics from NVML: load, memory, power, temperature, clocks and ECC errors.

No CUDA context is made. Without the library or the driver there are no GPUs, and a value that a GPU does not support is
None. A call takes milliseconds, and far longer on a failing GPU: `GpuSampler` is for threads that may block,
reads at most once a second, and lets no caller wait for another's reading.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from weftline.engine.machine import TEXT_BYTES, NvmlMemory, open_nvml

SAMPLE_S = 1.0
"""Shortest time between two readings, in seconds."""
_PROCESSES_MAX = 512
_NOT_AVAILABLE = (1 << 64) - 1
"""NVML_VALUE_NOT_AVAILABLE."""
_SENSOR_GPU = 0
_CORRECTED, _UNCORRECTED, _SINCE_DRIVER_LOAD = 0, 1, 0
REASONS: Mapping[str, int] = {
    "applications_clocks_setting": 0x2,
    "sw_power_cap": 0x4,
    "hw_slowdown": 0x8,
    "sync_boost": 0x10,
    "sw_thermal_slowdown": 0x20,
    "hw_thermal_slowdown": 0x40,
    "hw_power_brake_slowdown": 0x80,
    "display_clock_setting": 0x100,
}
"""Why a GPU's clocks are below their highest, nvmlClocksThrottleReason*; that it is idle is not among them."""


class _Utilization(ctypes.Structure):
    _fields_ = [("gpu", ctypes.c_uint), ("memory", ctypes.c_uint)]


class _Process(ctypes.Structure):
    _fields_ = [
        ("pid", ctypes.c_uint),
        ("used", ctypes.c_ulonglong),
        ("gpu_instance", ctypes.c_uint),
        ("compute_instance", ctypes.c_uint),
    ]


@dataclass(frozen=True, slots=True)
class Gpu:
    """One reading of one GPU; None for what it does not support.

    index:     its number in NVML.   device: what pipelines call it, such as 'cuda:0'.
    busy, memory_busy: parts of the last sampling period in which kernels ran, and in which its memory was accessed.
    reasons:   by name, whether it holds the clocks back now.
    corrected, uncorrected: ECC errors since the driver was loaded.
    processes: bytes that processes hold, by pid, of those that this process may see.
    """

    index: int
    uuid: str
    device: str
    name: str = ""
    busy: float | None = None
    memory_busy: float | None = None
    total_bytes: int | None = None
    used_bytes: int | None = None
    power_watts: float | None = None
    power_limit_watts: float | None = None
    temperature_celsius: int | None = None
    reasons: Mapping[str, bool] = field(default_factory=dict)
    corrected: int | None = None
    uncorrected: int | None = None
    processes: Mapping[int, int] = field(default_factory=dict)


class GpuSampler:
    """The newest reading of every GPU that this process may use. Safe to use from several threads."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._reading = threading.Lock()
        self._calls: list[_Calls] | None = None  # of each GPU, once NVML was asked
        self._read_s: float | None = None
        self._gpus: tuple[Gpu, ...] = ()

    def gpus(self) -> tuple[Gpu, ...]:
        """Return a reading that is at most SAMPLE_S old, or the one before while another thread reads."""
        if self._read_s is not None and self._clock() - self._read_s < SAMPLE_S:
            return self._gpus
        if not self._reading.acquire(blocking=False):
            return self._gpus
        try:
            if self._calls is None:
                self._calls = _open()
            self._gpus = tuple(_read(calls, place) for place, calls in enumerate(self._calls))
            self._read_s = self._clock()
        finally:
            self._reading.release()
        return self._gpus


class _Calls:
    """Calls about one GPU. Each returns None when the library or the GPU does not support it."""

    def __init__(self, nvml: Any, handle: ctypes.c_void_p) -> None:
        self._nvml = nvml
        self._handle = handle

    def ask(self, name: str, *arguments: Any) -> bool:
        function = getattr(self._nvml, name, None)
        return function is not None and not function(self._handle, *arguments)

    def text(self, name: str) -> str:
        buffer = ctypes.create_string_buffer(TEXT_BYTES)
        return buffer.value.decode("utf-8", "replace") if self.ask(name, buffer, TEXT_BYTES) else ""

    def number(self, name: str, *arguments: Any, type: Any = ctypes.c_uint) -> int | None:
        found = type()
        return int(found.value) if self.ask(name, *arguments, ctypes.byref(found)) else None

    def processes(self) -> dict[int, int]:
        found, count = (_Process * _PROCESSES_MAX)(), ctypes.c_uint(_PROCESSES_MAX)
        if not self.ask("nvmlDeviceGetComputeRunningProcesses_v3", ctypes.byref(count), found):
            return {}
        seen = found[: count.value]
        return {int(one.pid): int(one.used) for one in seen if one.used != _NOT_AVAILABLE}


def _open() -> list[_Calls]:
    """Open NVML and return the GPUs that this process may use; none without the library or a driver."""
    nvml, handles = open_nvml()
    return [_Calls(nvml, handle) for handle in handles]


def _read(calls: _Calls, place: int) -> Gpu:
    """Read one GPU. place: its number in CUDA, which is NVML's where NVML gives none, as of a MIG device."""
    index = calls.number("nvmlDeviceGetIndex")
    memory, use = NvmlMemory(), _Utilization()
    has_memory = calls.ask("nvmlDeviceGetMemoryInfo", ctypes.byref(memory))
    has_use = calls.ask("nvmlDeviceGetUtilizationRates", ctypes.byref(use))
    reasons = calls.number("nvmlDeviceGetCurrentClocksThrottleReasons", type=ctypes.c_ulonglong)

    def ecc(kind: int) -> int | None:
        return calls.number("nvmlDeviceGetTotalEccErrors", kind, _SINCE_DRIVER_LOAD, type=ctypes.c_ulonglong)

    return Gpu(
        place if index is None else index,
        calls.text("nvmlDeviceGetUUID"),
        f"cuda:{place}",
        calls.text("nvmlDeviceGetName"),
        use.gpu / 100 if has_use else None,
        use.memory / 100 if has_use else None,
        int(memory.total) if has_memory else None,
        int(memory.used) if has_memory else None,
        _watts(calls.number("nvmlDeviceGetPowerUsage")),
        _watts(calls.number("nvmlDeviceGetEnforcedPowerLimit")),
        calls.number("nvmlDeviceGetTemperature", _SENSOR_GPU),
        {} if reasons is None else {name: bool(reasons & bit) for name, bit in REASONS.items()},
        ecc(_CORRECTED),
        ecc(_UNCORRECTED),
        calls.processes(),
    )


def _watts(milliwatts: int | None) -> float | None:
    return None if milliwatts is None else milliwatts / 1000
