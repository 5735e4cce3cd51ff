"""A real gRPC server over real pipelines, for tests: in the event loop of a test, or in a thread beside it.

async with served({"echo": ECHO}) as server:
    stub = ...server.address...

with served_in_thread({"echo": ECHO}, shared_memory=True) as server:
    client = tritonclient.grpc.InferenceServerClient(server.address)
"""

from __future__ import annotations

import asyncio
import os
import tempfile
import threading
from collections.abc import AsyncIterator, Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from weftline.engine.repository import Repository
from weftline.engine.serving.auth.gate import Gate
from weftline.engine.serving.auth.shared_memory import SharedMemory
from weftline.engine.serving.auth.tokens import TokenFile
from weftline.engine.serving.backend import Record
from weftline.engine.serving.config import GrpcConfig, ServeConfig, ServedPipeline, ServeLimits
from weftline.engine.serving.grpc.server import GrpcServer
from weftline.engine.serving.local import LocalBackend
from weftline.engine.serving.statistics import Statistics

TRANSPORT: Any = os.environ.get("WEFTLINE_TEST_TRANSPORT", "nghttp2")
"""Transport of the servers in these tests; `test_grpcio.py` runs them with the other one."""

ECHO = """weftline: 1
name: echo
inputs: {x: "uint8[N]"}
steps:
  same: {node: echo, type: "uint8[N]", inputs: {value: x}}
outputs: {y: same.value}
"""
TEXT = """weftline: 1
name: text
inputs: {text: text}
steps:
  same: {node: echo, inputs: {value: text}}
outputs: {text: same.value}
"""
WORDS = """weftline: 1
name: words
inputs: {text: text}
steps:
  slow: {node: trickle, pieces: 4, delay_ms: 5, inputs: {value: text}}
outputs: {text: slow.value}
"""
ENDLESS = """weftline: 1
name: endless
inputs: {text: text}
steps:
  slow: {node: trickle, pieces: 100000, delay_ms: 10, inputs: {value: text}}
outputs: {text: slow.value}
"""
FAILS = """weftline: 1
name: fails
inputs: {x: text}
steps:
  bad: {node: fail, equals: "bad", inputs: {value: x}}
outputs: {y: bad.value}
"""
REMEMBER = """weftline: 1
name: remember
inputs: {text: text}
steps:
  kept: {node: remember, inputs: {value: text}}
outputs: {text: kept.value}
"""


@dataclass
class Served:
    """A running server. `call` runs a coroutine in its event loop."""

    address: str
    server: GrpcServer
    backend: LocalBackend
    repository: Repository
    memory: SharedMemory
    statistics: Statistics
    records: list[Record] = field(default_factory=list)
    loop: asyncio.AbstractEventLoop | None = None

    def call(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        if self.loop is None:
            raise RuntimeError("only where the server has a thread of its own")
        waiting: Future[Any] = asyncio.run_coroutine_threadsafe(coroutine, self.loop)
        return waiting.result(60)

    def open_requests(self, model: str) -> int:
        return int(self.backend.stats(model)["requests"]["open"])


@asynccontextmanager
async def served(
    pipelines: Mapping[str, str | Path],
    *,
    expose: Mapping[str, Sequence[str]] | None = None,
    lazy: Sequence[str] = (),
    tokens: Path | None = None,
    limits: ServeLimits | None = None,
    grpc: GrpcConfig | None = None,
    shared_memory: bool = False,
    **config: Any,
) -> AsyncIterator[Served]:
    """Serve pipelines, given as YAML or as files by name, on any free port.

    expose: steps that are models too, by pipeline.
    lazy:   pipelines that are not loaded at the start.
    config: further fields of ServeConfig.
    """
    with tempfile.TemporaryDirectory() as folder, Repository() as repository:
        entries = {}
        for name, text in pipelines.items():
            file = text if isinstance(text, Path) else Path(folder) / f"{name}.yaml"
            if isinstance(text, str):
                file.write_text(text)
            entries[name] = ServedPipeline(file, tuple((expose or {}).get(name, ())), name not in lazy)
        limits = limits or ServeLimits()
        grpc = replace(grpc or GrpcConfig(port=0), transport=TRANSPORT)
        full = ServeConfig(entries, grpc, limits=limits, shared_memory=shared_memory, **config)
        statistics, records = Statistics(), list[Record]()
        backend = LocalBackend(repository, entries, observers=[statistics, records.append])
        await backend.open()
        memory = SharedMemory(limits, shared_memory)
        gate = Gate(TokenFile(tokens) if tokens is not None else None, limits)
        server = GrpcServer(full, backend, gate, memory, figures=statistics.tell, version="0.1")
        port = await server.start()
        address = f"unix:{full.grpc.socket}" if full.grpc.socket else f"{full.grpc.host}:{port}"
        try:
            yield Served(address, server, backend, repository, memory, statistics, records)
        finally:
            await server.stop(0)
            memory.unregister_all()


@contextmanager
def served_in_thread(pipelines: Mapping[str, str | Path], **options: Any) -> Iterator[Served]:
    """`served` in an event loop of its own thread, for clients that block."""
    ready: Future[Served] = Future()
    over: list[asyncio.Event] = []

    async def serve() -> None:
        try:
            async with served(pipelines, **options) as one:
                end = asyncio.Event()
                over.append(end)
                one.loop = asyncio.get_running_loop()
                ready.set_result(one)
                await end.wait()
        except BaseException as error:
            if not ready.done():
                ready.set_exception(error)
            raise

    thread = threading.Thread(target=lambda: asyncio.run(serve()), name="served", daemon=True)
    thread.start()
    one = ready.result(90)
    try:
        yield one
    finally:
        assert one.loop is not None
        one.loop.call_soon_threadsafe(over[0].set)
        thread.join(60)
