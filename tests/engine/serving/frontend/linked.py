"""A RemoteBackend and its FrontendConnection in one event loop: the link without the second process."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from weftline.engine.serving.backend import Backend
from weftline.engine.serving.frontend import messages as msg
from weftline.engine.serving.frontend.clerk import FrontendConnection
from weftline.engine.serving.frontend.desk import FrontendManager
from weftline.engine.serving.frontend.extent import SharedBuffer, grant, let_go, take
from weftline.engine.serving.frontend.remote import RemoteBackend
from weftline.engine.serving.frontend.wire import FrontendTransport
from weftline.engine.serving.statistics import Statistics
from weftline.shm.arena import HostArena

FRAME_BYTES_MAX = 144 << 20


@dataclass
class Linked:
    remote: RemoteBackend
    clerk: FrontendConnection
    wire: FrontendTransport
    shelf: SharedBuffer
    desk: FrontendManager

    @property
    def at_rest(self) -> bool:
        """Whether nothing is open, laid or lent on either side."""
        return not (
            self.remote.open_requests or self.clerk.open_requests or self.shelf.taken_bytes or self.clerk.lent_bytes
        )


@asynccontextmanager
async def linked(
    backend: Backend,
    extent_bytes: int = 64 << 20,
    calls_max: int = 1000,
    frame_bytes_max: int = FRAME_BYTES_MAX,
    statistics: Statistics | None = None,
) -> AsyncIterator[Linked]:
    """Connect a RemoteBackend to a backend of this process."""
    ours, theirs = socket.socketpair()
    granted, answers = grant(extent_bytes), HostArena.create(extent_bytes)
    desk = FrontendManager(backend, statistics=statistics)
    clerk = FrontendConnection(backend, granted, answers, desk._carry_out, calls_max)
    shelf = SharedBuffer(take(os.dup(granted.fd)))
    read_only = HostArena.attach(os.dup(answers.fd), answers.size_bytes)
    await clerk.serve(ours, frame_bytes_max)
    desk._keepers.append(_Kept(clerk))  # type: ignore[arg-type]
    desk._greet(clerk)
    remote = RemoteBackend(shelf, read_only, frame_bytes_max)
    wire = await FrontendTransport.connect(
        theirs, lambda body: remote.hear(msg.decode_to_ingress(body)), lambda why: remote.lose(), FRAME_BYTES_MAX
    )
    remote.speak(wire)
    await remote.wait_told()
    try:
        yield Linked(remote, clerk, wire, shelf, desk)
    finally:
        wire.close()
        await asyncio.wait_for(clerk.wait_closed(), 5)
        let_go(shelf.arena)
        let_go(read_only)


@dataclass
class _Kept:
    """The part of a FrontendSupervisor that a FrontendManager needs to reach its connection."""

    clerk: FrontendConnection


async def settle(linked: Linked, within_s: float = 2.0) -> None:
    """Wait until nothing is open, laid or lent; AssertionError when it takes too long."""
    until = asyncio.get_running_loop().time() + within_s
    while not linked.at_rest:
        assert asyncio.get_running_loop().time() < until, "something of the link is left open"
        await asyncio.sleep(0.005)
