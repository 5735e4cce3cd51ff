"""Addresses of a client, and its refusal to send tokens unencrypted."""

from pathlib import Path

import pytest

from weftline.engine.client.options import ClientOptions, ClientTls, is_local, region_bytes, tls_of
from weftline.errors import InputError


@pytest.mark.parametrize("url", ["localhost:1", "127.0.0.1:8001", "127.8.9.1:1", "[::1]:8001", "unix:/run/w.sock"])
def test_this_machine_is_known_by_its_address(url: str) -> None:
    assert is_local(url)


@pytest.mark.parametrize("url", ["example.org:8001", "10.0.0.1:1", "[::2]:1", "0.0.0.0:1", "localhost.evil.org:1"])
def test_everything_else_is_another_machine(url: str) -> None:
    assert not is_local(url)


@pytest.mark.parametrize(
    "url", ["", "localhost", "http://localhost:8001", "a b:1", "localhost:99999", "h:1/x", "h:1\n"]
)
def test_what_is_no_address_is_refused(url: str) -> None:
    with pytest.raises(InputError, match="expected host:port"):
        is_local(url)


def test_a_token_travels_in_the_clear_on_this_machine_only() -> None:
    assert "secret" not in repr(ClientOptions("localhost:1", "secret"))
    ClientOptions("example.org:1", "secret", tls=ClientTls())
    ClientOptions("example.org:1", "secret", insecure=True)
    with pytest.raises(InputError, match="unencrypted") as refused:
        ClientOptions("example.org:1", "secret")
    assert "secret" not in str(refused.value)


@pytest.mark.parametrize("token", ["", "a b", "a\nb", "a\n", "é", "x" * 5000])
def test_a_token_that_no_header_could_hold_is_refused(token: str) -> None:
    with pytest.raises(InputError, match="visible ASCII"):
        ClientOptions(token=token)


def test_shared_memory_is_for_this_machine() -> None:
    assert (region_bytes(True), region_bytes(False), region_bytes(5)) == (64 << 20, 0, 5)
    with pytest.raises(InputError, match="this machine"):
        ClientOptions("example.org:1", shared_memory_bytes=1)
    with pytest.raises(InputError, match="expected True"):
        region_bytes(-1)


def test_tls_is_a_flag_a_file_or_all_of_it() -> None:
    assert tls_of(False) is None
    assert tls_of(True) == ClientTls()
    assert tls_of("ca.pem") == ClientTls(Path("ca.pem"))
    with pytest.raises(InputError, match="go together"):
        ClientTls(key=Path("key.pem"))


@pytest.mark.parametrize("retries", [-1, 101, True, 1.5])
def test_retries_are_counted(retries: int) -> None:
    with pytest.raises(InputError, match="retries"):
        ClientOptions(retries=retries)
