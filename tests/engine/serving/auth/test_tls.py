import asyncio
import logging
import os
import shutil
import socket
import ssl
import subprocess
import threading
from collections.abc import Callable, Coroutine, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, cast

import grpc
import pytest
import uvloop

from tests.engine.serving.auth.certificates import Authority
from tests.engine.serving.grpc.requests import wait_until
from weftline.engine.serving.auth.gate import ANONYMOUS, Caller
from weftline.engine.serving.auth.tls import PEM_BYTES_MAX, TlsFiles, server_credentials, ssl_context
from weftline.engine.serving.config import GrpcConfig, ServeConfig, ServeLimits, Tls
from weftline.engine.serving.grpc.grpcio_transport import GrpcioTransport
from weftline.engine.serving.grpc.guard import Guard
from weftline.engine.serving.grpc.http2_transport import Http2Transport
from weftline.engine.serving.grpc.service import UnaryMethod
from weftline.errors import PipelineError

Pair = tuple[Path, Path]


@dataclass
class Made:
    """Two authorities, and what each has signed."""

    one: Authority
    two: Authority
    first: Pair
    second: Pair
    client: Pair
    stranger: Pair


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    folder = tmp_path_factory.mktemp("certificates")
    one, two = Authority(folder, "one"), Authority(folder, "two")
    return Made(one, two, one.sign("first"), two.sign("second"), one.sign("client"), two.sign("stranger"))


@pytest.fixture
def tls(made: Made, tmp_path: Path) -> Tls:
    tls = Tls(tmp_path / "cert.pem", tmp_path / "key.pem")
    install(tls, made.first)
    return tls


def install(tls: Tls, pair: Pair) -> None:
    """Put new files in place, the way that tools do: each written beside, then renamed."""
    for source, target in zip(pair, (tls.certificate, tls.key), strict=True):
        beside = target.with_suffix(".new")
        shutil.copy(source, beside)
        beside.replace(target)


def mutual(tls: Tls, authority: Authority, folder: Path) -> Tls:
    ca = folder / "client_ca.pem"
    shutil.copy(authority.file, ca)
    return Tls(tls.certificate, tls.key, ca)


def trusting(authority: Authority, own: Pair | None = None) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=str(authority.file))
    if own is not None:
        context.load_cert_chain(*own)
    return context


# HTTP


