"""Sleeping steps: nodes that sleep by themselves, and nodes that are closed and opened again."""

from __future__ import annotations

import gc
import weakref
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import pytest

from weftline.engine.protocol import messages as msg
from weftline.engine.worker.memory_profile import DeviceMemoryMeter
from weftline.engine.worker.sleep import SleepController, SleepDevice, SleepingNode
from weftline.node import Batch, BatchNode, ModelError, Node, NodeMemory, Outputs, Ports, StepError, StreamNode
from weftline.pipelines.spec.policy import BatchPolicy
from weftline.shm.device.driver import DeviceLost


class Model(BatchNode):
    """Record the calls to a node; `rests` is the result of its sleep, or an exception to raise."""

    rests: bool | Exception = False
    fails_awake: Exception | None = None
    fails_closing: Exception | None = None

    def __init__(self) -> None:
        super().__init__(None)
        self.calls: list[str] = []

    @classmethod
    def ports(cls, config: Any, step: Any) -> Ports:
        raise NotImplementedError

    def run(self, batch: Batch) -> Outputs:
        return {}

    def sleep(self, keep: str) -> bool:
        self.calls.append(f"sleep {keep}")
        if isinstance(self.rests, Exception):
            raise self.rests
        return self.rests

    def wake(self) -> None:
        self.calls.append("wake")
        if self.fails_awake is not None:
            raise self.fails_awake

    def close(self) -> None:
        self.calls.append("close")
        if self.fails_closing is not None:
            raise self.fails_closing


class Rests(Model):
    rests = True


class Talks(StreamNode, Rests):
    """A streaming node with KV memory, of which it keeps what it has grown to."""

    held = 900

    def memory(self) -> NodeMemory:
        return NodeMemory(0, 0, self.held)

    def figures(self) -> dict[str, float]:
        return {"calls_total": len(self.calls)}

    def resize_memory(self, bytes: int) -> int:
        self.held = bytes
        return bytes

    def submit(self, item: int, inputs: Any, urgency: Any = None) -> None: ...

    def cancel(self, item: int) -> None: ...

    def round(self) -> tuple[()]:
        return ()

    @property
    def busy(self) -> bool:
        return True


class Watched(SleepDevice):
    """Record the calls to a worker's device; `free` are the free sizes it returns, in turn."""

    def __init__(self, *free: int) -> None:
        super().__init__(None, DeviceMemoryMeter(None), lambda step: 0)
        self.free, self.did = list(free), list[str]()

    @property
    def free_bytes(self) -> int:
        return self.free.pop(0) if self.free else 0

    def synchronize(self) -> None:
        super().synchronize()
        self.did.append("synchronize")

    def use_stream(self, step: msg.StepToOpen) -> AbstractContextManager[Any]:
        self.did.append(f"use_stream {step.name}")
        return super().use_stream(step)

    def trim(self) -> None:
        super().trim()
        self.did.append("trim")


@dataclass
class Holder:
    node: Any


@dataclass
class Room:
    """A worker with one step, 3, that runs a given node; `opened` are the nodes opened for it since."""

    node: Node
    device: Watched = field(default_factory=Watched)
    reopens: bool | Exception = True
    kv_bytes: int | None = 100
    opened: list[Node] = field(default_factory=list)
    said: list[msg.FromWorker] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.nodes, self.holder = {3: self.node}, Holder(self.node)
        step = msg.StepToOpen(3, "see", "node", {"kv_bytes": self.kv_bytes}, (), (), "cpu", BatchPolicy(8), False)
        lookup = {3: self.holder}
        self.sleepers = SleepController(
            [step], self.nodes, lookup.__getitem__, self._reopen, self.device, self.said.append
        )
        del self.node

    def _reopen(self, step: msg.StepToOpen) -> Node:
        if isinstance(self.reopens, Exception):
            raise self.reopens
        self.opened.append(Model())
        return self.opened[-1]


@pytest.mark.slow
def test_a_node_that_cannot_sleep_is_closed_and_opened_anew() -> None:
    node = Model()
    room = Room(node, Watched(1000, 1700))
    assert room.sleepers.sleep(msg.Sleep(3, "host")) == msg.Asleep(3, 700)
    assert node.calls == ["sleep host", "close"]
    assert room.device.did == ["synchronize", "use_stream see", "trim"]
    answer = room.sleepers.wake(msg.Wake(3))
    assert (answer.step, answer.failure) == (3, None)
    assert room.holder.node is room.nodes[3] is room.opened[0]
    assert room.said == [msg.OpenProgress("see", "waking", 0.0)]


