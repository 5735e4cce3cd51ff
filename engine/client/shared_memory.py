"""Shared memory of a client: large inputs for a server on the same machine.

The region is a new file of POSIX shared memory, accessible to this user only. It is created and registered with the
first large input, and unlinked as soon as the server has opened it, so a killed client leaves nothing behind. A server
without shared memory is asked once; inputs are then sent in messages. A region that the server lost, as in a restart,
is replaced by a new one.
"""

from __future__ import annotations

import logging
import mmap
import os
import secrets
import threading
from collections.abc import Sequence
from typing import Any

import msgspec.structs
from tritonclient.grpc import service_pb2

from weftline.engine.client.steps import SERVICE, SHORT_MS, Refused, SendRequest, Steps
from weftline.engine.serving.v2.messages import Region, Tensor
from weftline.errors import LimitReached
from weftline.shm.allocator import Allocator
from weftline.shm.block import PAGE_BYTES, align_up

pb: Any = service_pb2
_log = logging.getLogger("weftline.client")

FOLDER = "/dev/shm"

PLACED_BYTES_MIN = 64 << 10
"""Smallest tensor that is placed: below it, a message takes as long."""


class SharedRegion:
    """One region, with an allocator of ranges for requests. Thread-safe.

    name: its name at the server. key: the file's name, for shm_open.
    """

    def __init__(self, name: str, fd: int, size_bytes: int) -> None:
        self.name = name
        self.key = f"/{name}"
        self.size_bytes = size_bytes
        self._buffer = mmap.mmap(fd, size_bytes)
        self._ranges = Allocator(size_bytes)
        self._guard = threading.Lock()
        self._named = True

    @classmethod
    def create(cls, size_bytes: int) -> SharedRegion:
        """Create a region of `size_bytes`, rounded up to a page; LimitReached without memory for it.

        All of it is allocated at once: without memory this is an error here, not a bus error at the first write.
        """
        size = align_up(max(size_bytes, 1), PAGE_BYTES)
        name = f"weftline-client-{secrets.token_hex(8)}"
        try:
            fd = os.open(f"{FOLDER}/{name}", os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise LimitReached(f"cannot make shared memory: {error.strerror}") from None
        try:
            os.posix_fallocate(fd, 0, size)
            return cls(name, fd, size)
        except OSError as error:
            os.unlink(f"{FOLDER}/{name}")  # noqa: PTH108 - beside the os.open above
            raise LimitReached(f"this machine cannot reserve {size} bytes of shared memory: {error.strerror}") from None
        finally:
            os.close(fd)

    def try_place(self, data: bytes | memoryview) -> int | None:
        """Copy `data` into a free range and return its offset; None if it is full."""
        with self._guard:
            offset = self._ranges.try_take(len(data))
        if offset is not None:
            memoryview(self._buffer)[offset : offset + len(data)] = data
        return offset

    def give_back(self, offset: int) -> None:
        """Free a range; KeyError if it is not in use."""
        with self._guard:
            self._ranges.give_back(offset)

    @property
    def taken_bytes(self) -> int:
        return self._ranges.taken_bytes

    def unlink(self) -> None:
        """Remove the name. Idempotent."""
        if self._named:
            self._named = False
            try:
                os.unlink(f"{FOLDER}/{self.name}")  # noqa: PTH108 - beside the os.open above
            except FileNotFoundError:
                pass

    def close(self) -> None:
        """Remove the name and free the memory. Idempotent."""
        self.unlink()
        self._buffer.close()

    def __del__(self) -> None:
        self.unlink()  # the client was not closed


class SharedInputs:
    """Places a client's large inputs in shared memory.

    size_bytes: of the region; 0: inputs stay in their messages.
    """

    def __init__(self, size_bytes: int) -> None:
        self._size_bytes = size_bytes
        self._region: SharedRegion | None = None
        self._registering = threading.Lock()  # held by one request; others do not wait for it

    def place(self, tensors: Sequence[Tensor]) -> Steps[tuple[tuple[Tensor, ...], Lease]]:
        """Move large tensors into the region as long as they fit; return the tensors and their lease.

        While another request registers the region, they stay in their message.
        """
        lease = Lease()
        if not self._size_bytes or all(len(one.raw or b"") < PLACED_BYTES_MIN for one in tensors):
            return tuple(tensors), lease
        if self._region is None and self._registering.acquire(blocking=False):
            try:
                self._region = self._region or (yield from self._registered())
            finally:
                self._registering.release()
        region = self._region
        if region is None:
            return tuple(tensors), lease
        return tuple(lease.move(one, region) for one in tensors), lease

    def forgotten(self, lease: Lease) -> Steps[bool]:
        """Return True if the server lost the region; the next request registers a new one."""
        region = lease.region
        if region is None:
            return False
        try:
            data = yield _request("SystemSharedMemoryStatus", pb.SystemSharedMemoryStatusRequest(name=region.name))
            if region.name in pb.SystemSharedMemoryStatusResponse.FromString(data).regions:
                return False
        except Refused:
            pass
        if self._region is region:
            self._region = None
        return True

    def close(self) -> Steps[None]:
        """Unregister the region and free its memory; errors of the server are ignored."""
        region, self._region, self._size_bytes = self._region, None, 0
        if region is None:
            return
        region.close()
        try:
            yield _request(
                "SystemSharedMemoryUnregister", pb.SystemSharedMemoryUnregisterRequest(name=region.name), 1.0
            )
        except Refused:
            pass

    def _registered(self) -> Steps[SharedRegion | None]:
        """Register a region at the server; None, and a warning, if it has no shared memory."""
        try:
            region = SharedRegion.create(self._size_bytes)
        except LimitReached as error:
            self._do_without(str(error))
            return None
        message = pb.SystemSharedMemoryRegisterRequest(name=region.name, key=region.key, byte_size=region.size_bytes)
        try:
            yield _request("SystemSharedMemoryRegister", message)
        except Refused as refused:
            region.close()
            self._do_without(refused.refusal.message)
            return None
        except BaseException:
            region.close()
            raise
        region.unlink()  # the server has opened it
        return region

    def _do_without(self, why: str) -> None:
        self._size_bytes = 0
        _log.warning("shared memory is not used, inputs are sent in messages: %s", why)


class Lease:
    """The ranges of the region that one request uses."""

    __slots__ = ("_offsets", "region")

    def __init__(self) -> None:
        self.region: SharedRegion | None = None
        self._offsets: list[int] = []

    def move(self, tensor: Tensor, region: SharedRegion) -> Tensor:
        """Copy a tensor into the region and return its reference.

        Returns the tensor itself if it is small or does not fit.
        """
        data = tensor.raw or b""
        offset = region.try_place(data) if len(data) >= PLACED_BYTES_MIN else None
        if offset is None:
            return tensor
        self.region = region
        self._offsets.append(offset)
        return msgspec.structs.replace(tensor, raw=None, region=Region(region.name, offset, len(data)))

    def release(self) -> None:
        """Free the ranges. Idempotent."""
        offsets, self._offsets = self._offsets, []
        for offset in offsets:
            if self.region is not None:
                self.region.give_back(offset)


def _request(method: str, message: Any, timeout_s: float = SHORT_MS / 1000) -> SendRequest:
    return SendRequest(SERVICE + method, message.SerializeToString(), timeout_s)
