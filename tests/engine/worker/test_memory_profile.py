"""Device memory of steps: the difference after opening, and the peak of their work."""

from __future__ import annotations

from typing import Any

import numpy as np

from weftline.engine.protocol.messages import DeviceUse, StepToOpen
from weftline.engine.worker.batch import HostedStep
from weftline.engine.worker.memory import Memory
from weftline.engine.worker.memory_profile import DeviceMemoryMeter, profile_largest_batch
from weftline.node import Batch, BatchNode, Outputs, Ports, port
from weftline.pipelines.spec.policy import BatchPolicy
from weftline.testing.fake_gpu.gpu import FakeGpu

MIB = 1 << 20


def test_a_step_uses_the_memory_measured_when_it_opened() -> None:
    gpu = FakeGpu("fake:0")
    meter = DeviceMemoryMeter(gpu, arena_bytes=5 * MIB)
    with meter.opening("see"):
        weights = gpu.allocate(4 * MIB)
    with meter.warming("see"):
        gpu.allocate(2 * MIB)
    with meter.opening("hear"):
        gpu.allocate(6 * MIB)
    assert meter.uses == {"see": DeviceUse(4 * MIB, 6 * MIB), "hear": DeviceUse(6 * MIB, 6 * MIB)}
    assert (meter.taken_bytes, meter.free_bytes) == (17 * MIB, gpu.memory()[0])
    gpu.free(weights)


def test_without_a_device_nothing_is_measured() -> None:
    meter = DeviceMemoryMeter(None)
    with meter.opening("see"), meter.warming("see"):
        pass
    assert (meter.uses, meter.taken_bytes, meter.free_bytes, meter.enabled) == ({}, 0, 0, False)


class Counts(BatchNode):
    """Notes how large its batches are and what is in them."""

    def __init__(self, fails: bool = False) -> None:
        super().__init__(None)
        self.seen: list[tuple[int, tuple[int, ...]]] = []
        self.fails = fails

    @classmethod
    def ports(cls, config: Any, step: Any) -> Ports:
        return Ports((port("x", "float32[2, 3]"),), (port("y", "float32[2, 3]"),))

    def run(self, batch: Batch) -> Outputs:
        self.seen.append((len(batch), np.asarray(batch["x"][0]).shape))
        if self.fails:
            raise MemoryError("too many")
        return {"y": list(batch["x"])}


def largest(node: Counts, given: str = "float32[2, 3]", items_max: int = 16) -> int:
    """Run a node on its largest batch in a worker without output buffers; no result is sent."""
    ports = (("x", given),), (("y", given),)
    step = StepToOpen(0, "s", "node", {}, *ports, "cpu", BatchPolicy(items_max), False)
    return profile_largest_batch(step, HostedStep(step, node, Memory({}, 1, lambda sizes, device: ((), ()))))


def test_a_step_of_fixed_sizes_is_run_on_its_largest_possible_batch() -> None:
    node = Counts()
    assert largest(node) == 16
    assert node.seen == [(16, (2, 3))]


def test_a_batch_that_the_node_refuses_does_no_harm() -> None:
    node = Counts(fails=True)
    assert largest(node, items_max=4) == 4
    assert node.seen[0][0] == 4


def test_open_sizes_small_batches_and_steps_that_remember_are_not_tried() -> None:
    for given, items_max in (("float32[N]", 16), ("float32[2, 3]", 1), ("text", 16)):
        node = Counts()
        assert largest(node, given, items_max) == 0
        assert node.seen == []

    class Once(Counts):
        idempotent = False

    once = Once()
    assert largest(once) == 0
    assert once.seen == []
