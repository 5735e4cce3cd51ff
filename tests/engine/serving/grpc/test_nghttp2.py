"""The HTTP/2 core against another implementation: h2 as the client, without sockets.

`Pair` joins a server's Http2Connection and a client's H2Connection. h2 raises ProtocolError if the server exceeds a
window, a limit or the protocol.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest
from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.events import (
    ConnectionTerminated,
    DataReceived,
    Event,
    ResponseReceived,
    StreamEnded,
    StreamReset,
    TrailersReceived,
)
from h2.exceptions import StreamClosedError
from h2.settings import SettingCodes
from hypothesis import given, settings
from hypothesis import strategies as st

from weftline.engine.serving.grpc.nghttp2 import (
    BODY,
    CLOSED,
    END,
    OK_TRAILERS,
    REQUEST,
    STREAM_WINDOW_BYTES,
    Http2Connection,
    Http2Error,
    Http2Limits,
    Http2Stream,
)

CALL = [
    (":method", "POST"), (":scheme", "http"), (":path", "/a.B/C"), (":authority", "a"),
    ("content-type", "application/grpc"), ("te", "trailers"),
]  # fmt: skip


class Server:
    """An echo: a response has the bytes of its request, and its trailers."""

    def __init__(self, streamed: bool = False) -> None:
        self.http2 = Http2Connection(Http2Limits())
        self.open: set[Http2Stream] = set()
        self.requests: list[Http2Stream] = []
        self.received: Counter[Http2Stream] = Counter()  # bytes
        self._streamed = streamed

    def receive(self, data: bytes) -> None:
        self.on_events(self.http2.receive(data))

    def on_events(self, events: Sequence[tuple[str, Http2Stream]]) -> None:
        for event, stream in events:
            if event is REQUEST:
                assert stream not in self.open
                self.open.add(stream)
                self.requests.append(stream)
                if self._streamed:
                    self.http2.begin(stream)
            elif event is CLOSED:
                self.open.discard(stream)  # absent: its header block was not complete
            elif event is BODY:
                body, stream.body = bytes(stream.body), bytearray()
                if self._streamed:
                    self.http2.write(stream, [body])
                else:
                    stream.call = (stream.call or b"") + body
                self.received[stream] += len(body)
                self.http2.allow(stream, self.received[stream] + STREAM_WINDOW_BYTES)
            elif event is END:
                if self._streamed:
                    self.http2.finish(stream, [(b"grpc-status", b"7")])
                else:
                    self.http2.respond(stream, [stream.call] if stream.call else [], OK_TRAILERS)

    def send(self, limit_bytes: int = 1 << 20) -> bytes:
        data = b"".join(self.http2.data_to_send(limit_bytes))
        self.on_events(self.http2.take_events())
        return data


class Pair:
    def __init__(self, streamed: bool = False, window: int | None = None) -> None:
        self.server = Server(streamed)
        self.client = H2Connection(H2Configuration(client_side=True, header_encoding=None))
        self.sent = bytearray()  # by the client, in all
        self.bodies: dict[int, bytes] = {}
        self.trailers: dict[int, dict[bytes, bytes]] = {}
        self.resets: dict[int, int] = {}
        self.ended: set[int] = set()
        self.goaway: int | None = None
        self.client.initiate_connection()
        if window is not None:
            self.client.update_settings({SettingCodes.INITIAL_WINDOW_SIZE: window})
        self.exchange([1 << 16], False)

    def exchange(self, splits: Sequence[int], acknowledge: bool = True) -> None:
        """Pass bytes both ways, in parts of these sizes, until neither side has any."""
        at = 0
        while True:
            data = self.client.data_to_send()
            self.sent += data
            while data:
                size = splits[at % len(splits)]
                self.server.receive(data[:size])
                data, at = data[size:], at + 1
            said = self.server.send(splits[at % len(splits)])
            if not said and not data:
                return
            for event in self.client.receive_data(said):
                self._on_event(event, acknowledge)

    def _on_event(self, event: Event, acknowledge: bool) -> None:
        if isinstance(event, ResponseReceived):
            self.bodies[event.stream_id] = b""
        elif isinstance(event, DataReceived):
            self.bodies[event.stream_id] += event.data
            if acknowledge and event.flow_controlled_length:
                try:
                    self.client.acknowledge_received_data(event.flow_controlled_length, event.stream_id)
                except StreamClosedError:
                    pass
        elif isinstance(event, TrailersReceived):
            self.trailers[event.stream_id] = dict(event.headers)
        elif isinstance(event, StreamEnded):
            self.ended.add(event.stream_id)
        elif isinstance(event, StreamReset):
            self.resets[event.stream_id] = event.error_code
        elif isinstance(event, ConnectionTerminated):
            self.goaway = int(event.error_code)

    def send_body(self, stream: int, body: bytes, splits: Sequence[int], padding: int | None = None) -> None:
        """Send a body within the server's windows, and end the stream."""
        at = 0
        while body:
            window = self.client.local_flow_control_window(stream) - (padding or 0) - 1
            size = min(len(body), max(0, window), self.client.max_outbound_frame_size - 256)
            if not size:
                self.exchange(splits)
                assert self.client.local_flow_control_window(stream) > window, "the server opened no window"
                continue
            self.client.send_data(stream, body[:size], pad_length=padding)
            body, at = body[size:], at + 1
        self.client.end_stream(stream)

    def check_idle(self) -> None:
        """Check that the server holds nothing of any stream."""
        core = self.server.http2
        assert not core._streams and not core._stopping and not self.server.open
        assert core.unsent_bytes == 0 and core.take_events() == []
        assert all(stream.closed and stream.unsent_bytes == 0 and not stream._out for stream in self.server.requests)


