"""gRPC over HTTP/2 in the asyncio loop, on libnghttp2 (gRPC over HTTP2: github.com/grpc/grpc, doc/PROTOCOL-HTTP2.md).

    socket -> GrpcConnection.buffer_updated -> Http2Connection.receive -> events -> GrpcCall -> method
    socket <- transport.write <- Http2Connection.data_to_send <- respond, write, finish, refuse <- method

A unary ModelInfer runs without a task: `Inference.start` calls back in the loop. Every other method runs in a task.
Responses that are ready in one turn of the loop are sent by one write. After TURN_S the rest of the received work waits
for a later turn, and nothing more is read from that connection. In a turn one of the connections with such work goes
on, so that many of them delay another client by TURN_S and not by TURN_S each. Connections on which no call with rights
has begun have a quarter of that time. A connection begins at most SLICE_CALLS calls between two looks at the clock, and
the calls of a closed one end in such turns, too.

A call takes one of `limits.calls_max` slots once its message is there and if its method needs rights. Others have a
share of their own (`OpeningCalls`). At `connections_max` a connection that serves no such call is closed for a new one
(`ConnectionTable`).

What a client can make the server hold: STREAM_WINDOW_BYTES for each call, the messages admitted to the byte budget
(checked against the length prefix, before the receive window is raised, and counted until a method takes them), and
responses that it does not read. Those have a budget (`UnsentBudget`), reserved before a response is copied out of the
engine's memory; small ones wait for nothing while FREE_UNSENT_BYTES or less are unsent. While WAITING_ANSWERS_MAX wait,
no further call of the connection starts. One that takes nothing for STALL_S is closed, and one that is slow while
others wait for the budget.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import socket
import ssl
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, cast
from urllib.parse import quote_from_bytes

import numpy as np

from weftline.engine.runtime.byte_budget import ByteBudget
from weftline.engine.serving.auth.gate import Caller
from weftline.engine.serving.auth.methods import METHODS, OPEN
from weftline.engine.serving.auth.tls import ssl_context
from weftline.engine.serving.call_slots import RETRY_S, CallSlots, OpeningCalls
from weftline.engine.serving.config import FREE_BYTES, ServeConfig
from weftline.engine.serving.connection_table import ConnectionTable
from weftline.engine.serving.grpc.guard import Guard, UnknownMethod
from weftline.engine.serving.grpc.nghttp2 import (
    BODY,
    CLOSED,
    OK_TRAILERS,
    REQUEST,
    STREAM_WINDOW_BYTES,
    Event,
    Field,
    Http2Connection,
    Http2Error,
    Http2Limits,
    Http2Stream,
)
from weftline.engine.serving.grpc.service import (
    CALLER,
    PEER,
    CallContext,
    InferMethod,
    Message,
    Method,
    StreamMethod,
    pushback,
)
from weftline.engine.serving.replies import to_status
from weftline.engine.serving.room import reserve
from weftline.engine.serving.tls_listener import TlsListener
from weftline.engine.serving.unix_socket import placed
from weftline.engine.serving.unsent_budget import SLOW_BYTES_S, SLOW_S, SMALL_BYTES, Reservation, UnsentBudget
from weftline.errors import DeadlineExceeded, LimitReached, ModelError, RequestCancelled, WeftlineError

READ_BYTES = 256 << 10
"""Most bytes read from a socket at a time; one buffer serves all connections of a server."""

SLICE_BYTES, SLICE_CALLS = 32 << 10, 8
"""Bytes, and beginnings of calls, that are processed between two looks at the clock."""

TURN_S, SHORT_TURN_S = 0.001, 0.00025
"""Work of one connection in one turn of the event loop: alone, and while other connections have more work."""

NEW_PAUSE = 3
"""Pause between turns of new connections, in turns: those without a call with rights have a quarter of the time."""

FLUSH_BYTES = 1 << 20
"""Most bytes handed to the socket in one turn of the event loop."""

JOIN_BYTES_MAX = 64 << 10
"""Frames of up to this total are joined into one write."""

FREE_UNSENT_BYTES = 256 << 10
"""Unsent bytes of a connection up to which small responses wait for nothing."""

UNSENT_BYTES_MAX = 64 << 20
"""Unsent bytes from which a connection is not read while its socket is full."""

WRITE_BUFFER_BYTES = 256 << 10
"""Bytes in the transport's buffer from which nothing more is handed to it."""

WAITING_ANSWERS_MAX = 4
"""Waiting responses of a connection from which no further calls start."""

SETTLE_S, SETTLE_MAX_S = 0.005, 0.5
"""First and longest interval of looking whether the socket has taken what was handed to the transport."""

STALL_S = 60.0
"""Longest time in which a connection with waiting responses takes no byte."""

BACKLOG = 1024
"""Connections that wait to be accepted."""

PROGRESS_BYTES = 64 << 10
"""Bytes of an incomplete message that must arrive within `limits.header_s`."""

PING_INTERVAL_S = 10.0
"""Interval at which a client may ping without calls; more often is a flood (gRFC A8)."""

CODES: Mapping[str, bytes] = {
    "OK": b"0", "CANCELLED": b"1", "UNKNOWN": b"2", "INVALID_ARGUMENT": b"3", "DEADLINE_EXCEEDED": b"4",
    "NOT_FOUND": b"5", "ALREADY_EXISTS": b"6", "PERMISSION_DENIED": b"7", "RESOURCE_EXHAUSTED": b"8",
    "FAILED_PRECONDITION": b"9", "ABORTED": b"10", "OUT_OF_RANGE": b"11", "UNIMPLEMENTED": b"12", "INTERNAL": b"13",
    "UNAVAILABLE": b"14", "DATA_LOSS": b"15", "UNAUTHENTICATED": b"16",
}  # fmt: skip
"""gRPC's status codes by name."""

