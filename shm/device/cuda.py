"""CUDA driver: the `GpuDriver` protocol over `cuda.bindings.driver` (12.9.1 and later).

Shareable memory is made with the virtual memory calls (cuMemCreate, cuMemMap, ...) and leaves as a POSIX descriptor;
the older way is cuMemAlloc with an IPC handle. torch and its friends use the device's primary context, and so does
this, so that an address means the same to all of them. The calls are those of the CUDA Driver API reference, chapters
Virtual Memory Management, Memory Management, Stream Management and Event Management.

Three things the bindings leave to their users. A context is current to a thread, not to a process, so every thread that
calls is given it first. A thread that asks about an event while another one captures a CUDA graph spoils the capture,
so every thread but the one that opened the driver says that others' captures are none of its business. And handles of
memory and events are opaque bytes, read and written at the struct's address, since 13.4.2 took away their only field.
Versions before 12.9.1 keep Python's lock while they wait, so that a thread that waits here stops all the others.
"""

from __future__ import annotations

import contextlib
import ctypes
import threading
from types import ModuleType
from typing import Any

from weftline.errors import MissingPackage
from weftline.shm.device.driver import (
    EVENT_HANDLE_BYTES,
    NO_DRIVER,
    NOT_READY,
    SHARE_HANDLE_BYTES,
    DriverError,
    error_of,
)
from weftline.shm.device.names import index_of


