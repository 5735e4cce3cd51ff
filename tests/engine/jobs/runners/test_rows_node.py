"""A node that is given blocks: which rows form batches, what becomes of those that fail, and what it tells."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

from weftline.engine.jobs.runners.packing import ABSENT, COLUMN, FAILED, Column, PackedColumn, own, read
from weftline.engine.jobs.runners.rows_node import HeavyRowsNode, RowsConfig, RowsNode
from weftline.engine.protocol.values import pack
from weftline.errors import RequestCancelled
from weftline.node import Batch, BatchNode, OpenContext, Outputs, Ports, PortType, StepContext, StepError, port
from weftline.nodes.urgency import seed_of

HERE = Path(__file__).parent
NODE = f"{Path(__file__).name}:Noting"


class Noting(BatchNode):
    """Passes `x` on, and notes what it was given; `run` may be replaced."""

    calls: ClassVar[list[list[Any]]] = []
    answer: ClassVar[Callable[[Batch], Outputs]] = staticmethod(lambda batch: {"y": list(batch["x"])})
    life: ClassVar[list[str]] = []

    @classmethod
    def ports(cls, config: Any, step: StepContext) -> Ports:
        return Ports((port("x", "any"), port("b", "text", optional=True)), (port("y", "text"),))

    def open(self, context: OpenContext) -> None:
        Noting.life.append(f"open {context.items_max}")

    def warm_up(self) -> None:
        Noting.life.append("warm up")

    def close(self) -> None:
        Noting.life.append("close")

    def run(self, batch: Batch) -> Outputs:
        Noting.calls.append(list(batch["x"]))
        return Noting.answer(batch)


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> Callable[..., RowsNode]:
    import weftline.engine.jobs.runners.rows_node as rows_node

    monkeypatch.setattr(rows_node, "resolve", lambda reference, base_dir: Noting)
    monkeypatch.setattr(Noting, "calls", [])
    monkeypatch.setattr(Noting, "life", [])
    monkeypatch.setattr(Noting, "answer", staticmethod(lambda batch: {"y": list(batch["x"])}))

    def opened(**more: Any) -> RowsNode:
        usual: dict[str, Any] = {"inputs": {"x": "text"}, "outputs": {"y": "text"}, "rows_max": 3}
        node = RowsNode(RowsConfig(**{"runs": NODE, "runs_options": {}, **usual, **more}))
        node.open(OpenContext(HERE))
        return node

    return opened


def column(values: list[Any], type: str = "text", marks: bytes = b"") -> np.ndarray:
    packed = [None if value is None else pack(value, PortType.parse(type), "x") for value in values]
    return PackedColumn(Column(packed, marks)).array()


def asked(node: RowsNode, columns: dict[str, np.ndarray], rows: int, seeds: list[int] | None = None) -> dict[str, Any]:
    """Return what a block is answered with: values by output, and the outcome."""
    array = np.array(seeds if seeds is not None else [-1] * rows, np.int64)
    answer = node.run(Batch({**{name: [blob] for name, blob in columns.items()}, "seeds": [array]}))
    outcome = answer["outcome"][0]
    given = {name: read(values[0]) for name, values in answer.items() if name != "outcome"}
    values = {name: [one and own(one) for one in found.values] for name, found in given.items()}
    return values | {"marks": given["y"].marks, "batches": [one[0] for one in outcome[0]]} | {
        "errors": [list(one) for one in outcome[1]], "skipped": outcome[2], "failed": sum(one[2] for one in outcome[0]),
    }  # fmt: skip


def failing(*texts: str) -> Callable[[Batch], Outputs]:
    """Return a node that fails as a whole when one of these is in the batch."""

    def run(batch: Batch) -> Outputs:
        if set(texts) & set(batch["x"]):
            raise ValueError("not these at 0x7f12345678")
        return {"y": list(batch["x"])}

    return staticmethod(run)


def test_batches_are_formed_by_row_order(opened: Callable[..., RowsNode]) -> None:
    answer = asked(opened(), {"x": column(list("abcdefgh"))}, 8)
    assert Noting.calls == [["a", "b", "c"], ["d", "e", "f"], ["g", "h"]]
    assert answer["y"] == list("abcdefgh")
    assert answer["batches"] == [3, 3, 2]
    assert answer["errors"] == []


def test_rows_without_what_is_needed_take_no_place_in_a_batch(opened: Callable[..., RowsNode]) -> None:
    marks = bytes([0, ABSENT, 0, FAILED, 0, 0])
    answer = asked(opened(), {"x": column(["a", None, "c", None, "e", "f"], marks=marks)}, 6)
    assert Noting.calls == [["a", "c", "e"], ["f"]]
    assert answer["y"] == ["a", None, "c", None, "e", "f"]
    assert answer["marks"] == marks
    assert answer["skipped"] == 1
    assert answer["failed"] == 0


def test_an_earlier_failed_row_is_skipped_even_for_an_optional_input(
    opened: Callable[..., RowsNode],
) -> None:
    Noting.answer = staticmethod(lambda batch: {"y": [f"{x} {b}" for x, b in zip(batch["x"], batch["b"])]})
    node = opened(inputs={"x": "text", "b": "text"}, optional=("b",))
    columns = {"x": column(["a", "b", "c"]), "b": column([None, None, "d"], marks=bytes([ABSENT, FAILED, 0]))}
    answer = asked(node, columns, 3)
    assert answer["y"] == ["a None", None, "c d"]
    assert answer["marks"] == bytes([0, FAILED, 0])


def test_only_the_row_at_fault_fails_when_the_node_raises(opened: Callable[..., RowsNode]) -> None:
    Noting.answer = failing("b", "e")
    answer = asked(opened(rows_max=4), {"x": column(list("abcdef"))}, 6)
    assert answer["y"] == ["a", None, "c", "d", None, "f"]
    reason = "ValueError: not these at (address)"
    assert answer["errors"] == [[1, "StepError", reason], [4, "StepError", reason]]
    assert answer["failed"] == 2
    assert answer["marks"] == bytes([0, FAILED, 0, 0, FAILED, 0])


def test_an_exception_as_a_value_fails_its_row_alone(opened: Callable[..., RowsNode]) -> None:
    Noting.answer = staticmethod(lambda batch: {"y": [StepError("no b") if x == "b" else x for x in batch["x"]]})
    answer = asked(opened(), {"x": column(list("abc"))}, 3)
    assert answer["y"] == ["a", None, "c"]
    assert answer["errors"] == [[1, "StepError", "no b"]]
    assert len(Noting.calls) == 1


def test_a_value_of_the_wrong_type_fails_its_row_alone(opened: Callable[..., RowsNode]) -> None:
    Noting.answer = staticmethod(lambda batch: {"y": ["a", 7, "c"]})
    answer = asked(opened(), {"x": column(list("abc"))}, 3)
    assert answer["errors"] == [[1, "StepError", "y: found a value of type int, expected a str"]]


def test_tensors_of_different_shapes_run_apart_if_configured(opened: Callable[..., RowsNode]) -> None:
    Noting.answer = staticmethod(lambda batch: {"y": [str(len(x)) for x in batch["x"]]})
    arrays = [np.zeros(size, np.float32) for size in (2, 3, 2, 3, 2, 2, 2)]
    node = opened(inputs={"x": "float32[?]"}, same_shapes=True)
    answer = asked(node, {"x": column(arrays, "float32[?]")}, 7)
    assert [[len(x) for x in call] for call in Noting.calls] == [[2, 2, 2], [2, 2], [3, 3]]
    assert answer["y"] == ["2", "3", "2", "3", "2", "2", "2"]


def test_rows_of_equal_length_meet_where_the_node_pads(opened: Callable[..., RowsNode]) -> None:
    texts = ["aaaa", "b", "cc", "d", "eeee", "ff"]
    answer = asked(opened(by_length="x", rows_max=2), {"x": column(texts)}, 6)
    assert Noting.calls == [["b", "d"], ["cc", "ff"], ["aaaa", "eeee"]]
    assert answer["y"] == texts


def test_tensors_of_a_batch_are_one_array_without_a_copy(opened: Callable[..., RowsNode]) -> None:
    blob = column([np.full(4, row, np.float32) for row in range(3)], "float32[4]")
    stacked = []
    Noting.answer = staticmethod(lambda batch: stacked.append(batch.stacked("x")) or {"y": ["", "", ""]})  # type: ignore[func-returns-value]
    asked(opened(inputs={"x": "float32[4]"}), {"x": blob}, 3)
    assert stacked[0].tolist() == [[0.0] * 4, [1.0] * 4, [2.0] * 4]
    assert np.shares_memory(stacked[0], blob)


def test_a_node_that_writes_into_its_inputs_gets_copies(opened: Callable[..., RowsNode]) -> None:
    def run(batch: Batch) -> Outputs:
        for array in batch["x"]:
            array += 1
        return {"y": [str(array.tolist()) for array in batch["x"]]}

    Noting.answer = staticmethod(run)
    blob = column([np.zeros(2, np.float32)], "float32[2]")
    blob.flags.writeable = False
    assert asked(opened(inputs={"x": "float32[2]"}, mutates=True), {"x": blob}, 1)["y"] == ["[1.0, 1.0]"]
    failed = asked(opened(inputs={"x": "float32[2]"}), {"x": blob}, 1)["errors"]
    assert "read-only" in failed[0][2]


def test_every_row_brings_its_own_seed(opened: Callable[..., RowsNode]) -> None:
    seen: list[int | None] = []
    Noting.answer = staticmethod(
        lambda batch: seen.extend(batch.urgency(place).seed for place in range(len(batch))) or {"y": list(batch["x"])}  # type: ignore[func-returns-value]
    )
    asked(opened(), {"x": column(list("abcd"))}, 4, seeds=[5, -1, 7, 0])
    assert seen == [seed_of(5, ""), None, seed_of(7, ""), seed_of(0, "")]


def test_what_is_the_same_for_every_row_is_an_option(opened: Callable[..., RowsNode]) -> None:
    Noting.answer = staticmethod(lambda batch: {"y": [f"{x} {b}" for x, b in zip(batch["x"], batch["b"])]})
    node = opened(inputs={"x": "text", "b": "text"}, fixed={"b": "!"})
    assert asked(node, {"x": column(["a", "c"])}, 2)["y"] == ["a !", "c !"]


def test_a_step_that_needs_what_is_always_absent_runs_for_no_row(opened: Callable[..., RowsNode]) -> None:
    answer = asked(opened(inputs={"x": "text", "b": "text"}, absent=("b",)), {"x": column(["a", "c"])}, 2)
    assert Noting.calls == []
    assert (answer["y"], answer["skipped"]) == ([None, None], 2)
    Noting.answer = staticmethod(lambda batch: {"y": [f"{x} {b}" for x, b in zip(batch["x"], batch["b"])]})
    node = opened(inputs={"x": "text", "b": "text"}, absent=("b",), optional=("b",))
    assert asked(node, {"x": column(["a"])}, 1)["y"] == ["a None"]


def test_an_unread_output_is_not_written(opened: Callable[..., RowsNode]) -> None:
    assert asked(opened(unread=("y",)), {"x": column(["a", "b"])}, 2)["y"] == []


def test_a_block_without_rows_is_answered(opened: Callable[..., RowsNode]) -> None:
    answer = asked(opened(), {"x": column([])}, 0)
    assert (answer["y"], answer["batches"]) == ([], [])


def test_a_column_of_another_length_is_refused(opened: Callable[..., RowsNode]) -> None:
    with pytest.raises(StepError, match="x: found a column of 2 rows in a block of 3"):
        asked(opened(), {"x": column(["a", "b"])}, 3)


def test_a_cancelled_block_ends_between_batches(opened: Callable[..., RowsNode]) -> None:
    node = opened()
    seeds = np.full(9, -1, np.int64)
    batch = Batch({"x": [column(list("abcdefghi"))], "seeds": [seeds]}, cancelled=lambda id: bool(Noting.calls))
    with pytest.raises(RequestCancelled):
        node.run(batch)
    assert len(Noting.calls) == 1


def test_the_held_node_is_opened_warmed_up_and_closed(opened: Callable[..., RowsNode]) -> None:
    node = opened(rows_max=7)
    node.warm_up()
    node.close()
    assert Noting.life == ["open 7", "warm up", "close"]


def test_every_port_is_a_column() -> None:
    config = RowsConfig("echo", {}, {"a": "text", "b": "image", "c": "json"}, {"y": "text"}, fixed={"c": 1})
    ports = RowsNode.ports(config, StepContext(HERE))
    assert [(one.name, str(one.type)) for one in ports.inputs] == [
        ("a", str(COLUMN)), ("b", str(COLUMN)), ("seeds", "int64[?]"),
    ]  # fmt: skip
    assert [(one.name, str(one.type)) for one in ports.outputs] == [("y", str(COLUMN)), ("outcome", "json")]
    assert HeavyRowsNode.heavy and not RowsNode.heavy
