"""One client that fills a limit of the HTTP server keeps no other client out."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import socket
import time
from collections.abc import Iterator
from typing import Any

import pytest
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from tests.engine.serving.grpc.requests import wait_until
from tests.engine.serving.http.hosted import Hosted, hosted
from weftline.engine.serving.backend import Answer, Ask
from weftline.engine.serving.config import ServeLimits
from weftline.engine.serving.http import connection as http_connection

GET = b"GET /livez HTTP/1.1\r\nhost: a\r\n\r\n"


class Silent:
    """A backend without models whose metrics take until the end of the test."""

    def index(self) -> tuple[()]:
        return ()

    async def metrics(self) -> bytes:
        await asyncio.sleep(3600)
        return b""

    async def ask(self, ask: Ask) -> Answer:
        raise AssertionError("no model is asked")


@pytest.fixture
def server() -> Iterator[Hosted]:
    backend: Any = Silent()
    with hosted(backend, limits=ServeLimits(connections_max=32)) as one:
        yield one


@contextlib.contextmanager
def connections(server: Hosted, said: bytes, count: int) -> Iterator[list[socket.socket]]:
    with contextlib.ExitStack() as stack:
        opened = [stack.enter_context(socket.create_connection(("127.0.0.1", server.port))) for _ in range(count)]
        for one in opened:
            one.setblocking(False)
            with contextlib.suppress(BlockingIOError, ConnectionError):
                one.send(said)
        yield opened


def is_well(server: Hosted, path: str = "/v2") -> bool:
    client = http.client.HTTPConnection("127.0.0.1", server.port, timeout=10)
    with contextlib.closing(client):
        client.request("GET", path)
        return client.getresponse().status == 200


def protocols(server: Hosted) -> list[Any]:
    running: Any = server.server._server
    return list(running.server_state.connections)


def test_pipelined_requests_are_read_as_they_are_answered(server: Hosted) -> None:
    count = 2_000
    with socket.create_connection(("127.0.0.1", server.port)) as one:
        one.setblocking(False)
        left, received, waiting_max = memoryview(GET * count), 0, 0
        until_s = time.monotonic() + 30
        while received < count:
            assert time.monotonic() < until_s, f"{received} answers"
            with contextlib.suppress(BlockingIOError):
                left = left[one.send(left[:100_000]) :] if left else left
            with contextlib.suppress(BlockingIOError):
                received += one.recv(1 << 20).count(b"HTTP/1.1 200 OK")
            waiting_max = max([waiting_max, *(len(each.pipeline) for each in protocols(server))])
        assert waiting_max <= 1


def test_a_request_with_others_behind_it_is_not_read_past(server: Hosted, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_connection, "UNREAD_BYTES_MAX", 1 << 20)
    first = b"GET /metrics HTTP/1.1\r\nhost: a\r\n\r\n"
    with connections(server, first + GET * 5000, 16) as opened:
        wait_until(lambda: 0 < len(protocols(server)) < 16)
        for one in opened:
            with contextlib.suppress(OSError):
                one.send(GET * 5000)
        assert is_well(server)
        kept = sum(len(each._kept) for each in protocols(server))
        assert kept <= 1 << 20
        assert all(len(each.pipeline) <= 1 for each in protocols(server))
    wait_until(lambda: not protocols(server))


def test_a_chunked_body_with_requests_behind_it_is_bounded(server: Hosted) -> None:
    first = b"GET /metrics HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\n1\r\na\r\n0\r\n\r\n"
    with connections(server, first + GET * 5000, 1):
        wait_until(lambda: any(each._kept for each in protocols(server)))
        assert all(len(each.pipeline) <= 1 for each in protocols(server))


@pytest.mark.parametrize("said", [b"", b"GET /v2 HTTP/1.1\r\n", GET], ids=["nothing", "half a request", "a probe"])
def test_idle_connections_keep_no_client_out(server: Hosted, said: bytes) -> None:
    with connections(server, said, 60):
        for _ in range(5):
            assert is_well(server)
        wait_until(lambda: len(protocols(server)) <= 32 + 8)


def test_late_connections_without_a_request_are_closed(server: Hosted, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("weftline.engine.serving.connection_table.LATE_S", 0.2)
    monkeypatch.setattr(http_connection, "LATE_S", 0.2)
    with connections(server, b"", 36):
        wait_until(lambda: len(protocols(server)) == 36)
        wait_until(lambda: len(protocols(server)) == 32)


def test_chunks_of_a_byte_are_parsed_in_turns(server: Hosted, monkeypatch: pytest.MonkeyPatch) -> None:
    begun = b"POST /v2/repository/index HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\n"
    said = begun + b"1\r\n \r\n" * 20_000 + b"0\r\n\r\n"
    bodies: list[int] = []
    parsed = HttpToolsProtocol.data_received

    def counted(protocol: Any, data: bytes) -> None:
        parsed(protocol, data)
        bodies.append(len(data))

    turns: list[int] = []
    parse = http_connection.LimitedProtocol._parse

    def turn(protocol: Any, data: bytes, turn_s: float) -> None:
        before = len(bodies)
        parse(protocol, data, turn_s)
        turns.append(len(bodies) - before)

    monkeypatch.setattr(HttpToolsProtocol, "data_received", counted)
    monkeypatch.setattr(http_connection.LimitedProtocol, "_parse", turn)
    monkeypatch.setattr("weftline.engine.serving.turns.TURN_S", 0.0)
    monkeypatch.setattr("weftline.engine.serving.turns.SHORT_TURN_S", 0.0)
    with contextlib.ExitStack() as stack:
        for one in [stack.enter_context(socket.create_connection(("127.0.0.1", server.port))) for _ in range(4)]:
            one.sendall(said)
            one.settimeout(10)
            assert one.recv(100).startswith(b"HTTP/1.1 200")
    assert max(turns) <= 2 and sum(turns) > 4 * len(said) // http_connection.CHUNKED_BYTES // 2
