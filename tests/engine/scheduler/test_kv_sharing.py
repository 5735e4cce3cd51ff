"""Test KV memory sharing by device, and the resize messages to workers."""

from dataclasses import replace

import pytest

from tests.engine.scheduler_harness import plan_of
from weftline.engine.protocol import messages as msg
from weftline.engine.scheduler import events as ev
from weftline.engine.scheduler import kv_sharing
from weftline.engine.scheduler.scheduler import make_state
from weftline.engine.scheduler.state import SchedulerState
from weftline.pipelines.placement.plan import Plan
from weftline.pipelines.spec.builder import Builder

STEPS = ("small", "large", "apart")


def plan(**limits: int) -> Plan:
    """Return a plan of three streaming steps with KV memory; `apart` is on another device."""
    pipeline = Builder("test")
    text = pipeline.input("text", "text")
    for name in STEPS:
        pipeline.output(name, pipeline.step(name, "trickle", value=text).value)
    made = plan_of(pipeline)
    steps = [
        replace(step, options={**step.options, "kv_bytes": 400}, devices=("cuda:0" if step.name == "apart" else "cpu",))
        for step in made.steps
    ]
    return replace(made, steps=tuple(steps), limits=replace(made.limits, kv_bytes=limits))


def shares(**limits: int) -> tuple[SchedulerState, list[ev.Command]]:
    state = make_state(plan(**limits))
    return state, state.out


def starve(memory: SchedulerState, step: int, since_ms: float = 0.0, bytes: int = 400) -> None:
    for now_ms in (since_ms, since_ms + 1000):
        memory.now_ms = now_ms
        kv_sharing.on_report(memory, step, (msg.KvReport(step, bytes, 0, 0, 1),))


def test_steps_on_a_device_with_a_budget_share_it() -> None:
    memory, reported = shares(cpu=1600)
    assert kv_sharing.stats(memory) == {
        "cpu": {
            "total_bytes": 1600, "unassigned_bytes": 800, "held_bytes": {"small": 400, "large": 400},
            "used_bytes": {"small": 0, "large": 0},
        }
    }  # fmt: skip
    starve(memory, 2)
    assert reported == []
    starve(memory, 0)
    assert reported == [ev.Send(0, msg.KvResize(0, 600))]


def test_without_a_budget_no_resize_is_sent() -> None:
    memory, reported = shares()
    starve(memory, 0)
    kv_sharing.on_death(memory, 0)
    assert (reported, kv_sharing.stats(memory)) == ([], {})
    with pytest.raises(ValueError, match="has no KV budget"):
        memory.now_ms = 0.0
        kv_sharing.on_resized(memory, 0, 0, 400)


def test_a_growing_share_is_resized_after_the_shrinking_one_confirmed() -> None:
    memory, reported = shares(cpu=800)
    for now_ms in (0.0, 1000.0):
        memory.now_ms = now_ms
        kv_sharing.on_report(memory, 0, (msg.KvReport(0, 400, 0, 0, 1),))
    assert reported == [], "each has its least"
    memory, reported = shares(cpu=1600)
    for turn in range(1, 5):
        starve(memory, 0, turn * 2000.0, kv_sharing.stats(memory)["cpu"]["held_bytes"]["small"])
        memory.now_ms = turn * 2000.0 + 1000
        kv_sharing.on_resized(memory, 0, 0, kv_sharing.stats(memory)["cpu"]["held_bytes"]["small"])
    assert kv_sharing.stats(memory)["cpu"]["held_bytes"] == {"small": 1200, "large": 400}
    reported.clear()
    starve(memory, 1, 20_000.0)
    assert reported == [ev.Send(0, msg.KvResize(0, 1000))]
    memory.now_ms = 22_000.0
    kv_sharing.on_resized(memory, 0, 0, 1000)
    assert reported[1:] == [ev.Send(1, msg.KvResize(1, 600))]


def test_what_a_dead_worker_held_is_there_for_others() -> None:
    memory, _ = shares(cpu=1600)
    starve(memory, 0)
    assert kv_sharing.stats(memory)["cpu"]["unassigned_bytes"] == 600
    kv_sharing.on_death(memory, 0)
    found = kv_sharing.stats(memory)["cpu"]
    assert (found["unassigned_bytes"], found["held_bytes"]["small"], found["used_bytes"]["small"]) == (800, 400, 0)


def test_each_device_has_a_budget_of_its_own() -> None:
    memory, reported = shares(**{"cpu": 800, "cuda:0": 800})
    starve(memory, 0)
    assert reported == [], "nothing is left on its device"
    starve(memory, 2)
    assert reported == [ev.Send(2, msg.KvResize(2, 500))]
    assert kv_sharing.stats(memory)["cuda:0"]["used_bytes"] == {"apart": 400}
