"""Implementation of `weftline serve` and `weftline token`.

Standard output has what other programs may want to read: where the doors are and which models there are, once all of it
is ready. Progress, problems and logs go to standard error.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from typing import TYPE_CHECKING, TextIO

from weftline.cli.progress import loading_shown
from weftline.engine.serving.auth.exposure import check_exposure
from weftline.engine.serving.serve_file import COMMAND_LINE, Flags, assemble, read_file, to_text
from weftline.errors import MissingPackage, PipelineError, Problem
from weftline.pipelines.spec.document import without_secrets

if TYPE_CHECKING:
    from weftline.engine.serving.config import ServeConfig
    from weftline.engine.serving.server import ServeOptions


@dataclass(frozen=True, slots=True)
class RayFlags:
    """What `--engine ray` was typed with: replicas, GPUs of each, and the cluster (None: one is started here)."""

    replicas: int = 1
    gpus_per_replica: float = 0.0
    address: str | None = None


@dataclass(frozen=True, slots=True)
class ServeRequest:
    """One use of `weftline serve`, as typed.

    config:       a serve file that was named as such; None: there may be one among `files`.
    print_config: print what it comes to, and serve nothing.
    ray:          serve by replicas on a Ray cluster; None: in this machine's processes.
    """

    files: tuple[str, ...] = ()
    config: str | None = None
    flags: Flags = field(default_factory=Flags)
    print_config: bool = False
    ray: RayFlags | None = None


@dataclass(frozen=True, slots=True)
class TokenRequest:
    """One use of `weftline token`, as typed. `models` empty: all of them."""

    name: str
    models: tuple[str, ...] = ()
    admin: bool = False
    memory: bool = False
    metrics: bool = False
    requests_per_s: float | None = None
    burst: int | None = None


def run_serve(request: ServeRequest, out: TextIO, err: TextIO) -> int:
    """Serve until a signal ends it, and return the exit code.

    What can be known to be wrong without opening a model is refused before anything starts.
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
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # its core logs for strangers, in lines of its own, without limit
    from weftline.engine.serving.server import serve

    with ExitStack() as loading:
        progress = loading.enter_context(loading_shown(err)) if config.logs.format == "text" else None

        def announce(serving: ServeOptions) -> None:
            loading.close()  # bars go before lines come
            print("\n".join(announced(serving)), file=out, flush=True)

        return asyncio.run(serve(config, announce=announce, progress=progress))


def _run_on_ray(request: ServeRequest, flags: RayFlags, out: TextIO) -> int:
    """The same on a Ray cluster."""
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
    """Raise PipelineError with everything that is wrong with where it listens, its tokens and its certificates."""
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
    """Return the lines that say where it is served: a door each, then a model each with its state."""
    lines = [f"grpc  {serving.grpc}"]
    if serving.http:
        lines.append(f"http  {serving.http}")
    for model in serving.models:
        lines.append(f"model {model.name}: {model.state}" + (f", version {model.version}" if model.version else ""))
    return lines


def run_token(request: TokenRequest, out: TextIO, err: TextIO) -> None:
    """Print a new token on `err` and its line for the token file on `out`; PipelineError for one no file could have."""
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
    """Return the entry of a token file, in quotes where digits could be taken for a number."""
    entry: dict[str, object] = {"name": request.name, "sha256": sha256}
    entry |= {"models": list(request.models)} if request.models else {}
    entry |= {right: True for right in ("admin", "memory", "metrics") if getattr(request, right)}
    rates = {"requests_per_s": request.requests_per_s, "burst": request.burst}
    entry |= {key: value for key, value in rates.items() if value is not None}
    return "  - {" + ", ".join(f"{key}: {json.dumps(value)}" for key, value in entry.items()) + "}"
