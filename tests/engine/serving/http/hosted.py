"""An HTTP server in a thread with a loop of its own, for stock clients that block."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

from weftline.engine.repository import Repository
from weftline.engine.serving.auth.gate import Gate
from weftline.engine.serving.auth.shared_memory import SharedMemory
from weftline.engine.serving.backend import Backend
from weftline.engine.serving.config import HttpConfig, ServeConfig, ServedPipeline
from weftline.engine.serving.http.server import HttpServer
from weftline.engine.serving.local import LocalBackend

T = TypeVar("T")


class Hosted:
    """port: where it listens. call: run something in its loop."""

    def __init__(self, server: HttpServer, loop: asyncio.AbstractEventLoop, port: int) -> None:
        self.server = server
        self.loop = loop
        self.port = port
        self.url = f"http://127.0.0.1:{port}"

    def call(self, work: Awaitable[T], timeout_s: float = 30) -> T:
        async def run() -> T:
            return await work

        return asyncio.run_coroutine_threadsafe(run(), self.loop).result(timeout_s)


@contextmanager
def looping() -> Iterator[asyncio.AbstractEventLoop]:
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        yield loop
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join(10)
        loop.close()


@contextmanager
def hosted(
    backend: Backend | Callable[[], Awaitable[Backend]],
    gate: Gate | None = None,
    shared_memory: bool = False,
    figures: Any = None,
    aliases: Mapping[str, str] | None = None,
    **config: Any,
) -> Iterator[Hosted]:
    """Open a server on a free port; closed at the end without grace."""
    with looping() as loop:

        async def start() -> Hosted:
            served = await backend() if callable(backend) else backend
            full = ServeConfig({}, **{"http": HttpConfig(port=0, aliases=dict(aliases or {})), **config})
            memory = SharedMemory(full.limits, shared_memory)
            server = HttpServer(full, served, gate or Gate(None, full.limits), memory, figures=figures)
            return Hosted(server, asyncio.get_running_loop(), await server.start())

        found = asyncio.run_coroutine_threadsafe(start(), loop).result(200)
        try:
            yield found
        finally:
            found.call(found.server.stop(0.0))


@contextmanager
def hosted_pipelines(served: Mapping[str, ServedPipeline]) -> Iterator[Hosted]:
    """Open a server with real pipelines, by name."""
    with Repository() as repository:

        async def open_backend() -> LocalBackend:
            backend = LocalBackend(repository, served)
            await backend.open()
            return backend

        with hosted(open_backend) as endpoint:
            yield endpoint
