"""Registration of the v2 protocol with Ray Serve's gRPC proxy, with messages as raw bytes.

Ray Serve imports `add_to_server` by name in every proxy and replaces the handlers by its own. Their serialisation
stays: the proxy passes the bytes of a message to a replica, which parses them once.

`RayCallContext` adapts Ray Serve's context for the gRPC handlers. The proxy does not forward deadlines: when one
expires, the call is cancelled here.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from typing import Any

import grpc
import grpc.aio

from weftline.engine.serving.grpc.protos import HEALTH_SERVICE, INFERENCE_SERVICE

UNARY = (
    "ServerLive",
    "ServerReady",
    "ServerMetadata",
    "ModelReady",
    "ModelMetadata",
    "ModelConfig",
    "ModelStatistics",
    "RepositoryIndex",
    "ModelInfer",
)
"""Unary methods of the inference service, without those that would change a single replica."""

STREAM = "ModelStreamInfer"
CHECK = "Check"

IMPORT_PATH = "weftline.engine.jobs.ray.grpc_adapter.add_to_server"
"""Entry of Serve's `grpc_servicer_functions`."""


def full_name(method: str) -> str:
    """Return the full name of a method, such as '/grpc.health.v1.Health/Check'."""
    service = HEALTH_SERVICE if method == CHECK else INFERENCE_SERVICE
    return f"/{service.full_name}/{method}"


def add_to_server(servicer: object, server: Any) -> None:
    """Register the methods with a proxy's server; `servicer` is Ray Serve's dummy, and not called."""
    unary = grpc.unary_unary_rpc_method_handler(_replaced)
    stream = grpc.stream_stream_rpc_method_handler(_replaced)
    handlers = dict.fromkeys(UNARY, unary) | {STREAM: stream}
    for service, methods in ((INFERENCE_SERVICE, handlers), (HEALTH_SERVICE, {CHECK: unary})):
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service.full_name, methods),))


def _replaced(*called: object) -> object:
    raise NotImplementedError("Ray Serve's proxy answers this method itself")


class Aborted(BaseException):
    """Ends a handler whose call has a status; not an Exception, so that no handler catches it as a failure."""


class Message:
    """Bytes of a response, where Ray Serve expects a protobuf message."""

    __slots__ = ("_data",)

    def __init__(self, data: bytes) -> None:
        self._data = data

    def SerializeToString(self) -> bytes:
        return self._data


class RayCallContext:
    """A grpc.aio.ServicerContext on Ray Serve's context.

    requests: messages of a stream.
    """

    def __init__(self, context: Any, requests: AsyncIterator[bytes] | None = None) -> None:
        self._context = context
        self._requests = requests
        self._written: asyncio.Queue[bytes | None] = asyncio.Queue(1)  # one at a time: back-pressure of a slow reader
        self._over = False

    def invocation_metadata(self) -> Sequence[tuple[str, str]]:
        found: Sequence[tuple[str, str]] = self._context.invocation_metadata()
        return found

    def time_remaining(self) -> float | None:
        return None

    def set_trailing_metadata(self, metadata: Sequence[tuple[str, str]]) -> None:
        self._context.set_trailing_metadata(list(metadata))

    async def abort(self, code: grpc.StatusCode, details: str = "", metadata: Sequence[tuple[str, str]] = ()) -> None:
        """Set the status of the call, and end the handler."""
        self._context.set_code(code)
        self._context.set_details(details)
        if metadata:
            self.set_trailing_metadata(metadata)
        raise Aborted

    async def read(self) -> Any:
        """Return the next message of the stream; grpc.aio.EOF after the last."""
        if self._requests is None:
            return grpc.aio.EOF
        return await anext(self._requests, grpc.aio.EOF)

    async def write(self, message: bytes) -> None:
        """Send a response; waits until the previous one is read."""
        await self._written.put(message)

    def end(self) -> None:
        """End the stream. Does not block, as the reader may be gone."""
        self._over = True
        with suppress(asyncio.QueueFull):  # the reader of the last message sees the end
            self._written.put_nowait(None)

    async def written(self) -> AsyncIterator[bytes]:
        """Yield what was written, until `end`."""
        while not (self._over and self._written.empty()):
            message = await self._written.get()
            if message is None:
                return
            yield message
