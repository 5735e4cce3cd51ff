"""Table of all methods and routes with the right each requires.

Keys are full names of gRPC methods, and `HTTP <method> <template>`. Tests compare the table with the descriptors of the
gRPC services and the routes of the HTTP server, so that none is missing here.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

OPEN, READ, INFER, MEMORY, METRICS, ADMIN = "open", "read", "infer", "memory", "metrics", "admin"
"""Kinds of rights. OPEN: no token, for probes. READ, INFER: any token; where a model is named, its models only.
MEMORY: register, list and unregister shared memory; INFER with a region needs it too. METRICS: the figures. ADMIN:
loading, unloading, settings. INFER alone counts as a request of a token's rate."""

INFERENCE = "/inference.GRPCInferenceService/"

_GRPC = {
    INFERENCE + "ServerLive": OPEN,
    INFERENCE + "ServerReady": OPEN,
    INFERENCE + "ModelReady": READ,  # its response reveals whether a model exists
    INFERENCE + "ServerMetadata": READ,
    INFERENCE + "ModelMetadata": READ,
    INFERENCE + "ModelConfig": READ,
    INFERENCE + "ModelStatistics": READ,
    INFERENCE + "RepositoryIndex": READ,
    INFERENCE + "ModelInfer": INFER,
    INFERENCE + "ModelStreamInfer": INFER,
    INFERENCE + "RepositoryModelLoad": ADMIN,
    INFERENCE + "RepositoryModelUnload": ADMIN,
    INFERENCE + "TraceSetting": ADMIN,
    INFERENCE + "LogSettings": ADMIN,
    INFERENCE + "SystemSharedMemoryStatus": MEMORY,
    INFERENCE + "SystemSharedMemoryRegister": MEMORY,
    INFERENCE + "SystemSharedMemoryUnregister": MEMORY,
    INFERENCE + "CudaSharedMemoryStatus": MEMORY,
    INFERENCE + "CudaSharedMemoryRegister": MEMORY,
    INFERENCE + "CudaSharedMemoryUnregister": MEMORY,
    "/weftline.Server/Deployments": READ,
    "/grpc.health.v1.Health/Check": OPEN,
    "/grpc.health.v1.Health/Watch": OPEN,
    "/grpc.health.v1.Health/List": READ,
    "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo": READ,
    "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo": READ,
}

_HTTP = {
    "GET /livez": OPEN,
    "GET /readyz": OPEN,
    "GET /healthz": OPEN,
    "GET /health": OPEN,
    "GET /v2/health/live": OPEN,
    "GET /v2/health/ready": OPEN,
    "GET /metrics": METRICS,
    "GET /openapi.json": READ,
    "GET /docs": READ,
    "POST /run/{model}": INFER,
    "GET /v1/models": READ,
    "GET /v1/models/{model:path}": READ,
    "GET /version": READ,
    "GET /deployments": READ,
    "GET /ping": OPEN,
    "POST /ping": OPEN,
    "POST /v1/chat/completions": INFER,
    "POST /v1/responses": INFER,
    "GET /v1/responses/{response}": READ,
    "DELETE /v1/responses/{response}": READ,
    "GET /v1/responses/{response}/input_items": READ,
    "POST /v1/responses/{response}/cancel": READ,
    "POST /v1/completions": INFER,
    "POST /v1/messages": INFER,
    "POST /v1/messages/count_tokens": INFER,
    "POST /v1/embeddings": INFER,
    **dict.fromkeys(("POST /rerank", "POST /v1/rerank", "POST /v2/rerank"), INFER),
    **dict.fromkeys(("POST /score", "POST /v1/score"), INFER),
    "POST /tokenize": INFER,
    "POST /detokenize": INFER,
    "POST /v1/audio/speech": INFER,
    "POST /v1/audio/transcriptions": INFER,
    "POST /v1/audio/translations": INFER,
    "GET /v2": READ,
    "GET /v2/models/stats": READ,
    "POST /v2/repository/index": READ,
    "POST /v2/repository/models/{model}/load": ADMIN,
    "POST /v2/repository/models/{model}/unload": ADMIN,
    "GET /v2/trace/setting": ADMIN,
    "POST /v2/trace/setting": ADMIN,
    "GET /v2/models/{model}/trace/setting": ADMIN,
    "POST /v2/models/{model}/trace/setting": ADMIN,
    "GET /v2/logging": ADMIN,
    "POST /v2/logging": ADMIN,
}

for _model in ("/v2/models/{model}", "/v2/models/{model}/versions/{version}"):
    _HTTP |= {f"GET {_model}{_what}": READ for _what in ("", "/ready", "/config", "/stats")}
    _HTTP |= {f"POST {_model}/{_what}": INFER for _what in ("infer", "generate", "generate_stream")}
for _memory in ("/v2/systemsharedmemory", "/v2/cudasharedmemory"):
    for _what in ("GET %s/status", "GET %s/region/{region}/status", "POST %s/region/{region}/register",
                  "POST %s/region/{region}/unregister", "POST %s/unregister"):  # fmt: skip
        _HTTP[_what % _memory] = MEMORY

METHODS: Mapping[str, str] = MappingProxyType(_GRPC | {f"HTTP {route}": kind for route, kind in _HTTP.items()})
"""The kind of right of every method."""
