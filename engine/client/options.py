"""Options of a client: the server's address, TLS, token, retries and shared memory.

Frozen values, checked when they are made: a token is sent unencrypted to another machine only with `insecure`. Options
of single requests are in engine/request.py.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path

from weftline.errors import InputError
from weftline.nodes.loopback import is_loopback

DEFAULT_URL = "localhost:8001"
TOKEN_CHARS_MAX = 4096
"""Longest token: far above any, and below the limit of a call's metadata."""

REGION_BYTES = 64 << 20
"""Default size of a client's shared memory: a few large inputs at a time."""

REGION_BYTES_MAX = 1 << 40

_HOST_PORT = re.compile(r"(\[[0-9A-Fa-f:.%]+\]|[A-Za-z0-9._-]+):([0-9]{1,5})")
_TOKEN = re.compile(r"[\x21-\x7e]+")


@dataclass(frozen=True, slots=True)
class ClientTls:
    """PEM files of a TLS connection.

    ca:          certificate authority of the server's certificate; None: those that this machine trusts.
    certificate: client certificate for mutual TLS, with its `key`.
    server_name: name in the server's certificate, if it differs from the address.
    """

    ca: Path | None = None
    certificate: Path | None = None
    key: Path | None = None
    server_name: str = ""

    def __post_init__(self) -> None:
        if (self.certificate is None) != (self.key is None):
            raise InputError("tls: a client certificate and its key go together; only one of them was given")


@dataclass(frozen=True, slots=True)
class ClientOptions:
    """Connection options of a client.

    url:                 'host:port', or 'unix:/path' of a socket.
    token:               bearer token, sent with every call; None: none.
    tls:                 None: the connection is not encrypted.
    insecure:            send the token to another machine though the connection is not encrypted.
    retries:             most times that a request is sent again after a temporary refusal; 0: never.
    message_bytes_max:   largest response, in bytes.
    shared_memory_bytes: size of the region for large inputs; 0: they are sent in the message.
    """

    url: str = DEFAULT_URL
    token: str | None = field(default=None, repr=False)
    tls: ClientTls | None = None
    insecure: bool = False
    retries: int = 3
    message_bytes_max: int = 64 << 20
    shared_memory_bytes: int = 0

    def __post_init__(self) -> None:
        local = is_local(self.url)
        if self.token is not None:
            if len(self.token) > TOKEN_CHARS_MAX or not _TOKEN.fullmatch(self.token):
                raise InputError(f"token: expected 1 to {TOKEN_CHARS_MAX} visible ASCII characters without spaces")
            if self.tls is None and not local and not self.insecure:
                raise InputError(
                    f"the token would be sent unencrypted to {self.url}"
                    "\n    fix: connect with tls=..., or set insecure=True where the network itself is trusted"
                )
        if self.shared_memory_bytes and not local:
            raise InputError(
                f"shared memory needs a server on this machine, and {self.url} is another"
                "\n    fix: leave shared_memory out"
            )
        if isinstance(self.retries, bool) or not isinstance(self.retries, int) or not 0 <= self.retries <= 100:
            raise InputError(f"retries: found {self.retries!r:.40}, expected 0 to 100")


def tls_of(tls: bool | str | Path | ClientTls) -> ClientTls | None:
    """Return the TLS files of `tls=`.

    False: none. True: the machine's certificate authorities. A path: the file of the authority.
    """
    if isinstance(tls, ClientTls):
        return tls
    if isinstance(tls, bool):
        return ClientTls() if tls else None
    return ClientTls(Path(tls))


def region_bytes(shared_memory: bool | int) -> int:
    """Return the size of `shared_memory=` in bytes: True is REGION_BYTES, False is 0."""
    if isinstance(shared_memory, bool):
        return REGION_BYTES if shared_memory else 0
    if not isinstance(shared_memory, int) or not 0 <= shared_memory <= REGION_BYTES_MAX:
        raise InputError(
            f"shared_memory: found {shared_memory!r:.40}, expected True, or a size up to {REGION_BYTES_MAX}"
        )
    return shared_memory


def is_local(url: str) -> bool:
    """Return True if a server's address names this machine; InputError if it is not an address."""
    if url.startswith("unix:"):
        return True
    match = _HOST_PORT.fullmatch(url)
    if match is None or int(match[2]) > 65_535:
        fix = "leave out what stands before the host" if "://" in url else "write 'localhost:8001' or 'unix:/path'"
        raise InputError(f"url: found {url!r:.100}, expected host:port\n    fix: {fix}")
    return is_loopback(match[1])
