"""Server configuration: the schema of serve files and the values that servers read.

    pipelines:
      assistant: {file: assistant.yaml, expose: [answer]}
      ocr: ocr.yaml
    grpc: {host: 127.0.0.1, port: 8001}
    http: {port: 8000}
    tokens: tokens.yaml
    tls: {certificate: cert.pem, key: key.pem}

Each class is a frozen value and the schema of its keys: a key, its default, its bounds and its documentation stand here
only. A `Flag` makes a key an option of `weftline serve` too, with the same type, bounds and sentence. Bounds apply to
files and options (`serve_file.py`), and to a configuration that goes to another process.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from msgspec import Meta

from weftline.engine.flags import Flag
from weftline.fields import Written, shorthand, worded
from weftline.pipelines.spec.policy import Name

LOOPBACK = "127.0.0.1"

FREE_BYTES = 64 << 10
"""Messages of up to this size are not counted against a server's byte budget, so that small requests never wait behind
large ones. `limits.calls_max` bounds their number."""

PIPELINES_MAX = 64
"""Most pipelines of one server, and of one repository."""

ALIASES_MAX = 256
"""Most further names of models."""
EXPOSED_MAX = 64
"""Most steps of one pipeline that are models of their own."""

ORIGINS_MAX = 64
"""Most origins of web pages that may call a server."""

PATH_CHARS_MAX = 1024
"""Longest path, in characters."""


def _number(least: float, most: float) -> Any:
    """Return the bounds of a number in a file. Both ends catch slips: bytes for megabytes, milliseconds for seconds."""
    return Meta(ge=least, le=most)


def _to_path(value: str) -> Path:
    return Path(value)


def _to_names(value: Any) -> tuple[str, ...]:
    return (value,) if isinstance(value, str) else tuple(value)


ModelName = Annotated[
    str,  # a leading dot is refused: `.` and `..` would be lost in a URL
    worded(
        "1 to 128 letters, digits, '.', '_' and '-', not starting with a dot",
        pattern=r"^[A-Za-z0-9_-][A-Za-z0-9._-]{0,127}$",
    ),
]
_PATH = worded(f"a path of 1 to {PATH_CHARS_MAX} characters", pattern=rf"^[^\x00]{{1,{PATH_CHARS_MAX}}}$")
FilePath = Annotated[Path, Written(Annotated[str, _PATH], _to_path, str)]
"""A path; `serve_file.py` makes it relative to its file's folder."""
Host = Annotated[str, worded("an address, such as 127.0.0.1, :: or a host name", pattern=r"^[A-Za-z0-9._:%-]{1,253}$")]
Port = Annotated[int, _number(0, 65_535)]
Origin = Annotated[
    str,
    worded(
        "an origin, such as https://app.example or http://localhost:3000, without a path",
        pattern=r"^https?://(\[[0-9a-f:.]{2,45}\]|[a-z0-9._-]{1,253})(:[0-9]{1,5})?$",
    ),
]
Group = Annotated[str, worded("a group's name", pattern=r"^[A-Za-z_][A-Za-z0-9_.-]{0,31}\$?$")]
Collector = Annotated[
    str,
    worded(
        "http://HOST:PORT or https://HOST:PORT, or '' to disable",
        pattern=r"^(https?://[A-Za-z0-9._:\[\]-]{1,253}/?)?$",
    ),
]
Alias = Annotated[
    str,
    worded(
        "1 to 256 letters, digits and '._/:@-', not starting with a dot or slash",
        pattern=r"^[A-Za-z0-9_-][A-Za-z0-9._/:@-]{0,255}$",
    ),
]
Aliases = Annotated[dict[Alias, Name], Meta(max_length=ALIASES_MAX)]
StepNames = Annotated[
    tuple[Name, ...], Written(Name | Annotated[list[Name], Meta(max_length=EXPOSED_MAX)], _to_names, list)
]

Origins = Annotated[
    tuple[Origin, ...], Written(Origin | Annotated[list[Origin], Meta(max_length=ORIGINS_MAX)], _to_names, list)
]


