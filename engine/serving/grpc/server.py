"""gRPC server: services, transport and lifecycle.

    server = GrpcServer(config, backend, gate, memory, figures=statistics.tell)
    port = await server.start()

`lifecycle.py` has drain and stop. Runs in the event loop that starts it: in the engine's process with a LocalBackend,
or in an ingress process with a RemoteBackend. The transport is libnghttp2 in this event loop (`http2_transport.py`)
where the library is installed, and grpcio otherwise; both serve the same methods.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from typing import Protocol

from weftline.engine.serving.auth.gate import Gate
from weftline.engine.serving.auth.shared_memory import SharedMemory
from weftline.engine.serving.backend import Backend
from weftline.engine.serving.config import ServeConfig
from weftline.engine.serving.grpc.guard import Guard
from weftline.engine.serving.grpc.health import GrpcHealth
from weftline.engine.serving.grpc.infer import Inference
from weftline.engine.serving.grpc.memory import GrpcSharedMemory
from weftline.engine.serving.grpc.models import Figures, GrpcModels
from weftline.engine.serving.grpc.protos import (
    HEALTH_SERVICE,
    INFERENCE_SERVICE,
    REFLECTION_SERVICE,
    WEFTLINE_SERVICE,
)
from weftline.engine.serving.grpc.reflection import METHOD, SERVICES, make_reflection
from weftline.engine.serving.grpc.service import (
    InferMethod,
    Method,
    StreamCall,
    StreamMethod,
    bidirectional,
    server_stream,
    unary,
)
from weftline.engine.serving.grpc.settings import GrpcSettings
from weftline.engine.serving.grpc.stream import InferStream
from weftline.engine.serving.lifecycle import NetworkServer
from weftline.engine.serving.statistics import ModelFigures
from weftline.engine.serving.unix_socket import Identity, identity, remove_own
from weftline.engine.serving.v2.settings import LogSettings, TraceSettings
from weftline.errors import ModelError

LAME_S = 1.0
"""Time for which a draining server still accepts calls, to refuse them with a status."""

NGHTTP2, GRPCIO = "nghttp2", "grpcio"

_log = logging.getLogger("weftline.ingress")


class Transport(Protocol):
    """Accepts gRPC calls and runs methods."""

    name: str

    async def listen(self) -> int:
        """Listen and return the port, 0 for a Unix socket; ModelError if the address is not available."""

    async def close(self, grace_s: float) -> None:
        """Close the sockets, let open calls finish for `grace_s` seconds, and cancel the rest."""


class GrpcServer(NetworkServer):
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
        super().__init__()
        self._config = config
        self.trace = trace or TraceSettings()
        inference = Inference(backend, config.limits, memory, self.trace, self.json, gate.charge)
        batch_max = config.limits.batch_max
        models = GrpcModels(backend, self.serving, figures or _zeros, version, memory.enabled, batch_max, config.strict)
        settings = GrpcSettings(self.trace, logs or LogSettings(), models.known)
        functions = models.methods() | settings.methods() | GrpcSharedMemory(memory).methods()
        health = GrpcHealth(backend, self.serving, config.strict)

        async def stream(call: StreamCall) -> None:
            await InferStream(inference, self.serving, call).run()

        v2, check = INFERENCE_SERVICE.full_name, HEALTH_SERVICE.full_name
        self.methods: dict[str, Method] = {
            f"/{v2}/{name}": unary(function, INFERENCE_SERVICE.methods_by_name[name])
            for name, function in functions.items()
        }
        self.methods |= {
            f"/{v2}/ModelInfer": InferMethod(inference),
            f"/{v2}/ModelStreamInfer": StreamMethod(stream),
            f"/{WEFTLINE_SERVICE.full_name}/Deployments": unary(
                models.deployments, WEFTLINE_SERVICE.methods_by_name["Deployments"]
            ),
            f"/{check}/Check": unary(health.check, HEALTH_SERVICE.methods_by_name["Check"]),
            f"/{check}/Watch": server_stream(health.watch, HEALTH_SERVICE.methods_by_name["Watch"]),
        }
        if config.grpc.reflection:
            reflection = bidirectional(make_reflection(), REFLECTION_SERVICE.methods_by_name[METHOD])
            self.methods |= {f"/{name}/{METHOD}": reflection for name in SERVICES}
        self._guard = Guard(gate, self.serving, self.methods)
        self._transport: Transport | None = None
        self._socket: Identity | None = None  # of the file at the path of the Unix socket, if this server created it

    @property
    def transport(self) -> str:
        """Name of the transport in use; '' before `start`."""
        return self._transport.name if self._transport is not None else ""

    async def _listen(self) -> int:
        self._transport = make_transport(self._config, self.methods, self._guard)
        port = await self._transport.listen()
        if self._config.grpc.socket is not None:
            self._socket = identity(self._config.grpc.socket)
        return port

    async def _close(self, grace_s: float) -> None:
        """Refuse new calls for LAME_S with a status, then stop.

        A connection that is refused has no status, and grpcio cancels calls that it has not dispatched yet.
        """
        if self._transport is None:
            return
        lame_s = min(LAME_S, grace_s / 2)
        if lame_s > 0:
            await asyncio.sleep(lame_s)
        await self._transport.close(grace_s - lame_s)
        if self._config.grpc.socket is not None:
            remove_own(self._config.grpc.socket, self._socket)


def make_transport(config: ServeConfig, methods: Mapping[str, Method], guard: Guard) -> Transport:
    """Return the configured transport; ModelError if it cannot be used here."""
    chosen = config.grpc.transport
    if chosen != GRPCIO:
        try:
            from weftline.engine.serving.grpc.http2_transport import Http2Transport

            transport = Http2Transport(config, methods, guard)
            _log.info("gRPC is served by libnghttp2")
            return transport
        except ImportError as error:
            if chosen == NGHTTP2:
                raise ModelError(f"grpc.transport is nghttp2: {error}\n    fix: {INSTALL}") from None
            _log.info("gRPC is served by grpcio, which is slower on small messages: %s; %s", error, INSTALL)
    from weftline.engine.serving.grpc.grpcio_transport import GrpcioTransport

    return GrpcioTransport(config, methods, guard)


INSTALL = "install libnghttp2 (Debian, Ubuntu: apt install libnghttp2-14; Fedora: dnf install libnghttp2)"


async def _zeros(models: Mapping[str, int]) -> Sequence[ModelFigures]:
    return [ModelFigures(name, version) for name, version in sorted(models.items())]
