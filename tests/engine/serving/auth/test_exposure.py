import dataclasses
from pathlib import Path

import pytest

from weftline.engine.serving.auth.exposure import check_exposure
from weftline.engine.serving.config import GrpcConfig, HttpConfig, ServeConfig, Tls
from weftline.errors import PipelineError
from weftline.nodes.loopback import is_loopback

TLS = Tls(Path("cert.pem"), Path("key.pem"))
TOKENS = Path("tokens.yaml")
HERE = ServeConfig({})
OPEN = ServeConfig({}, GrpcConfig(host="0.0.0.0"), HttpConfig(host="::"))


def said(config: ServeConfig) -> list[str]:
    with pytest.raises(PipelineError) as caught:
        check_exposure(config)
    return [str(problem) for problem in caught.value.problems]


def test_what_is_said_by_default_is_loopback_and_passes() -> None:
    check_exposure(HERE)
    check_exposure(ServeConfig({}, http=HttpConfig()))


@pytest.mark.parametrize(
    "host", ["127.0.0.1", "127.8.9.10", "::1", "[::1]", "localhost", "LOCALHOST", "::ffff:127.0.0.1"]
)
def test_addresses_of_this_machine_are_loopback(host: str) -> None:
    assert is_loopback(host)


@pytest.mark.parametrize(
    "host",
    [
        "", "0.0.0.0", "::", "[::]", "*", "10.0.0.1", "8.8.8.8", "::ffff:10.0.0.1", "fe80::1", "example.org", "127.1",
        "0x7f.1", "2130706433", "127.0.0.1.example.org", "localhost.example.org", "localhost.", "127.0.0.1:80",
        "127.0.0.01", "127.0.0.1\0", " 127.0.0.1", "ip6-localhost", "unix:/x",
    ],
)  # fmt: skip
def test_whatever_is_not_certainly_loopback_is_not(host: str) -> None:
    assert not is_loopback(host)
    with pytest.raises(PipelineError):
        check_exposure(ServeConfig({}, GrpcConfig(host=host)))


def test_every_open_address_is_named_with_what_to_add() -> None:
    grpc, http = said(OPEN)
    assert grpc.startswith("weftline serve  grpc.host: '0.0.0.0' can be reached from other machines")
    assert http.startswith("weftline serve  http.host: '::'")
    for part in ("--tls-cert", "--tokens", "127.0.0.1", "--insecure"):
        assert part in grpc and part in http


def test_tls_without_tokens_and_tokens_without_tls_are_each_refused() -> None:
    (lack, _) = said(dataclasses.replace(OPEN, tls=TLS))
    assert "there is no token file" in lack and "--tls-cert" not in lack
    (lack, _) = said(dataclasses.replace(OPEN, tokens=TOKENS))
    assert "there is no TLS" in lack and "--tokens" not in lack
    mutual = dataclasses.replace(TLS, client_ca=Path("ca.pem"))
    assert len(said(dataclasses.replace(OPEN, tls=mutual))) == 2


def test_with_both_or_with_a_plain_yes_it_passes() -> None:
    check_exposure(dataclasses.replace(OPEN, tls=TLS, tokens=TOKENS))
    check_exposure(dataclasses.replace(OPEN, insecure=True))


def test_a_unix_socket_is_not_exposed_but_http_beside_it_may_be() -> None:
    endpoint = GrpcConfig(host="0.0.0.0", socket=Path("weftline.sock"))
    check_exposure(ServeConfig({}, endpoint))
    assert len(said(ServeConfig({}, endpoint, HttpConfig(host="0.0.0.0")))) == 1


def test_problems_can_be_said_of_a_configuration_file() -> None:
    with pytest.raises(PipelineError, match=r"serve\.yaml  grpc\.host"):
        check_exposure(OPEN, "serve.yaml")
