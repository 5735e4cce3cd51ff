"""Commands `weftline status`, `load` and `unload`: options and help."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from weftline.cli.remote import Remote

Name = Annotated[str, typer.Argument(metavar="NAME", help="A pipeline of the server's configuration.")]
Url = Annotated[str, typer.Option(metavar="ADDRESS", help="The server's gRPC address, or unix:PATH.")]
TokenFile = Annotated[
    Path | None, typer.Option("--token-file", metavar="FILE", help="A file that holds your token, and nothing else.")
]
Tls = Annotated[bool, typer.Option("--tls", help="Connect with TLS, trusting whom this machine trusts.")]
Ca = Annotated[Path | None, typer.Option(metavar="PEM", help="Connect with TLS, trusting this authority.")]
Cert = Annotated[
    Path | None, typer.Option("--tls-cert", metavar="PEM", help="Your certificate, where one is asked for.")
]
Key = Annotated[Path | None, typer.Option("--tls-key", metavar="PEM", help="Its private key.")]
Insecure = Annotated[bool, typer.Option("--insecure", help="Send the token to another machine without TLS.")]

DEFAULT_URL = "localhost:8001"


def add_to(app: typer.Typer) -> None:
    """Give a command line the commands of this file."""
    app.command(short_help="Show what a running server serves.")(status)
    app.command(short_help="Have a running server load a pipeline.")(load)
    app.command(short_help="Have a running server unload a pipeline.")(unload)


def status(
    url: Url = DEFAULT_URL,
    as_json: Annotated[bool, typer.Option("--json", help="One json object.")] = False,
    watch: Annotated[bool, typer.Option("--watch", help="Again every two seconds, until Ctrl-C.")] = False,
    token_file: TokenFile = None,
    tls: Tls = False,
    ca: Ca = None,
    tls_cert: Cert = None,
    tls_key: Key = None,
    insecure: Insecure = False,
) -> None:
    """Show whether a running server is ready, its models, and how they do: times are means of answered requests.

    The exit code is 0 when everything is ready, and 6 when something is not or no server is there.

    \b
    Examples:
      weftline status
      weftline status --url models.example.org:8001 --ca ca.pem --token-file token --json
    """
    from weftline.cli.remote import show_status

    remote = _remote(url, token_file, tls, ca, tls_cert, tls_key, insecure)
    if code := show_status(remote, sys.stdout, as_json=as_json, watch=watch):
        raise typer.Exit(code)


def load(
    name: Name,
    url: Url = DEFAULT_URL,
    token_file: TokenFile = None,
    tls: Tls = False,
    ca: Ca = None,
    tls_cert: Cert = None,
    tls_key: Key = None,
    insecure: Insecure = False,
) -> None:
    """Load a pipeline that the server was told of, or load it again; its file is read anew and no request is lost.

    \b
    Examples:
      weftline load assistant
      weftline load assistant --token-file admin-token
    """
    from weftline.cli.remote import load_model

    load_model(_remote(url, token_file, tls, ca, tls_cert, tls_key, insecure), name, sys.stdout)


def unload(
    name: Name,
    url: Url = DEFAULT_URL,
    token_file: TokenFile = None,
    tls: Tls = False,
    ca: Ca = None,
    tls_cert: Cert = None,
    tls_key: Key = None,
    insecure: Insecure = False,
) -> None:
    """Unload a pipeline once its open requests have finished; `load` brings it back.

    \b
    Examples:
      weftline unload assistant
    """
    from weftline.cli.remote import unload_model

    unload_model(_remote(url, token_file, tls, ca, tls_cert, tls_key, insecure), name, sys.stdout)


def _remote(
    url: str, token_file: Path | None, tls: bool, ca: Path | None, cert: Path | None, key: Path | None, insecure: bool
) -> Remote:
    from weftline.cli.remote import Remote

    return Remote(url, token_file, tls, ca, cert, key, insecure)
