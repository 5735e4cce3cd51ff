"""Streams of a fake GPU keep their order, wait for each other by events, and tell who waits in vain."""

from __future__ import annotations

import ctypes
import threading

import pytest

from tests.shm.device.fakes import brought_in, made, peek, poke, puts
from weftline.shm.device.driver import DeviceLost, DriverError
from weftline.testing.fake_gpu import streams
from weftline.testing.fake_gpu.context import Process
from weftline.testing.fake_gpu.gpu import GRANULARITY_BYTES, FakeGpu


class Pair:
    """A producer and a consumer of one process, and an event of the producer's whose record must be completed."""

    def __init__(self, producer: Process | None = None) -> None:
        self.producer = FakeGpu(process=producer)
        self.consumer = FakeGpu()
        memory, self.address = made(self.producer)
        self.seen = brought_in(self.consumer, self.producer.export(memory))
        self.event = self.producer.event(shared=True)
        self.ready = self.consumer.import_event(self.producer.export_event(self.event))
        self.gate = threading.Event()

    def hold(self) -> None:
        """Have the producer's record wait for `gate`: it is counted, and not done."""
        table = self.producer._events
        self.mark = table.mark(self.event)

    def pass_on(self) -> None:
        self.mark.event.finish(self.mark.number)


def test_an_event_that_was_never_recorded_is_finished() -> None:
    gpu = FakeGpu()
    event = gpu.event()
    assert gpu.finished(event)
    gpu.wait_event(event)
    gpu.wait(gpu.stream(), event)


def test_what_lies_behind_another_process_s_event_waits_for_it() -> None:
    pair = Pair()
    pair.hold()
    stream, done = pair.consumer.stream(), pair.consumer.event()
    pair.consumer.wait(stream, pair.ready)
    own = pair.consumer.allocate(5)
    pair.consumer.copy(own, pair.seen, 5, stream)
    pair.consumer.record(done, stream)
    assert not pair.consumer.finished(done) and not pair.consumer.finished(pair.ready)
    poke(pair.address, b"hello")
    pair.pass_on()
    pair.consumer.synchronize(stream)
    assert pair.consumer.finished(done) and peek(own) == b"hello"


def test_a_wait_is_for_what_the_event_marks_at_that_time() -> None:
    pair = Pair()
    pair.hold()
    early = pair.mark
    stream = pair.consumer.stream()
    pair.consumer.wait(stream, pair.ready)
    pair.hold()
    early.event.finish(early.number)
    pair.consumer.synchronize(stream)
    assert not pair.consumer.finished(pair.ready)


def test_what_waits_goes_on_by_itself() -> None:
    pair = Pair()
    pair.hold()
    stream = pair.consumer.stream()
    seen = threading.Event()
    pair.consumer.wait(stream, pair.ready)
    pair.consumer.launch(seen.set, [(pair.seen, 5)], [], stream)
    assert not seen.is_set()
    pair.pass_on()
    assert seen.wait(10)


def test_a_stream_that_was_destroyed_does_what_lies_on_it() -> None:
    pair = Pair()
    pair.hold()
    stream = pair.consumer.stream()
    seen = threading.Event()
    pair.consumer.wait(stream, pair.ready)
    pair.consumer.launch(seen.set, [], [], stream)
    pair.consumer.destroy_stream(stream)
    with pytest.raises(DriverError, match="INVALID_HANDLE"):
        pair.consumer.record(pair.consumer.event(), stream)
    pair.pass_on()
    assert seen.wait(10)


def test_memory_that_pending_work_uses_is_not_given_back() -> None:
    pair = Pair()
    pair.hold()
    stream = pair.consumer.stream()
    own = pair.consumer.allocate(5)
    pair.consumer.wait(stream, pair.ready)
    pair.consumer.copy(own, pair.seen, 5, stream)
    for call in (lambda: pair.consumer.free(own), lambda: pair.consumer.unmap(pair.seen, GRANULARITY_BYTES)):
        with pytest.raises(DriverError, match="BUSY"):
            call()
    pair.pass_on()
    pair.consumer.synchronize(stream)
    pair.consumer.free(own)


def test_host_memory_that_is_not_page_locked_is_taken_at_once() -> None:
    pair = Pair()
    pair.hold()
    stream = pair.consumer.stream()
    own = pair.consumer.allocate(10)
    plain, locked = ctypes.create_string_buffer(b"hello"), ctypes.create_string_buffer(b"hello")
    pair.consumer.lock_pages(ctypes.addressof(locked), 5, False)
    pair.consumer.wait(stream, pair.ready)
    for at, source in enumerate((plain, locked)):
        pair.consumer.copy(own + 5 * at, ctypes.addressof(source), 5, stream)
        source.raw = b"later!"
    pair.pass_on()
    pair.consumer.synchronize(stream)
    assert peek(own, 10) == b"hellolater"


def test_a_copy_to_pageable_host_memory_is_complete_when_it_returns() -> None:
    pair = Pair()
    pair.hold()
    stream = pair.consumer.stream()
    plain = ctypes.create_string_buffer(5)
    pair.consumer.wait(stream, pair.ready)
    poke(pair.address, b"hello")
    threading.Timer(0.01, pair.pass_on).start()
    pair.consumer.copy(ctypes.addressof(plain), pair.seen, 5, stream)
    assert plain.raw == b"hello"


