"""Server configuration of `weftline serve`, as frozen values.

    pipelines:
      assistant: {file: assistant.yaml, expose: [answer]}
      ocr: ocr.yaml
    grpc: {host: 127.0.0.1, port: 8001}
    http: {port: 8000}
    tokens: tokens.yaml
    tls: {certificate: cert.pem, key: key.pem}

Frozen values only; `settings.py` reads the file and says what is wrong with it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

LOOPBACK = "127.0.0.1"

FREE_BYTES = 64 << 10
"""Messages of up to this size take nothing of a door's budget, so that small requests never wait behind large ones; the
server has read as much before it is asked. `limits.calls_max` bounds how many there are."""


@dataclass(frozen=True, slots=True)
class ServedPipeline:
    """A pipeline that a server may serve.

    file:   its YAML file, relative to the configuration file's folder.
    expose: steps that are models of their own too, as `pipeline.step`; each is loaded a second time.
    load:   open it when the server starts; otherwise when an admin asks for it.
    """

    file: Path
    expose: tuple[str, ...] = ()
    load: bool = True


@dataclass(frozen=True, slots=True)
class GrpcDoor:
    """Where gRPC listens.

    host, port: an address; port 0 takes any free one, and `weftline serve` prints which.
    socket:     a Unix socket instead of an address, which only the server's own user may use.
    processes:  0 serves beside the engine; more are ingress processes of their own that share the port.
    reflection: answer server reflection.
    socket_group: a group whose members may use the socket too.
    """

    host: str = LOOPBACK
    port: int = 8001
    socket: Path | None = None
    processes: int = 0
    reflection: bool = True
    socket_group: str | None = None


@dataclass(frozen=True, slots=True)
class HttpDoor:
    """Where HTTP listens: OpenAI's paths, the v2 REST protocol, /metrics, /livez, /readyz."""

    host: str = LOOPBACK
    port: int = 8000


@dataclass(frozen=True, slots=True)
class Tls:
    """PEM files. They are read again when they change; open connections keep what they began with.

    client_ca: whose certificates clients must show (mutual TLS); None: they need not show any.
    """

    certificate: Path
    key: Path
    client_ca: Path | None = None


@dataclass(frozen=True, slots=True)
class ServeLimits:
    """What a door accepts before anything is decoded; over a limit the answer is a refusal that names it.

    message_bytes_max:   largest message, in and out.
    inflight_bytes_max:  most bytes of messages that a door of one process holds at a time, `message_bytes_max` at
                         least; HTTP bodies without room wait unread and are then refused, gRPC messages are refused.
    tensors_max:         most tensors of one request, inputs and wanted outputs each.
    batch_max:           most items in the batch dimension of one request.
    elements_max:        most elements of a request's tensors sent as JSON or typed contents, and most values of JSON
                         documents; of a BYTES tensor 65 536 at most.
    metadata_bytes_max:  most bytes of a call's metadata or headers.
    calls_max:           most calls at a time, over all connections of a process.
    streams_max:         most calls at a time of one connection.
    stream_requests_max: most unanswered requests of one ModelStreamInfer call.
    regions_max:         most shared-memory regions registered at a time.
    region_bytes_max:    largest shared-memory region.
    keepalive_s:         how long a silent connection may be before it is asked whether it lives.
    keepalive_wait_s:    how long it then has to answer.
    header_s:            how long an HTTP client may take to send a request.
    """

    message_bytes_max: int = 64 << 20
    inflight_bytes_max: int = 256 << 20
    tensors_max: int = 256
    batch_max: int = 256
    elements_max: int = 1 << 20
    metadata_bytes_max: int = 16 << 10
    calls_max: int = 4096
    streams_max: int = 256
    stream_requests_max: int = 256
    regions_max: int = 64
    region_bytes_max: int = 1 << 30
    keepalive_s: float = 20.0
    keepalive_wait_s: float = 10.0
    header_s: float = 20.0

    @property
    def budget_bytes(self) -> int:
        """Size of a door's budget for messages: one of the largest always fits."""
        return max(self.inflight_bytes_max, self.message_bytes_max)


@dataclass(frozen=True, slots=True)
class Logs:
    """What is written to standard error.

    format:   'json' has one object a line; 'text' is for people.
    level:    'debug', 'info', 'warning' or 'error'.
    requests: a line for every request, not only for those that fail.
    """

    format: Literal["text", "json"] = "text"
    level: Literal["debug", "info", "warning", "error"] = "info"
    requests: bool = False


@dataclass(frozen=True, slots=True)
class ServeConfig:
    """Everything a server is told.

    http:          None: no HTTP.
    tokens:        the token file; None: nobody needs a token.
    insecure:      listen beyond loopback without TLS or tokens.
    shared_memory: clients may register system shared memory.
    grace_s:       how long open requests get to finish after SIGTERM.
    otlp:          where spans are sent (OTLP over gRPC), 'http://host:4317'; '' for nowhere.
    """

    pipelines: Mapping[str, ServedPipeline]
    grpc: GrpcDoor = GrpcDoor()
    http: HttpDoor | None = None
    tls: Tls | None = None
    tokens: Path | None = None
    insecure: bool = False
    shared_memory: bool = False
    grace_s: float = 30.0
    limits: ServeLimits = ServeLimits()
    logs: Logs = field(default_factory=Logs)
    otlp: str = ""
