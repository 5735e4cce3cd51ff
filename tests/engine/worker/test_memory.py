"""Fetch: device-only tensors copied to host memory for a process that cannot attach the device arena."""

from __future__ import annotations

import os
from collections.abc import Iterator

import msgspec
import numpy as np
import pytest

from tests.engine.device_hosted import DEVICE_BYTES, OWN, DeviceBench
from tests.engine.device_steps import Foreign
from tests.engine.fire import descriptors
from tests.engine.hosted import ARENA_BYTES, run_of
from weftline.engine.protocol import messages as msg
from weftline.engine.protocol.values import unpack
from weftline.engine.worker.device import WorkerDevice
from weftline.engine.worker.memory import fetch
from weftline.nodes.contract import Batch, Outputs
from weftline.shm.block import Place
from weftline.shm.device.arena import DeviceArena
from weftline.shm.device.driver import EVENT_HANDLE_BYTES
from weftline.shm.lease import EVENT_BYTES
from weftline.testing.fake_gpu.gpu import FakeGpu
from weftline.testing.fake_gpu.machine import FakeMachine

BIG = 10_000
X, Y = {"x": "float32[?]"}, {"y": "float32[?]"}


@pytest.fixture(params=range(5))
def bench(request: pytest.FixtureRequest) -> Iterator[DeviceBench]:
    made = DeviceBench(marks=True, machine=FakeMachine(request.param))
    yield made
    made.close()


def numbers(value: float, size: int = BIG) -> np.ndarray:
    return np.arange(size, dtype=np.float32) + np.float32(value)


def left_unfinished(bench: DeviceBench) -> tuple[list[msg.Value], msg.BatchDone]:
    """Return the device outputs of a step whose device work is unfinished."""

    def doubled(batch: Batch) -> Outputs:
        seen = [np.asarray(x) for x in batch["x"]]
        made = [bench.made(x.shape) for x in seen]
        work = lambda: [np.multiply(x, 2, out=y) for x, y in zip(seen, made)]  # noqa: E731
        bench.driver.launch(lambda: (work(), None)[1], [], [], steps[0].stream)
        return {"y": [Foreign(y) for y in made]}

    steps = [bench.on_gpu(doubled, X, Y, {"y": "device"})]
    rows = [[bench.value(numbers(at), "float32[?]")] for at in range(2)]
    done = steps[0].run(run_of(rows, ready=bench.event(1)))
    return [one.outputs[0] for one in done.results if isinstance(one, msg.ItemResult)], done


def test_what_is_fetched_is_whole_although_the_device_was_still_at_it(bench: DeviceBench) -> None:
    values, done = left_unfinished(bench)
    assert done.unfinished and all(value.device_place and value.ready and not value.place for value in values)
    answer = fetch(bench.memory, msg.Fetch(7, tuple(values)))
    assert (answer.token, answer.refused) == (7, "") and bench.asked[-1] == [BIG * 4] * 2
    for at, value in enumerate(answer.values):
        assert (
            value.place is not None and value.place.arena == OWN and value.device_place is None and value.ready is None
        )
        assert (unpack(value, bench.arenas) == 2 * numbers(at)).all()


def test_a_worker_writes_device_outputs_to_host_memory_on_request() -> None:
    bench = DeviceBench()
    step = bench.on_gpu(lambda batch: {"y": list(batch["x"])}, X, Y, {"y": "device"})
    (value,) = bench.device_values([numbers(3)])
    bench.device.shares_outputs = False
    (given,) = step.run(run_of([[value]])).results
    assert (
        isinstance(given, msg.ItemResult) and given.outputs[0].device_place is not None
    )  # it was another's, and is passed on
    assert (unpack(given.outputs[0], bench.arenas) == numbers(3)).all()
    step = bench.on_gpu(lambda batch: {"y": [Foreign(np.asarray(x) + 1) for x in batch["x"]]}, X, Y, {"y": "device"})
    (given,) = step.run(run_of([[value]])).results
    assert isinstance(given, msg.ItemResult) and given.outputs[0].device_place is None
    assert (unpack(given.outputs[0], bench.arenas) == numbers(4)).all()
    bench.close()


def test_an_arena_with_refused_events_is_read_when_it_is_not_written() -> None:
    bench = DeviceBench()
    other = DeviceArena.create(bench.theirs, DEVICE_BYTES)
    reported = msg.AttachDevice(9, DEVICE_BYTES, "descriptor", events=(b"e" * EVENT_HANDLE_BYTES,))
    failed = bench.device.attach(reported, os.dup(other.fd))
    assert failed is not None and failed.arena == -9 and "import_event" in failed.why
    whole = msg.Value("tensor", "float32", (BIG,), device_place=Place(9, 0, BIG * 4, 0, 1))
    late = msgspec.structs.replace(whole, ready=Place(-9, 0, EVENT_BYTES, 0, 2))
    step = bench.on_gpu(lambda batch: {"y": [float(np.asarray(x)[0]) for x in batch["x"]]}, X, {"y": "json"})
    assert bench.answers(step.run(run_of([[whole]]))) == [0.0]
    (refused,) = bench.answers(step.run(run_of([[late]])))
    assert refused.error == "StepError" and "cannot be waited for here (import_event" in refused.message
    host = bench.value(numbers(5), "float32[?]")
    both = msgspec.structs.replace(late, place=host.place)
    assert bench.answers(step.run(run_of([[both]]))) == [5.0]
    bench.close()
    other.close()


@pytest.mark.slow
def test_a_refused_arena_is_reported_with_its_reason_and_closed() -> None:
    device = WorkerDevice(FakeGpu("fake-closed:0"))
    theirs = DeviceArena.create(FakeGpu("fake-closed:0"), DEVICE_BYTES)
    before = descriptors()
    failed = device.attach(msg.AttachDevice(9, DEVICE_BYTES, "descriptor"), os.dup(theirs.fd))
    assert failed is not None and failed.arena == 9 and "NOT_PERMITTED" in failed.why
    assert descriptors() <= before and not device.can_read(msg.Value("tensor", device_place=Place(9, 0, 4, 0, 1)))
    theirs.close()


def test_a_full_arena_and_a_missing_block_have_readable_errors() -> None:
    bench = DeviceBench()
    (value,) = bench.device_values([numbers(3)])
    bench.block(ARENA_BYTES)
    assert fetch(bench.memory, msg.Fetch(1, (value,))) == msg.Fetched(1, (), "no room")
    bench.memory.retire(4)
    assert "cannot be read here" in fetch(bench.memory, msg.Fetch(1, (value,))).refused
    bench.memory.device = None
    assert "no device driver" in fetch(bench.memory, msg.Fetch(1, (value,))).refused
    bench.close()