@dataclass(frozen=True, slots=True)
class ServedPipeline:
    """A pipeline that a server may serve."""

    file: FilePath
    """Its YAML file, relative to the configuration file's folder."""

    expose: StepNames = ()
    """Steps that are models of their own too, as `pipeline.step`; they share what the pipeline has loaded."""

    load: bool = True
    """Load it when the server starts; otherwise when an admin requests it."""


@dataclass(frozen=True, slots=True)
class GrpcConfig:
    """Address and processes of the gRPC server."""

    host: Annotated[Host, Flag("--host", "ADDRESS")] = LOOPBACK
    """Address to listen on."""

    port: Annotated[Port, Flag("--port")] = 8001
    """gRPC port; 0 selects a free one, and `weftline serve` prints it."""

    socket: Annotated[FilePath | None, Flag("--socket", "PATH")] = None
    """Unix socket to listen on instead of an address; only the server's own user may connect."""

    processes: Annotated[int, _number(0, 64), Flag("--processes")] = 0
    """Ingress processes that share the gRPC port; 0 serves in the engine's process."""

    reflection: bool = True
    """Answer server reflection."""

    socket_group: Group | None = None
    """A group whose members may use the socket too."""

    transport: Literal["auto", "nghttp2", "grpcio"] = "auto"
    """'nghttp2' or 'grpcio'; 'auto' is nghttp2 where libnghttp2 is installed, which is faster on small messages."""


@dataclass(frozen=True, slots=True)
class HttpConfig:
    """Address of the HTTP server: /run, OpenAI's paths, the v2 REST protocol, /metrics, /livez, /readyz."""

    host: Annotated[Host, Flag("--host", "ADDRESS")] = LOOPBACK
    """Address to listen on."""

    port: Annotated[Port, Flag("--http-port")] = 8000
    """Serve HTTP at this port; 0 selects a free one."""

    origins: Origins = ()
    """Origins of web pages whose scripts may call the server (CORS), exactly as browsers send them."""
    aliases: Aliases = field(default_factory=dict)
    """Further names of models on OpenAI's routes, {name: model}, such as {openai/gpt-4o: assistant.answer}."""


@dataclass(frozen=True, slots=True)
class Tls:
    """PEM files. Changed files are read again for new connections; open connections keep their certificates."""

    certificate: Annotated[FilePath, Flag("--tls-cert", "PEM")]
    """The server's certificate and those between it and the root."""

    key: Annotated[FilePath, Flag("--tls-key", "PEM")]
    """The private key of the certificate."""

    client_ca: Annotated[FilePath | None, Flag("--client-ca", "PEM")] = None
    """Authority whose certificates clients must present (mutual TLS). Left out, clients present none."""


