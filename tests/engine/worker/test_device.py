"""The worker's device: opening it and its arena, the scratch pool, and the completion thread."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from queue import Empty, SimpleQueue

import pytest

from weftline.engine.protocol import messages as msg
from weftline.engine.protocol.channel import ChannelClosed
from weftline.engine.worker import device as worker_device
from weftline.engine.worker.device import GRAIN_BYTES, CompletionThread, ScratchPool, WorkerDevice, open_device
from weftline.errors import LimitReached, MissingPackage
from weftline.shm.device.driver import DeviceLost, DeviceOutOfMemory, DriverError, GpuDriver
from weftline.shm.device.events import EVENTS_MAX
from weftline.testing.fake_gpu.gpu import FakeGpu

ARENA_BYTES = 3 << 20


def open_message(device: str = "fake:0", arena_bytes: int = ARENA_BYTES, ordering: str = "host") -> msg.OpenSteps:
    return msg.OpenSteps("w", 4096, 1, ".", ".", (), device, arena_bytes, ordering)


def test_a_worker_without_a_gpu_opens_none_and_reports_none() -> None:
    assert open_device(open_message(device="")) == (None, None, None)


def test_an_arena_is_sent_with_events_only_where_they_are_used() -> None:
    device, up, fd = open_device(open_message())
    assert isinstance(device, WorkerDevice) and device.arena is not None and up is not None
    assert (up.device, up.share_mode, up.why, up.events) == ("fake:0", "descriptor", "", ())
    assert up.size_bytes == device.arena.size_bytes == 4 << 20 and fd == device.arena.fd
    device.arena.close()
    device, up, _ = open_device(open_message(ordering="event"))
    assert device is not None and device.arena is not None and up is not None and len(up.events) == EVENTS_MAX
    device.arena.close()


def test_a_worker_without_device_outputs_reads_device_inputs() -> None:
    device, up, fd = open_device(open_message(arena_bytes=0))
    assert device is not None and device.arena is None and (up, fd) == (None, None)


def test_a_device_that_shares_nothing_is_reported_with_what_was_refused() -> None:
    device, up, fd = open_device(open_message("fake-alone:0"))
    assert device is not None and device.arena is None and fd is None
    assert up is not None and (up.size_bytes, up.share_mode) == (0, "host") and "descriptor: create" in up.why


@pytest.mark.parametrize("error", [DriverError("init", "NO_DEVICE"), MissingPackage("cuda-bindings", "cuda")])
def test_a_device_whose_driver_cannot_be_had_is_done_without(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(device: str) -> GpuDriver:
        raise error

    monkeypatch.setattr(worker_device, "open_driver", refuses)
    device, up, _ = open_device(open_message("cuda:0"))
    assert device is None and up == msg.DeviceUp("cuda:0", 0, "host", why=str(error))
    assert open_device(open_message("cuda:0", arena_bytes=0)) == (None, None, None)


def test_events_that_cannot_be_shared_leave_the_worker_with_ordering_host(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(self: FakeGpu, event: int) -> bytes:
        raise DriverError("export_event", "NOT_SUPPORTED")

    monkeypatch.setattr(FakeGpu, "export_event", refuses)
    device, up, _ = open_device(open_message(ordering="event"))
    assert device is not None and device.events is None and device.arena is not None
    assert up is not None and up.events == () and up.share_mode == "descriptor" and "events: export_event" in up.why
    device.arena.close()


def test_a_device_too_small_for_the_arena_names_the_option_to_lower() -> None:
    with pytest.raises(LimitReached, match=r"(?s)fake:0 has too little memory for an arena .*gpu\.arena_bytes"):
        open_device(open_message(arena_bytes=1 << 40))


MIB = 1 << 20


class Counting(FakeGpu):
    """A fake that notes what is allocated and freed."""

    def __init__(self, total_bytes: int = 64 * MIB) -> None:
        super().__init__("fake:0", total_bytes)
        self.allocated: list[int] = []
        self.freed = 0

    def allocate(self, size_bytes: int) -> int:
        address = super().allocate(size_bytes)
        self.allocated.append(size_bytes)
        return address

    def free(self, address: int) -> None:
        super().free(address)
        self.freed += 1


def test_released_memory_is_reused_for_requests_of_similar_size() -> None:
    driver = Counting()
    scratch = ScratchPool(driver)
    piece = scratch.allocate(3 * MIB)
    scratch.free([piece])
    assert scratch.allocate(2 * MIB).address == piece.address
    assert scratch.cached_bytes == 0
    scratch.free([piece])
    assert scratch.allocate(MIB).address != piece.address, "it would hold three times what it needs"
    assert driver.allocated == [3 * MIB, MIB]


def test_the_smallest_that_is_large_enough_is_taken() -> None:
    scratch = ScratchPool(Counting())
    small, large = scratch.allocate(2 * MIB), scratch.allocate(3 * MIB)
    scratch.free([large, small])
    assert scratch.allocate(2 * MIB).address == small.address
    assert scratch.allocate(2 * MIB).address == large.address


def test_more_than_is_kept_goes_back_to_the_device() -> None:
    driver = Counting()
    scratch = ScratchPool(driver, cached_bytes_max=3 * MIB)
    scratch.free([scratch.allocate(2 * MIB), scratch.allocate(MIB)])
    assert driver.freed == 0 and scratch.cached_bytes == 3 * MIB
    scratch.free([scratch.allocate(GRAIN_BYTES)])
    assert driver.freed == 1 and scratch.cached_bytes == MIB + GRAIN_BYTES


def test_a_device_that_is_full_is_asked_again_without_what_is_kept() -> None:
    driver = Counting(8 * MIB)
    scratch = ScratchPool(driver)
    scratch.free([scratch.allocate(6 * MIB)])
    scratch.allocate(2 * MIB + GRAIN_BYTES)
    assert driver.freed == 1
    with pytest.raises(DeviceOutOfMemory):
        scratch.allocate(8 * MIB)


PATIENCE_S = 10.0


class Device(FakeGpu):
    """Fake GPU whose events complete when the test sets them."""

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
        self.completion = CompletionThread(self.device, self.said.put, self.lost.put)

    def release(self, dispatch: int) -> threading.Event:
        event = self.device.made()
        self.completion.notify_released(dispatch, event, lambda: self.let_go.append(dispatch))
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


def test_released_is_sent_in_order_and_for_several_at_once(bench: Bench) -> None:
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


def test_settled_is_sent_after_every_event_and_in_order(bench: Bench) -> None:
    before = bench.release(1)
    events = [bench.device.made(), bench.device.made()]
    bench.completion.notify_settled(77, events, lambda: bench.let_go.append(77))
    for event in events:
        bench.device.come[event].set()
    before.set()
    assert bench.next() == msg.Released((1,))
    assert bench.next() == msg.Settled(77)
    bench.completion.reap()
    assert bench.let_go == [1, 77]


def test_a_lost_device_is_reported_once_and_nothing_is_released(bench: Bench) -> None:
    bench.device.lost = True
    bench.release(1).set()
    assert isinstance(bench.lost.get(timeout=PATIENCE_S), DeviceLost)
    assert bench.said.empty()


def test_it_ends_quietly_when_the_parent_is_gone(bench: Bench) -> None:
    def gone(message: msg.FromWorker) -> None:
        raise ChannelClosed("gone")

    bench.completion = CompletionThread(bench.device, gone, bench.lost.put)
    bench.release(1).set()
    bench.completion.stop()
    assert bench.lost.empty()


def test_stopping_waits_for_what_is_under_way(bench: Bench) -> None:
    event = bench.release(1)
    event.set()
    bench.completion.stop()
    assert bench.next() == msg.Released((1,)) and bench.let_go == [1]
