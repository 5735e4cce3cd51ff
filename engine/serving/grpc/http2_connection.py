"""One gRPC connection in the asyncio loop: bytes of its socket to calls, and responses to its socket.

Events of its HTTP/2 core start and end calls. Its watch (`watch.py`) finds that it is silent, stalled or slow, and its
turns of the loop are shared with other connections (`serving/turns.py`).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import deque
from typing import TYPE_CHECKING, cast

from weftline.engine.serving.grpc.http2_call import BEGUN, COUNTS, GrpcCall
from weftline.engine.serving.grpc.nghttp2 import (
    BODY,
    CLOSED,
    REQUEST,
    Event,
    Http2Connection,
    Http2Error,
    Http2Stream,
)
from weftline.engine.serving.grpc.protocol import (
    HEAD,
    JOIN_BYTES_MAX,
    Unsupported,
    is_grpc,
    parse_timeout,
    status_trailers,
)
from weftline.engine.serving.grpc.service import StreamMethod
from weftline.engine.serving.grpc.watch import LATE, ConnectionWatch
from weftline.engine.serving.unsent_budget import Reservation
from weftline.errors import DeadlineExceeded, LimitReached, RequestCancelled

if TYPE_CHECKING:
    from weftline.engine.serving.grpc.http2_transport import Http2Transport

SLICE_BYTES, SLICE_CALLS = 32 << 10, 8
"""Bytes, and beginnings of calls, that are processed between two looks at the clock."""

FLUSH_BYTES = 1 << 20
"""Most bytes handed to the socket in one turn of the event loop."""

FREE_UNSENT_BYTES = 256 << 10
"""Unsent bytes of a connection up to which small responses wait for nothing."""

WRITE_BUFFER_BYTES = 256 << 10
"""Bytes in the transport's buffer from which nothing more is handed to it."""

SETTLE_S, SETTLE_MAX_S = 0.005, 0.5
"""First and longest interval of looking whether the socket has taken what was handed to the transport."""

_NO_BYTES = memoryview(b"")

_log = logging.getLogger("weftline.ingress")


