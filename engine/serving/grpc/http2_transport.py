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
import socket
import ssl
import time
from collections.abc import Mapping
from typing import Any

from weftline.engine.runtime.byte_budget import ByteBudget
from weftline.engine.serving.auth.methods import METHODS, OPEN
from weftline.engine.serving.auth.tls import ssl_context
from weftline.engine.serving.call_slots import CallSlots, OpeningCalls
from weftline.engine.serving.config import ServeConfig
from weftline.engine.serving.connection_table import ConnectionTable
from weftline.engine.serving.grpc.guard import Guard
from weftline.engine.serving.grpc.http2_call import GrpcCall
from weftline.engine.serving.grpc.http2_connection import SLICE_CALLS, GrpcConnection
from weftline.engine.serving.grpc.nghttp2 import Http2Limits
from weftline.engine.serving.grpc.service import Method
from weftline.engine.serving.tls_listener import TlsListener
from weftline.engine.serving.turns import Turns
from weftline.engine.serving.unix_socket import placed
from weftline.engine.serving.unsent_budget import SLOW_S, UnsentBudget
from weftline.errors import ModelError

__all__ = ["SLICE_CALLS", "GrpcCall", "GrpcConnection", "Http2Transport"]

READ_BYTES = 256 << 10
"""Most bytes read from a socket at a time; one buffer serves all connections of a server."""

UNSENT_BYTES_MAX = 64 << 20
"""Unsent bytes from which a connection is not read while its socket is full."""

WAITING_ANSWERS_MAX = 4
"""Waiting responses of a connection from which no further calls start."""

STALL_S = 60.0
"""Longest time in which a connection with waiting responses takes no byte."""

BACKLOG = 1024
"""Connections that wait to be accepted."""

PING_INTERVAL_S = 10.0
"""Interval at which a client may ping without calls; more often is a flood (gRFC A8)."""

_log = logging.getLogger("weftline.ingress")


class Http2Transport:
    """Accepts gRPC connections in the event loop that calls `listen`, and runs methods."""

    name = "nghttp2"

    def __init__(self, config: ServeConfig, methods: Mapping[str, Method], guard: Guard) -> None:
        limits = config.limits
        self._config = config
        self.methods = methods
        self.open_methods = frozenset(path for path in methods if METHODS.get(path) is OPEN)
        self.guard = guard
        self.loop = asyncio.get_running_loop()
        self.buffer = memoryview(bytearray(READ_BYTES))
        self.budget = ByteBudget("limits.inflight_bytes_max", limits.budget_bytes)
        self.unsent = UnsentBudget(limits.budget_bytes)
        self.unsent_bytes_max = UNSENT_BYTES_MAX
        self.waiting_answers_max = WAITING_ANSWERS_MAX
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
        self.turns = Turns()
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
                connection.check(self.now_s, STALL_S, SLOW_S)
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
