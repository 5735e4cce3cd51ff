"""The CUDA driver's calls, held against the real bindings without a card: names, arguments, enums, structs, errors."""

import ctypes
import importlib.util
import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, cast

import pytest

driver = pytest.importorskip("cuda.bindings.driver")

from tests.shm.device.bindings import StandIn, kinds_of  # noqa: E402 - after the bindings are known to be there
from weftline.errors import MissingPackage  # noqa: E402
from weftline.shm.device import cuda  # noqa: E402
from weftline.shm.device.cuda import CudaDriver  # noqa: E402
from weftline.shm.device.driver import (  # noqa: E402  # noqa: E402
    LOST,
    NO_DRIVER,
    NUMBERS,
    OUT_OF_MEMORY,
    DeviceLost,
    DeviceOutOfMemory,
    DriverError,
    GpuDriver,
    error_of,
)
from weftline.testing.recorder import ROLES  # noqa: E402

MIB = 1 << 20


def opened(stand_in: StandIn, device: str = "cuda:1", of: type[CudaDriver] = CudaDriver) -> CudaDriver:
    return of(device, cast(ModuleType, stand_in))


def ask_everything(gpu: GpuDriver) -> None:
    """Make every call of the protocol once, in an order that makes sense."""
    gpu.granularity()
    memory = gpu.create(2 * MIB)
    descriptor = gpu.export(memory)
    for writable in (True, False):
        gpu.unmap(gpu.map(gpu.import_memory(descriptor), 2 * MIB, writable), 2 * MIB)
    os.close(descriptor)
    reserved = gpu.reserve(4 * MIB)
    gpu.unmap(gpu.map(memory, 2 * MIB, True, reserved), 2 * MIB, True)
    gpu.unreserve(reserved, 4 * MIB)
    gpu.release(memory)
    address = gpu.allocate(2 * MIB)
    gpu.close_shared(gpu.open_shared(gpu.share(address)))
    stream, event, shared = gpu.stream(), gpu.event(), gpu.event(shared=True)
    theirs = gpu.import_event(gpu.export_event(shared))
    gpu.lock_pages(4096, 4096, writable=True)
    gpu.lock_pages(8192, 4096, writable=False)
    gpu.copy(address, 4096, 256, stream)
    gpu.record(event, stream)
    gpu.wait(stream, theirs)
    gpu.finished(event)
    gpu.wait_event(event)
    gpu.synchronize(stream)
    gpu.unlock_pages(4096)
    for one in (event, shared, theirs):
        gpu.destroy_event(one)
    gpu.destroy_stream(stream)
    gpu.free(address)
    gpu.memory()
    gpu.close()


def test_every_call_of_the_protocol_is_one_that_the_real_bindings_take() -> None:
    stand_in = StandIn()
    gpu = opened(stand_in)
    asked: set[str] = set()

    class Noting:
        def __getattr__(self, name: str) -> Any:
            asked.add(name)
            return getattr(gpu, name)

    ask_everything(cast(GpuDriver, Noting()))
    assert asked == set(ROLES) == {name for name in vars(GpuDriver) if not name.startswith("_")} - {"device"}
    assert {name for name, _ in stand_in.calls} >= {"cuMemCreate", "cuMemSetAccess", "cuIpcOpenEventHandle"}


