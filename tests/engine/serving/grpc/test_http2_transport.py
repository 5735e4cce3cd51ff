"""gRPC's protocol over real sockets, frame by frame: malformed calls, floods, identity, shutdown, lifetimes."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import random
import socket
import statistics
import struct
import time
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace, TracebackType
from typing import Any

import hpack
import psutil
import pytest

from benchmarks.ingress_hostile import CANCEL, PREFACE, REFERENCE, SETTINGS, frame, headers, remembered
from tests.engine.serving.grpc.requests import METHOD, request, text_request, wait_until
from tests.engine.serving.grpc.served import ECHO, ENDLESS, TEXT, Served, served_in_thread
from weftline.engine.runtime.byte_budget import ByteBudget
from weftline.engine.serving.auth.tokens import digest
from weftline.engine.serving.config import ServeLimits
from weftline.engine.serving.grpc import http2_transport
from weftline.engine.serving.grpc.http2_transport import GrpcCall, GrpcConnection
from weftline.engine.serving.grpc.nghttp2 import (
    ENHANCE_YOUR_CALM,
    PROTOCOL_ERROR,
    STREAM_WINDOW_BYTES,
    Http2Connection,
    Http2Stream,
)
from weftline.engine.serving.grpc.service import InferMethod
from weftline.errors import DeadlineExceeded

DATA, HEADERS, PRIORITY, RST_STREAM, SETTING, PING, GOAWAY, WINDOW_UPDATE, CONTINUATION = 0, 1, 2, 3, 4, 6, 7, 8, 9
END_STREAM = ACK = 1
END_HEADERS = 4
FLOW_CONTROL_ERROR = 3
STREAM_CLOSED_SETTINGS = struct.pack(">HI", 4, 0)  # SETTINGS_INITIAL_WINDOW_SIZE = 0

OK, CANCELLED, INVALID, DEADLINE, EXHAUSTED, UNIMPLEMENTED, INTERNAL, UNAVAILABLE, UNAUTHENTICATED = (
    b"0", b"1", b"3", b"4", b"8", b"12", b"13", b"14", b"16",
)  # fmt: skip
INFER, STREAM, WATCH = METHOD + "ModelInfer", METHOD + "ModelStreamInfer", "/grpc.health.v1.Health/Watch"

Fields = Sequence[tuple[str, str]]


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    limits = ServeLimits(connections_max=64, message_bytes_max=1 << 20)
    with served_in_thread({"echo": ECHO, "text": TEXT, "endless": ENDLESS}, limits=limits) as one:
        yield one


@pytest.fixture(autouse=True)
def no_error_is_logged(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    yield
    gc.collect()  # tasks whose exception was never retrieved
    assert [one.getMessage() for one in caplog.get_records("call") if one.levelno >= logging.ERROR] == []


@dataclass
class Reply:
    """Frames of one stream."""

    fields: dict[bytes, bytes] = field(default_factory=dict)
    body: bytes = b""
    ended: bool = False
    error: int | None = None
    window: int = 0  # sum of the window updates

    @property
    def status(self) -> bytes:
        return self.fields[b"grpc-status"]


def call(path: str = INFER, extra: Fields = (), without: str = "", **changed: str) -> Fields:
    """Return the header fields of a call."""
    fields = {
        ":method": "POST",
        ":scheme": "http",
        ":path": path,
        ":authority": "a",
        "content-type": "application/grpc",
    }
    fields |= {"te": "trailers"} | {name.replace("_", "-"): value for name, value in changed.items()}
    return [*((name, value) for name, value in fields.items() if name != without), *extra]


def message(data: bytes, compressed: int = 0) -> bytes:
    return bytes([compressed]) + len(data).to_bytes(4, "big") + data


ASK = message(request().SerializeToString())
ASK_ENDLESS = message(text_request("endless", "x").SerializeToString())
WATCH_ALL = message(b"")


class Wire:
    """A client that sends the frames of a test, and answers the server's SETTINGS and PING."""

    def __init__(self, server: Served, settings: bytes = b"", greeting: bytes = b"") -> None:
        host, _, port = server.address.rpartition(":")
        self.socket = socket.create_connection((host, int(port)), 20)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.encoder, self._decoder = hpack.Encoder(), hpack.Decoder()
        self.replies: dict[int, Reply] = {}
        self.goaway: int | None = None
        self.closed = False
        self._received = b""
        self.send(greeting or PREFACE + frame(SETTING, 0, 0, settings))

    def __enter__(self) -> Wire:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.socket.close()

    def send(self, *frames: bytes) -> None:
        """Send frames; the server may have closed the connection before their end."""
        with contextlib.suppress(ConnectionError):
            self.socket.sendall(b"".join(frames))

    def begin(self, stream: int, fields: Fields, flags: int = 0) -> bytes:
        return frame(HEADERS, END_HEADERS | flags, stream, self.encoder.encode(fields))

    def ask(self, stream: int, fields: Fields, *parts: bytes) -> bytes:
        """Return the frames of a call whose last part ends it."""
        frames = [frame(DATA, int(at == len(parts)), stream, part) for at, part in enumerate(parts, 1)]
        return self.begin(stream, fields) + b"".join(frames)

    def receive(self, within_s: float) -> bool:
        """Process what comes next; returns False if nothing does."""
        self.socket.settimeout(max(within_s, 0.001))
        try:
            data = self.socket.recv(1 << 16)
        except TimeoutError:
            return False
        except ConnectionError:
            data = b""
        if not data:
            self.closed = True
            return False
        self._received += data
        while len(self._received) >= 9 and len(self._received) >= (
            size := 9 + int.from_bytes(self._received[:3], "big")
        ):
            one, self._received = self._received[:size], self._received[size:]
            self._on_frame(one[3], one[4], int.from_bytes(one[5:9], "big"), one[9:])
        return True

    def _on_frame(self, kind: int, flags: int, stream: int, payload: bytes) -> None:
        reply = self.replies.setdefault(stream, Reply())
        if kind == HEADERS:
            reply.fields |= dict(self._decoder.decode(payload, raw=True))
        elif kind == DATA:
            reply.body += payload
        elif kind == RST_STREAM:
            reply.error = int.from_bytes(payload, "big")
        elif kind == WINDOW_UPDATE:
            reply.window += int.from_bytes(payload, "big")
        elif kind == GOAWAY:
            self.goaway = int.from_bytes(payload[4:8], "big")
        elif kind in (SETTING, PING) and not flags & ACK:
            self.send(frame(kind, ACK, 0, payload if kind == PING else b""))
        reply.ended |= kind == RST_STREAM or (kind in (HEADERS, DATA) and bool(flags & END_STREAM))

    def wait(self, stream: int, within_s: float = 20.0) -> Reply:
        """Receive until a stream has ended."""
        until_s = time.monotonic() + within_s
        while not self.replies.setdefault(stream, Reply()).ended:
            self.receive(until_s - time.monotonic())
            assert not self.closed, f"the connection was closed, GOAWAY {self.goaway}"
            assert time.monotonic() < until_s, f"no end of stream {stream}: {self.replies[stream]}"
        return self.replies[stream]

    def wait_body(self, stream: int, within_s: float = 20.0) -> None:
        until_s = time.monotonic() + within_s
        while not self.replies.setdefault(stream, Reply()).body:
            self.receive(until_s - time.monotonic())
            assert not self.closed and time.monotonic() < until_s

    def wait_closed(self, within_s: float = 20.0) -> int | None:
        """Receive until the server closes the connection; returns the code of its GOAWAY."""
        until_s = time.monotonic() + within_s
        while not self.closed:
            self.receive(until_s - time.monotonic())
            assert time.monotonic() < until_s, "the connection is still open"
        return self.goaway


