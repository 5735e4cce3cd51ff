"""Pydantic schema of serve files, with bounds.

Names, defaults and documentation come from the dataclasses, so that a key, a Python argument and a row of the reference
page are the same word. `settings` reads files with them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, get_type_hints

from pydantic import BaseModel, BeforeValidator, Field, create_model

from weftline.engine.serving.config import (
    GrpcDoor,
    HttpDoor,
    Logs,
    ServeConfig,
    ServedPipeline,
    ServeLimits,
    Tls,
)
from weftline.pipelines.render.field_docs import field_docs
from weftline.pipelines.spec.schema import STRICT, Name

MODEL_PATTERN = r"^[A-Za-z0-9_-][A-Za-z0-9._-]{0,127}$"
"""Names of served pipelines. A dot in front is refused: `.` and `..` would be lost in a URL."""

GROUP_PATTERN = r"^[A-Za-z_][A-Za-z0-9_.-]{0,31}\$?$"
HOST_PATTERN = r"^[A-Za-z0-9._:%-]{1,253}$"
COLLECTOR_PATTERN = r"^(https?://[A-Za-z0-9._:\[\]-]{1,253}/?)?$"

PIPELINES_MAX = 64
"""Most pipelines of one server; a repository holds no more either."""

EXPOSED_MAX = 64
"""Most steps of one pipeline that are models of their own."""

PATH_CHARS_MAX = 1024
"""Longest path, in characters."""

_PORT: dict[str, float] = {"ge": 0, "le": 65_535}
BOUNDS: dict[type, dict[str, dict[str, float]]] = {
    GrpcDoor: {"port": _PORT, "processes": {"ge": 0, "le": 64}},
    HttpDoor: {"port": _PORT},
    ServeLimits: {
        "message_bytes_max": {"ge": 1 << 10, "le": (1 << 31) - 1},  # gRPC counts a message's bytes in 31 bits
        "inflight_bytes_max": {"ge": 1 << 10, "le": 1 << 40},
        "tensors_max": {"ge": 1, "le": 65_536},
        "batch_max": {"ge": 1, "le": 65_536},
        "elements_max": {"ge": 1, "le": 1 << 30},
        "metadata_bytes_max": {"ge": 1 << 10, "le": 1 << 20},
        "calls_max": {"ge": 1, "le": 1_000_000},
        "streams_max": {"ge": 1, "le": 1_000_000},
        "stream_requests_max": {"ge": 1, "le": 1_000_000},
        "regions_max": {"ge": 1, "le": 65_536},
        "region_bytes_max": {"ge": 1, "le": 1 << 40},
        "keepalive_s": {"ge": 1, "le": 86_400},
        "keepalive_wait_s": {"ge": 1, "le": 3600},
        "header_s": {"ge": 0.1, "le": 3600},
    },
    ServeConfig: {"grace_s": {"ge": 0, "le": 86_400}},
}
"""Bounds of the numbers. Both ends catch slips: bytes for megabytes, milliseconds for seconds."""


ABOUT: Mapping[type, Mapping[str, str]] = {
    ServeConfig: {
        "pipelines": "What is served, by the name that clients use: a pipeline file, or a mapping that says more.",
        "grpc": "Where gRPC listens.",
        "http": "Where HTTP listens; `{}` takes the defaults. Left out, there is no HTTP.",
        "tokens": "The token file. Left out, nobody needs a token.",
        "tls": "Certificates. Left out, connections are not encrypted.",
        "limits": "What a door accepts.",
        "logs": "What is written to standard error.",
    },
    GrpcDoor: {
        "host": "The address it listens at.",
        "port": "Its port; 0 takes any free one, and `weftline serve` prints which.",
    },
    HttpDoor: {"host": "The address it listens at.", "port": "Its port; 0 takes any free one."},
    Tls: {
        "certificate": "The server's certificate and those between it and the root.",
        "key": "Its private key.",
        "client_ca": "Whose certificates clients must show (mutual TLS). Left out, they need not show any.",
    },
}
"""Documentation of fields that need none in `config`, or another one for a file."""


def _as_path(value: Any) -> Any:
    """A path from text; anything else is left for the check of types."""
    if not isinstance(value, str):
        return value
    if not value or len(value) > PATH_CHARS_MAX or "\0" in value:
        raise ValueError(f"no path: it wants 1 to {PATH_CHARS_MAX} characters")
    return Path(value)


def _as_tuple(value: Any) -> Any:
    return (value,) if isinstance(value, str) else tuple(value) if isinstance(value, list) else value


def _long_form(value: Any) -> Any:
    return {"file": value} if isinstance(value, str) else value


FilePath = Annotated[Path, BeforeValidator(_as_path, json_schema_input_type=str)]
Host = Annotated[str, Field(pattern=HOST_PATTERN)]
Group = Annotated[str, Field(pattern=GROUP_PATTERN)]
Exposed = Annotated[
    tuple[Name, ...], Field(max_length=EXPOSED_MAX), BeforeValidator(_as_tuple, json_schema_input_type=list[Name])
]
ModelName = Annotated[str, Field(pattern=MODEL_PATTERN)]
Collector = Annotated[str, Field(pattern=COLLECTOR_PATTERN)]


def _model_of(kind: Any, **types: Any) -> type[BaseModel]:
    """Return a model with the fields, defaults and documentation of a dataclass, and the bounds above."""
    hints, about = get_type_hints(kind), field_docs(kind)
    about |= ABOUT.get(kind, {})
    fields: dict[str, Any] = {}
    for one in dataclasses.fields(kind):
        default = one.default_factory() if one.default_factory is not dataclasses.MISSING else one.default
        bounds: dict[str, Any] = dict(BOUNDS.get(kind, {}).get(one.name, {}))
        if dataclasses.is_dataclass(default):
            default = types[one.name]()  # whose defaults are the same
        described = Field(description=about.get(one.name), **bounds)
        given = ... if default is dataclasses.MISSING else default
        fields[one.name] = (Annotated[types.get(one.name, hints[one.name]), described], given)
    doc = (kind.__doc__ or "").partition("\n")[0]
    return create_model(kind.__name__, __config__=STRICT, __doc__=doc, __module__=__name__, **fields)


PipelineEntry: type[BaseModel] = _model_of(ServedPipeline, file=FilePath, expose=Exposed)
GrpcEntry: type[BaseModel] = _model_of(GrpcDoor, host=Host, socket=FilePath | None, socket_group=Group | None)
HttpEntry: type[BaseModel] = _model_of(HttpDoor, host=Host)
TlsEntry: type[BaseModel] = _model_of(Tls, certificate=FilePath, key=FilePath, client_ca=FilePath | None)
LimitsEntry: type[BaseModel] = _model_of(ServeLimits)
LogsEntry: type[BaseModel] = _model_of(Logs)

AnyPipeline = Annotated[
    PipelineEntry,  # type: ignore[valid-type]
    BeforeValidator(_long_form, json_schema_input_type=Annotated[str, Field(description="file")] | PipelineEntry),
]

ServeFile: type[BaseModel] = _model_of(
    ServeConfig,
    pipelines=Annotated[dict[ModelName, AnyPipeline], Field(max_length=PIPELINES_MAX)],
    grpc=GrpcEntry,
    http=HttpEntry | None,
    tls=TlsEntry | None,
    tokens=FilePath | None,
    limits=LimitsEntry,
    logs=LogsEntry,
    otlp=Collector,
)
"""A serve file."""

ENTRIES: Mapping[str, type[BaseModel]] = {
    "pipelines": PipelineEntry,
    "grpc": GrpcEntry,
    "http": HttpEntry,
    "tls": TlsEntry,
    "limits": LimitsEntry,
    "logs": LogsEntry,
}
"""What stands under each key of a serve file that holds a mapping; under `pipelines`, one for each name."""
