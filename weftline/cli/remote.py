"""Commands `weftline status`, `load` and `unload`: queries and changes of a running server."""

from __future__ import annotations

import json
import stat
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TextIO

import msgspec
from msgspec import Meta

from weftline.cli.command import needing
from weftline.cli.show import printable
from weftline.engine.flags import Flag
from weftline.engine.serving.model_info import NOT_LOADED, UNAVAILABLE
from weftline.errors import InputError

if TYPE_CHECKING:
    from weftline.engine.client.calls import ModelStats
    from weftline.engine.client.client import Client
    from weftline.engine.client.options import ClientTls
    from weftline.engine.serving.deployments import DeploymentState
    from weftline.engine.serving.model_info import ModelState

WATCH_S = 2.0
"""Interval of a watched status, in seconds."""

NOT_READY = 6
"""Exit code of `status` where a server answers and cannot serve everything now: that of UNAVAILABLE."""

TOKEN_BYTES_MAX = 4096
CLEAR = "\x1b[H\x1b[2J"


@dataclass(frozen=True, slots=True)
class Remote:
    """Address and credentials of a server.

    token_file: file with the token alone; command lines are visible to other users of the machine.
    """

    url: Annotated[str, Flag("--url", "ADDRESS")] = "localhost:8001"
    """gRPC address of the server, or unix:PATH."""

    token_file: Annotated[Path | None, Flag("--token-file", "FILE")] = None
    """File that contains the token and nothing else."""

    tls: Annotated[bool, Flag("--tls")] = False
    """Connect with TLS and this machine's certificate authorities."""

    ca: Annotated[Path | None, Flag("--ca", "PEM")] = None
    """Connect with TLS and this certificate authority."""

    tls_cert: Annotated[Path | None, Flag("--tls-cert", "PEM")] = None
    """Client certificate, for servers that require one."""

    tls_key: Annotated[Path | None, Flag("--tls-key", "PEM")] = None
    """Private key of the client certificate."""

    insecure: Annotated[bool, Flag("--insecure")] = False
    """Send the token to another machine without TLS."""

    def open(self) -> Client:
        """Return a client; InputError for options that exclude each other."""
        from weftline.engine.client.client import Client

        token, tls = self.credentials()
        return Client(self.url, token=token, tls=tls, insecure=self.insecure, retries=0)

    def credentials(self) -> tuple[str | None, ClientTls | bool]:
        """Return the token from its file, and the TLS options."""
        from weftline.engine.client.options import ClientTls

        wanted = self.tls or any((self.ca, self.tls_cert, self.tls_key))
        tls = ClientTls(self.ca, self.tls_cert, self.tls_key) if wanted else False
        return _read_token(self.token_file) if self.token_file is not None else None, tls


@dataclass(frozen=True, slots=True)
class Cluster:
    """Engine of commands that run on this machine or on a Ray cluster."""

    engine: Annotated[Literal["local", "ray"], Flag("--engine")] = "local"
    """Run on this machine, or on a Ray cluster."""

    replicas: Annotated[int | None, Meta(ge=1, le=10_000), Flag("--replicas")] = None
    """Ray: copies of all the pipelines; 1 by default."""

    gpus_per_replica: Annotated[float | None, Meta(ge=0.0), Flag("--gpus-per-replica")] = None
    """Ray: GPUs of each copy; 0 by default."""

    address: Annotated[str | None, Flag("--address", "ADDRESS")] = None
    """Ray: address of the cluster; by default a local one is started."""

    def mistakes(self) -> Iterator[str]:
        """Yield the options that need the other engine."""
        if self.engine != "ray":
            yield from needing(self, "--engine ray")


@dataclass(frozen=True, slots=True, kw_only=True)
class StatusOptions:
    """Options of `weftline status`."""

    server: Remote
    as_json: Annotated[bool, Flag("--json")] = False
    """Print one json object."""

    watch: Annotated[bool, Flag("--watch")] = False
    """Repeat every two seconds, until Ctrl-C."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelOptions:
    """Options of `weftline load` and `unload`."""

    name: Annotated[str, Flag("NAME")]
    """Pipeline of the server's configuration."""

    server: Remote


def status(options: StatusOptions) -> int:
    """Show whether a running server is ready, and its models with mean times of answered requests.

    The exit code is 0 when everything is ready, and 6 when the server is not ready, a model has failed (admins
    see that), or no server answers. A server is ready while one of its models is; with --strict, while all are.

    \b
    Examples:
      weftline status
      weftline status --url models.example.org:8001 --ca ca.pem --token-file token --json
    """
    return show_status(options.server, sys.stdout, as_json=options.as_json, watch=options.watch)


def load(options: ModelOptions) -> None:
    """Load a pipeline of the server's configuration, or reload its file; no request is lost.

    \b
    Examples:
      weftline load assistant
      weftline load assistant --token-file admin-token
    """
    load_model(options.server, options.name, sys.stdout)


def unload(options: ModelOptions) -> None:
    """Unload a pipeline when its open requests have finished; `load` loads it again.

    \b
    Examples:
      weftline unload assistant
    """
    unload_model(options.server, options.name, sys.stdout)


