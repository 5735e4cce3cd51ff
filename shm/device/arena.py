"""Device arena: device memory shared between processes, with the interface of a host arena.

The worker that writes creates an arena on its device; the others of that device attach to it, read-only, by a
descriptor or, where the driver shares nothing by descriptor, by a handle:

    share mode      made by             shared by                        it ends
    'descriptor'    create, map         export, a descriptor             with its last mapping and descriptor, anywhere
    'handle'        allocate            share, 64 bytes                  with the process that created it

`probe` chooses the share mode. The driver keeps an address range mapped while a tensor in it is referenced: a closed
arena returns no new views, and it is unmapped with its last view.
"""

from __future__ import annotations

import contextlib
import os
import weakref
from types import TracebackType
from typing import Any, NamedTuple

from weftline.shm.block import Place, align_up
from weftline.shm.device.driver import DeviceLost, DeviceOutOfMemory, DriverError, GpuDriver
from weftline.shm.device.tensor import DeviceTensor
from weftline.shm.lease import DEVICE_ALIGN_BYTES
from weftline.shm.spec import ITEM_BYTES, TensorSpec

HANDLE_MULTIPLE_BYTES = 2 << 20
"""Allocations shared by handle are multiples of this: a smaller one shares its 2 MiB parent, and with it its neighbours
(CUDA C++ Programming Guide, Interprocess Communication)."""


