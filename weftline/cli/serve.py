"""Commands `weftline serve` and `weftline token`.

Addresses and models go to standard output when everything is ready. Progress, problems and logs go to standard error.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from enum import StrEnum
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TextIO

import typer

from weftline.cli.options import Verbose
from weftline.cli.progress import loading_shown
from weftline.engine.serving.auth.exposure import check_exposure
from weftline.engine.serving.malloc import keep_freed_memory
from weftline.engine.serving.serve_file import COMMAND_LINE, Flags, assemble, to_text
from weftline.errors import MissingPackage, PipelineError, Problem
from weftline.pipelines.spec.document import read_file, without_secrets

if TYPE_CHECKING:
    from weftline.engine.serving.config import ServeConfig
    from weftline.engine.serving.server import ServeOptions


class LogFormat(StrEnum):
    """Format of log lines."""

    text = "text"
    json = "json"


class Engine(StrEnum):
    """Engine that runs the pipelines."""

    local = "local"
    ray = "ray"


def serve(
    files: Annotated[
        list[str] | None,
        typer.Argument(metavar="FILE", help="Pipeline files, or one serve file with `pipelines:`."),
    ] = None,
    config: Annotated[str | None, typer.Option(metavar="FILE", help="Serve file; other options override it.")] = None,
    host: Annotated[
        str | None, typer.Option(metavar="ADDRESS", help="Address to listen at; 127.0.0.1 by default.")
    ] = None,
    port: Annotated[
        int | None, typer.Option(min=0, max=65_535, help="gRPC port; 8001 by default, 0 for any free one.")
    ] = None,
    http_port: Annotated[
        int | None, typer.Option(min=0, max=65_535, help="Serve HTTP too, at this port; 0 for any free one.")
    ] = None,
    socket: Annotated[
        Path | None, typer.Option(metavar="PATH", help="Unix socket for gRPC, instead of an address.")
    ] = None,
    expose: Annotated[
        list[str] | None,
        typer.Option(metavar="STEP", help="Serve a step as a model too, as STEP or PIPELINE.STEP; repeatable."),
    ] = None,
    tokens: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Tokens of clients and their permissions; see `token`.")
    ] = None,
    tls_cert: Annotated[Path | None, typer.Option(metavar="PEM", help="Certificate of the server.")] = None,
    tls_key: Annotated[Path | None, typer.Option(metavar="PEM", help="Private key of the certificate.")] = None,
    client_ca: Annotated[
        Path | None, typer.Option(metavar="PEM", help="Require client certificates of this authority.")
    ] = None,
    insecure: Annotated[
        bool, typer.Option("--insecure", help="Allow other machines to connect without TLS or without tokens.")
    ] = False,
    shared_memory: Annotated[
        bool, typer.Option("--shared-memory", help="Allow clients to register system shared memory.")
    ] = False,
    processes: Annotated[
        int | None,
        typer.Option(min=0, max=64, help="Processes for gRPC; 0, the default, serves in the engine's process."),
    ] = None,
    grace_s: Annotated[
        float | None,
        typer.Option(min=0.0, max=86_400.0, help="Time for open requests after SIGTERM, in seconds; 30 by default."),
    ] = None,
    log_format: Annotated[LogFormat | None, typer.Option(help="Format of logs; text by default.")] = None,
    log_requests: Annotated[
        bool, typer.Option("--log-requests", help="Log every request, not only failed ones.")
    ] = False,
    otlp: Annotated[
        str | None, typer.Option(metavar="URL", help="Send traces to this collector, such as http://localhost:4317.")
    ] = None,
    engine: Annotated[
        Engine, typer.Option(help="Run in processes of this machine, or on a Ray cluster.")
    ] = Engine.local,
    replicas: Annotated[
        int | None, typer.Option(min=1, max=10_000, help="On Ray: copies of all the pipelines; 1 by default.")
    ] = None,
    gpus_per_replica: Annotated[
        float | None, typer.Option(min=0.0, help="On Ray: GPUs of each copy; 0 by default.")
    ] = None,
    address: Annotated[
        str | None,
        typer.Option(metavar="ADDRESS", help="On Ray: address of the cluster; by default one is started."),
    ] = None,
    print_config: Annotated[
        bool, typer.Option("--print-config", help="Check everything, print the resulting serve file, and exit.")
    ] = False,
    verbose: Verbose = False,
) -> None:
    """Serve pipelines until SIGTERM, SIGHUP or Ctrl-C: gRPC for Triton and KServe clients, and optionally HTTP.

    After a signal the server refuses new requests, finishes open ones within --grace-s, and exits with 0. A second
    signal ends it at once. Addresses and models are printed on standard output when everything is ready.

    \b
    Examples:
      weftline serve pipeline.yaml
      weftline serve assistant.yaml ocr.yaml --http-port 8000 --expose assistant.answer
      weftline serve serve.yaml --log-format json --log-requests
      weftline serve --config serve.yaml --host 0.0.0.0 --tls-cert cert.pem --tls-key key.pem --tokens tokens.yaml
      weftline serve pipeline.yaml --http-port 8000 --print-config > serve.yaml
      weftline serve pipeline.yaml --engine ray --address auto --replicas 4 --gpus-per-replica 1 --insecure
    """
    on_ray = {"--replicas": replicas, "--gpus-per-replica": gpus_per_replica, "--address": address}
    idle = [name for name, value in on_ray.items() if value is not None]
    if idle and engine is not Engine.ray:
        raise typer.BadParameter(f"{', '.join(idle)}: only with --engine ray")

    flags = Flags(
        host=host,
        port=port,
        http_port=http_port,
        socket=socket,
        expose=tuple(expose or ()),
        tokens=tokens,
        tls_cert=tls_cert,
        tls_key=tls_key,
        client_ca=client_ca,
        insecure=insecure,
        shared_memory=shared_memory,
        processes=processes,
        grace_s=grace_s,
        log_format=log_format.value if log_format is not None else None,
        log_requests=log_requests,
        otlp=otlp,
        verbose=verbose,
    )
    ray = RayFlags(replicas or 1, gpus_per_replica or 0.0, address) if engine is Engine.ray else None
    request = ServeRequest(tuple(files or ()), config, flags, print_config, ray)
    if code := run_serve(request, sys.stdout, sys.stderr):
        raise typer.Exit(code)


def token(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Name of the client in logs and metrics.")],
    models: Annotated[
        list[str] | None, typer.Option("--model", metavar="NAME", help="Restrict the token to this model; repeatable.")
    ] = None,
    admin: Annotated[bool, typer.Option("--admin", help="Permit loading, unloading and changes of settings.")] = False,
    memory: Annotated[bool, typer.Option("--memory", help="Permit registration of shared memory.")] = False,
    metrics: Annotated[bool, typer.Option("--metrics", help="Permit reading /metrics.")] = False,
    requests_per_s: Annotated[float | None, typer.Option(min=0.001, help="Rate limit, in requests a second.")] = None,
    burst: Annotated[int | None, typer.Option(min=1, help="Largest burst of requests after a pause.")] = None,
) -> None:
    """Create a token: print it once on standard error, and its line for the token file on standard output.

    The line has only a digest of the token. The token itself is stored nowhere.

    \b
    Examples:
      (umask 077; echo "tokens:" > tokens.yaml)
      weftline token web --model assistant >> tokens.yaml
      weftline token ops --admin >> tokens.yaml
    """
    run_token(
        TokenRequest(name, tuple(models or ()), admin, memory, metrics, requests_per_s, burst), sys.stdout, sys.stderr
    )


@dataclass(frozen=True, slots=True)
class RayFlags:
    """Options of `--engine ray`: replicas, GPUs of each, and the cluster (None: one is started here)."""

    replicas: int = 1
    gpus_per_replica: float = 0.0
    address: str | None = None


@dataclass(frozen=True, slots=True)
class ServeRequest:
    """Options of `weftline serve`.

    config:       serve file of --config; None: `files` may have one.
    print_config: print the resulting configuration, and serve nothing.
    ray:          replicas on a Ray cluster; None: processes of this machine.
    """

    files: tuple[str, ...] = ()
    config: str | None = None
    flags: Flags = field(default_factory=Flags)
    print_config: bool = False
    ray: RayFlags | None = None


@dataclass(frozen=True, slots=True)
class TokenRequest:
    """Options of `weftline token`. models: () for all."""

    name: str
    models: tuple[str, ...] = ()
    admin: bool = False
    memory: bool = False
    metrics: bool = False
    requests_per_s: float | None = None
    burst: int | None = None


def run_serve(request: ServeRequest, out: TextIO, err: TextIO) -> int:
    """Serve until a signal, and return the exit code.

    Mistakes that need no model are refused before anything starts.
    """
    if request.ray is not None:
        return _run_on_ray(request, request.ray, out)
    config, _ = assemble(request.files, request.config, request.flags)
    _check_files(config)
    if request.print_config:
        _print_config(config, request, out)
        return 0
    for package in ("grpc", "tritonclient"):
        if find_spec(package) is None:
            raise MissingPackage(package, "serve")
    keep_freed_memory()
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # its core logs without limit
    from weftline.engine.serving.lifecycle import loop_factory
    from weftline.engine.serving.server import serve as run_server

    with ExitStack() as loading:
        progress = loading.enter_context(loading_shown(err)) if config.logs.format == "text" else None

        def announce(serving: ServeOptions) -> None:
            loading.close()  # removes the progress bars
            print("\n".join(announced(serving)), file=out, flush=True)

        with asyncio.Runner(loop_factory=loop_factory()) as runner:
            return runner.run(run_server(config, announce=announce, progress=progress))


def _run_on_ray(request: ServeRequest, flags: RayFlags, out: TextIO) -> int:
    """Serve on a Ray cluster, and return the exit code."""
    from weftline.engine.jobs.ray.cluster import Need
    from weftline.engine.jobs.ray.deployment import Deployed, OnRay, check_config, machine_for, serve_on_ray

    on = OnRay(flags.replicas, Need(gpus=flags.gpus_per_replica), flags.address)
    config, _ = assemble(request.files, request.config, request.flags, machine_for(on.need))
    check_config(config)
    if request.print_config:
        _print_config(config, request, out)
        return 0
    for package, extra in (("ray", "ray"), ("grpc", "serve"), ("tritonclient", "serve")):
        if find_spec(package) is None:
            raise MissingPackage(package, extra)
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")

    def announce(where: Deployed) -> None:
        lines = [f"grpc  {where.grpc}", *(f"model {name}: ready, {where.replicas} replicas" for name in where.models)]
        print("\n".join(lines), file=out, flush=True)

    return serve_on_ray(config, on, announce)


def _print_config(config: ServeConfig, request: ServeRequest, out: TextIO) -> None:
    """Print the configuration as a serve file, with secrets from the environment as the variables they came from."""
    files = [*request.files, *([request.config] if request.config is not None else [])]
    secrets = {secret: name for file in files for secret, name in read_file(file).secrets.items()}
    print(without_secrets(to_text(config), secrets), end="", file=out, flush=True)


def _check_files(config: ServeConfig) -> None:
    """Raise PipelineError with all problems of the addresses, the tokens and the certificates."""
    from weftline.engine.serving.auth.tls import TlsFiles
    from weftline.engine.serving.auth.tokens import TokenFile

    problems: list[Problem] = []
    checks: list[Callable[[], object]] = [lambda: check_exposure(config)]
    if config.tokens is not None:
        tokens = config.tokens
        checks.append(lambda: TokenFile(tokens))
    if config.tls is not None:
        tls = config.tls
        checks.append(lambda: TlsFiles(tls))
    for check in checks:
        try:
            check()
        except PipelineError as error:
            problems += error.problems
    if problems:
        raise PipelineError(problems)


def announced(serving: ServeOptions) -> list[str]:
    """Return a line for each address, then for each model with its state."""
    lines = [f"grpc  {serving.grpc}"]
    if serving.http:
        lines.append(f"http  {serving.http}")
    for model in serving.models:
        lines.append(f"model {model.name}: {model.state}" + (f", version {model.version}" if model.version else ""))
    return lines


def run_token(request: TokenRequest, out: TextIO, err: TextIO) -> None:
    """Print a new token on `err` and its line for the token file on `out`; PipelineError for an invalid entry."""
    from weftline.engine.serving.auth.token_entries import read_tokens
    from weftline.engine.serving.auth.tokens import digest, new_token

    secret = new_token()
    line = token_line(request, digest(secret))
    try:
        read_tokens(f"tokens:\n{line}\n", COMMAND_LINE)
    except PipelineError as error:
        raise PipelineError(
            replace(one, path=one.path.removeprefix("tokens.0."), line=0) for one in error.problems
        ) from None
    print(line, file=out, flush=True)
    print(f"token of {request.name}, shown this once: {secret}", file=err, flush=True)


def token_line(request: TokenRequest, sha256: str) -> str:
    """Return the line of a token file; values are quoted, so that digits stay texts."""
    entry: dict[str, object] = {"name": request.name, "sha256": sha256}
    entry |= {"models": list(request.models)} if request.models else {}
    entry |= {right: True for right in ("admin", "memory", "metrics") if getattr(request, right)}
    rates = {"requests_per_s": request.requests_per_s, "burst": request.burst}
    entry |= {key: value for key, value in rates.items() if value is not None}
    return "  - {" + ", ".join(f"{key}: {json.dumps(value)}" for key, value in entry.items()) + "}"
