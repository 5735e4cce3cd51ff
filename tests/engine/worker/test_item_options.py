"""Options of items in a worker: the config of a call, and what is refused."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

from tests.engine.hosted import Bench
from weftline.engine.protocol import messages as msg
from weftline.engine.worker.batch import HostedStep
from weftline.node import REQUEST, Batch, BatchNode, Outputs, Ports, StepContext
from weftline.pipelines.spec.policy import BatchPolicy, CallPolicy


@dataclass(frozen=True)
class Options:
    size: int = 1
    mark: Annotated[str, REQUEST] = "a"


class Marks(BatchNode):
    Config: ClassVar[type[Any]] = Options

    @classmethod
    def ports(cls, config: Any, step: StepContext) -> Ports:
        raise NotImplementedError

    def run(self, batch: Batch) -> Outputs:
        return {"y": [f"{self.config.mark}{self.config.size} {len(batch)}"] * len(batch)}


def hosted(bench: Bench) -> HostedStep:
    batch, ports = BatchPolicy(8), ((("x", "text"),), (("y", "text"),))
    step = msg.StepToOpen(0, "s", "marks", {"size": 4}, *ports, "cpu", batch, False)
    made = HostedStep(step, Marks(Options(4)), bench.memory, bench.cancels)
    made.options.set(msg.SetOptions(0, 1, "other", 0, {"mark": "b"}, CallPolicy()))
    return made


def run(bench: Bench, step: HostedStep, *numbers: int) -> list[Any]:
    items = [
        msg.Item(at, (bench.value("t", "text"),), msg.ItemMetadata(options=number)) for at, number in enumerate(numbers)
    ]
    return bench.answers(step.run(msg.RunBatch(1, 0, tuple(items))))


def test_a_call_has_the_request_options_of_its_items() -> None:
    bench = Bench()
    step = hosted(bench)
    assert run(bench, step, 1, 1) == ["b4 2"] * 2 and run(bench, step, 0) == ["a4 1"]
    bench.close()


def test_items_that_should_not_share_a_call_run_apart() -> None:
    bench = Bench()
    assert run(bench, hosted(bench), 0, 1, 1, 1) == ["a4 1", "b4 1", "b4 2", "b4 2"]
    bench.close()


def test_an_item_without_its_options_fails_alone() -> None:
    bench = Bench()
    step = hosted(bench)
    first, second = run(bench, step, 0, 7)
    assert first == "a4 1" and "no options 7" in second.message
    step.options.drop(msg.DropOptions(0, (1,)))
    (dropped,) = run(bench, step, 1)
    assert "no options 1" in dropped.message and run(bench, step, 0) == ["a4 1"]
    bench.close()


def test_options_that_are_no_config_fail_their_items_with_the_reason() -> None:
    bench = Bench()
    step = hosted(bench)
    step.options.set(msg.SetOptions(0, 2, "wrong", 0, {"mark": 3}, CallPolicy()))
    (failed,) = run(bench, step, 2)
    assert "step wrong: its options cannot be used" in failed.message and "mark" in failed.message
    bench.close()
