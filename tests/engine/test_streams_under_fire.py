"""Streams among each other: slow readers, many at once, cuts, and what a stream costs those beside it."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest

from tests.engine.fire import builder, settled, wait_until
from weftline.engine.request import RequestOptions
from weftline.engine.session import Session, Source
from weftline.errors import DeadlineExceeded, LimitReached

Start = Callable[[Source], Session]


def trickling(pieces: int, piece_bytes: int = 2000, delay_ms: float = 2.0, **limits: float) -> Source:
    p = builder(**limits)
    step = p.step("s", "trickle", value=p.input("x", "text"), pieces=pieces, piece_bytes=piece_bytes, delay_ms=delay_ms)
    p.output("y", step.value)
    return p


def read(session: Session) -> tuple[int, float]:
    """Read a whole stream; return its pieces, and the longest pause between two of them in milliseconds."""
    count, longest_ms, before = 0, 0.0, time.monotonic()
    for _ in session.stream(x="a"):
        now = time.monotonic()
        count, longest_ms, before = count + 1, max(longest_ms, (now - before) * 1000), now
    return count, longest_ms


@pytest.mark.slow
def test_streams_beside_an_unread_one_are_not_slower(start: Start) -> None:
    session = start(trickling(300, stream_bytes_max=100_000))
    began = time.monotonic()
    assert read(session)[0] == 301
    alone_s = time.monotonic() - began
    unread = session.stream(x="b")
    wait_until(lambda: any(request.stalled for request in session._current.runtime.scheduler.state.requests.values()))
    began = time.monotonic()
    with ThreadPoolExecutor(3) as readers:
        assert [count for count, _ in readers.map(lambda _: read(session), range(3))] == [301] * 3
    beside_s = time.monotonic() - began
    print(f"alone {alone_s:.2f} s, three beside a stalled one {beside_s:.2f} s")
    assert beside_s < 4 * alone_s + 1
    assert sum(1 for _ in unread) == 301, "reading on goes on"


@pytest.mark.slow
def test_unread_streams_use_bounded_memory_and_are_cut(start: Start) -> None:
    session = start(trickling(20_000, piece_bytes=50_000, delay_ms=1.0, stream_bytes_max=500_000, stall_max_ms=1500))
    me = psutil.Process()
    before = me.memory_info().rss
    streams = [session.stream(x=str(place)) for place in range(4)]
    wait_until(lambda: session.stats()["requests"]["open"] == 0, 20)
    grown = me.memory_info().rss - before
    print(f"four streams of 1 GB each, unread: {grown / 1e6:.1f} MB more")
    assert grown < 100_000_000
    for stream in streams:
        with pytest.raises(LimitReached, match="stall_max_ms"):
            list(stream)


@pytest.mark.slow
def test_a_deadline_cuts_a_stream_in_the_middle(start: Start) -> None:
    session = start(trickling(1000, delay_ms=5))
    pieces = []
    began = time.monotonic()
    with pytest.raises(DeadlineExceeded):
        for piece in session.stream(RequestOptions(deadline_ms=500), x="a"):
            pieces.append(piece)
    took_ms = (time.monotonic() - began) * 1000
    print(f"{len(pieces)} pieces, cut after {took_ms:.0f} ms of 500")
    assert len(pieces) > 5 and 495 < took_ms < 1000
    wait_until(lambda: settled(session), 5)


def test_fifty_streams_at_once_are_all_whole(start: Start) -> None:
    session = start(trickling(20, piece_bytes=100))
    with ThreadPoolExecutor(50) as readers:
        found = list(readers.map(lambda _: [piece.value for piece in session.stream(x="a")], range(50)))
    wanted = [chr(ord("a") + at) * 100 for at in range(20)]
    assert all(pieces == [*wanted, "".join(wanted)] for pieces in found)