class DeviceArena:
    """One segment of a device's memory: writable for the process that created it, read-only for those that attach.

    address: where it lies in this process's device addresses.
    fd:      the descriptor to be sent, owned by this object; -1 for a guest's, or one shared by handle.
    handle:  IPC handle that it is opened by in share mode 'handle'.
    writable_by_necessity: a guest's, whose driver refused to map it read-only; nothing but care protects it.
    """

    def __init__(
        self,
        driver: GpuDriver,
        mapping: _Mapping,
        share_mode: str,
        *,
        writable: bool,
        fd: int = -1,
        handle: bytes = b"",
        writable_by_necessity: bool = False,
    ) -> None:
        self.device = driver.device
        self.address = mapping.address
        self.size_bytes = mapping.size_bytes
        self.share_mode = share_mode
        self.writable = writable
        self.writable_by_necessity = writable_by_necessity
        self.fd = fd
        self.handle = handle
        self._mapping: _Mapping | None = mapping

    @classmethod
    def create(cls, driver: GpuDriver, size_bytes: int, share_mode: str = "descriptor") -> DeviceArena:
        """Make an arena of `size_bytes`, rounded up to the driver's granularity.

        Raises DeviceOutOfMemory, or DriverError if the driver does not support this share mode; frees all it allocated.
        """
        if share_mode == "handle":
            return cls._allocated(driver, align_up(max(size_bytes, 1), HANDLE_MULTIPLE_BYTES))
        if share_mode != "descriptor":
            raise ValueError(f"unknown share mode {share_mode!r}; expected 'descriptor' or 'handle'")
        size = align_up(max(size_bytes, 1), driver.granularity())
        with contextlib.ExitStack() as undo:
            memory = driver.create(size)
            undo.callback(driver.release, memory)  # at the end in any case: mapping and descriptor hold the memory
            mapping = _Mapping(driver, driver.map(memory, size, True), size, share_mode)
            undo.callback(mapping.end)
            fd = driver.export(memory)
            undo.pop_all()
        driver.release(memory)
        return cls(driver, mapping, share_mode, writable=True, fd=fd)

    @classmethod
    def _allocated(cls, driver: GpuDriver, size: int) -> DeviceArena:
        mapping = _Mapping(driver, driver.allocate(size), size, "allocation")
        try:
            handle = driver.share(mapping.address)
        except BaseException:
            mapping.end()
            raise
        return cls(driver, mapping, "handle", writable=True, handle=handle)

    @classmethod
    def attach(
        cls, driver: GpuDriver, size_bytes: int, share_mode: str, descriptor: int = -1, handle: bytes = b""
    ) -> DeviceArena:
        """Map another process's arena of `size_bytes`, read-only where the driver can.

        Takes over the descriptor, and closes it also when it fails: the mapping holds the memory. Raises ValueError
        for a size that no arena has, DriverError when the driver refuses.
        """
        try:
            if share_mode not in ("descriptor", "handle") or size_bytes <= 0:
                raise ValueError(f"an arena of {size_bytes} bytes in share mode {share_mode!r} cannot be attached to")
            if share_mode == "handle":
                mapping = _Mapping(driver, driver.open_shared(handle), size_bytes, share_mode)
                return cls(driver, mapping, share_mode, writable=False, writable_by_necessity=True)
            memory = driver.import_memory(descriptor)
            try:
                address, by_necessity = _map_to_read(driver, memory, size_bytes)
            finally:
                driver.release(memory)
            mapping = _Mapping(driver, address, size_bytes, share_mode)
            return cls(driver, mapping, share_mode, writable=False, writable_by_necessity=by_necessity)
        finally:
            if descriptor >= 0:
                os.close(descriptor)

    def view(self, place: Place, spec: TensorSpec, writable: bool = False) -> DeviceTensor:
        """Return the tensor at `place`, where it lies.

        ValueError when spec and place disagree, leave the arena or are not aligned, when a guest asks for a writable
        one, and when the arena is closed.
        """
        if self._mapping is None:
            raise ValueError("the device arena is closed")
        place.check_inside(self.size_bytes)
        if spec.size_bytes != place.size_bytes:
            raise ValueError(f"{spec} takes {spec.size_bytes} bytes, its place has {place.size_bytes}")
        if place.block % DEVICE_ALIGN_BYTES or place.offset % ITEM_BYTES[spec.dtype]:
            raise ValueError(
                f"{spec} at {place.offset} of the block at {place.block}: blocks on a device start at multiples of "
                f"{DEVICE_ALIGN_BYTES} bytes, and elements at multiples of their size"
            )
        if writable and not self.writable:
            raise ValueError("only the process that created a device arena may write it")
        return DeviceTensor(spec, self.device, self.address + place.offset, self._mapping, writable)

    def place_of(self, tensor: DeviceTensor) -> int | None:
        """Return the offset at which a tensor lies in this arena, or None when it lies elsewhere."""
        offset = tensor.address - self.address
        inside = tensor.device == self.device and offset >= 0 and offset + tensor.nbytes <= self.size_bytes
        return offset if inside else None

    def close(self) -> None:
        """Close the descriptor and let the mapping go, which ends with its last tensor."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
        self._mapping = None

    def __enter__(self) -> DeviceArena:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()


class _Mapping:
    """An address range of a device in this process, unmapped when its last reference is dropped."""

    __slots__ = ("__weakref__", "_end", "address", "size_bytes")

    def __init__(self, driver: GpuDriver, address: int, size_bytes: int, kind: str) -> None:
        self.address = address
        self.size_bytes = size_bytes
        # Not at exit: the process gives everything back then, and what still looks at the range may outlive this.
        self._end: Any = weakref.finalize(self, _give_back, driver, address, size_bytes, kind)
        self._end.atexit = False

    def end(self) -> None:
        self._end()


def _give_back(driver: GpuDriver, address: int, size_bytes: int, kind: str) -> None:
    # A lost device has no mapping any more, and the error has no receiver.
    with contextlib.suppress(DriverError):
        if kind == "descriptor":
            driver.unmap(address, size_bytes)
        elif kind == "handle":
            driver.close_shared(address)
        else:
            driver.free(address)


def _map_to_read(driver: GpuDriver, memory: int, size_bytes: int) -> tuple[int, bool]:
    """Return where the memory is mapped, and whether it had to be for writing too."""
    try:
        return driver.map(memory, size_bytes, False), False
    except (DeviceLost, DeviceOutOfMemory):
        raise
    except DriverError:
        return driver.map(memory, size_bytes, True), True


SHARE_MODES = ("descriptor", "handle", "host")
"""Share modes in order of preference. With 'host' there is no arena: tensors travel through page-locked host memory."""


class ShareResult(NamedTuple):
    """Result of sharing a device: its arena (None on 'host'), the share mode, and the refused modes."""

    arena: DeviceArena | None
    share_mode: str
    why: str


def probe(driver: GpuDriver, size_bytes: int) -> ShareResult:
    """Make an arena of at least `size_bytes` in the first share mode that works here, and check that it can be shared.

    A process that cannot attach the arena reports that when it tries (engine/scheduler/device_messages.py). Raises
    DeviceOutOfMemory and DeviceLost: no other mode would help.
    """
    refusals: list[str] = []
    for share_mode in SHARE_MODES[:-1]:
        try:
            arena = DeviceArena.create(driver, size_bytes, share_mode)
            if share_mode == "descriptor":
                _try_attach(driver, arena)
        except (DeviceLost, DeviceOutOfMemory):
            raise
        except (DriverError, OSError) as refused:
            refusals.append(f"{share_mode}: {refused}")
        else:
            return ShareResult(arena, share_mode, "; ".join(refusals))
    return ShareResult(None, "host", "; ".join(refusals))


def _try_attach(driver: GpuDriver, arena: DeviceArena) -> None:
    """Attach to an arena as another process would; closes it when the driver refuses.

    A handle cannot be tested like this: CUDA opens none in the process that created it.
    """
    try:
        DeviceArena.attach(driver, arena.size_bytes, arena.share_mode, os.dup(arena.fd)).close()
    except BaseException:
        arena.close()
        raise
