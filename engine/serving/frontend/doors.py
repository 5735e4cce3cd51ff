"""Servers of an ingress process, over a `RemoteBackend`.

What doors of one process share (the gate, registered memory, settings) is made once. Tokens and certificates are read
here, in the process that needs them, and never travel.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from weftline.engine.serving.auth.gate import Gate
from weftline.engine.serving.auth.logs import start_logs
from weftline.engine.serving.auth.shared_memory import SharedMemory
from weftline.engine.serving.auth.tokens import TokenFile
from weftline.engine.serving.frontend.remote import RemoteBackend
from weftline.engine.serving.frontend.spec import GRPC, HTTP, IngressSpec
from weftline.engine.serving.identity import version

if TYPE_CHECKING:
    from weftline.engine.serving.frontend.process import IngressServer


def served_doors(spec: IngressSpec, backend: RemoteBackend) -> dict[str, IngressServer]:
    """Make the doors that a spec names; PipelineError when a file that they need is no good."""
    config = spec.config
    start_logs(config.logs)
    tokens = TokenFile(config.tokens) if config.tokens is not None else None
    gate = Gate(tokens, config.limits, shares=max(1, config.grpc.processes) + (config.http is not None))
    memory = SharedMemory(config.limits, config.shared_memory)
    doors: dict[str, IngressServer] = {}
    if GRPC in spec.doors:
        from weftline.engine.serving.grpc.server import GrpcServer

        doors[GRPC] = GrpcServer(config, backend, gate, memory, figures=backend.statistics, version=version())
    if HTTP in spec.doors:
        from weftline.engine.serving.http.server import HttpServer

        doors[HTTP] = HttpServer(config, backend, gate, memory, figures=backend.statistics)
    return doors
