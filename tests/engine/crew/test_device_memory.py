"""What workers measured is added up when all are ready: what is left is for KV memory, too little stops the opening."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest

from tests.engine.desk import plan_of
from weftline.engine import messages as msg
from weftline.engine.crew.device_memory import DeviceMemory
from weftline.engine.crew.kv_shares import KvShares
from weftline.engine.scheduling import events as ev
from weftline.pipelines.builder import Builder
from weftline.pipelines.holdings import Holder, Holdings, Settle
from weftline.pipelines.plan import Claim, DeviceBudget, Plan

GPU = "cuda:0"
MIB = 1 << 20
TOTAL, RESERVE = 1000 * MIB, 100 * MIB


def plan(kv_bytes: int | None = None, own: int | None = None) -> Plan:
    """Return a plan of a step that sees and two that talk, on one GPU; what is left for talking is open."""
    p = Builder("test")
    text = p.input("text", "text")
    for name, node in (("see", "echo"), ("talk", "trickle"), ("tell", "trickle")):
        p.output(name, p.step(name, node, value=text, worker=name).value)
    made = plan_of(p)
    steps = tuple(
        replace(step, devices=(GPU,), options={**step.options, "kv_bytes": own} if step.streams else step.options)
        for step in made.steps
    )
    workers = tuple(replace(worker, device=GPU, device_arena_bytes=10 * MIB) for worker in made.workers)
    reserve = Claim("", "reserve", RESERVE, "stated")
    budget = DeviceBudget(GPU, TOTAL, (reserve,), kv_bytes or 0)
    return replace(made, steps=steps, workers=workers, budgets=(budget,))


def ready(step: str, bytes: int, free: int) -> msg.Ready:
    return msg.Ready({}, {}, {step: msg.DeviceUse(bytes // 2, bytes)}, bytes + 10 * MIB, free)


def all_ready(memory: DeviceMemory, free: int = TOTAL) -> None:
    for worker, name in enumerate(("see", "talk", "tell")):
        memory.ready(worker, ready(name, 100 * MIB, free))


def test_what_is_left_is_told_once_when_the_last_worker_is_ready() -> None:
    told: list[tuple[str, int]] = []
    memory = DeviceMemory(plan(), lambda device, left: told.append((device, left)))
    memory.ready(0, ready("see", 100 * MIB, TOTAL))
    memory.ready(1, ready("talk", 100 * MIB, TOTAL))
    assert told == []
    all_ready(memory)
    assert (told, memory.over_commit) == ([(GPU, TOTAL - RESERVE - 330 * MIB)], "")
    memory.ready(0, ready("see", 600 * MIB, TOTAL))
    assert len(told) == 1, "a worker that came back changes nothing that was given out"
    assert memory.stats()[GPU]["steps"]["see"] == {"open_bytes": 300 * MIB, "peak_bytes": 600 * MIB}
    assert memory.stats()[GPU]["workers"] == {"see": 610 * MIB, "talk": 110 * MIB, "tell": 110 * MIB}


def test_what_others_take_of_the_device_counts_too() -> None:
    told: list[tuple[str, int]] = []
    all_ready(DeviceMemory(plan(), lambda device, left: told.append((device, left))), free=250 * MIB)
    assert told == [(GPU, 150 * MIB)]


def test_a_device_that_is_too_small_is_said_with_who_took_what() -> None:
    told: list[tuple[str, int]] = []
    memory = DeviceMemory(plan(), lambda device, left: told.append((device, left)))
    for worker, (name, mib) in enumerate((("see", 600), ("talk", 200), ("tell", 100))):
        memory.ready(worker, ready(name, mib * MIB, 20 * MIB))
    assert told == []
    assert (
        memory.over_commit
        == """\