def transport(server: Served) -> Any:
    return server.server._transport


def is_well(server: Served) -> None:
    """Check that another client is served, and that no call is left of those before."""
    with Wire(server) as wire:
        wire.send(wire.ask(1, call(), ASK))
        assert wire.wait(1).status == OK
    wait_until(lambda: transport(server).calls == 0 and server.open_requests("endless") == 0)


# calls


CALLS: dict[str, tuple[Fields, Sequence[bytes], bytes]] = {
    "a call": (call(), [ASK], OK),
    "byte by byte": (call(), [ASK[at : at + 1] for at in range(len(ASK))], OK),
    "without te": (call(without="te"), [ASK], OK),
    "content-type with a suffix": (call(content_type="application/grpc+proto"), [ASK], OK),
    "a long deadline": (call(grpc_timeout="99999999H"), [ASK], OK),
    "grpc-encoding identity": (call(grpc_encoding="identity"), [ASK], OK),
    "grpc-encoding gzip": (call(grpc_encoding="gzip"), [ASK], UNIMPLEMENTED),
    "a compressed message": (call(), [message(ASK, 1)], UNIMPLEMENTED),
    "two messages": (call(), [ASK, ASK], UNIMPLEMENTED),
    "two messages in one frame": (call(), [ASK + ASK], UNIMPLEMENTED),
    "no message": (call(), [b""], INTERNAL),
    "half a prefix": (call(), [b"\0\0\0"], INTERNAL),
    "half a message": (call(), [ASK[:-3]], INTERNAL),
    "a message of 4 GiB": (call(), [b"\0\xff\xff\xff\xff"], EXHAUSTED),
    "an unknown method": (call(METHOD + "Nothing"), [ASK], UNIMPLEMENTED),
    "an empty grpc-timeout": (call(grpc_timeout="S"), [ASK], INTERNAL),
    "nine digits": (call(grpc_timeout="123456789S"), [ASK], INTERNAL),
    "a negative grpc-timeout": (call(grpc_timeout="-1S"), [ASK], INTERNAL),
    "a deadline that has passed": (call(grpc_timeout="1n"), [ASK], DEADLINE),
    "metadata that is too large": (call(extra=[("x-a", "a" * 20_000)]), [ASK], EXHAUSTED),
    "half a message in a stream": (call(STREAM), [ASK[:-3]], INTERNAL),
    "a compressed message in a stream": (call(STREAM), [message(ASK, 1)], UNIMPLEMENTED),
    "a message of 4 GiB in a stream": (call(STREAM), [b"\0\xff\xff\xff\xff"], EXHAUSTED),
    "a stream whose deadline has passed": (call(STREAM, grpc_timeout="0n"), [ASK_ENDLESS], DEADLINE),
    "a stream without messages": (call(STREAM), [b""], OK),
}


