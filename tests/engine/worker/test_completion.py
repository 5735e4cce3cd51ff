"""The thread that waits for the device: what is said when, and who lets go of what."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from queue import Empty, SimpleQueue

import pytest

from weftline.engine import messages as msg
from weftline.engine.channel import ChannelClosed
from weftline.engine.worker.completion import Completion
from weftline.shm.device.driver import DeviceLost, DriverError
from weftline.shm.device.fake import FakeGpu

PATIENCE_S = 10.0


class Device(FakeGpu):
    """A fake whose events come when the test says so."""

    def __init__(self) -> None:
        super().__init__("fake:0")
        self.come: dict[int, threading.Event] = {}
        self.lost = False

    def made(self) -> int:
        number = len(self.come) + 1
        self.come[number] = threading.Event()
        return number

    def finished(self, event: int) -> bool:
        return self.come[event].is_set()

    def wait_event(self, event: int) -> None:
        if not self.come[event].wait(PATIENCE_S):
            raise TimeoutError
        if self.lost:
            raise DeviceLost("wait_event", "ILLEGAL_ADDRESS")


class Bench:
    def __init__(self) -> None:
        self.device = Device()
        self.said: SimpleQueue[msg.FromWorker] = SimpleQueue()
        self.lost: SimpleQueue[DriverError] = SimpleQueue()
        self.let_go: list[int] = []
        self.completion = Completion(self.device, self.said.put, self.lost.put)

    def release(self, dispatch: int) -> threading.Event:
        event = self.device.made()
        self.completion.release(dispatch, event, lambda: self.let_go.append(dispatch))
        return self.device.come[event]

    def next(self) -> msg.FromWorker:
        return self.said.get(timeout=PATIENCE_S)


@pytest.fixture
def bench() -> Iterator[Bench]:
    made = Bench()
    yield made
    for event in made.device.come.values():
        event.set()
    made.completion.stop()


def test_released_is_said_in_order_and_for_several_at_once(bench: Bench) -> None:
    one, two, three = bench.release(1), bench.release(2), bench.release(3)
    two.set()
    with pytest.raises(Empty):
        bench.said.get_nowait()
    one.set()
    first = bench.next()
    assert first in (msg.Released((1, 2)), msg.Released((1,)))
    if first == msg.Released((1,)):
        assert bench.next() == msg.Released((2,))
    three.set()
    assert bench.next() == msg.Released((3,))


def test_only_the_workers_own_thread_lets_go(bench: Bench) -> None:
    bench.release(1).set()
    assert bench.next() == msg.Released((1,))
    assert bench.let_go == []
    bench.completion.reap()
    assert bench.let_go == [1]


def test_settled_is_said_when_every_event_has_come_and_after_what_came_before(bench: Bench) -> None:
    before = bench.release(1)
    events = [bench.device.made(), bench.device.made()]
    bench.completion.settle(77, events, lambda: bench.let_go.append(77))
    for event in events:
        bench.device.come[event].set()
    before.set()
    assert bench.next() == msg.Released((1,))
    assert bench.next() == msg.Settled(77)
    bench.completion.reap()
    assert bench.let_go == [1, 77]


def test_a_lost_device_is_told_once_and_nothing_is_released(bench: Bench) -> None:
    bench.device.lost = True
    bench.release(1).set()
    assert isinstance(bench.lost.get(timeout=PATIENCE_S), DeviceLost)
    assert bench.said.empty()


def test_it_ends_quietly_when_nobody_is_there_to_hear(bench: Bench) -> None:
    def gone(message: msg.FromWorker) -> None:
        raise ChannelClosed("gone")

    bench.completion = Completion(bench.device, gone, bench.lost.put)
    bench.release(1).set()
    bench.completion.stop()
    assert bench.lost.empty()


def test_stopping_waits_for_what_is_under_way(bench: Bench) -> None:
    event = bench.release(1)
    event.set()
    bench.completion.stop()
    assert bench.next() == msg.Released((1,)) and bench.let_go == [1]
