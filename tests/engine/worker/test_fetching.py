"""Tensors on a device, copied to host memory for who cannot attach the arena; and a worker that gives there no more."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from tests.engine.hosted import ARENA_BYTES, run_of
from tests.engine.near_hosted import OWN, NearBench
from tests.engine.near_steps import Foreign
from weftline.engine import messages as msg
from weftline.engine.values import unpack
from weftline.engine.worker.fetching import fetch
from weftline.nodes.contract import Batch, Outputs
from weftline.shm.device.fake_machine import FakeMachine

BIG = 10_000
X, Y = {"x": "float32[?]"}, {"y": "float32[?]"}


@pytest.fixture(params=range(5))
def bench(request: pytest.FixtureRequest) -> Iterator[NearBench]:
    made = NearBench(marks=True, machine=FakeMachine(request.param))
    yield made
    made.close()


def numbers(value: float, size: int = BIG) -> np.ndarray:
    return np.arange(size, dtype=np.float32) + np.float32(value)


def left_unfinished(bench: NearBench) -> tuple[list[msg.Value], msg.Done]:
    """Return what a step has given on its device, which is still at it."""

    def doubled(batch: Batch) -> Outputs:
        seen = [np.asarray(x) for x in batch["x"]]
        made = [bench.made(x.shape) for x in seen]
        work = lambda: [np.multiply(x, 2, out=y) for x, y in zip(seen, made)]  # noqa: E731
        bench.driver.launch(lambda: (work(), None)[1], [], [], steps[0].stream)
        return {"y": [Foreign(y) for y in made]}

    steps = [bench.on_gpu(doubled, X, Y, {"y": "device"})]
    rows = [[bench.value(numbers(at), "float32[?]")] for at in range(2)]
    done = steps[0].run(run_of(rows, ready=bench.event(1)))
    return [one.outputs[0] for one in done.results if isinstance(one, msg.Given)], done


def test_what_is_fetched_is_whole_although_the_device_was_still_at_it(bench: NearBench) -> None:
    values, done = left_unfinished(bench)
    assert done.unfinished and all(value.near and value.ready and not value.place for value in values)
    answer = fetch(bench.memory, msg.Fetch(7, tuple(values)))
    assert (answer.token, answer.refused) == (7, "") and bench.asked[-1] == [BIG * 4] * 2
    for at, value in enumerate(answer.values):
        assert value.place is not None and value.place.arena == OWN and value.near is None and value.ready is None
        assert (unpack(value, bench.arenas) == 2 * numbers(at)).all()


def test_a_worker_that_is_told_to_gives_in_host_memory_what_it_gave_on_its_device() -> None:
    bench = NearBench()
    step = bench.on_gpu(lambda batch: {"y": list(batch["x"])}, X, Y, {"y": "device"})
    (value,) = bench.near_values([numbers(3)])
    bench.near.gives = False
    (given,) = step.run(run_of([[value]])).results
    assert isinstance(given, msg.Given) and given.outputs[0].near is not None  # it was another's, and is passed on
    assert (unpack(given.outputs[0], bench.arenas) == numbers(3)).all()
    step = bench.on_gpu(lambda batch: {"y": [Foreign(np.asarray(x) + 1) for x in batch["x"]]}, X, Y, {"y": "device"})
    (given,) = step.run(run_of([[value]])).results
    assert isinstance(given, msg.Given) and given.outputs[0].near is None
    assert (unpack(given.outputs[0], bench.arenas) == numbers(4)).all()
    bench.close()


def test_want_of_room_and_what_is_not_there_are_said_in_words() -> None:
    bench = NearBench()
    (value,) = bench.near_values([numbers(3)])
    bench.block(ARENA_BYTES)
    assert fetch(bench.memory, msg.Fetch(1, (value,))) == msg.Fetched(1, (), "no room")
    bench.memory.retire(4)
    assert "cannot be read here" in fetch(bench.memory, msg.Fetch(1, (value,))).refused
    bench.memory.near = None
    assert "no way to the device" in fetch(bench.memory, msg.Fetch(1, (value,))).refused
    bench.close()
