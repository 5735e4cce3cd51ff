"""Types between the v2 services and their transport.

Services are functions of protobuf messages: one request to one response, or to a stream of them. They raise exceptions
for errors and read the caller from CALLER. They do not import gRPC: `transport.py` makes gRPC handlers from them.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Protocol

from google.protobuf.message import DecodeError

from weftline.engine.serving.auth.gate import ANONYMOUS, Caller
from weftline.errors import InputError

CALLER: ContextVar[Caller] = ContextVar("weftline_caller", default=ANONYMOUS)
"""Caller of the current call, set by the transport."""

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
    """

    caller: Caller
    protocol: str
    deadline_ms: float | None = None
    parent: str = ""
    span: str = ""


class StreamCall(Protocol):
    """A bidirectional call of raw messages."""

    def context(self) -> CallContext:
        """Return the properties of the call, with the time left now."""

    async def read(self) -> bytes | None:
        """Return the next message; None once the client has sent everything."""

    async def write(self, message: bytes) -> None:
        """Send a message, with flow control; asyncio.CancelledError if the call has ended."""


def parse(message: Any, data: bytes) -> Any:
    """Parse a protobuf message of the given class; InputError if it is invalid."""
    try:
        return message.FromString(data)
    except (DecodeError, ValueError, RecursionError):
        raise InputError(f"the message is not a valid {message.DESCRIPTOR.name}") from None
