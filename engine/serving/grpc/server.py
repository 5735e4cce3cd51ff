"""gRPC server: port, services, interceptor and message limits.

    server = GrpcServer(config, backend, gate, memory, figures=statistics.tell)
    port = await server.start()

`lifecycle.py` has the rest of its life. It runs in the event loop that starts it (grpc.aio; docs/decisions compares
transports), in the engine's process or in one of its own behind a RemoteBackend.
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
from weftline.engine.serving.grpc.guard import GrpcGuard
from weftline.engine.serving.grpc.health import GrpcHealth
from weftline.engine.serving.grpc.infer import Inference
from weftline.engine.serving.grpc.memory import GrpcSharedMemory
from weftline.engine.serving.grpc.models import Figures, GrpcModels
from weftline.engine.serving.grpc.protos import HEALTH_SERVICE, INFERENCE_SERVICE
from weftline.engine.serving.grpc.reflection import METHOD, SERVICES, reflection_handler
from weftline.engine.serving.grpc.settings import GrpcSettings
from weftline.engine.serving.grpc.stream import InferStream
from weftline.engine.serving.lifecycle import NetworkServer
from weftline.engine.serving.live_settings import LogSettings, TraceSettings
from weftline.engine.serving.statistics import ModelFigures
from weftline.engine.serving.unix_socket import Identity, identity, placed, remove_own
from weftline.errors import ModelError

LAME_S = 1.0
"""How long a draining server still accepts calls in order to refuse them."""

PING_WAITS = 3
"""How many times `keepalive_wait_s` a client may take to answer a ping while its machine acknowledges all it is sent:
an answer waits behind whatever the client is sending over a slow line. (gRPC's own: a minute.)"""

Handlers = Mapping[str, Mapping[str, grpc.RpcMethodHandler]]
"""Handlers by service and method."""


class GrpcServer(NetworkServer):
    """The gRPC server of one process.

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
        super().__init__()
        self._config = config
        self._gate = gate
        self.trace = trace or TraceSettings()
        self._inference = Inference(backend, config.limits, memory, self.trace, self.json)
        models = GrpcModels(backend, self.serving, figures or _nothing, version, memory.enabled)
        settings = GrpcSettings(self.trace, logs or LogSettings(), models.known)
        answers = models.answers() | settings.answers() | GrpcSharedMemory(memory).answers()
        self.handlers: Handlers = {
            INFERENCE_SERVICE.full_name: handlers_of(INFERENCE_SERVICE, answers) | self._tensor_methods(),
            HEALTH_SERVICE.full_name: GrpcHealth(backend, self.serving).handlers(),
            **({name: {METHOD: reflection_handler()} for name in SERVICES} if config.grpc.reflection else {}),
        }
        self._server: grpc.aio.Server | None = None
        self._socket: Identity | None = None  # what this server has put at the path of its Unix socket

    async def _listen(self) -> int:
        served = [f"/{service}/{method}" for service, methods in self.handlers.items() for method in methods]
        self._server = grpc.aio.server(
            interceptors=[GrpcGuard(self._gate, self.serving, served)],
            options=options(self._config),
            maximum_concurrent_rpcs=self._config.limits.calls_max,
        )
        generic = [grpc.method_handlers_generic_handler(name, dict(one)) for name, one in self.handlers.items()]
        self._server.add_generic_rpc_handlers(generic)
        port = self._bind(self._server)
        await self._server.start()
        return port

    async def _close(self, grace_s: float) -> None:
        """Refuse new calls for LAME_S with a status: gRPC itself cancels calls that it has accepted and not handed over
        yet, and a client does not retry a cancelled call."""
        if self._server is None:
            return
        lame_s = min(LAME_S, grace_s / 2)
        if lame_s > 0:
            await asyncio.sleep(lame_s)
        await self._server.stop(grace_s - lame_s)
        if self._config.grpc.socket is not None:
            remove_own(self._config.grpc.socket, self._socket)

    def _bind(self, server: grpc.aio.Server) -> int:
        config = self._config.grpc
        if config.socket is None:
            return self._bind_address(server, _address(config.host, config.port))
        with placed(config.socket, config.socket_group) as private:
            self._bind_address(server, f"unix:{private}")
        self._socket = identity(config.socket)
        return 0

    def _bind_address(self, server: grpc.aio.Server, address: str) -> int:
        config, tls = self._config.grpc, self._config.tls
        try:
            if tls is None:
                return int(server.add_insecure_port(address))
            return int(server.add_secure_port(address, server_credentials(tls)))
        except RuntimeError:
            where, wrong = f"{config.host} port {config.port}", "it is in use, or not an address of this host"
            if config.socket is not None:
                where, wrong = f"the socket {config.socket}", "its path may be too long"
            raise ModelError(f"gRPC cannot listen at {where}: {wrong}") from None

    def _tensor_methods(self) -> dict[str, grpc.RpcMethodHandler]:
        inference, serving, gate = self._inference, self.serving, self._gate

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
