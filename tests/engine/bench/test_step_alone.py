"""A step by itself is called with exactly so many items, and what it takes is measured."""

from __future__ import annotations

from pathlib import Path

import pytest

from weftline.engine.bench.step_alone import opened, sizes
from weftline.pipelines.placement.machine import Device, Machine
from weftline.pipelines.placement.plan import PlannedStep
from weftline.pipelines.placement.planner import make_plan
from weftline.pipelines.spec.builder import Builder
from weftline.pipelines.spec.graph import Pipeline

MIB = 1 << 20
ITEM_BYTES, ITEMS_MAX = 1 * MIB, 6
FAKE = Machine(2, 8 << 30, (Device("fake:0", 1 << 30),))

NODES = '''
import time

from weftline.node import BatchNode, Ports, port


class Counts(BatchNode):
    """Takes its items on its device, side by side."""

    @classmethod
    def ports(cls, config, step):
        return Ports((port("x", "float32[262144]"),), (port("y", "json"),))

    @classmethod
    def device_ports(cls, config, ports):
        return frozenset({"x"})

    def run(self, batch):
        batch.stacked("x")
        time.sleep(0.06)  # longer than rows of a job may usually share a call
        return {"y": [len(batch)] * len(batch)}


class Refuses(BatchNode):
    @classmethod
    def ports(cls, config, step):
        return Ports((port("x", "text"),), (port("y", "text"),))

    def run(self, batch):
        raise ValueError("a question must end with a mark")
'''


def graph(folder: Path, node: str, type: str, device: str = "cpu") -> Pipeline:
    (folder / "nodes.py").write_text(NODES)
    gpu = {"reserve_bytes": 16 * MIB, "context_bytes": 1 * MIB, "arena_bytes": 2 * MIB}
    p = Builder("test", base_dir=folder, gpu=gpu)
    step = p.step("s", f"nodes.py:{node}", x=p.input("x", type), device=device, batch={"items_max": ITEMS_MAX})
    p.output("y", step.y)
    return p.build()


def planned(made: Pipeline, machine: Machine) -> PlannedStep:
    return make_plan(made, machine).steps[0]


def test_sizes_double_up_to_the_most_and_have_it() -> None:
    assert [sizes(most) for most in (1, 2, 6, 8)] == [[1], [1, 2], [1, 2, 4, 6], [1, 2, 4, 8]]


@pytest.mark.slow
def test_calls_have_the_items_asked_for_and_device_memory_is_measured(tmp_path: Path) -> None:
    made = graph(tmp_path, "Counts", "float32[262144]", "fake:0")
    with opened(made, planned(made, FAKE), FAKE) as alone:
        for items in sizes(alone.items_max):
            alone.call(items, keep=False)
            alone.call(items)
            alone.call(items)
        found = alone.measured()
        assert alone.failure == ""
        assert {items: len(times) for items, times in alone.times_ms.items()} == {1: 2, 2: 2, 4: 2, 6: 2}
    assert set(found.run_ms) == {1, 2, 4, 6}
    assert min(found.run_ms.values()) > 0
    assert found.peak_bytes[ITEMS_MAX] >= ITEMS_MAX * ITEM_BYTES
    assert found.host_bytes > 10 * MIB


def test_a_step_that_refuses_made_up_inputs_says_so_and_has_no_times(tmp_path: Path) -> None:
    made = graph(tmp_path, "Refuses", "text")
    machine = Machine(2, 8 << 30)
    with opened(made, planned(made, machine), machine) as alone:
        alone.call(2)
        assert "a question must end with a mark" in alone.failure
        assert alone.times_ms == {}
        assert alone.measured().host_bytes > 0


def test_a_step_that_remembers_is_asked_one_after_the_other(tmp_path: Path) -> None:
    p = Builder("test", base_dir=tmp_path)
    p.output(
        "y", p.step("s", "echo", value=p.input("x", "text"), sequence={"live_max": 5}, batch={"items_max": 4}).value
    )
    made, machine = p.build(), Machine(2, 8 << 30)
    with opened(made, planned(made, machine), machine) as alone:
        assert alone.items_max == 1
        alone.call(1)
        assert (alone.failure, set(alone.times_ms)) == ("", {1})


@pytest.mark.slow
def test_a_call_that_its_worker_did_not_survive_has_no_time(tmp_path: Path) -> None:
    p = Builder("test", base_dir=tmp_path)
    step = p.step("s", "fail", value=p.input("x", "text"), every=3, kill=True, batch={"items_max": 1})
    p.output("y", step.value)
    made = p.build()
    planned = make_plan(made, FAKE).steps[0]
    with opened(made, planned, FAKE) as alone:
        for _ in range(3):
            alone.call(1)  # the third of a life takes the worker along
        assert alone.failure == ""
        assert set(alone.measured().run_ms) == {1}
        assert len(alone.times_ms[1]) == 3
