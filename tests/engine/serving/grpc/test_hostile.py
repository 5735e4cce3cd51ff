"""Hostile HTTP/2 frames to the gRPC server: connections that fall silent, and streams that are reset at once.

The figures of a healthy client beside thousands of them are a benchmark's, `benchmarks/ingress_hostile.py`.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import pytest

from benchmarks.ingress_hostile import (
    CANCEL,
    HEADERS,
    PREFACE,
    REFERENCE,
    RST_STREAM,
    SETTINGS,
    frame,
    headers,
    remembered,
)
from tests.engine.serving.grpc.requests import METHOD, call_bytes, request, text_request, wait_until
from tests.engine.serving.grpc.served import ECHO, ENDLESS, Served, served_in_thread
from weftline.engine.serving.config import ServeLimits

DATA, SETTINGS_FRAME, PING, ACK = 0, 4, 6, 1
LIMITS = ServeLimits(header_s=1.0, keepalive_s=0.5, keepalive_wait_s=0.3)


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    with served_in_thread({"echo": ECHO, "endless": ENDLESS}, limits=LIMITS) as one:
        yield one


@contextmanager
def connections(server: Served, said: bytes, count: int) -> Iterator[list[socket.socket]]:
    """Open connections that send these bytes and nothing more."""
    host, _, port = server.address.rpartition(":")
    with ExitStack() as stack:
        opened = [stack.enter_context(socket.create_connection((host, int(port)))) for _ in range(count)]
        for one in opened:
            one.sendall(said)
            one.setblocking(False)
        yield opened


def is_closed(one: socket.socket) -> bool:
    """Return True if the server has closed a connection; received bytes are discarded."""
    try:
        while one.recv(65536):
            pass
    except BlockingIOError:
        return False
    except OSError:
        return True
    return True


def is_well(server: Served) -> bool:
    return len(call_bytes(server.address, request().SerializeToString())) > 3


BEGUN = frame(HEADERS, 4, 1, headers(METHOD.encode() + b"ModelInfer"))


SILENT = {
    "nothing": b"",
    "half of a greeting": PREFACE[:10],
    "a greeting": PREFACE + SETTINGS,
    "the beginning of a call": PREFACE + SETTINGS + BEGUN[:20],
    "a call without its message": PREFACE + SETTINGS + BEGUN,
    "the beginning of a message": PREFACE + SETTINGS + BEGUN + frame(DATA, 0, 1, b"\0\0\1\0\0" + bytes(9)),
}
"""Bytes that connections send before they fall silent and answer no ping."""


@pytest.mark.slow
def test_silent_connections_are_closed_and_delay_no_others(server: Served) -> None:
    with ExitStack() as stack:
        opened = {what: stack.enter_context(connections(server, said, 20)) for what, said in SILENT.items()}
        assert is_well(server)
        for what, some in opened.items():
            took_s = wait_until(lambda some=some: all(map(is_closed, some)))  # type: ignore[misc]
            print(f"{what}: ended after {took_s:.1f} s more")


def test_calls_that_are_taken_back_at_once_leave_nothing(server: Served) -> None:
    """CVE-2023-44487: a stream that is reset counts against no limit on streams."""
    call, ask = headers(METHOD.encode() + b"ModelInfer"), text_request("endless", "x").SerializeToString()
    message = b"\0" + len(ask).to_bytes(4, "big") + ask

    def begin(at: int) -> bytes:
        return frame(HEADERS, 4, at, call) + frame(DATA, 1, at, message)

    def take_back(at: int) -> bytes:
        return frame(RST_STREAM, 0, at, CANCEL)

    first, rapid = range(1, 41, 2), range(41, 4041, 2)
    with connections(server, PREFACE + SETTINGS + b"".join(map(begin, first)), 1) as (connection,):
        wait_until(lambda: server.open_requests("endless") == len(first))
        connection.setblocking(True)
        connection.sendall(b"".join(map(take_back, first)) + b"".join(begin(at) + take_back(at) for at in rapid))
        assert is_well(server)
        wait_until(lambda: server.open_requests("endless") == 0)
    requests = server.backend.stats("endless")["requests"]
    assert requests["admitted"] == requests["cancelled"] >= len(first)


def test_a_header_cannot_be_sent_once_and_referred_to_thousands_of_times(server: Served) -> None:
    call = headers(METHOD.encode() + b"ModelInfer")
    acknowledged = frame(SETTINGS_FRAME, ACK, 0, b"")
    once = frame(HEADERS, 4, 1, call + remembered())
    often = frame(HEADERS, 4, 3, call + 16_000 * REFERENCE)
    with connections(server, PREFACE + SETTINGS + acknowledged + once + often, 5) as opened:
        wait_until(lambda: all(map(is_closed, opened)))
    assert is_well(server)


def test_a_client_that_never_acknowledges_settings_is_disconnected(server: Served) -> None:
    with connections(server, PREFACE + SETTINGS, 1) as (one,):
        one.setblocking(True)
        one.settimeout(30)
        with contextlib.suppress(ConnectionError):
            while said := one.recv(65536):
                for at in range(0, len(said) - 8):
                    if said[at : at + 9] == frame(PING, 0, 0, bytes(8))[:9]:
                        one.sendall(frame(PING, ACK, 0, said[at + 9 : at + 17]))
    assert is_well(server)
