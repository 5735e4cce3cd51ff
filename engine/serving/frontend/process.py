"""Entry point of an ingress process.

    python -m weftline.engine.serving.frontend.process SOCKET GRANTED ANSWERS PARENT

It parses what strangers send, so it has nothing worth taking: no model, no arena, no pipeline; it may not gain
privileges. It ends when the engine does, at the latest with the connection. Signals to end are for the engine, which
tells it what to do: a service manager sends them to every process of the service.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys
from collections.abc import Callable, Mapping
from typing import Protocol

from weftline.engine.serving.frontend import messages as msg
from weftline.engine.serving.frontend.doors import served_doors
from weftline.engine.serving.frontend.extent import SharedBuffer, take
from weftline.engine.serving.frontend.remote import RemoteBackend
from weftline.engine.serving.frontend.spec import IngressSpec, decode_spec, frame_bytes_max
from weftline.engine.serving.frontend.trouble import trouble_of
from weftline.engine.serving.frontend.wire import FrontendTransport
from weftline.engine.worker.hardening import harden
from weftline.errors import WeftlineError
from weftline.shm.arena import HostArena

FROM_ENGINE_BYTES_MAX = (1 << 32) - 1
"""Longest message of the engine's: the engine is trusted, and an answer that found no room may be long."""

_log = logging.getLogger("weftline.ingress")


class IngressServer(Protocol):
    """What takes requests from clients; GrpcServer and HttpServer are such."""

    async def start(self) -> int:
        """Listen, and return the port; WeftlineError or OSError when the address cannot be had."""

    def set_serving(self, serving: bool) -> None:
        """Say whether new work is taken."""

    async def stop(self, grace_s: float) -> None:
        """Take nothing new, let what is open finish for at most `grace_s`, and close."""


Doors = Callable[[IngressSpec, RemoteBackend], Mapping[str, IngressServer]]
"""Makes the doors of a process by name; they are started afterwards."""


class IngressProcess:
    """The life of this process: told what to open, it opens it, serves, drains and ends."""

    def __init__(self, doors_of: Doors, shelf: SharedBuffer, answers: HostArena) -> None:
        self._doors_of = doors_of
        self._shelf = shelf
        self._answers = answers
        self._backend: RemoteBackend | None = None
        self._wire: FrontendTransport | None = None
        self._begun: asyncio.Future[IngressSpec] = asyncio.get_running_loop().create_future()
        self._drain: asyncio.Future[float] = asyncio.get_running_loop().create_future()
        self._early: list[msg.ToIngress] = []

    async def run(self, sock: socket.socket) -> None:
        """Serve until the engine says Drain, or is gone."""
        self._wire = await FrontendTransport.connect(sock, self._hear, self._lose, FROM_ENGINE_BYTES_MAX)
        spec = await self._begun
        backend = RemoteBackend(self._shelf, self._answers, frame_bytes_max(spec.config))
        backend.speak(self._wire)
        self._backend = backend
        for message in self._early:
            backend.hear(message)
        await backend.wait_told()
        try:
            doors = self._doors_of(spec, backend)
            ports = {name: await door.start() for name, door in doors.items()}
        except (WeftlineError, OSError) as error:
            told = error if isinstance(error, WeftlineError) else WeftlineError(f"a door cannot open: {error.strerror}")
            self._wire.send(msg.encode(msg.NotOpened(trouble_of(told))))
            await self._drain  # which does not come: the engine closes the connection, and with it everything
            return
        self._wire.send(msg.encode(msg.ServersOpened(ports)))
        grace_s = await self._drain
        for door in doors.values():
            door.set_serving(False)
        await asyncio.gather(*(door.stop(grace_s) for door in doors.values()))
        self._wire.send(msg.encode(msg.Drained()))
        await self._wire.wait_writable()
        await asyncio.sleep(0)  # what was written is with the socket by now

    def _hear(self, body: bytes) -> None:
        message = msg.decode_to_ingress(body)
        if isinstance(message, msg.Begin):
            self._begun.set_result(decode_spec(message.spec))
        elif isinstance(message, msg.Drain):
            if not self._drain.done():
                self._drain.set_result(message.grace_s)
        elif self._backend is not None:
            self._backend.hear(message)
        else:
            self._early.append(message)

    def _lose(self, why: str) -> None:
        """The engine is gone. Nothing can be answered any more, and clients learn it soonest by closed connections."""
        os._exit(1)


def main(doors_of: Doors, arguments: list[str]) -> None:
    """Run an ingress process with these doors; `arguments` as in the description above."""
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # its core logs for strangers, in lines of its own, without limit
    sock, granted, answers, parent = map(int, arguments)
    harden(parent)
    for one in (signal.SIGTERM, signal.SIGINT):
        signal.signal(one, signal.SIG_IGN)
    shelf = SharedBuffer(take(granted))
    read_only = HostArena.attach(answers, os.fstat(answers).st_size)

    async def run() -> None:
        await IngressProcess(doors_of, shelf, read_only).run(socket.socket(fileno=sock))

    with asyncio.Runner(loop_factory=_loop_factory()) as runner:
        runner.run(run())
    os._exit(0)  # threads of libraries have nothing left to say


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    with contextlib.suppress(ImportError):
        import uvloop

        factory: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop
        return factory
    return None


if __name__ == "__main__":
    main(served_doors, sys.argv[1:])