@pytest.mark.slow
def test_a_node_that_can_rests_and_is_woken() -> None:
    node = Rests()
    room = Room(node)
    room.sleepers.sleep(msg.Sleep(3, "nothing"))
    assert isinstance(room.holder.node, SleepingNode)
    assert room.sleepers.wake(msg.Wake(3)).failure is None
    assert (node.calls, room.holder.node, room.nodes[3], room.opened) == (["sleep nothing", "wake"], node, node, [])
    assert room.device.did[-2:] == ["use_stream see", "synchronize"]  # what it put there while it woke is done


@pytest.mark.slow
def test_a_closed_node_is_freed_even_in_a_frozen_reference_cycle() -> None:
    node = Model()
    node.calls.append(node)  # type: ignore[arg-type] - a circle
    gone = weakref.ref(node)
    room = Room(node)
    gc.freeze()
    node.calls.remove(node)  # type: ignore[arg-type]
    node.itself = node  # type: ignore[attr-defined]
    del node
    room.sleepers.sleep(msg.Sleep(3, "nothing"))
    assert gone() is None
    gc.unfreeze()


@pytest.mark.slow
def test_the_stub_of_a_sleeping_node_refuses_work() -> None:
    room = Room(Talks())
    room.sleepers.sleep(msg.Sleep(3, "nothing"))
    sleeper = room.holder.node
    assert (sleeper.busy, sleeper.memory(), sleeper.round()) == (False, None, ())
    with pytest.raises(StepError, match="asleep"):
        sleeper.run(None)
    with pytest.raises(StepError, match="asleep"):
        sleeper.submit(1, {})
    sleeper.cancel(1)


@pytest.mark.slow
def test_a_sleeping_node_keeps_its_figures_unless_it_was_closed() -> None:
    for node, counted in ((Talks(), {"calls_total": 1}), (Model(), {})):
        room = Room(node)
        room.sleepers.sleep(msg.Sleep(3, "host"))
        assert room.holder.node.figures() == counted


@pytest.mark.slow
def test_a_node_that_kept_memory_has_its_least_when_it_wakes() -> None:
    node = Talks()
    room = Room(node)
    room.sleepers.sleep(msg.Sleep(3, "host"))
    room.sleepers.wake(msg.Wake(3))
    assert node.held == 100


@pytest.mark.slow
def test_a_node_without_a_memory_limit_wakes_with_its_first_memory() -> None:
    node = Talks()
    room = Room(node, kv_bytes=None)
    node.resize_memory(5000)
    room.sleepers.sleep(msg.Sleep(3, "host"))
    room.sleepers.wake(msg.Wake(3))
    assert node.held == 900


@pytest.mark.slow
def test_a_worker_that_ends_closes_the_nodes_that_sleep() -> None:
    node = Rests()
    room = Room(node)
    room.sleepers.sleep(msg.Sleep(3, "host"))
    room.nodes[3].close()
    assert node.calls[-1] == "close"


@pytest.mark.slow
def test_a_node_that_fails_to_sleep_or_to_close_sleeps_all_the_same() -> None:
    node = Model()
    node.rests, node.fails_closing = RuntimeError("no"), RuntimeError("nor this")
    room = Room(node)
    assert room.sleepers.sleep(msg.Sleep(3, "host")) == msg.Asleep(3, 0)
    assert room.sleepers.wake(msg.Wake(3)).failure is None


@pytest.mark.slow
@pytest.mark.parametrize("rests", [True, False])
def test_a_wake_up_that_fails_reports_the_reason(rests: bool) -> None:
    node = Model()
    node.rests, node.fails_awake = rests, ModelError("its weights are gone")
    room = Room(node, reopens=ModelError("its weights are gone"))
    room.sleepers.sleep(msg.Sleep(3, "host"))
    failure = room.sleepers.wake(msg.Wake(3)).failure
    assert failure is not None and (failure.error, failure.message) == ("ModelError", "its weights are gone")
    assert isinstance(room.holder.node, SleepingNode)


def test_a_step_that_is_awake_cannot_be_woken() -> None:
    assert "is not asleep" in str(Room(Model()).sleepers.wake(msg.Wake(3)).failure)


@pytest.mark.slow
def test_a_lost_device_goes_through() -> None:
    for at in ("rests", "fails_closing", "fails_awake"):
        node = Model()
        node.rests = at == "fails_awake"
        setattr(node, at, DeviceLost("cuCtxSynchronize", "CUDA_ERROR_ILLEGAL_ADDRESS"))
        room = Room(node)
        with pytest.raises(DeviceLost):
            room.sleepers.sleep(msg.Sleep(3, "host"))
            room.sleepers.wake(msg.Wake(3))
