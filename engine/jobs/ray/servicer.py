"""Registration of the v2 protocol with Ray Serve's gRPC proxy, with messages as raw bytes.

Ray Serve imports `add_to_server` by name in every proxy and puts its own handlers in the place of these. What it keeps
of them is that requests are not parsed: the proxy hands the bytes of a message to a replica, which parses them once.
"""

from __future__ import annotations

from typing import Any

import grpc

from weftline.engine.serving.grpc.protos import HEALTH_SERVICE, INFERENCE_SERVICE

UNARY = (
    "ServerLive",
    "ServerReady",
    "ServerMetadata",
    "ModelReady",
    "ModelMetadata",
    "ModelConfig",
    "ModelStatistics",
    "RepositoryIndex",
    "ModelInfer",
)
"""Methods of the inference service with one answer to one request. What would change a single replica (loading, shared
memory, settings) is not among them."""

STREAM = "ModelStreamInfer"
CHECK = "Check"

IMPORT_PATH = "weftline.engine.jobs.ray.servicer.add_to_server"
"""What Serve's `grpc_servicer_functions` lists."""


def full_name(method: str) -> str:
    """Return a method's name with that of its service, such as '/grpc.health.v1.Health/Check'."""
    service = HEALTH_SERVICE if method == CHECK else INFERENCE_SERVICE
    return f"/{service.full_name}/{method}"


def add_to_server(servicer: object, server: Any) -> None:
    """Register the methods with a proxy's server; `servicer` is Ray Serve's stand-in, and not called."""
    unary = grpc.unary_unary_rpc_method_handler(_replaced)
    stream = grpc.stream_stream_rpc_method_handler(_replaced)
    handlers = dict.fromkeys(UNARY, unary) | {STREAM: stream}
    for service, methods in ((INFERENCE_SERVICE, handlers), (HEALTH_SERVICE, {CHECK: unary})):
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service.full_name, methods),))


def _replaced(*called: object) -> object:
    raise NotImplementedError("Ray Serve's proxy answers this method itself")
