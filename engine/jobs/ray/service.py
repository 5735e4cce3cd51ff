"""Ray Serve deployment class: an engine with the gRPC handlers of `weftline serve`.

    client --gRPC--> Ray Serve's proxy --bytes--> PipelineReplica --> Guard --> GrpcServer.handlers --> sessions

The gRPC server is built as usual but does not listen; its handlers are called with the messages of the proxy. Tokens
are checked in every replica; their rates have one account (`rates.py`).
"""

from __future__ import annotations

import asyncio
from collections import namedtuple
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing, suppress
from pathlib import Path
from typing import Any

import grpc
import msgspec

from weftline.engine.jobs.ray.grpc_adapter import CHECK, STREAM, UNARY, Aborted, Message, RayCallContext, full_name
from weftline.engine.jobs.ray.rates import RemoteRates
from weftline.engine.repository import Repository
from weftline.engine.serving.auth.gate import Gate
from weftline.engine.serving.auth.shared_memory import SharedMemory
from weftline.engine.serving.auth.tokens import TokenFile
from weftline.engine.serving.backend import Observer
from weftline.engine.serving.config import ServeConfig
from weftline.engine.serving.grpc.grpcio_transport import GrpcGuard, handler, refuse
from weftline.engine.serving.grpc.guard import Guard
from weftline.engine.serving.grpc.server import GrpcServer
from weftline.engine.serving.identity import version
from weftline.engine.serving.lifecycle import DrainSwitch
from weftline.engine.serving.local import LocalBackend
from weftline.engine.serving.logs import RequestLog, start_logs
from weftline.engine.serving.statistics import Statistics
from weftline.engine.serving.v2.metadata import server_ready
from weftline.errors import LimitReached, ModelError, WeftlineError

Details = namedtuple("Details", ("method", "invocation_metadata"))
"""As grpc.HandlerCallDetails, which cannot be made."""


class PipelineReplica:
    """Serves the pipelines of a configuration. Its methods are those of the v2 protocol, called by Ray Serve.

    config: a ServeConfig as JSON (`config_text`).
    rates:  Ray Serve's handle of a RateReplica; None: there are no tokens.
    """

    async def __init__(self, config: str, rates: Any = None) -> None:  # type: ignore[misc]  # Ray Serve awaits it
        self._config = config_of(config)
        start_logs(self._config.logs)
        tokens = TokenFile(self._config.tokens) if self._config.tokens is not None else None
        self._repository = Repository()
        self._statistics = Statistics()
        observers: list[Observer] = [self._statistics, RequestLog(self._config.logs)]
        self._backend = LocalBackend(self._repository, self._config.pipelines, observers=observers, strict=True)
        gate = Gate(tokens, self._config.limits, rates=RemoteRates(rates) if rates is not None else None)
        memory = SharedMemory(self._config.limits, False)
        server = GrpcServer(
            self._config, self._backend, gate, memory, figures=self._statistics.tell, version=version()
        )  # fmt: skip
        methods = (*UNARY, STREAM, CHECK)
        self._guard = GrpcGuard(Guard(gate, DrainSwitch(), [full_name(name) for name in methods]))
        self._handlers = {name: handler(server.methods[full_name(name)]) for name in methods}
        try:
            await self._backend.open()
        except BaseException as error:
            self._repository.close()
            if isinstance(error, WeftlineError):  # as it is, it would not travel
                raise ModelError(f"{error}") from None
            raise

    async def check_health(self) -> None:
        """Raise when the engine has given up on a model: Ray Serve then puts another replica in its place."""
        if not server_ready(self._backend.index(), strict=True):
            raise RuntimeError("a model of this replica is not ready, and will not be")

    def __del__(self) -> None:
        self._repository.close()

    async def answer(self, method: str, data: bytes, context: Any) -> Message:
        """Answer a method with one request; what is wrong becomes the status of the call."""
        call = RayCallContext(context)
        try:
            found = await self._handler(method, call)
            if len(data) > self._config.limits.message_bytes_max:
                most = self._config.limits.message_bytes_max
                await refuse(call, LimitReached(f"the message has {len(data)} bytes; the most is {most}"))
            if found.unary_unary is not None:
                return Message(await found.unary_unary(data, call))
            await found.stream_stream(None, call)  # the guard's, which refuses
        except Aborted:
            pass
        return Message(b"")

    async def answers(self, method: str, requests: AsyncIterator[bytes], context: Any) -> AsyncGenerator[Message, None]:
        """Answer a method with streams in both directions; leaving it early withdraws its requests."""
        call = RayCallContext(context, aiter(requests))
        running = asyncio.ensure_future(self._stream(method, call))
        try:
            async for message in call.written():
                yield Message(message)
            await running
        finally:
            running.cancel()
            with suppress(asyncio.CancelledError, Exception):
                await running

    async def _stream(self, method: str, call: RayCallContext) -> None:
        try:
            found = await self._handler(method, call)
            await found.stream_stream(None, call)
        except Aborted:
            pass
        finally:
            call.end()

    async def _handler(self, method: str, call: RayCallContext) -> Any:
        """Return what answers a call, or what refuses it."""
        details = Details(full_name(method), call.invocation_metadata())

        async def found(_: grpc.HandlerCallDetails) -> Any:
            return self._handlers[method]

        return await self._guard.intercept_service(found, details)


def _unary(name: str) -> Callable[..., Any]:
    async def method(self: PipelineReplica, request: bytes, grpc_context: Any) -> Message:
        return await self.answer(name, request, grpc_context)

    method.__name__ = name
    return method


def _streaming(name: str) -> Callable[..., Any]:
    async def method(
        self: PipelineReplica, requests: AsyncIterator[bytes], grpc_context: Any
    ) -> AsyncIterator[Message]:
        async with aclosing(self.answers(name, requests, grpc_context)) as messages:
            async for message in messages:
                yield message

    method.__name__ = name
    return method


for _name in (*UNARY, CHECK):
    setattr(PipelineReplica, _name, _unary(_name))
setattr(PipelineReplica, STREAM, _streaming(STREAM))


def config_text(config: ServeConfig) -> str:
    """Return a configuration as text that travels to replicas; paths as they are."""
    return msgspec.json.encode(config, enc_hook=str).decode()


def config_of(text: str) -> ServeConfig:
    """Return the configuration that `config_text` wrote."""
    return msgspec.json.decode(text, type=ServeConfig, dec_hook=_path)


def _path(wanted: type, value: Any) -> Any:
    if wanted is Path:
        return Path(value)
    raise NotImplementedError(f"{wanted} is not known here")
