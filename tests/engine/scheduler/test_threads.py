"""Workers whose steps have threads of their own: what is dispatched beside what, answered, granted and lost."""

from __future__ import annotations

import random
from typing import Any

import pytest

from tests.engine.scheduler_harness import ARENA_BYTES, SchedulerHarness
from weftline.engine.protocol import messages as msg
from weftline.engine.scheduler import events as ev
from weftline.pipelines.placement.machine import Device, Machine
from weftline.pipelines.placement.planner import make_plan
from weftline.pipelines.spec.builder import Builder
from weftline.shm.block import Block


def make_harness(names: str = "ab", **more: Any) -> SchedulerHarness:
    """Return steps that do not wait for each other, in one process of a GPU; each is an output of its name."""
    p = Builder("beside", gpu={"reserve_bytes": 0, "arena_bytes": 1 << 20})
    x = p.input("x", "json")
    for name in names:
        step = p.step(name, "echo", type="json", device="fake:0", worker="w", value=x, batch={"items_max": 2}, **more)
        p.output(f"of_{name}", step.value)
    return SchedulerHarness(make_plan(p.build(), Machine(4, 16 << 30, (Device("fake:0", 8 << 30),))))


def runs(harness: SchedulerHarness) -> list[tuple[str, list[Any]]]:
    """Return what the worker has: steps, and the values of their items."""
    return [
        (harness.plan.steps[run.step].name, [harness.value_of[item.id] for item in run.items])
        for run in harness.inbox[0]
    ]


def done(harness: SchedulerHarness, step: str) -> None:
    """The worker answers the first dispatch of a step."""
    run = next(run for run in harness.inbox[0] if harness.plan.steps[run.step].name == step)
    harness.inbox[0].remove(run)
    results = tuple(msg.ItemResult((item.inputs[0],)) for item in run.items)
    harness.receive(0, msg.BatchDone(run.dispatch, results, (msg.StepRun(1.0, 1, len(run.items)),)))


def room(harness: SchedulerHarness, step: str, size: int) -> tuple[int, list[msg.OutputBuffer]]:
    """A dispatch asks for room: return its id, and what the worker is answered."""
    run = next(run for run in harness.inbox[0] if harness.plan.steps[run.step].name == step)
    harness.receive(0, msg.BufferRequest((size,), (), run.dispatch))
    return run.dispatch, harness.sent(msg.OutputBuffer)


def leased(harness: SchedulerHarness) -> int:
    return sum(block.size_bytes for block in granted(harness))


def granted(harness: SchedulerHarness) -> list[Block]:
    worker_state = harness.scheduler.workers[0]
    return [block for dispatch in worker_state.running for block in dispatch.granted]


def test_every_step_of_a_worker_has_a_dispatch_answered_in_any_order() -> None:
    one = make_harness("abc")
    request = one.submit(x=1)
    assert runs(one) == [("a", [1]), ("b", [1]), ("c", [1])]
    for step in "cab":
        assert request not in one.ended
        done(one, step)
    assert [one.output(request, f"of_{step}") for step in "abc"] == [1, 1, 1] and one.is_clean()


def test_only_a_copy_to_the_host_requests_a_buffer_without_a_dispatch() -> None:
    for fetches in (True, False):
        one = make_harness()
        one.submit(x=1)
        if fetches:
            one.scheduler.workers[0].fetches[7] = 0.0
        one.receive(0, msg.BufferRequest((64,), (), 0))
        assert bool(one.kill_reasons()) is not fetches


def test_what_gathers_for_a_step_waits_for_its_own_call_alone() -> None:
    one = make_harness()
    one.submit_all([1, 2, 3])
    assert runs(one) == [("a", [1]), ("b", [1])]
    done(one, "b")
    assert runs(one) == [("a", [1]), ("b", [2, 3])]
    done(one, "b")
    assert runs(one) == [("a", [1])]
    done(one, "a")
    assert runs(one) == [("a", [2, 3])]


def test_an_answer_for_what_waits_behind_a_call_ends_the_worker() -> None:
    one = make_harness()
    one.submit(x=1)
    one.receive(0, msg.BatchDone(99, (), ()))
    assert one.kill_reasons() == ["it returned results of a batch that is not running"]


def test_rooms_are_those_of_the_dispatch_that_asked_and_freed_with_it() -> None:
    one = make_harness()
    one.submit(x=1)
    of_a, (answer,) = room(one, "a", 4096)
    assert answer.dispatch == of_a and len(answer.blocks) == 1
    of_b, (answer,) = room(one, "b", 8192)
    assert answer.dispatch == of_b != of_a
    done(one, "b")
    assert [block.size_bytes for block in granted(one)] == [4096]  # that of a is being written still
    done(one, "a")
    assert one.is_clean()