@dataclass(frozen=True, slots=True)
class ServeLimits:
    """Limits on requests, checked before anything is decoded; a refusal names the limit."""

    message_bytes_max: Annotated[int, _number(1 << 10, (1 << 31) - 1)] = 64 << 20  # gRPC: a length has 31 bits
    """Largest message, in and out."""

    inflight_bytes_max: Annotated[int, _number(1 << 10, 1 << 40)] = 256 << 20
    """Most bytes of messages that a server of one process holds at a time, at least `message_bytes_max`. An HTTP body
    over it waits unread and is then refused; a gRPC message is refused."""

    tensors_max: Annotated[int, _number(1, 65_536)] = 256
    """Most tensors of one request, inputs and wanted outputs each."""

    batch_max: Annotated[int, _number(1, 65_536)] = 256
    """Most items in the batch dimension of one request."""

    elements_max: Annotated[int, _number(1, 1 << 30)] = 1 << 20
    """Most elements of a request's tensors sent as JSON or typed contents, and most values of JSON documents; of a
    BYTES tensor 65 536 at most."""

    metadata_bytes_max: Annotated[int, _number(1 << 10, 1 << 20)] = 16 << 10
    """Most bytes of a call's metadata or headers."""

    calls_max: Annotated[int, _number(1, 1_000_000)] = 4096
    """Most calls with a message at a time, over all connections of a process. A named caller holds at most as many as
    are free. Calls before their message, and of methods without rights, are not counted: 1 024 wait for a message."""

    streams_max: Annotated[int, _number(1, 1_000_000)] = 256
    """Most calls at a time of one connection."""

    connections_max: Annotated[int, _number(1, 1_000_000)] = 1024
    """Most connections of a server at a time. Further ones, an eighth of it, are closed after 5 s unless a call begins
    on them; then another is closed that serves none. Not enforced by the gRPC transport grpcio."""

    stream_requests_max: Annotated[int, _number(1, 1_000_000)] = 256
    """Most unanswered requests of one ModelStreamInfer call."""

    regions_max: Annotated[int, _number(1, 65_536)] = 64
    """Most shared-memory regions registered at a time."""

    region_bytes_max: Annotated[int, _number(1, 1 << 40)] = 1 << 30
    """Largest shared-memory region."""

    keepalive_s: Annotated[float, _number(1, 86_400)] = 20.0
    """Idle time of a connection before a keepalive ping."""

    keepalive_wait_s: Annotated[float, _number(1, 3600)] = 10.0
    """Longest wait for the answer to a keepalive ping."""

    header_s: Annotated[float, _number(0.1, 3600)] = 20.0
    """Longest time in which an HTTP client may send a request."""

    responses_bytes_max: Annotated[int, _number(0, 1 << 40)] = 64 << 20
    """Most bytes of responses of /v1/responses that are kept, in memory, for `previous_response_id`; 0 keeps none."""

    responses_max: Annotated[int, _number(1, 10_000_000)] = 10_000
    """Most responses that are kept, over all callers."""

    responses_s: Annotated[float, _number(1, 31_536_000)] = 86_400.0
    """Longest time that a response is kept after its last use."""

    @property
    def budget_bytes(self) -> int:
        """Byte budget of a server for messages; one message of the largest size always fits."""
        return max(self.inflight_bytes_max, self.message_bytes_max)


@dataclass(frozen=True, slots=True)
class Logs:
    """The log on standard error."""

    format: Annotated[Literal["text", "json"], Flag("--log-format")] = "text"
    """'json' writes one object per line; 'text' is for reading."""

    level: Literal["debug", "info", "warning", "error"] = "info"
    """'debug', 'info', 'warning' or 'error'."""

    requests: Annotated[bool, Flag("--log-requests")] = False
    """Log every request; otherwise only those that fail."""


AnyPipeline = Annotated[ServedPipeline, shorthand(ServedPipeline, "file")]
Pipelines = Annotated[Mapping[ModelName, AnyPipeline], Meta(max_length=PIPELINES_MAX)]


@dataclass(frozen=True, slots=True)
class ServeConfig:
    """A serve file."""

    pipelines: Pipelines
    """Pipelines to serve, by the name that clients use: a pipeline file, or a mapping with more keys."""

    grpc: GrpcConfig = GrpcConfig()
    """Address and processes of the gRPC server."""

    http: HttpConfig | None = None
    """Address of the HTTP server; `{}` selects the defaults. Left out, there is no HTTP."""

    tls: Tls | None = None
    """Certificates. Left out, connections are not encrypted."""

    tokens: Annotated[FilePath | None, Flag("--tokens", "FILE")] = None
    """The token file, with lines of `weftline token`. Left out, callers need no token."""

    insecure: Annotated[bool, Flag("--insecure")] = False
    """Listen beyond loopback without TLS or tokens."""

    strict: Annotated[bool, Flag("--strict")] = False
    """All pipelines or none: do not start when one cannot be loaded, and be ready only while all are. Otherwise the
    others serve, and the server is ready while one does."""

    watch: Annotated[bool, Flag("--watch")] = False
    """Reload a pipeline when its file, or a file that it names, is saved. The old version serves until the new one can,
    and goes on if that has an error."""

    shared_memory: Annotated[bool, Flag("--shared-memory")] = False
    """Clients may register system shared memory."""

    grace_s: Annotated[float, _number(0, 86_400), Flag("--grace-s")] = 30.0
    """Longest time for open requests to finish after SIGTERM or SIGHUP, in seconds."""

    limits: ServeLimits = ServeLimits()
    """Limits on requests."""

    logs: Logs = Logs()
    """The log on standard error."""

    otlp: Annotated[Collector, Flag("--otlp", "URL")] = ""
    """Collector of spans (OTLP over gRPC), 'http://host:4317'; '' disables them."""