@pytest.mark.parametrize("pause", [False, True], ids=["at once", "frame by frame"])
@pytest.mark.parametrize("what", CALLS)
def test_a_call_ends_with_its_status(server: Served, what: str, pause: bool) -> None:
    fields, parts, status = CALLS[what]
    with Wire(server) as wire:
        if pause:
            wire.send(wire.begin(1, fields))
            for at, part in enumerate(parts, 1):
                wire.receive(0.02 if at == 1 else 0)
                wire.send(frame(DATA, int(at == len(parts)), 1, part))
        else:
            wire.send(wire.ask(1, fields, *parts))
        reply = wire.wait(1)
        assert (reply.fields[b":status"], reply.status) == (b"200", status), reply
        if status == UNIMPLEMENTED and "method" not in what:
            assert reply.fields[b"grpc-accept-encoding"] == b"identity"
        wire.send(wire.ask(3, call(), ASK))
        assert wire.wait(3).status == OK  # the connection is as before
    is_well(server)


@pytest.mark.parametrize(
    ("fields", "status"),
    [
        (call(content_type="application/json"), b"415"),
        (call(content_type="application/grpcx"), b"415"),
        (call(without="content-type"), b"415"),
        ([(":method", "GET"), (":scheme", "http"), (":path", INFER), (":authority", "a")], b"405"),
    ],
)
def test_a_request_that_is_not_grpc_gets_a_status_of_http(server: Served, fields: Fields, status: bytes) -> None:
    with Wire(server) as wire:
        wire.send(wire.ask(1, fields, b"hello"))
        assert wire.wait(1).fields == {b":status": status}
    is_well(server)


@pytest.mark.parametrize("path", [INFER, STREAM])
def test_the_deadline_passes_while_the_message_has_not_arrived(server: Served, path: str) -> None:
    with Wire(server) as wire:
        wire.send(wire.begin(1, call(path, grpc_timeout="300m")), frame(DATA, 0, 1, ASK[:-1]))
        assert wire.wait(1, 5).status == DEADLINE
    is_well(server)


def test_deadline_of_a_stream_of_responses(server: Served) -> None:
    with Wire(server) as wire:
        wire.send(wire.ask(1, call(STREAM, grpc_timeout="400m"), ASK_ENDLESS))
        reply = wire.wait(1, 5)
        assert reply.status == DEADLINE and reply.body
    is_well(server)


@pytest.mark.parametrize(("path", "data"), [(INFER, ASK_ENDLESS), (STREAM, ASK_ENDLESS), (WATCH, WATCH_ALL)])
@pytest.mark.parametrize("moment", ["with its request", "before a response", "after a response"])
def test_a_reset_cancels_a_call_at_any_moment(server: Served, path: str, data: bytes, moment: str) -> None:
    with Wire(server) as wire:
        begun = wire.begin(1, call(path)) + frame(DATA, int(path != STREAM), 1, data)
        reset = frame(RST_STREAM, 0, 1, CANCEL)
        if moment == "with its request":
            wire.send(begun, reset)
        else:
            wire.send(begun)
            if moment == "after a response" and path != INFER:
                wire.wait_body(1)
            elif path == WATCH:
                wait_until(lambda: transport(server).calls == 1)
            else:
                wait_until(lambda: server.open_requests("endless") == 1)
            wire.send(reset)
        wait_until(lambda: transport(server).calls == 0 and server.open_requests("endless") == 0)
        wire.send(wire.ask(3, call(), ASK))
        assert wire.wait(3).status == OK
    is_well(server)


def test_window_of_a_stream_shrinks_after_a_large_message(server: Served) -> None:
    """A raised window would let a client fill it again with messages that are not counted."""
    large = message(request(values=bytes(900_000)).SerializeToString())
    with Wire(server, struct.pack(">HI", 4, 1 << 30)) as wire:
        wire.send(frame(WINDOW_UPDATE, 0, 0, struct.pack(">I", 1 << 30)), wire.begin(1, call(STREAM)))
        wire.send(frame(DATA, 0, 1, large[:16_000]))
        wait_until(lambda: any(one.stream.block is not None for one in calls_of(server)))
        for at in range(16_000, len(large), 16_000):
            wire.send(frame(DATA, 0, 1, large[at : at + 16_000]))
        wire.wait_body(1)
        while wire.receive(0.3):
            pass
        left = STREAM_WINDOW_BYTES + wire.replies[1].window - len(large)
        assert len(ASK) < left <= STREAM_WINDOW_BYTES
        wire.send(frame(DATA, END_STREAM, 1, ASK))
        assert wire.wait(1).status == OK
    is_well(server)


def calls_of(server: Served) -> list[GrpcCall]:
    return [call for connection in list(transport(server).connections) for call in list(connection.calls)]


# floods


