"""Types between the v2 services and the transports.

Services are functions of protobuf messages: one request to one response, or to a stream of them. They raise exceptions
for errors and read the caller from CALLER. For a transport they become methods of raw messages: `UnaryMethod`,
`StreamMethod` or `InferMethod`, by path. Neither services nor methods depend on a transport.
"""

from __future__ import annotations

import math
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping
from contextlib import aclosing
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from google.protobuf.descriptor import MethodDescriptor
from google.protobuf.message import DecodeError
from google.protobuf.message_factory import GetMessageClass

from weftline.engine.serving.auth.gate import ANONYMOUS, Caller
from weftline.engine.serving.room import Room
from weftline.engine.serving.unsent_budget import Reservation
from weftline.errors import InputError

if TYPE_CHECKING:
    from weftline.engine.serving.grpc.infer import Inference

CALLER: ContextVar[Caller] = ContextVar("weftline_caller", default=ANONYMOUS)
"""Caller of the current call, set by the transport."""

PEER: ContextVar[str] = ContextVar("weftline_peer", default="")
"""Key of the connection of the current call, set by the transport."""

Message = bytes | memoryview
"""An encoded message. A large one is a read-only view of the memory that it was received in."""

Unary = Callable[[Any], Awaitable[Any]]
"""Returns the response message of a request message."""

ServerStream = Callable[[Any], AsyncGenerator[Any, None]]
"""Yields the response messages of a request message."""

Bidirectional = Callable[[AsyncIterator[Any]], AsyncGenerator[Any, None]]
"""Yields the response messages of a stream of request messages."""


@dataclass(slots=True)
class CallContext:
    """Properties of the call of a request.

    protocol:        'grpc' or 'grpc-stream', for metrics and logs.
    deadline_ms: time left; None: no deadline.
    parent:      W3C trace context of the call; '' without one.
    span:        trace context of the last response's span, set by the service; '' if it was not traced.
    room:        room for the response; None: unlimited.
    reservation: what the service has reserved of it, for the transport to settle.
    """

    caller: Caller
    protocol: str
    deadline_ms: float | None = None
    parent: str = ""
    span: str = ""
    room: Room | None = None
    reservation: Reservation | None = None

    async def reserve(self, size_bytes: int) -> None:
        """Reserve room for the response, of this size before it is encoded; errors as `Room.reserve`."""
        if self.room is not None and not self.room.is_free(size_bytes):
            self.reservation = await self.room.reserve(size_bytes)

    def settle(self) -> None:
        """Release the room once the socket has taken what was written."""
        reservation, self.reservation = self.reservation, None
        if reservation is not None and self.room is not None:
            self.room.settle(reservation)


class StreamCall(Protocol):
    """A bidirectional call of raw messages."""

    def context(self) -> CallContext:
        """Return the properties of the call, with the time left now."""

    async def read(self) -> Message | None:
        """Return the next message; None once the client has sent everything."""

    async def write(self, message: bytes) -> None:
        """Send a message, with flow control; asyncio.CancelledError if the call has ended."""


@dataclass(frozen=True, slots=True)
class UnaryMethod:
    """One encoded request to one encoded response. Runs in a task with CALLER set."""

    run: Callable[[Message], Awaitable[bytes]]


@dataclass(frozen=True, slots=True)
class StreamMethod:
    """A call with streams of encoded messages. Runs in a task with CALLER set."""

    run: Callable[[StreamCall], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class InferMethod:
    """ModelInfer: the unary method that a transport may run without a task."""

    inference: Inference


Method = UnaryMethod | StreamMethod | InferMethod


def unary(method: Unary, descriptor: MethodDescriptor) -> UnaryMethod:
    """Return the method of a service function with one request and one response."""
    message = request_class(descriptor)

    async def run(data: Message) -> bytes:
        response = await method(parse(message, data))
        return bytes(response.SerializeToString())

    return UnaryMethod(run)


def server_stream(method: ServerStream, descriptor: MethodDescriptor) -> StreamMethod:
    """Return the method of a service function with one request and a stream of responses."""
    message = request_class(descriptor)

    async def run(call: StreamCall) -> None:
        data = await call.read()
        if data is None:
            raise InputError("found no request message, expected one")
        async with aclosing(method(parse(message, data))) as responses:
            async for response in responses:
                await call.write(response.SerializeToString())

    return StreamMethod(run)


def bidirectional(method: Bidirectional, descriptor: MethodDescriptor) -> StreamMethod:
    """Return the method of a service function with streams of requests and responses."""
    message = request_class(descriptor)

    async def requests(call: StreamCall) -> AsyncIterator[Any]:
        while (data := await call.read()) is not None:
            yield parse(message, data)

    async def run(call: StreamCall) -> None:
        async with aclosing(method(requests(call))) as responses:
            async for response in responses:
                await call.write(response.SerializeToString())

    return StreamMethod(run)


def pushback(retry_after_s: float) -> Mapping[str, str]:
    """Return the trailing metadata with the retry delay in milliseconds (gRFC A6)."""
    if retry_after_s <= 0:
        return {}
    ms = str(math.ceil(retry_after_s * 1000))
    return {"retry-after-ms": ms, "grpc-retry-pushback-ms": ms}


def request_class(descriptor: MethodDescriptor) -> Any:
    """Return the message class of a method's request."""
    return GetMessageClass(descriptor.input_type)


def parse(message: Any, data: Message) -> Any:
    """Parse a protobuf message of the given class; InputError if it is invalid."""
    try:
        return message.FromString(bytes(data))
    except (DecodeError, ValueError, RecursionError):
        raise InputError(f"the message is not a valid {message.DESCRIPTOR.name}") from None
