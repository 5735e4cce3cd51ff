"""Calls beside inference, against a real server."""

import pytest

from tests.engine.serving.grpc.served import Served
from weftline import errors
from weftline.engine.client.client import Client
from weftline.engine.request import RequestOptions
from weftline.nodes.urgency import SequencePart


@pytest.mark.slow
def test_a_server_is_live_and_ready(client: Client) -> None:
    assert client.live() and client.ready() and client.ready("fails")


@pytest.mark.slow
def test_models_are_listed_with_their_states(client: Client) -> None:
    found = {one.name: one for one in client.models()}
    assert found["fails"].ready and found["fails"].version >= 1
    assert list(found) == sorted(found)


def test_figures_count_requests_and_failures(client: Client) -> None:
    before = client.stats("fails")["fails"]
    client.run("fails", x="a")
    with pytest.raises(errors.StepError):
        client.run("fails", x="bad")
    after = client.stats("fails")["fails"]
    assert (after.requests - before.requests, after.failed - before.failed) == (1, 1)
    assert after.total_ms > 0 and after.calls > before.calls and after.batch >= 1
    assert "fails.only" in client.stats("fails") and "remember" in client.stats()


@pytest.mark.slow
def test_a_model_is_unloaded_and_loaded_again(server: Served, client: Client) -> None:
    version = client.load("remember")
    assert version > 1
    client.unload("remember")
    assert not client.ready("remember")
    with pytest.raises(errors.WeftlineError):
        client.run("remember", x="a")
    client.load("remember")
    assert client.run("remember", RequestOptions(sequence=SequencePart("q", start=True)), x="a")["y"] == "a"


def test_a_model_that_is_not_configured_cannot_be_loaded(client: Client) -> None:
    with pytest.raises(errors.UnknownModel):
        client.load("../../etc/passwd")


def test_a_server_that_drains_is_live_and_not_ready(server: Served, client: Client) -> None:
    assert server.loop is not None
    server.loop.call_soon_threadsafe(server.server.set_serving, False)
    try:
        assert not client.ready()
    finally:
        server.loop.call_soon_threadsafe(server.server.set_serving, True)
