"""Hosted batch steps: inputs, outputs, failures and bisection; padding of inputs and slicing of outputs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import pytest

import weftline
from tests.engine.hosted import OTHER, Bench, run_of
from tests.engine.reuse_steps import Flows
from weftline.engine.protocol import messages as msg
from weftline.engine.protocol.values import stacked
from weftline.engine.worker.batch import Padding
from weftline.engine.worker.chain import HostedChain
from weftline.engine.worker.stream import HostedStream
from weftline.errors import ModelError, StepError
from weftline.nodes.contract import Batch, Outputs, Piece
from weftline.nodes.urgency import USUAL, SequencePart, Urgency
from weftline.pipelines.spec.policy import BatchPolicy

X, Y = {"x": "float32[N]"}, {"y": "float32[N]"}
TEXT = {"text": "text"}
BIG = 10_000


@pytest.fixture
def bench() -> Iterator[Bench]:
    made = Bench()
    yield made
    made.close()


def numbers(value: float, size: int = BIG) -> np.ndarray:
    return np.full(size, value, np.float32)


def same(batch: Batch) -> Outputs:
    return {"y": batch["x"]}


def test_small_outputs_travel_inline_and_nothing_is_asked_for(bench: Bench) -> None:
    step = bench.step(lambda batch: {"y": [x * 2 for x in batch["x"]]}, X, Y)
    done = step.run(run_of([[bench.value(numbers(1, 3), "tensor")], [bench.value(numbers(2, 4), "tensor")]]))
    assert [answer.tolist() for answer in bench.answers(done)] == [[2, 2, 2], [4, 4, 4, 4]]
    assert bench.asked == [] and done.copied_bytes == 0
    assert [(ran.batches, ran.items) for ran in done.ran] == [(1, 2)]


def test_large_outputs_of_one_port_are_adjacent_in_one_request(bench: Bench) -> None:
    def run(batch: Batch) -> Outputs:
        return {"y": [x * 2 for x in batch["x"]], "text": ["t" * 20_000] * len(batch)}

    step = bench.step(run, X, {**Y, **TEXT})
    done = step.run(run_of([[bench.value(numbers(value), "tensor")] for value in range(3)]))
    assert bench.asked == [[3 * 40_000, 3 * 20_000]] and done.copied_bytes == 180_000
    column = [result.outputs[0] for result in done.results if isinstance(result, msg.ItemResult)]
    view = stacked(column, bench.arenas)
    assert view is not None and view[:, 0].tolist() == [0, 2, 4]


def test_an_output_written_into_the_preallocated_buffer_is_not_copied(bench: Bench) -> None:
    def run(batch: Batch) -> Outputs:
        room = batch.output_buffer("y", "float32", (BIG,))
        assert room is not None and batch.output_buffer("y", "float32", (BIG + 1,)) is None
        np.multiply(batch.stacked("x"), 2, out=room)
        return {"y": room}

    step = bench.step(run, X, Y, items_max=2)
    block = bench.block(3 * 40_000)
    done = step.run(run_of([[bench.value(numbers(value), "tensor")] for value in range(3)], output_blocks={0: block}))
    assert [answer[0] for answer in bench.answers(done)] == [0, 2, 4]
    assert done.copied_bytes == 0 and bench.asked == [] and done.ran[0].batches == 2


def test_an_input_returned_as_output_is_forwarded_unchanged(bench: Bench) -> None:
    step = bench.step(same, X, Y)
    inputs = [bench.value(numbers(1), "tensor"), bench.value(numbers(2, 3), "tensor")]
    done = step.run(run_of([[value] for value in inputs]))
    assert [result.outputs[0] for result in done.results if isinstance(result, msg.ItemResult)] == inputs
    assert done.copied_bytes == 0


def test_a_part_of_an_input_stays_where_it_is(bench: Bench) -> None:
    step = bench.step(lambda batch: {"y": [x[: BIG // 2] for x in batch["x"]]}, X, Y)
    value = bench.value(numbers(1), "tensor")
    [result] = step.run(run_of([[value]])).results
    assert isinstance(result, msg.ItemResult) and value.place is not None and result.outputs[0].place is not None
    assert result.outputs[0].place.key == value.place.key and result.outputs[0].size_bytes == BIG * 2
    assert bench.asked == []


def test_a_list_that_the_node_changed_in_place_is_not_taken_for_what_came(bench: Bench) -> None:
    def run(batch: Batch) -> Outputs:
        column: Any = batch["text"]
        column[0] = column[0].upper()
        return {"text": column}

    step = bench.step(run, TEXT, TEXT)
    assert bench.answers(step.run(run_of([[bench.value("a", "text")], [bench.value("b", "text")]]))) == ["A", "b"]


def test_json_that_the_node_changed_in_place_is_not_taken_for_what_came(bench: Bench) -> None:
    def run(batch: Batch) -> Outputs:
        for box in batch["box"]:
            box["seen"] = True
        return {"box": batch["box"]}

    step = bench.step(run, {"box": "json"}, {"box": "json"})
    [answer] = bench.answers(step.run(run_of([[bench.value({"pad": "x" * 20_000}, "json")]])))
    assert answer["seen"] is True


def test_elements_of_a_list_are_placed_together_and_those_passed_on_stay(bench: Bench) -> None:
    def run(batch: Batch) -> Outputs:
        return {"parts": [[x, x * 2, x[: BIG // 2], x * 3] for x in batch["x"]]}

    step = bench.step(run, X, {"parts": "list[float32[?]]"})
    value = bench.value(numbers(1), "tensor")
    done = step.run(run_of([[value]]))
    assert bench.asked == [[80_000]] and done.copied_bytes == 80_000
    [result] = done.results
    assert isinstance(result, msg.ItemResult)
    passed, doubled, half, tripled = result.outputs[0].items or ()
    assert passed == value and half.place is not None and value.place is not None
    assert half.place.key == value.place.key and stacked([doubled, tripled], bench.arenas) is not None
    assert [part[0] for part in bench.answers(done)[0]] == [1, 2, 1, 3]


def test_an_input_list_element_passes_on_when_the_list_is_changed(bench: Bench) -> None:
    def run(batch: Batch) -> Outputs:
        for parts in batch["parts"]:
            parts.reverse()
        return {"parts": batch["parts"]}

    step = bench.step(run, {"parts": "list[float32[?]]"}, {"parts": "list[float32[?]]"})
    value = bench.value([numbers(1), numbers(2)], "list[float32[?]]")
    [result] = step.run(run_of([[value]])).results
    assert isinstance(result, msg.ItemResult) and value.items is not None and bench.asked == []
    assert result.outputs[0].items == value.items[::-1]


def test_an_element_of_another_type_fails_its_item_with_its_index(bench: Bench) -> None:
    step = bench.step(lambda batch: {"texts": [["a", 1], ["b"]]}, TEXT, {"texts": "list[text]"})
    answers = bench.answers(step.run(run_of([[bench.value("x", "text")]] * 2)))
    assert answers[0].message.startswith("texts[1]: found a value of type int") and answers[1] == ["b"]


def test_an_absent_value_is_none_for_its_item(bench: Bench) -> None:
    step = bench.step(lambda batch: {"text": [str(text) for text in batch["text"]]}, TEXT, TEXT)
    assert bench.answers(step.run(run_of([[msg.ABSENT], [bench.value("b", "text")]]))) == ["None", "b"]


def test_inputs_are_read_only_unless_the_step_mutates_them(bench: Bench) -> None:
    def run(batch: Batch) -> Outputs:
        for x in batch["x"]:
            x[0] = 9
        return {"y": batch["x"]}

    value = bench.value(numbers(1, 3), "tensor")
    [failed] = bench.answers(bench.step(run, X, Y).run(run_of([[value]])))
    assert "mutates_inputs" in failed.message
    [answer] = bench.answers(bench.step(run, X, Y, mutates_inputs=True).run(run_of([[value]])))
    assert answer.tolist() == [9, 1, 1]


def test_a_batch_that_raises_is_halved_until_only_the_item_at_fault_fails(bench: Bench) -> None:
    sizes: list[int] = []

    def run(batch: Batch) -> Outputs:
        sizes.append(len(batch))
        if "poison" in batch["text"]:
            raise ValueError("bad")
        return {"text": batch["text"]}

    step = bench.step(run, TEXT, TEXT)
    rows = [[bench.value(text, "text")] for text in ("a", "b", "poison", "d")]
    done = step.run(run_of(rows))
    failed = msg.Failure("StepError", "ValueError: bad")
    assert bench.answers(done) == ["a", "b", failed, "d"] and sizes == [4, 2, 2, 1, 1] and done.ran[0].batches == 5
    assert done.out_of_memory == 0


class OutOfMemoryError(RuntimeError):
    """Of torch, by its name."""


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"),
        RuntimeError("BFCArena::AllocateRawInternal Failed to allocate memory for requested buffer of size 4096"),
    ],
)
def test_a_batch_out_of_memory_is_halved_and_its_size_reported(bench: Bench, error: Exception) -> None:
    def run(batch: Batch) -> Outputs:
        if len(batch) > 2 or "huge" in batch["text"]:
            raise error
        return {"text": batch["text"]}

    step = bench.step(run, TEXT, TEXT)
    done = step.run(run_of([[bench.value(text, "text")] for text in ("a", "b", "huge", "d", "e", "f")]))
    answers = bench.answers(done)
    assert [answer if isinstance(answer, str) else answer.error for answer in answers] == [
        "a", "b", "LimitReached", "d", "e", "f",
    ]  # fmt: skip
    assert answers[2].message.startswith("out of memory") and done.out_of_memory == 6
    assert step.run(run_of([[bench.value("a", "text")]])).out_of_memory == 0


def test_an_error_that_only_mentions_memory_is_not_out_of_memory(bench: Bench) -> None:
    def run(batch: Batch) -> Outputs:
        raise ValueError("I have no memory of this place")

    done = bench.step(run, TEXT, TEXT).run(run_of([[bench.value("a", "text")]]))
    assert done.out_of_memory == 0 and bench.answers(done)[0].error == "StepError"


def test_an_item_whose_output_does_not_fit_fails_alone(bench: Bench) -> None:
    calls: list[int] = []

    def run(batch: Batch) -> Outputs:
        calls.append(len(batch))
        return {"y": [numbers(1, 150_000), numbers(2, 150_000), numbers(3, 3)]}

    done = bench.step(run, X, Y).run(run_of([[bench.value(numbers(1, 3), "tensor")]] * 3))
    assert [answer if isinstance(answer, msg.Failure) else answer[0] for answer in bench.answers(done)] == [
        1, msg.Failure("LimitReached", "no room"), 3,
    ]  # fmt: skip
    assert calls == [3]


def test_refused_and_cancelled_items_do_not_reach_the_node(bench: Bench) -> None:
    seen: list[str] = []

    def run(batch: Batch) -> Outputs:
        seen.extend(batch["text"])
        bench.cancels.cancelled.add(103)
        return {"text": batch["text"]}

    step = bench.step(run, TEXT, TEXT, items_max=2)
    refused = msg.Failure("InputError", "no")
    bench.cancels.cancelled = {101}
    done = step.run(run_of([[bench.value(text, "text")] for text in "abcdef"]), {4: refused})
    answers = bench.answers(done)
    assert seen == ["a", "c", "f"] and [answers[0], answers[2], answers[5]] == ["a", "c", "f"]
    assert [answers[1].error, answers[3].error, answers[4]] == ["RequestCancelled", "RequestCancelled", refused]
    assert done.ran[0].items == 3


def test_items_cancelled_before_their_batch_begins_are_left_out(bench: Bench) -> None:
    bench.cancels.cancelled = {100}
    done = bench.step(lambda batch: {"text": batch["text"]}, TEXT, TEXT).run(run_of([[bench.value("a", "text")]] * 2))
    assert bench.answers(done) == [msg.Failure("RequestCancelled", "the request was cancelled"), "a"]
    bench.cancels.cancelled = {100, 101}
    done = bench.step(lambda batch: {"text": batch["text"]}, TEXT, TEXT).run(run_of([[bench.value("a", "text")]] * 2))
    assert done.ran[0].batches == 0 and all(isinstance(one, msg.Failure) for one in done.results)


def test_halves_of_a_failed_batch_write_into_their_part_of_the_buffer(bench: Bench) -> None:
    def run(batch: Batch) -> Outputs:
        room = batch.output_buffer("y", "float32", (BIG,))
        if len(batch) > 1 or room is None:
            raise ValueError("one at a time")
        room[...] = batch.stacked("x")
        return {"y": room}

    block = bench.block(3 * 40_000)
    rows = [[bench.value(numbers(value), "tensor")] for value in range(3)]
    done = bench.step(run, X, Y).run(run_of(rows, output_blocks={0: block}))
    assert [answer[0] for answer in bench.answers(done)] == [0, 1, 2] and done.copied_bytes == 0


@pytest.mark.parametrize("size", [BIG // 2, BIG * 2])
def test_outputs_of_an_unexpected_size_get_a_buffer_of_their_own(bench: Bench, size: int) -> None:
    block = bench.block(40_000)
    beyond = bytes(bench.arenas[1].buffer[block.offset : block.offset + 40_000])
    step = bench.step(lambda batch: {"y": [numbers(7, size)]}, X, Y)
    done = step.run(run_of([[bench.value(numbers(1), "tensor")]], output_blocks={0: block}))
    assert bench.asked == [[size * 4]] and bench.answers(done)[0].tolist() == [7] * size
    assert bytes(bench.arenas[1].buffer[block.offset : block.offset + 40_000]) == beyond


def test_one_item_alone_is_stacked_without_a_copy(bench: Bench) -> None:
    shared: list[bool] = []

    def run(batch: Batch) -> Outputs:
        shared.append(np.shares_memory(batch.stacked("x"), batch["x"][0]))
        return {"y": batch["x"]}

    bench.step(run, X, Y).run(run_of([[bench.value(numbers(1, 3), "tensor")]]))
    assert shared == [True]


def test_a_batch_asks_for_news_of_its_items(bench: Bench) -> None:
    asked: list[int] = []
    bench.cancels.poll = lambda: (asked.append(1), bench.cancels.cancelled.add(101))[0]  # type: ignore[func-returns-value]
    step = bench.step(lambda batch: {"text": [str(batch.cancelled(at)) for at in range(2)]}, TEXT, TEXT)
    assert bench.answers(step.run(run_of([[bench.value("a", "text")]] * 2))) == ["False", "True"] and asked


def test_a_batch_exposes_the_metadata_of_its_items(bench: Bench) -> None:
    seen: list[Any] = []

    def run(batch: Batch) -> Outputs:
        seen.extend(batch.urgency(at) for at in range(len(batch)))
        assert batch.ids == (1, 2) and batch.ports == ("text",)
        return {"text": batch["text"]}

    value = bench.value("a", "text")
    items = (msg.Item(1, (value,)), msg.Item(2, (value,), msg.ItemMetadata(5, 40.0, "s", end=True)))
    bench.step(run, TEXT, TEXT).run(msg.RunBatch(1, 0, items))
    assert (seen[0].priority, seen[0].left_ms, seen[0].sequence) == (0, None, None)
    assert (seen[1].priority, seen[1].left_ms) == (5, 40.0)
    assert (seen[1].sequence.id, seen[1].sequence.start, seen[1].sequence.end) == ("s", False, True)


def test_inputs_side_by_side_are_stacked_without_a_copy(bench: Bench) -> None:
    def run(batch: Batch) -> Outputs:
        shared = np.frombuffer(bench.arenas[OTHER].buffer, np.uint8)
        assert np.shares_memory(batch.stacked("x"), shared) and batch.stacked("x").shape == (2, BIG)
        return {"y": batch["x"]}

    both = bench.value([numbers(1), numbers(2)], "list[tensor]").items or ()
    assert not any(
        isinstance(one, msg.Failure) for one in bench.answers(bench.step(run, X, Y).run(run_of([[v] for v in both])))
    )


@pytest.mark.parametrize(
    ("outputs", "reported"),
    [
        ({"z": []}, "the node returned no text; it returned z"),
        ({}, "the node returned no text; it returned nothing"),
        ({"text": ["a"] * 3}, "text: the node returned 3 values for 1 items"),
    ],
)
def test_a_node_that_returns_an_undeclared_output_fails_with_its_name(
    bench: Bench, outputs: Outputs, reported: str
) -> None:
    failures = bench.answers(
        bench.step(lambda batch: outputs, TEXT, TEXT).run(run_of([[bench.value("a", "text")]] * 2))
    )
    assert [failure.message for failure in failures] == [f"{reported}"] * 2


def test_an_address_in_an_error_is_left_out(bench: Bench) -> None:
    def run(batch: Batch) -> Outputs:
        raise ValueError("bad thing at 0x7f8812345678")

    [failed] = bench.answers(bench.step(run, TEXT, TEXT).run(run_of([[bench.value("a", "text")]])))
    assert failed.message == "ValueError: bad thing at (address)"


def brought(bench: Bench, *ids: str) -> msg.RunBatch:
    """Return a dispatch of one item of each of these sequences."""
    items = [
        msg.Item(100 + at, (bench.value("a", "text"),), msg.ItemMetadata(sequence=id, seed=at))
        for at, id in enumerate(ids)
    ]
    return msg.RunBatch(1, 0, tuple(items))


def test_a_node_class_receives_the_item_it_works_on(bench: Bench) -> None:
    def run(batch: Batch) -> Outputs:
        now = weftline.current()
        return {"text": [now.sequence.id if now.sequence else "none"] * len(batch)}

    step = bench.step(run, TEXT, TEXT, items_max=1)
    assert bench.answers(step.run(brought(bench, "s", "t"))) == ["s", "t"]
    stages = (msg.Stage(0, ((-1, 0),)), msg.Stage(1, ((-1, 0),)))
    chain = HostedChain(msg.Chain(1, stages, ((0, 0), (1, 0))), [step, bench.step(run, TEXT, TEXT, items_max=1)])
    assert bench.answers(chain.run(brought(bench, "s", "t"))) == [["s", "s"], ["t", "t"]]
    assert weftline.current().sequence is None


def test_a_node_class_that_reads_the_sequence_of_several_items_is_refused(bench: Bench) -> None:
    def caught(batch: Batch) -> Outputs:
        try:
            return {"text": [str(weftline.current().sequence)] * len(batch)}
        except StepError as error:
            reported = [one.sequence.id for one in weftline.current().items if one.sequence]
            return {"text": [f"{error}: {reported}"] * len(batch)}

    first, second = bench.answers(bench.step(caught, TEXT, TEXT).run(brought(bench, "s", "t")))
    assert first == second and "batch.urgency(position).sequence" in first and first.endswith("['s', 't']")


def test_a_stream_node_sees_an_item_in_submit_and_not_in_its_rounds(bench: Bench) -> None:
    class Asks(Flows):
        def submit(self, item: int, inputs: Mapping[str, Any], urgency: Urgency = USUAL) -> None:
            super().submit(item, inputs)
            seen.append(weftline.current().sequence)

        def round(self) -> Iterator[Piece]:  # type: ignore[override]
            yield Piece(next(iter(self._inputs)), {"output": numbers(weftline.current().priority)}, last=True)

    seen: list[Any] = []
    y = {"output": "float32[?]"}
    step = msg.StepToOpen(0, "s", "s", {}, tuple(X.items()), tuple(y.items()), "cpu", BatchPolicy(8), False)
    stream = HostedStream(step, Asks(None), bench.memory)
    stream.submit(msg.Item(7, (bench.value(numbers(1, 3), "tensor"),), msg.ItemMetadata(sequence="s")))
    assert seen == [SequencePart("s")]
    (piece,) = stream.round()
    assert piece.failure is not None and "keep what `submit` is given" in piece.failure.message


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
def test_a_batch_is_padded_to_the_smallest_bucket_and_cut_back(bench: Bench, sizes: list[int], padded: int) -> None:
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


def test_an_output_size_comes_from_any_input_with_that_dimension(bench: Bench) -> None:
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
    return msg.StepToOpen(
        0, "s", "n", {}, (("x", type),), (), "cpu", BatchPolicy(4, pad={"T": (4,)}, pad_value=pad_value), False
    )


def test_dtypes_that_numpy_does_not_have_are_filled_by_their_bits() -> None:
    torch = pytest.importorskip("torch")
    padding = Padding.of(to_open("bfloat16[T]", -2.5))
    assert padding is not None
    columns: dict[str, list[Any]] = {"x": [np.zeros(2, np.uint16)]}
    padding.pad(columns)
    assert torch.from_numpy(columns["x"][0]).view(torch.bfloat16).tolist() == [0, 0, -2.5, -2.5]
    with pytest.raises(ModelError, match="only 0 can"):
        Padding.of(to_open("float8_e5m2[T]", 1.0))
