"""GPUs in the figures: read through a made-up NVML, left out where there is none or where it does not say."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Mapping
from typing import Any

import pytest

from tests.engine.metrics.made import GIB, Nvml, install_nvml
from tests.engine.metrics.test_registry import read
from tests.engine.metrics.test_snapshots import FakeSession
from weftline.engine.metrics.gpus import SAMPLE_S, GpuSampler
from weftline.engine.metrics.registry import Metrics
from weftline.errors import SessionClosed
from weftline.testing.clock import ManualClock


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> Nvml:
    return install_nvml(monkeypatch)


MEMORY: Mapping[str, Any] = {
    "cuda:0": {
        "left_bytes": 40, "workers": {"see": 4 * GIB, "see-2": 1 * GIB}, "arenas": {"see": 64, "see-2": 0},
        "steps": {"see": {"open_bytes": 20, "peak_bytes": 30}},
        "claims": [("see", "weights and work", 70), ("see", "weights and work", 70), ("see-2", "context", 5)],
    }
}  # fmt: skip
"""What a session says of its memory; `see` is a process that NVML shows, `see-2` one that it does not."""


def test_a_gpus_values_are_shown_by_its_number_and_uuid(nvml: Nvml) -> None:
    samples = read(Metrics(dict))
    first = ("0", "GPU-1")
    assert samples["weftline_gpu_info", "cuda:0", "0", "NVIDIA H200", "GPU-1"] == 1
    assert samples["weftline_gpu_utilization_ratio", *first] == 0.75
    assert samples["weftline_gpu_memory_utilization_ratio", *first] == 0.4
    assert samples["weftline_gpu_memory_total_bytes", *first] == 140 * GIB
    assert (
        samples["weftline_gpu_memory_used_bytes", *first]
        == samples["weftline_gpu_memory_others_bytes", *first]
        == 9 * GIB
    )
    assert samples["weftline_gpu_power_watts", *first] == 412.5
    assert samples["weftline_gpu_temperature_celsius", *first] == 61
    assert samples["weftline_gpu_throttled", "0", "sw_power_cap", "GPU-1"] == 1
    assert samples["weftline_gpu_throttled", "0", "hw_thermal_slowdown", "GPU-1"] == 0
    assert samples["weftline_gpu_ecc_errors_total", "0", "corrected", "GPU-1"] == 12
    assert samples["weftline_gpu_ecc_errors_total", "0", "uncorrected", "GPU-1"] == 3


def test_what_a_gpu_or_the_library_does_not_support_is_left_out(nvml: Nvml) -> None:
    nvml.absent = ("nvmlDeviceGetEnforcedPowerLimit",)
    samples = read(Metrics(dict))
    assert not any(key[0].startswith("weftline_gpu_power_limit") for key in samples), "the library lacks that function"
    shown = {key[0] for key in samples if "GPU-2" in key}
    assert "weftline_gpu_memory_total_bytes" in shown
    lacks = {"weftline_gpu_utilization_ratio", "weftline_gpu_power_watts", "weftline_gpu_ecc_errors_total"}
    assert not lacks & shown


def test_memory_is_shown_by_owner(nvml: Nvml) -> None:
    samples = read(Metrics(lambda: {"ocr": FakeSession(device_memory=MEMORY)}))
    gpu, uuid = "0", "GPU-1"
    assert samples["weftline_gpu_memory_planned_bytes", gpu, "ocr", "see", uuid, "weights and work"] == 140
    assert samples["weftline_gpu_memory_planned_bytes", gpu, "ocr", "see-2", uuid, "context"] == 5
    assert samples["weftline_gpu_memory_held_bytes", gpu, "ocr", "see", uuid, "arena"] == 64
    assert samples["weftline_gpu_memory_held_bytes", gpu, "ocr", "see", uuid, "peak"] == 30
    assert samples["weftline_gpu_memory_held_bytes", gpu, "ocr", "answer", uuid, "kv"] == 80
    assert samples["weftline_gpu_memory_process_bytes", gpu, "ocr", uuid, "see"] == 5 * GIB
    assert ("weftline_gpu_memory_process_bytes", gpu, "ocr", uuid, "see-2") not in samples
    assert samples["weftline_gpu_memory_others_bytes", gpu, uuid] == (9 - 5 - 1) * GIB, "each worker by what is known"


def test_a_session_that_has_just_closed_leaves_the_gpus_to_the_others(nvml: Nvml) -> None:
    class Gone(FakeSession):
        def stats(self) -> Mapping[str, Any]:
            raise SessionClosed("it ended this very moment")

    samples = read(Metrics(lambda: {"gone": Gone(), "ocr": FakeSession(device_memory=MEMORY)}))
    assert samples["weftline_gpu_memory_held_bytes", "0", "ocr", "see", "GPU-1", "arena"] == 64


def test_only_the_gpus_that_the_server_may_use_are_shown(nvml: Nvml, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    (gpu,) = GpuSampler().gpus()
    assert (gpu.index, gpu.device, gpu.uuid) == (1, "cuda:0", "GPU-2")


def test_without_a_driver_there_are_no_such_series_and_no_errors(
    nvml: Nvml, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    nvml.init = 9  # NVML_ERROR_DRIVER_NOT_LOADED
    assert not any(key[0].startswith("weftline_gpu_") for key in read(Metrics(dict)))

    def missing(name: str) -> None:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(ctypes, "CDLL", missing)
    samples = read(Metrics(lambda: {"ocr": FakeSession()}))
    assert samples["weftline_model_ready", "ocr"] == 1 and not any(
        key[0].startswith("weftline_gpu_") for key in samples
    )
    assert not caplog.records


def test_gpus_are_read_at_most_once_a_second(nvml: Nvml) -> None:
    clock = ManualClock()
    sampler = GpuSampler(lambda: clock.now_ms() / 1e3)
    for _ in range(10):
        sampler.gpus()
    assert nvml.calls["nvmlDeviceGetMemoryInfo"] == 2, "two GPUs"
    clock.advance(SAMPLE_S * 1e3 + 1)
    sampler.gpus()
    assert nvml.calls["nvmlDeviceGetMemoryInfo"] == 4
    assert nvml.calls["nvmlInit_v2"] == 1


def test_a_hanging_reading_blocks_no_other_caller(nvml: Nvml, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = ManualClock()
    sampler = GpuSampler(lambda: clock.now_ms() / 1e3)
    before = sampler.gpus()
    clock.advance(SAMPLE_S * 1e3 + 1)
    hangs, goes_on = threading.Event(), threading.Event()

    def hang(self: Nvml, handle: Any, celsius: Any, value: Any) -> None:
        hangs.set()
        assert goes_on.wait(30)

    monkeypatch.setattr(Nvml, "_nvmlDeviceGetTemperature", hang)
    reading = threading.Thread(target=sampler.gpus)
    reading.start()
    try:
        assert hangs.wait(30)
        assert sampler.gpus() is before
    finally:
        goes_on.set()
        reading.join()
