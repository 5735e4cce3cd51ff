"""gRPC server: address, services and limits.

    server = GrpcServer(config, backend, gate, memory, figures=statistics.tell)
    port = await server.start()
    server.set_serving(False)          # drain: new calls are refused, open ones finish
    await server.stop(grace_s=30)

Runs in the event loop that starts it (grpc.aio on uvloop; docs/decisions has the comparison), in the engine's process
with a LocalBackend or in an ingress process with a RemoteBackend.
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
from weftline.engine.serving.grpc.health import GrpcHealth
from weftline.engine.serving.grpc.infer import Inference
from weftline.engine.serving.grpc.memory import GrpcSharedMemory
from weftline.engine.serving.grpc.models import Figures, GrpcModels
from weftline.engine.serving.grpc.protos import HEALTH_SERVICE, INFERENCE_SERVICE, REFLECTION_SERVICE
from weftline.engine.serving.grpc.reflection import METHOD, SERVICES, make_reflection
from weftline.engine.serving.grpc.serving import DrainSwitch
from weftline.engine.serving.grpc.settings import GrpcSettings
from weftline.engine.serving.grpc.transport import (
    GrpcGuard,
    bidirectional_handler,
    infer_handlers,
    server_stream_handler,
    unary_handlers,
)
from weftline.engine.serving.json_parser import JsonParser
from weftline.engine.serving.statistics import ModelFigures
from weftline.engine.serving.unix_socket import Identity, identity, placed, remove_own
from weftline.engine.serving.v2.settings import LogSettings, TraceSettings
from weftline.errors import ModelError

LAME_S = 1.0
"""Time for which a draining server still accepts calls, to refuse them with a status."""

PING_WAITS = 3
"""Ping timeout in multiples of `keepalive_wait_s`, for a client whose machine acknowledges its packets: the ping's
response may be queued behind a large message on a slow connection. (gRPC's default: a minute.)"""

Handlers = Mapping[str, Mapping[str, grpc.RpcMethodHandler]]
"""gRPC handlers by service and method."""


class GrpcServer:
    """The gRPC server of one process.

    memory:  regions that clients registered.
    figures: source of ModelStatistics; default: zeros.
    trace, logs: targets of TraceSetting and LogSettings.
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
        inference = Inference(backend, config.limits, memory, self.trace, self._json)
        models = GrpcModels(backend, self._serving, figures or _zeros, version, memory.enabled)
        settings = GrpcSettings(self.trace, logs or LogSettings(), models.known)
        methods = models.methods() | settings.methods() | GrpcSharedMemory(memory).methods()
        health = GrpcHealth(backend, self._serving)
        self.handlers: Handlers = {
            INFERENCE_SERVICE.full_name: unary_handlers(INFERENCE_SERVICE, methods)
            | infer_handlers(inference, self._serving, gate.charge),
            HEALTH_SERVICE.full_name: unary_handlers(HEALTH_SERVICE, {"Check": health.check})
            | {"Watch": server_stream_handler(health.watch, HEALTH_SERVICE.methods_by_name["Watch"])},
            **(_reflection_handlers() if config.grpc.reflection else {}),
        }
        self._server: grpc.aio.Server | None = None
        self._socket: Identity | None = None  # of the file at the path of the Unix socket, if this server created it

    async def start(self) -> int:
        """Listen, and return the port; 0 for a Unix socket. ModelError if the address is not available."""
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
        """Accept new calls, or refuse them (UNAVAILABLE with a retry delay) while open ones finish."""
        self._serving.set(serving)

    async def stop(self, grace_s: float) -> None:
        """Refuse new calls, wait for open ones at most `grace_s`, and stop listening.

        During the first LAME_S new calls are accepted and refused with a status: gRPC cancels calls that it has
        accepted and not yet dispatched, and clients do not retry cancelled calls.
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
        config = self._config.grpc
        if config.socket is None:
            return self._bind(server, _address(config.host, config.port))
        with placed(config.socket, config.socket_group) as private:
            self._bind(server, f"unix:{private}")
        self._socket = identity(config.socket)
        return 0

    def _bind(self, server: grpc.aio.Server, address: str) -> int:
        config, tls = self._config.grpc, self._config.tls
        try:
            if tls is None:
                return int(server.add_insecure_port(address))
            return int(server.add_secure_port(address, server_credentials(tls)))
        except RuntimeError:
            where, why = f"{config.host} port {config.port}", "it is in use, or not an address of this host"
            if config.socket is not None:
                where, why = f"the socket {config.socket}", "its path may be too long"
            raise ModelError(f"gRPC cannot listen at {where}: {why}") from None


def _reflection_handlers() -> Handlers:
    handler = bidirectional_handler(make_reflection(), REFLECTION_SERVICE.methods_by_name[METHOD])
    return {name: {METHOD: handler} for name in SERVICES}


def options(config: ServeConfig) -> list[tuple[str, Any]]:
    """Return gRPC's channel arguments for a server.

    The message limit applies after decompression. HPACK's dynamic table is disabled: with it, one byte can refer to
    4 KB of headers, 16 000 times in a frame. This holds once a client has acknowledged the setting, so a client that
    does not is disconnected. The port is shared only between ingress processes: a second server would otherwise receive
    half of the calls.
    """
    limits: ServeLimits = config.limits
    keepalive_ms = int(limits.keepalive_s * 1000)
    return [
        ("grpc.max_receive_message_length", limits.message_bytes_max),
        ("grpc.max_send_message_length", limits.message_bytes_max),
        ("grpc.max_concurrent_streams", limits.streams_max),
        ("grpc.max_metadata_size", limits.metadata_bytes_max),  # between these two limits gRPC refuses at random
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


async def _zeros(models: Mapping[str, int]) -> Sequence[ModelFigures]:
    return [ModelFigures(name, version) for name, version in sorted(models.items())]