names = st.text("abcdefghijklmnopqrstuvwxyz0123456789-_.", min_size=1, max_size=30).map(lambda name: "x-" + name)
values = st.text(st.characters(min_codepoint=0x21, max_codepoint=0x7E), max_size=200)
metadata = st.lists(st.tuples(names, values), max_size=20)
parts = st.lists(st.integers(1, 5000), min_size=1, max_size=8)
bodies = st.one_of(
    st.binary(max_size=300), st.builds(lambda part, count: part * count, st.binary(max_size=50), st.integers(0, 4000))
)


@settings(max_examples=60, deadline=None)
@given(fields=metadata, body=bodies, splits=parts, padding=st.none() | st.integers(0, 255), streamed=st.booleans())
def test_any_request_in_any_parts_arrives_whole(
    fields: list[tuple[str, str]], body: bytes, splits: list[int], padding: int | None, streamed: bool
) -> None:
    splits = [max(size, len(body) // 200) for size in splits]
    pair = Pair(streamed)
    pair.client.send_headers(1, [*CALL, *fields, ("authorization", "a"), ("authorization", "b")])
    pair.send_body(1, body, splits, padding)
    pair.exchange(splits)
    assert pair.bodies[1] == body and 1 in pair.ended
    assert pair.trailers[1] == {b"grpc-status": b"7" if streamed else b"0"}
    (request,) = pair.server.requests
    assert [value for name, value in request.fields if name == b"authorization"] == [b"a", b"b"]
    pair.check_idle()


actions = st.lists(
    st.tuples(
        st.sampled_from(["open", "data", "end", "trailers", "reset", "window", "settings", "exchange", "ping"]),
        st.integers(0, 5),
        st.integers(0, 40_000),
    ),
    min_size=5,
    max_size=60,
)


@settings(max_examples=80, deadline=None)
@given(steps=actions, splits=parts, streamed=st.booleans(), window=st.integers(0, 70_000))
def test_interleaved_streams_with_any_windows(
    steps: list[tuple[str, int, int]], splits: list[int], streamed: bool, window: int
) -> None:
    """Windows are never exceeded: h2 raises FlowControlError. A stream that is not reset gets its own bytes."""
    splits = [size + 500 for size in splits]
    pair = Pair(streamed, window)
    client = pair.client
    sent: dict[int, bytes] = {}
    open_streams: list[int] = []
    reset: set[int] = set()

    for what, which, amount in steps:
        stream = open_streams[which % len(open_streams)] if open_streams else 0
        if what == "open":
            stream = 2 * len(sent) + 1
            client.send_headers(stream, CALL)
            sent[stream] = b""
            open_streams.append(stream)
        elif what == "exchange":
            pair.exchange(splits, acknowledge=False)
        elif what == "ping":
            client.ping(bytes(8))
            pair.exchange(splits, acknowledge=False)
            pair.server.http2.allow_ping()  # else five without a call are a flood
        elif what == "settings":
            client.update_settings({SettingCodes.INITIAL_WINDOW_SIZE: amount})
        elif what == "window":
            if stream and amount:
                client.increment_flow_control_window(amount, stream)
                client.increment_flow_control_window(amount)
        elif not stream:
            continue
        elif what == "data":
            size = min(amount, client.local_flow_control_window(stream), client.max_outbound_frame_size)
            data = bytes([stream % 256]) * size
            client.send_data(stream, data)
            sent[stream] += data
        else:
            open_streams.remove(stream)
            if what == "end":
                client.end_stream(stream)
            elif what == "trailers":
                client.send_headers(stream, [("x-last", "1")], end_stream=True)
            else:
                client.reset_stream(stream, 8)
                reset.add(stream)
    for stream in open_streams:
        client.end_stream(stream)
    pair.exchange(splits, acknowledge=False)
    for _ in range(20):  # open the windows
        for stream in set(sent) - reset - pair.ended:
            client.increment_flow_control_window(100_000, stream)
        client.increment_flow_control_window(1_000_000)
        pair.exchange(splits, acknowledge=False)
    assert pair.goaway is None and not pair.resets
    for stream in set(sent) - reset:
        assert stream in pair.ended and pair.bodies[stream] == sent[stream]
        assert pair.trailers[stream][b"grpc-status"] == (b"7" if streamed else b"0")
    pair.check_idle()


def test_a_header_block_in_continuation_frames_is_one_request() -> None:
    pair = Pair()
    pair.client.send_headers(1, [*CALL, *((f"x-{at}", "v" * 1000) for at in range(45))], end_stream=True)  # 3 frames
    pair.exchange([100])
    assert 1 in pair.ended and pair.server.requests[0].too_large
    pair.check_idle()


def test_a_refusal_stops_a_client_that_is_still_sending() -> None:
    pair = Pair()
    pair.client.send_headers(1, CALL)
    pair.exchange([1000])
    (stream,) = pair.server.requests
    pair.server.http2.refuse(stream, [(b":status", b"200"), (b"grpc-status", b"8")])
    pair.exchange([1000])
    assert pair.ended == {1} and pair.resets == {1: 0}
    pair.check_idle()


def test_the_client_may_send_what_is_allowed() -> None:
    pair = Pair()
    pair.client.send_headers(1, CALL)
    pair.exchange([1000])
    (stream,) = pair.server.requests
    before = pair.client.local_flow_control_window(1)
    pair.server.http2.allow(stream, 300_000)
    pair.exchange([1000])
    assert pair.client.local_flow_control_window(1) == 300_000
    pair.server.http2.allow(stream, 0)
    pair.send_body(1, bytes(300_000), [1 << 16])
    pair.exchange([1 << 16])
    assert before <= 65_535 and len(pair.bodies[1]) == 300_000
    pair.check_idle()


def test_a_large_part_is_sent_in_pieces_of_the_limit() -> None:
    pair = Pair(window=(1 << 31) - 1)
    pair.client.increment_flow_control_window((1 << 31) - 1 - 65_535)
    pair.client.send_headers(1, CALL)
    pair.exchange([1 << 16])
    (stream,) = pair.server.requests
    pair.server.http2.respond(stream, [bytes(8 << 20)], OK_TRAILERS)
    sizes = []
    while data := pair.server.send(1 << 20):
        sizes.append(len(data))
    assert sum(sizes) > 8 << 20 and max(sizes) < (1 << 20) + (1 << 17), sizes


def test_streams_beyond_the_limit_before_the_settings_end_the_connection() -> None:
    pair = Pair()
    encoder = pair.client.encoder
    flood = b""
    for stream in range(1, 40_001, 2):
        block = encoder.encode(CALL)
        flood += len(block).to_bytes(3, "big") + b"\x01\x04" + stream.to_bytes(4, "big") + block
    core = Http2Connection(Http2Limits())
    greeting = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(3) + b"\x04" + bytes(5)
    core.receive(greeting)
    for at in range(0, len(flood), 1 << 15):
        core.receive(flood[at : at + (1 << 15)])
    assert sum(map(len, core.data_to_send(1 << 24))) < 1 << 17
    assert core.ended


def test_streams_that_closed_before_an_error_are_returned_by_close() -> None:
    pair = Pair()
    for stream in (1, 3, 5):
        pair.client.send_headers(stream, CALL)
    pair.exchange([1000])
    opened = set(pair.server.requests)
    pair.client.reset_stream(1, 8)
    ping = b"\0\0\x08\x06\0\0\0\0\0" + bytes(8)
    with pytest.raises(Http2Error):
        pair.server.http2.receive(pair.client.data_to_send() + 2000 * ping)
    assert set(pair.server.http2.close()) == opened and all(stream.closed for stream in opened)


@pytest.mark.parametrize(
    ("frames", "code"),
    [
        ("000004 03 00 00000001 00000008", 1),  # RST_STREAM of an idle stream
        ("000004 08 00 00000000 00000000", 1),  # WINDOW_UPDATE of 0
        ("000004 08 00 00000000 7fffffff", 3),  # window overflow
        ("000005 04 00 00000000 0000000000", 6),  # SETTINGS of 5 bytes
        ("000006 04 00 00000000 0004 80000000", 3),  # a window of 2^31
        ("000001 01 05 00000001 ff", 9),  # a header block that is no HPACK
        ("000001 01 05 00000002 88", 1),  # a stream of the server's
        ("000008 06 00 00000001 0000000000000000", 1),  # PING on a stream
        ("020000 00 00 00000001", 6),  # a frame of 128 KiB
    ],
)
def test_a_violation_gets_goaway_with_its_code(frames: str, code: int) -> None:
    pair = Pair()
    pair.server.receive(bytes.fromhex(frames.replace(" ", "")))
    said = pair.server.send()
    pair.client.receive_data(b"")
    for event in pair.client.receive_data(said):
        pair._on_event(event, False)
    assert pair.goaway == code
    assert pair.server.http2.ended


# mutation


def recorded() -> list[bytes]:
    """Return the bytes of clients' connections."""
    sessions = []
    for seed in range(8):
        choose = random.Random(seed)
        pair = Pair(bool(seed & 1), choose.choice([None, 100, 70_000]))
        for stream in range(1, 2 * choose.randrange(2, 12), 2):
            fields = [(f"x-{choose.randrange(5)}", "v" * choose.randrange(100)) for _ in range(choose.randrange(6))]
            pair.client.send_headers(stream, [*CALL, *fields])
            pair.client.send_data(stream, bytes(choose.randrange(2000)), pad_length=choose.choice([None, 9]))
            if choose.random() < 0.2:
                pair.client.reset_stream(stream, 8)
            else:
                pair.client.end_stream(stream)
            if choose.random() < 0.3:
                pair.client.ping(bytes(8))
            if choose.random() < 0.3:
                pair.client.update_settings({SettingCodes.INITIAL_WINDOW_SIZE: choose.randrange(1 << 17)})
            pair.exchange([1 << 16])
        sessions.append(bytes(pair.sent))
    return sessions


def mutate(data: bytes, choose: random.Random) -> bytes:
    """Flip, drop, duplicate, insert or cut bytes."""
    out = bytearray(data)
    for _ in range(choose.randrange(1, 6)):
        at, size = choose.randrange(24, max(25, len(out))), choose.choice([1, 1, 4, 9, 60])
        what = choose.randrange(5)
        if what == 0 and at < len(out):
            out[at] = choose.randrange(256)
        elif what == 1:
            del out[at : at + size]
        elif what == 2:
            out[at:at] = out[at : at + size]
        elif what == 3:
            out[at:at] = choose.randbytes(size)
        elif choose.random() < 0.3:
            del out[at:]
    return bytes(out)


def play(data: bytes, choose: random.Random) -> int:
    """Pass the bytes to an echo server, as a socket would; returns the number of its requests."""
    server = Server(choose.random() < 0.5)
    at = 0
    try:
        while at < len(data) and not server.http2.ended:
            size = choose.choice([1, 50, 1000, 1 << 15])
            server.receive(data[at : at + size])
            server.send(choose.choice([1, 1000, 1 << 20]))
            at += size
        for _ in range(10_000):
            if not server.send():
                break
        else:
            raise AssertionError("there is no end of bytes to send")
    except (Http2Error, MemoryError):
        pass
    closed = server.http2.close()
    assert server.open <= set(closed)
    assert all(stream.closed for stream in server.requests)
    return len(server.requests)


def test_mutated_sessions_end_with_no_other_error() -> None:
    sessions, choose = recorded(), random.Random(1)
    assert all(play(one, choose) for one in sessions)
    for _ in range(1500):
        play(mutate(choose.choice(sessions), choose), choose)


def fuzz(streams: int) -> None:
    """Play mutated sessions with this many streams, and print how many bytes the process has grown by."""

    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    sessions, choose, played = recorded(), random.Random(2), 0
    while played < streams // 5:
        played += play(mutate(choose.choice(sessions), choose), choose)
    before, started_s = resident(), time.monotonic()
    while played < streams:
        played += play(mutate(choose.choice(sessions), choose), choose)
    print(played, resident() - before, f"{time.monotonic() - started_s:.1f}")


STREAMS = 100_000


@pytest.mark.slow
def test_memory_of_many_mutated_streams_is_sound_and_bounded() -> None:
    """The allocator fills freed memory and aborts on corruption."""
    code = f"from tests.engine.serving.grpc.test_nghttp2 import fuzz; fuzz({STREAMS})"
    environment = os.environ | {"MALLOC_PERTURB_": "165", "MALLOC_CHECK_": "3"}
    command = [sys.executable, "-X", "faulthandler", "-c", code]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    played, grown, seconds = done.stdout.split()
    print(f"{played} streams, {int(grown) >> 10} KiB more resident, {seconds} s")
    assert int(played) >= STREAMS and int(grown) < 16 << 20


def test_a_block_receives_what_came_and_what_follows_up_to_its_end() -> None:
    stream, block = Http2Stream(1), memoryview(bytearray(8))
    stream.body += b"ab"
    stream.fill(block)
    assert (bytes(stream.body), stream.filled_bytes) == (b"", 2)
    stream.receive(memoryview(b"cdef"))
    stream.receive(memoryview(b"ghij"))
    stream.receive(memoryview(b"k"))
    assert (bytes(block), stream.filled_bytes, bytes(stream.body)) == (b"abcdefgh", 8, b"ijk")


def test_a_block_takes_only_its_own_part_of_the_body() -> None:
    stream, block = Http2Stream(1), memoryview(bytearray(2))
    stream.body += b"abc"
    stream.fill(block)
    assert (bytes(block), stream.filled_bytes, bytes(stream.body)) == (b"ab", 2, b"c")


def test_header_blocks_beyond_a_maximum_are_left_for_the_next_call() -> None:
    pair = Pair()
    for at in range(1, 41, 2):
        pair.client.send_headers(at, CALL, end_stream=True)
    data, http2 = memoryview(pair.client.data_to_send()), pair.server.http2
    found = []
    while data:
        events = http2.receive(data, 3)
        data = data[http2.processed_bytes :]
        found.append(sum(event is REQUEST for event, _ in events))
        for event, stream in events:
            assert event is not REQUEST or len(stream.fields) >= 3, "every field came"
    assert sum(found) == 20 and max(found) == 4, "one that had begun, and three"
