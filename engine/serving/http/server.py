"""HTTP server: uvicorn on a given socket and event loop.

    server = HttpServer(config, backend, gate)
    port = await server.start()

`lifecycle.py` has the rest of its life. It installs no signal handlers and starts no processes.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Iterator

import uvicorn

from weftline.engine.serving.auth.gate import Gate
from weftline.engine.serving.auth.shared_memory import SharedMemory
from weftline.engine.serving.auth.tls import ssl_context
from weftline.engine.serving.backend import Backend
from weftline.engine.serving.config import HttpConfig, ServeConfig, ServeLimits
from weftline.engine.serving.http.connection import limited, watch
from weftline.engine.serving.http.context import Figures, HttpContext
from weftline.engine.serving.http.routes import application
from weftline.engine.serving.lifecycle import NetworkServer
from weftline.engine.serving.statistics import Statistics
from weftline.engine.serving.tls_listener import TlsListener
from weftline.engine.serving.v2.settings import LogSettings, TraceSettings

KEEP_ALIVE_S = 75
"""Idle time of a connection between two requests; longer than in the pools of usual clients and proxies."""

BACKLOG = 2048

FAREWELL_S = 0.5
"""Time for a client to read that its request was cancelled."""


class HttpServer(NetworkServer):
    """The HTTP server of one process.

    shared_memory: registered regions of this process; None: there are none.
    figures:       source of v2's statistics, such as `Statistics.tell`; default: zeros.
    trace, logs:   settings that v2 clients may change; default: own ones.
    sock:          a bound socket instead of `config.http`'s address.
    """

    def __init__(
        self,
        config: ServeConfig,
        backend: Backend,
        gate: Gate,
        shared_memory: SharedMemory | None = None,
        *,
        figures: Figures | None = None,
        trace: TraceSettings | None = None,
        logs: LogSettings | None = None,
        sock: socket.socket | None = None,
    ) -> None:
        super().__init__()
        self._at = config.http or HttpConfig()
        self._tls = config.tls
        self._limits = config.limits
        self._sock = sock
        self.context = HttpContext(
            backend,
            config.limits,
            self.serving,
            self.json,
            shared_memory=shared_memory or SharedMemory(config.limits, False),
            figures=figures or Statistics().tell,
            trace=trace or TraceSettings(),
            logs=logs or LogSettings(),
            strict=config.strict,
            aliases=self._at.aliases,
        )
        self.app = application(self.context, gate, self._at.host, self._at.origins)
        self.port = 0
        self._server: _Server | None = None
        self._running: asyncio.Task[None] | None = None

    async def _listen(self) -> int:
        sock = self._sock or _bound(self._at.host, self._at.port)
        watch(sock, self._limits)
        config = uvicorn.Config(
            self.app,
            http=limited(self._limits),
            ws="none",
            lifespan="off",
            log_config=None,
            log_level="error",
            access_log=False,
            proxy_headers=False,
            server_header=False,
            timeout_keep_alive=KEEP_ALIVE_S,
            backlog=BACKLOG,
        )
        config.load()
        if self._tls is not None:
            config.ssl = ssl_context(self._tls)
        self._server = _Server(config, self._limits)
        self.port = sock.getsockname()[1]
        self._running = asyncio.create_task(self._server.serve([sock]), name="http server")
        while not self._server.started:
            if self._running.done():
                self._running.result()
                raise OSError("the HTTP server did not start")
            await asyncio.sleep(0.005)
        return self.port

    async def _close(self, grace_s: float) -> None:
        if self._server is None or self._running is None:
            return
        self._server.grace_s = grace_s
        self._server.should_exit = True
        await asyncio.shield(self._running)


class _Server(uvicorn.Server):
    """uvicorn without signal handlers, with a bounded shutdown and a limit on TLS handshakes.

    grace_s: longest time for open requests on shutdown; then each fails with 503.
    """

    def __init__(self, config: uvicorn.Config, limits: ServeLimits) -> None:
        super().__init__(config)
        self.grace_s = 0.0
        self._limits = limits

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        context = self.config.ssl
        if context is None:
            await super().startup(sockets)
            return
        await self.lifespan.startup()
        self.servers = []
        for one in sockets or []:
            one.setblocking(False)
            one.listen(BACKLOG)
            listener = TlsListener(one, context, self._limits.header_s, self._limits.connections_max, self._protocol)
            self.servers.append(listener)  # type: ignore[arg-type]  # `close` is all that is called
        self.started = True

    def _protocol(self) -> asyncio.Protocol:
        protocol: asyncio.Protocol = self.config.http_protocol_class(  # type: ignore[call-arg]
            config=self.config, server_state=self.server_state, app_state=self.lifespan.state
        )
        return protocol

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        for server in self.servers:
            server.close()
        for sock in sockets or []:
            sock.close()
        for connection in list(self.server_state.connections):
            connection.shutdown()  # at once, or after the request that is open on it
        await self._wait_ended(self.grace_s)
        for task in self.server_state.tasks:
            task.cancel()
        await self._wait_ended(FAREWELL_S)
        for connection in list(self.server_state.connections):
            connection.transport.abort()
        await self._wait_ended(FAREWELL_S)

    async def _wait_ended(self, timeout_s: float) -> None:
        tasks = set(self.server_state.tasks)
        if tasks:
            await asyncio.wait(tasks, timeout=timeout_s)


def _bound(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # asyncio disables Nagle's algorithm only if the protocol is given; a header and its body are two writes
    sock = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((host, port))
    except BaseException:
        sock.close()
        raise
    return sock
