"""Driver calls of arenas, share modes and events, by roles: equal for a real and a fake driver."""

import os
from typing import cast

import numpy as np
import pytest

from weftline.shm.block import Block
from weftline.shm.device.arena import DeviceArena, probe
from weftline.shm.device.driver import DriverError, GpuDriver
from weftline.shm.device.events import SharedEvents
from weftline.shm.device.tensor import DeviceTensor
from weftline.shm.spec import TensorSpec
from weftline.testing.fake_gpu.gpu import FakeGpu
from weftline.testing.fake_gpu.machine import FakeMachine
from weftline.testing.recorder import ROLES, Recorder, same_calls

MIB = 1 << 20


def life_of_an_arena(owner: GpuDriver, guest: GpuDriver) -> None:
    """Choose a share mode, share memory and events with a guest, move a tensor, and close everything."""
    arena = probe(owner, 3 * MIB).arena
    assert arena is not None
    theirs = DeviceArena.attach(guest, arena.size_bytes, arena.share_mode, os.dup(arena.fd), arena.handle)
    events = SharedEvents.create(owner, 2)
    opened = SharedEvents.attach(guest, events.handles)
    writing, reading = owner.stream(), guest.stream()
    place = Block(1, 512, 16, 1).place(0, 16)
    room = arena.view(place, TensorSpec("float32", (4,)), writable=True)
    tensor = DeviceTensor.from_array(owner, np.arange(4, dtype=np.float32), writing, into=room)
    ready = Block(-1, 64, 64, 2).place(0, 64)
    owner.record(events.at(ready), writing)
    owner.synchronize(writing)
    guest.wait(reading, opened.at(ready))
    seen = theirs.view(place, TensorSpec("float32", (4,)))
    into = np.zeros(4, np.float32)
    seen.host(guest, reading, into)
    del seen, tensor, room
    opened.close()
    theirs.close()
    arena.close()


def test_a_real_driver_is_asked_the_same_as_a_fake() -> None:
    pytest.importorskip("cuda.bindings.driver")
    from tests.shm.device.bindings import StandIn
    from weftline.shm.device.cuda import CudaDriver

    machine = FakeMachine()
    fakes = [Recorder(FakeGpu()), Recorder(FakeGpu())]
    fakes = [Recorder(machine.process()), Recorder(machine.process())]
    reals = [Recorder(CudaDriver("cuda:0", cast(type(os), StandIn()))) for _ in range(2)]
    life_of_an_arena(fakes[0].driver, fakes[1].driver)
    life_of_an_arena(reals[0].driver, reals[1].driver)
    assert [same_calls(real.calls, fake.calls) for real, fake in zip(reals, fakes, strict=True)] == ["", ""]
    assert len(fakes[0].calls) > 15


def test_a_call_is_recorded_by_the_roles_of_its_arguments() -> None:
    recorder = Recorder(FakeGpu("fake:0"))
    gpu = recorder.driver
    arena = DeviceArena.create(gpu, MIB)
    stream = gpu.stream()
    array = np.zeros(4, np.uint8)
    gpu.copy(arena.address + 256, array.ctypes.data, 4, stream)
    gpu.synchronize(stream)
    arena.close()
    assert [str(call) for call in recorder.calls] == [
        "granularity() = 2097152",
        "create(2097152) = memory 1",
        "map(memory 1, 2097152, True) = address 1",
        "export(memory 1) = descriptor",
        "release(memory 1)",
        "stream() = stream 1",
        "copy(address 1 + 256, host address, 4, stream 1)",
        "synchronize(stream 1)",
        "unmap(address 1, 2097152)",
    ]


def test_a_number_that_comes_again_is_something_new() -> None:
    class Few(FakeGpu):
        def event(self, shared: bool = False) -> int:
            return 7

        def destroy_event(self, event: int) -> None: ...

    recorder = Recorder(Few("fake:0"))
    gpu = recorder.driver
    gpu.destroy_event(gpu.event())
    gpu.destroy_event(gpu.event(shared=True))
    assert [str(call) for call in recorder.calls] == [
        "event() = event 1",
        "destroy_event(event 1)",
        "event(True) = event 2",
        "destroy_event(event 2)",
    ]


def test_a_refusal_is_noted_and_goes_on() -> None:
    recorder = Recorder(FakeGpu("fake-alone:0"))
    assert probe(recorder.driver, MIB).share_mode == "host"
    assert [call.result for call in recorder.calls if call.name in ("create", "share")] == ["refused: DriverError"] * 2
    with pytest.raises(DriverError):
        recorder.driver.create(MIB)
    with pytest.raises(AttributeError, match="has no 'melt'"):
        recorder.driver.melt()  # type: ignore[attr-defined]


def test_the_first_call_that_differs_is_reported() -> None:
    one, other = Recorder(FakeGpu("fake:0")), Recorder(FakeGpu("fake:0"))
    for recorder in (one, other):
        recorder.driver.granularity()
    assert same_calls(one.calls, other.calls) == ""
    one.driver.stream()
    assert same_calls(one.calls, other.calls) == (
        "call 2: the real driver received stream() = stream 1, the fake nothing"
    )
    other.driver.event()
    assert "the fake event() = event 1" in same_calls(one.calls, other.calls)


def test_every_call_of_the_protocol_has_its_roles() -> None:
    assert set(ROLES) == {name for name in vars(GpuDriver) if not name.startswith("_")} - {"device"}
