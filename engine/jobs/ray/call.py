"""Adapter from Ray Serve's gRPC context to the context of the gRPC handlers.

Ray Serve hands a replica the request's bytes, or an iterator of them, and a context that travels back with the answer.
The proxy does not pass a call's deadline on: when it ends there, the call is cancelled here.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from typing import Any

import grpc
import grpc.aio


class Aborted(BaseException):
    """Ends a handler whose call has its status already; not an Exception, so that no handler takes it for a failure."""


class Message:
    """An answer's bytes, where Ray Serve expects a protobuf message."""

    __slots__ = ("_data",)

    def __init__(self, data: bytes) -> None:
        self._data = data

    def SerializeToString(self) -> bytes:
        return self._data


class RayCallContext:
    """Stands for a grpc.aio.ServicerContext.

    context:  Ray Serve's.
    requests: messages of a stream, as they come.
    """

    def __init__(self, context: Any, requests: AsyncIterator[bytes] | None = None) -> None:
        self._context = context
        self._requests = requests
        self._written: asyncio.Queue[bytes | None] = asyncio.Queue(1)  # one at a time: who reads slowly is waited for
        self._over = False

    def invocation_metadata(self) -> Sequence[tuple[str, str]]:
        found: Sequence[tuple[str, str]] = self._context.invocation_metadata()
        return found

    def time_remaining(self) -> float | None:
        return None

    def set_trailing_metadata(self, metadata: Sequence[tuple[str, str]]) -> None:
        self._context.set_trailing_metadata(list(metadata))

    async def abort(self, code: grpc.StatusCode, details: str = "", metadata: Sequence[tuple[str, str]] = ()) -> None:
        """Give the call its status, and end the handler."""
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
        """Hand an answer over; waits until the one before it was taken."""
        await self._written.put(message)

    def end(self) -> None:
        """Say that nothing more is written. Never waits: whoever read may be gone."""
        self._over = True
        with suppress(asyncio.QueueFull):  # who takes the last message sees that it is over
            self._written.put_nowait(None)

    async def written(self) -> AsyncIterator[bytes]:
        """Yield what was written, until `end`."""
        while not (self._over and self._written.empty()):
            message = await self._written.get()
            if message is None:
                return
            yield message