def test_a_pending_allocation_is_granted_when_another_call_ends() -> None:
    one = make_harness("abc")
    one.submit(x=1)
    room(one, "a", ARENA_BYTES - 4096)
    of_b, answers = room(one, "b", 64 << 10)
    assert answers == []
    done(one, "c")
    assert not one.kill_reasons() and one.sent(msg.OutputBuffer) == []
    done(one, "a")
    assert [answer.dispatch for answer in one.sent(msg.OutputBuffer)] == [of_b]
    done(one, "b")
    assert one.is_clean()


def test_when_all_running_calls_wait_for_buffers_one_is_refused() -> None:
    one = make_harness()
    one.submit(x=1)
    room(one, "a", ARENA_BYTES - 4096)
    one.receive(0, msg.BufferRequest((64 << 10,), (), one.inbox[0][1].dispatch))
    assert one.sent(msg.OutputBuffer) == []  # a goes on
    _, (refused,) = room(one, "a", 64 << 10)
    assert refused.dispatch and "do not fit" in refused.refused


def test_a_worker_with_an_invalid_buffer_request_is_killed() -> None:
    for wrong in ("twice", "answers", "unknown"):
        one = make_harness("abc")
        one.submit(x=1)
        room(one, "a", ARENA_BYTES - 4096)
        of_b, _ = room(one, "b", 64 << 10)
        if wrong == "twice":
            one.receive(0, msg.BufferRequest((1,), (), of_b))
        elif wrong == "answers":
            done(one, "b")
        else:
            one.receive(0, msg.BufferRequest((1,)))
        assert len(one.kill_reasons()) == 1, wrong


def test_a_death_judges_every_call_that_ran_and_suspects_run_alone() -> None:
    one = make_harness("abc")
    one.submit(x=1)
    done(one, "c")
    one.die_and_return()
    assert runs(one) == [("a", [1])] and one.inbox[0][0].suspect
    waiting = one.submit(x=2)
    assert len(runs(one)) == 1  # nothing is put at risk beside it
    done(one, "a")
    assert runs(one) == [("b", [1])] and one.inbox[0][0].suspect
    done(one, "b")
    assert {step for step, _ in runs(one)} == {"a", "b", "c"}
    for step in "abc":
        done(one, step)
    assert waiting in one.ended and one.is_clean()


def test_a_call_that_takes_too_long_is_seen_while_others_answer() -> None:
    one = make_harness(run_max_ms=5000)
    one.submit(x=1)
    killed: list[str] = []
    for at in range(60):
        one.advance(100)
        killed += one.kill_reasons() + [command.why for command in one.commands if isinstance(command, ev.KillWorker)]
        if killed:
            break
        done(one, "b")
        one.submit(x=at, wanted=("of_b",))
    assert killed and killed[0] == "a call took longer than run_max_ms"


@pytest.mark.parametrize("seed", range(40))
def test_every_request_ends_once_in_any_order_of_calls(seed: int) -> None:
    draw = random.Random(seed)
    one, waiting, requests, withdrawn = make_harness("abc"), set[int](), list[int](), set[int]()

    def move() -> None:
        running = {run.step: run for run in reversed(one.inbox[0])}  # the first of each thread
        free = [run for run in running.values() if run.dispatch not in waiting]
        kind = draw.choice(("submit", "answer", "answer", "need", "withdraw", "die", "advance"))
        if kind == "submit" and len(requests) < 30:
            requests.append(one.submit(x=draw.randrange(100)))
        elif kind == "answer" and free:
            done(one, one.plan.steps[draw.choice(free).step].name)
        elif kind == "need" and free:
            run = draw.choice(free)
            waiting.add(run.dispatch)
            one.receive(0, msg.BufferRequest((draw.choice((20_000, 300_000, 700_000)),), (), run.dispatch))
        elif kind == "withdraw" and requests and draw.random() < 0.3:
            gone = draw.choice(requests)
            withdrawn.add(gone)
            one.withdraw(gone)
        elif kind == "die" and draw.random() < 0.1:
            waiting.clear()
            one.die_and_return()
        elif kind == "advance":
            one.advance(draw.choice((0.1, 5.0)))
        waiting.difference_update(room.dispatch for room in one.sent(msg.OutputBuffer))
        assert not one.kill_reasons()

    for _ in range(400):
        move()
    for _ in range(2000):
        if not one.inbox[0]:
            break
        waiting.difference_update(room.dispatch for room in one.sent(msg.OutputBuffer))
        running = {run.step: run for run in reversed(one.inbox[0])}
        done(one, next(one.plan.steps[run.step].name for run in running.values() if run.dispatch not in waiting))
    one.advance(100.0)
    assert {*requests} - withdrawn <= {*one.ended} <= {*requests}
    assert one.is_clean()
