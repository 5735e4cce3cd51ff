"""One gRPC call on an HTTP/2 connection: received messages, the method, the response.

Two life cycles, each a table. MOVES is that of the method and its response; COUNTS that of its accounting: it counts as
nothing, one of the calls without a message (`OpeningCalls`), or one of `limits.calls_max` slots (`CallSlots`).
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from weftline.engine.serving.auth.gate import Caller
from weftline.engine.serving.call_slots import RETRY_S
from weftline.engine.serving.config import FREE_BYTES
from weftline.engine.serving.grpc.nghttp2 import OK_TRAILERS, STREAM_WINDOW_BYTES, Field, Http2Stream
from weftline.engine.serving.grpc.protocol import (
    HEAD,
    Malformed,
    Unsupported,
    framed,
    status_trailers,
    take_message,
    too_large,
)
from weftline.engine.serving.grpc.service import CALLER, PEER, CallContext, InferMethod, Message, Method, StreamMethod
from weftline.engine.serving.replies import clear_frames
from weftline.engine.serving.room import reserve
from weftline.engine.serving.unsent_budget import SMALL_BYTES, Reservation
from weftline.errors import DeadlineExceeded, LimitReached

if TYPE_CHECKING:
    from weftline.engine.serving.grpc.http2_connection import GrpcConnection

PROGRESS_BYTES = 64 << 10
"""Bytes of an incomplete message that must arrive within `limits.header_s`."""

WAITS, RUNS, SENDS, ENDED = "waits", "runs", "sends", "ended"

MOVES: Mapping[tuple[str, str], str] = {
    (WAITS, "start"): RUNS,
    (WAITS, "end"): ENDED,
    (RUNS, "send"): SENDS,
    (RUNS, "end"): ENDED,
    (SENDS, "end"): ENDED,
}
"""Life cycle of a call: (state, event) -> state.

waits: its method has not started. sends: the headers of a streamed response are queued, and messages follow.
ended: the whole response is queued, or the stream is over.
"""

NOTHING, BEGUN, OPENING, SLOT = "nothing", "begun", "opening", "slot"

COUNTS: Mapping[tuple[str, str], str] = {
    (NOTHING, "begin"): BEGUN,
    (BEGUN, "wait"): OPENING,
    (BEGUN, "take"): SLOT,
    (OPENING, "take"): SLOT,
    (BEGUN, "free"): NOTHING,
    (OPENING, "free"): NOTHING,
    (SLOT, "free"): NOTHING,
}
"""Accounting of a call: (count, event) -> count.

