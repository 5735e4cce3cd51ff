"""A made-up machine runs work in every order that its seeds can find, and lets processes die as processes do."""

from __future__ import annotations

import os

import pytest

from tests.shm.device.fakes import brought_in, made, peek, poke, puts
from weftline.shm.device.driver import DeviceLost
from weftline.testing.fake_gpu.gpu import FakeGpu
from weftline.testing.fake_gpu.machine import FakeMachine
from weftline.testing.fake_gpu.watch import DEAD


def pair(machine: FakeMachine) -> tuple[FakeGpu, FakeGpu, int, int]:
    """Return two processes, and where the first one's memory lies in each."""
    writer, reader = machine.process(), machine.process()
    memory, address = made(writer)
    descriptor = writer.export(memory)
    seen = brought_in(reader, descriptor)
    os.close(descriptor)
    return writer, reader, address, seen


def shared_event(writer: FakeGpu, reader: FakeGpu) -> tuple[int, int]:
    event = writer.event(shared=True)
    return event, reader.import_event(writer.export_event(event))


def order_of(seed: int) -> str:
    """Return in which order two processes' kernels begin and end."""
    machine, ran = FakeMachine(seed), []
    for name in "ab":
        gpu = machine.process()
        for _ in range(3):
            gpu.launch(lambda name=name: ran.append(name), [], [], 0)  # type: ignore[misc]
    machine.settle()
    return "".join(ran)


def test_seeds_find_every_order_and_each_again() -> None:
    orders = [order_of(seed) for seed in range(400)]
    assert len(set(orders)) == 20  # of three and three: 6! / (3! 3!)
    assert orders == [order_of(seed) for seed in range(400)]


def test_nothing_runs_unless_the_machine_is_asked() -> None:
    machine = FakeMachine()
    gpu = machine.process()
    _, address = made(gpu)
    event = gpu.event()
    puts(gpu, address, b"hello", 0)
    gpu.record(event, 0)
    assert not gpu.finished(event) and peek(address) == bytes(5)
    steps = 0
    while machine.step():
        steps += 1
    assert steps == 3 and gpu.finished(event) and peek(address) == b"hello"  # it begins, it ends, the record


def test_a_wait_on_the_host_lets_the_machine_run() -> None:
    machine = FakeMachine()
    writer, reader, address, seen = pair(machine)
    event, ready = shared_event(writer, reader)
    puts(writer, address, b"hello", 0)
    writer.record(event, 0)
    stream, own = reader.stream(), reader.allocate(5)
    reader.wait(stream, ready)
    reader.copy(own, seen, 5, stream)
    reader.synchronize(stream)
    assert peek(own) == b"hello"


def test_device_work_of_a_process_runs_until_its_context_is_destroyed() -> None:
    machine = FakeMachine()
    writer, _, address, seen = pair(machine)
    puts(writer, address, b"hello", 0)
    machine.kill(writer)
    machine.settle()
    assert peek(seen) == b"hello"
    puts(writer, address, b"later", 0)
    machine.dead(writer)
    machine.settle()
    assert peek(seen) == b"hello"


def test_memory_and_a_pending_event_outlive_their_process() -> None:
    machine = FakeMachine()
    writer, reader, address, seen = pair(machine)
    event, ready = shared_event(writer, reader)
    poke(address, b"hello")
    writer.record(event, 0)
    reader.wait(0, ready)
    assert not reader.is_stuck
    machine.dead(writer)
    machine.settle()
    assert peek(seen) == b"hello" and reader.is_stuck and not reader.finished(ready)
    with pytest.raises(DeviceLost, match="PRODUCER_DIED"):
        reader.synchronize(0)
    assert [one.rule for one in machine.watch.found] == [DEAD]


def test_what_had_begun_runs_on_at_most_until_later_work_has_passed() -> None:
    passed = []
    for seed in range(20):
        machine = FakeMachine(seed)
        dying, living = machine.process(), machine.process()
        ran: list[str] = []
        dying.launch(lambda: ran.append("begun"), [], [], 0)  # noqa: B023
        dying.launch(lambda: ran.append("not begun"), [], [], 0)  # noqa: B023
        earlier, later = living.event(), living.event()
        living.record(earlier, 0)
        while not dying.queues[0].works[0].begun:
            machine.step()
        machine.dead(dying)
        if not living.finished(earlier):
            living.wait_event(earlier)
            passed.append(bool(ran))
        living.record(later, 0)
        living.wait_event(later)
        assert ran == ["begun"]
    assert True in passed and False in passed  # what was put there before the death shows nothing


def test_a_wait_that_can_never_end_is_device_lost() -> None:
    machine = FakeMachine()
    writer, reader, _, _ = pair(machine)
    event, ready = shared_event(writer, reader)
    writer._events.mark(event)  # counted, and on no stream
    reader.wait(0, ready)
    with pytest.raises(DeviceLost, match="STUCK"):
        reader.synchronize(0)


def test_a_kernel_that_raises_loses_the_device_for_its_process_alone() -> None:
    machine = FakeMachine()
    writer, reader, address, seen = pair(machine)
    event, _ = shared_event(writer, reader)
    writer.launch(lambda: 1 // 0, [], [(address, 4)], 0)  # type: ignore[arg-type, return-value]
    writer.record(event, 0)
    machine.settle()
    with pytest.raises(DeviceLost, match="a kernel failed"):
        writer.finished(event)
    reader.copy(reader.allocate(5), seen, 5, 0)
    reader.synchronize(0)
