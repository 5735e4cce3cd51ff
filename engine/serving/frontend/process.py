"""Entry point of an ingress process: runs gRPC and HTTP servers over a RemoteBackend.

    python -m weftline.engine.serving.frontend.process SOCKET REQUEST_BUFFER RESPONSE_BUFFER PARENT_PID

The process parses bytes from the network, so it holds nothing of value: no model, no arena, no pipeline, and no way to
gain privileges. It exits with the engine, at the latest when the connection closes. SIGTERM, SIGINT and SIGHUP are
ignored: a service manager sends them to all processes of a service, and the engine decides when to drain.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import sys
from collections.abc import Callable, Mapping
from typing import Protocol

from weftline.engine.serving.auth.gate import Gate
from weftline.engine.serving.auth.shared_memory import SharedMemory
from weftline.engine.serving.auth.tokens import TokenFile
from weftline.engine.serving.frontend import messages as msg
from weftline.engine.serving.frontend.messages import (
    GRPC,
    HTTP,
    IngressSpec,
    decode_spec,
    frame_bytes_max,
    to_wire_error,
)
from weftline.engine.serving.frontend.remote import RemoteBackend
from weftline.engine.serving.frontend.shared_buffer import SharedBuffer, attach_request_buffer
from weftline.engine.serving.frontend.transport import FrontendTransport
from weftline.engine.serving.identity import version
from weftline.engine.serving.lifecycle import loop_factory
from weftline.engine.serving.logs import start_logs
from weftline.engine.serving.malloc import keep_freed_memory
from weftline.engine.worker.hardening import harden
from weftline.errors import WeftlineError
from weftline.shm.arena import HostArena

FROM_ENGINE_BYTES_MAX = (1 << 32) - 1
"""Longest message of the engine, which is trusted: a response that did not fit into its buffer may be long."""

_log = logging.getLogger("weftline.ingress")


class IngressServer(Protocol):
    """Server of an ingress process: GrpcServer or HttpServer."""

    async def start(self) -> int:
        """Listen, and return the port; WeftlineError or OSError if the address is not available."""

    def set_serving(self, serving: bool) -> None:
        """Accept or refuse new calls."""

    async def stop(self, grace_s: float) -> None:
        """Refuse new calls, let open ones finish for at most `grace_s`, and close."""


MakeServers = Callable[[IngressSpec, RemoteBackend], Mapping[str, IngressServer]]
"""Makes the servers of a process by name, not yet started."""


class IngressProcess:
    """Life cycle of this process: start the servers, serve, drain, exit."""

    def __init__(self, make_servers: MakeServers, requests: SharedBuffer, responses: HostArena) -> None:
        self._make_servers = make_servers
        self._requests = requests
        self._responses = responses
        self._backend: RemoteBackend | None = None
        self._transport: FrontendTransport | None = None
        self._spec: asyncio.Future[IngressSpec] = asyncio.get_running_loop().create_future()
        self._drain: asyncio.Future[float] = asyncio.get_running_loop().create_future()
        self._early: list[msg.ToIngress] = []

    async def run(self, sock: socket.socket) -> None:
        """Serve until Drain."""
        self._transport = await FrontendTransport.connect(sock, self._on_message, _exit, FROM_ENGINE_BYTES_MAX)
        spec = await self._spec
        backend = RemoteBackend(self._requests, self._responses, frame_bytes_max(spec.config))
        backend.attach(self._transport)
        self._backend = backend
        for message in self._early:
            backend.on_message(message)
        await backend.wait_catalog()
        try:
            servers = self._make_servers(spec, backend)
            ports = {name: await server.start() for name, server in servers.items()}
        except (WeftlineError, OSError) as error:
            failure = (
                error if isinstance(error, WeftlineError) else WeftlineError(f"a server cannot open: {error.strerror}")
            )
            self._transport.send(msg.encode(msg.StartFailed(to_wire_error(failure))))
            await self._drain  # never set: the engine closes the connection, which ends the process
            return
        self._transport.send(msg.encode(msg.ServersOpened(ports)))
        grace_s = await self._drain
        for server in servers.values():
            server.set_serving(False)
        await asyncio.gather(*(server.stop(grace_s) for server in servers.values()))
        self._transport.send(msg.encode(msg.Drained()))
        await self._transport.wait_writable()
        await asyncio.sleep(0)  # lets the transport flush to the socket

    def _on_message(self, body: bytes) -> None:
        message = msg.decode_to_ingress(body)
        if isinstance(message, msg.Start):
            self._spec.set_result(decode_spec(message.spec))
        elif isinstance(message, msg.Drain):
            if not self._drain.done():
                self._drain.set_result(message.grace_s)
        elif self._backend is not None:
            self._backend.on_message(message)
        else:
            self._early.append(message)


def _exit(reason: str) -> None:
    """Exit at once: clients notice closed connections fastest."""
    os._exit(1)


def make_servers(spec: IngressSpec, backend: RemoteBackend) -> dict[str, IngressServer]:
    """Make the servers of a spec; PipelineError for an invalid file.

    Tokens and certificates are read here, in the process that uses them, and are never sent.
    """
    config = spec.config
    start_logs(config.logs, take_stderr=True)
    tokens = TokenFile(config.tokens) if config.tokens is not None else None
    gate = Gate(tokens, config.limits, rates=backend)
    memory = SharedMemory(config.limits, config.shared_memory)
    servers: dict[str, IngressServer] = {}
    if GRPC in spec.servers:
        from weftline.engine.serving.grpc.server import GrpcServer

        servers[GRPC] = GrpcServer(config, backend, gate, memory, figures=backend.statistics, version=version())
    if HTTP in spec.servers:
        from weftline.engine.serving.http.server import HttpServer

        servers[HTTP] = HttpServer(config, backend, gate, memory, figures=backend.statistics)
    return servers


def main(make: MakeServers, arguments: list[str]) -> None:
    """Run an ingress process; `arguments` as in the module's description."""
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # gRPC's core logs client errors, in its own format, without limit
    keep_freed_memory()
    sock, requests, responses, parent = map(int, arguments)
    harden(parent)
    for one in (signal.SIGTERM, signal.SIGINT):
        signal.signal(one, signal.SIG_IGN)
    buffer = SharedBuffer(attach_request_buffer(requests))
    read_only = HostArena.attach(responses, os.fstat(responses).st_size)

    async def run() -> None:
        await IngressProcess(make, buffer, read_only).run(socket.socket(fileno=sock))

    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        runner.run(run())
    logging.shutdown()  # writes queued lines
    os._exit(0)  # does not wait for threads of libraries


if __name__ == "__main__":
    main(make_servers, sys.argv[1:])
