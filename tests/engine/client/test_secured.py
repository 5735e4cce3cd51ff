"""Tokens and certificates, against a real server that requires them."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.engine.client.pipelines import PIPELINES
from tests.engine.serving.auth.certificates import Authority
from tests.engine.serving.grpc.served import Served, served_in_thread
from weftline import errors
from weftline.engine.client.client import Client
from weftline.engine.client.options import ClientTls
from weftline.engine.client.steps import Unavailable
from weftline.engine.request import RequestOptions
from weftline.engine.serving.auth.tokens import digest
from weftline.engine.serving.config import Tls


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("authority"), "ours")


@pytest.fixture(scope="module")
def secured(authority: Authority, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    tokens = tmp_path_factory.mktemp("tokens") / "tokens.yaml"
    tokens.write_text(
        f"tokens:\n  - {{name: web, sha256: {digest('wl_web')}, models: [bytes], requests_per_s: 1000, burst: 1000}}\n"
        f"  - {{name: ops, sha256: {digest('wl_ops')}, admin: true}}\n"
        f"  - {{name: slow, sha256: {digest('wl_slow')}, requests_per_s: 0.01, burst: 4}}\n"
    )
    tokens.chmod(0o600)
    certificate, key = authority.sign("server")
    tls = Tls(certificate, key, authority.file)
    pipelines = {name: PIPELINES[name] for name in ("bytes", "trickle")}
    with served_in_thread(pipelines, tokens=tokens, tls=tls) as one:
        yield one


@pytest.fixture(scope="module")
def tls(authority: Authority) -> ClientTls:
    return ClientTls(authority.file, *authority.sign("client"))


@pytest.mark.slow
def test_a_token_opens_what_it_is_for(secured: Served, tls: ClientTls) -> None:
    with Client(secured.address, token="wl_web", tls=tls) as client:
        assert client.run("bytes", x=[1, 2])["y"].tolist() == [1, 2]
        with pytest.raises(errors.AccessDenied) as denied:
            list(client.stream("trickle", x="a"))
        assert denied.value.status == "PERMISSION_DENIED"
        with pytest.raises(errors.AccessDenied):
            client.load("bytes")


@pytest.mark.slow
def test_an_admins_token_loads(secured: Served, tls: ClientTls) -> None:
    with Client(secured.address, token="wl_ops", tls=tls) as client:
        assert client.load("bytes") > 1


@pytest.mark.parametrize("token", [None, "wl_unknown"])
def test_without_a_valid_token_nothing_opens(secured: Served, tls: ClientTls, token: str | None) -> None:
    with Client(secured.address, token=token, tls=tls) as client:
        with pytest.raises(errors.AccessDenied) as denied:
            client.run("bytes", x=[1])
        assert denied.value.status == "UNAUTHENTICATED" and "wl_unknown" not in str(denied.value)
        assert client.live()


def test_a_limit_of_the_token_says_when_to_come_back(secured: Served, tls: ClientTls) -> None:
    with Client(secured.address, token="wl_slow", tls=tls) as client, pytest.raises(errors.LimitReached) as refused:
        for _ in range(10):
            client.run("bytes", RequestOptions(deadline_ms=5000), x=[1])
    assert refused.value.retry_after_s > 1


def test_a_server_with_an_unknown_certificate_is_refused(secured: Served, tmp_path: Path, tls: ClientTls) -> None:
    stranger = ClientTls(Authority(tmp_path, "stranger").file, tls.certificate, tls.key)
    with Client(secured.address, token="wl_web", tls=stranger, retries=0) as client, pytest.raises(Unavailable):
        client.run("bytes", RequestOptions(deadline_ms=5000), x=[1])


def test_a_client_without_a_certificate_is_turned_away(secured: Served, authority: Authority) -> None:
    with Client(secured.address, token="wl_web", tls=authority.file, retries=0) as client, pytest.raises(Unavailable):
        client.run("bytes", RequestOptions(deadline_ms=5000), x=[1])


def test_a_client_without_tls_is_turned_away(secured: Served) -> None:
    with Client(secured.address, retries=0) as client, pytest.raises((Unavailable, errors.DeadlineExceeded)):
        client.run("bytes", RequestOptions(deadline_ms=5000), x=[1])


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(errors.InputError, match=r"nowhere\.pem"):
        Client("localhost:1", tls=tmp_path / "nowhere.pem")
