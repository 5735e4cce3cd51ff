"""Implementation of `weftline status`, `load` and `unload`."""

from __future__ import annotations

import json
import stat
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

import msgspec

from weftline.cli.show import printable
from weftline.errors import InputError

if TYPE_CHECKING:
    from weftline.engine.client.calls import ModelStats
    from weftline.engine.client.client import Client
    from weftline.engine.client.options import ClientTls
    from weftline.engine.serving.face import ModelState

WATCH_S = 2.0
"""How often a watched status is asked for, in seconds."""

NOT_READY = 6
"""Exit code of `status` where a server answers and cannot serve everything now: that of UNAVAILABLE."""

TOKEN_BYTES_MAX = 4096
CLEAR = "\x1b[H\x1b[2J"


@dataclass(frozen=True, slots=True)
class Remote:
    """A server as it was named on the command line.

    token_file: a file that holds the token alone; a token never stands in a command, where everybody can read it.
    """

    url: str
    token_file: Path | None = None
    tls: bool = False
    ca: Path | None = None
    certificate: Path | None = None
    key: Path | None = None
    insecure: bool = False

    def open(self) -> Client:
        """Return a client; InputError where the options make none."""
        from weftline.engine.client.client import Client

        token, tls = self.credentials()
        return Client(self.url, token=token, tls=tls, insecure=self.insecure, retries=0)

    def credentials(self) -> tuple[str | None, ClientTls | bool]:
        """Return the token, read from its file, and how the connection is secured."""
        from weftline.engine.client.options import ClientTls

        wanted = self.tls or any((self.ca, self.certificate, self.key))
        tls = ClientTls(self.ca, self.certificate, self.key) if wanted else False
        return _read_token(self.token_file) if self.token_file is not None else None, tls


def show_status(
    remote: Remote,
    out: TextIO,
    *,
    as_json: bool = False,
    watch: bool = False,
    pause: Callable[[float], None] = time.sleep,
) -> int:
    """Print whether the server is ready and how its models do; return 0 when it is ready, else NOT_READY.

    watch: again and again, until Ctrl-C.
    pause: waits between two times.
    """
    with remote.open() as client:
        if not watch:
            return _print_status(client, remote.url, out, as_json, "")
        code, clear = 0, CLEAR if out.isatty() else ""
        try:
            while True:
                code = _print_status(client, remote.url, out, as_json, clear)
                pause(WATCH_S)
        except KeyboardInterrupt:  # which is how a watch ends
            return code


def load_model(remote: Remote, name: str, out: TextIO) -> None:
    """Load a model of the server's configuration, or load it again, and say which version serves now."""
    with remote.open() as client:
        version = client.load(name)
        print(printable(f"{name}: version {version} serves" if version else f"{name}: loaded"), file=out)


def unload_model(remote: Remote, name: str, out: TextIO) -> None:
    """Unload a model once its open requests have finished."""
    with remote.open() as client:
        client.unload(name)
        print(printable(f"{name}: unloaded"), file=out)


def _print_status(client: Client, url: str, out: TextIO, as_json: bool, before: str) -> int:
    models, figures, ready = client.models(), client.stats(), client.ready()  # the first fails where there is no server
    if as_json:
        told = {"url": url, "live": True, "ready": ready, "models": [_model_json(one, figures) for one in models]}
        print(json.dumps(told), file=out)
    else:
        lines = [f"{url}: {'ready' if ready else 'not ready'}", *_table(models, figures)]
        print(before + "\n".join(map(printable, lines)), file=out)
    out.flush()
    return 0 if ready else NOT_READY


def _model_json(model: ModelState, figures: dict[str, ModelStats]) -> dict[str, Any]:
    told: dict[str, Any] = {"name": model.name, "state": model.state, "version": model.version}
    if model.why:
        told["why"] = model.why
    found = figures.get(model.name)
    if found is not None:
        told |= {key: value for key, value in msgspec.structs.asdict(found).items() if key not in told}
    return told


def _table(models: Sequence[ModelState], figures: dict[str, ModelStats]) -> Iterator[str]:
    """Yield aligned lines: names on the left, figures to the right below their headings."""
    if not models:
        yield "  no models"
        return
    rows = [["model", "state", "version", "requests", "failed", "mean ms", "queue ms", "run ms", "batch"]]
    for one in models:
        found = figures.get(one.name)
        told = [""] * 6
        if found is not None and found.requests + found.failed:
            spent = [f"{ms:.2f}" for ms in (found.total_ms, found.queue_ms, found.run_ms)]
            told = [str(found.requests), str(found.failed), *spent, f"{found.batch:.1f}"]
        rows.append([one.name, one.state, str(one.version or "-"), *told])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for name, state, *cells in rows:
        aligned = [cell.rjust(width) for cell, width in zip(cells, widths[2:], strict=True)]
        yield "  " + "  ".join([name.ljust(widths[0]), state.ljust(widths[1]), *aligned]).rstrip()
    for one in models:
        if one.why:
            yield f"  {one.name}: {one.why}"


def _read_token(file: Path) -> str:
    """Return the token in a file, and warn when others can read it too."""
    try:
        with file.open("rb") as stream:
            mode = stat.S_IMODE(file.stat().st_mode)
            data = stream.read(TOKEN_BYTES_MAX + 1)
    except OSError as error:
        raise InputError(f"cannot read {file}: {error.strerror}") from None
    if mode & 0o077:
        print(f"warning: others can read {file}; chmod 600 keeps the token yours", file=sys.stderr)
    try:
        token = data.decode("ascii").strip()
    except UnicodeDecodeError:
        token = ""
    if len(data) > TOKEN_BYTES_MAX or not token or len(token.split()) != 1:
        raise InputError(f"{file}: expected one token and nothing else")
    return token
