"""Who shares which device's KV memory, and what workers are told about it."""

from dataclasses import replace

import pytest

from tests.engine.desk import plan_of
from weftline.engine import messages as msg
from weftline.engine.crew.kv_shares import KvShares
from weftline.engine.scheduling import events as ev
from weftline.pipelines.builder import Builder
from weftline.pipelines.plan import Plan

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


def shares(**limits: int) -> tuple[KvShares, list[ev.Command]]:
    told: list[ev.Command] = []
    return KvShares(plan(**limits), told.append), told


def starve(memory: KvShares, step: int, since_ms: float = 0.0, bytes: int = 400) -> None:
    for now_ms in (since_ms, since_ms + 1000):
        memory.reported(step, (msg.KvReport(step, bytes, 0, 0, 1),), now_ms)


def test_steps_on_a_device_with_a_budget_share_it_and_others_keep_their_own() -> None:
    memory, told = shares(cpu=1600)
    assert memory.stats() == {
        "cpu": {
            "total_bytes": 1600, "unassigned_bytes": 800, "held_bytes": {"small": 400, "large": 400},
            "used_bytes": {"small": 0, "large": 0},
        }
    }  # fmt: skip
    starve(memory, 2)
    assert told == []
    starve(memory, 0)
    assert told == [ev.Send(0, msg.KvResize(0, 600))]


def test_without_a_budget_nobody_is_told_anything() -> None:
    memory, told = shares()
    starve(memory, 0)
    memory.died(0)
    assert (told, memory.stats()) == ([], {})
    with pytest.raises(ValueError, match="shares none"):
        memory.resized(0, 0, 400, 0.0)


def test_the_taker_is_told_when_the_giver_has_confirmed() -> None:
    memory, told = shares(cpu=800)
    for now_ms in (0.0, 1000.0):
        memory.reported(0, (msg.KvReport(0, 400, 0, 0, 1),), now_ms)
    assert told == [], "each has its least"
    memory, told = shares(cpu=1600)
    for turn in range(1, 5):
        starve(memory, 0, turn * 2000.0, memory.stats()["cpu"]["held_bytes"]["small"])
        memory.resized(0, 0, memory.stats()["cpu"]["held_bytes"]["small"], turn * 2000.0 + 1000)
    assert memory.stats()["cpu"]["held_bytes"] == {"small": 1200, "large": 400}
    told.clear()
    starve(memory, 1, 20_000.0)
    assert told == [ev.Send(0, msg.KvResize(0, 1000))]
    memory.resized(0, 0, 1000, 22_000.0)
    assert told[1:] == [ev.Send(1, msg.KvResize(1, 600))]


def test_what_a_dead_worker_held_is_there_for_others() -> None:
    memory, _ = shares(cpu=1600)
    starve(memory, 0)
    assert memory.stats()["cpu"]["unassigned_bytes"] == 600
    memory.died(0)
    found = memory.stats()["cpu"]
    assert (found["unassigned_bytes"], found["held_bytes"]["small"], found["used_bytes"]["small"]) == (800, 400, 0)


def test_each_device_has_a_budget_of_its_own() -> None:
    told: list[ev.Command] = []
    memory = KvShares(plan(**{"cpu": 800, "cuda:0": 800}), told.append)
    starve(memory, 0)
    assert told == [], "nothing is left on its device"
    starve(memory, 2)
    assert told == [ev.Send(2, msg.KvResize(2, 500))]
    assert memory.stats()["cuda:0"]["used_bytes"] == {"apart": 400}