def flood(what: str) -> tuple[bytes, set[int | None]]:
    """Return the frames of a flood, and the codes with which the server may end the connection."""
    encoder = hpack.Encoder()
    begun = frame(HEADERS, END_HEADERS, 1, encoder.encode(call(STREAM)))
    calm: set[int | None] = {ENHANCE_YOUR_CALM, None}  # None: closed at once
    block = headers(INFER.encode())
    floods: dict[str, tuple[bytes, set[int | None]]] = {
        "ping": (20_000 * frame(PING, 0, 0, bytes(8)), calm),
        "settings": (20_000 * SETTINGS, calm),
        "empty data": (begun + 20_000 * frame(DATA, 0, 1, b""), calm),
        "priority": (begun + 20_000 * frame(PRIORITY, 0, 1, bytes(5)), calm),
        "window updates": (begun + 20_000 * frame(WINDOW_UPDATE, 0, 1, b"\0\0\0\1"), calm),
        "continuation": (frame(HEADERS, 0, 1, b"") + 100 * frame(CONTINUATION, 0, 1, b""), calm | {PROTOCOL_ERROR, 2}),
        "rapid reset": (
            b"".join(
                frame(HEADERS, END_HEADERS, at, block) + frame(RST_STREAM, 0, at, CANCEL) for at in range(1, 6001, 2)
            ),
            calm | {2},
        ),
        "references": (
            frame(HEADERS, END_HEADERS, 1, block + remembered())
            + frame(HEADERS, END_HEADERS, 3, block + 16_000 * REFERENCE),
            calm,
        ),
        "no window update": (begun + frame(WINDOW_UPDATE, 0, 0, bytes(4)), {PROTOCOL_ERROR}),
        "window overflow": (begun + frame(WINDOW_UPDATE, 0, 0, b"\x7f\xff\xff\xff"), {FLOW_CONTROL_ERROR}),
    }
    return floods[what]


FLOODS = [
    "ping", "settings", "empty data", "priority", "window updates", "continuation", "rapid reset", "references",
    "no window update", "window overflow",
]  # fmt: skip


@pytest.mark.parametrize("what", FLOODS)
def test_a_flood_ends_its_connection_and_holds_no_memory(server: Served, what: str) -> None:
    frames, codes = flood(what)
    is_well(server)
    before = psutil.Process().memory_info().rss
    for _ in range(5):
        with Wire(server) as wire:
            wire.send(frames)
            assert wire.wait_closed() in codes
    grown = psutil.Process().memory_info().rss - before
    print(f"{what}: {len(frames)} bytes, {grown >> 10} KiB more resident")
    assert grown < 32 << 20
    is_well(server)


def test_window_overflow_of_a_stream_resets_that_stream(server: Served) -> None:
    with Wire(server) as wire:
        wire.send(wire.begin(1, call(STREAM)), frame(WINDOW_UPDATE, 0, 1, b"\x7f\xff\xff\xff"))
        assert wire.wait(1).error == FLOW_CONTROL_ERROR
        wire.send(wire.ask(3, call(), ASK))
        assert wire.wait(3).status == OK


def test_pings_without_a_call_end_the_connection(server: Served) -> None:
    """The acknowledgement of a ping is no sign of work."""
    with Wire(server) as wire:
        for _ in range(40):
            wire.send(frame(PING, 0, 0, bytes(8)))
            wire.receive(0.03)
        assert wire.wait_closed(5) == ENHANCE_YOUR_CALM


def test_calls_are_forgotten_when_a_flood_ends_their_connection(server: Served) -> None:
    """The resets and the flood are one read, so that the resets' events are not returned."""
    with Wire(server) as wire:
        streams = range(1, 41, 2)
        wire.send(*(wire.ask(at, call(), ASK_ENDLESS) for at in streams))
        wait_until(lambda: server.open_requests("endless") == len(streams))
        wire.receive(0.2)
        wire.send(*(frame(RST_STREAM, 0, at, CANCEL) for at in streams), 1600 * frame(PING, 0, 0, bytes(8)))
        wire.wait_closed()
    is_well(server)


