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

from tests.engine.ingress.black_hole import black_hole
from tests.engine.ingress.grpc_door.served import ENDLESS, Served, served_in_thread
from tests.engine.ingress.http_door.backends import Functions, chatting
from tests.engine.ingress.http_door.hosted import hosted
from weftline import errors
from weftline.engine.client import channel
from weftline.engine.client.client import Client
from weftline.engine.ingress.backend import Ask
from weftline.engine.ingress.config import ServeLimits

HI = [{"role": "user", "content": "hi"}]
LIMITS = ServeLimits(keepalive_s=1, keepalive_wait_s=1)
FOUND_S = 20.0
"""Far longer than it takes (2 s), and far shorter than the quarter of an hour after which Linux itself gives up."""


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


@pytest.mark.parametrize("quiet", [False, True])
def test_a_client_that_vanished_takes_its_requests_along_at_the_grpc_door(server: Served, quiet: bool) -> None:
    def ask() -> None:
        with contextlib.suppress(errors.WeftlineError):
            client.run("endless", text="x") if quiet else list(client.stream("endless", text="x"))

    with black_hole(port_of(server)) as network, Client(network.address, retries=0) as client:
        asking = threading.Thread(target=ask)
        asking.start()
        eventually(lambda: server.open_requests("endless") == 1)
        network.swallow()
        print(f"withdrawn after {eventually(lambda: server.open_requests('endless') == 0):.1f} s")
        client.close()
        asking.join()


def test_a_client_whose_server_vanished_is_told(server: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channel, "KEEPALIVE_MS", 500)
    monkeypatch.setattr(channel, "KEEPALIVE_WAIT_MS", 500)
    with black_hole(port_of(server)) as network, Client(network.address, retries=0) as client:
        stream = client.stream("endless", text="x")
        next(stream)
        network.swallow()
        took_s = eventually_told(stream)
    print(f"told after {took_s:.1f} s")


def eventually_told(stream: Iterator[Any]) -> float:
    """Read on until it is said that the server cannot be reached; return how many seconds that took."""
    told: list[BaseException] = []

    def read() -> None:
        try:
            for _ in stream:
                pass
        except errors.WeftlineError as error:
            told.append(error)

    reading = threading.Thread(target=read, daemon=True)
    reading.start()
    took_s = eventually(lambda: not reading.is_alive())
    assert [error.status for error in told if isinstance(error, errors.WeftlineError)] == ["UNAVAILABLE"], told
    return took_s


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_vanished_takes_its_requests_along_at_the_http_door(stream: bool) -> None:
    async def never(ask: Ask) -> dict[str, Any]:
        await asyncio.sleep(600)
        return {}

    async def endless(ask: Ask) -> dict[str, Any]:
        return {"text": "x" * 100_000}

    served = Functions({"never": chatting(never, "never"), "endless": chatting(endless, "endless")}, piece_s=0.05)
    body = json.dumps({"model": "endless" if stream else "never", "messages": HI, "stream": stream})
    with hosted(served, limits=LIMITS) as door, black_hole(door.port) as network:
        client = http.client.HTTPConnection("127.0.0.1", network.port)
        client.request("POST", "/v1/chat/completions", body)
        eventually(lambda: bool(served.asked))
        network.swallow()
        print(f"withdrawn after {eventually(lambda: bool(served.withdrawn)):.1f} s")
        client.close()
