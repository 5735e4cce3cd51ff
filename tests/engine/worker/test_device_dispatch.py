"""Steps hosted on a fake device: inputs read in place, outputs placed for their readers, and the copies made."""

from __future__ import annotations

import contextlib
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator
from types import SimpleNamespace

import numpy as np
import pytest

from tests.engine.device_hosted import OTHER_DEVICE, OWN, OWN_DEVICE, DeviceBench, kinds
from tests.engine.device_steps import Foreign
from tests.engine.hosted import run_of
from weftline.engine.protocol import messages as msg
from weftline.engine.protocol.values import unpack
from weftline.engine.worker.batch import HostedStep
from weftline.engine.worker.chain import HostedChain
from weftline.engine.worker.device import ScratchBlock, WorkerDevice
from weftline.engine.worker.quarantine_check import digest
from weftline.errors import StepError
from weftline.nodes.contract import Batch, Outputs
from weftline.shm.block import INLINE_BYTES_MAX
from weftline.shm.device.driver import DeviceLost, DeviceOutOfMemory, DriverError
from weftline.shm.device.tensor import DeviceTensor
from weftline.shm.lease import EVENT_BYTES
from weftline.shm.spec import ITEM_BYTES, STAND_INS
from weftline.testing.fake_gpu.gpu import FakeGpu
from weftline.testing.fake_gpu.machine import FakeMachine

BIG = 10_000
X, Y = {"x": "float32[?]"}, {"y": "float32[?]"}


@pytest.fixture
def bench() -> Iterator[DeviceBench]:
    with_device = DeviceBench()
    yield with_device
    with_device.close()


def numbers(value: float, size: int = BIG) -> np.ndarray:
    return np.arange(size, dtype=np.float32) + np.float32(value)


def same(batch: Batch) -> Outputs:
    return {"y": list(batch["x"])}


def doubled(batch: Batch) -> Outputs:
    return {"y": [Foreign(np.asarray(x) * 2) for x in batch["x"]]}


def given(done: msg.BatchDone) -> list[msg.ItemResult]:
    return [result for result in done.results if isinstance(result, msg.ItemResult)]


def only(done: msg.BatchDone) -> msg.Value:
    (result,) = done.results
    assert isinstance(result, msg.ItemResult), result
    return result.outputs[0]


# inputs


def test_values_on_the_device_are_passed_in_place_and_read_only(bench: DeviceBench) -> None:
    (value,) = bench.device_values([numbers(1)])
    reported: list[DeviceTensor] = []

    def look(batch: Batch) -> Outputs:
        reported.extend(batch["x"])
        return {"seen": [float(np.asarray(x)[0]) for x in batch["x"]]}

    done = bench.on_gpu(look, X, {"seen": "json"}).run(run_of([[value]]))
    assert bench.answers(done) == [1.0]
    assert reported[0].address == bench.device.view(value).address and not reported[0].writable
    assert bench.copies == [] and done.device_moved_bytes == 0


def test_host_inputs_of_one_size_are_uploaded_into_one_block(bench: DeviceBench) -> None:
    rows = [[bench.value(numbers(at), "float32[?]")] for at in range(3)]

    def total(batch: Batch) -> Outputs:
        assert kinds(batch["x"]) == ["DeviceTensor"] * 3
        whole = batch.stacked("x")
        assert whole.address == batch["x"][0].address and whole.shape == (3, BIG)
        return {"seen": [float(x) for x in np.asarray(whole)[:, 0]]}

    done = bench.on_gpu(total, X, {"seen": "json"}).run(run_of(rows))
    assert bench.answers(done) == [0.0, 1.0, 2.0]
    assert done.device_moved_bytes == 3 * BIG * 4


def test_neighbours_in_host_memory_are_one_copy_and_so_are_small_values(bench: DeviceBench) -> None:
    block = bench.block(2 * BIG * 4, OWN)
    values = []
    for at in range(2):
        place = block.place(at * BIG * 4, BIG * 4)
        np.ndarray(BIG, np.float32, bench.arenas[OWN].buffer, place.offset)[:] = numbers(at)
        values.append(msg.Value("tensor", "float32", (BIG,), place=place))
    bench.on_gpu(lambda batch: {"seen": [0] * len(batch)}, X, {"seen": "json"}).run(run_of([[one] for one in values]))
    assert bench.copies == [2 * BIG * 4]
    bench.copies.clear()
    small = [[bench.value(numbers(at, 8), "float32[?]")] for at in range(5)]

    def first(batch: Batch) -> Outputs:
        return {"seen": [float(np.asarray(x)[0]) for x in batch["x"]]}

    done = bench.on_gpu(first, X, {"seen": "json"}).run(run_of(small))
    assert bench.answers(done) == [0, 1, 2, 3, 4] and bench.copies == [5 * 32]


