"""Batch runner: checked outputs, bisection, and values that stay in process memory."""

from typing import ClassVar

import numpy as np

from weftline.engine.protocol.messages import Failure, Item
from weftline.engine.protocol.packed import Row
from weftline.engine.protocol.values import pack
from weftline.engine.worker.batch_runner import BatchRunner, BatchSignature
from weftline.nodes.contract import Batch, BatchNode, Outputs, StepContext
from weftline.nodes.ports import Ports, PortType, port

TEXT = PortType.parse("text")


class Shout(BatchNode):
    """Returns upper-case texts; fails a batch with 'bad', and returns a number for 'number'."""

    sizes: ClassVar[list[int]] = []

    @classmethod
    def ports(cls, config: object, step: StepContext) -> Ports:
        return Ports((port("x", "text"),), (port("y", "text"),))

    def run(self, batch: Batch) -> Outputs:
        Shout.sizes.append(len(batch))
        if "bad" in batch["x"]:
            raise ValueError("it is bad")
        return {"y": [7 if x == "number" else x.upper() for x in batch["x"]]}


def run(*texts: str) -> list[Row | Failure]:
    Shout.sizes.clear()
    runner = BatchRunner(Shout(None), BatchSignature("s", "shout", {"x": "text"}, {"y": "text"}, items_max=8))
    return runner.run([Item(n, ()) for n in range(len(texts))], [[pack(text, TEXT, "x")] for text in texts])


def test_a_batch_is_one_call_and_its_outputs_are_packed() -> None:
    rows = run("a", "b", "c")
    assert Shout.sizes == [3]
    assert [row[0].data for row in rows if not isinstance(row, Failure)] == [b"A", b"B", b"C"]  # type: ignore[union-attr]


def test_only_the_faulty_item_of_a_batch_fails() -> None:
    rows = run("a", "bad", "c", "d")
    assert [isinstance(row, Failure) for row in rows] == [False, True, False, False]
    assert Shout.sizes == [4, 2, 1, 1, 2]


def test_an_output_of_the_wrong_type_fails_its_item_without_another_call() -> None:
    rows = run("a", "number")
    assert [isinstance(row, Failure) for row in rows] == [False, True]
    assert Shout.sizes == [2]


def test_inputs_are_copied_for_a_node_that_writes_to_them() -> None:
    class Clear(BatchNode):
        @classmethod
        def ports(cls, config: object, step: StepContext) -> Ports:
            return Ports((port("x", "float32[?]"),), (port("y", "text"),))

        def run(self, batch: Batch) -> Outputs:
            for x in batch["x"]:
                x[:] = 0
            return {"y": ["done"] * len(batch)}

    array = np.ones(3, np.float32)
    signature = BatchSignature("s", "clear", {"x": "float32[?]"}, {"y": "text"}, mutates_inputs=True)
    BatchRunner(Clear(None), signature).run([Item(0, ())], [[pack(array, PortType.parse("float32[?]"), "x")]])
    assert array.tolist() == [1, 1, 1]
