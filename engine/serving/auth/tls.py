"""TLS contexts from PEM files, reloaded when they change.

Each new connection uses the current files; open connections keep theirs. Files that do not match (a certificate that
was replaced a moment before its key, or a broken file) are logged, and the last valid ones stay in force. The bytes are
read once, so the checked bytes are the used bytes.
"""

from __future__ import annotations

import logging
import os
import ssl
import stat
import threading
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from weftline.engine.serving.config import Tls
from weftline.errors import PipelineError, Problem

if TYPE_CHECKING:
    import grpc

PEM_BYTES_MAX = 4 << 20
"""Largest file; a bundle of all public authorities has about 200 KB."""

SOURCE = "weftline serve"

_log = logging.getLogger("weftline.access")


@dataclass(frozen=True, slots=True)
class Pem:
    """Contents of the files at one time. client_ca: authorities of accepted client certificates."""

    certificate: bytes
    key: bytes
    client_ca: bytes | None = None


class TlsFiles:
    """The files of a `Tls`; `fresh` reloads changed ones. Safe from any thread.

    PipelineError, with every problem, when they cannot be used at the start.
    """

    def __init__(self, tls: Tls, protocol: str = "http/1.1") -> None:
        self._tls = tls
        self._protocol = protocol
        self._lock = threading.Lock()
        self._seen = _signature(tls)
        self._pem = read_pem(tls)
        self._context = context_of(self._pem, protocol)

    @property
    def pem(self) -> Pem:
        return self._pem

    @property
    def context(self) -> ssl.SSLContext:
        return self._context

    def fresh(self) -> bool:
        """Reload the files if they have changed; return True if the contents are new and valid."""
        with self._lock:
            seen = _signature(self._tls)
            if seen == self._seen:
                return False
            self._seen = seen
            try:
                pem = read_pem(self._tls)
                context = context_of(pem, self._protocol)
            except PipelineError as error:
                _log.error("the TLS files have changed and cannot be used; the ones read before stay: %s", error)
                return False
            if pem == self._pem:
                return False
            self._pem, self._context = pem, context
            _log.info("the TLS files were read again")
            return True


def server_credentials(tls: Tls) -> grpc.ServerCredentials:
    """Return credentials for a gRPC server; with `client_ca`, clients must present a certificate."""
    import grpc

    files = TlsFiles(tls)

    def configuration() -> grpc.ServerCertificateConfiguration:
        pem = files.pem
        return grpc.ssl_server_certificate_configuration([(pem.key, pem.certificate)], pem.client_ca)

    return grpc.dynamic_ssl_server_credentials(
        configuration(),
        lambda: configuration() if files.fresh() else None,
        require_client_authentication=tls.client_ca is not None,
    )


def ssl_context(tls: Tls, protocol: str = "http/1.1") -> ssl.SSLContext:
    """Return a context for a server; with `client_ca`, clients must present a certificate.

    protocol: offered by ALPN: 'http/1.1' or 'h2'.

    Changed files are reloaded in each handshake, between ClientHello and ServerHello.
    """
    files = TlsFiles(tls, protocol)

    def hello(connection: ssl.SSLObject | ssl.SSLSocket, name: str | None, first: ssl.SSLContext) -> None:
        files.fresh()
        connection.context = files.context

    front = context_of(files.pem, protocol)
    front.sni_callback = hello
    return front


def read_pem(tls: Tls) -> Pem:
    """Read the files; PipelineError with every file that cannot be read."""
    problems: list[Problem] = []
    certificate = _read("tls.certificate", tls.certificate, problems)
    key = _read("tls.key", tls.key, problems, secret=True)
    client_ca = _read("tls.client_ca", tls.client_ca, problems) if tls.client_ca is not None else None
    if problems:
        raise PipelineError(problems)
    return Pem(certificate, key, client_ca)


def context_of(pem: Pem, protocol: str = "http/1.1") -> ssl.SSLContext:
    """Return a server's context; PipelineError if key and certificate do not match, or one is not PEM."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.options |= ssl.OP_NO_COMPRESSION | ssl.OP_NO_RENEGOTIATION
    context.set_alpn_protocols([protocol])
    with ExitStack() as stack:
        certificate, key = (_as_file(data, stack) for data in (pem.certificate, pem.key))
        try:
            context.load_cert_chain(certificate, key, password=_no_password)
        except (ssl.SSLError, OSError, ValueError) as error:
            found = f"do not fit together, or are no PEM ({_reason(error)})"
            fix = "a certificate chain, and its key without a password"
            raise PipelineError([Problem("tls.certificate and tls.key", found, fix, file=SOURCE)]) from None
    if pem.client_ca is not None:
        context.verify_mode = ssl.CERT_REQUIRED
        # A resumed session presents no certificate again, and would outlive a removed authority. TLS 1.3 resumes by
        # tickets only.
        context.num_tickets = 0
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        try:
            context.load_verify_locations(cadata=pem.client_ca.decode("ascii"))
        except (ssl.SSLError, ValueError) as error:
            found = f"holds no certificate ({_reason(error)})"
            raise PipelineError([Problem("tls.client_ca", found, "PEM certificates", file=SOURCE)]) from None
    return context


def _read(key: str, path: Path, problems: list[Problem], secret: bool = False) -> bytes:
    try:
        with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
            mode = os.fstat(file.fileno()).st_mode
            if not stat.S_ISREG(mode):
                problems.append(Problem(key, f"{path} is no regular file", file=SOURCE))
                return b""
            data = file.read(PEM_BYTES_MAX + 1)
    except OSError as error:
        problems.append(Problem(key, f"{path} cannot be read: {error.strerror}", file=SOURCE))
        return b""
    if len(data) > PEM_BYTES_MAX:
        problems.append(Problem(key, f"{path} has more than {PEM_BYTES_MAX} bytes", file=SOURCE))
    if secret and mode & 0o004:
        _log.warning("every user of this machine may read the private key; chmod 600, or 640")
    return data


def _signature(tls: Tls) -> tuple[object, ...]:
    found: list[object] = []
    for path in (tls.certificate, tls.key, tls.client_ca):
        try:
            held = path.stat() if path is not None else None
        except OSError:
            held = None
        found.append(None if held is None else (held.st_dev, held.st_ino, held.st_mtime_ns, held.st_size))
    return tuple(found)


def _as_file(data: bytes, stack: ExitStack) -> str:
    """Return a path under which OpenSSL can read `data`, which stays in memory."""
    fd = os.memfd_create("pem", os.MFD_CLOEXEC)
    stack.callback(os.close, fd)
    with open(fd, "wb", closefd=False) as file:
        file.write(data)
    return f"/proc/self/fd/{fd}"


def _no_password() -> str:
    return ""  # else OpenSSL prompts at the terminal


def _reason(error: Exception) -> str:
    reason = getattr(error, "reason", None)
    return str(reason).lower().replace("_", " ") if reason else "not readable"
