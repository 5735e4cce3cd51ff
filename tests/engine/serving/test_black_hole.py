"""A network that swallows packets: neither a server nor a client waits for ever for who cannot be reached any more."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.engine.serving.black_hole import black_hole
from tests.engine.serving.grpc.served import ENDLESS, Served, served_in_thread
from tests.engine.serving.http.backends import Functions, chatting
from tests.engine.serving.http.hosted import hosted
from weftline import errors
from weftline.engine.client import channel
from weftline.engine.client.client import Client
from weftline.engine.serving.backend import Ask
from weftline.engine.serving.config import ServeLimits

HI = [{"role": "user", "content": "hi"}]
LIMITS = ServeLimits(keepalive_s=0.4, keepalive_wait_s=0.3)
"""A kernel counts whole seconds, and takes these for 1 s and 1 s."""

FOUND_S = 20.0
"""Far longer than it takes, and far shorter than the quarter of an hour after which Linux itself gives up."""


def eventually(holds: Callable[[], bool]) -> float:
    """Wait until it holds and return how many seconds that took."""
    began = time.monotonic()
    while not holds():
        assert time.monotonic() - began < FOUND_S
        time.sleep(0.01)
    return time.monotonic() - began


def port_of(server: Served) -> int:
    return int(server.address.rpartition(":")[2])


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    with served_in_thread({"endless": ENDLESS}, limits=LIMITS) as one:
        yield one


@pytest.mark.slow
def test_clients_that_vanished_take_their_requests_along_grpc(server: Served) -> None:
    def ask(client: Client, quiet: bool) -> None:
        with contextlib.suppress(errors.WeftlineError):
            client.run("endless", text="x") if quiet else list(client.stream("endless", text="x"))

    with contextlib.ExitStack() as stack:
        network = stack.enter_context(black_hole(port_of(server)))
        clients = [stack.enter_context(Client(network.address, retries=0)) for _ in range(2)]
        asking = [threading.Thread(target=ask, args=(one, bool(at))) for at, one in enumerate(clients)]
        for thread in asking:
            thread.start()
        eventually(lambda: server.open_requests("endless") == 2)
        network.swallow()
        print(f"withdrawn after {eventually(lambda: server.open_requests('endless') == 0):.1f} s")
        for client in clients:
            client.close()
        for thread in asking:
            thread.join()


@pytest.mark.slow
def test_a_client_whose_server_vanished_gets_an_error(server: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channel, "KEEPALIVE_MS", 300)
    monkeypatch.setattr(channel, "KEEPALIVE_WAIT_MS", 300)
    with black_hole(port_of(server)) as network, Client(network.address, retries=0) as client:
        stream = client.stream("endless", text="x")
        next(stream)
        network.swallow()
        took_s = time_until_error(stream)
    print(f"error after {took_s:.1f} s")


def time_until_error(stream: Iterator[Any]) -> float:
    """Read on until it is said that the server cannot be reached; return how many seconds that took."""
    seen: list[BaseException] = []

    def read() -> None:
        try:
            for _ in stream:
                pass
        except errors.WeftlineError as error:
            seen.append(error)

    reading = threading.Thread(target=read, daemon=True)
    reading.start()
    took_s = eventually(lambda: not reading.is_alive())
    assert [error.status for error in seen if isinstance(error, errors.WeftlineError)] == ["UNAVAILABLE"], seen
    return took_s


@pytest.mark.slow
def test_clients_that_vanished_take_their_requests_along_http() -> None:
    async def never(ask: Ask) -> dict[str, Any]:
        await asyncio.sleep(600)
        return {}

    async def endless(ask: Ask) -> dict[str, Any]:
        return {"text": "x" * 100_000}

    served = Functions({"never": chatting(never, "never"), "endless": chatting(endless, "endless")}, piece_s=0.05)
    with hosted(served, limits=LIMITS) as endpoint, black_hole(endpoint.port) as network:
        clients = [http.client.HTTPConnection("127.0.0.1", network.port) for _ in range(2)]
        for client, model in zip(clients, served.models, strict=True):
            body = json.dumps({"model": model, "messages": HI, "stream": model == "endless"})
            client.request("POST", "/v1/chat/completions", body)
        eventually(lambda: len(served.asked) == 2)
        network.swallow()
        print(f"withdrawn after {eventually(lambda: len(served.withdrawn) == 2):.1f} s")
        for client in clients:
            client.close()
