"""The workers: which incarnation lives, when it is killed, and when it starts again."""

from __future__ import annotations

import pytest

from tests.engine.scheduler_harness import SchedulerHarness
from weftline.engine.protocol import messages as msg
from weftline.engine.scheduler import events as ev
from weftline.engine.scheduler.timeouts import OPEN_MAX_MS
from weftline.pipelines.spec.builder import Builder


def one_step(node: str = "echo", **more: object) -> Builder:
    p = Builder("one-step", limits={"silence_max_ms": 3000})
    p.output("y", p.step("a", node, value=p.input("x", "text"), **more).value)  # type: ignore[arg-type]
    return p


TEXT = msg.Value("text", data=b"a")


def kills_within(harness: SchedulerHarness, ms: float, silent: tuple[int, ...] = ()) -> list[str]:
    harness.advance(ms, silent)
    return harness.kill_reasons()


def test_a_silent_worker_is_killed_once() -> None:
    harness = SchedulerHarness(one_step())
    assert kills_within(harness, 2990, silent=(0,)) == []
    assert kills_within(harness, 600, silent=(0,)) == ["it sent no heartbeat for 3 s"]
    assert kills_within(harness, 5000, silent=(0,)) == []


def test_a_call_that_takes_too_long_kills_its_worker() -> None:
    harness = SchedulerHarness(one_step(run_max_ms=10_000))
    harness.submit(x=TEXT)
    assert kills_within(harness, 9990) == []
    assert kills_within(harness, 600) == ["a call took longer than run_max_ms"]


def test_what_waits_behind_has_its_own_time_from_when_it_is_begun() -> None:
    p = Builder("quick")
    batch = {"items_max": 1}
    p.output("y", p.step("a", "echo", value=p.input("x", "text"), batch=batch, run_max_ms=1000).value)
    harness = SchedulerHarness(p)
    for _ in range(4):
        harness.submit(x=TEXT)
        harness.answer("a")
    for _ in range(3):
        harness.submit(x=TEXT)
    assert len(harness.inbox[0]) == 2
    assert kills_within(harness, 900) == []
    harness.answer("a")
    assert kills_within(harness, 900) == []
    assert kills_within(harness, 600) == ["a call took longer than run_max_ms"]


def test_a_stream_without_chunks_times_out_and_each_chunk_restarts_it() -> None:
    harness = SchedulerHarness(one_step("trickle", run_max_ms=1000))
    harness.submit(x=TEXT)
    assert kills_within(harness, 900) == []
    harness.send_chunk(0, "a")
    assert kills_within(harness, 900) == []
    assert kills_within(harness, 600) == ["a call took longer than run_max_ms"]


def test_a_stream_that_is_paused_is_not_held_to_it() -> None:
    harness = SchedulerHarness(one_step("trickle", run_max_ms=1000))
    one = harness.submit(x=TEXT)
    harness.handle(ev.Stalled(one))
    assert kills_within(harness, 5000) == []


def test_a_worker_may_take_long_to_open_but_not_for_ever_without_a_word() -> None:
    harness = SchedulerHarness(one_step(), up=False)
    harness.receive(0, msg.Hello(1, 1 << 20))
    assert kills_within(harness, OPEN_MAX_MS - 1000) == []
    harness.receive(0, msg.OpenProgress("a", "reading", 0.5))
    assert kills_within(harness, OPEN_MAX_MS - 1000) == []
    assert kills_within(harness, 2000) == ["it sent no message for 1800 s while opening"]


def test_a_dead_worker_restarts_after_a_pause_as_another_incarnation() -> None:
    harness = SchedulerHarness(one_step())
    before = harness.arena[0]
    harness.die(0)
    harness.advance(49)
    assert not any(isinstance(one, ev.StartWorker) for one in harness.commands)
    harness.advance(52)
    assert [one.arena for one in harness.commands if isinstance(one, ev.StartWorker)] == [before + 1]


def test_a_step_is_healthy_while_an_instance_is_ready_and_sends_heartbeats() -> None:
    harness = SchedulerHarness(one_step(), up=False)
    health = harness.scheduler.health
    assert health(0.0) == {"a": False}
    harness.start_worker(0)
    assert health(3000.0) == {"a": True}
    assert health(3001.0) == {"a": False}
    harness.die(0)
    assert health(0.0) == {"a": False}


def test_one_instance_of_two_is_enough_for_health() -> None:
    harness = SchedulerHarness(one_step(instances=2))
    harness.die(0)
    assert harness.scheduler.health(0.0) == {"a": True}


def test_a_move_that_the_table_does_not_have_names_what_is_allowed() -> None:
    harness = SchedulerHarness(one_step())
    with pytest.raises(RuntimeError, match=r"a worker that is ready cannot start; allowed: \['died', 'leave'\]"):
        harness.scheduler.workers[0].move("start")