MISTAKES = {
    "a function's name": ('"cuMemCreate"', '"cuMemCreat"'),
    "a missing argument": ("size_bytes, 0, self._memory(memory), 0)", "size_bytes, self._memory(memory), 0)"),
    "an argument too many": ('"cuMemRelease", self._memory(memory)', '"cuMemRelease", self._memory(memory), 0'),
    "a struct's field": ("kind.requestedHandleTypes =", "kind.requestedHandleType ="),
    "an inner struct's field": ("gpuDirectRDMACapable = 1", "gpuDirectRdmaCapable = 1"),
    "a struct's name": ("self._cuda.CUmemAccessDesc()", "self._cuda.CUmemAccessDescriptor()"),
    "an enum's name": ("CU_MEM_ALLOC_GRANULARITY_MINIMUM", "CU_MEM_ALLOC_GRANULARITY_SMALLEST"),
    "another enum": (
        "CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM",
        "CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE",
    ),
    "a number for an enum": (
        '"cuMemExportToShareableHandle", self._memory(memory), self._descriptor_kind()',
        '"cuMemExportToShareableHandle", self._memory(memory), 1',
    ),
    "an enum for a number": (
        "int(self._cuda.CUstream_flags.CU_STREAM_NON_BLOCKING)",
        "self._cuda.CUstream_flags.CU_STREAM_NON_BLOCKING",
    ),
    "arguments that changed places": (
        '"cuStreamWaitEvent", self._stream(stream), self._event(event)',
        '"cuStreamWaitEvent", self._event(event), self._stream(stream)',
    ),
    "the other kind of handle": ("_filled(self._cuda.CUipcEventHandle()", "_filled(self._cuda.CUipcMemHandle()"),
    "no list around a struct": ("[self._access(writable)], 1", "self._access(writable), 1"),
    "a constant's name": ("CU_MEMHOSTREGISTER_READ_ONLY", "CU_MEMHOSTREGISTER_READONLY"),
    "one value where there are two": (
        'free, total = self._here("cuMemGetInfo")',
        'free, total, _ = self._here("cuMemGetInfo")',
    ),
    "a field of a handle": (
        "ctypes.string_at(handle.getPtr(), size_bytes)",
        "bytes(handle.padding)",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_in_a_call_is_found_without_a_card(mistake: str, tmp_path: Path) -> None:
    right, wrong = MISTAKES[mistake]
    source = Path(cuda.__file__).read_text()
    assert source.count(right) == 1, f"the driver's source has changed: {right!r} is to be found once"
    (tmp_path / "mistaken.py").write_text(source.replace(right, wrong))
    found = importlib.util.spec_from_file_location("mistaken", tmp_path / "mistaken.py")
    assert found is not None and found.loader is not None
    mistaken = importlib.util.module_from_spec(found)
    found.loader.exec_module(mistaken)
    with pytest.raises((TypeError, AttributeError, ValueError)):
        ask_everything(opened(StandIn(), of=mistaken.CudaDriver))


def test_memory_is_exportable_and_mapped_with_its_access() -> None:
    stand_in = StandIn()
    gpu = opened(stand_in)
    address = gpu.map(gpu.create(4 * MIB), 4 * MIB, writable=False)
    ((size, kind, _),) = stand_in.of("cuMemCreate")
    assert size == 4 * MIB
    assert kind.type == driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    assert kind.location.type == driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    assert kind.requestedHandleTypes == driver.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
    assert kind.allocFlags.gpuDirectRDMACapable == 1
    ((number,),) = stand_in.of("cuDeviceGet")
    ((device,),) = stand_in.of("cuDevicePrimaryCtxRetain")
    assert (number, kind.location.id) == (1, int(device))
    ((at, size, (access,), count),) = stand_in.of("cuMemSetAccess")
    assert (int(at), size, count) == (address, 4 * MIB, 1)
    assert access.flags == driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READ
    assert (access.location.type, access.location.id) == (kind.location.type, int(device))
    gpu.map(gpu.create(4 * MIB), 4 * MIB, writable=True)
    written = stand_in.of("cuMemSetAccess")[1][2][0]
    assert written.flags == driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE


def test_a_refused_mapping_is_undone() -> None:
    stand_in = StandIn()
    gpu = opened(stand_in)
    stand_in.refuses["cuMemSetAccess"] = "CUDA_ERROR_INVALID_VALUE"
    with pytest.raises(DriverError, match="cuMemSetAccess: CUDA_ERROR_INVALID_VALUE"):
        gpu.map(gpu.create(2 * MIB), 2 * MIB, writable=False)
    ((reserved, size),) = stand_in.of("cuMemAddressFree")
    ((mapped, _),) = stand_in.of("cuMemUnmap")
    assert (int(reserved), size) == (int(mapped), 2 * MIB)
    stand_in.refuses["cuMemMap"] = "CUDA_ERROR_INVALID_VALUE"
    with pytest.raises(DriverError, match="cuMemMap"):
        gpu.map(gpu.create(2 * MIB), 2 * MIB, writable=False)
    assert (len(stand_in.of("cuMemAddressFree")), len(stand_in.of("cuMemUnmap"))) == (2, 1)


def test_handles_travel_as_the_bytes_that_they_are() -> None:
    stand_in = StandIn()
    gpu = opened(stand_in)
    handle = bytes(range(64))
    gpu.open_shared(handle)
    gpu.import_event(handle[::-1])
    ((memory, _),) = stand_in.of("cuIpcOpenMemHandle")
    ((event,),) = stand_in.of("cuIpcOpenEventHandle")
    assert ctypes.string_at(memory.getPtr(), 64) == handle
    assert ctypes.string_at(event.getPtr(), 64) == handle[::-1]
    shared = gpu.share(gpu.allocate(2 * MIB))
    assert len(shared) == len(gpu.export_event(gpu.event(shared=True))) == 64
    with pytest.raises(ValueError, match="a handle of 63 bytes"):
        gpu.open_shared(handle[:63])


def test_event_flags_disable_timing_block_and_share() -> None:
    stand_in = StandIn()
    gpu = opened(stand_in)
    gpu.event()
    gpu.event(shared=True)
    flags = driver.CUevent_flags
    plain = int(flags.CU_EVENT_DISABLE_TIMING) | int(flags.CU_EVENT_BLOCKING_SYNC)
    shared = plain | int(flags.CU_EVENT_INTERPROCESS)
    assert stand_in.of("cuEventCreate") == [(plain,), (shared,)]


def test_an_event_that_is_not_done_is_no_error() -> None:
    stand_in = StandIn()
    gpu = opened(stand_in)
    event = gpu.event()
    assert gpu.finished(event)
    stand_in.refuses["cuEventQuery"] = "CUDA_ERROR_NOT_READY"
    assert not gpu.finished(event)
    assert stand_in.of("cuGetErrorString") == []
    stand_in.refuses["cuEventQuery"] = "CUDA_ERROR_LAUNCH_FAILED"
    with pytest.raises(DeviceLost, match="a kernel ended with an exception"):
        gpu.finished(event)


def test_host_memory_is_locked_read_only_where_the_device_knows_that() -> None:
    stand_in = StandIn()
    gpu = opened(stand_in)
    gpu.lock_pages(4096, 8192, writable=False)
    gpu.lock_pages(4096, 8192, writable=True)
    stand_in.gives["cuDeviceGetAttribute"] = 0
    opened(stand_in).lock_pages(4096, 8192, writable=False)
    assert [flags for _, _, flags in stand_in.of("cuMemHostRegister")] == [driver.CU_MEMHOSTREGISTER_READ_ONLY, 0, 0]
    opened(stand_in).create(2 * MIB)
    assert stand_in.of("cuMemCreate")[0][1].allocFlags.gpuDirectRDMACapable == 0


def test_the_context_is_made_current_once_on_every_thread_that_calls() -> None:
    stand_in = StandIn()
    gpu = opened(stand_in)
    event = gpu.event()
    gpu.finished(event)
    assert len(stand_in.of("cuCtxSetCurrent")) == 1

    def look(ask: Callable[[int], object]) -> None:
        thread = threading.Thread(target=ask, args=(event,))
        thread.start()
        thread.join()

    look(gpu.finished)
    look(gpu.wait_event)
    contexts = {int(context) for (context,) in stand_in.of("cuCtxSetCurrent")}
    assert (len(stand_in.of("cuCtxSetCurrent")), len(contexts)) == (3, 1)


def test_a_thread_that_only_waits_does_not_spoil_what_another_one_captures() -> None:
    stand_in = StandIn()
    gpu = opened(stand_in)
    event = gpu.event()
    gpu.wait_event(event)
    assert stand_in.of("cuThreadExchangeStreamCaptureMode") == []  # the frameworks' own thread stays as it was
    thread = threading.Thread(target=lambda: (gpu.wait_event(event), gpu.finished(event)))
    thread.start()
    thread.join()
    mode = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
    assert stand_in.of("cuThreadExchangeStreamCaptureMode") == [(mode,)]
    assert [name for name, _ in stand_in.calls[-4:]] == [
        "cuCtxSetCurrent", "cuThreadExchangeStreamCaptureMode", "cuEventSynchronize", "cuEventQuery",
    ]  # fmt: skip


def test_memory_is_not_unmapped_under_work() -> None:
    stand_in = StandIn()
    gpu = opened(stand_in)
    address = gpu.map(gpu.create(2 * MIB), 2 * MIB, writable=True)
    before = len(stand_in.calls)
    gpu.unmap(address, 2 * MIB)
    assert [name for name, _ in stand_in.calls[before:]] == ["cuCtxSynchronize", "cuMemUnmap", "cuMemAddressFree"]


def test_the_context_is_given_back_once() -> None:
    stand_in = StandIn()
    gpu = opened(stand_in)
    gpu.close()
    gpu.close()
    assert len(stand_in.of("cuDevicePrimaryCtxRelease")) == 1


@pytest.mark.parametrize(
    ("code", "kind", "says"),
    [
        ("CUDA_ERROR_OUT_OF_MEMORY", DeviceOutOfMemory, "in the driver's words"),
        ("CUDA_ERROR_ILLEGAL_ADDRESS", DeviceLost, "memory that is not mapped"),
        ("CUDA_ERROR_ECC_UNCORRECTABLE", DeviceLost, "could not be corrected"),
        ("CUDA_ERROR_NOT_SUPPORTED", DriverError, "in the driver's words"),
    ],
)
def test_a_refusal_says_what_it_means(code: str, kind: type[DriverError], says: str) -> None:
    stand_in = StandIn()
    gpu = opened(stand_in)
    stand_in.refuses["cuMemAlloc"] = code
    with pytest.raises(DriverError, match=rf"cuMemAlloc: {code} \(.*{says}") as refused:
        gpu.allocate(2 * MIB)
    assert type(refused.value) is kind
    assert refused.value.code == code


def test_every_error_that_loses_a_device_is_one_of_cudas() -> None:
    assert set(LOST) <= {code.name for code in driver.CUresult}
    assert {type(error_of("x", code)) for code in LOST} == {DeviceLost}


def test_every_error_that_cudas_documentation_calls_final_loses_the_device() -> None:
    final = {code.name for code in driver.CUresult if "must be terminated and relaunched" in " ".join(_about(code))}
    assert len(final) > 9 and final <= set(LOST)
    assert {"CUDA_ERROR_UNKNOWN", "CUDA_ERROR_ASSERT", "CUDA_ERROR_ECC_UNCORRECTABLE"} <= set(LOST)


def test_numbers_of_errors_are_cudas_own() -> None:
    assert set(NUMBERS.values()) == {*LOST, OUT_OF_MEMORY}
    assert {number: driver.CUresult(number).name for number in NUMBERS} == NUMBERS


def _about(code: Any) -> list[str]:
    return (code.__doc__ or "").split()


def test_a_machine_without_the_driver_or_the_bindings_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    class Nothing(StandIn):
        def __getattr__(self, name: str) -> Any:
            def fails(*_: object) -> None:
                raise RuntimeError("Failed to dlopen libcuda.so.1")

            return fails

    with pytest.raises(DriverError, match=f"cuInit: {NO_DRIVER} .the NVIDIA driver is not installed"):
        opened(Nothing())
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    with pytest.raises(MissingPackage, match=r"pip install 'weftline\[cuda\]'"):
        CudaDriver("cuda:0")


def test_the_types_of_arguments_are_read_from_the_real_module() -> None:
    assert kinds_of("cuStreamWaitEvent") == {
        "hStream": (driver.CUstream,),
        "hEvent": (driver.CUevent,),
        "Flags": (int,),
    }
    assert kinds_of("cuMemSetAccess")["desc"] == (list, tuple)
    assert kinds_of("cuMemGetAllocationGranularity")["option"] == (driver.CUmemAllocationGranularity_flags,)