def test_tensors_that_lie_apart_are_stacked_by_copies_within_the_device(bench: DeviceBench) -> None:
    rows = [bench.device_values([numbers(at)]) for at in (5, 7)]

    def total(batch: Batch) -> Outputs:
        return {"seen": [float(x) for x in np.asarray(batch.stacked("x"))[:, 1]]}

    done = bench.on_gpu(total, X, {"seen": "json"}).run(run_of(rows))
    assert bench.answers(done) == [6.0, 8.0] and bench.copies == [BIG * 4] * 2 and done.device_moved_bytes == 0


def test_different_shapes_cannot_be_stacked_as_on_the_host(bench: DeviceBench) -> None:
    rows = [bench.device_values([numbers(0)]), bench.device_values([numbers(0, BIG + 1)])]
    done = bench.on_gpu(lambda batch: {"y": batch.stacked("x")}, X, Y).run(run_of(rows))
    first, second = bench.answers(done)
    assert first.shape == (BIG,) and second.shape == (BIG + 1,)  # halved: each is a batch alone


def test_an_input_that_the_node_takes_on_the_host_is_brought_down(bench: DeviceBench) -> None:
    (value,) = bench.device_values([numbers(3)])

    def look(batch: Batch) -> Outputs:
        assert kinds(batch["x"]) == ["ndarray"] and not batch["x"][0].flags.writeable
        return {"seen": [float(batch["x"][0][0])]}

    done = bench.on_gpu(look, X, {"seen": "json"}, device_inputs=()).run(run_of([[value]]))
    assert bench.answers(done) == [3.0] and done.device_moved_bytes == BIG * 4
    on_cpu = bench.step(look, X, {"seen": "json"})
    assert bench.answers(on_cpu.run(run_of([[value]]))) == [3.0]


def test_a_value_in_an_unmapped_arena_fails_its_item_with_the_reason(bench: DeviceBench) -> None:
    (value,) = bench.device_values([numbers(3)])
    bench.memory.retire(OTHER_DEVICE)
    (reported,) = bench.answers(bench.on_gpu(same, X, Y).run(run_of([[value]])))
    assert reported.error == "StepError" and "cannot be read here" in reported.message


def test_a_step_that_writes_into_its_inputs_gets_copies_of_its_own(bench: DeviceBench) -> None:
    (value,) = bench.device_values([numbers(1)])

    def add(batch: Batch) -> Outputs:
        for x in batch["x"]:
            np.asarray(x)[:] += 1
        return {"y": list(batch["x"])}

    done = bench.on_gpu(add, X, Y, {"y": "device"}, mutates_inputs=True).run(run_of([[value]]))
    assert (bench.seen(only(done)) == numbers(2)).all()
    assert (bench.seen(value) == numbers(1)).all()


def test_an_absent_input_is_none(bench: DeviceBench) -> None:
    done = bench.on_gpu(lambda batch: {"seen": [x is None for x in batch["x"]]}, X, {"seen": "json"}).run(
        run_of([[msg.ABSENT], bench.device_values([numbers(0)])])
    )
    assert bench.answers(done) == [True, False]


# outputs


