"""Inputs are padded to one size, the batch is one array, and every output is cut back to its item's own size."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from tests.engine.hosted import Bench, run_of
from weftline.engine import messages as msg
from weftline.engine.worker.padding import Padding
from weftline.errors import ModelError
from weftline.nodes.contract import Batch, Outputs


@pytest.fixture
def bench() -> Iterator[Bench]:
    made = Bench()
    yield made
    made.close()


def frames(size: int, width: int = 2) -> np.ndarray:
    return np.arange(size * width, dtype=np.float32).reshape(size, width) + 1


def run_padded(bench: Bench, sizes: list[int], **more: Any) -> tuple[dict[str, Any], list[Any]]:
    seen: dict[str, Any] = {}

    def run(batch: Batch) -> Outputs:
        seen.update(x=batch.stacked("x").copy(), lengths=list(batch.lengths("x")), view=batch.stacked("x").base)
        return {"y": batch.stacked("x") * 2}

    step = bench.step(run, {"x": "float32[T, 2]"}, {"y": "float32[T, 2]"}, **more)
    done = step.run(run_of([[bench.value(frames(size), "tensor")] for size in sizes]))
    return seen, bench.answers(done)


@pytest.mark.parametrize(
    ("sizes", "padded"), [([3, 5], 8), ([3, 4], 4), ([9, 1], 16), ([17, 20], 20), ([4, 4], 4), ([2], 4)]
)
def test_a_batch_is_padded_to_the_smallest_bucket_that_holds_it_and_cut_back(
    bench: Bench, sizes: list[int], padded: int
) -> None:
    seen, answers = run_padded(bench, sizes, pad={"T": (4, 8, 16)}, pad_value=-1)
    assert seen["x"].shape == (len(sizes), padded, 2) and seen["lengths"] == sizes
    for size, row, answer in zip(sizes, seen["x"], answers, strict=True):
        np.testing.assert_array_equal(row[:size], frames(size))
        assert (row[size:] == -1).all()
        np.testing.assert_array_equal(answer, frames(size) * 2)


def test_an_axis_in_the_middle_and_two_ports_that_share_a_size(bench: Bench) -> None:
    def run(batch: Batch) -> Outputs:
        assert batch.stacked("x").shape == (2, 2, 4) and batch.stacked("mask").tolist() == [[1, 1, 1, 0], [1, 1, 0, 0]]
        return {"y": batch.stacked("x"), "z": [len(row) * np.ones(1, np.float32) for row in batch["mask"]]}

    step = bench.step(
        run,
        {"x": "float32[2, T]", "mask": "int64[T]"},
        {"y": "float32[2, T]", "z": "float32[1]"},
        pad={"T": (4,)},
    )
    rows = [
        [bench.value(np.ones((2, size), np.float32), "tensor"), bench.value(np.ones(size, np.int64), "tensor")]
        for size in (3, 2)
    ]
    answers = bench.answers(step.run(run_of(rows)))
    assert [(y.shape, z.tolist()) for y, z in answers] == [((2, 3), [4]), ((2, 2), [4])]


def test_items_that_differ_elsewhere_too_are_padded_each_and_stay_apart(bench: Bench) -> None:
    def run(batch: Batch) -> Outputs:
        assert [x.shape for x in batch["x"]] == [(4, 2), (4, 3)]
        return {"y": batch["x"]}

    step = bench.step(run, {"x": "float32[T, C]"}, {"y": "float32[T, C]"}, pad={"T": (4,)})
    done = step.run(run_of([[bench.value(frames(3, 2), "tensor")], [bench.value(frames(2, 3), "tensor")]]))
    assert [answer.shape for answer in bench.answers(done)] == [(3, 2), (2, 3)]


def test_an_absent_input_is_not_padded(bench: Bench) -> None:
    def run(batch: Batch) -> Outputs:
        assert batch["x"][0] is None and batch["x"][1].shape == (4, 2) and list(batch.lengths("x")) == [0, 3]
        return {"y": [np.ones((4, 2), np.float32)] * 2}

    step = bench.step(run, {"x": "float32[T, 2]"}, {"y": "float32[T, 2]"}, pad={"T": (4,)})
    answers = bench.answers(step.run(run_of([[msg.ABSENT], [bench.value(frames(3), "tensor")]])))
    assert [answer.shape for answer in answers] == [(0, 2), (3, 2)]


def test_an_output_has_the_size_that_any_input_of_the_item_gives_its_name(bench: Bench) -> None:
    step = bench.step(
        lambda batch: {"y": batch["mask"]},
        {"x": "float32[T, 2]", "mask": "int64[T]"},
        {"y": "int64[T]"},
        pad={"T": (4,)},
    )
    mask = bench.value(np.ones(3, np.int64), "tensor")
    [answer] = bench.answers(step.run(run_of([[msg.ABSENT, mask]])))
    assert answer.tolist() == [1, 1, 1]


def test_halves_of_a_batch_that_raised_are_padded_anew(bench: Bench) -> None:
    shapes = []

    def run(batch: Batch) -> Outputs:
        shapes.append(batch.stacked("x").shape)
        if len(batch) > 1:
            raise ValueError("one at a time")
        return {"y": batch["x"]}

    step = bench.step(run, {"x": "float32[T, 2]"}, {"y": "float32[T, 2]"}, pad={"T": (4, 8)})
    answers = bench.answers(step.run(run_of([[bench.value(frames(size), "tensor")] for size in (2, 7)])))
    assert shapes == [(2, 8, 2), (1, 4, 2), (1, 8, 2)] and [len(answer) for answer in answers] == [2, 7]


def test_lengths_of_a_port_that_is_not_padded_are_not_there(bench: Bench) -> None:
    def run(batch: Batch) -> Outputs:
        with pytest.raises(KeyError):
            batch.lengths("x")
        return {"y": batch["x"]}

    step = bench.step(run, {"x": "float32[T, 2]"}, {"y": "float32[T, 2]"})
    assert bench.answers(step.run(run_of([[bench.value(frames(2), "tensor")]])))[0].shape == (2, 2)


def to_open(type: str, pad_value: float) -> msg.StepToOpen:
    return msg.StepToOpen(0, "s", "n", {}, (("x", type),), (), "cpu", 4, False, {"T": (4,)}, pad_value)


def test_dtypes_that_numpy_does_not_have_are_filled_by_their_bits() -> None:
    torch = pytest.importorskip("torch")
    padding = Padding.of(to_open("bfloat16[T]", -2.5))
    assert padding is not None
    columns: dict[str, list[Any]] = {"x": [np.zeros(2, np.uint16)]}
    padding.pad(columns)
    assert torch.from_numpy(columns["x"][0]).view(torch.bfloat16).tolist() == [0, 0, -2.5, -2.5]
    with pytest.raises(ModelError, match="only 0 can"):
        Padding.of(to_open("float8_e5m2[T]", 1.0))
