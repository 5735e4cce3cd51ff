"""Choice of the share mode: the first mode that works, with the reason of every refused one."""

from pathlib import Path

import pytest

from weftline.shm.device.arena import SHARE_MODES, DeviceArena, probe
from weftline.shm.device.driver import DeviceLost, DeviceOutOfMemory, DriverError
from weftline.testing.fake_gpu.gpu import FakeGpu

MIB = 1 << 20


def open_descriptors() -> set[str]:
    return {link.name for link in Path("/proc/self/fd").iterdir() if link.exists() or link.is_symlink()}


class Shaky(FakeGpu):
    """A device that fails once at each selected call."""

    fails: dict[str, DriverError]

    @property
    def total(self) -> int:
        return self.memory()[1]

    def _ask(self, call: str) -> None:
        if call in self.fails:
            raise self.fails.pop(call)

    def create(self, size_bytes: int) -> int:
        self._ask("create")
        return super().create(size_bytes)

    def export(self, memory: int) -> int:
        self._ask("export")
        return super().export(memory)

    def import_memory(self, descriptor: int) -> int:
        self._ask("import_memory")
        return super().import_memory(descriptor)

    def share(self, address: int) -> bytes:
        self._ask("share")
        return bytes(64)


def shaky(*fails: DriverError) -> Shaky:
    driver = Shaky("fake:0")
    driver.fails = {error.call: error for error in fails}
    return driver


@pytest.mark.parametrize(
    ("device", "share_mode"), [("fake:0", 0), ("fake-legacy:0", 1), ("fake-alone:0", 2), ("fake-closed:0", 0)]
)
def test_a_device_is_shared_in_the_first_mode_that_works(device: str, share_mode: int) -> None:
    shared = probe(FakeGpu(device), 3 * MIB)
    assert shared.share_mode == SHARE_MODES[share_mode]
    assert [f"{name}: " in shared.why for name in SHARE_MODES[:share_mode]] == [True] * share_mode
    if shared.arena is None:
        assert shared.share_mode == "host"
    else:
        assert shared.arena.size_bytes == 4 * MIB
        assert (shared.arena.fd >= 0) == (shared.share_mode == "descriptor")
        assert len(shared.arena.handle) == (64 if shared.share_mode == "handle" else 0)
        shared.arena.close()


@pytest.mark.parametrize("call", ["create", "export", "import_memory"])
def test_a_refusal_of_the_first_mode_selects_the_second_and_is_kept(call: str) -> None:
    driver = shaky(DriverError(call, "CUDA_ERROR_NOT_SUPPORTED", "in a container"))
    DeviceArena.create(FakeGpu("fake:0"), MIB).close()  # a fake opens what it keeps for itself at its first memory
    before = open_descriptors()
    shared = probe(driver, MIB)
    assert shared.share_mode == "handle"
    assert shared.why == f"descriptor: {call}: CUDA_ERROR_NOT_SUPPORTED (in a container)"
    assert shared.arena is not None
    assert driver.total - driver.memory()[0] == shared.arena.size_bytes  # what was tried first is given back
    shared.arena.close()
    assert open_descriptors() <= before


def test_both_refusals_are_reported_by_the_last_mode() -> None:
    shared = probe(shaky(DriverError("export", "NO"), DriverError("share", "NEITHER")), MIB)
    assert shared == (None, "host", "descriptor: export: NO; handle: share: NEITHER")


def test_want_of_memory_and_a_lost_device_are_errors_and_not_refusals() -> None:
    with pytest.raises(DeviceOutOfMemory):
        probe(shaky(DeviceOutOfMemory("create", "CUDA_ERROR_OUT_OF_MEMORY")), MIB)
    with pytest.raises(DeviceLost):
        probe(shaky(DeviceLost("import_memory", "CUDA_ERROR_ILLEGAL_ADDRESS")), MIB)
