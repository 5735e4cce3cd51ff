"""`weftline serve` in a process of its own, asked as `benchmarks/overload.py` asks a session."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil

from benchmarks.ingress_servers import serve_files
from weftline.engine.client.async_client import AsyncClient
from weftline.engine.request import RequestOptions
from weftline.pipelines.spec.builder import Builder


class OverloadServer:
    """Asks one model of a server; a client of its own in each event loop, and nothing is sent twice."""

    def __init__(self, url: str, model: str, pid: int) -> None:
        self._url = url
        self._model = model
        self._pid = pid
        self._loop: asyncio.AbstractEventLoop | None = None
        self._client: AsyncClient | None = None

    async def arun(self, options: RequestOptions, /, *, value: str) -> Any:
        loop = asyncio.get_running_loop()
        if self._client is None or self._loop is not loop:
            self._client, self._loop = AsyncClient(self._url, retries=0), loop
        return await self._client.run(self._model, options, value=value)

    def pids(self) -> Mapping[str, int]:
        """Return every process of the server."""
        server = psutil.Process(self._pid)
        return {str(one.pid): one.pid for one in (server, *server.children(recursive=True))}


@contextmanager
def load_on_its_own_core() -> Iterator[None]:
    """Pin this process on the last core, and what it starts meanwhile on the others; no-op with one core.

    Inside the with statement this process has the other cores, which its children inherit; afterwards the last one.
    """
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) == 1:
        yield
        return
    os.sched_setaffinity(0, cores[:-1])
    try:
        yield
    finally:
        os.sched_setaffinity(0, cores[-1:])
        print(f"load pinned on core {cores[-1]}, server on {cores[:-1]}")


@contextmanager
def overload_server(pipeline: Builder, transport: str = "") -> Iterator[OverloadServer]:
    """Serve a pipeline on all cores but that of the load, and yield its address when it is ready.

    transport: grpc.transport of the serve file; '' for the server's default.
    """
    with tempfile.TemporaryDirectory(prefix="weftline-bench-") as folder:
        file = Path(folder) / "overload.yaml"
        file.write_text(pipeline.to_yaml(), "utf-8")
        command = [sys.executable, "-m", "weftline", "serve", *serve_files([str(file)], transport), "--port", "0"]
        with load_on_its_own_core():
            process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        try:
            url = ""
            for line in process.stdout or ():
                if line.startswith("grpc "):
                    url = line.split()[1]
                if line.startswith("model "):
                    break
            else:
                raise SystemExit("the server did not start")
            yield OverloadServer(url, "overload", process.pid)
        finally:
            process.terminate()
            process.wait(30)
