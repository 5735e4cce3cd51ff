"""gRPC server: port, services, interceptor and message limits.

    server = GrpcServer(config, backend, gate, memory, figures=statistics.tell)
    port = await server.start()
    server.set_serving(False)          # a drain: nothing new comes in, what is open finishes
    await server.stop(grace_s=30)

It runs in the event loop that starts it (grpc.aio; on uvloop an empty echo costs the least of what there is, see
docs/decisions). It serves beside the engine, or in a process of its own behind a RemoteBackend: it cannot tell.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

import grpc
import grpc.aio

from weftline.engine.serving.auth.gate import Gate
from weftline.engine.serving.auth.shared_memory import SharedMemory
from weftline.engine.serving.auth.tls import server_credentials
from weftline.engine.serving.backend import Backend
from weftline.engine.serving.config import ServeConfig, ServeLimits
from weftline.engine.serving.grpc.calls import Context, handlers_of, refuse
from weftline.engine.serving.grpc.control import LogSettings, TraceSettings
from weftline.engine.serving.grpc.guard import GrpcGuard
from weftline.engine.serving.grpc.health import GrpcHealth
from weftline.engine.serving.grpc.infer import Inference
from weftline.engine.serving.grpc.memory import GrpcSharedMemory
from weftline.engine.serving.grpc.models import Figures, GrpcModels
from weftline.engine.serving.grpc.protos import HEALTH_SERVICE, INFERENCE_SERVICE
from weftline.engine.serving.grpc.reflection import METHOD, SERVICES, reflection_handler
from weftline.engine.serving.grpc.serving import DrainSwitch
from weftline.engine.serving.grpc.settings import GrpcSettings
from weftline.engine.serving.grpc.stream import InferStream
from weftline.engine.serving.json_parser import JsonParser
from weftline.engine.serving.statistics import ModelFigures
from weftline.engine.serving.unix_socket import Identity, identity, placed, remove_own
from weftline.errors import ModelError

LAME_S = 1.0
"""How long a door that drains still takes calls in, to refuse them."""

PING_WAITS = 3
"""How many times `keepalive_wait_s` a client may take to answer a ping while its machine acknowledges all it is sent:
an answer waits behind whatever the client is sending over a slow line. (gRPC's own: a minute.)"""

Handlers = Mapping[str, Mapping[str, grpc.RpcMethodHandler]]
"""Handlers by service and method."""


class GrpcServer:
    """The gRPC door of one process.

    memory:  regions that clients registered.
    figures: what ModelStatistics tells; zeros when left out.
    trace, logs: what TraceSetting and LogSettings change.
    version: of Weftline, for ServerMetadata.
    """

    def __init__(
        self,
        config: ServeConfig,
        backend: Backend,
        gate: Gate,
        memory: SharedMemory,
        *,
        figures: Figures | None = None,
        trace: TraceSettings | None = None,
        logs: LogSettings | None = None,
        version: str = "",
    ) -> None:
        self._config = config
        self._gate = gate
        self._serving = DrainSwitch()
        self.trace = trace or TraceSettings()
        self._json = JsonParser()
        self._inference = Inference(backend, config.limits, memory, self.trace, self._json)
        models = GrpcModels(backend, self._serving, figures or _nothing, version, memory.enabled)
        settings = GrpcSettings(self.trace, logs or LogSettings(), models.known)
        answers = models.answers() | settings.answers() | GrpcSharedMemory(memory).answers()
        self.handlers: Handlers = {
            INFERENCE_SERVICE.full_name: handlers_of(INFERENCE_SERVICE, answers) | self._tensor_methods(),
            HEALTH_SERVICE.full_name: GrpcHealth(backend, self._serving).handlers(),
            **({name: {METHOD: reflection_handler()} for name in SERVICES} if config.grpc.reflection else {}),
        }
        self._server: grpc.aio.Server | None = None
        self._socket: Identity | None = None  # what this server has put at the path of its Unix socket

    async def start(self) -> int:
        """Listen, and return the port; 0 for a Unix socket. ModelError when the address cannot be had."""
        served = [f"/{service}/{method}" for service, methods in self.handlers.items() for method in methods]
        self._server = grpc.aio.server(
            interceptors=[GrpcGuard(self._gate, self._serving, served)],
            options=options(self._config),
            maximum_concurrent_rpcs=self._config.limits.calls_max,
        )
        generic = [grpc.method_handlers_generic_handler(name, dict(one)) for name, one in self.handlers.items()]
        self._server.add_generic_rpc_handlers(generic)
        port = self._listen(self._server)
        await self._server.start()
        return port

    def set_serving(self, serving: bool) -> None:
        """Take new calls, or turn them away (UNAVAILABLE, with when to come back) while open ones finish."""
        self._serving.set(serving)

    async def stop(self, grace_s: float) -> None:
        """Turn new calls away, let open ones finish for at most `grace_s`, cancel the rest, and listen no more.

        For LAME_S of it calls are still taken in to be refused in words: gRPC itself cancels those that it has accepted
        and not yet handed over, and a client that was cancelled does not try again.
        """
        self.set_serving(False)
        if self._server is None:
            return
        try:
            await self._stop(self._server, grace_s)
        finally:
            self._json.close()

    async def _stop(self, server: grpc.aio.Server, grace_s: float) -> None:
        lame_s = min(LAME_S, grace_s / 2)
        if lame_s > 0:
            await asyncio.sleep(lame_s)
        await server.stop(grace_s - lame_s)
        if self._config.grpc.socket is not None:
            remove_own(self._config.grpc.socket, self._socket)

    def _listen(self, server: grpc.aio.Server) -> int:
        door = self._config.grpc
        if door.socket is None:
            return self._bind(server, _address(door.host, door.port))
        with placed(door.socket, door.socket_group) as private:
            self._bind(server, f"unix:{private}")
        self._socket = identity(door.socket)
        return 0

    def _bind(self, server: grpc.aio.Server, address: str) -> int:
        door, tls = self._config.grpc, self._config.tls
        try:
            if tls is None:
                return int(server.add_insecure_port(address))
            return int(server.add_secure_port(address, server_credentials(tls)))
        except RuntimeError:
            where, wrong = f"{door.host} port {door.port}", "it is in use, or not an address of this host"
            if door.socket is not None:
                where, wrong = f"the socket {door.socket}", "its path may be too long"
            raise ModelError(f"gRPC cannot listen at {where}: {wrong}") from None

    def _tensor_methods(self) -> dict[str, grpc.RpcMethodHandler]:
        inference, serving, gate = self._inference, self._serving, self._gate

        async def stream(requests: object, context: Context) -> None:
            try:
                await InferStream(inference, serving, gate.charge, context).run()
            except Exception as error:
                await refuse(context, error)

        return {
            "ModelInfer": grpc.unary_unary_rpc_method_handler(inference.unary),
            "ModelStreamInfer": grpc.stream_stream_rpc_method_handler(stream),
        }


def options(config: ServeConfig) -> list[tuple[str, Any]]:
    """Return gRPC's options for a server.

    Messages are measured after decompression, so the limit on them bounds what a small compressed one can become.
    Headers are not remembered from call to call (HPACK's dynamic table): one byte would stand for 4 KB of them, and be
    looked at 16 000 times in a frame. That holds once a client has acknowledged it, so one that does not is cut off.
    A port is shared with other processes only when there are some, else a second server would steal half the calls.
    """
    limits: ServeLimits = config.limits
    keepalive_ms = int(limits.keepalive_s * 1000)
    return [
        ("grpc.max_receive_message_length", limits.message_bytes_max),
        ("grpc.max_send_message_length", limits.message_bytes_max),
        ("grpc.max_concurrent_streams", limits.streams_max),
        ("grpc.max_metadata_size", limits.metadata_bytes_max),  # from the first to the second, gRPC refuses by chance
        ("grpc.absolute_max_metadata_size", limits.metadata_bytes_max),
        ("grpc.so_reuseport", int(config.grpc.processes > 1)),
        ("grpc.keepalive_time_ms", keepalive_ms),
        ("grpc.keepalive_timeout_ms", int(limits.keepalive_wait_s * 1000)),
        ("grpc.http2.ping_timeout_ms", PING_WAITS * int(limits.keepalive_wait_s * 1000)),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_ping_strikes", 4),
        ("grpc.http2.min_ping_interval_without_data_ms", min(keepalive_ms, 10_000)),
        ("grpc.server_handshake_timeout_ms", int(limits.header_s * 1000)),
        ("grpc.http2.hpack_table_size.decoder", 0),
        ("grpc.http2.settings_timeout", int(limits.header_s * 1000)),
    ]


def _address(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host and not host.startswith("[") else f"{host}:{port}"


async def _nothing(models: Mapping[str, int]) -> Sequence[ModelFigures]:
    return [ModelFigures(name, version) for name, version in sorted(models.items())]
