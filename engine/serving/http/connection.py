"""HTTP connection limits: number, header size, unread bytes, and time to send a request and read its answer.

uvicorn's protocol over httptools (llhttp) reads the bytes; it limits none of them. Here:

- at `connections_max` a connection that serves no call is closed for another (`ConnectionTable`);
- a connection parses for a turn, and one of those with more goes on in each turn of the loop (`Turns`);
- bytes behind a request that has no answer yet (pipelining) stay unparsed and the connection is not read; a connection
  that brings the unread bytes of all connections over UNREAD_BYTES_MAX is closed;

- more than `metadata_bytes_max` bytes without a finished header, body piece or request end: 431, and the end;
- a connection whose peer acknowledges nothing for `keepalive_s` + `keepalive_wait_s` is closed by the kernel, idle or
  while a response is sent;
- a request must be complete `header_s` after its start (or that of the connection), plus one second for each
  BODY_BYTES_S of its body; else the connection is closed. The body of a refused request is discarded for `header_s`.
"""

from __future__ import annotations

import asyncio
import math
import re
import socket
import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from weftline.engine.serving.config import ServeLimits
from weftline.engine.serving.connection_table import LATE_S, ConnectionTable
from weftline.engine.serving.http.joined_writes import JoinedWrites
from weftline.engine.serving.turns import Turns

if TYPE_CHECKING:
    from weftline.engine.serving.http.client_gone import ClientWatch

BODY_BYTES_S = 256 << 10
"""Lowest rate of a large body in bytes a second, once `header_s` is over."""

KEEPALIVE_S_MAX = 32_767
"""Largest value that Linux accepts for either time of a TCP keepalive."""

TARGET = "weftline.target"
"""Scope key of the request target as it was sent; ASGI keeps only its path."""

CONNECTION = "weftline.connection"
"""Scope key of the connection, for its calls in the ConnectionTable."""

UNREAD_BYTES_MAX = 32 << 20
"""Most received bytes of all connections that are not parsed yet."""

SLICE_BYTES, CHUNKED_BYTES = 1 << 10, 4 << 10
"""Most bytes that are parsed at a time: of headers, and of a chunked body."""

BLANK_LINE = re.compile(rb"\n\r?\n")
"""Ends the headers, and a chunked body: the next request may begin behind it, which waits for the answer."""

CLOSE_S = 1.0
"""Time for a client to take the rest of a response when its connection is closed for another."""

STALL_S = 60.0
"""Longest time that a client may read nothing of a response, as in the gRPC server."""


def overdue_s(now_s: float, began_s: float, received_bytes: int, header_s: float) -> float:
    """Return the seconds by which an incomplete request is overdue; negative: the time left."""
    return now_s - (began_s + header_s + received_bytes / BODY_BYTES_S)


def watch(listening: socket.socket, limits: ServeLimits) -> None:
    """Set TCP keepalive and TCP_USER_TIMEOUT on a listening socket; its connections inherit both.

    An idle connection is probed after `keepalive_s`. Sent data must be acknowledged within `keepalive_s` +
    `keepalive_wait_s`; the default of Linux is about 15 minutes.
    """
    probe_s, reply_s = math.ceil(limits.keepalive_s), math.ceil(limits.keepalive_wait_s)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, min(probe_s, KEEPALIVE_S_MAX))
    listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, min(reply_s, KEEPALIVE_S_MAX))
    listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 1)
    _set_unacknowledged_max(listening, _gone_s(limits))


def _gone_s(limits: ServeLimits) -> float:
    return limits.keepalive_s + limits.keepalive_wait_s


def _set_unacknowledged_max(sock: Any, seconds: float) -> None:
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(seconds * 1000))


class _Flow(FlowControl):
    """uvicorn's flow control, which resumes reading once kept bytes have been parsed."""

    def __init__(self, transport: Any, parse_kept: Callable[[], bool]) -> None:
        super().__init__(transport)
        self._parse_kept = parse_kept

    def resume_reading(self) -> None:
        if self.read_paused:
            self.read_paused = False
            if not self._parse_kept() and not self._transport.is_closing():
                self._transport.resume_reading()


class Connections:
    """State that the connections of one server share. unread_bytes: received and not parsed yet."""

    def __init__(self, limits: ServeLimits) -> None:
        self.limits = limits
        self.table: ConnectionTable[LimitedProtocol] = ConnectionTable(limits.connections_max)
        self.unread_bytes = 0
        self.turns = Turns(short=True)


