"""What this machine has is asked of NVML, without a CUDA context; here NVML is made up."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest

from weftline.engine.machine import compute_modes, this_machine
from weftline.pipelines.placement.machine import Device

UUIDS = {
    1: "GPU-8932f937-d72c-4106-c12f-20bd9faed9f6",
    2: "GPU-8937aaaa-0000-4106-c12f-20bd9faed9f6",
    21: "MIG-1111f937-d72c-4106-c12f-20bd9faed9f6",
    23: "MIG-1333f937-d72c-4106-c12f-20bd9faed9f6",
}
"""By handle: GPUs, and the MIG devices that the second may be divided into."""


class Nvml:
    """Two GPUs, the second of which does not say what it is."""

    def __init__(self) -> None:
        self.open = False
        self.divided: set[int] = set()
        self.bare = 0  # the divided GPU without a MIG device

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

    def nvmlDeviceGetUUID(self, handle: Any, text: Any, size: int) -> int:
        text.value = UUIDS[handle.value].encode()
        return 0

    def nvmlDeviceGetComputeMode(self, handle: Any, mode: Any) -> int:
        mode._obj.value = 3 if handle.value == 1 else 0
        return 0 if handle.value < 10 else 3

    def nvmlDeviceGetMigMode(self, handle: Any, now: Any, pending: Any) -> int:
        now._obj.value = int(handle.value in self.divided)
        return 0 if handle.value in UUIDS and handle.value < 10 else 3

    def nvmlDeviceGetMaxMigDeviceCount(self, handle: Any, count: Any) -> int:
        count._obj.value = 7
        return 0

    def nvmlDeviceGetMigDeviceHandleByIndex(self, handle: Any, index: int, part: Any) -> int:
        if index not in (1, 3) or handle.value == self.bare:
            return 6  # NVML_ERROR_NOT_FOUND: there is no device of that number
        part._obj.value = handle.value * 10 + index
        return 0

    def nvmlDeviceGetGpuInstanceId(self, part: Any, id: Any) -> int:
        id._obj.value = part.value % 10 + 4
        return 0

    def nvmlDeviceGetComputeInstanceId(self, part: Any, id: Any) -> int:
        id._obj.value = 0
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


def test_gpus_have_their_compute_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    nvml = Nvml()
    monkeypatch.setattr(ctypes, "CDLL", lambda name: nvml)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1,0")
    assert compute_modes() == {"cuda:0": 0, "cuda:1": 3} and not nvml.open
    nvml.divided = {2}
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert compute_modes() == {}  # a MIG device has none
    monkeypatch.setattr(Nvml, "nvmlDeviceGetComputeMode", None)
    assert compute_modes() == {}


@pytest.mark.parametrize(
    ("answer", "reserved", "left"), [(0, 551, 81_559 - 551), (3, 551, 81_559), (0, 81_559, 81_559)]
)
def test_what_the_driver_keeps_for_itself_cannot_be_allocated(monkeypatch, answer, reserved, left) -> None:
    """Where it does not say how much that is, or says nonsense, all of the memory is taken to be there."""

    class Newer(Nvml):
        def nvmlDeviceGetMemoryInfo(self, handle: Any, memory: Any) -> int:
            memory._obj.total = 81_559 << 20
            return 0

        def nvmlDeviceGetMemoryInfo_v2(self, handle: Any, memory: Any) -> int:
            assert memory._obj.version == 0x02000028
            memory._obj.total, memory._obj.reserved = 81_559 << 20, reserved << 20
            return answer

    monkeypatch.setattr(ctypes, "CDLL", lambda name: Newer())
    assert this_machine().devices[0].memory_bytes == left << 20


def test_without_a_driver_there_are_none(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(ctypes, "CDLL", missing)
    assert this_machine().devices == ()


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> Nvml:
    made = Nvml()
    monkeypatch.setattr(ctypes, "CDLL", lambda name: made)
    return made


def seen(monkeypatch: pytest.MonkeyPatch, listed: str | None) -> list[int]:
    """Return the handles of the devices that this machine has with that CUDA_VISIBLE_DEVICES."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if listed is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", listed)
    devices = this_machine().devices
    assert [device.name for device in devices] == [f"cuda:{at}" for at in range(len(devices))]
    return [device.memory_bytes >> 34 for device in devices]


@pytest.mark.parametrize(
    ("listed", "handles"),
    [
        (UUIDS[2], [2]),
        (f"{UUIDS[2]},{UUIDS[1]}", [2, 1]),
        ("GPU-8937,0", [2, 1]),  # as much of one as names one GPU
        ("GPU-89", []),  # names two
        ("1,GPU-ffff,0", [2]),  # the list ends at what is no device
        ("1, 0", [2, 1]),
        ("0,7,1", [1]),
        ("0,0", []),
        ("", []),
        ("-1", []),
        ("none", []),
        ("MIG-1111f937-d72c-4106-c12f-20bd9faed9f6", []),  # no GPU is divided
    ],
)
def test_visible_devices_are_named_by_number_or_uuid_as_cuda_reads_them(
    listed: str, handles: list[int], nvml: Nvml, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert seen(monkeypatch, listed) == handles


@pytest.mark.parametrize(
    ("listed", "handles"),
    [
        (UUIDS[23], [23]),
        ("MIG-1333", [23]),
        ("MIG-1", []),
        (f"MIG-{UUIDS[2]}/7/0", [23]),  # as drivers before 470 name it
        (f"{UUIDS[23]},{UUIDS[21]},0", [23]),  # a process sees one MIG device, and nothing beside it
        ("1", [21]),  # a divided GPU is its first MIG device
        (None, [21]),
        ("0", [1]),
    ],
)
def test_a_mig_device_is_the_only_one_that_is_seen(
    listed: str | None, handles: list[int], nvml: Nvml, monkeypatch: pytest.MonkeyPatch
) -> None:
    nvml.divided = {2}
    assert seen(monkeypatch, listed) == handles


def test_a_divided_gpu_without_mig_devices_is_not_there(nvml: Nvml, monkeypatch: pytest.MonkeyPatch) -> None:
    nvml.divided, nvml.bare = {2}, 2
    assert seen(monkeypatch, None) == [1]


@pytest.mark.parametrize(
    ("listed", "warns"), [("GPU-ffff", True), ("9", True), ("-1", False), ("", False), ("0", False)]
)
def test_an_entry_without_a_device_is_logged_unless_it_hides_all(
    listed: str, warns: bool, nvml: Nvml, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    seen(monkeypatch, listed)
    assert [listed in record.getMessage() for record in caplog.records] == [True] * warns


def test_an_older_driver_that_knows_no_uuids_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Older:
        nvmlInit_v2 = Nvml.nvmlInit_v2
        nvmlDeviceGetCount_v2 = Nvml.nvmlDeviceGetCount_v2
        nvmlDeviceGetHandleByIndex_v2 = Nvml.nvmlDeviceGetHandleByIndex_v2
        nvmlDeviceGetMemoryInfo = Nvml.nvmlDeviceGetMemoryInfo
        nvmlDeviceGetName = Nvml.nvmlDeviceGetName
        nvmlShutdown = Nvml.nvmlShutdown

    monkeypatch.setattr(ctypes, "CDLL", lambda name: Older())
    assert seen(monkeypatch, None) == [1, 2]
    assert seen(monkeypatch, UUIDS[1]) == [] and "CUDA_VISIBLE_DEVICES" in caplog.text
