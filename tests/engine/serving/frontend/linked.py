"""A RemoteBackend and its FrontendConnection in one event loop: the connection without the second process."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from weftline.engine.serving.auth.rates import TokenRates
from weftline.engine.serving.backend import Backend
from weftline.engine.serving.frontend import messages as msg
from weftline.engine.serving.frontend.connection import FrontendConnection
from weftline.engine.serving.frontend.remote import RemoteBackend
from weftline.engine.serving.frontend.shared_buffer import (
    SharedBuffer,
    attach_request_buffer,
    create_request_buffer,
    detach,
)
from weftline.engine.serving.frontend.supervisor import FrontendManager
from weftline.engine.serving.frontend.transport import FrontendTransport
from weftline.engine.serving.statistics import Statistics
from weftline.shm.arena import HostArena

FRAME_BYTES_MAX = 144 << 20


@dataclass
class Linked:
    remote: RemoteBackend
    connection: FrontendConnection
    transport: FrontendTransport
    buffer: SharedBuffer
    manager: FrontendManager

    @property
    def at_rest(self) -> bool:
        """True if no request, block or response is open on either side."""
        return not (
            self.remote.open_requests
            or self.connection.open_requests
            or self.buffer.taken_bytes
            or self.connection.lent_bytes
        )


@asynccontextmanager
async def linked(
    backend: Backend,
    buffer_bytes: int = 64 << 20,
    calls_max: int = 1000,
    frame_bytes_max: int = FRAME_BYTES_MAX,
    statistics: Statistics | None = None,
    rates: TokenRates | None = None,
) -> AsyncIterator[Linked]:
    """Connect a RemoteBackend to a backend of this process."""
    ours, theirs = socket.socketpair()
    granted, answers = create_request_buffer(buffer_bytes), HostArena.create(buffer_bytes)
    manager = FrontendManager(backend, statistics=statistics)
    connection = FrontendConnection(backend, granted, answers, manager._run_command, calls_max, rates)
    buffer = SharedBuffer(attach_request_buffer(os.dup(granted.fd)))
    read_only = HostArena.attach(os.dup(answers.fd), answers.size_bytes)
    await connection.serve(ours, frame_bytes_max)
    manager._supervisors.append(_Connected(connection))  # type: ignore[arg-type]
    manager._send_current(connection)
    remote = RemoteBackend(buffer, read_only, frame_bytes_max)
    transport = await FrontendTransport.connect(
        theirs,
        lambda body: remote.on_message(msg.decode_to_ingress(body)),
        lambda why: remote.on_close(),
        FRAME_BYTES_MAX,
    )
    remote.attach(transport)
    await remote.wait_catalog()
    try:
        yield Linked(remote, connection, transport, buffer, manager)
    finally:
        transport.close()
        await asyncio.wait_for(connection.wait_closed(), 5)
        detach(buffer.arena)
        detach(read_only)


@dataclass
class _Connected:
    """Stub of a FrontendSupervisor with a connection."""

    connection: FrontendConnection


async def settle(linked: Linked, within_s: float = 2.0) -> None:
    """Wait until `at_rest`; AssertionError on timeout."""
    until = asyncio.get_running_loop().time() + within_s
    while not linked.at_rest:
        assert asyncio.get_running_loop().time() < until, "something of the connection is left open"
        await asyncio.sleep(0.005)