class GrpcConnection(asyncio.BufferedProtocol):
    """One connection.

    peer:          key of the connection in limits by client.
    counted_calls: open calls that have slots.
    new:           no such call has begun.
    ready:         unary calls whose message is complete.
    writers:       calls that wait until what they wrote has been handed to the socket.
    """

    def __init__(self, server: Http2Transport) -> None:
        self.server = server
        self.http2: Http2Connection
        self.peer = ""
        self.counted_calls = 0
        self.new = True
        self.ready: deque[GrpcCall] = deque()
        self.writers: set[GrpcCall] = set()
        self.calls: set[GrpcCall] = set()
        self.watch = ConnectionWatch(server.now_s)
        self._closed_streams: deque[Http2Stream] = deque()  # of a closed connection, whose calls have not ended
        self._begun: list[GrpcCall] = []  # calls of the events that are being processed
        self._held_back: deque[GrpcCall] = deque()  # start once fewer responses wait
        self._settling: deque[tuple[int, Reservation]] = deque()  # with the flushed bytes at their end
        self._settle_timer: asyncio.TimerHandle | None = None
        self._transport: asyncio.Transport
        self._unread = _NO_BYTES
        self._working = False
        self._reading_paused = False
        self._writing_paused = False
        self._flushing = False
        self._closed = True

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
        now_s = time.monotonic()
        self.watch = ConnectionWatch(now_s)
        closed = server.table.add(self, address, now_s)
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
        server = self.server
        now_s = self.watch.received_s = time.monotonic()
        received = server.buffer[:nbytes]
        if self._working:  # a transport delivered bytes after it was paused
            self._unread = memoryview(bytes(self._unread) + bytes(received))
        else:
            self._unread = received
            self._run_turn(now_s + server.turns.turn_s(now_s))

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
        self._unread = _NO_BYTES
        self._held_back.clear()
        self._closed_streams.extend(self.http2.close())
        self._end_streams(self.server.turns.turn_s(time.monotonic()))
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
                self.server.turns.continue_soon(self)
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
        else:
            self._run_turn(time.monotonic() + turn_s)

    def _run_turn(self, until_s: float) -> None:
        try:
            if self._process_unread(until_s):
                self._balance_reading()
                if self.http2.wants_write:
                    self.flush_soon()
        except Exception:
            _log.exception("a gRPC connection failed")
            self.abort()

    def _process_unread(self, until_s: float) -> bool:
        """Start ready calls and process bytes until `until_s`; returns False if that ended the connection."""
        while True:
            while self.ready:
                self.ready.popleft().start()
                if self.ready and time.monotonic() > until_s:
                    break
            unread = self._unread
            if self.ready or not unread:
                break
            if not self._receive(unread if len(unread) <= SLICE_BYTES else unread[:SLICE_BYTES]):
                return False
            processed = self.http2.processed_bytes
            self._unread = _NO_BYTES if processed == len(unread) else unread[processed:]
            if time.monotonic() > until_s:
                break
        if self.ready or self._unread:
            if self._unread and self._unread.obj is self.server.buffer.obj:
                self._unread = memoryview(bytes(self._unread))  # the buffer is used for other connections meanwhile
            self._working = True
            self.server.turns.continue_soon(self)
        return True

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
            for event, stream in waiting:
                if event is REQUEST:
                    self._on_request(stream)
                elif event is CLOSED:
                    self._on_closed(stream)
                elif (call := stream.call) is not None and not stream.discard:
                    try:
                        if event is BODY:
                            call.on_body()
                        else:
                            call.on_end()
                    except Exception as error:
                        stream.body, stream.block = bytearray(), None
                        stream.discard = True
                        call.end(error)
            if self._begun:
                begun, self._begun = self._begun, []
                for call in begun:
                    if call.count is BEGUN and not call.stream.closed:
                        call.wait_for_message()
        except Exception:
            _log.exception("a gRPC connection failed")
            for event, stream in waiting:
                if event is CLOSED:
                    self._on_closed(stream)
            self._transport.abort()

    def _on_request(self, stream: Http2Stream) -> None:
        server = self.server
        try:
            call = self._make_call(stream)
        except Exception as error:
            self.http2.refuse(stream, [*HEAD, *status_trailers(error)])
            return
        if call is None:
            return
        stream.call = call
        self.calls.add(call)
        server.calls += 1
        call.count = COUNTS[call.count, "begin"]
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
        if method != b"POST" or not (kind == b"application/grpc" or is_grpc(kind)):
            self.http2.refuse(stream, [(b":status", b"405" if method != b"POST" else b"415")])
            return None
        if stream.too_large:
            raise LimitReached(f"the metadata is too large; limits.metadata_bytes_max is {server.metadata_bytes_max}")
        name_of = path.decode("latin-1")
        caller = server.guard.admit(name_of, authorization)
        counted = name_of not in server.open_methods
        if counted and 2 * server.slots.total >= server.slots.calls_max:
            server.slots.check(caller.name)
        if encoding not in (b"", b"identity"):
            raise Unsupported("found a grpc-encoding that is not supported, expected identity")
        call = GrpcCall(self, stream, server.methods[name_of], caller, counted)
        if timeout:
            call.deadline_s = time.monotonic() + parse_timeout(timeout)
        call.parent = parent
        return call

    def _on_closed(self, stream: Http2Stream) -> None:
        call: GrpcCall | None = stream.call
        if call is not None:
            stream.call = None
            self.calls.discard(call)
            if self.writers:
                self.writers.discard(call)
            self.server.calls -= 1
            call.on_closed()

    def become_busy(self, caller: str) -> None:
        """Note that the first call has a slot; LimitReached as `ConnectionTable.begin_call`."""
        self.new = False
        closed = self.server.table.begin_call(self, caller)
        if closed is not None:
            closed.close_for_another()

    def _balance_reading(self) -> None:
        """Read from the socket only while received work is done and responses are taken."""
        pause = self._working or (self._writing_paused and self.http2.unsent_bytes > self.server.unsent_bytes_max)
        if pause != self._reading_paused:
            self._reading_paused = pause
            (self._transport.pause_reading if pause else self._transport.resume_reading)()

    # unsent responses

    def is_read(self) -> bool:
        """Return True while the client takes what is sent, so that few bytes are unsent."""
        return not self._writing_paused and self.http2.unsent_bytes <= FREE_UNSENT_BYTES

    def hold_back(self, call: GrpcCall) -> bool:
        """Return True, and start the call later, if responses of the connection wait for the client to read."""
        if self._starts_calls():
            return False
        self._held_back.append(call)
        return True

    def start_held_back(self) -> None:
        """Start calls that were held back, while few responses wait."""
        while self._held_back and self._starts_calls():
            self._held_back.popleft().start()

    def _starts_calls(self) -> bool:
        return self.server.unsent.waiting_of(self) < self.server.waiting_answers_max

    def settle(self, reservation: Reservation) -> None:
        """Release a reservation once the socket has taken all that was handed to the transport so far."""
        if self._closed:
            reservation.release()
        else:
            self._settling.append((self.watch.flushed_bytes, reservation))
            self._settle(SETTLE_S)

    def _settle(self, again_s: float) -> None:
        if self._settle_timer is not None:
            self._settle_timer.cancel()
            self._settle_timer = None
        taken_bytes = self.watch.flushed_bytes - self._transport.get_write_buffer_size()
        while self._settling and self._settling[0][0] <= taken_bytes:
            self._settling.popleft()[1].release()
        if self._settling and not self._closed:
            next_s = min(2 * again_s, SETTLE_MAX_S)
            self._settle_timer = self.server.loop.call_later(again_s, self._settle, next_s)

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
        http2 = self.http2
        unsent_bytes = http2.unsent_bytes
        try:
            parts = http2.data_to_send(FLUSH_BYTES)
        except Http2Error as error:
            _log.debug("a gRPC connection ends: %s", error)
            self._close_now()
            return
        if parts:
            size = http2.sent_bytes
            self.watch.flushed_bytes += size
            if http2.unsent_bytes < unsent_bytes:
                self.watch.sent_s = time.monotonic()
            if size <= JOIN_BYTES_MAX:
                self._transport.write(b"".join(parts))
            else:
                self._transport.writelines(parts)
            if size >= FLUSH_BYTES:
                self.flush_soon()
        if events := http2.take_events():
            self._on_events(events)
        if self.writers and parts:
            self.writers -= {call for call in self.writers if call.on_flushed()}
        if self._closed:
            return
        if http2.ended:
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

    def check(self, now_s: float, stall_s: float, slow_s: float) -> None:
        """Close a connection that is silent, stalled or slow; ping one that is idle."""
        server, http2, watch = self.server, self.http2, self.watch
        http2.allow_control()
        if watch.may_be_pinged(now_s, server.ping_interval_s):
            http2.allow_ping()
        buffered_bytes = self._transport.get_write_buffer_size()
        if watch.is_silent(now_s, http2.settings_acknowledged, server.header_s) or watch.is_stalled(
            now_s, buffered_bytes, http2.unsent_bytes, stall_s
        ):
            self._transport.abort()
            return
        pressed = bool(server.unsent.held_by(self)) and server.unsent.pressed(self)
        if watch.is_slow(now_s, buffered_bytes, pressed, slow_s):
            _log.debug("a gRPC connection is closed: it reads slowly, and other responses wait")
            self._transport.abort()
            return
        self._check_calls(now_s)
        ping = watch.ping(now_s, http2.pings_acknowledged, server.keepalive_s, server.ping_wait_s)
        if ping is LATE:
            self._transport.abort()
        elif ping:
            http2.ping()
            self.flush_soon()

    def _check_calls(self, now_s: float) -> None:
        """End the calls whose message is late."""
        header_s = self.server.header_s
        for call in [call for call in self.calls if call.receiving]:
            if self._reading_paused:
                call.progress_s = now_s
            if call.deadline_s is not None and now_s > call.deadline_s:
                call.end(DeadlineExceeded("the call's deadline passed before its message had arrived"))
            elif now_s - call.progress_s > header_s:
                call.end(LimitReached(f"the message did not arrive; limits.header_s is {header_s:g}"))

    # end

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