def test_only_its_maker_records_an_event() -> None:
    pair = Pair()
    with pytest.raises(DriverError, match="NOT_PERMITTED"):
        pair.consumer.record(pair.ready, 0)


def test_an_event_is_gone_everywhere_when_its_maker_has_destroyed_it() -> None:
    pair = Pair()
    handle = pair.producer.export_event(pair.event)
    pair.hold()
    stream = pair.consumer.stream()
    pair.consumer.wait(stream, pair.ready)
    waited = pair.consumer.queues[-1].works[0].waits
    pair.producer.destroy_event(pair.event)
    for call in (
        lambda: pair.consumer.finished(pair.ready),
        lambda: pair.consumer.wait(stream, pair.ready),
        lambda: pair.consumer.import_event(handle),
    ):
        with pytest.raises(DriverError, match="INVALID_HANDLE"):
            call()
    with pytest.raises(DeviceLost, match="PRODUCER_DIED"):
        pair.consumer.synchronize(stream)
    again = pair.producer.event(shared=True)
    assert pair.producer.slot_of(again) != pair.mark.event.slot  # something pending may write there yet
    pair.pass_on()
    later = pair.producer.event(shared=True)
    assert pair.producer.slot_of(later) == pair.mark.event.slot
    pair.producer.record(later, 0)
    assert waited is not None and not waited.is_done


def test_a_shared_event_may_be_made_before_the_memory_it_lies_behind() -> None:
    producer, consumer = FakeGpu(), FakeGpu()
    producer.allocate(64)  # of its own, not shared
    event = producer.event(shared=True)
    producer.record(event, 0)
    with pytest.raises(DriverError, match="NOT_READY"):
        producer.export_event(event)
    brought_in(consumer, producer.export(made(producer)[0]))
    ready = consumer.import_event(producer.export_event(event))
    assert consumer.finished(ready) and producer.finished(event)
    mark = producer._events.mark(event)
    assert not consumer.finished(ready) and not producer.finished(event)
    mark.event.finish(mark.number)
    assert consumer.finished(ready)


@pytest.mark.parametrize("wait", ["synchronize", "wait_event", "copy"])
def test_a_wait_for_a_dead_process_is_reported(wait: str) -> None:
    pair = Pair(producer=Process(2**22 + 1, 1))  # a pid that no process has
    pair.hold()
    stream, done = pair.consumer.stream(), pair.consumer.event()
    other, host = pair.consumer.stream(), ctypes.create_string_buffer(5)
    pair.consumer.wait(stream, pair.ready)
    pair.consumer.record(done, stream)
    pair.consumer.wait(other, done)
    assert pair.consumer.is_stuck
    with pytest.raises(DeviceLost, match="PRODUCER_DIED"):
        {
            "synchronize": lambda: pair.consumer.synchronize(other),
            "wait_event": lambda: pair.consumer.wait_event(done),
            "copy": lambda: pair.consumer.copy(ctypes.addressof(host), pair.seen, 5, other),
        }[wait]()


def test_a_wait_for_a_process_that_lives_and_does_nothing_has_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "WAIT_S_MAX", 0.01)
    pair = Pair()
    pair.hold()
    with pytest.raises(DeviceLost, match=r"TIMEOUT.*0\.01 s"):
        pair.consumer.wait_event(pair.ready)
    pair.pass_on()


def test_writes_are_in_the_order_of_their_stream() -> None:
    gpu = FakeGpu()
    _, address = made(gpu)
    for data in (b"first", b"later"):
        puts(gpu, address, data, 0)
    gpu.synchronize(0)
    assert peek(address) == b"later"


def test_a_record_is_done_for_others_when_those_before_it_are() -> None:
    pair = Pair()
    pair.hold()
    first = pair.mark
    pair.hold()
    pair.pass_on()
    assert not pair.consumer.finished(pair.ready) and pair.producer.finished(pair.event)
    first.event.finish(first.number)
    assert pair.consumer.finished(pair.ready)


@pytest.mark.parametrize("alive", [True, False])
def test_streams_that_wait_for_each_other_in_turn_are_no_riddle(alive: bool) -> None:
    pair = Pair(producer=None if alive else Process(2**22 + 1, 1))
    pair.hold()
    gpu, (one, other) = pair.consumer, (pair.consumer.stream(), pair.consumer.stream())
    gpu.wait(one, pair.ready)
    for _ in range(3):
        for here, there in ((one, other), (other, one)):
            event = gpu.event()
            gpu.record(event, here)
            gpu.wait(there, event)
    assert gpu.is_stuck is not alive
    if alive:
        pair.pass_on()
        gpu.synchronize(other)


def test_events_lie_behind_an_allocation_once_it_is_shared() -> None:
    producer, consumer = FakeGpu("fake-legacy:0"), FakeGpu("fake-legacy:0")
    address = producer.allocate(GRANULARITY_BYTES)
    event = producer.event(shared=True)
    consumer.open_shared(producer.share(address))
    assert consumer.finished(consumer.import_event(producer.export_event(event)))


def test_a_kernel_may_ask_the_driver() -> None:
    gpu, ran = FakeGpu(), []
    event = gpu.event()

    def kernel() -> None:
        ran.append(gpu.finished(event))

    gpu.launch(kernel, [], [], 0)
    gpu.synchronize(0)
    assert ran == [True]