def show_status(
    remote: Remote,
    out: TextIO,
    *,
    as_json: bool = False,
    watch: bool = False,
    pause: Callable[[float], None] = time.sleep,
) -> int:
    """Print the server's readiness and models; return 0 when it is ready, else NOT_READY.

    watch: repeat until Ctrl-C.
    pause: sleep between two repetitions.
    """
    with remote.open() as client:
        if not watch:
            return _print_status(client, remote.url, out, as_json, "")
        code, clear = 0, CLEAR if out.isatty() else ""
        try:
            while True:
                code = _print_status(client, remote.url, out, as_json, clear)
                pause(WATCH_S)
        except KeyboardInterrupt:
            return code


def load_model(remote: Remote, name: str, out: TextIO) -> None:
    """Load or reload a model of the server's configuration, and print the version that serves now."""
    with remote.open() as client:
        version = client.load(name)
        print(printable(f"{name}: version {version} serves" if version else f"{name}: loaded"), file=out)


def unload_model(remote: Remote, name: str, out: TextIO) -> None:
    """Unload a model when its open requests have finished."""
    with remote.open() as client:
        client.unload(name)
        print(printable(f"{name}: unloaded"), file=out)


def _print_status(client: Client, url: str, out: TextIO, as_json: bool, before: str) -> int:
    models, figures, ready = client.models(), client.stats(), client.ready()  # the first fails where there is no server
    deployments = client.deployments()
    if as_json:
        shown = {"url": url, "live": True, "ready": ready, "models": [_model_json(one, figures) for one in models]}
        shown["deployments"] = [msgspec.structs.asdict(one) for one in deployments]
        print(json.dumps(shown), file=out)
    else:
        lines = [f"{url}: {'ready' if ready else 'not ready'}", *_table(models, figures), *_nodes(deployments)]
        print(before + "\n".join(map(printable, lines)), file=out)
    out.flush()
    failed = any(one.state == UNAVAILABLE and one.why not in ("", NOT_LOADED) for one in models)
    return 0 if ready and not failed else NOT_READY


def _model_json(model: ModelState, figures: dict[str, ModelStats]) -> dict[str, Any]:
    shown: dict[str, Any] = {"name": model.name, "state": model.state, "version": model.version}
    if model.why:
        shown["why"] = model.why
    found = figures.get(model.name)
    if found is not None:
        shown |= {key: value for key, value in msgspec.structs.asdict(found).items() if key not in shown}
    return shown


def _table(models: Sequence[ModelState], figures: dict[str, ModelStats]) -> Iterator[str]:
    """Yield aligned lines: names on the left, figures to the right below their headings."""
    if not models:
        yield "  no models"
        return
    rows = [["model", "state", "version", "requests", "failed", "mean ms", "queue ms", "run ms", "batch"]]
    for one in models:
        found = figures.get(one.name)
        cells = [""] * 6
        if found is not None and found.requests + found.failed:
            spent = [f"{ms:.2f}" for ms in (found.total_ms, found.queue_ms, found.run_ms)]
            cells = [str(found.requests), str(found.failed), *spent, f"{found.batch:.1f}"]
        rows.append([one.name, one.state, str(one.version or "-"), *cells])
    yield from _aligned(rows)
    for one in models:
        if one.why:
            yield f"  {one.name}: {one.why}"


def _nodes(deployments: Sequence[DeploymentState]) -> Iterator[str]:
    """Yield aligned lines of the nodes that have a model or several users."""
    shown = [one for one in deployments if one.heavy or one.shared]
    if not shown:
        return
    rows = [["node", "device", "ready", "asleep", "queue", "batch", "memory", "KV memory", "used by"]]
    for one in shown:
        counts = f"{one.ready}/{one.instances}", str(one.asleep), str(one.queued)
        name, devices = f"{one.node} {one.model}".strip(), ", ".join(one.devices)
        rows.append([name, devices, *counts, one.batches, one.memory, one.kv or "-", one.users])
    yield ""
    yield from _aligned(rows, last=1)


def _aligned(rows: Sequence[Sequence[str]], last: int = 0) -> Iterator[str]:
    """Yield rows as lines: the first two columns and the last ones on the left, the others on the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = [
            cell.ljust(width) if at < 2 or at >= len(row) - last else cell.rjust(width)
            for at, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        yield "  " + "  ".join(cells).rstrip()


def _read_token(file: Path) -> str:
    """Return the token in a file; warn on standard error when other users can read the file."""
    try:
        with file.open("rb") as stream:
            mode = stat.S_IMODE(file.stat().st_mode)
            data = stream.read(TOKEN_BYTES_MAX + 1)
    except OSError as error:
        raise InputError(f"cannot read {file}: {error.strerror}") from None
    if mode & 0o077:
        print(f"warning: other users can read {file}; chmod 600 keeps the token private", file=sys.stderr)
    try:
        token = data.decode("ascii").strip()
    except UnicodeDecodeError:
        token = ""
    if len(data) > TOKEN_BYTES_MAX or not token or len(token.split()) != 1:
        raise InputError(f"{file}: expected one token and nothing else")
    return token
