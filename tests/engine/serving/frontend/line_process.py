"""An ingress process for tests, with one server: a line of JSON is a request, answers are lines of JSON.

{"ask": "text", "x": "a"}            {"y": "a"}
{"ask": "array", "items": 1000}      {"sum": ...}
{"stream": "flood", "x": "a"}        {"piece": 8192} ... {"end": true}
{"index": 1}, {"do": "exit"}, {"do": "hang"}, {"do": "babble"}, {"do": "raw", "hex": ...}, {"do": "who"}
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import json
import os
import sys
import time
from typing import Any

import numpy as np

from weftline.engine.serving.backend import Ask
from weftline.engine.serving.frontend.messages import IngressSpec
from weftline.engine.serving.frontend.process import IngressServer, main
from weftline.engine.serving.frontend.remote import RemoteBackend
from weftline.errors import ModelError, WeftlineError

PR_GET_DUMPABLE, PR_GET_NO_NEW_PRIVS = 3, 39


class LineServer:
    def __init__(self, backend: RemoteBackend, port: int) -> None:
        self._backend = backend
        self._port = port
        self._server: asyncio.Server | None = None
        self._open = 0
        self._serving = True

    async def start(self) -> int:
        try:
            self._server = await asyncio.start_server(self._serve, "127.0.0.1", self._port)
        except OSError:
            raise ModelError(f"port {self._port} is in use") from None
        port: int = self._server.sockets[0].getsockname()[1]
        return port

    def set_serving(self, serving: bool) -> None:
        self._serving = serving

    async def stop(self, grace_s: float) -> None:
        if self._server is not None:
            self._server.close()
        until = time.monotonic() + grace_s
        while self._open and time.monotonic() < until:
            await asyncio.sleep(0.005)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            while line := await reader.readline():
                self._open += 1
                try:
                    await self._do(json.loads(line), writer)
                except WeftlineError as error:
                    _write(writer, {"error": type(error).__name__, "message": str(error)})
                finally:
                    self._open -= 1
                await writer.drain()
            writer.close()

    async def _do(self, fields: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        if "ask" in fields:
            value = np.arange(fields["items"], dtype=np.float32) if "items" in fields else fields["x"]
            with await self._backend.ask(Ask(fields["ask"], {"x": value})) as answer:
                await answer.load()
                found = answer.outputs["y"]
                _write(writer, {"sum": float(found.sum())} if isinstance(found, np.ndarray) else {"y": found})
        elif "stream" in fields:
            async for piece in self._backend.stream(Ask(fields["stream"], {"x": fields["x"]})):
                _write(writer, {"piece": len(piece.value)})
                await writer.drain()
            _write(writer, {"end": True})
        elif "index" in fields:
            _write(writer, {state.name: state.ready for state in self._backend.index()})
        elif fields["do"] == "exit":
            os._exit(7)
        elif fields["do"] == "hang":
            time.sleep(1000)
        elif fields["do"] == "babble":
            self._backend._send_bytes(b"\xc1 this is no message")
        elif fields["do"] == "raw":
            self._backend._send_bytes(bytes.fromhex(fields["hex"]))
        elif fields["do"] == "who":
            libc = ctypes.CDLL(None)
            _write(
                writer,
                {
                    "dumpable": libc.prctl(PR_GET_DUMPABLE, 0, 0, 0, 0),
                    "no_new_privs": libc.prctl(PR_GET_NO_NEW_PRIVS, 0, 0, 0, 0),
                    "environment": sorted(os.environ),
                    "modules": sorted({name.partition(".")[0] for name in sys.modules}),
                },
            )


def _write(writer: asyncio.StreamWriter, fields: dict[str, Any]) -> None:
    writer.write(json.dumps(fields).encode() + b"\n")


def make_line_servers(spec: IngressSpec, backend: RemoteBackend) -> dict[str, IngressServer]:
    return {"grpc": LineServer(backend, spec.config.grpc.port)}  # under this name, a restart finds its port again


if __name__ == "__main__":
    main(make_line_servers, sys.argv[1:])
