"""What this machine has is asked of NVML, without a CUDA context; here NVML is made up."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest

from weftline.engine.machine import this_machine
from weftline.pipelines.machine import Device


class Nvml:
    """Two GPUs, the second of which does not say what it is."""

    def __init__(self) -> None:
        self.open = False

    def nvmlInit_v2(self) -> int:
        self.open = True
        return 0

    def nvmlDeviceGetCount_v2(self, count: Any) -> int:
        count._obj.value = 2
        return 0

    def nvmlDeviceGetHandleByIndex_v2(self, index: int, handle: Any) -> int:
        handle._obj.value = index + 1
        return 0

    def nvmlDeviceGetMemoryInfo(self, handle: Any, memory: Any) -> int:
        memory._obj.total = handle.value << 34
        return 0

    def nvmlDeviceGetName(self, handle: Any, name: Any, size: int) -> int:
        if handle.value == 2:
            return 3  # NVML_ERROR_NOT_SUPPORTED
        name.value = b"NVIDIA H200"
        return 0

    def nvmlShutdown(self) -> int:
        self.open = False
        return 0


def test_gpus_have_their_memory_and_their_name(monkeypatch: pytest.MonkeyPatch) -> None:
    nvml = Nvml()
    monkeypatch.setattr(ctypes, "CDLL", lambda name: nvml)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert this_machine().devices == (Device("cuda:0", 1 << 34, "NVIDIA H200"), Device("cuda:1", 2 << 34, ""))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    assert this_machine().devices == (Device("cuda:0", 2 << 34, ""),)
    assert not nvml.open


def test_without_a_driver_there_are_none(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(ctypes, "CDLL", missing)
    assert this_machine().devices == ()
