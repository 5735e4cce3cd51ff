"""Commands `weftline serve` and `weftline token`: options and help."""

from __future__ import annotations

import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer


class LogFormat(StrEnum):
    """How lines on standard error look."""

    text = "text"
    json = "json"


class Engine(StrEnum):
    """Where pipelines run."""

    local = "local"
    ray = "ray"


def add_to(app: typer.Typer) -> None:
    """Give a command line the commands of this file."""
    app.command(short_help="Serve pipelines to clients, over gRPC and HTTP.")(serve)
    app.command(short_help="Make a token for a client of a server.")(token)


def serve(
    files: Annotated[
        list[str] | None,
        typer.Argument(metavar="FILE", help="Pipeline files, or one serve file, which has `pipelines:`."),
    ] = None,
    config: Annotated[str | None, typer.Option(metavar="FILE", help="A serve file; other options override it.")] = None,
    host: Annotated[str | None, typer.Option(metavar="ADDRESS", help="Where to listen; 127.0.0.1 by default.")] = None,
    port: Annotated[int | None, typer.Option(min=0, max=65_535, help="Of gRPC; 8001 by default, 0 for any.")] = None,
    http_port: Annotated[
        int | None, typer.Option(min=0, max=65_535, help="Serve HTTP too, at this port; 0 for any.")
    ] = None,
    socket: Annotated[
        Path | None, typer.Option(metavar="PATH", help="A Unix socket for gRPC, instead of an address.")
    ] = None,
    expose: Annotated[
        list[str] | None,
        typer.Option(metavar="STEP", help="A step that is a model too, as STEP or PIPELINE.STEP; repeatable."),
    ] = None,
    tokens: Annotated[Path | None, typer.Option(metavar="FILE", help="Who may ask for what; see `token`.")] = None,
    tls_cert: Annotated[Path | None, typer.Option(metavar="PEM", help="The server's certificate.")] = None,
    tls_key: Annotated[Path | None, typer.Option(metavar="PEM", help="Its private key.")] = None,
    client_ca: Annotated[
        Path | None, typer.Option(metavar="PEM", help="Clients must show a certificate of this authority.")
    ] = None,
    insecure: Annotated[
        bool, typer.Option("--insecure", help="Listen beyond this machine without TLS or without tokens.")
    ] = False,
    shared_memory: Annotated[
        bool, typer.Option("--shared-memory", help="Clients may register system shared memory.")
    ] = False,
    processes: Annotated[
        int | None, typer.Option(min=0, max=64, help="Processes for gRPC; 0, the default, serves beside the engine.")
    ] = None,
    grace_s: Annotated[
        float | None,
        typer.Option(min=0.0, max=86_400.0, help="How long open requests get after SIGTERM; 30 by default."),
    ] = None,
    log_format: Annotated[LogFormat | None, typer.Option(help="How logs look; text by default.")] = None,
    log_requests: Annotated[
        bool, typer.Option("--log-requests", help="Log every request, not only those that fail.")
    ] = False,
    otlp: Annotated[
        str | None, typer.Option(metavar="URL", help="Where traces are sent, such as http://localhost:4317.")
    ] = None,
    engine: Annotated[Engine, typer.Option(help="In this machine's processes, or on a Ray cluster.")] = Engine.local,
    replicas: Annotated[
        int | None, typer.Option(min=1, max=10_000, help="On Ray: how many copies of all the pipelines; 1 by default.")
    ] = None,
    gpus_per_replica: Annotated[float | None, typer.Option(min=0.0, help="On Ray: GPUs of each; 0 by default.")] = None,
    address: Annotated[
        str | None, typer.Option(metavar="ADDRESS", help="On Ray: the cluster's; one is started here by default.")
    ] = None,
    print_config: Annotated[
        bool, typer.Option("--print-config", help="Check everything, print what it comes to as a serve file, and end.")
    ] = False,
    verbose: Annotated[
        bool,
        typer.Option("--verbose", "-v", help="Show INFO records of steps, and tracebacks of unexpected errors."),
    ] = False,
) -> None:
    """Serve one or many pipelines until SIGTERM or Ctrl-C: gRPC for Triton and KServe clients, and HTTP if asked for.

    On a signal it takes no new requests, finishes the open ones within --grace-s, and exits with 0; a second signal
    ends it at once. Addresses and models are printed on standard output when everything is ready.

    \b
    Examples:
      weftline serve pipeline.yaml
      weftline serve assistant.yaml ocr.yaml --http-port 8000 --expose assistant.answer
      weftline serve serve.yaml --log-format json --log-requests
      weftline serve --config serve.yaml --host 0.0.0.0 --tls-cert cert.pem --tls-key key.pem --tokens tokens.yaml
      weftline serve pipeline.yaml --http-port 8000 --print-config > serve.yaml
      weftline serve pipeline.yaml --engine ray --address auto --replicas 4 --gpus-per-replica 1 --insecure
    """
    from weftline.cli.serve import RayFlags, ServeRequest, run_serve
    from weftline.engine.serving.serve_file import Flags

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
    name: Annotated[str, typer.Argument(metavar="NAME", help="What its holder is called in logs and figures.")],
    models: Annotated[
        list[str] | None, typer.Option("--model", metavar="NAME", help="A model it is for; repeatable. None: all.")
    ] = None,
    admin: Annotated[bool, typer.Option("--admin", help="It may load, unload and change settings, too.")] = False,
    memory: Annotated[bool, typer.Option("--memory", help="It may register shared memory.")] = False,
    metrics: Annotated[bool, typer.Option("--metrics", help="It may read the figures at /metrics.")] = False,
    requests_per_s: Annotated[
        float | None, typer.Option(min=0.001, help="How many requests a second it may make.")
    ] = None,
    burst: Annotated[int | None, typer.Option(min=1, help="How many it may make at once after a pause.")] = None,
) -> None:
    """Make a token: the token on standard error, once, and its line for the token file on standard output.

    Only a digest of the token is in that line, and nothing else keeps it: hand the token over now.

    \b
    Examples:
      (umask 077; echo "tokens:" > tokens.yaml)
      weftline token web --model assistant >> tokens.yaml
      weftline token ops --admin >> tokens.yaml
    """
    from weftline.cli.serve import TokenRequest, run_token

    run_token(
        TokenRequest(name, tuple(models or ()), admin, memory, metrics, requests_per_s, burst), sys.stdout, sys.stderr
    )