@contextmanager
def echo_server(context: ssl.SSLContext) -> Iterator[int]:
    """Serve TLS connections that echo what they are sent, each in a thread."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve(raw: socket.socket) -> None:
            with raw:
                try:
                    with context.wrap_socket(raw, server_side=True) as connection:
                        while data := connection.recv(100):
                            connection.sendall(data)
                except OSError:
                    pass  # the client did not like us, or we not it

        def accept() -> None:
            while True:
                try:
                    raw, _ = listener.accept()
                except OSError:
                    return
                raw.settimeout(10)
                threading.Thread(target=serve, args=(raw,), daemon=True).start()

        threading.Thread(target=accept, daemon=True).start()
        try:
            yield listener.getsockname()[1]
        finally:
            listener.shutdown(socket.SHUT_RDWR)


def connect(port: int, context: ssl.SSLContext) -> ssl.SSLSocket:
    raw = socket.create_connection(("127.0.0.1", port), timeout=10)
    try:
        return context.wrap_socket(raw, server_hostname="127.0.0.1")
    except BaseException:
        raw.close()
        raise


def says(connection: ssl.SSLSocket, word: bytes = b"hello") -> bool:
    connection.sendall(word)
    return connection.recv(100) == word


def accepted(port: int, context: ssl.SSLContext) -> bool:
    """Whether a connection can be made and used: TLS 1.3 refuses client certificates after the handshake."""
    try:
        with connect(port, context) as connection:
            return says(connection)
    except (ssl.SSLError, ConnectionError):
        return False


def test_http_new_connections_see_new_files_and_open_ones_go_on(made: Made, tls: Tls) -> None:
    with echo_server(ssl_context(tls)) as port:
        old = connect(port, trusting(made.one))
        assert says(old)
        install(tls, made.second)
        assert accepted(port, trusting(made.two))
        assert not accepted(port, trusting(made.one))
        assert says(old, b"still here")
        old.close()


def test_http_broken_new_files_leave_the_old_ones_in_force(
    made: Made, tls: Tls, caplog: pytest.LogCaptureFixture
) -> None:
    with echo_server(ssl_context(tls)) as port:
        shutil.copy(made.second[0], tls.certificate)  # its key has not come yet
        assert accepted(port, trusting(made.one))
        assert accepted(port, trusting(made.one))
        assert len([one for one in caplog.records if one.levelno == logging.ERROR]) == 1
        shutil.copy(made.second[1], tls.key)
        assert accepted(port, trusting(made.two))
        tls.key.unlink()
        assert accepted(port, trusting(made.two))
        tls.certificate.write_bytes(b"\0" * 100)
        assert accepted(port, trusting(made.two))


def test_http_without_a_name_for_the_server_files_are_read_again_too(made: Made, tls: Tls) -> None:
    with echo_server(ssl_context(tls)) as port:
        install(tls, made.second)
        context = trusting(made.two)
        context.check_hostname = False
        raw = socket.create_connection(("127.0.0.1", port), timeout=10)
        with context.wrap_socket(raw) as connection:
            assert says(connection)


def test_http_mutual_tls_wants_a_certificate_of_the_authority(made: Made, tls: Tls, tmp_path: Path) -> None:
    both = mutual(tls, made.one, tmp_path)
    with echo_server(ssl_context(both)) as port:
        assert accepted(port, trusting(made.one, made.client))
        assert not accepted(port, trusting(made.one))
        assert not accepted(port, trusting(made.one, made.stranger))
        shutil.copy(made.two.file, tmp_path / "client_ca.pem")
        assert accepted(port, trusting(made.one, made.stranger))
        assert not accepted(port, trusting(made.one, made.client))
        assert not accepted(port, trusting(made.one))


def test_http_a_session_is_not_resumed_past_a_change_of_the_authority(made: Made, tls: Tls, tmp_path: Path) -> None:
    both = mutual(tls, made.one, tmp_path)
    with echo_server(ssl_context(both)) as port:
        context = trusting(made.one, made.client)
        with connect(port, context) as connection:
            assert says(connection)
            assert connection.version() == "TLSv1.3"
            session = connection.session
        assert session is None or not session.has_ticket
        context.maximum_version = ssl.TLSVersion.TLSv1_2  # whose sessions the server would remember by itself
        assert not accepted(port, context)


def test_http_old_versions_of_tls_are_refused(made: Made, tls: Tls) -> None:
    assert ssl_context(tls).minimum_version == ssl.TLSVersion.TLSv1_2
    with echo_server(ssl_context(tls)) as port:
        for version in (ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3):
            context = trusting(made.one)
            context.minimum_version = context.maximum_version = version
            assert accepted(port, context)


# gRPC


T = TypeVar("T")
Serve = Callable[[Tls], AbstractContextManager[int]]


class Admitting:
    """A guard that admits every call."""

    def admit(self, path: str, authorization: Any) -> Caller:
        return ANONYMOUS


async def echo(data: bytes) -> bytes:
    return data


@pytest.fixture(
    params=[
        (Http2Transport, asyncio.new_event_loop),
        (Http2Transport, uvloop.new_event_loop),
        (GrpcioTransport, asyncio.new_event_loop),
    ],
    ids=["nghttp2", "nghttp2-uvloop", "grpcio"],
)
def grpc_server(request: pytest.FixtureRequest) -> Serve:
    """Serve one method with TLS through each of the transports; returns the port."""

    kind, make_loop = request.param
    return lambda tls: grpc_served(kind, make_loop, tls)


@contextmanager
def grpc_served(
    kind: type[Http2Transport] | type[GrpcioTransport],
    make_loop: Callable[[], asyncio.AbstractEventLoop],
    tls: Tls,
    limits: ServeLimits | None = None,
) -> Iterator[int]:
    loop, guard = make_loop(), cast(Guard, Admitting())
    threading.Thread(target=loop.run_forever, daemon=True).start()

    def run(work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, loop).result(20)

    async def make() -> Any:
        config = ServeConfig({}, GrpcConfig(port=0), tls=tls, limits=limits or ServeLimits())
        return kind(config, {"/test.Echo/Say": UnaryMethod(echo)}, guard)

    transport = run(make())
    try:
        yield run(transport.listen())
    finally:
        run(transport.close(0))
        loop.call_soon_threadsafe(loop.stop)


def channel_to(port: int, authority: Authority, own: Pair | None = None) -> Any:
    chain, key = own or (None, None)
    credentials = grpc.ssl_channel_credentials(
        authority.file.read_bytes(), key and key.read_bytes(), chain and chain.read_bytes()
    )
    options = [("grpc.use_local_subchannel_pool", 1)]  # a channel of its own, not a connection that is open already
    return grpc.secure_channel(f"127.0.0.1:{port}", credentials, options)


def answers(channel: Any) -> bool:
    try:
        return bool(channel.unary_unary("/test.Echo/Say")(b"hello", timeout=10) == b"hello")
    except grpc.RpcError as error:
        assert error.code() == grpc.StatusCode.UNAVAILABLE
        return False


def reached(port: int, authority: Authority, own: Pair | None = None) -> bool:
    with channel_to(port, authority, own) as channel:
        return answers(channel)


def test_grpc_new_connections_see_new_files_and_open_ones_go_on(made: Made, tls: Tls, grpc_server: Serve) -> None:
    with grpc_server(tls) as port:
        old = channel_to(port, made.one)
        assert answers(old)
        install(tls, made.second)
        assert reached(port, made.two)
        assert not reached(port, made.one)
        assert answers(old)
        old.close()


def test_grpc_broken_new_files_leave_the_old_ones_in_force(
    made: Made, tls: Tls, caplog: pytest.LogCaptureFixture, grpc_server: Serve
) -> None:
    with grpc_server(tls) as port:
        tls.certificate.write_text("no certificate")
        assert reached(port, made.one)
        assert reached(port, made.one)
        assert len([one for one in caplog.records if one.levelno == logging.ERROR]) == 1
        install(tls, made.second)
        assert reached(port, made.two)


def test_grpc_mutual_tls_wants_a_certificate_of_the_authority(
    made: Made, tls: Tls, tmp_path: Path, grpc_server: Serve
) -> None:
    both = mutual(tls, made.one, tmp_path)
    with grpc_server(both) as port:
        assert reached(port, made.one, made.client)
        assert not reached(port, made.one)
        assert not reached(port, made.one, made.stranger)
        shutil.copy(made.two.file, tmp_path / "client_ca.pem")
        assert reached(port, made.one, made.stranger)
        assert not reached(port, made.one, made.client)


def ended(raw: socket.socket) -> bool:
    """Return whether the server has closed a connection, waiting for at most a second."""
    raw.settimeout(1.0)
    try:
        return raw.recv(1) == b""
    except TimeoutError:
        return False
    except ConnectionError:
        return True


@pytest.mark.slow
@pytest.mark.parametrize("make_loop", [asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
def test_grpc_connections_without_a_handshake_are_limited_and_end(
    made: Made, tls: Tls, make_loop: Callable[[], asyncio.AbstractEventLoop]
) -> None:
    limits = ServeLimits(connections_max=2, header_s=3.0)
    with grpc_served(Http2Transport, make_loop, tls, limits) as port, ExitStack() as stack:
        silent = [stack.enter_context(socket.create_connection(("127.0.0.1", port))) for _ in range(2)]
        assert not ended(silent[0])
        third = stack.enter_context(socket.create_connection(("127.0.0.1", port)))
        assert ended(third)
        assert not ended(silent[1])
        assert all(any(ended(one) for _ in range(10)) for one in silent)
        wait_until(lambda: reached(port, made.one))  # the server counts a connection until its loop has closed it


# files


def test_files_are_swapped_a_hundred_times_and_descriptors_stay(made: Made, tls: Tls) -> None:
    files = TlsFiles(tls)
    for at in range(100):
        install(tls, made.second if at % 2 == 0 else made.first)
        assert files.fresh()
        assert not files.fresh()
    assert [link for fd in Path("/proc/self/fd").iterdir() if "pem" in (link := os.path.realpath(fd))] == []


def test_files_that_were_only_touched_are_no_news(tls: Tls) -> None:
    files = TlsFiles(tls)
    os.utime(tls.key)
    assert not files.fresh()


@pytest.mark.parametrize("build", [server_credentials, ssl_context])
def test_what_cannot_be_used_at_the_start_is_said_all_at_once(
    build: Callable[[Tls], object], tls: Tls, made: Made, tmp_path: Path
) -> None:
    with pytest.raises(PipelineError) as caught:
        build(Tls(tmp_path / "none.pem", tmp_path, tmp_path / "none either"))
    assert [problem.path for problem in caught.value.problems] == ["tls.certificate", "tls.key", "tls.client_ca"]
    for certificate, key in ((made.first[0], made.second[1]), (made.first[1], made.first[0]), (tls.key, tls.key)):
        with pytest.raises(PipelineError, match="do not fit together"):
            build(Tls(certificate, key))
    for text in ("", "no PEM", "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n", "\u00e9"):
        (tmp_path / "ca.pem").write_text(text)
        with pytest.raises(PipelineError, match="holds no certificate"):
            build(Tls(tls.certificate, tls.key, tmp_path / "ca.pem"))


def test_a_key_with_a_password_is_refused_without_asking(
    made: Made, tls: Tls, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    monkeypatch.setattr("weftline.engine.serving.auth.tls._no_password", lambda: asked.append("us") or "")
    locked = tmp_path / "locked.key"
    command = ["openssl", "ec", "-in", str(made.first[1]), "-aes128", "-passout", "pass:secret", "-out", str(locked)]
    subprocess.run(command, check=True, capture_output=True)
    with pytest.raises(PipelineError, match="without a password"):
        TlsFiles(Tls(tls.certificate, locked))
    assert asked == ["us"]  # and no prompt at a terminal


def test_a_file_that_is_too_large_or_never_ends_is_refused(tls: Tls, tmp_path: Path) -> None:
    (tmp_path / "large").write_bytes(b"a" * (PEM_BYTES_MAX + 1))
    os.mkfifo(tmp_path / "pipe")
    for name, found in (("large", "has more than"), ("pipe", "is no regular file")):
        with pytest.raises(PipelineError, match=found):
            TlsFiles(Tls(tmp_path / name, tls.key))
    with pytest.raises(PipelineError, match="is no regular file"):
        TlsFiles(Tls(Path("/dev/zero"), tls.key))


def test_a_key_that_every_user_may_read_is_warned_of(tls: Tls, caplog: pytest.LogCaptureFixture) -> None:
    tls.key.chmod(0o644)
    TlsFiles(tls)
    assert "every user of this machine may read the private key" in caplog.text