begun:   its first message has not arrived in the bytes that are being processed.
opening: it has not arrived afterwards either: the call is one of `OpeningCalls`.
slot:    it has arrived, and the method needs rights.
"""


class GrpcCall:
    """One call: its state between the connection and the method.

    Implements `StreamCall` for methods with streams, and `Room` for its response.

    state:   as in MOVES.
    count:   as in COUNTS.
    counted: its method needs rights.
    """

    __slots__ = (
        "_cancel",
        "_connection",
        "_context",
        "_error",
        "_held_bytes",
        "_messages",
        "_progress_bytes",
        "_queued_bytes",
        "_read_bytes",
        "_reading",
        "_streamed",
        "_timer",
        "_writing",
        "caller",
        "count",
        "counted",
        "deadline_s",
        "method",
        "parent",
        "progress_s",
        "state",
        "stream",
    )

    def __init__(
        self, connection: GrpcConnection, stream: Http2Stream, method: Method, caller: Caller, counted: bool = True
    ) -> None:
        self.state, self.count = WAITS, NOTHING
        self.stream, self.method, self.caller, self.counted = stream, method, caller, counted
        self.deadline_s: float | None = None
        self.parent = ""
        self.progress_s = connection.server.now_s
        self._connection = connection
        self._streamed = method.__class__ is StreamMethod
        self._cancel: Callable[[], object] | None = None  # cancels the method
        self._context: CallContext | None = None  # of a unary call
        self._error: Exception | None = None  # ends the call in place of what its task raises
        self._messages: deque[tuple[Message, int]] = deque()  # with the bytes that each holds in the budget
        self._held_bytes = 0  # of a large message in the budget, until it is complete
        self._progress_bytes = 0  # received at `progress_s`
        self._queued_bytes = 0  # of messages that wait to be read
        self._read_bytes = 0  # of messages that were read
        self._reading: asyncio.Future[None] | None = None
        self._writing: asyncio.Future[None] | None = None
        self._timer: asyncio.TimerHandle | None = None

    @property
    def receiving(self) -> bool:
        """True while a unary call waits for its message, or a part of a large message is held."""
        if self.state is ENDED or self._error is not None:
            return False
        return self.state is WAITS or self.stream.block is not None

    def context(self) -> CallContext:
        left_ms = None if self.deadline_s is None else (self.deadline_s - time.monotonic()) * 1000
        return CallContext(self.caller, "grpc-stream" if self._streamed else "grpc", left_ms, self.parent, "", self)

    # Room

    def is_free(self, size_bytes: int) -> bool:
        return size_bytes <= SMALL_BYTES and self._connection.is_read()

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
        if stream.received_bytes - self._progress_bytes >= PROGRESS_BYTES:
            self._progress_bytes, self.progress_s = stream.received_bytes, server.now_s
            server.opening.progressed(self)
        if stream.block is not None:
            if stream.filled_bytes < len(stream.block):
                return
            block, stream.block = stream.block.toreadonly(), None
            self._add_message(block, len(block) + 5)
        while stream.body:
            message, size = take_message(stream.body, server.message_bytes_max)
            if message is not None:
                self._add_message(message, size)
                continue
            if size - 5 > FREE_BYTES:
                server.budget.take_now(size - 5)
                self._held_bytes = size - 5
                self._progress_bytes, self.progress_s = stream.received_bytes, server.now_s
                del stream.body[:5]
                stream.fill(np.empty(size - 5, np.uint8).data)
            self._connection.http2.allow(stream, self._read_bytes + self._queued_bytes + max(size, 5))
            break
        if self._reading is not None and self._messages and not self._reading.done():
            self._reading.set_result(None)

    def _add_message(self, message: Message, size: int) -> None:
        """Queue a message for the method; size: its length with the prefix."""
        if self.count is not NOTHING and self.count is not SLOT:
            self._take_slot()
        if self._messages and not self._streamed:
            raise Unsupported("found a second message, expected one")
        self._messages.append((message, self._held_bytes))
        self._held_bytes = 0
        self._queued_bytes += size

    def _take_slot(self) -> None:
        """Count the call once its first message is there; LimitReached without a slot for its caller."""
        connection, count = self._connection, self.count
        server = connection.server
        if count is OPENING:
            server.opening.discard(self)
        self.count = COUNTS[count, "free"]
        if self.counted:
            server.slots.take(self.caller.name)
            self.count = COUNTS[count, "take"]
            connection.counted_calls += 1
            if connection.counted_calls == 1:
                connection.become_busy(self.caller.name)

    def wait_for_message(self) -> None:
        """Count a call without a message; one of them is ended where there are too many."""
        server = self._connection.server
        self.count = COUNTS[self.count, "wait"]
        ended = server.opening.add(self, self._connection, self.counted)
        if ended is not None:
            ended.count = COUNTS[ended.count, "free"]
            ended.end(LimitReached("the message did not arrive, and other calls wait to begin", RETRY_S))

    def _free_count(self) -> None:
        """Return what the call counts as."""
        connection, server = self._connection, self._connection.server
        if self.count is SLOT:
            server.slots.give_back(self.caller.name)
            connection.counted_calls -= 1
            if not connection.counted_calls:
                server.table.end_call(connection)
        elif self.count is OPENING:
            server.opening.discard(self)
        self.count = COUNTS[self.count, "free"]

    def on_end(self) -> None:
        """Start a unary method, or let `read` return None. Raises what refuses the call."""
        if self.stream.body or self.stream.block is not None:
            raise Malformed("found a message that ends in the middle")
        if self._streamed:
            if self._reading is not None and not self._reading.done():
                self._reading.set_result(None)
        elif not self._messages:
            raise Malformed("found no message, expected one")
        else:
            self._connection.ready.append(self)

    def on_closed(self) -> None:
        """Cancel the method: the stream is over."""
        if self._messages or self._held_bytes:
            self._release()
        if self.count is not NOTHING:
            self._free_count()
        if self._context is not None:
            self._context.settle()
            self._context = None  # it refers to the call: each call would be left to the garbage collector
        cancel, self._cancel = self._cancel, None
        if self._timer is not None:
            self._timer.cancel()
        if self._streamed:
            for waiting in (self._reading, self._writing):
                if waiting is not None and not waiting.done():
                    waiting.cancel()
        if cancel is not None:
            cancel()

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
        if self.stream.closed or self.state is not WAITS:
            return
        method, connection = self.method, self._connection
        if isinstance(method, InferMethod):
            if connection.server.unsent.waiting and connection.hold_back(self):
                return
            self.state = MOVES[self.state, "start"]
            context = self._context = self.context()
            message, held_bytes = self._messages.popleft()
            try:
                cancel = method.inference.start(message, context, self._done)
            finally:
                if held_bytes:
                    connection.server.budget.give_back(held_bytes)  # `start` counts it in a budget of its own
            if self.state is RUNS and not self.stream.closed:
                self._cancel = cancel
            return
        self.state = MOVES[self.state, "start"]
        loop = connection.server.loop
        if self.deadline_s is not None:
            self._timer = loop.call_later(self.deadline_s - time.monotonic(), self._expire)
        task = loop.create_task(self._run())
        task.add_done_callback(self._on_task_done)
        self._cancel = task.cancel

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

    def _done(self, answer: bytes | BaseException) -> None:
        """Send the response of a ModelInfer, or its error."""
        self._cancel = None
        if isinstance(answer, BaseException):
            self.fail(answer)
        else:
            span = self._context.span if self._context is not None else ""
            self._respond(answer, [*OK_TRAILERS, (b"traceparent", span.encode())] if span else OK_TRAILERS)

    def _respond(self, message: bytes, trailers: Sequence[Field]) -> None:
        connection = self._connection
        if self.state is ENDED:
            return
        if len(message) > connection.server.message_bytes_max:
            self.fail(too_large("response", len(message), connection.server.message_bytes_max))
            return
        self._cancel, self.state = None, MOVES[self.state, "end"]
        connection.http2.respond(self.stream, framed(message), trailers)
        connection.flush_soon()

    def fail(self, error: BaseException) -> None:
        """End the call with the status of an error."""
        self._release()
        self._finish(status_trailers(error))
        clear_frames(error)

    def _finish(self, trailers: Sequence[Field]) -> None:
        http2, stream = self._connection.http2, self.stream
        if self.state is ENDED or stream.closed:
            return
        sending = self.state is SENDS
        self._cancel, self.state = None, MOVES[self.state, "end"]
        if sending:
            http2.finish(stream, trailers)
        elif trailers is OK_TRAILERS:
            http2.respond(stream, (), trailers)
        else:
            http2.refuse(stream, [*HEAD, *trailers])
        self._connection.flush_soon()

    def end(self, error: Exception) -> None:
        """End the call with an error and cancel its method."""
        cancel, self._cancel = self._cancel, None
        if cancel is None or isinstance(self.method, InferMethod):
            self.fail(error)
        else:
            self._error = error
        if cancel is not None:
            cancel()

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
            raise too_large("response", len(message), bytes_max)
        if stream.closed:
            raise asyncio.CancelledError
        if self.state is RUNS:
            self.state = MOVES[self.state, "send"]
            connection.http2.begin(stream)
        connection.http2.write(stream, framed(message))
        connection.flush_soon()
        self._writing = connection.server.loop.create_future()
        connection.writers.add(self)
        await self._writing
