"""Streams whose readers are slow: only their producers wait, and memory stays bounded."""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from weftline.engine.protocol.messages import CHUNK_OVERHEAD_BYTES
from weftline.engine.request import RequestOptions
from weftline.engine.result import UnreadOutputs
from weftline.engine.session import Session, load
from weftline.errors import InputError, LimitReached
from weftline.nodes.urgency import SequencePart
from weftline.pipelines.spec.builder import Builder

PIECE = 10_000
LIMIT = 100_000
ON_THE_WAY = 350 * (PIECE + CHUNK_OVERHEAD_BYTES)
"""What may still come after a producer got the pause, most of a stream: it is late on a busy machine."""

NODES = '''
import time
from weftline.node import Piece, Ports, StreamNode, port

class Pours(StreamNode):
    """Gives as many pieces of 10 000 letters as the text says, one each round, to items that are not paused."""
    @classmethod
    def ports(cls, config, step):
        return Ports((port("text", "text"),), (port("text", "text", pieces=True),))
    def __init__(self, config):
        super().__init__(config)
        self.left = {}
        self.paused = set()
    def submit(self, item, inputs, urgency=None):
        self.left[item] = int(inputs["text"])
    def cancel(self, item):
        self.left.pop(item, None)
        self.paused.discard(item)
    def pause(self, item):
        self.paused.add(item)
    def resume(self, item):
        self.paused.discard(item)
    @property
    def busy(self):
        return any(item not in self.paused for item in self.left)
    def round(self):
        time.sleep(0.002)
        pieces = []
        for item in [item for item in self.left if item not in self.paused]:
            self.left[item] -= 1
            if self.left[item]:
                pieces.append(Piece(item, {"text": "x" * 10_000}))
            else:
                del self.left[item]
                pieces.append(Piece(item, {"text": "end"}, last=True))
        return pieces
'''


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[Callable[..., Session]]:
    (tmp_path / "nodes.py").write_text(NODES)
    sessions: list[Session] = []

    def open_one(**limits: Any) -> Session:
        p = Builder("one", base_dir=tmp_path, limits={"arena_bytes": 4 << 20, "stream_bytes_max": LIMIT} | limits)
        p.output("y", p.step("s", "nodes.py:Pours", text=p.input("x", "text")).text)
        sessions.append(load(p).open())
        return sessions[-1]

    yield open_one
    for session in sessions:
        session.run(x="1")
        held = session.stats()
        session.close()
        assert held["arena"]["leased_bytes"] == 0 and held["requests"]["open"] == 0


def unread() -> int:
    """Return how many bytes wait for readers in this process."""
    return sum(one.size_bytes for one in gc.get_objects() if type(one) is UnreadOutputs)  # asks no proxy


def settled() -> int:
    """Return how much is unread once no more of it comes."""
    before, now = -1, unread()
    while now != before:
        time.sleep(0.2)
        before, now = now, unread()
    return now


@pytest.mark.slow
def test_a_reader_that_stops_pauses_its_producer_until_it_reads_again(opened: Callable[..., Session]) -> None:
    session = opened()
    stream = session.stream(x="500")
    waiting = settled()
    assert LIMIT < waiting < LIMIT + ON_THE_WAY, "what is on its way when it is paused comes too"
    pieces = list(stream)
    assert [len(piece.value) for piece in pieces] == [PIECE] * 499 + [3]
    assert pieces[-1].last


@pytest.mark.slow
def test_other_streams_of_the_same_node_do_not_wait(opened: Callable[..., Session]) -> None:
    session = opened()
    slow = session.stream(x="500")
    settled()
    with ThreadPoolExecutor(4) as callers:
        started = time.monotonic()
        quick = list(callers.map(lambda _: sum(1 for _ in session.stream(x="100")), range(4)))
        assert quick == [100] * 4 and time.monotonic() - started < 5
    assert sum(1 for _ in slow) == 500


@pytest.mark.slow
def test_a_task_that_reads_slowly_is_waited_for(opened: Callable[..., Session]) -> None:
    session = opened()

    async def read() -> tuple[int, int]:
        count = most = 0
        async for _ in session.astream(x="500"):
            if count % 100 == 0:
                await asyncio.sleep(0.2)
            most = max(most, unread()) if count % 10 == 0 else most
            count += 1
        return count, most

    count, most = asyncio.run(read())
    assert count == 500 and most < LIMIT + ON_THE_WAY


@pytest.mark.slow
def test_an_unread_stream_is_cut_with_the_reason(opened: Callable[..., Session]) -> None:
    session = opened(stall_max_ms=500)
    stream = session.stream(x="500")
    time.sleep(1.2)
    assert session.stats()["requests"]["open"] == 0
    with pytest.raises(LimitReached, match="stall_max_ms"):
        list(stream)


@pytest.mark.slow
def test_an_abandoned_stream_frees_its_producer(opened: Callable[..., Session]) -> None:
    session = opened()
    for _ in range(3):
        stream = session.stream(x="500")
        settled()
        stream.close()
    session.stream(x="500")  # dropped at once; its finalizer leaves the rest to the runtime's thread
    until = time.monotonic() + 5
    while session.stats()["requests"]["cancelled"] < 4 and time.monotonic() < until:
        time.sleep(0.01)
    assert session.stats()["requests"]["cancelled"] == 4
    assert sum(1 for _ in session.stream(x="20")) == 20


@pytest.mark.slow
def test_who_only_wants_the_whole_is_never_stalled(opened: Callable[..., Session]) -> None:
    assert opened().run(x="300")["y"] == "end"


@pytest.mark.slow(but_first=1)
@pytest.mark.parametrize("priority", [101, -101, 1.5, True, "high"])
def test_a_priority_that_is_none_is_refused(opened: Callable[..., Session], priority: Any) -> None:
    session = opened()
    with pytest.raises(InputError, match="priority"):
        session.run(RequestOptions(priority=priority), x="1")
    assert (
        session.run(RequestOptions(priority=100), x="1")["y"]
        == session.run(RequestOptions(priority=-100), x="1")["y"]
        == "end"
    )


@pytest.mark.slow(but_first=1)
@pytest.mark.parametrize("sequence", ["", "a" * 129, 3, SequencePart("")])
def test_a_sequence_that_is_none_is_refused(opened: Callable[..., Session], sequence: Any) -> None:
    session = opened()
    with pytest.raises(InputError, match="sequence"):
        session.run(RequestOptions(sequence=sequence), x="1")
