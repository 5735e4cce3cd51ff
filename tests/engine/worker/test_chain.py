"""Chains: live values between steps, batches of their own, and copies of the results only."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from tests.engine.hosted import Bench, run_of
from weftline.engine.protocol import messages as msg
from weftline.engine.worker.batch import HostedStep
from weftline.engine.worker.chain import HostedChain
from weftline.nodes.contract import Batch, Outputs

X, Y = {"x": "float32[N]"}, {"y": "float32[N]"}
TEXT = {"text": "text"}
BIG = 10_000
ITEM = -1


@pytest.fixture
def bench() -> Iterator[Bench]:
    made = Bench()
    yield made
    made.close()


def chain(steps: list[HostedStep], inputs: list[list[tuple[int, int]]], *returns: tuple[int, int]) -> HostedChain:
    stages = tuple(msg.Stage(index, tuple(wires)) for index, wires in enumerate(inputs))
    return HostedChain(msg.Chain(1, stages, returns), steps)


def numbers(value: float, size: int = BIG) -> np.ndarray:
    return np.full(size, value, np.float32)


def test_stages_hand_over_live_arrays_and_only_the_answer_is_placed(bench: Bench) -> None:
    made: list[int] = []  # addresses: a node that kept the arrays could write them

    def double(batch: Batch) -> Outputs:
        doubled = [x * 2 for x in batch["x"]]
        made.extend(x.ctypes.data for x in doubled)
        return {"y": doubled}

    def add(batch: Batch) -> Outputs:
        assert [x.ctypes.data for x in batch["x"]] == made and not any(x.flags.writeable for x in batch["x"])
        return {"y": [x + 1 for x in batch["x"]]}

    both = chain([bench.step(double, X, Y), bench.step(add, X, Y)], [[(ITEM, 0)], [(0, 0)]], (1, 0))
    done = both.run(run_of([[bench.value(numbers(value), "tensor")] for value in (1, 2)]))
    assert [answer[0] for answer in bench.answers(done)] == [3, 5]
    assert bench.asked == [[80_000]] and done.copied_bytes == 80_000
    assert [(ran.batches, ran.items) for ran in done.ran] == [(1, 2), (1, 2)]


def test_every_stage_runs_in_batches_of_its_own(bench: Bench) -> None:
    sizes: list[int] = []

    def note(batch: Batch) -> Outputs:
        sizes.append(len(batch))
        return {"text": [text + "!" for text in batch["text"]]}

    steps = [bench.step(note, TEXT, TEXT, items_max=most) for most in (2, 8, 3)]
    done = chain(steps, [[(ITEM, 0)], [(0, 0)], [(1, 0)]], (2, 0)).run(run_of([[bench.value("a", "text")]] * 5))
    assert sizes == [2, 2, 1, 5, 3, 2] and bench.answers(done) == ["a!!!"] * 5
    assert [ran.batches for ran in done.ran] == [3, 1, 2]


def test_an_item_that_fails_is_out_and_the_others_go_on(bench: Bench) -> None:
    reached: list[str] = []

    def picky(batch: Batch) -> Outputs:
        return {"text": [ValueError("no") if text == "bad" else text for text in batch["text"]]}

    def raises(batch: Batch) -> Outputs:
        reached.extend(batch["text"])
        if "worse" in batch["text"]:
            raise RuntimeError("worse")
        return {"text": batch["text"]}

    both = chain([bench.step(picky, TEXT, TEXT), bench.step(raises, TEXT, TEXT)], [[(ITEM, 0)], [(0, 0)]], (1, 0))
    done = both.run(run_of([[bench.value(text, "text")] for text in ("a", "bad", "worse", "d")]))
    assert bench.answers(done) == [
        "a", msg.Failure("StepError", "ValueError: no", 0), msg.Failure("StepError", "RuntimeError: worse", 1), "d",
    ]  # fmt: skip
    assert "bad" not in reached and [ran.items for ran in done.ran] == [4, 3]


def test_a_value_of_another_type_fails_where_it_was_made(bench: Bench) -> None:
    wrong = bench.step(lambda batch: {"y": [np.zeros(3)]}, X, Y)
    after = bench.step(lambda batch: {"y": batch["x"]}, X, Y)
    done = chain([wrong, after], [[(ITEM, 0)], [(0, 0)]], (1, 0)).run(run_of([[bench.value(numbers(1, 3), "tensor")]]))
    [failed] = done.results
    assert isinstance(failed, msg.Failure) and failed.stage == 0 and "found float64[3]" in failed.message


def test_an_input_that_comes_through_is_not_copied(bench: Bench) -> None:
    same = bench.step(lambda batch: {"y": batch["x"]}, X, Y)
    value, text = bench.value(numbers(1), "tensor"), bench.value("t" * 20_000, "text")
    texts = bench.step(lambda batch: {"text": batch["text"]}, TEXT, TEXT)
    through = chain([same, same, texts, texts], [[(ITEM, 0)], [(0, 0)], [(ITEM, 1)], [(2, 0)]], (1, 0), (3, 0), (0, 0))
    [result] = through.run(run_of([[value, text]])).results
    assert isinstance(result, msg.ItemResult) and result.outputs == (value, text, value) and bench.asked == []


def test_a_stage_may_read_the_item_and_several_stages(bench: Bench) -> None:
    def join(batch: Batch) -> Outputs:
        return {"text": [f"{a}{b}{c}" for a, b, c in zip(batch["a"], batch["b"], batch["c"], strict=True)]}

    shout = bench.step(lambda batch: {"text": [text.upper() for text in batch["text"]]}, TEXT, TEXT)
    joined = bench.step(join, {"a": "text", "b": "text", "c": "text"}, TEXT)
    both = chain([shout, shout, joined], [[(ITEM, 0)], [(ITEM, 1)], [(0, 0), (1, 0), (ITEM, 2)]], (2, 0), (0, 0))
    values = [bench.value(text, "text") for text in "abc"]
    assert bench.answers(both.run(run_of([values]))) == [["ABc", "A"]]


def test_a_stage_that_writes_into_its_inputs_gets_copies(bench: Bench) -> None:
    def writes(batch: Batch) -> Outputs:
        for x in batch["x"]:
            x[0] = 9
        return {"y": batch["x"]}

    first = bench.step(lambda batch: {"y": [x * 1 for x in batch["x"]]}, X, Y)
    second = bench.step(writes, X, Y, mutates_inputs=True)
    both = chain([first, second], [[(ITEM, 0)], [(0, 0)]], (0, 0), (1, 0))
    [[before, after]] = bench.answers(both.run(run_of([[bench.value(numbers(1, 3), "tensor")]])))
    assert (before.tolist(), after.tolist()) == ([1, 1, 1], [9, 1, 1])


def test_json_is_handed_over_as_a_copy_of_its_own_to_every_reader(bench: Bench) -> None:
    def grows(batch: Batch) -> Outputs:
        for box in batch["box"]:
            box["seen"].append(1)
        return {"box": batch["box"]}

    box = {"box": "json"}
    first = bench.step(lambda batch: {"box": batch["box"]}, box, box)
    grow = bench.step(grows, box, box)
    both = chain([first, grow, grow], [[(ITEM, 0)], [(0, 0)], [(0, 0)]], (0, 0), (1, 0), (2, 0))
    assert bench.answers(both.run(run_of([[bench.value({"seen": []}, "json")]]))) == [
        [{"seen": []}, {"seen": [1]}, {"seen": [1]}]
    ]


def test_rows_of_one_array_are_one_array_for_the_next_stage(bench: Bench) -> None:
    made: list[int] = []  # addresses

    def together(batch: Batch) -> Outputs:
        whole = batch.stacked("x") * 2
        made.append(whole.ctypes.data)
        return {"y": whole}

    shared: list[bool] = []

    def reads(batch: Batch) -> Outputs:
        shared.append(batch.stacked("x").ctypes.data == made[0])
        return {"y": batch.stacked("x")}

    both = chain([bench.step(together, X, Y), bench.step(reads, X, Y)], [[(ITEM, 0)], [(0, 0)]], (1, 0))
    done = both.run(run_of([[bench.value(numbers(value, 3), "tensor")] for value in (1, 2, 3)]))
    assert [answer[0] for answer in bench.answers(done)] == [2, 4, 6] and shared == [True]


def test_items_cancelled_on_the_way_are_left_out_of_later_stages(bench: Bench) -> None:
    def first(batch: Batch) -> Outputs:
        bench.cancels.cancelled = {101}
        return {"text": batch["text"]}

    reached: list[Any] = []

    def second(batch: Batch) -> Outputs:
        reached.extend(batch["text"])
        return {"text": batch["text"]}

    both = chain([bench.step(first, TEXT, TEXT), bench.step(second, TEXT, TEXT)], [[(ITEM, 0)], [(0, 0)]], (1, 0))
    refused = msg.Failure("InputError", "no")
    done = both.run(run_of([[bench.value(text, "text")] for text in "abc"]), {2: refused})
    [a, b, c] = bench.answers(done)
    assert a == "a" and (b.error, b.stage) == ("RequestCancelled", 1) and c == refused and reached == ["a"]


def test_memory_that_ran_out_in_any_stage_is_reported(bench: Bench) -> None:
    def hungry(batch: Batch) -> Outputs:
        if len(batch) > 1:
            raise MemoryError
        return {"text": batch["text"]}

    both = chain(
        [bench.step(hungry, TEXT, TEXT), bench.step(hungry, TEXT, TEXT, items_max=2)], [[(ITEM, 0)], [(0, 0)]], (1, 0)
    )
    done = both.run(run_of([[bench.value("a", "text")]] * 4))
    assert done.out_of_memory == 4 and bench.answers(done) == ["a"] * 4


def test_an_answer_without_a_buffer_fails_its_item_in_the_last_stage(bench: Bench) -> None:
    same = bench.step(lambda batch: {"y": batch["x"]}, X, Y)
    grows = bench.step(lambda batch: {"y": [numbers(1, int(x[0])) for x in batch["x"]]}, X, Y)
    done = chain([same, grows], [[(ITEM, 0)], [(0, 0)]], (1, 0)).run(
        run_of([[bench.value(numbers(size, 1), "tensor")] for size in (150_000, 200_000)])
    )
    assert bench.answers(done)[0].shape == (150_000,)
    assert done.results[1] == msg.Failure("LimitReached", "no room", 1)