_CONTENT_TYPE = re.compile(rb"application/grpc([+;].*)?", re.IGNORECASE)
_TIMEOUT = re.compile(rb"([0-9]{1,8})([HMSmun])")
_TIMEOUT_S = {b"H": 3600.0, b"M": 60.0, b"S": 1.0, b"m": 1e-3, b"u": 1e-6, b"n": 1e-9}
_HEAD: Sequence[Field] = ((b":status", b"200"), (b"content-type", b"application/grpc"))

_log = logging.getLogger("weftline.ingress")


class _Malformed(WeftlineError):
    """A call that does not follow gRPC's protocol."""

    status = "INTERNAL"


class _Unsupported(WeftlineError):
    """A call that uses a part of gRPC's protocol that this server does not have."""

    status = "UNIMPLEMENTED"


# the protocol, as functions of bytes


def parse_timeout(value: bytes) -> float:
    """Return a `grpc-timeout` in seconds; _Malformed if it is not one."""
    found = _TIMEOUT.fullmatch(value)
    if found is None:
        raise _Malformed("grpc-timeout: expected 1 to 8 digits and one of H M S m u n")
    return int(found[1]) * _TIMEOUT_S[found[2]]


def status_trailers(error: BaseException) -> list[Field]:
    """Return the trailers of a failed call."""
    if isinstance(error, UnknownMethod):
        return [(b"grpc-status", CODES["UNIMPLEMENTED"]), (b"grpc-message", b"there is no such method here")]
    status = to_status(error)
    message = quote_from_bytes(status.message.encode(), safe=_PLAIN).encode()
    return [
        (b"grpc-status", CODES[status.status]),
        (b"grpc-message", message),
        *((name.encode(), value.encode()) for name, value in pushback(status.retry_after_s).items()),
        *([(b"grpc-accept-encoding", b"identity")] if status.status == "UNIMPLEMENTED" else []),
    ]


_PLAIN = "".join(chr(code) for code in range(0x20, 0x7F) if chr(code) != "%")
"""Characters of grpc-message that are not percent-encoded."""


def _too_large(kind: str, size: int, bytes_max: int) -> LimitReached:
    return LimitReached(f"the {kind} is a message of {size} bytes; limits.message_bytes_max is {bytes_max}")


def take_message(body: bytearray, bytes_max: int) -> tuple[bytes | None, int]:
    """Take the first message off received bytes: the message, or None, and its length with the prefix (0: unknown).

    _Unsupported for a compressed message; LimitReached for one over `bytes_max`.
    """
    if len(body) < 5:
        return None, 0
    size = int.from_bytes(body[1:5], "big")
    if body[0]:
        raise _Unsupported("found a compressed message; this server takes none (grpc-encoding: identity)")
    if size > bytes_max:
        raise _too_large("request", size, bytes_max)
    if len(body) < size + 5:
        return None, size + 5
    with memoryview(body) as view:
        message = bytes(view[5 : size + 5])
    del body[: size + 5]
    return message, size + 5


# calls