def test_flooding_client_that_does_not_read_is_disconnected(server: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bytes that wait in the transport must not hold a closed connection open."""
    monkeypatch.setattr(transport(server), "header_s", 1.0)
    ask = message(request(values=bytes(900_000)).SerializeToString())
    unread = struct.pack(">HI", 4, (1 << 31) - 1)
    wait_until(lambda: not transport(server).connections)
    with Wire(server, unread) as wire:
        wait_until(lambda: len(transport(server).connections) == 1)
        count = descriptors()
        wire.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        wire.send(frame(SETTING, ACK, 0, b""), frame(WINDOW_UPDATE, 0, 0, b"\x3f\xff\xff\xff"))
        for stream in range(1, 21, 2):
            wire.send(wire.begin(stream, call()), frame(DATA, 0, stream, ask[:16_000]))
            wait_until(lambda: any(one.stream.block is not None for one in calls_of(server)))
            frames = [ask[at : at + 16_000] for at in range(16_000, len(ask), 16_000)]
            wire.send(*(frame(DATA, 0, stream, part) for part in frames), frame(DATA, END_STREAM, stream, b""))
        wait_until(lambda: any(one._writing_paused for one in transport(server).connections))
        wire.send(1900 * frame(SETTING, 0, 0, b""))
        wait_until(lambda: not transport(server).connections)
        wait_until(lambda: descriptors() == count - 1)
    is_well(server)


@pytest.mark.parametrize("busy", [False, True], ids=["silent", "with other frames"])
def test_client_that_opens_no_window_is_disconnected(
    server: Served, monkeypatch: pytest.MonkeyPatch, busy: bool
) -> None:
    monkeypatch.setattr(http2_transport, "STALL_S", 1.0)
    ask = message(request(values=bytes(20_000)).SerializeToString())
    with Wire(server, STREAM_CLOSED_SETTINGS) as wire:
        wire.send(*(wire.ask(at, call(), ask) for at in range(1, 101, 2)))
        until_s = time.monotonic() + 15
        while not wire.closed and time.monotonic() < until_s:
            wire.receive(0.2)
            if busy:
                wire.send(SETTINGS)
        assert wire.closed
        assert not any(reply.body for reply in wire.replies.values())
    is_well(server)


@pytest.mark.slow
def test_an_idle_connection_is_not_taken_for_a_stalled_one(server: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http2_transport, "STALL_S", 2.5)
    with Wire(server, STREAM_CLOSED_SETTINGS) as wire:
        wire.receive(1.0)
        time.sleep(3.0)
        wire.send(wire.ask(1, call(), ASK))
        until_s = time.monotonic() + 1.2
        while time.monotonic() < until_s:
            wire.receive(0.1)
        wire.send(frame(WINDOW_UPDATE, 0, 1, struct.pack(">I", 1000)))
        assert wire.wait(1).status == OK


def test_a_message_that_stops_arriving_is_refused(server: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transport(server), "header_s", 0.5)
    with Wire(server) as wire:
        wire.receive(0.2)
        wire.send(wire.begin(1, call()), frame(DATA, 0, 1, ASK[:7]))
        assert wire.wait(1, 5).status == EXHAUSTED
    is_well(server)


def large(size: int) -> bytes:
    return message(request(values=bytes(size)).SerializeToString())


def send_bodies(wire: Wire, streams: Sequence[int], data: bytes, flags: int = END_STREAM) -> None:
    """Send a large message on each stream, once the server has opened all windows, and read nothing afterwards."""
    for stream in streams:
        wire.send(wire.begin(stream, call()), frame(DATA, 0, stream, data[:16_000]))
    while not all(wire.replies.setdefault(stream, Reply()).window for stream in streams):
        assert wire.receive(5)
    for stream in streams:
        for at in range(16_000, len(data), 16_000):
            wire.send(frame(DATA, flags if at + 16_000 >= len(data) else 0, stream, data[at : at + 16_000]))


def test_a_client_that_opens_windows_late_gets_all_its_responses(
    server: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Window updates are read while more responses wait than a connection may have."""
    monkeypatch.setattr(transport(server), "unsent_bytes_max", 1 << 20)
    with Wire(server) as wire:
        send_bodies(wire, (1, 3, 5), large(900_000))
        wait_until(lambda: sum(one.http2.unsent_bytes for one in transport(server).connections) > 2 << 20)
        wire.send(wire.ask(7, call(), ASK))
        grants = [frame(WINDOW_UPDATE, 0, stream, struct.pack(">I", 1 << 24)) for stream in (0, 1, 3, 5)]
        wire.send(*grants)
        assert [wire.wait(stream).status for stream in (1, 3, 5, 7)] == [OK] * 4
    is_well(server)


def test_responses_beyond_the_budget_wait_for_the_client_to_read(
    server: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They stay in the engine's memory, calls behind them do not start, and all are answered in the end."""
    unsent = transport(server).unsent
    monkeypatch.setattr(unsent, "_connection_bytes_max", 2 << 20)
    streams = range(1, 31, 2)
    with Wire(server) as wire, Wire(server) as other:
        send_bodies(wire, streams, large(900_000))
        wait_until(lambda: unsent.waiting >= http2_transport.WAITING_ANSWERS_MAX)
        wire.send(wire.ask(31, call(), ASK))
        wait_until(lambda: any(one._held_back for one in transport(server).connections))
        assert unsent.held_bytes <= 2 << 20
        other.send(other.ask(1, call(), ASK))
        assert other.wait(1).status == OK
        for stream in (0, *streams):
            wire.send(frame(WINDOW_UPDATE, 0, stream, struct.pack(">I", 1 << 25)))
        assert [wire.wait(stream).status for stream in streams] == [OK] * len(streams)
        assert all(len(wire.replies[stream].body) > 900_000 for stream in streams)
        assert wire.wait(31).status == OK
    wait_until(lambda: unsent.held_bytes == unsent.waiting == 0)
    is_well(server)


def test_a_waiting_response_ends_with_its_deadline_or_its_client(
    server: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    unsent = transport(server).unsent
    monkeypatch.setattr(unsent, "_connection_bytes_max", 1 << 20)
    with Wire(server) as wire:
        for stream, timeout in ((1, "60S"), (3, "700m"), (5, "60S")):
            data = large(900_000)
            wire.send(wire.begin(stream, call(grpc_timeout=timeout)), frame(DATA, 0, stream, data[:16_000]))
            while not wire.replies.setdefault(stream, Reply()).window:
                assert wire.receive(5)
            wire.send(*(frame(DATA, 0, stream, data[at : at + 16_000]) for at in range(16_000, len(data), 16_000)))
            wire.send(frame(DATA, END_STREAM, stream, b""))
            wait_until(lambda: unsent.held_bytes > 900_000)
        assert wire.wait(3).status == DEADLINE
        wait_until(lambda: unsent.waiting == 1)
    wait_until(lambda: unsent.held_bytes == unsent.waiting == 0)
    is_well(server)


def test_a_slow_reader_is_closed_while_others_wait_for_the_budget(
    server: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    unsent = transport(server).unsent
    monkeypatch.setattr(unsent, "bytes_max", 2 << 20)
    monkeypatch.setattr(http2_transport, "SLOW_S", 0.5)
    with Wire(server) as slow, Wire(server) as other:
        send_bodies(slow, (1,), large(900_000))
        wait_until(lambda: unsent.held_bytes > 900_000)
        monkeypatch.setattr(unsent, "bytes_max", 1 << 20)
        send_bodies(other, (1,), large(900_000))
        other.send(*(frame(WINDOW_UPDATE, 0, stream, struct.pack(">I", 1 << 25)) for stream in (0, 1)))
        assert other.wait(1, 10).status == OK
        slow.wait_closed(5)
    is_well(server)


def test_padding_does_not_use_up_the_window_of_a_message(server: Served) -> None:
    data, padded = large(45_000), 8
    with Wire(server) as wire:
        wire.send(wire.begin(1, call()))
        reply, window, at = wire.replies.setdefault(1, Reply()), STREAM_WINDOW_BYTES, 0
        while at < len(data):
            while window + reply.window < 251:
                assert wire.receive(2), "the server opens no window"
            wire.send(frame(DATA, padded | (at + 150 >= len(data)), 1, b"\x64" + data[at : at + 150] + bytes(100)))
            window -= 251
            at += 150
        assert wire.wait(1).status == OK


@pytest.mark.parametrize(("path", "complete"), [(INFER, True), (INFER, False), (STREAM, False)])
def test_messages_that_wait_are_counted_and_do_not_wait_forever(path: str, complete: bool) -> None:
    limits = ServeLimits(message_bytes_max=2 << 20, inflight_bytes_max=3 << 20, header_s=0.5)
    with served_in_thread({"echo": ECHO}, limits=limits) as server, Wire(server) as wire:
        budget, data = transport(server).budget, large(2_000_000)
        if complete:
            send_bodies(wire, [1], data, 0)  # and no end of the stream
        else:
            wire.send(wire.begin(1, call(path)), frame(DATA, 0, 1, data[:16_000]))
        wait_until(lambda: budget.held_bytes > 1 << 20)
        with Wire(server) as other:
            other.send(other.begin(1, call()), frame(DATA, 0, 1, data[:16_000]))
            assert other.wait(1).status == EXHAUSTED
        for _ in range(8):
            if not complete:
                wire.send(frame(DATA, 0, 1, b"x"))
            wire.receive(0.2)
        assert wire.wait(1).status == EXHAUSTED and budget.held_bytes == 0


@pytest.mark.parametrize("size", [65_530, 65_531, 65_536, 65_537])
def test_messages_about_the_size_of_a_large_one_are_answered(server: Served, size: int) -> None:
    small = request("echo").SerializeToString()
    more = size - len(small) - 5
    whole = small + b"\xfa\x01" + bytes([more & 127 | 128, more >> 7 & 127 | 128, more >> 14]) + bytes(more)
    assert len(whole) == size  # by an unknown field
    with Wire(server) as wire:
        for stream, message in ((1, small), (3, whole)):  # the plan of the first is kept
            data = len(message).to_bytes(5, "big") + message
            parts = [data[at : at + 16_000] for at in range(0, len(data), 16_000)]
            wire.send(wire.begin(stream, call()), *(frame(DATA, 0, stream, part) for part in parts[:4]))
            wire.receive(0.2)  # the window for what follows
            wire.send(*(frame(DATA, 0, stream, part) for part in parts[4:]), frame(DATA, END_STREAM, stream, b""))
            assert wire.wait(stream).status == OK


def test_a_call_that_ended_before_its_turn_is_not_started() -> None:
    async def run() -> None:
        started: list[object] = []
        inference = SimpleNamespace(start=lambda *call: started.append(call))
        http2 = SimpleNamespace(allow=lambda *_: None, refuse=lambda *_: None)
        server = SimpleNamespace(
            now_s=0.0, message_bytes_max=1 << 20, budget=ByteBudget("x", 1 << 20), loop=asyncio.get_running_loop()
        )
        connection: Any = SimpleNamespace(server=server, http2=http2, ready=deque(), flush_soon=lambda: None)
        stream = Http2Stream(1)
        one = GrpcCall(connection, stream, InferMethod(inference), None)  # type: ignore[arg-type]
        stream.body += b"\0\0\0\0\1x"
        one.on_body()
        one.on_end()
        one.fail(DeadlineExceeded("late"))  # by the sweep, before the connection's next turn
        connection.ready.popleft().start()
        assert started == []

    asyncio.run(run())


def test_an_error_of_a_turn_closes_its_connection_alone(
    server: Served, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    balance = GrpcConnection._balance_reading

    def failing(connection: GrpcConnection) -> None:
        if connection is chosen[0]:
            raise RuntimeError("a mistake of ours")
        balance(connection)

    with Wire(server) as wire, Wire(server) as other:
        for one in (wire, other):
            one.send(one.ask(1, call(), ASK))
            one.wait(1)
        port = wire.socket.getsockname()[1]
        chosen = [one for one in transport(server).connections if one._transport.get_extra_info("peername")[1] == port]
        monkeypatch.setattr(GrpcConnection, "_balance_reading", failing)
        wire.send(wire.ask(3, call(), ASK))
        wire.wait_closed(5)
        other.send(other.ask(3, call(), ASK))
        assert other.wait(3).status == OK
    assert [one.getMessage() for one in caplog.records if one.levelno >= logging.ERROR] == ["a gRPC connection failed"]
    caplog.clear()
    is_well(server)


def test_a_message_of_the_limit_fits_a_budget_of_the_same_size() -> None:
    limits = ServeLimits(message_bytes_max=1 << 20, inflight_bytes_max=1 << 20)
    with served_in_thread({"echo": ECHO}, limits=limits) as server, Wire(server) as wire:
        send_bodies(wire, [1], message(bytes(1 << 20)))
        assert wire.wait(1).status == INVALID


def test_a_client_that_does_not_read_a_response_is_disconnected(
    server: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its window is open, so the response waits in the socket's buffer alone."""
    monkeypatch.setattr(http2_transport, "STALL_S", 1.0)
    with Wire(server, struct.pack(">HI", 4, (1 << 31) - 1)) as wire:
        wire.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        wire.receive(0.3)
        wire.send(frame(WINDOW_UPDATE, 0, 0, struct.pack(">I", (1 << 31) - 1 - 65_535)))
        send_bodies(wire, range(1, 41, 2), large(900_000))
        wait_until(lambda: not transport(server).connections)
    is_well(server)


def test_a_response_reaches_a_reader_of_a_few_bytes_at_a_time(server: Served) -> None:
    ask = message(request(values=bytes(range(250)) * 4).SerializeToString())
    with Wire(server, struct.pack(">HI", 4, 7)) as wire:
        wire.send(wire.ask(1, call(), ask))
        while not wire.replies.setdefault(1, Reply()).ended:
            assert wire.receive(10)
            wire.send(frame(WINDOW_UPDATE, 0, 1, struct.pack(">I", 50)))
        reply = wire.replies[1]
        assert reply.status == OK and bytes(range(250)) * 4 in reply.body


def test_further_connections_than_permitted_are_closed(server: Served) -> None:
    with contextlib.ExitStack() as stack:
        wires = [stack.enter_context(Wire(server)) for _ in range(64)]
        wait_until(lambda: len(transport(server).connections) == 64)
        with Wire(server) as further:
            further.wait_closed()
        wires[0].send(wires[0].ask(1, call(), ASK))
        assert wires[0].wait(1).status == OK
    wait_until(lambda: not transport(server).connections)
    is_well(server)


# identity


def literal(first: int, name: bytes, value: bytes) -> bytes:
    return bytes([first, len(name)]) + name + bytes([len(value)]) + value


def test_each_call_is_judged_by_its_own_token_in_every_form_of_hpack(tmp_path: Path) -> None:
    good, bad = "wl_web-" + "w" * 40, "wl_bad-" + "b" * 40
    file = tmp_path / "tokens.yaml"
    file.write_text(f"tokens:\n  - {{name: web, sha256: {digest(good)}, models: [echo]}}\n")
    file.chmod(0o600)
    rest = headers(INFER.encode())
    tokens = {OK: f"Bearer {good}".encode(), UNAUTHENTICATED: f"Bearer {bad}".encode()}
    random_of = random.Random(3)
    with served_in_thread({"echo": ECHO}, tokens=file) as server, Wire(server) as wire:
        table: list[bytes] = []  # the dynamic table, newest first: authorization alone
        found: list[tuple[str, bytes, bytes]] = []
        for stream in range(1, 401, 2):
            status = random_of.choice([OK, UNAUTHENTICATED])
            token = tokens[status]
            form = random_of.choice(["indexed", "indexing", "without", "never", "none", "evict"])
            if form == "evict":  # a table of size 0 and then of 4096 bytes is empty (RFC 7541, section 6.3)
                table.clear()
                block = b"\x20\x3f\xe1\x1f" + rest + literal(0x40, b"authorization", token)
                table.insert(0, token)
            elif form == "indexed" and token in table:
                block = rest + bytes([0x80 | (62 + table.index(token))])
            elif form == "indexing" and len(table) < 20:
                block = rest + literal(0x40, b"authorization", token)
                table.insert(0, token)
            elif form == "none":
                status, block = UNAUTHENTICATED, rest
            else:
                block = rest + literal(0x10 if form == "never" else 0, b"authorization", token)
            wire.send(frame(HEADERS, END_HEADERS, stream, block), frame(DATA, END_STREAM, stream, ASK))
            if random_of.random() < 0.3:
                wire.wait(stream)
            found.append((form, status, stream.to_bytes(2, "big")))
        for form, status, stream_bytes in found:
            reply = wire.wait(int.from_bytes(stream_bytes, "big"))
            assert reply.status == status, (form, reply)
        assert {status for _, status, _ in found} == {OK, UNAUTHENTICATED}


# shutdown and lifetimes


def stop(server: Served, grace_s: float) -> Future[None]:
    assert server.loop is not None
    return asyncio.run_coroutine_threadsafe(server.server.stop(grace_s), server.loop)


def test_a_stopping_server_lets_calls_finish_and_closes_connections() -> None:
    slow = ENDLESS.replace("100000", "20").replace("delay_ms: 10", "delay_ms: 50")
    with served_in_thread({"endless": slow, "echo": ECHO}) as server:
        with Wire(server) as wire, Wire(server) as idle:
            wire.send(wire.ask(1, call(), ASK_ENDLESS))
            wait_until(lambda: server.open_requests("endless") == 1)
            stopped = stop(server, 4.0)
            wait_until(lambda: not server.server.serving.on)
            wire.send(wire.ask(3, call(), ASK))
            assert wire.wait(3).status == UNAVAILABLE
            assert wire.wait(1).status == OK
            wire.wait_closed()
            idle.wait_closed()
            assert (wire.goaway, idle.goaway) == (0, 0)
        stopped.result(10)
        assert not transport(server).connections and transport(server).calls == 0

        async def left() -> list[str]:
            await asyncio.sleep(0.1)
            names = [str(one.get_coro()) for one in asyncio.all_tasks()]
            return [one for one in names if "http2_transport" in one or "_sweep" in one or "Grpc" in one]

        assert server.call(left()) == []


def test_a_stopping_server_cancels_calls_after_the_grace() -> None:
    with served_in_thread({"endless": ENDLESS, "echo": ECHO}) as server:
        with Wire(server) as wire:
            wire.send(wire.ask(1, call(), ASK_ENDLESS), wire.ask(3, call(STREAM), ASK_ENDLESS))
            wire.send(wire.begin(5, call(WATCH)), frame(DATA, END_STREAM, 5, WATCH_ALL))
            wait_until(lambda: server.open_requests("endless") == 2)
            stopped = stop(server, 0.5)
            ends = [wire.wait(at).status for at in (1, 3, 5)]
            assert set(ends) <= {CANCELLED, UNAVAILABLE, OK} and ends[0] == CANCELLED, ends
            wire.wait_closed()
        stopped.result(10)
        wait_until(lambda: server.open_requests("endless") == 0)


def descriptors() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


def living() -> dict[str, int]:
    gc.collect()
    kinds = (Http2Connection, Http2Stream, GrpcCall, GrpcConnection)
    found = dict.fromkeys((kind.__name__ for kind in kinds), 0)
    for one in gc.get_objects():
        if type(one) in kinds:
            found[type(one).__name__] += 1
    return found


def test_calls_leave_nothing_to_the_garbage_collector(server: Served) -> None:
    """Cycles of references would cost each call a share of the collector's passes over all objects."""
    with Wire(server) as wire:
        wire.send(wire.ask(1, call(), ASK))
        assert wire.wait(1).status == OK
        gc.collect()
        gc.disable()
        try:
            kinds = 10 * [(call(), ASK), (call(), b""), (call(STREAM), ASK), (call(STREAM), message(b""))]
            for at, (fields, data) in zip(range(3, 83, 2), kinds):
                wire.send(wire.ask(at, fields, data))
                wire.wait(at)
            wait_until(lambda: transport(server).calls == 0)
            left = [type(one).__name__ for one in gc.get_objects() if isinstance(one, GrpcCall | Http2Stream)]
        finally:
            gc.enable()
        assert len(left) <= 2, left


@pytest.mark.parametrize("count", [150, pytest.param(2000, marks=pytest.mark.slow)])
def test_connections_closed_in_the_middle_leave_nothing(server: Served, count: int) -> None:
    random_of = random.Random(5)
    close_in_the_middle(server, random_of, 50)  # opens what each pipeline keeps open from its first request on
    before, open_before = living(), descriptors()
    close_in_the_middle(server, random_of, count)
    wait_until(lambda: descriptors() <= open_before)
    wait_until(lambda: all(left <= before[kind] for kind, left in living().items()))


def close_in_the_middle(server: Served, random_of: random.Random, count: int) -> None:
    """Make calls on `count` connections and close or reset each at a random moment."""
    fields = [call(), call(STREAM), call(WATCH), call(grpc_timeout="1S"), call(grpc_encoding="gzip")]
    for _ in range(count):
        with Wire(server) as wire:
            streams = range(1, 2 * random_of.randrange(4) + 1, 2)
            said = b"".join(
                wire.ask(at, random_of.choice(fields), random_of.choice([ASK, ASK_ENDLESS, b""])) for at in streams
            )
            wire.send(said[: random_of.randrange(len(said) + 1)])
            if random_of.random() < 0.5:
                wire.receive(0.01)
            if random_of.random() < 0.5:  # reset rather than closed
                wire.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    wait_until(lambda: not transport(server).connections)
    is_well(server)
    wait_until(lambda: not transport(server).connections)


@pytest.mark.slow
def test_mutated_streams_do_not_delay_a_healthy_client(server: Served) -> None:
    random_of = random.Random(7)

    def p99_ms(seconds: float, hostile: bool) -> tuple[float, int]:
        times, streams, healthy = [], 0, Wire(server)
        with healthy:
            healthy.send(frame(WINDOW_UPDATE, 0, 0, struct.pack(">I", 1 << 30)))
            stream, until_s = 1, time.monotonic() + seconds
            while time.monotonic() < until_s:
                if hostile:
                    with Wire(server) as wire:
                        said = bytearray(b"".join(wire.ask(at, call(), ASK) for at in range(1, 101, 2)))
                        for _ in range(random_of.randrange(1, 8)):
                            said[random_of.randrange(len(said))] = random_of.randrange(256)
                        wire.send(bytes(said))
                        streams += 50
                started = time.perf_counter()
                healthy.send(healthy.ask(stream, call(), ASK))
                assert healthy.wait(stream).status == OK
                times.append((time.perf_counter() - started) * 1000)
                stream += 2
        return statistics.quantiles(times, n=100)[98], streams

    quiet_ms, _ = p99_ms(3, False)
    streams = 0
    beside_ms = []
    while streams < 10_000:
        ms, sent = p99_ms(3, True)
        beside_ms.append(ms)
        streams += sent
    print(f"p99 quiet {quiet_ms:.2f} ms, beside {streams} mutated streams {statistics.median(beside_ms):.2f} ms")
    assert statistics.median(beside_ms) < 20 * quiet_ms + 50
    is_well(server)
