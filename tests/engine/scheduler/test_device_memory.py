"""What workers measured is added up when all are ready: what is left is for KV memory, too little stops the opening."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest

from tests.engine.scheduler_harness import plan_of
from weftline.engine.protocol import messages as msg
from weftline.engine.scheduler import device_memory, kv_sharing
from weftline.engine.scheduler import events as ev
from weftline.engine.scheduler.scheduler import make_state
from weftline.engine.scheduler.state import SchedulerState
from weftline.pipelines.placement.plan import Claim, DeviceBudget, Plan
from weftline.pipelines.placement.reservations import Owner, ReservationTable, Settle
from weftline.pipelines.spec.builder import Builder

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


@pytest.fixture
def reported(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """Record each call of `kv_sharing.left`: a device, and the bytes left of it."""
    calls: list[tuple[str, int]] = []
    monkeypatch.setattr(kv_sharing, "on_device_left", lambda state, device, bytes: calls.append((device, bytes)))
    return calls


def over_commit(memory: SchedulerState) -> str:
    return "\n".join(memory.measured.over_commit)


def all_ready(memory: SchedulerState, free: int = TOTAL) -> None:
    for worker, name in enumerate(("see", "talk", "tell")):
        device_memory.on_ready(memory, worker, ready(name, 100 * MIB, free))


def test_the_remaining_memory_is_sent_once_when_the_last_worker_is_ready(reported: list[tuple[str, int]]) -> None:
    memory = make_state(plan())
    device_memory.on_ready(memory, 0, ready("see", 100 * MIB, TOTAL))
    device_memory.on_ready(memory, 1, ready("talk", 100 * MIB, TOTAL))
    assert reported == []
    all_ready(memory)
    assert (reported, over_commit(memory)) == ([(GPU, TOTAL - RESERVE - 330 * MIB)], "")
    device_memory.on_ready(memory, 0, ready("see", 600 * MIB, TOTAL))
    assert len(reported) == 1, "a worker that came back changes nothing that was given out"
    assert device_memory.stats(memory)[GPU]["steps"]["see"] == {"open_bytes": 300 * MIB, "peak_bytes": 600 * MIB}
    assert device_memory.stats(memory)[GPU]["workers"] == {"see": 610 * MIB, "talk": 110 * MIB, "tell": 110 * MIB}


def test_what_others_take_of_the_device_counts_too(reported: list[tuple[str, int]]) -> None:
    all_ready(make_state(plan()), free=250 * MIB)
    assert reported == [(GPU, 150 * MIB)]


def test_a_device_that_is_too_small_is_reported_with_the_use_of_each_step(reported: list[tuple[str, int]]) -> None:
    memory = make_state(plan())
    for worker, (name, mib) in enumerate((("see", 600), ("talk", 200), ("tell", 100))):
        device_memory.on_ready(memory, worker, ready(name, mib * MIB, 20 * MIB))
    assert reported == []
    assert (
        over_commit(memory)
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
    """Return the callback that limits a plan to the memory another pipeline leaves free."""
    reservations, own, other = ReservationTable(), Owner("test", 1), Owner("ocr", 2)
    claims = (Claim("s", "weights and work", mib * MIB, "stated"), Claim("", "reserve", reserve_mib * MIB, "stated"))
    reservations.try_reserve(other, replace(made, steps=(), budgets=(DeviceBudget(GPU, TOTAL, claims),)))
    reservations.try_reserve(own, made)
    return partial(reservations.settle, own)


def test_memory_reserved_by_other_pipelines_is_not_available(
    reported: list[tuple[str, int]],
) -> None:
    for free in (TOTAL, 300 * MIB):
        all_ready(make_state(plan(), settle=beside(plan(), 500)), free)
    assert reported == [(GPU, TOTAL - RESERVE - 330 * MIB - 500 * MIB), (GPU, TOTAL - RESERVE - 330 * MIB - 500 * MIB)]


def test_what_other_pipelines_hold_is_a_row_of_its_own(reported: list[tuple[str, int]]) -> None:
    memory = make_state(plan(), settle=beside(plan(), 400, 160))
    for worker, (name, mib) in enumerate((("see", 300), ("talk", 200), ("tell", 100))):
        device_memory.on_ready(memory, worker, ready(name, mib * MIB, 20 * MIB))
    assert reported == []
    head, *rows, fix = over_commit(memory).splitlines()
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


def test_the_remainder_is_sent_after_other_steps_were_measured(reported: list[tuple[str, int]]) -> None:
    made, reservations = plan(), ReservationTable()
    own, other = Owner("test", 1), Owner("chat", 2)
    for holder in (own, other):
        reservations.try_reserve(holder, made)
    memory = make_state(made, settle=partial(reservations.settle, own))
    all_ready(memory)
    assert (reported, over_commit(memory), device_memory.stats(memory)[GPU]["left_bytes"]) == ([], "", 0)
    reservations.settle(other, GPU, 170 * MIB, TOTAL)
    part = (TOTAL - RESERVE - 330 * MIB - 170 * MIB) // 2
    assert reservations.pop_new_shares() == {(own, GPU): part}
    device_memory.on_divided(memory, GPU, part)
    assert reported == [(GPU, part)] and device_memory.stats(memory)[GPU]["left_bytes"] == part


def test_where_nothing_was_measured_nothing_is_concluded(reported: list[tuple[str, int]]) -> None:
    memory = make_state(plan())
    for worker in range(3):
        device_memory.on_ready(memory, worker, msg.Ready({}))
    assert (reported, over_commit(memory), device_memory.stats(memory)[GPU]["left_bytes"]) == ([], "", 0)


# what is left, divided


def shares(made: Plan) -> tuple[SchedulerState, list[ev.Command]]:
    state = make_state(made)
    return state, state.out


def report(memory: SchedulerState, worker: int, bytes: int, now_ms: float = 0.0, waiting: int = 0) -> None:
    """A step has so many bytes; half of them are in use, and all where items wait."""
    used = bytes if waiting else bytes // 2
    memory.now_ms = now_ms
    kv_sharing.on_report(memory, worker, (msg.KvReport(worker, used, 0, bytes - used, waiting),))


def test_steps_without_stated_memory_share_the_remainder() -> None:
    memory, reported = shares(plan())
    report(memory, 1, 64 * MIB)
    kv_sharing.on_device_left(memory, GPU, 320 * MIB)
    assert kv_sharing.stats(memory) == {}, "one of them has not said what it has"
    report(memory, 2, 32 * MIB)
    assert kv_sharing.stats(memory)[GPU]["total_bytes"] == (64 + 32 + 300) * MIB, "a sixteenth is kept for growing"
    assert kv_sharing.stats(memory)[GPU]["held_bytes"] == {"talk": 64 * MIB, "tell": 32 * MIB}
    for now_ms in (1000.0, 2000.0):
        report(memory, 2, 32 * MIB, now_ms, waiting=3)
    (order,) = reported
    assert isinstance(order, ev.Send) and order.worker == 2
    assert isinstance(order.message, msg.KvResize) and order.message.bytes > 32 * MIB


@pytest.mark.parametrize("more", [{"own": 5 * MIB}, {"kv_bytes": 5 * MIB}])
def test_stated_memory_and_divided_devices_are_left_unchanged(more: dict[str, int]) -> None:
    memory, _ = shares(plan(**more))
    kv_sharing.on_device_left(memory, GPU, 320 * MIB)
    report(memory, 1, 64 * MIB)
    report(memory, 2, 64 * MIB)
    assert kv_sharing.stats(memory) == {}


def test_a_sleeping_step_is_not_resized_and_restarts_with_its_minimum() -> None:
    memory, reported = shares(plan())
    kv_sharing.on_device_left(memory, GPU, 320 * MIB)
    for worker in (1, 2):
        report(memory, worker, 64 * MIB)
    for now_ms in (1000.0, 2000.0):
        report(memory, 1, 64 * MIB, now_ms, waiting=1)
    held = kv_sharing.stats(memory)[GPU]["held_bytes"]["talk"]
    assert held > 64 * MIB and len(reported) == 1
    memory.now_ms = 2001.0
    kv_sharing.on_resized(memory, 1, 1, held)
    kv_sharing.on_falling_asleep(memory, 1, 1)
    for now_ms in (3000.0, 4000.0):
        report(memory, 1, held, now_ms, waiting=1)
    kv_sharing.on_asleep(memory, 1, 1)
    report(memory, 1, held, 5000.0, waiting=1)
    assert (len(reported), kv_sharing.stats(memory)[GPU]["held_bytes"]["talk"]) == (1, 64 * MIB)
    kv_sharing.on_awake(memory, 1, 1)
    for now_ms in (6000.0, 7000.0):
        report(memory, 1, 64 * MIB, now_ms, waiting=1)
    assert len(reported) == 2


def test_a_step_that_took_the_remaining_memory_as_it_opened_gets_no_more() -> None:
    made = plan()
    filled = replace(made, budgets=(replace(made.budgets[0], rest_bytes=500 * MIB),))
    memory, orders = shares(filled)
    all_ready(memory)
    assert over_commit(memory) == ""
    kv_sharing.on_report(memory, 1, (msg.KvReport(1, 400 * MIB, 0, 0, 9, 3),))
    memory.now_ms = 9e3
    kv_sharing.on_report(memory, 1, (msg.KvReport(1, 400 * MIB, 0, 0, 9, 4),))
    assert orders == [] and kv_sharing.stats(memory) == {}
