"""Aliased outputs are copied before the node's code runs again; others are not copied."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.engine import reuse_steps
from tests.engine.device_hosted import DeviceBench
from tests.engine.hosted import Bench, run_of
from weftline.engine.protocol import messages as msg
from weftline.engine.protocol.packed import Packed
from weftline.engine.worker.batch import HostedStep
from weftline.engine.worker.chain import HostedChain
from weftline.engine.worker.ownership import copy_aliased
from weftline.engine.worker.stream import HostedStream
from weftline.nodes.contract import Batch, OpenContext, Outputs, Piece
from weftline.nodes.function import Function, FunctionConfig
from weftline.pipelines.spec.policy import BatchPolicy

X, Y = {"x": "float32[?]"}, {"output": "float32[?]"}
BIG, SMALL = 5000, 8
REUSING = ("Part", "Owned", "Weak", "Viewed", "Bytes", "common", "Tensors", "Arrays")


@pytest.fixture
def bench() -> Iterator[Bench]:
    made = Bench()
    yield made
    made.close()


@pytest.fixture
def device() -> Iterator[DeviceBench]:
    made = DeviceBench()
    yield made
    made.close()


def numbers(value: float, size: int = BIG) -> np.ndarray:
    return np.arange(size, dtype=np.float32) + np.float32(value)


def answer_of(name: str, x: np.ndarray) -> Any:
    """Return what a new instance of a function of reuse_steps answers."""
    function = getattr(reuse_steps, name)
    answer = (function() if isinstance(function, type) else function)(torch.tensor(x) if name == "Tensors" else x)
    return np.array(answer.numpy() if isinstance(answer, torch.Tensor) else answer)


def function_step(bench: Bench, name: str, outputs: dict[str, str] = Y, index: int = 0, most: int = 8) -> HostedStep:
    config = FunctionConfig(f"reuse_steps.py:{name}", tensors="torch" if name == "Tensors" else "numpy")
    node = Function(config)
    node.open(OpenContext(Path(reuse_steps.__file__).parent))
    step = msg.StepToOpen(
        index, name, "function", {}, tuple(X.items()), tuple(outputs.items()), "cpu", BatchPolicy(most), False
    )
    return HostedStep(step, node, bench.memory, bench.cancels)


def in_chain(steps: list[HostedStep], *returns: tuple[int, int]) -> HostedChain:
    stages = tuple(msg.Stage(at, ((at - 1, 0),)) for at in range(len(steps)))
    return HostedChain(msg.Chain(1, stages, returns or ((len(steps) - 1, 0),)), steps)


def rows_of(bench: Bench, count: int, size: int) -> list[list[msg.Value]]:
    return [[bench.value(numbers(10 * at, size), "tensor")] for at in range(count)]


def same(batch: Batch) -> Outputs:
    return {"output": batch["x"]}


@pytest.mark.parametrize("size", [BIG, SMALL])
@pytest.mark.parametrize("name", REUSING)
def test_each_item_of_a_function_has_its_own_answer(bench: Bench, name: str, size: int) -> None:
    done = function_step(bench, name).run(run_of(rows_of(bench, 4, size)))
    for at, found in enumerate(bench.answers(done)):
        assert np.array_equal(found, answer_of(name, numbers(10 * at, size)))


def test_other_kinds_are_what_they_were_when_the_call_returned(bench: Bench) -> None:
    rows, xs = rows_of(bench, 3, BIG), [numbers(10 * at) for at in range(3)]
    mutated = bench.answers(function_step(bench, "Mutated", {"output": "json"}).run(run_of(rows)))
    assert [one["seen"] for one in mutated] == [[0], [10], [20]]
    raw = bench.answers(function_step(bench, "Raw", {"output": "bytes"}).run(run_of(rows)))
    assert raw == [x.tobytes() for x in xs]
    boxes = bench.answers(function_step(bench, "Boxes", {"output": "detections"}).run(run_of(rows)))
    assert [one.boxes[0, 0] for one in boxes] == [0, 10, 20]
    lists = bench.answers(function_step(bench, "Windows", {"output": "list[float32[?]]"}).run(run_of(rows)))
    assert all(np.array_equal(part, 2 * x[at:]) for one, x in zip(lists, xs) for at, part in enumerate(one))
    pairs = bench.answers(function_step(bench, "Pair", {"whole": "float32[?]", "most": "float32[?]"}).run(run_of(rows)))
    assert all(np.array_equal(one, 2 * x) and np.array_equal(two, 2 * x[1:]) for (one, two), x in zip(pairs, xs))


@pytest.mark.parametrize("size", [BIG, SMALL])
@pytest.mark.parametrize("name", [*REUSING, "Together"])
def test_a_stage_of_a_chain_may_use_its_memory_in_every_batch(bench: Bench, name: str, size: int) -> None:
    if name == "Together":
        first = bench.step(_node("Together"), X, Y, items_max=2)
    else:
        first = function_step(bench, name, most=2)
    done = in_chain([first, bench.step(same, X, Y, index=1)]).run(run_of(rows_of(bench, 5, size)))
    for at, found in enumerate(bench.answers(done)):
        x = numbers(10 * at, size)
        assert np.array_equal(found, 2 * x if name == "Together" else answer_of(name, x))


def test_steps_of_one_worker_may_share_memory(bench: Bench) -> None:
    steps = [function_step(bench, "common"), function_step(bench, "common_too", index=1)]
    both = bench.answers(in_chain(steps, (0, 0), (1, 0)).run(run_of(rows_of(bench, 3, BIG))))
    for at, (first, second) in enumerate(both):
        assert np.array_equal(first, 3 * numbers(10 * at)) and np.array_equal(second, 3 * numbers(10 * at) + 7)


def test_halves_of_a_batch_that_raised_may_use_the_same_memory(bench: Bench) -> None:
    done = bench.step(_node("Splits"), X, Y).run(run_of(rows_of(bench, 4, BIG)))
    assert [np.array_equal(found, 2 * numbers(10 * at)) for at, found in enumerate(bench.answers(done))] == [True] * 4


def test_lazily_computed_outputs_may_share_memory(bench: Bench) -> None:
    for node in (reuse_steps.Lazy(None), reuse_steps.Settles(None)):
        done = bench.step(node.run, X, Y).run(run_of(rows_of(bench, 3, BIG)))
        assert all(np.array_equal(found, 2 * numbers(10 * at)) for at, found in enumerate(bench.answers(done)))


def test_pieces_of_a_generator_are_packed_one_by_one(bench: Bench) -> None:
    node = reuse_steps.Flows(None)
    step = msg.StepToOpen(0, "flows", "flows", {}, tuple(X.items()), tuple(Y.items()), "cpu", BatchPolicy(8), False)
    stream = HostedStream(step, node, bench.memory)
    for at, row in enumerate(rows_of(bench, 3, BIG)):
        stream.submit(msg.Item(at, tuple(row)))
    found = [bench.memory.live(piece.outputs[0]) for piece in stream.round()]
    assert all(np.array_equal(one, 2 * numbers(10 * at)) for at, one in enumerate(found)) and len(found) == 3


def test_a_round_that_raises_fails_what_it_has_not_ended(bench: Bench) -> None:
    class Breaks(reuse_steps.Flows):
        def round(self) -> Iterator[Piece]:  # type: ignore[override]
            yield next(super().round())
            yield Piece(1, {"output": "no array"}, last=True)
            raise ValueError("broken")

        def cancel(self, item: int) -> None:
            cancelled.append(item)

    cancelled: list[int] = []
    step = msg.StepToOpen(0, "flows", "flows", {}, tuple(X.items()), tuple(Y.items()), "cpu", BatchPolicy(8), False)
    stream = HostedStream(step, Breaks(None), bench.memory)
    for at, row in enumerate(rows_of(bench, 3, SMALL)):
        stream.submit(msg.Item(at, tuple(row)))
    pieces = stream.round()
    reported = [None if one.failure is None else one.failure.message.partition(":")[0] for one in pieces]
    assert [one.item for one in pieces] == [0, 1, 2] and reported == [None, "output", "ValueError"]
    assert sorted(cancelled) == [1, 2]


def test_a_step_that_remembers_may_keep_its_inputs(bench: Bench) -> None:
    before: list[np.ndarray] = []

    def last(batch: Batch) -> Outputs:
        before[:0] = list(batch["x"]) + list(batch.stacked("x"))
        return {"output": [before[-1]] * len(batch)}

    step = bench.step(last, X, Y, remembers=True)
    for value in range(3):
        row = [bench.value(numbers(value), "tensor")]
        (found,) = bench.answers(step.run(run_of([row])))
        assert np.array_equal(found, numbers(0)) and not before[0].flags.writeable
        assert row[0].place is not None  # its lease ends, and it is written again
        view = np.ndarray(BIG, np.float32, bench.arenas[row[0].place.arena].buffer, row[0].place.offset)
        view[:] = -1


def test_a_stream_node_may_keep_its_inputs(bench: Bench) -> None:
    node = reuse_steps.Flows(None)
    step = msg.StepToOpen(0, "flows", "flows", {}, tuple(X.items()), tuple(Y.items()), "cpu", BatchPolicy(8), False)
    stream = HostedStream(step, node, bench.memory)
    value = bench.value(numbers(1), "tensor")
    stream.submit(msg.Item(0, (value,)))
    assert value.place is not None
    lies = np.ndarray(BIG, np.float32, bench.arenas[value.place.arena].buffer, value.place.offset)
    assert not np.shares_memory(node._inputs[0], lies) and np.array_equal(node._inputs[0], lies)


# what is not copied

FRESH: dict[str, Callable[[Batch], Any]] = {
    "arrays": lambda batch: [x * 2 for x in batch["x"]],
    "one array": lambda batch: np.stack(batch["x"]) * 2,
    "views of one": lambda batch: list(np.stack(batch["x"]) * 2),
    "tensors": lambda batch: [torch.from_numpy(x.copy()) * 2 for x in batch["x"]],
    "one tensor": lambda batch: torch.from_numpy(np.stack(batch["x"])) * 2,
    "arrays of tensors": lambda batch: [(torch.from_numpy(x.copy()) * 2).numpy() for x in batch["x"]],
    "results of a module": lambda batch: torch.nn.Identity()(
        torch.from_numpy(np.stack(batch["x"])).requires_grad_() * 2
    ),
    "parts of inputs": lambda batch: [x[1:] for x in batch["x"]],
}


@pytest.mark.parametrize("what", FRESH)
def test_what_only_the_outputs_refer_to_is_handed_on_where_it_is(bench: Bench, what: str) -> None:
    made: list[int] = []
    seen: list[int] = []

    def gives(batch: Batch) -> Outputs:
        given = FRESH[what](batch)
        made.extend(one.data_ptr() if isinstance(one, torch.Tensor) else one.ctypes.data for one in given)
        return {"output": given}

    def reads(batch: Batch) -> Outputs:
        seen.extend(x.ctypes.data for x in batch["x"])
        return {"output": [x + 0 for x in batch["x"]]}

    steps = [bench.step(same, X, Y), bench.step(gives, X, Y, index=1), bench.step(reads, X, Y, index=2)]
    first = bench.step(lambda batch: {"output": [x + 0 for x in batch["x"]]}, X, Y)  # whose outputs lie nowhere yet
    for before in (steps[0], first):
        done = in_chain([before, *steps[1:]]).run(run_of(rows_of(bench, 3, BIG)))
        assert seen == made, what
        assert all(isinstance(one, msg.ItemResult) for one in done.results)


@pytest.mark.parametrize(
    ("name", "rows", "copied"), [("Fresh", 3, []), ("Owned", 3, [0, 1]), ("Owned", 1, []), ("same", 3, [])]
)
def test_only_what_a_function_may_still_write_is_copied_early(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, name: str, rows: int, copied: list[int]
) -> None:
    settled: list[int] = []
    step = function_step(bench, name)
    monkeypatch.setattr(step, "settle", lambda position, *more: settled.append(position))
    step.run(run_of(rows_of(bench, rows, BIG)))
    assert settled == copied


def test_neighbours_are_neighbours_as_copies(bench: Bench) -> None:
    kept = np.zeros((3, BIG), np.float32)
    rows: list[Any] = [[Packed("tensor", "float32", (BIG,), row)] for row in kept]
    copy_aliased(rows, [()] * 3, bench.memory)
    starts = [row[0].array.ctypes.data for row in rows]
    assert np.diff(starts).tolist() == [BIG * 4] * 2 and starts[0] != kept.ctypes.data


# on a device


def tensors(batch: Batch) -> list[torch.Tensor]:
    return [x.torch() for x in batch["x"]]


def test_tensors_on_the_device_are_copied_there_where_the_node_keeps_them(device: DeviceBench) -> None:
    out = torch.zeros(BIG)
    values = device.device_values([numbers(10 * at) for at in range(3)])

    def keeps(batch: Batch) -> Outputs:
        return {"output": [torch.mul(x, 2, out=out) for x in tensors(batch)]}

    steps = [device.on_gpu(keeps, X, Y, items_max=1), device.on_gpu(same, X, Y, index=1)]
    done = in_chain(steps).run(run_of([[value] for value in values]))
    assert all(np.array_equal(found, 2 * numbers(10 * at)) for at, found in enumerate(device.answers(done)))


def test_a_new_tensor_on_the_device_is_handed_on_where_it_is(device: DeviceBench) -> None:
    values = device.device_values([numbers(10 * at) for at in range(3)])
    steps = [
        device.on_gpu(lambda batch: {"output": torch.stack(tensors(batch)) * 2}, X, Y),
        device.on_gpu(lambda batch: {"output": [x + 1 for x in tensors(batch)]}, X, Y, {"output": "device"}, index=1),
    ]
    done = in_chain(steps).run(run_of([[value] for value in values]))
    assert device.copies == [BIG * 4] * 3, "the answers into the arena, and nothing else"
    assert all(isinstance(one, msg.ItemResult) for one in done.results)


def test_a_function_may_use_a_tensor_on_the_device_for_every_item(device: DeviceBench) -> None:
    node = Function(FunctionConfig("reuse_steps.py:Tensors", tensors="torch"))
    node.open(OpenContext(Path(reuse_steps.__file__).parent, device="fake:0"))
    step = msg.StepToOpen(
        0, "s", "function", {}, tuple(X.items()), tuple(Y.items()), "fake:0", BatchPolicy(8), False,
        device_inputs=("x",), device_outputs={"output": "device"},
    )  # fmt: skip
    hosted = HostedStep(step, node, device.memory, device.cancels)
    done = hosted.run(run_of([[value] for value in device.device_values([numbers(10 * at) for at in range(3)])]))
    found = [device.seen(one.outputs[0]) for one in done.results if isinstance(one, msg.ItemResult)]
    assert len(found) == 3 and all(np.array_equal(one, 2 * numbers(10 * at)) for at, one in enumerate(found))


def test_an_array_is_copied_that_a_node_may_write_while_it_is_uploaded() -> None:
    device = DeviceBench(marks=True)
    kept, made = numbers(1), []

    def gives(batch: Batch) -> Outputs:
        fresh = numbers(2)
        made.append(fresh.ctypes.data)
        return {"output": [kept, fresh]}

    step = device.on_gpu(gives, X, Y, {"output": "device"})
    values = device.device_values([numbers(at) for at in range(2)])
    done = step.run(run_of([[value] for value in values], ready=device.event(0)))
    assert done.unfinished and device.memory.dispatch is not None
    read = [one.ctypes.data for one in device.memory.dispatch._held if isinstance(one, np.ndarray)]
    assert len(read) == 2 and kept.ctypes.data not in read and made[0] in read
    device.memory.dispatch.release()
    device.close()


def _node(name: str) -> Callable[[Batch], Outputs]:
    """Return a node's `run` of a function of reuse_steps that takes batches."""
    function = getattr(reuse_steps, name)()
    return lambda batch: {"output": function(list(batch["x"]))}