class CudaDriver:
    """This process's way to one CUDA device; see `driver.GpuDriver` for what each call promises.

    MissingPackage when the bindings are not installed; DriverError when the driver or the device is not there.
    """

    def __init__(self, device: str, bindings: ModuleType | None = None) -> None:
        """Retain the device's primary context. bindings: replaces `cuda.bindings.driver` in tests."""
        self.device = device
        self._cuda: Any = bindings or _bindings()
        self._closed = False
        self._thread = threading.local()
        self._opened_by = threading.get_ident()
        cuda = self._cuda
        self._ask("cuInit", 0)
        self._number = self._ask("cuDeviceGet", index_of(device))
        attributes = cuda.CUdevice_attribute
        self._for_network = self._has(attributes.CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED)
        self._locks_read_only = self._has(attributes.CU_DEVICE_ATTRIBUTE_READ_ONLY_HOST_REGISTER_SUPPORTED)
        self._context = self._ask("cuDevicePrimaryCtxRetain", self._number)

    # memory that can be shared by descriptor

    def granularity(self) -> int:
        minimum = self._cuda.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
        return int(self._here("cuMemGetAllocationGranularity", self._kind(), minimum))

    def create(self, size_bytes: int) -> int:
        return int(self._here("cuMemCreate", size_bytes, self._kind(), 0))

    def export(self, memory: int) -> int:
        return int(self._here("cuMemExportToShareableHandle", self._memory(memory), self._descriptor_kind(), 0))

    def import_memory(self, descriptor: int) -> int:
        return int(self._here("cuMemImportFromShareableHandle", descriptor, self._descriptor_kind()))

    def map(self, memory: int, size_bytes: int, writable: bool, at: int = 0) -> int:
        with contextlib.ExitStack() as undo:
            address = at or self.reserve(size_bytes)
            if not at:
                undo.callback(self.unreserve, address, size_bytes)
            self._here("cuMemMap", self._at(address), size_bytes, 0, self._memory(memory), 0)
            undo.callback(self._here, "cuMemUnmap", self._at(address), size_bytes)
            self._here("cuMemSetAccess", self._at(address), size_bytes, [self._access(writable)], 1)
            undo.pop_all()
        return address

    def unmap(self, address: int, size_bytes: int, reserved: bool = False) -> None:
        # A kernel that still reads here, of a tensor that was forgotten early, would take the whole context with it.
        self._here("cuCtxSynchronize")
        self._here("cuMemUnmap", self._at(address), size_bytes)
        if not reserved:
            self.unreserve(address, size_bytes)

    def reserve(self, size_bytes: int) -> int:
        return int(self._here("cuMemAddressReserve", size_bytes, 0, self._at(0), 0))

    def unreserve(self, address: int, size_bytes: int) -> None:
        self._here("cuMemAddressFree", self._at(address), size_bytes)

    def release(self, memory: int) -> None:
        self._here("cuMemRelease", self._memory(memory))

    # memory of this process, and the older way of sharing it

    def allocate(self, size_bytes: int) -> int:
        return int(self._here("cuMemAlloc", size_bytes))

    def free(self, address: int) -> None:
        self._here("cuMemFree", self._at(address))

    def share(self, address: int) -> bytes:
        return _bytes_of(self._here("cuIpcGetMemHandle", self._at(address)), SHARE_HANDLE_BYTES)

    def open_shared(self, handle: bytes) -> int:
        lazily = self._cuda.CUipcMem_flags.CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS
        opened = _filled(self._cuda.CUipcMemHandle(), handle, SHARE_HANDLE_BYTES)
        return int(self._here("cuIpcOpenMemHandle", opened, int(lazily)))

    def close_shared(self, address: int) -> None:
        self._here("cuCtxSynchronize")  # as in `unmap`
        self._here("cuIpcCloseMemHandle", self._at(address))

    # streams

    def stream(self) -> int:
        return int(self._here("cuStreamCreate", int(self._cuda.CUstream_flags.CU_STREAM_NON_BLOCKING)))

    def destroy_stream(self, stream: int) -> None:
        self._here("cuStreamDestroy", self._stream(stream))

    def copy(self, to: int, source: int, size_bytes: int, stream: int) -> None:
        self._here("cuMemcpyAsync", self._at(to), self._at(source), size_bytes, self._stream(stream))

    def synchronize(self, stream: int) -> None:
        self._here("cuStreamSynchronize", self._stream(stream))

    # events

    def event(self, shared: bool = False) -> int:
        """Create an event without timing whose host waits block instead of spinning."""
        flags = self._cuda.CUevent_flags
        kind = int(flags.CU_EVENT_DISABLE_TIMING) | int(flags.CU_EVENT_BLOCKING_SYNC)
        return int(self._here("cuEventCreate", kind | int(flags.CU_EVENT_INTERPROCESS) if shared else kind))

    def export_event(self, event: int) -> bytes:
        return _bytes_of(self._here("cuIpcGetEventHandle", self._event(event)), EVENT_HANDLE_BYTES)

    def import_event(self, handle: bytes) -> int:
        opened = _filled(self._cuda.CUipcEventHandle(), handle, EVENT_HANDLE_BYTES)
        return int(self._here("cuIpcOpenEventHandle", opened))

    def destroy_event(self, event: int) -> None:
        self._here("cuEventDestroy", self._event(event))

    def record(self, event: int, stream: int) -> None:
        self._here("cuEventRecord", self._event(event), self._stream(stream))

    def wait(self, stream: int, event: int) -> None:
        self._here("cuStreamWaitEvent", self._stream(stream), self._event(event), 0)

    def finished(self, event: int) -> bool:
        try:
            self._here("cuEventQuery", self._event(event))
        except DriverError as error:
            if error.code != NOT_READY:
                raise
            return False
        return True

    def wait_event(self, event: int) -> None:
        self._here("cuEventSynchronize", self._event(event))

    # host memory, and facts

    def lock_pages(self, address: int, size_bytes: int, writable: bool) -> None:
        """Page-lock host memory; fails for read-only mappings where the device lacks read-only registration."""
        flags = 0 if writable or not self._locks_read_only else self._cuda.CU_MEMHOSTREGISTER_READ_ONLY
        self._here("cuMemHostRegister", address, size_bytes, flags)

    def unlock_pages(self, address: int) -> None:
        self._here("cuMemHostUnregister", address)

    def memory(self) -> tuple[int, int]:
        free, total = self._here("cuMemGetInfo")
        return int(free), int(total)

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._ask("cuDevicePrimaryCtxRelease", self._number)

    # how calls are made

    def _here(self, call: str, *arguments: Any) -> Any:
        """Call the driver with this device's context current to the calling thread."""
        if not hasattr(self._thread, "ready"):
            self._ask("cuCtxSetCurrent", self._context)
            if threading.get_ident() != self._opened_by:
                mode = self._cuda.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
                self._ask("cuThreadExchangeStreamCaptureMode", mode)
            self._thread.ready = True
        return self._ask(call, *arguments)

    def _ask(self, call: str, *arguments: Any) -> Any:
        """Call the driver and return what it gives: nothing, one value, or a list of several."""
        try:
            code, *gave = getattr(self._cuda, call)(*arguments)
        except RuntimeError as error:  # of the bindings, which load the driver at the first call
            raise DriverError(call, NO_DRIVER, "the NVIDIA driver is not installed here, or too old") from error
        if code != self._cuda.CUresult.CUDA_SUCCESS:
            raise error_of(call, code.name, self._said_of(code))
        return gave[0] if len(gave) == 1 else gave

    def _said_of(self, code: Any) -> str:
        if code.name == NOT_READY:  # asked all the time, and no error
            return ""
        _, said = self._cuda.cuGetErrorString(code)
        return said.decode(errors="replace") if said else ""

    def _has(self, attribute: Any) -> bool:
        return bool(self._ask("cuDeviceGetAttribute", attribute, self._number))

    def _kind(self) -> Any:
        """Return what memory is made as: this device's own, to be exported as a descriptor."""
        cuda = self._cuda
        kind = cuda.CUmemAllocationProp()
        kind.type = cuda.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        kind.location.type = cuda.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        kind.location.id = int(self._number)
        kind.requestedHandleTypes = self._descriptor_kind()
        if self._for_network:
            kind.allocFlags.gpuDirectRDMACapable = 1
        return kind

    def _access(self, writable: bool) -> Any:
        flags = self._cuda.CUmemAccess_flags
        access = self._cuda.CUmemAccessDesc()
        access.location.type = self._cuda.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        access.location.id = int(self._number)
        access.flags = flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE if writable else flags.CU_MEM_ACCESS_FLAGS_PROT_READ
        return access

    def _descriptor_kind(self) -> Any:
        return self._cuda.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR

    # Numbers back into the bindings' own kinds, which refuse to be taken for each other.

    def _memory(self, memory: int) -> Any:
        return self._cuda.CUmemGenericAllocationHandle(memory)

    def _at(self, address: int) -> Any:
        return self._cuda.CUdeviceptr(address)

    def _stream(self, stream: int) -> Any:
        return self._cuda.CUstream(stream)

    def _event(self, event: int) -> Any:
        return self._cuda.CUevent(event)


def _bindings() -> ModuleType:
    try:
        from cuda.bindings import driver
    except ImportError:
        raise MissingPackage("cuda-bindings", "cuda") from None
    module: ModuleType = driver
    return module


def _bytes_of(handle: Any, size_bytes: int) -> bytes:
    return ctypes.string_at(handle.getPtr(), size_bytes)


def _filled(handle: Any, content: bytes, size_bytes: int) -> Any:
    if len(content) != size_bytes:
        raise ValueError(f"a handle of {len(content)} bytes; CUDA's have {size_bytes}")
    ctypes.memmove(handle.getPtr(), content, size_bytes)
    return handle