class LimitedProtocol(HttpToolsProtocol):
    """The protocol of uvicorn with the limits above.

    shared: state of all connections of its server.
    new:    no call with rights has begun on it.
    """

    def __init__(self, shared: Connections, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._shared = shared
        self._limits = shared.limits
        self.new = True
        self._kept = b""  # received and not parsed
        self._waits = False  # for its turn to parse them
        self._in_body = False
        self._body_left = 0  # of a body with a length
        self._unparsed = 0  # bytes since the parser last finished something
        self._headers_bytes = 0
        self._body_bytes = 0
        self._sending = True  # a request is expected, or on its way
        self._began_s = self.loop.time()
        self._timer: asyncio.TimerHandle | None = None
        self._stall: asyncio.TimerHandle | None = None
        self._watches: set[ClientWatch] = set()
        self._lost = False

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self.flow = _Flow(transport, self._parse_kept)
        self._writer = JoinedWrites(transport, self.loop)
        closed = self._shared.table.add(self, self.client[0] if self.client else "", self.loop.time())
        if closed is not None:
            closed.close_for_another()
        if len(self._shared.table) > self._limits.connections_max:
            self.loop.call_later(LATE_S + 0.1, self._close_late)
        self._timer = self.loop.call_later(self._limits.header_s, self._check_time)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._end_stall()
        self._shared.table.remove(self)
        self._keep(b"")
        self._lost = True
        for watch in self._watches:
            watch.cancel()
        super().connection_lost(exc)

    def watch(self, watch: ClientWatch) -> None:
        """Cancel the task of a request when the connection is lost, until `unwatch`; soon, if it is lost already.

        The connection is read meanwhile, since nothing else shows that it is lost.
        """
        self._watches.add(watch)
        if self._lost:
            self.loop.call_soon(self._cancel_late, watch)
        else:
            self.flow.resume_reading()

    def unwatch(self, watch: ClientWatch) -> None:
        self._watches.discard(watch)

    def _cancel_late(self, watch: ClientWatch) -> None:
        if watch in self._watches:
            watch.cancel()

    def begin_call(self, caller: str) -> None:
        """Note that a call with rights begins; LimitReached as `ConnectionTable.begin_call`."""
        self.new = False
        closed = self._shared.table.begin_call(self, caller)
        if closed is not None:
            closed.close_for_another()

    def end_call(self) -> None:
        self._shared.table.end_call(self)

    def close_for_another(self) -> None:
        if not self.transport.is_closing():
            self.transport.close()
            self.loop.call_later(CLOSE_S, self.transport.abort)

    def _close_late(self) -> None:
        for late in self._shared.table.expired(self.loop.time()):
            late.close_for_another()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._set_user_timeout(max(STALL_S, _gone_s(self._limits)))  # a full receive window counts as unacknowledged
        self._check_stall(None)

    def resume_writing(self) -> None:
        self._end_stall()
        self._set_user_timeout(_gone_s(self._limits))
        super().resume_writing()

    def _set_user_timeout(self, seconds: float) -> None:
        if not self.transport.is_closing():
            _set_unacknowledged_max(self.transport.get_extra_info("socket"), seconds)

    def _check_stall(self, unsent: int | None) -> None:
        """Abort the connection if the client has read nothing of the response for STALL_S."""
        now = self.transport.get_write_buffer_size()
        if unsent is not None and now >= unsent:
            self.transport.abort()
        else:
            self._stall = self.loop.call_later(STALL_S, self._check_stall, now)

    def _end_stall(self) -> None:
        if self._stall is not None:
            self._stall.cancel()

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        if self._kept:
            self._keep(self._kept + data)
            return
        turn_s = self._shared.turns.turn_s(time.monotonic())
        if turn_s or len(data) <= SLICE_BYTES or self._shared.unread_bytes > UNREAD_BYTES_MAX // 2:
            self._parse(data, turn_s)
        else:
            self._keep(data)
            self._parse_kept()

    def _parse(self, data: bytes, turn_s: float) -> None:
        """Parse bytes up to the end of a request; keep the rest while that request has no answer.

        What takes longer than `turn_s` goes on in a later turn.
        """
        at, until_s = 0, time.monotonic() + turn_s
        while at < len(data) and not self.transport.is_closing():
            blocked = self._blocked()
            if blocked or (at and time.monotonic() > until_s):
                self._keep(data[at:])
                if not blocked:
                    self._parse_kept()
                return
            part = data[at : at + self._part_bytes(data, at)]
            at += len(part)
            if not self._sending:
                self._expect_request()
            self._unparsed += len(part)
            super().data_received(part)
            if max(self._unparsed, self._headers_bytes) > self._limits.metadata_bytes_max and self._sending:
                self._refuse_headers()

    def _part_bytes(self, data: bytes, at: int) -> int:
        """Return the bytes to parse at a time: the rest of a body, or up to an end of headers or of a chunked body."""
        if self._body_left:
            return self._body_left
        size = CHUNKED_BYTES if self._in_body else SLICE_BYTES
        found = BLANK_LINE.search(data, at, at + size)
        return found.end() - at if found else size

    def _blocked(self) -> bool:
        """Return True while a request has no answer, or a body waits to be taken."""
        answering = not self._sending and self.cycle is not None and not self.cycle.response_complete
        return answering or self.flow.read_paused

    def _keep(self, data: bytes) -> None:
        self._shared.unread_bytes += len(data) - len(self._kept)
        self._kept = data
        if not data:
            return
        self.flow.pause_reading()
        if self._shared.unread_bytes > UNREAD_BYTES_MAX:
            self.transport.abort()

    def _parse_kept(self) -> bool:
        """Parse kept bytes in the next turn of the loop; returns False if there are none."""
        if not self._kept:
            return False
        self.flow.read_paused = True  # until then
        if not self._waits:
            self._waits = True
            self._shared.turns.continue_soon(self)
        return True

    def work(self, turn_s: float) -> None:
        """Parse kept bytes for about `turn_s`."""
        self._waits = False
        if self.transport.is_closing():
            return
        self.flow.read_paused = False
        data = self._kept
        self._keep(b"")
        self._parse(data, turn_s)
        if not self.flow.read_paused and not self.transport.is_closing():
            self.transport.resume_reading()

    def on_message_begin(self) -> None:
        self._headers_bytes = self._body_bytes = 0
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        self._headers_bytes += len(url)
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers_bytes += len(name) + len(value) + 4
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._unparsed = 0
        if self._headers_bytes <= self._limits.metadata_bytes_max:
            self.scope[TARGET] = self.url  # type: ignore[literal-required]
            self.scope[CONNECTION] = self  # type: ignore[literal-required]
            self._in_body, self._body_left = True, self._announced_bytes()
            super().on_headers_complete()
            self._writer.begin()
            self.cycle.transport = self._writer  # type: ignore[assignment]  # it writes, closes and is closing

    def _announced_bytes(self) -> int:
        """Return the length of a body that has one; the parser has checked it."""
        lengths = [value for name, value in self.headers if name == b"content-length"]
        chunked = any(name == b"transfer-encoding" for name, _ in self.headers)
        return int(lengths[0]) if lengths and not chunked else 0

    def on_body(self, body: bytes) -> None:
        self._unparsed = 0
        self._body_bytes += len(body)
        self._body_left = max(0, self._body_left - len(body))
        if self.cycle is not None:
            super().on_body(body)

    def on_message_complete(self) -> None:
        self._unparsed = self._body_left = 0
        self._in_body = False
        if self._headers_bytes > self._limits.metadata_bytes_max or self.cycle is None:
            return
        self._sending = False
        super().on_message_complete()

    def _expect_request(self) -> None:
        self._sending, self._began_s, self._unparsed = True, self.loop.time(), 0
        self._headers_bytes = self._body_bytes = 0
        if self._timer is None:  # else that of an earlier request, which goes on for this one
            self._timer = self.loop.call_later(self._limits.header_s, self._check_time)

    def _check_time(self) -> None:
        self._timer = None
        if not self._sending or self.transport.is_closing():
            return
        counted = 0 if self.cycle is not None and self.cycle.response_complete else self._body_bytes
        late_s = overdue_s(self.loop.time(), self._began_s, counted, self._limits.header_s)
        if late_s < 0:
            self._timer = self.loop.call_later(-late_s, self._check_time)
        else:
            self.transport.close()

    def _refuse_headers(self) -> None:
        if not self.transport.is_closing():
            text = b"the headers are larger than limits.metadata_bytes_max"
            self.transport.write(
                b"HTTP/1.1 431 Request Header Fields Too Large\r\ncontent-type: text/plain\r\n"
                b"content-length: %d\r\nconnection: close\r\n\r\n%b" % (len(text), text)
            )
            self.transport.close()


def limited(limits: ServeLimits) -> Any:
    """Return what uvicorn's `http` setting calls for each connection of a server."""
    return partial(LimitedProtocol, Connections(limits))
