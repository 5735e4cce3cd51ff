"""Requests that ended, and GPUs, generated for tests of their metrics."""

from __future__ import annotations

import ctypes
import os
from typing import Any

import pytest

from weftline.engine.metrics.gpus import REASONS
from weftline.engine.scheduler.request import StepTiming
from weftline.engine.serving.backend import Ask, Record

GIB = 1 << 30
STARTED_NS = 1_700_000_000_000_000_000
STARTED_MS = 5000.0
"""Of the runtime's clock at that moment."""


def timing(step: str = "see", outcome: str = "ok", **more: Any) -> StepTiming:
    """Return an item that waited 2 ms and then ran 10 ms, from 3 ms after its request came, in a batch of 4."""
    fields = {"batch_wait_ms": 1.0, "node_ms": 8.0, "worker": step, "started_ms": STARTED_MS + 3, "outcome": outcome}
    return StepTiming(step, 2.0, 10.0, 4, **{**fields, **more})


def record(model: str = "ocr", status: str = "OK", total_ms: float = 20.0, **more: Any) -> Record:
    """Return a request; keywords are of Record or of its Ask."""
    of_ask = {key: more.pop(key) for key in ("protocol", "caller", "id", "traceparent", "size_bytes") if key in more}
    of_ask["protocol"] = of_ask.get("protocol", "grpc")
    own = more.pop("own", "")
    ask = Ask(model, {}, **of_ask)
    version = more.pop("version", 1)
    return Record(model, version, status, STARTED_NS, total_ms, ask, started_ms=STARTED_MS, traceparent=own, **more)


class Nvml:
    """A made-up NVML with two GPUs. `calls` counts those to each function.

    lacks: what the second GPU does not support.   absent: functions that the library does not have.
    """

    lacks = ("nvmlDeviceGetUtilizationRates", "nvmlDeviceGetPowerUsage", "nvmlDeviceGetTotalEccErrors")

    absent: tuple[str, ...] = ()

    def __init__(self) -> None:
        self.init = 0
        self.calls: dict[str, int] = {}
        self.processes = [(os.getpid(), 5 * GIB), (1, 2 * GIB)]

    def __getattr__(self, name: str) -> Any:
        function = getattr(Nvml, f"_{name}", None)
        if function is None or name in self.absent:
            raise AttributeError(name)  # as ctypes says of a function that an older library lacks

        def called(*arguments: Any) -> int:
            self.calls[name] = self.calls.get(name, 0) + 1
            first = arguments[0] if arguments else None
            if name in self.lacks and isinstance(first, ctypes.c_void_p) and first.value == 2:
                return 3  # NVML_ERROR_NOT_SUPPORTED
            return function(self, *arguments) or 0

        return called

    def _nvmlInit_v2(self) -> int:
        return self.init

    def _nvmlDeviceGetCount_v2(self, count: Any) -> None:
        count._obj.value = 2

    def _nvmlDeviceGetHandleByIndex_v2(self, index: int, handle: Any) -> None:
        handle._obj.value = index + 1

    def _nvmlDeviceGetIndex(self, handle: Any, index: Any) -> None:
        index._obj.value = handle.value - 1

    def _nvmlDeviceGetUUID(self, handle: Any, text: Any, size: int) -> None:
        text.value = f"GPU-{handle.value}".encode()

    def _nvmlDeviceGetName(self, handle: Any, text: Any, size: int) -> None:
        text.value = b"NVIDIA H200"

    def _nvmlDeviceGetMemoryInfo(self, handle: Any, memory: Any) -> None:
        memory._obj.total, memory._obj.used = 140 * GIB, 9 * GIB

    def _nvmlDeviceGetUtilizationRates(self, handle: Any, use: Any) -> None:
        use._obj.gpu, use._obj.memory = 75, 40

    def _nvmlDeviceGetPowerUsage(self, handle: Any, milliwatts: Any) -> None:
        milliwatts._obj.value = 412_500

    def _nvmlDeviceGetEnforcedPowerLimit(self, handle: Any, milliwatts: Any) -> None:
        milliwatts._obj.value = 700_000

    def _nvmlDeviceGetTemperature(self, handle: Any, sensor: int, celsius: Any) -> None:
        celsius._obj.value = 61

    def _nvmlDeviceGetCurrentClocksThrottleReasons(self, handle: Any, reasons: Any) -> None:
        reasons._obj.value = 0x1 | REASONS["sw_power_cap"]

    def _nvmlDeviceGetTotalEccErrors(self, handle: Any, kind: int, counter: int, errors: Any) -> None:
        errors._obj.value = (12, 3)[kind]

    def _nvmlDeviceGetComputeRunningProcesses_v3(self, handle: Any, count: Any, found: Any) -> None:
        assert count._obj.value >= len(self.processes)
        count._obj.value = len(self.processes)
        for place, (pid, used) in enumerate(self.processes):
            found[place].pid, found[place].used = pid, used


def install_nvml(monkeypatch: pytest.MonkeyPatch) -> Nvml:
    """Have ctypes find a made-up NVML, and no environment narrow its GPUs."""
    made = Nvml()
    monkeypatch.setattr(ctypes, "CDLL", lambda name: made)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return made