class GrpcCall:
    """One call: its state between the connection and the method. Implements `StreamCall` for methods with streams."""

    __slots__ = (
        "_begun",
        "_connection",
        "_context",
        "_ended",
        "_error",
        "_held_bytes",
        "_messages",
        "_progress_bytes",
        "_queued_bytes",
        "_read_bytes",
        "_reading",
        "_receiving_large",
        "_running",
        "_slot",
        "_timer",
        "_writing",
        "caller",
        "counted",
        "deadline_s",
        "listed",
        "method",
        "opening",
        "parent",
        "progress_s",
        "stream",
    )

    def __init__(
        self, connection: GrpcConnection, stream: Http2Stream, method: Method, caller: Caller, counted: bool = True
    ) -> None:
        self._connection = connection
        self._context: CallContext | None = None  # of a unary call
        self._error: Exception | None = None  # ends the call in place of what its task raises
        self._held_bytes = 0  # of a large message in the budget, until a method takes it
        self._messages: deque[tuple[Message, int]] = deque()  # with the bytes that each holds in the budget
        self._progress_bytes = 0  # received at `progress_s`
        self._queued_bytes = 0  # of messages that wait to be read
        self._read_bytes = 0  # of messages that were read
        self._reading: asyncio.Future[None] | None = None
        self._receiving_large = False
        self._writing: asyncio.Future[None] | None = None
        self._running: Callable[[], object] | None = None  # cancels the method
        self._timer: asyncio.TimerHandle | None = None
        self._begun = False  # its headers are sent, and messages follow
        self._ended = False
        self._slot = False  # it has one of `limits.calls_max`
        self.opening = False  # its first message has not arrived
        self.listed = False  # and it is counted for it
        self.counted = counted  # its method needs rights
        self.stream = stream
        self.method = method
        self.caller = caller
        self.deadline_s: float | None = None
        self.parent = ""
        self.progress_s = connection.server.now_s

    @property
    def receiving(self) -> bool:
        """True while a unary call waits for its message, or a part of a large message is held."""
        return not self._ended and self._error is None and (self._running is None or self._receiving_large)

    def context(self) -> CallContext:
        streamed = isinstance(self.method, StreamMethod)
        left_ms = None if self.deadline_s is None else (self.deadline_s - time.monotonic()) * 1000
        return CallContext(self.caller, "grpc-stream" if streamed else "grpc", left_ms, self.parent, room=self)

    # Room

    def is_free(self, size_bytes: int) -> bool:
        connection = self._connection
        return size_bytes <= SMALL_BYTES and connection.is_read()

    async def reserve(self, size_bytes: int) -> Reservation:
        connection, left_s = self._connection, None
        if self.deadline_s is not None:
            left_s = self.deadline_s - time.monotonic()
        caller = self.caller.name or connection
        try:
            return await reserve(connection.server.unsent, connection, caller, size_bytes, left_s)
        finally:
            connection.start_held_back()

    def settle(self, reservation: Reservation) -> None:
        self._connection.settle(reservation)

    # received bytes

    def on_body(self) -> None:
        """Take complete messages off the received bytes, and reserve a large one. Raises what refuses the call."""
        stream, server = self.stream, self._connection.server
        streamed = isinstance(self.method, StreamMethod)
        if stream.received_bytes - self._progress_bytes >= PROGRESS_BYTES:
            self._progress_bytes, self.progress_s = stream.received_bytes, server.now_s
            server.opening.progressed(self)
        if stream.block is not None:
            if stream.filled_bytes < len(stream.block):
                return
            block, stream.block = stream.block.toreadonly(), None
            self._add_message(block, len(block) + 5, streamed)
        while stream.body:
            message, size = take_message(stream.body, server.message_bytes_max)
            if message is not None:
                self._add_message(message, size, streamed)
                continue
            if size - 5 > FREE_BYTES:
                server.budget.take_now(size - 5)
                self._held_bytes, self._receiving_large = size - 5, True
                self._progress_bytes, self.progress_s = stream.received_bytes, server.now_s
                del stream.body[:5]
                stream.fill(np.empty(size - 5, np.uint8).data)
            self._connection.http2.allow(stream, self._read_bytes + self._queued_bytes + max(size, 5))
            break
        if self._messages and self._reading is not None and not self._reading.done():
            self._reading.set_result(None)

    def _add_message(self, message: Message, size: int, streamed: bool) -> None:
        """Queue a message for the method; size: its length with the prefix."""
        self._receiving_large = False
        if self.opening:
            self._take_slot()
        if self._messages and not streamed:
            raise _Unsupported("found a second message, expected one")
        self._messages.append((message, self._held_bytes))
        self._held_bytes = 0
        self._queued_bytes += size

    def _take_slot(self) -> None:
        """Count the call once its first message is there; LimitReached without a slot for its caller."""
        server = self._connection.server
        self.opening = False
        if self.listed:
            server.opening.discard(self)
        if self.counted:
            server.slots.take(self.caller.name)
            self._slot = True
            self._connection.counted_calls += 1
            self._connection.new = False
            if self._connection.counted_calls == 1:
                closed = server.table.begin_call(self._connection, self.caller.name)
                if closed is not None:
                    closed.close_for_another()

    def _give_slot_back(self) -> None:
        server = self._connection.server
        if self.opening:
            server.opening.discard(self)
        if self._slot:
            self._slot = False
            server.slots.give_back(self.caller.name)
            self._connection.counted_calls -= 1
            if not self._connection.counted_calls:
                server.table.end_call(self._connection)

    def on_end(self) -> None:
        """Start a unary method, or let `read` return None. Raises what refuses the call."""
        if self.stream.body or self.stream.block is not None:
            raise _Malformed("found a message that ends in the middle")
        if isinstance(self.method, StreamMethod):
            if self._reading is not None and not self._reading.done():
                self._reading.set_result(None)
        elif not self._messages:
            raise _Malformed("found no message, expected one")
        else:
            self._connection.ready.append(self)

    def on_closed(self) -> None:
        """Cancel the method: the stream is over."""
        if self._messages or self._held_bytes:
            self._release()
        if self._slot or self.opening:
            self._give_slot_back()
        if self._context is not None:
            self._context.settle()
        running, self._running = self._running, None
        if self._timer is not None:
            self._timer.cancel()
        for waiting in (self._reading, self._writing):
            if waiting is not None and not waiting.done():
                waiting.cancel()
        if running is not None:
            running()

    def on_flushed(self) -> bool:
        """Wake `write` if its bytes have been handed to the socket; returns True if no write waits any more."""
        if self.stream.unsent_bytes:
            return False
        writing, self._writing = self._writing, None
        if writing is not None and not writing.done():
            writing.set_result(None)
        return True

    # the method

    def start(self) -> None:
        """Run the method, unless the stream or the call is over."""
        if self.stream.closed or self._ended:
            return
        method, loop = self.method, self._connection.server.loop
        if isinstance(method, InferMethod):
            if self._connection.hold_back(self):
                return
            call = self._context = self.context()
            self._running = _nothing
            message, held_bytes = self._messages.popleft()
            try:
                cancel = method.inference.start(message, call, partial(self._done, call))
            finally:
                self._give_back(held_bytes)  # `start` counts the message in a budget of its own
            if self._running is not None:
                self._running = cancel
            return
        if self.deadline_s is not None:
            self._timer = loop.call_later(self.deadline_s - time.monotonic(), self._expire)
        task = loop.create_task(self._run())
        task.add_done_callback(self._on_task_done)
        self._running = task.cancel

    async def _run(self) -> None:
        CALLER.set(self.caller)
        PEER.set(self._connection.peer)
        try:
            if isinstance(self.method, StreamMethod):
                await self.method.run(self)
                self._finish(OK_TRAILERS)
            elif not isinstance(self.method, InferMethod):
                message, held_bytes = self._messages.popleft()
                try:
                    response = await self.method.run(message)
                finally:
                    self._give_back(held_bytes)
                self._context = self.context()
                await self._context.reserve(len(response))
                self._respond(response, OK_TRAILERS)
        except Exception as error:
            self.fail(error)

    def _on_task_done(self, task: asyncio.Task[None]) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if task.cancelled():  # perhaps before `_run` began
            self.fail(self._error or asyncio.CancelledError())

    def _done(self, call: CallContext, answer: bytes | BaseException) -> None:
        self._running = None
        if isinstance(answer, BaseException):
            self.fail(answer)
        elif not self._ended:
            trailers = OK_TRAILERS if not call.span else [*OK_TRAILERS, (b"traceparent", call.span.encode())]
            self._respond(answer, trailers)

    def _respond(self, message: bytes, trailers: Sequence[Field]) -> None:
        size, bytes_max = len(message), self._connection.server.message_bytes_max
        if size > bytes_max:
            self.fail(_too_large("response", size, bytes_max))
            return
        self._running, self._ended = None, True
        self._connection.http2.respond(self.stream, _framed(message), trailers)
        self._connection.flush_soon()

    def fail(self, error: BaseException) -> None:
        """End the call with the status of an error."""
        self._release()
        self._finish(status_trailers(error))

    def _finish(self, trailers: Sequence[Field]) -> None:
        http2, stream = self._connection.http2, self.stream
        if self._ended or stream.closed:
            return
        self._running, self._ended = None, True
        if self._begun:
            http2.finish(stream, trailers)
        elif trailers is OK_TRAILERS:
            http2.respond(stream, (), trailers)
        else:
            http2.refuse(stream, [*_HEAD, *trailers])
        self._connection.flush_soon()

    def end(self, error: Exception) -> None:
        """End the call with an error and cancel its method."""
        running, self._running = self._running, None
        if running is None or isinstance(self.method, InferMethod):
            self.fail(error)
        else:
            self._error = error
        if running is not None:
            running()

    def _expire(self) -> None:
        self.end(DeadlineExceeded("the call's deadline has passed"))

    def _release(self) -> None:
        """Return the bytes of messages that no method has taken to the budget."""
        self._give_back(self._held_bytes)
        self._held_bytes = 0
        for _, held_bytes in self._messages:
            self._give_back(held_bytes)
        self._messages.clear()

    def _give_back(self, held_bytes: int) -> None:
        if held_bytes:
            self._connection.server.budget.give_back(held_bytes)

    # StreamCall

    async def read(self) -> Message | None:
        connection, stream = self._connection, self.stream
        while not self._messages:
            if stream.closed:
                raise asyncio.CancelledError
            if stream.remote_ended and not stream.body:
                return None
            self._reading = connection.server.loop.create_future()
            await self._reading
        message, held_bytes = self._messages.popleft()
        self._give_back(held_bytes)
        self._queued_bytes -= len(message) + 5
        self._read_bytes += len(message) + 5
        if self._read_bytes + STREAM_WINDOW_BYTES // 2 > stream.allowed_bytes:
            connection.http2.allow(stream, self._read_bytes + STREAM_WINDOW_BYTES)
            connection.flush_soon()
        return message

    async def write(self, message: bytes) -> None:
        connection, stream = self._connection, self.stream
        bytes_max = connection.server.message_bytes_max
        if len(message) > bytes_max:
            raise _too_large("response", len(message), bytes_max)
        if stream.closed:
            raise asyncio.CancelledError
        if not self._begun:
            self._begun = True
            connection.http2.begin(stream)
        connection.http2.write(stream, _framed(message))
        connection.flush_soon()
        self._writing = connection.server.loop.create_future()
        connection.writers.add(self)
        await self._writing


