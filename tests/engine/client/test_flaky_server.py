"""Retries against a server with programmed failures: when, how often, and never where it could do harm."""

import time

import pytest

from tests.engine.client.flaky import Refuse, flaky
from weftline import errors
from weftline.engine.client.client import Client
from weftline.engine.client.steps import Unavailable
from weftline.engine.request import RequestOptions


def test_a_request_the_server_cannot_take_now_is_sent_again() -> None:
    with flaky() as server, Client(server.url) as client:
        server.refusals = [Refuse("UNAVAILABLE"), Refuse("RESOURCE_EXHAUSTED", pushback_ms="1")]
        assert client.run("m", x="a")["x"] == "a"
        assert len(server.seen) == 3


def test_pushback_is_honoured() -> None:
    with flaky() as server, Client(server.url) as client:
        client.describe("m")
        server.refusals = [Refuse("UNAVAILABLE", pushback_ms="300")]
        started_s = time.monotonic()
        client.run("m", x="a")
        assert time.monotonic() - started_s >= 0.3


@pytest.mark.parametrize(
    ("refuse", "kind"),
    [
        (Refuse("UNAVAILABLE", pushback_ms="-1"), Unavailable),
        (Refuse("RESOURCE_EXHAUSTED"), errors.LimitReached),
        (Refuse("INTERNAL"), errors.WeftlineError),
        (Refuse("INVALID_ARGUMENT"), errors.InputError),
    ],
)
def test_what_is_not_worth_it_is_sent_once(refuse: Refuse, kind: type[Exception]) -> None:
    with flaky() as server, Client(server.url) as client:
        server.always = refuse
        with pytest.raises(kind, match="not now") as refused:
            client.run("m", x="a")
        assert refused.value.__context__ is None  # or its traceback would be three
        assert len(server.seen) == 1


def test_no_retries_when_there_are_to_be_none() -> None:
    with flaky() as server, Client(server.url, retries=0) as client:
        server.always = Refuse("UNAVAILABLE", pushback_ms="70")
        with pytest.raises(Unavailable) as refused:
            client.run("m", x="a")
        assert len(server.seen) == 1 and refused.value.retry_after_s == 0.07


def test_a_request_of_a_sequence_is_sent_once() -> None:
    with flaky() as server, Client(server.url) as client:
        server.always = Refuse("UNAVAILABLE")
        with pytest.raises(Unavailable):
            client.run("m", RequestOptions(sequence="s"), x="a")
        assert len(server.seen) == 1


def test_a_server_that_refuses_everybody_sees_a_tenth_more_at_most() -> None:
    with flaky() as server, Client(server.url) as client:
        client.describe("m")
        server.always = Refuse("UNAVAILABLE", pushback_ms="0")
        for _ in range(100):
            with pytest.raises(Unavailable):
                client.run("m", x="a")
        assert 100 < len(server.seen) <= 110


def test_retries_end_with_the_deadline() -> None:
    with flaky() as server, Client(server.url) as client:
        client.describe("m")
        server.always = Refuse("UNAVAILABLE", pushback_ms="60000")
        started_s = time.monotonic()
        with pytest.raises(Unavailable):
            client.run("m", RequestOptions(deadline_ms=2000), x="a")
        assert time.monotonic() - started_s < 20 and len(server.seen) == 1


def test_a_stream_that_has_not_begun_is_sent_again_and_one_that_has_is_not() -> None:
    with flaky() as server, Client(server.url) as client:
        server.refusals = [Refuse("UNAVAILABLE", pushback_ms="1")]
        assert [one.value for one in client.stream("m", x="a")] == ["one ", "two ", "three", "one two three"]
        assert len(server.seen) == 2
        server.dies_after = 1
        stream = client.stream("m", x="a")
        assert next(stream).value == "one "
        with pytest.raises(Unavailable, match="gone"):
            next(stream)
        assert len(server.seen) == 3 and list(stream) == []


def test_a_server_without_types_streams_what_it_sends() -> None:
    with flaky() as server, Client(server.url) as client:
        server.type = ""
        assert [(one.value.tolist(), one.last) for one in client.stream("m", x="a")][-1] == ([b"three"], False)


def test_an_error_in_a_stream_is_raised() -> None:
    with flaky() as server, Client(server.url) as client:
        server.error_message = "it broke"
        with pytest.raises(errors.WeftlineError, match="it broke"):
            next(client.stream("m", x="a"))


def test_a_model_is_described_once_and_again_when_its_version_changes() -> None:
    with flaky() as server, Client(server.url) as client:
        for _ in range(3):
            client.run("m", x="a")
        assert server.described == 1
        server.version = "2"
        client.run("m", x="a")
        server.datatype, server.type = "INT32", ""
        assert client.run("m", x=[5])["x"].tolist() == [5]
        assert server.described == 2


def test_an_answer_that_is_no_answer_is_an_error() -> None:
    with flaky() as server, Client(server.url) as client:
        server.answer = b"\xff\xff\xff"
        with pytest.raises(errors.WeftlineError, match="cannot be read"):
            client.run("m", x="a")


def test_what_a_server_does_not_do_is_said() -> None:
    with (
        flaky() as server,
        Client(server.url) as client,
        pytest.raises(errors.WeftlineError, match="does not support this"),
    ):
        client.models()


def test_no_token_is_sent_unless_there_is_one() -> None:
    with flaky() as server:
        with Client(server.url) as client:
            client.run("m", x="a")
        with Client(server.url, token="wl_secret") as client:
            client.run("m", x="a")
    assert [one.get("authorization") for one in server.metadata] == [None, "Bearer wl_secret"]


def test_no_environment_variable_sends_a_token_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "grpc_proxy", "https_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    with flaky() as server, Client(server.url, token="wl_secret", retries=0) as client:
        client.run("m", x="a")