cuda:0 has 1000 MiB, and 1.1 GiB of it are claimed: 80 MiB too much
       600 MiB  see                           weights and work  measured
       200 MiB  talk                          weights and work  measured
       100 MiB                                reserve           stated
       100 MiB  tell                          weights and work  measured
        50 MiB  contexts and other processes  context           measured
        10 MiB  see                           arena             stated
        10 MiB  talk                          arena             stated
        10 MiB  tell                          arena             stated
       1.1 GiB  together
      1000 MiB  cuda:0 has
    fix: move steps to another device, or lower their batch.items_max, gpu.arena_bytes or limits.kv_bytes"""
    )


def beside(made: Plan, mib: int, reserve_mib: int = 0) -> Settle:
    """Return what tells a plan what another pipeline leaves it."""
    holdings, own, other = Holdings(), Holder("test", 1), Holder("ocr", 2)
    claims = (Claim("s", "weights and work", mib * MIB, "stated"), Claim("", "reserve", reserve_mib * MIB, "stated"))
    holdings.try_take(other, replace(made, steps=(), budgets=(DeviceBudget(GPU, TOTAL, claims),)))
    holdings.try_take(own, made)
    return partial(holdings.settle, own)


def test_what_other_pipelines_hold_is_not_left_whether_they_have_taken_it_yet_or_not() -> None:
    told: list[tuple[str, int]] = []
    for free in (TOTAL, 300 * MIB):
        all_ready(DeviceMemory(plan(), lambda device, left: told.append((device, left)), beside(plan(), 500)), free)
    assert told == [(GPU, TOTAL - RESERVE - 330 * MIB - 500 * MIB), (GPU, TOTAL - RESERVE - 330 * MIB - 500 * MIB)]


def test_what_other_pipelines_hold_is_a_row_of_its_own() -> None:
    told: list[tuple[str, int]] = []
    memory = DeviceMemory(plan(), lambda device, left: told.append((device, left)), beside(plan(), 400, 160))
    for worker, (name, mib) in enumerate((("see", 300), ("talk", 200), ("tell", 100))):
        memory.ready(worker, ready(name, mib * MIB, 20 * MIB))
    assert told == []
    head, *rows, fix = memory.over_commit.splitlines()
    assert head == "cuda:0 has 1000 MiB, and 1.2 GiB of it are claimed: 190 MiB too much"
    assert [" ".join(row.split()) for row in rows[:6]] == [
        "400 MiB ocr another pipeline claimed",
        "300 MiB see weights and work measured",
        "200 MiB talk weights and work measured",
        "100 MiB reserve stated",
        "100 MiB tell weights and work measured",
        "60 MiB reserve of other pipelines claimed",
    ]
    assert fix.endswith("; or unload ocr")


def test_what_is_left_is_told_when_others_that_wait_for_a_part_have_been_measured() -> None:
    told: list[tuple[str, int]] = []
    made, holdings = plan(), Holdings()
    own, other = Holder("test", 1), Holder("chat", 2)
    for holder in (own, other):
        holdings.try_take(holder, made)
    memory = DeviceMemory(made, lambda device, left: told.append((device, left)), partial(holdings.settle, own))
    all_ready(memory)
    assert (told, memory.over_commit, memory.stats()[GPU]["left_bytes"]) == ([], "", 0)
    holdings.settle(other, GPU, 170 * MIB, TOTAL)
    part = (TOTAL - RESERVE - 330 * MIB - 170 * MIB) // 2
    assert holdings.told() == {(own, GPU): part}
    memory.divided(GPU, part)
    assert told == [(GPU, part)] and memory.stats()[GPU]["left_bytes"] == part


def test_where_nothing_was_measured_nothing_is_concluded() -> None:
    told: list[tuple[str, int]] = []
    memory = DeviceMemory(plan(), lambda device, left: told.append((device, left)))
    for worker in range(3):
        memory.ready(worker, msg.Ready({}))
    assert (told, memory.over_commit, memory.stats()[GPU]["left_bytes"]) == ([], "", 0)


# what is left, divided


def shares(made: Plan) -> tuple[KvShares, list[ev.Command]]:
    told: list[ev.Command] = []
    return KvShares(made, told.append), told


def report(memory: KvShares, worker: int, bytes: int, now_ms: float = 0.0, waiting: int = 0) -> None:
    """A step has so many bytes; half of them are in use, and all where items wait."""
    used = bytes if waiting else bytes // 2
    memory.reported(worker, (msg.KvReport(worker, used, 0, bytes - used, waiting),), now_ms)


def test_steps_that_name_no_memory_share_what_is_left_and_start_with_what_they_have() -> None:
    memory, told = shares(plan())
    report(memory, 1, 64 * MIB)
    memory.left(GPU, 320 * MIB)
    assert memory.stats() == {}, "one of them has not said what it has"
    report(memory, 2, 32 * MIB)
    assert memory.stats()[GPU]["total_bytes"] == (64 + 32 + 300) * MIB, "a sixteenth is kept for growing"
    assert memory.stats()[GPU]["held_bytes"] == {"talk": 64 * MIB, "tell": 32 * MIB}
    for now_ms in (1000.0, 2000.0):
        report(memory, 2, 32 * MIB, now_ms, waiting=3)
    (order,) = told
    assert isinstance(order, ev.Send) and order.worker == 2
    assert isinstance(order.message, msg.KvResize) and order.message.bytes > 32 * MIB


@pytest.mark.parametrize("more", [{"own": 5 * MIB}, {"kv_bytes": 5 * MIB}])
def test_steps_that_name_their_memory_and_devices_that_were_divided_are_left_alone(more: dict[str, int]) -> None:
    memory, _ = shares(plan(**more))
    memory.left(GPU, 320 * MIB)
    report(memory, 1, 64 * MIB)
    report(memory, 2, 64 * MIB)
    assert memory.stats() == {}


def test_a_step_that_sleeps_is_told_nothing_and_starts_again_with_its_least() -> None:
    memory, told = shares(plan())
    memory.left(GPU, 320 * MIB)
    for worker in (1, 2):
        report(memory, worker, 64 * MIB)
    for now_ms in (1000.0, 2000.0):
        report(memory, 1, 64 * MIB, now_ms, waiting=1)
    held = memory.stats()[GPU]["held_bytes"]["talk"]
    assert held > 64 * MIB and len(told) == 1
    memory.resized(1, 1, held, 2001.0)
    memory.falls_asleep(1, 1)
    for now_ms in (3000.0, 4000.0):
        report(memory, 1, held, now_ms, waiting=1)
    memory.slept(1, 1)
    report(memory, 1, held, 5000.0, waiting=1)
    assert (len(told), memory.stats()[GPU]["held_bytes"]["talk"]) == (1, 64 * MIB)
    memory.woken(1, 1)
    for now_ms in (6000.0, 7000.0):
        report(memory, 1, 64 * MIB, now_ms, waiting=1)
    assert len(told) == 2