def _framed(message: bytes) -> list[bytes]:
    """Return a message with its length prefix, in parts that are not copied again."""
    prefix = b"\0" + len(message).to_bytes(4, "big")
    return [prefix + message] if len(message) <= JOIN_BYTES_MAX else [prefix, message]


def _nothing() -> None:
    """Stand for a method that has started and cannot be cancelled yet."""


# connections


class GrpcConnection(asyncio.BufferedProtocol):
    """One connection. Events of its HTTP/2 core start and end calls; see the module's description."""

    def __init__(self, server: Http2Transport) -> None:
        self.server = server
        self.http2: Http2Connection
        self.peer = ""
        self.counted_calls = 0  # open calls that have slots
        self.new = True  # no such call has begun
        self._closed_streams: deque[Http2Stream] = deque()  # of a closed connection, whose calls have not ended
        self._begun: list[GrpcCall] = []  # calls of the events that are being processed
        self._held_back: deque[GrpcCall] = deque()  # start once fewer responses wait
        self._settling: deque[tuple[int, Reservation]] = deque()  # with the flushed bytes at their end
        self._settle_timer: asyncio.TimerHandle | None = None
        self._pressed: tuple[float, int] | None = None  # when other responses began to wait, and the bytes taken then
        self.ready: deque[GrpcCall] = deque()
        self.writers: set[GrpcCall] = set()
        self.calls: set[GrpcCall] = set()
        self._transport: asyncio.Transport
        self._unread = memoryview(b"")
        self._working = False
        self._reading_paused = False
        self._writing_paused = False
        self._flushing = False
        self._closed = True
        self._opened_s = self._received_s = self._sent_s = server.now_s
        self._flushed_bytes = self._taken_bytes = 0  # handed to the socket, and taken by it
        self._taken_s = server.now_s
        self._pinged_s = 0.0
        self._ping_allowed_s = server.now_s
        self._pongs = 0

    # asyncio

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        server = self.server
        tls = transport.get_extra_info("ssl_object")
        if server.closed or (tls and tls.selected_alpn_protocol() != "h2"):
            self._transport.abort()
            return
        address = transport.get_extra_info("peername")
        address = str(address[0]) if isinstance(address, tuple) else ""
        self._opened_s = self._received_s = self._sent_s = self._ping_allowed_s = time.monotonic()
        closed = server.table.add(self, address, self._opened_s)
        if closed is not None:
            closed.close_for_another()
        self.peer = f"{address} {id(self)}"
        self.http2 = Http2Connection(server.http2_limits)
        self._closed = False
        server.connections.add(self)
        self._transport.set_write_buffer_limits(WRITE_BUFFER_BYTES)
        if server.closing:
            self.http2.shutdown_notice()
        self.flush_soon()

    def get_buffer(self, sizehint: int) -> memoryview:
        return self.server.buffer

    def buffer_updated(self, nbytes: int) -> None:
        if self._closed:
            return
        self._received_s = time.monotonic()
        received = self.server.buffer[:nbytes]
        if self._working:  # a transport delivered bytes after it was paused
            self._unread = memoryview(bytes(self._unread) + bytes(received))
        else:
            self._unread = received
            self.work(self.server.turn_s)

    def eof_received(self) -> bool:
        return False

    def abort(self) -> None:
        """Close at once, without sending what is queued."""
        self._transport.abort()

    def close_for_another(self) -> None:
        """Close with a notice (GOAWAY) after which clients connect again."""
        _log.debug("a gRPC connection is closed for another: limits.connections_max is reached")
        if not self._closed:
            self.http2.terminate()
            self._close_now()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._closed:
            return
        self._closed = True
        self.server.connections.discard(self)
        self.server.table.remove(self)
        self._unread = memoryview(b"")
        self._held_back.clear()
        self._closed_streams.extend(self.http2.close())
        self._end_streams(self.server.turn_s)
        if self._settle_timer is not None:
            self._settle_timer.cancel()
        while self._settling:
            self._settling.popleft()[1].release()
        self.server.closed_one()

    def _end_streams(self, turn_s: float) -> None:
        """End the calls of a closed connection; what is left after `turn_s` in later turns of the loop."""
        until_s = time.monotonic() + turn_s
        while self._closed_streams:
            self._on_closed(self._closed_streams.popleft())
            if time.monotonic() > until_s:
                self.server.continue_soon(self)
                break

    def pause_writing(self) -> None:
        self._writing_paused = True

    def resume_writing(self) -> None:
        self._writing_paused = False
        self.flush_soon()

    # receiving

    def work(self, turn_s: float) -> None:
        """Process received bytes and start calls for about `turn_s`; continue in a later turn of the loop."""
        self._working = False
        if self._closed:
            self._end_streams(turn_s)
            return
        try:
            self._run_turn(time.monotonic() + turn_s)
        except Exception:
            _log.exception("a gRPC connection failed")
            self.abort()

    def _run_turn(self, until_s: float) -> None:
        while True:
            while self.ready:
                self.ready.popleft().start()
                if time.monotonic() > until_s:
                    break
            if self.ready or not self._unread:
                break
            if not self._receive(self._unread[:SLICE_BYTES]):
                return
            self._unread = self._unread[self.http2.processed_bytes :]
            if time.monotonic() > until_s:
                break
        if self.ready or self._unread:
            if self._unread and self._unread.obj is self.server.buffer.obj:
                self._unread = memoryview(bytes(self._unread))  # the buffer is used for other connections meanwhile
            self._working = True
            self.server.continue_soon(self)
        self._balance_reading()
        if self.http2.wants_write:
            self.flush_soon()

    def _receive(self, data: memoryview) -> bool:
        """Process bytes; returns False if that ended the connection."""
        try:
            events = self.http2.receive(data, SLICE_CALLS)
        except Http2Error as error:
            _log.debug("a gRPC connection ends: %s", error)
            self._close_now()
            return False
        self._on_events(events)
        return not self._closed

    def _on_events(self, events: list[Event]) -> None:
        waiting = iter(events)
        try:
            self._process(waiting)
        except Exception:
            _log.exception("a gRPC connection failed")
            for event, stream in waiting:
                if event is CLOSED:
                    self._on_closed(stream)
            self._transport.abort()

    def _process(self, events: Iterator[Event]) -> None:
        for event, stream in events:
            if event is REQUEST:
                self._on_request(stream)
            elif event is CLOSED:
                self._on_closed(stream)
            elif stream.call is not None and not stream.discard:
                self._on_received(stream.call, event)
        if self._begun:
            self._add_opening()

    def _add_opening(self) -> None:
        """Count the calls that have begun without a message."""
        begun, self._begun = self._begun, []
        for call in begun:
            if call.opening and not call.stream.closed:
                call.listed = True
                ended = self.server.opening.add(call, self, call.counted)
                if ended is not None:
                    ended.opening = False
                    ended.end(LimitReached("the message did not arrive, and other calls wait to begin", RETRY_S))

    def _on_request(self, stream: Http2Stream) -> None:
        server = self.server
        try:
            call = self._make_call(stream)
        except Exception as error:
            self._refuse(stream, error)
            return
        if call is None:
            return
        stream.call = call
        self.calls.add(call)
        server.calls += 1
        call.opening = True
        self._begun.append(call)
        if isinstance(call.method, StreamMethod):
            call.start()

    def _make_call(self, stream: Http2Stream) -> GrpcCall | None:
        """Return the admitted call of a header block; None if it was no gRPC request. Raises what refuses it."""
        server = self.server
        path = kind = encoding = timeout = b""
        method, parent = b"POST", ""
        authorization: list[bytes] = []
        for name, value in stream.fields:
            if name == b":path":
                path = value
            elif name == b":method":
                method = value
            elif name == b"content-type":
                kind = value
            elif name == b"grpc-timeout":
                timeout = value
            elif name == b"grpc-encoding":
                encoding = value
            elif name == b"authorization":
                authorization.append(value)
            elif name == b"traceparent":
                parent = value.decode("ascii", "replace")
        if method != b"POST" or (kind != b"application/grpc" and _CONTENT_TYPE.fullmatch(kind) is None):
            self.http2.refuse(stream, [(b":status", b"405" if method != b"POST" else b"415")])
            return None
        if stream.too_large:
            raise LimitReached(f"the metadata is too large; limits.metadata_bytes_max is {server.metadata_bytes_max}")
        name_of = path.decode("latin-1")
        caller = server.guard.admit(name_of, authorization)
        counted = METHODS.get(name_of) is not OPEN
        if counted and 2 * server.slots.total >= server.slots.calls_max:
            server.slots.check(caller.name)
        if encoding not in (b"", b"identity"):
            raise _Unsupported("found a grpc-encoding that is not supported, expected identity")
        call = GrpcCall(self, stream, server.methods[name_of], caller, counted)
        if timeout:
            call.deadline_s = time.monotonic() + parse_timeout(timeout)
        call.parent = parent
        return call

    def _on_received(self, call: GrpcCall, event: str) -> None:
        try:
            if event is BODY:
                call.on_body()
            else:
                call.on_end()
        except Exception as error:
            call.stream.body, call.stream.block = bytearray(), None
            call.stream.discard = True
            call.end(error)

    def _refuse(self, stream: Http2Stream, error: Exception) -> None:
        self.http2.refuse(stream, [*_HEAD, *status_trailers(error)])

    def _on_closed(self, stream: Http2Stream) -> None:
        call: GrpcCall | None = stream.call
        if call is not None:
            stream.call = None
            self.calls.discard(call)
            self.writers.discard(call)
            self.server.calls -= 1
            call.on_closed()

    def _balance_reading(self) -> None:
        """Read from the socket only while received work is done and responses are taken."""
        pause = self._working or (self._writing_paused and self.http2.unsent_bytes > UNSENT_BYTES_MAX)
        if pause != self._reading_paused:
            self._reading_paused = pause
            (self._transport.pause_reading if pause else self._transport.resume_reading)()

    # unsent responses

    def is_read(self) -> bool:
        """Return True while the client takes what is sent, so that few bytes are unsent."""
        return not self._writing_paused and self.http2.unsent_bytes <= FREE_UNSENT_BYTES

    def hold_back(self, call: GrpcCall) -> bool:
        """Return True, and start the call later, if responses of the connection wait for the client to read."""
        if self.server.unsent.waiting_of(self) < WAITING_ANSWERS_MAX:
            return False
        self._held_back.append(call)
        return True

    def start_held_back(self) -> None:
        """Start calls that were held back, while few responses wait."""
        while self._held_back and self.server.unsent.waiting_of(self) < WAITING_ANSWERS_MAX:
            self._held_back.popleft().start()

    def settle(self, reservation: Reservation) -> None:
        """Release a reservation once the socket has taken all that was handed to the transport so far."""
        if self._closed:
            reservation.release()
        else:
            self._settling.append((self._flushed_bytes, reservation))
            self._settle(SETTLE_S)

    def _settle(self, again_s: float) -> None:
        if self._settle_timer is not None:
            self._settle_timer.cancel()
            self._settle_timer = None
        taken_bytes = self._flushed_bytes - self._transport.get_write_buffer_size()
        while self._settling and self._settling[0][0] <= taken_bytes:
            self._settling.popleft()[1].release()
        if self._settling and not self._closed:
            next_s = min(2 * again_s, SETTLE_MAX_S)
            self._settle_timer = self.server.loop.call_later(again_s, self._settle, next_s)

    def _is_slow(self, now_s: float) -> bool:
        """Return True if the client takes its responses slowly while those of other connections wait."""
        unsent = self.server.unsent
        if not unsent.held_by(self) or not unsent.pressed(self):
            self._pressed = None
            return False
        taken_bytes = self._flushed_bytes - self._transport.get_write_buffer_size()
        if self._pressed is None:
            self._pressed = now_s, taken_bytes
        since_s = now_s - self._pressed[0]
        if since_s < SLOW_S:
            return False
        slow = taken_bytes - self._pressed[1] < since_s * SLOW_BYTES_S
        self._pressed = now_s, taken_bytes
        return slow

    # sending

    def flush_soon(self) -> None:
        """Send what is queued at the end of this turn of the loop."""
        if not (self._flushing or self._closed):
            self._flushing = True
            self.server.loop.call_soon(self._flush)

    def _flush(self) -> None:
        self._flushing = False
        if self._closed or self._writing_paused:
            return
        unsent_bytes = self.http2.unsent_bytes
        try:
            parts = self.http2.data_to_send(FLUSH_BYTES)
        except Http2Error as error:
            _log.debug("a gRPC connection ends: %s", error)
            self._close_now()
            return
        if self.http2.unsent_bytes < unsent_bytes:
            self._sent_s = time.monotonic()
        if parts:
            size = sum(map(len, parts))
            self._flushed_bytes += size
            if size <= JOIN_BYTES_MAX:
                self._transport.write(b"".join(parts))
            else:
                self._transport.writelines(parts)
            if size >= FLUSH_BYTES:
                self.flush_soon()
        self._on_events(self.http2.take_events())
        if self.writers and parts:
            self.writers -= {call for call in self.writers if call.on_flushed()}
        if self._closed:
            return
        if self.http2.ended:
            self._transport.close()
        elif self._reading_paused:
            self._balance_reading()

    def _close_now(self) -> None:
        """Send what is queued, with a time limit, and close."""
        with contextlib.suppress(Http2Error):
            self._transport.writelines(self.http2.data_to_send(FLUSH_BYTES))
        self._transport.close()
        self.server.loop.call_later(self.server.header_s, self._transport.abort)
        self.connection_lost(None)

    # time

    def check(self, now_s: float) -> None:
        """Close a connection that is silent, stalled or slow; ping one that is idle."""
        server = self.server
        self.http2.allow_control()
        if now_s - self._ping_allowed_s >= server.ping_interval_s:
            self._ping_allowed_s = now_s
            self.http2.allow_ping()
        if not self.http2.settings_acknowledged and now_s - self._opened_s > server.header_s:
            self._transport.abort()  # no greeting, or no answer to ours
            return
        waiting = self._transport.get_write_buffer_size()
        if not waiting or self._flushed_bytes - waiting > self._taken_bytes:
            self._taken_bytes, self._taken_s = self._flushed_bytes - waiting, now_s
        elif now_s - self._taken_s > STALL_S:
            self._transport.abort()
            return
        if not self.http2.unsent_bytes:
            self._sent_s = now_s
        elif now_s - self._sent_s > STALL_S:
            self._transport.abort()
            return
        if self._is_slow(now_s):
            _log.debug("a gRPC connection is closed: it reads slowly, and other responses wait")
            self._transport.abort()
            return
        for call in [call for call in self.calls if call.receiving]:
            if self._reading_paused:
                call.progress_s = now_s
            if call.deadline_s is not None and now_s > call.deadline_s:
                call.end(DeadlineExceeded("the call's deadline passed before its message had arrived"))
            elif now_s - call.progress_s > server.header_s:
                call.end(LimitReached(f"the message did not arrive; limits.header_s is {server.header_s:g}"))
        if self._pinged_s:
            if self._received_s > self._pinged_s or self.http2.pings_acknowledged > self._pongs:
                self._pinged_s = 0.0
            elif now_s - self._pinged_s > server.ping_wait_s:
                self._transport.abort()
        elif now_s - self._received_s > server.keepalive_s:
            self._pinged_s, self._pongs = now_s, self.http2.pings_acknowledged
            self.http2.ping()
            self.flush_soon()

    def drain(self) -> None:
        """Ask the client to open no more streams here."""
        if not self._closed:
            self.http2.shutdown_notice()
            self.flush_soon()

    def cancel_calls(self) -> None:
        """Cancel all calls."""
        for call in list(self.calls):
            call.end(RequestCancelled("the server has stopped"))

    def end(self) -> None:
        """Send what is queued and close."""
        if not self._closed:
            self._flush()
        if not self._closed:
            self.http2.terminate()
            self.flush_soon()


