"""The workers: which incarnation lives, when it is killed, and when it starts again."""

from __future__ import annotations

import pytest

from tests.engine.desk import Desk
from weftline.engine import messages as msg
from weftline.engine.crew.patience import OPEN_MAX_MS
from weftline.engine.scheduling import events as ev
from weftline.pipelines.builder import Builder


def one_step(node: str = "echo", **more: object) -> Builder:
    p = Builder("one-step", limits={"silence_max_ms": 3000})
    p.output("y", p.step("a", node, value=p.input("x", "text"), **more).value)  # type: ignore[arg-type]
    return p


TEXT = msg.Value("text", data=b"a")


def kills_within(desk: Desk, ms: float, silent: tuple[int, ...] = ()) -> list[str]:
    desk.advance(ms, silent)
    return desk.kills()


def test_a_silent_worker_is_killed_once() -> None:
    desk = Desk(one_step())
    assert kills_within(desk, 2990, silent=(0,)) == []
    assert kills_within(desk, 600, silent=(0,)) == ["it gave no sign of life for 3 s"]
    assert kills_within(desk, 5000, silent=(0,)) == []


def test_a_call_that_takes_too_long_kills_its_worker_although_its_heart_beats() -> None:
    desk = Desk(one_step(run_max_ms=10_000))
    desk.submit(x=TEXT)
    assert kills_within(desk, 9990) == []
    assert kills_within(desk, 600) == ["it was busy for longer than run_max_ms"]


def test_what_waits_behind_has_its_own_time_from_when_it_is_begun() -> None:
    p = Builder("quick")
    batch = {"items_max": 1}
    p.output("y", p.step("a", "echo", value=p.input("x", "text"), batch=batch, run_max_ms=1000).value)
    desk = Desk(p)
    for _ in range(4):
        desk.submit(x=TEXT)
        desk.answer("a")
    for _ in range(3):
        desk.submit(x=TEXT)
    assert len(desk.inbox[0]) == 2
    assert kills_within(desk, 900) == []
    desk.answer("a")
    assert kills_within(desk, 900) == []
    assert kills_within(desk, 600) == ["it was busy for longer than run_max_ms"]


def test_a_stream_that_says_nothing_for_too_long_kills_its_worker_and_each_piece_gives_it_time() -> None:
    desk = Desk(one_step("trickle", run_max_ms=1000))
    desk.submit(x=TEXT)
    assert kills_within(desk, 900) == []
    desk.piece(0, "a")
    assert kills_within(desk, 900) == []
    assert kills_within(desk, 600) == ["it was busy for longer than run_max_ms"]


def test_a_stream_that_is_paused_is_not_held_to_it() -> None:
    desk = Desk(one_step("trickle", run_max_ms=1000))
    one = desk.submit(x=TEXT)
    desk.tell(ev.Stalled(one))
    assert kills_within(desk, 5000) == []


def test_a_worker_may_take_long_to_open_but_not_for_ever_without_a_word() -> None:
    desk = Desk(one_step(), up=False)
    desk.hear(0, msg.Hello(1, 1 << 20))
    assert kills_within(desk, OPEN_MAX_MS - 1000) == []
    desk.hear(0, msg.Progress("a", "reading", 0.5))
    assert kills_within(desk, OPEN_MAX_MS - 1000) == []
    assert kills_within(desk, 2000) == ["it said nothing for 1800 s while opening"]


def test_a_dead_worker_is_started_again_after_a_pause_as_another_incarnation() -> None:
    desk = Desk(one_step())
    before = desk.arena[0]
    desk.die(0)
    desk.advance(49)
    assert not any(isinstance(one, ev.StartWorker) for one in desk.said)
    desk.advance(52)
    assert [one.arena for one in desk.said if isinstance(one, ev.StartWorker)] == [before + 1]


def test_a_step_is_healthy_while_an_instance_is_ready_and_was_heard_of() -> None:
    desk = Desk(one_step(), up=False)
    health = desk.scheduler.health
    assert health(0.0) == {"a": False}
    desk.up(0)
    assert health(3000.0) == {"a": True}
    assert health(3001.0) == {"a": False}
    desk.die(0)
    assert health(0.0) == {"a": False}


def test_one_instance_of_two_is_enough_for_health() -> None:
    desk = Desk(one_step(instances=2))
    desk.die(0)
    assert desk.scheduler.health(0.0) == {"a": True}


def test_a_move_that_the_table_does_not_have_names_what_is_allowed() -> None:
    desk = Desk(one_step())
    with pytest.raises(RuntimeError, match=r"a worker that is ready cannot start; allowed: \['died', 'leave'\]"):
        desk.scheduler.crew.members[0].move("start")