def test_what_is_passed_on_or_a_part_of_it_stays_where_it_is(bench: DeviceBench) -> None:
    (value,) = bench.device_values([numbers(1)])
    done = bench.on_gpu(same, X, Y, {"y": "device"}).run(run_of([[value]]))
    assert only(done) == value

    def half(batch: Batch) -> Outputs:
        return {"y": [x[BIG // 2 :] for x in batch["x"]]}

    part = only(bench.on_gpu(half, X, Y, {"y": "device"}).run(run_of([[value]])))
    assert value.device_place is not None and part.device_place == value.device_place._replace(
        offset=value.device_place.offset + BIG * 2, size_bytes=BIG * 2
    )
    assert bench.copies == [] and bench.asked_device == []


def test_new_tensors_are_copied_within_the_device_once_per_batch(bench: DeviceBench) -> None:
    rows = [[value] for value in bench.device_values([numbers(1), numbers(2)])]

    def whole(batch: Batch) -> Outputs:
        return {"y": Foreign(np.asarray(batch.stacked("x")) * 2)}

    done = bench.on_gpu(whole, X, Y, {"y": "device"}).run(run_of(rows))
    values = [result.outputs[0] for result in done.results if isinstance(result, msg.ItemResult)]
    assert [bench.seen(value)[0] for value in values] == [2, 4]
    assert all(
        value.device_place is not None and value.device_place.arena == OWN_DEVICE and value.place is None
        for value in values
    )
    assert bench.copies == [2 * BIG * 4] and done.device_moved_bytes == 0 and done.copied_bytes == 2 * BIG * 4
    assert bench.asked_device == [[2 * BIG * 4]]


def test_an_output_written_into_the_preallocated_buffer_is_not_copied(bench: DeviceBench) -> None:
    rows = [[value] for value in bench.device_values([numbers(1), numbers(2)])]
    block = bench.device_block(2 * BIG * 4)

    def fill(batch: Batch) -> Outputs:
        room = batch.output_buffer("y", "float32", (BIG,))
        np.asarray(room)[:] = np.asarray(batch.stacked("x")) + 1
        assert batch.output_buffer("y", "float32", (BIG + 1,)) is None
        return {"y": room}

    done = bench.on_gpu(fill, X, Y, {"y": "device"}).run(run_of(rows, device_output_blocks={0: block}))
    places = [result.outputs[0].device_place for result in done.results if isinstance(result, msg.ItemResult)]
    assert places == [block.place(0, BIG * 4), block.place(BIG * 4, BIG * 4)]
    assert [bench.seen(result.outputs[0])[0] for result in done.results] == [2, 3]  # type: ignore[union-attr]
    assert bench.copies == [] and bench.asked_device == [] and done.copied_bytes == 0


def test_an_output_read_on_the_device_is_not_only_on_the_host(bench: DeviceBench) -> None:
    rows = [[value] for value in bench.device_values([numbers(1)])]
    rooms: list[object] = []

    def fill(batch: Batch) -> Outputs:
        rooms.append(batch.output_buffer("y", "float32", (BIG,)))
        return doubled(batch)

    block = bench.block(BIG * 4, OWN)
    done = bench.on_gpu(fill, X, Y, {"y": "both"}).run(run_of(rows, output_blocks={0: block}))
    assert rooms == [None]
    assert only(done).place == block.place(0, BIG * 4) and (bench.seen(only(done)) == numbers(1) * 2).all()


def test_what_is_read_on_both_sides_lies_in_both_places(bench: DeviceBench) -> None:
    rows = [[value] for value in bench.device_values([numbers(1), numbers(2)])]
    done = bench.on_gpu(doubled, X, Y, {"y": "both"}).run(run_of(rows))
    for at, result in enumerate(done.results):
        assert isinstance(result, msg.ItemResult)
        (value,) = result.outputs
        assert value.device_place is not None and value.place is not None
        assert (bench.seen(value) == numbers(at + 1) * 2).all()
    assert [answer[0] for answer in bench.answers(done)] == [2, 4]
    assert done.device_moved_bytes == 2 * BIG * 4


def test_a_passed_on_value_with_host_readers_is_copied_to_the_host(bench: DeviceBench) -> None:
    (value,) = bench.device_values([numbers(1)])
    both = only(bench.on_gpu(same, X, Y, {"y": "both"}).run(run_of([[value]])))
    assert both.device_place == value.device_place and both.place is not None
    assert bench.copies == [BIG * 4] and bench.asked_device == [[]]
    done = bench.on_gpu(same, X, Y).run(run_of([[value]]))
    assert (bench.answers(done)[0] == numbers(1)).all()
    assert only(done).place is not None


def test_a_part_of_what_lies_on_both_sides_lies_there_in_the_same_part(bench: DeviceBench) -> None:
    (value,) = bench.device_values([numbers(1)])
    both = only(bench.on_gpu(same, X, Y, {"y": "both"}).run(run_of([[value]])))
    bench.copies.clear()
    half = bench.on_gpu(lambda batch: {"y": [x[BIG // 2 :] for x in batch["x"]]}, X, Y, {"y": "both"})
    done = half.run(run_of([[both]]))
    assert (bench.answers(done)[0] == bench.seen(only(done))).all() and bench.answers(done)[0][0] == BIG // 2 + 1
    assert bench.copies == []


def test_arrays_returned_for_the_device_are_uploaded(bench: DeviceBench) -> None:
    (value,) = bench.device_values([numbers(1)])
    done = bench.on_gpu(lambda batch: {"y": [np.asarray(x) + 1 for x in batch["x"]]}, X, Y, {"y": "device"}).run(
        run_of([[value]])
    )
    assert (
        (bench.seen(only(done)) == numbers(2)).all() and only(done).place is None and done.device_moved_bytes == BIG * 4
    )


def test_small_tensors_travel_inline_wherever_they_are_read(bench: DeviceBench) -> None:
    rows = [[value] for value in bench.device_values([numbers(1), numbers(2), numbers(3)])]
    size = INLINE_BYTES_MAX // 4

    def head(batch: Batch) -> Outputs:
        return {"y": Foreign(np.asarray(batch.stacked("x"))[:, :size])}

    done = bench.on_gpu(head, X, Y, {"y": "device"}).run(run_of(rows))
    assert [answer[0] for answer in bench.answers(done)] == [1, 2, 3]
    assert all(isinstance(one, msg.ItemResult) and one.outputs[0].data is not None for one in done.results)
    assert bench.copies == [3 * size * 4] and bench.asked_device == []


@pytest.mark.parametrize("dtype", ITEM_BYTES)
def test_every_dtype_comes_back_as_it_was(bench: DeviceBench, dtype: str) -> None:
    bits = np.random.default_rng(1).integers(0, 2, 20_000 * ITEM_BYTES[dtype], np.uint8)
    array = bits.view(STAND_INS.get(dtype, dtype))
    (value,) = bench.device_values([array], dtype=dtype)
    type = f"{dtype}[?]"

    def again(batch: Batch) -> Outputs:
        return {"y": [Foreign(np.asarray(x).copy()) for x in batch["x"]]}

    step = bench.on_gpu(again, {"x": type}, {"y": type}, {"y": "both"})
    given = only(step.run(run_of([[value]])))
    assert given.dtype == dtype and given.shape == array.shape
    assert bench.seen(given).tobytes() == array.tobytes() == bench.answers(step.run(run_of([[value]])))[0].tobytes()


def test_lists_are_sent_received_and_placed_by_their_elements(bench: DeviceBench) -> None:
    pictures = [np.full((2, 4000, 3), at, np.uint8) for at in (1, 2)]
    rows = [bench.device_values([picture], "image") for picture in pictures]

    def cut(batch: Batch) -> Outputs:
        return {"rows": [[image[0:1], Foreign(np.asarray(image)[1:] + 1)] for image in batch["image"]]}

    step = bench.on_gpu(cut, {"image": "image"}, {"rows": "list[image]"}, {"rows": "device"})
    done = step.run(run_of([list(row) for row in rows]))
    lists = [result.outputs[0] for result in done.results if isinstance(result, msg.ItemResult)]
    # below INLINE_BYTES_MAX each, but not together: they lie side by side on the device, what was passed on too
    assert [[int(bench.device.view(one).nbytes) for one in value.items or ()] for value in lists] == [
        [12_000, 12_000]
    ] * 2

    def total(batch: Batch) -> Outputs:
        return {"seen": [[int(np.asarray(one).sum()) // 12_000 for one in images] for images in batch["rows"]]}

    reader = bench.on_gpu(total, {"rows": "list[image]"}, {"seen": "json"})
    assert bench.answers(reader.run(run_of([[value] for value in lists]))) == [[1, 2], [2, 3]]


def test_an_item_too_large_for_the_device_fails_alone_with_the_limit(bench: DeviceBench) -> None:
    rows = [[value] for value in bench.device_values([numbers(at, 200_000) for at in range(2)])]
    bench.device_block(NEAR_LEFT)
    answers = [
        one if isinstance(one, msg.Failure) else "given"
        for one in bench.on_gpu(doubled, X, Y, {"y": "device"}).run(run_of(rows)).results
    ]
    assert answers == ["given", msg.Failure("LimitReached", "no room")]


NEAR_LEFT = (2 << 20) - 1_000_000


def test_a_device_without_sharing_answers_equally_through_the_host() -> None:
    alone = DeviceBench(shares=False)
    rows = [[alone.value(numbers(at), "float32[?]")] for at in range(2)]
    done = alone.on_gpu(doubled, X, Y, {"y": "device"}).run(run_of(rows))
    assert [answer[1] for answer in alone.answers(done)] == [2, 4]
    assert all(isinstance(one, msg.ItemResult) and one.outputs[0].device_place is None for one in done.results)
    alone.close()


def test_an_output_of_another_type_fails_its_item_and_is_named(bench: DeviceBench) -> None:
    (value,) = bench.device_values([numbers(1)])
    step = bench.on_gpu(lambda batch: {"y": [Foreign(np.ones((4, 4)))]}, X, Y, {"y": "device"})
    (reported,) = step.run(run_of([[value]])).results
    assert reported == msg.Failure("StepError", "y: found float64[4, 4], expected float32[?]")


# chains


def chain(bench: DeviceBench, *returns: tuple[int, int], middle: str = "device") -> HostedChain:
    on_host = middle == "host"
    steps = [
        bench.on_gpu(doubled, X, Y, {"y": "device"}, index=0),
        bench.on_gpu(doubled, X, Y, {"y": "device"}, index=1, device_inputs=() if on_host else None),
        bench.on_gpu(doubled, X, Y, {"y": "device"}, index=2, device_inputs=() if on_host else None),
    ]
    stages = (msg.Stage(0, ((-1, 0),)), msg.Stage(1, ((0, 0),)), msg.Stage(2, ((0, 0),)))
    return HostedChain(msg.Chain(1, stages, returns), steps)


def test_stages_of_a_chain_hand_tensors_over_where_they_are(bench: DeviceBench) -> None:
    rows = [[value] for value in bench.device_values([numbers(1)])]
    done = chain(bench, (1, 0), (2, 0)).run(run_of(rows))
    (result,) = done.results
    assert isinstance(result, msg.ItemResult)
    assert [(bench.seen(value) == numbers(1) * 4).all() for value in result.outputs] == [True, True]
    # What it answers with; and of a library that does not say who else uses a tensor, what stages hand over.
    assert bench.copies == [BIG * 4] * 4 and done.device_moved_bytes == 0


def test_a_stage_cannot_write_into_what_an_earlier_one_gave(bench: DeviceBench) -> None:
    def writes(batch: Batch) -> Outputs:
        np.asarray(batch["x"][0])[:] = 0
        return same(batch)

    steps = [bench.on_gpu(doubled, X, Y, index=0), bench.on_gpu(writes, X, Y, index=1)]
    both = HostedChain(msg.Chain(1, (msg.Stage(0, ((-1, 0),)), msg.Stage(1, ((0, 0),))), ((1, 0),)), steps)
    (reported,) = both.run(run_of([bench.device_values([numbers(1)])])).results
    assert isinstance(reported, msg.Failure) and "read-only" in reported.message


def test_host_reads_are_copied_once_and_uploads_are_shared(bench: DeviceBench) -> None:
    rows = [[value] for value in bench.device_values([numbers(1)])]
    down = chain(bench, (2, 0), middle="host").run(run_of(rows))
    assert bench.copies[0] == BIG * 4 and down.device_moved_bytes == BIG * 4
    bench.copies.clear()
    steps = [bench.on_gpu(same, X, Y, {"y": "device"}, index=at) for at in range(2)]
    twice = HostedChain(msg.Chain(1, (msg.Stage(0, ((-1, 0),)), msg.Stage(1, ((-1, 0),))), ((1, 0),)), steps)
    assert twice.run(run_of([[bench.value(numbers(1), "float32[?]")]])).device_moved_bytes == BIG * 4


# failures


def test_halves_of_a_batch_that_raised_use_the_same_upload(bench: DeviceBench) -> None:
    rows = [[bench.value(numbers(at), "float32[?]")] for at in range(4)]

    def picky(batch: Batch) -> Outputs:
        if any(np.asarray(x)[0] == 2 for x in batch["x"]):
            raise ValueError("not this one")
        return {"seen": [float(np.asarray(x)[0]) for x in batch["x"]]}

    done = bench.on_gpu(picky, X, {"seen": "json"}).run(run_of(rows))
    assert [one if not isinstance(one, msg.Failure) else one.error for one in bench.answers(done)] == [
        0,
        1,
        "StepError",
        3,
    ]
    assert done.device_moved_bytes == 4 * BIG * 4


def test_a_batch_out_of_device_memory_is_halved_and_caches_are_released(bench: DeviceBench) -> None:
    bench.device.scratch.free([bench.device.scratch.allocate(1 << 20)])

    def short(batch: Batch) -> Outputs:
        if len(batch) > 1:
            raise DeviceOutOfMemory("allocate", "OUT_OF_MEMORY")
        return {"seen": [bench.device.scratch.cached_bytes]}

    rows = [[value] for value in bench.device_values([numbers(0), numbers(1)])]
    done = bench.on_gpu(short, X, {"seen": "json"}).run(run_of(rows))
    assert bench.answers(done) == [0, 0] and done.out_of_memory == 2


def test_stacked_memory_of_a_failed_call_is_freed_before_its_halves_run(bench: DeviceBench) -> None:
    scratch = bench.device.scratch
    taken, gave_back = scratch.allocate, scratch.free
    out: dict[int, int] = {}  # what is taken, by address

    def take(size_bytes: int) -> ScratchBlock:
        piece = taken(size_bytes)
        out[piece.address] = piece.size_bytes
        return piece

    def give_back(pieces: Iterable[ScratchBlock]) -> None:
        for piece in (held := list(pieces)):
            del out[piece.address]
        gave_back(held)

    scratch.allocate, scratch.free = take, give_back  # type: ignore[method-assign]
    reported: list[int] = []

    def short(batch: Batch) -> Outputs:
        reported.append(sum(out.values()))
        batch.stacked("x")
        batch.stacked("z")
        if len(batch) > 2:
            raise DeviceOutOfMemory("allocate", "OUT_OF_MEMORY")
        return {"seen": [float(np.asarray(z)[0]) for z in batch["z"]]}

    rows = [[*bench.device_values([numbers(at)]), bench.value(numbers(at), "float32[?]")] for at in range(4)]
    done = bench.on_gpu(short, {**X, "z": "float32[?]"}, {"seen": "json"}).run(run_of(rows))
    assert bench.answers(done) == [0, 1, 2, 3] and done.out_of_memory == 4
    uploads = reported[0]
    assert reported[1] == uploads > 0  # the same uploads are read again, and nothing else is held
    assert not out


def test_a_lost_device_blames_no_item_and_its_error_propagates(bench: DeviceBench) -> None:
    def broken(batch: Batch) -> Outputs:
        raise DeviceLost("launch", "ILLEGAL_ADDRESS")

    rows = [[value] for value in bench.device_values([numbers(0), numbers(1)])]
    with pytest.raises(DeviceLost):
        bench.on_gpu(broken, X, Y).run(run_of(rows))


def test_a_lost_device_is_not_blamed_on_the_items(bench: DeviceBench, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(batch: Batch) -> Outputs:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    def lost() -> None:
        raise DeviceLost("synchronize", "ILLEGAL_ADDRESS")

    monkeypatch.setattr(bench.device, "check", lost)
    rows = [[value] for value in bench.device_values([numbers(0), numbers(1)])]
    with pytest.raises(DeviceLost):
        bench.on_gpu(broken, X, Y).run(run_of(rows))


# time


@pytest.fixture
def marking() -> Iterator[DeviceBench]:
    with_events = DeviceBench(marks=True)
    yield with_events
    with_events.close()


def test_what_stays_on_the_device_is_answered_unfinished_and_marked(marking: DeviceBench) -> None:
    rows = [[value] for value in marking.device_values([numbers(1)])]
    event = marking.event(2)
    done = marking.on_gpu(doubled, X, Y, {"y": "device"}).run(run_of(rows, ready=event))
    assert done.unfinished and only(done).ready == event.place(0, EVENT_BYTES)
    own = marking.device.event_of(event)
    assert own is not None and marking.memory.dispatch is not None
    marking.driver.wait_event(own)
    marking.memory.dispatch.release()
    assert (marking.seen(only(done)) == numbers(2) * 1 + numbers(0)).all()


def test_what_a_stage_gave_is_kept_until_the_device_has_read_it(marking: DeviceBench) -> None:
    made: list[weakref.ref[np.ndarray]] = []

    def makes(batch: Batch) -> Outputs:
        made.append(weakref.ref(array := numbers(1)))
        return {"y": [Foreign(array)]}

    steps = [marking.on_gpu(makes, X, Y, index=0), marking.on_gpu(doubled, X, Y, {"y": "device"}, index=1)]
    both = HostedChain(msg.Chain(1, (msg.Stage(0, ((-1, 0),)), msg.Stage(1, ((0, 0),))), ((1, 0),)), steps)
    rows = [[value] for value in marking.device_values([numbers(1)])]
    assert both.run(run_of(rows, ready=marking.event(0))).unfinished and marking.memory.dispatch is not None
    assert made[0]() is not None
    marking.memory.dispatch.release()
    assert made[0]() is None


def test_what_was_passed_on_keeps_its_own_mark(marking: DeviceBench) -> None:
    (value,) = marking.device_values([numbers(1)])
    ready = msg.Place(-OTHER_DEVICE, EVENT_BYTES, EVENT_BYTES, EVENT_BYTES, 9)
    marked = msg.Value("tensor", "float32", (BIG,), device_place=value.device_place, ready=ready)
    done = marking.on_gpu(same, X, Y, {"y": "device"}).run(run_of([[marked]], ready=marking.event(0)))
    assert only(done) == marked


def test_what_came_to_the_host_was_waited_for_and_is_finished(marking: DeviceBench) -> None:
    rows = [[value] for value in marking.device_values([numbers(1)])]
    done = marking.on_gpu(doubled, X, Y).run(run_of(rows, ready=marking.event(0)))
    assert not done.unfinished
    both = marking.on_gpu(doubled, X, Y, {"y": "both"}).run(run_of(rows, ready=marking.event(0)))
    assert both.unfinished, "its copy within the device comes after the one that was waited for"


def test_without_an_event_it_waits_for_its_device_itself(marking: DeviceBench) -> None:
    rows = [[value] for value in marking.device_values([numbers(1)])]
    done = marking.on_gpu(doubled, X, Y, {"y": "device"}).run(run_of(rows))
    assert not done.unfinished and only(done).ready is None


def test_an_input_that_is_not_whole_yet_is_waited_for_on_the_device(
    marking: DeviceBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    (value,) = marking.device_values([numbers(1)])
    ready = msg.Place(-OTHER_DEVICE, EVENT_BYTES, EVENT_BYTES, EVENT_BYTES, 9)
    late = msg.Value("tensor", "float32", (BIG,), device_place=value.device_place, ready=ready)
    waited: list[msg.Place] = []
    wait_ready = marking.device.wait_ready
    monkeypatch.setattr(marking.device, "wait_ready", lambda s, e: (waited.append(e), wait_ready(s, e)))
    marking.on_gpu(doubled, X, Y, {"y": "device"}).run(run_of([[late], [late]]))
    assert waited == [ready], "once for each event and stream"
    unknown = msg.Value("tensor", "float32", (BIG,), device_place=value.device_place, ready=ready._replace(arena=-77))
    (reported,) = marking.on_gpu(doubled, X, Y).run(run_of([[unknown]])).results
    assert isinstance(reported, msg.Failure) and "not known here" in reported.message


def kernel(bench: DeviceBench, work: Callable[[], object], stream: int) -> None:
    """Put a node's computing on its stream, to be done later, as a GPU would."""
    bench.driver.launch(lambda: (work(), None)[1], [], [], stream)


@pytest.mark.parametrize("marks", [True, False])
@pytest.mark.parametrize("seed", range(15))
def test_whatever_streams_are_quick_answers_are_the_same(seed: int, marks: bool) -> None:
    """Uploads, the steps' own streams, downloads and another worker's writing run in any order that is allowed."""
    bench = DeviceBench(marks=True, machine=FakeMachine(seed))
    steps: list[HostedStep] = []

    def added(batch: Batch) -> Outputs:
        whole, lates = np.asarray(batch.stacked("x")), [np.asarray(late) for late in batch["late"]]
        made = bench.made(whole.shape)
        kernel(bench, lambda: np.add(whole, np.stack(lates), out=made), steps[0].stream)
        return {"z": Foreign(made)}

    def twice(at: int) -> Callable[[Batch], Outputs]:
        def run(batch: Batch) -> Outputs:
            xs = [np.asarray(x) for x in batch["x"]]
            made = [bench.made(x.shape) for x in xs]
            kernel(bench, lambda: [np.multiply(x, 2, out=y) for x, y in zip(xs, made)], steps[at].stream)
            return {"y": [Foreign(y) for y in made]}

        return run

    def fetched(batch: Batch) -> Outputs:
        return {"y": [np.asarray(x) + 1 for x in batch["x"]]}

    steps.append(bench.on_gpu(added, {"x": "float32[?]", "late": "float32[?]"}, {"z": "float32[?]"}, index=0))
    steps.append(bench.on_gpu(twice(1), X, Y, {"y": "both"}, index=1))
    steps.append(bench.on_gpu(twice(2), X, Y, {"y": "device"}, index=2))
    steps.append(bench.on_gpu(fetched, X, Y, index=3, device_inputs=()))
    stages = (
        msg.Stage(0, ((-1, 0), (-1, 1))), msg.Stage(1, ((0, 0),)), msg.Stage(2, ((1, 0),)), msg.Stage(3, ((2, 0),)),
    )  # fmt: skip
    whole = HostedChain(msg.Chain(1, stages, ((1, 0), (2, 0), (3, 0))), steps)
    rows = [[bench.value(numbers(at), "float32[?]"), bench.late_value(numbers(10 * at), at)] for at in range(2)]
    event = bench.event(1)
    done = whole.run(run_of(rows, ready=event) if marks else run_of(rows))
    assert done.unfinished == marks == (bench.memory.dispatch is not None)
    mark = bench.device.event_of(event)
    assert mark is not None
    reported = [(unpack(one.outputs[0], bench.arenas), unpack(one.outputs[2], bench.arenas)) for one in given(done)]
    if bench.memory.dispatch is not None:
        bench.driver.wait_event(mark)
        bench.memory.dispatch.release()
    for at, result in enumerate(given(done)):
        twofold = 2 * (numbers(at) + numbers(10 * at))
        assert (reported[at][0] == twofold).all() and (reported[at][1] == 2 * twofold + 1).all()
        assert (bench.seen(result.outputs[0]) == twofold).all()
        assert (bench.seen(result.outputs[1]) == 2 * twofold).all()
    bench.close()


@pytest.mark.parametrize("seed", range(5))
def test_a_step_may_reuse_its_buffer_while_the_device_still_reads_it(seed: int) -> None:
    bench = DeviceBench(marks=True, machine=FakeMachine(seed))
    buffer, steps = bench.made((BIG,)), []

    def fills(batch: Batch) -> Outputs:
        (x,) = map(np.asarray, batch["x"])
        kernel(bench, lambda: np.copyto(buffer, x), steps[0].stream)
        return {"y": [Foreign(buffer)]}

    def doubles(batch: Batch) -> Outputs:
        (x,), made = map(np.asarray, batch["x"]), bench.made((BIG,))
        kernel(bench, lambda: np.multiply(x, 2, out=made), steps[1].stream)
        return {"y": [Foreign(made)]}

    steps += [bench.on_gpu(run, X, Y, {"y": "device"}, index=at) for at, run in enumerate((fills, doubles))]
    both = HostedChain(msg.Chain(1, (msg.Stage(0, ((-1, 0),)), msg.Stage(1, ((0, 0),))), ((1, 0),)), steps)
    dones = []
    for at, value in enumerate(bench.device_values([numbers(1), numbers(2)])):
        dones.append(both.run(run_of([[value]], ready=bench.event(at))))
    for at, done in enumerate(dones):
        mark = bench.device.event_of(bench.event(at))
        assert done.unfinished and mark is not None
        bench.driver.wait_event(mark)
    assert [bench.seen(only(done))[0] for done in dones] == [2, 4]
    bench.close()


@pytest.mark.parametrize("seed", range(5))
def test_tensors_that_are_stacked_by_copies_are_there_when_the_node_looks(seed: int) -> None:
    bench = DeviceBench(machine=FakeMachine(seed))
    rows = [bench.device_values([numbers(at)]) for at in (5, 7)]
    step = bench.on_gpu(lambda batch: {"seen": np.asarray(batch.stacked("x"))[:, 1].tolist()}, X, {"seen": "json"})
    assert bench.answers(step.run(run_of(rows))) == [6.0, 8.0]
    bench.close()


# what it is made of


@pytest.mark.parametrize(("built", "waits"), [(None, True), (False, True), (True, False)])
def test_a_call_outside_the_steps_stream_finds_its_inputs(
    monkeypatch: pytest.MonkeyPatch, built: bool | None, waits: bool
) -> None:
    driver = FakeGpu("fake:0")
    waited: list[int] = []
    monkeypatch.setattr(driver, "device", "cuda:0")
    monkeypatch.setattr(driver, "synchronize", waited.append)
    if built is None:
        monkeypatch.delitem(sys.modules, "torch", raising=False)
    else:
        cuda = SimpleNamespace(is_built=lambda: built)
        monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(backends=SimpleNamespace(cuda=cuda)))
    device = WorkerDevice(driver)
    if not built:
        with device.use_stream(7):
            pass  # torch for the CPU has no streams, and a torch that is not there has none either
    device.sync_before_call(7)
    assert waited == ([7] if waits else [])


def test_a_worker_on_a_gpu_turns_tf32_off_before_its_first_call(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = FakeGpu("fake:0")
    monkeypatch.setattr(driver, "device", "cuda:0")
    cudnn = SimpleNamespace(allow_tf32=True)
    cuda = SimpleNamespace(is_built=lambda: True, matmul=SimpleNamespace(fp32_precision="none"))
    backends = SimpleNamespace(cuda=cuda, cudnn=cudnn)
    streams = SimpleNamespace(ExternalStream=lambda *given, **named: given, stream=contextlib.nullcontext)
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(backends=backends, cuda=streams))
    with WorkerDevice(driver).use_stream(7):
        assert (cudnn.allow_tf32, cuda.matmul.fp32_precision) == (False, "none")


def test_a_digest_is_of_bytes_wherever_they_lie(bench: DeviceBench) -> None:
    (device,) = bench.device_values([numbers(1)])
    host = bench.value(numbers(1), "float32[?]")
    assert digest([device], bench.arenas, bench.device.download) == digest([host], bench.arenas)
    with pytest.raises(StepError, match="a device that this worker does not have"):
        digest([device], bench.arenas)


def test_a_refused_page_lock_is_logged_once_with_the_remedy(
    bench: DeviceBench, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuses(address: int, size_bytes: int, writable: bool) -> None:
        raise DriverError("cuMemHostRegister", "CUDA_ERROR_OPERATING_SYSTEM", "an OS call failed")

    monkeypatch.setattr(bench.driver, "lock_pages", refuses)
    for arena in bench.arenas.values():
        bench.device.lock_pages(arena)
    (reported,) = [record for record in caplog.records if record.levelname == "WARNING"]
    assert "fake:0: 1 MiB of host memory are not page-locked" in reported.getMessage()
    assert "CUDA_ERROR_OPERATING_SYSTEM" in reported.getMessage() and "ulimit -l unlimited" in reported.getMessage()