# server


class Http2Transport:
    """Accepts gRPC connections in the event loop that calls `listen`, and runs methods."""

    name = "nghttp2"

    def __init__(self, config: ServeConfig, methods: Mapping[str, Method], guard: Guard) -> None:
        limits = config.limits
        self._config = config
        self.methods = methods
        self.guard = guard
        self.loop = asyncio.get_running_loop()
        self.buffer = memoryview(bytearray(READ_BYTES))
        self.budget = ByteBudget("limits.inflight_bytes_max", limits.budget_bytes)
        self.unsent = UnsentBudget(limits.budget_bytes)
        self.http2_limits = Http2Limits(limits.streams_max, limits.metadata_bytes_max)
        self.message_bytes_max = limits.message_bytes_max
        self.metadata_bytes_max = limits.metadata_bytes_max
        self.slots = CallSlots(limits.calls_max)
        self.opening: OpeningCalls[GrpcCall] = OpeningCalls()
        self.table: ConnectionTable[GrpcConnection] = ConnectionTable(limits.connections_max)
        self.header_s = limits.header_s
        self.keepalive_s = limits.keepalive_s
        self.ping_wait_s = limits.keepalive_wait_s
        self.ping_interval_s = min(limits.keepalive_s, PING_INTERVAL_S)
        self.connections: set[GrpcConnection] = set()
        self._backlog: deque[GrpcConnection] = deque()  # connections with received work
        self._new_backlog: deque[GrpcConnection] = deque()  # the new ones
        self.calls = 0
        self.closing = self.closed = False
        self.now_s = time.monotonic()
        self._servers: list[asyncio.Server | TlsListener] = []
        self._sweeping: asyncio.Task[None] | None = None
        self._all_closed = asyncio.Event()

    async def listen(self) -> int:
        """Listen and return the port, 0 for a Unix socket; ModelError if the address is not available."""
        config, tls = self._config.grpc, self._config.tls
        context = ssl_context(tls, "h2") if tls is not None else None
        port = 0
        if config.socket is not None:
            try:
                with placed(config.socket, config.socket_group) as private:
                    sockets = [_bound(socket.AF_UNIX, str(private))]
            except OSError:
                raise ModelError(
                    f"gRPC cannot listen at the socket {config.socket}: its path may be too long"
                ) from None
        else:
            sockets = self._bind_host()
            port = int(sockets[0].getsockname()[1])
        for one in sockets:
            self._servers.append(await self._serve(one, context))
        self._sweeping = self.loop.create_task(self._sweep())
        return port

    async def _serve(self, bound: socket.socket, context: ssl.SSLContext | None) -> asyncio.Server | TlsListener:
        """Accept connections of a bound socket."""
        if context is None:
            return await self.loop.create_server(lambda: GrpcConnection(self), sock=bound, backlog=BACKLOG)
        bound.listen(BACKLOG)
        return TlsListener(bound, context, self.header_s, self.table.connections_max, lambda: GrpcConnection(self))

    def _bind_host(self) -> list[socket.socket]:
        config = self._config.grpc
        shared = config.processes > 1  # else a second server would receive half of the connections
        bound: list[socket.socket] = []
        port = config.port
        try:
            found = socket.getaddrinfo(config.host.strip("[]"), port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
            for family, _, _, _, address in dict.fromkeys(found):
                one = _bound(family, (address[0], port, *address[2:]), shared)
                bound.append(one)
                port = one.getsockname()[1]
        except OSError:
            for one in bound:
                one.close()
            where, why = f"{config.host} port {config.port}", "it is in use, or not an address of this host"
            raise ModelError(f"gRPC cannot listen at {where}: {why}") from None
        return bound

    async def close(self, grace_s: float) -> None:
        """Close the sockets, let open calls finish for `grace_s` seconds, and cancel the rest."""
        self.closing = True
        for server in self._servers:
            server.close()
        for connection in list(self.connections):
            connection.drain()
        until_s = time.monotonic() + grace_s
        while self.calls and time.monotonic() < until_s:
            await asyncio.sleep(min(0.02, grace_s))
        for connection in list(self.connections):
            connection.cancel_calls()
        await asyncio.sleep(0.01)  # cancelled tasks end their calls
        for connection in list(self.connections):
            connection.end()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(1.0):
                while self.connections:
                    self._all_closed.clear()
                    await self._all_closed.wait()
        self.closed = True  # a handshake may end later
        for connection in list(self.connections):
            connection.abort()
        if self._sweeping is not None:
            self._sweeping.cancel()

    def continue_soon(self, connection: GrpcConnection) -> None:
        """Let a connection go on with received work; one connection does in each turn of the loop, new ones in some."""
        if connection.new:
            if not self._new_backlog:
                self.loop.call_soon(self._continue_new)
            self._new_backlog.append(connection)
            return
        if not self._backlog:
            self.loop.call_soon(self._continue_one)
        self._backlog.append(connection)

    def _continue_one(self) -> None:
        connection = self._backlog.popleft()
        if self._backlog:
            self.loop.call_soon(self._continue_one)
        connection.work(TURN_S)

    def _continue_new(self) -> None:
        """Let a new connection go on, and the next one after a pause."""
        started_s = time.monotonic()
        connection = self._new_backlog[0]  # stays there: no second timer is started
        try:
            connection.work(TURN_S)
        finally:
            self._new_backlog.popleft()
            if self._new_backlog:
                self.loop.call_later(NEW_PAUSE * (time.monotonic() - started_s), self._continue_new)

    @property
    def turn_s(self) -> float:
        """Time for the work of a connection that has just received bytes."""
        return SHORT_TURN_S if self._backlog or self._new_backlog else TURN_S

    def closed_one(self) -> None:
        """Note that a connection is closed."""
        self._all_closed.set()

    async def _sweep(self) -> None:
        limits = self._config.limits
        interval_s = min(1.0, max(0.05, min(limits.header_s, limits.keepalive_s, limits.keepalive_wait_s) / 4))
        while True:
            await asyncio.sleep(interval_s)
            self._check_connections()

    def _check_connections(self) -> None:
        self.now_s = time.monotonic()
        for late in self.table.expired(self.now_s):
            late.close_for_another()
        for connection in list(self.connections):
            try:
                connection.check(self.now_s)
            except Exception:
                _log.exception("a gRPC connection failed")
                connection.abort()


def _bound(family: int, address: Any, shared: bool = False) -> socket.socket:
    """Return a bound stream socket; a wildcard of IPv6 takes IPv4 connections too. OSError if it is in use."""
    one = socket.socket(family, socket.SOCK_STREAM)
    try:
        if family != socket.AF_UNIX:
            one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            one.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, int(address[0] != "::"))
        if shared:
            one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        one.setblocking(False)
        one.bind(address)
        if family != socket.AF_UNIX:
            one.listen(BACKLOG)  # fails where another process listens
    except BaseException:
        one.close()
        raise
    return one
