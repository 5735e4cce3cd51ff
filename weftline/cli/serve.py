"""Commands `weftline serve` and `weftline token`.

Addresses and models go to standard output when everything is ready. Progress, problems and logs go to standard error.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from typing import TYPE_CHECKING, Annotated, Any, TextIO

from msgspec import Meta

from weftline.cli.options import Verbose
from weftline.cli.progress import loading_shown
from weftline.cli.remote import Cluster
from weftline.engine.flags import Flag
from weftline.engine.serving.auth.exposure import check_exposure
from weftline.engine.serving.config import ServeConfig
from weftline.engine.serving.malloc import keep_freed_memory
from weftline.engine.serving.serve_file import COMMAND_LINE, assemble, to_text
from weftline.errors import MissingPackage, PipelineError, Problem
from weftline.pipelines.placement.machine import Machine
from weftline.pipelines.spec.document import read_file, without_secrets

if TYPE_CHECKING:
    from weftline.engine.serving.server import ServeOptions


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeFlags:
    """Options of `weftline serve`.

    keys: values of options that are keys of serve files too, by key.
    """

    files: Annotated[tuple[str, ...], Flag("FILE")] = ()
    """Pipeline files, or one serve file with `pipelines:`."""

    config: Annotated[str | None, Flag("--config", "FILE")] = None
    """Serve file; other options override it."""

    keys: Annotated[Mapping[str, Any], ServeConfig] = field(default_factory=dict)
    expose: Annotated[tuple[str, ...], Flag("--expose", "STEP")] = ()
    """Serve a step as a model too, as STEP or PIPELINE.STEP; repeatable."""

    cluster: Cluster = field(default_factory=Cluster)
    print_config: Annotated[bool, Flag("--print-config")] = False
    """Check everything, print the resulting serve file, and exit."""

    verbose: Verbose = False

    def assemble(self, machine: Machine | None = None, strict: bool = False) -> ServeConfig:
        """Return the checked configuration. Parameters as in `serve_file.assemble`."""
        keys = {**self.keys, **({"logs.level": "debug"} if self.verbose else {})}
        return assemble(self.files, self.config, keys, self.expose, machine, strict).config


def serve(options: ServeFlags) -> int:
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
    return run_serve(options, sys.stdout, sys.stderr)


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenOptions:
    """Options of `weftline token`. models: () for all."""

    name: Annotated[str, Flag("NAME")]
    """Name of the client in logs and metrics."""

    models: Annotated[tuple[str, ...], Flag("--model", "NAME")] = ()
    """Restrict the token to this model; repeatable."""

    admin: Annotated[bool, Flag("--admin")] = False
    """Permit loading, unloading and changes of settings."""

    memory: Annotated[bool, Flag("--memory")] = False
    """Permit registration of shared memory."""

    metrics: Annotated[bool, Flag("--metrics")] = False
    """Permit reading /metrics."""

    requests_per_s: Annotated[float | None, Meta(ge=0.001), Flag("--requests-per-s")] = None
    """Rate limit, in requests a second."""

    burst: Annotated[int | None, Meta(ge=1), Flag("--burst")] = None
    """Largest burst of requests after a pause."""


def token(options: TokenOptions) -> None:
    """Create a token: print it once on standard error, and its line for the token file on standard output.

    The line has only a digest of the token. The token itself is stored nowhere.

    \b
    Examples:
      (umask 077; echo "tokens:" > tokens.yaml)
      weftline token web --model assistant >> tokens.yaml
      weftline token ops --admin >> tokens.yaml
    """
    run_token(options, sys.stdout, sys.stderr)


def run_serve(options: ServeFlags, out: TextIO, err: TextIO) -> int:
    """Serve until a signal, and return the exit code.

    Mistakes that need no model are refused before anything starts.
    """
    if options.cluster.engine == "ray":
        return _run_on_ray(options, out)
    config = options.assemble(strict=options.print_config)
    _check_files(config)
    if options.print_config:
        _print_config(config, options, out)
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


def _run_on_ray(options: ServeFlags, out: TextIO) -> int:
    """Serve on a Ray cluster, and return the exit code."""
    from weftline.engine.jobs.ray.cluster import Need
    from weftline.engine.jobs.ray.deployment import Deployed, OnRay, check_config, machine_for, serve_on_ray

    cluster = options.cluster
    on = OnRay(cluster.replicas or 1, Need(gpus=cluster.gpus_per_replica or 0.0), cluster.address)
    config = options.assemble(machine_for(on.need), strict=True)
    check_config(config)
    if options.print_config:
        _print_config(config, options, out)
        return 0
    for package, extra in (("ray", "ray"), ("grpc", "serve"), ("tritonclient", "serve")):
        if find_spec(package) is None:
            raise MissingPackage(package, extra)
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")

    def announce(where: Deployed) -> None:
        lines = [f"grpc  {where.grpc}", *(f"model {name}: ready, {where.replicas} replicas" for name in where.models)]
        print("\n".join(lines), file=out, flush=True)

    return serve_on_ray(config, on, announce)


def _print_config(config: ServeConfig, options: ServeFlags, out: TextIO) -> None:
    """Print the configuration as a serve file, with secrets from the environment as the variables they came from."""
    files = [*options.files, *([options.config] if options.config is not None else [])]
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
    """Return a line for each address, each model with its state, and each node that loads a model or is shared."""
    from weftline.engine.serving.deployments import described

    lines = [f"grpc  {serving.grpc}"]
    if serving.http:
        lines.append(f"http  {serving.http}")
    for model in serving.models:
        lines.append(f"model {model.name}: {model.state}" + (f", version {model.version}" if model.version else ""))
    return [*lines, *(f"node  {line}" for line in described(serving.deployments))]


def run_token(options: TokenOptions, out: TextIO, err: TextIO) -> None:
    """Print a new token on `err` and its line for the token file on `out`; PipelineError for an invalid entry."""
    from weftline.engine.serving.auth.token_entries import read_tokens
    from weftline.engine.serving.auth.tokens import digest, new_token

    secret = new_token()
    line = token_line(options, digest(secret))
    try:
        read_tokens(f"tokens:\n{line}\n", COMMAND_LINE)
    except PipelineError as error:
        raise PipelineError(
            replace(one, path=one.path.removeprefix("tokens.0."), line=0) for one in error.problems
        ) from None
    print(line, file=out, flush=True)
    print(f"token of {options.name}, shown this once: {secret}", file=err, flush=True)


def token_line(options: TokenOptions, sha256: str) -> str:
    """Return the line of a token file; values are quoted, so that digits stay texts."""
    entry: dict[str, object] = {"name": options.name, "sha256": sha256}
    entry |= {"models": list(options.models)} if options.models else {}
    entry |= {right: True for right in ("admin", "memory", "metrics") if getattr(options, right)}
    rates = {"requests_per_s": options.requests_per_s, "burst": options.burst}
    entry |= {key: value for key, value in rates.items() if value is not None}
    return "  - {" + ", ".join(f"{key}: {json.dumps(value)}" for key, value in entry.items()) + "}"
