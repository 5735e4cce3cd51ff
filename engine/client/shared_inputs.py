"""Pass large inputs in shared memory: register it with the first one, and again if the server lost it.

Steps like those of `calls.py`. A server without shared memory is asked once; inputs then travel in messages.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from typing import Any

import msgspec.structs
from tritonclient.grpc import service_pb2

from weftline.engine.client.refusal import Refused
from weftline.engine.client.region import PLACED_BYTES_MIN, SharedRegion
from weftline.engine.client.steps import SERVICE, SHORT_MS, SendRequest, Steps
from weftline.engine.serving.v2.messages import Region, Tensor
from weftline.errors import LimitReached

pb: Any = service_pb2
_log = logging.getLogger("weftline.client")


class SharedInputs:
    """Places a client's large inputs in shared memory. `size_bytes` 0: they stay in their messages."""

    def __init__(self, size_bytes: int) -> None:
        self._size_bytes = size_bytes
        self._region: SharedRegion | None = None
        self._registering = threading.Lock()  # held by one request; others do not wait for it

    def place(self, tensors: Sequence[Tensor]) -> Steps[tuple[tuple[Tensor, ...], Lease]]:
        """Move large tensors into the region while it has room; return the tensors and their lease.

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
        """Return True if the server lost the region, as after a restart; the next request registers a new one."""
        region = lease.region
        if region is None:
            return False
        try:
            answer = yield _send("SystemSharedMemoryStatus", pb.SystemSharedMemoryStatusRequest(name=region.name))
            if region.name in pb.SystemSharedMemoryStatusResponse.FromString(answer).regions:
                return False
        except Refused:
            pass
        if self._region is region:
            self._region = None
        return True

    def leave(self) -> Steps[None]:
        """Unregister the region and free its memory; errors of the server are ignored."""
        region, self._region, self._size_bytes = self._region, None, 0
        if region is None:
            return
        region.close()
        try:
            yield _send("SystemSharedMemoryUnregister", pb.SystemSharedMemoryUnregisterRequest(name=region.name), 1.0)
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
            yield _send("SystemSharedMemoryRegister", message)
        except Refused as refused:
            region.close()
            self._do_without(refused.refusal.message)
            return None
        except BaseException:
            region.close()
            raise
        region.unlink()  # the server holds it: no name is needed, and none is left behind
        return region

    def _do_without(self, why: str) -> None:
        self._size_bytes = 0
        _log.warning("shared memory is not used, inputs travel in messages: %s", why)


class Lease:
    """The ranges of the region that one request uses."""

    __slots__ = ("_offsets", "region")

    def __init__(self) -> None:
        self.region: SharedRegion | None = None
        self._offsets: list[int] = []

    def move(self, tensor: Tensor, region: SharedRegion) -> Tensor:
        """Copy a tensor into the region and return its reference; the tensor itself if small, or without room."""
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


def _send(method: str, message: Any, timeout_s: float = SHORT_MS / 1000) -> SendRequest:
    return SendRequest(SERVICE + method, message.SerializeToString(), timeout_s)
