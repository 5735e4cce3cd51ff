"""Which batch goes to which worker, and when."""

from __future__ import annotations

import pytest

from tests.engine.desk import Desk
from weftline.engine import messages as msg
from weftline.engine.scheduling import events as ev
from weftline.nodes.urgency import SequencePart
from weftline.pipelines.builder import Builder
from weftline.pipelines.policy import Slo


def one_step(items_max: int = 4, wait_max_ms: float = 0.0, slo: Slo | None = None, **more: object) -> Builder:
    p = Builder("one-step", slo=slo)
    batch = {"items_max": items_max, "wait_max_ms": wait_max_ms}
    a = p.step("a", "echo", type="json", value=p.input("x", "json"), batch=batch, **more)  # type: ignore[arg-type]
    p.output("y", a.value)
    return p


def trickle(**more: object) -> Builder:
    p = Builder("streams")
    p.output("y", p.step("a", "trickle", value=p.input("x", "text"), **more).value)  # type: ignore[arg-type]
    return p


def text(value: str) -> msg.Value:
    return msg.Value("text", data=value.encode())


def taught(desk: Desk, run_ms: float, calls: int = 4, size: int = 1) -> Desk:
    """Let the step take `run_ms` a few times, so that it is known."""
    for _ in range(calls):
        desk.submit_all(range(size))
        while desk.running():
            desk.now_ms += run_ms
            desk.answer("a", run_ms=run_ms)
    return desk


def test_an_item_leaves_at_once_when_a_worker_is_free_and_nobody_waits_for_company() -> None:
    desk = Desk(one_step())
    desk.submit(x=1)
    assert desk.batch("a") == [1]


def test_what_gathers_while_the_worker_is_busy_leaves_together() -> None:
    desk = Desk(one_step(items_max=4))
    desk.submit_all([0, 1, 2, 3, 4, 5])
    desk.answer("a")
    assert desk.answer("a") == [1, 2, 3, 4]
    assert desk.answer("a") == [5]


def test_an_item_waits_for_company_no_longer_than_it_was_told() -> None:
    desk = Desk(one_step(wait_max_ms=20))
    desk.submit(x=1)
    desk.advance(19)
    assert desk.running() == []
    desk.advance(2)
    assert desk.batch("a") == [1]


def test_a_full_batch_waits_for_nothing() -> None:
    desk = Desk(one_step(items_max=2, wait_max_ms=20))
    desk.submit_all([1, 2])
    assert desk.batch("a") == [1, 2]


def test_every_instance_is_given_work() -> None:
    desk = Desk(one_step(items_max=1, instances=2))
    desk.submit_all([1, 2])
    assert desk.running() == ["a", "a"]


def test_a_quick_step_is_given_a_second_batch_while_it_runs_the_first_and_never_a_third() -> None:
    desk = taught(Desk(one_step(items_max=2)), run_ms=2.0)
    desk.submit_all(range(10))
    assert [len(run.items) for run in desk.inbox[0]] == [1, 2]
    desk.answer("a", run_ms=2.0)
    assert [len(run.items) for run in desk.inbox[0]] == [2, 2]


def test_a_slow_step_is_given_one_batch_at_a_time() -> None:
    desk = taught(Desk(one_step(items_max=2)), run_ms=100.0)
    desk.submit_all(range(10))
    assert len(desk.inbox[0]) == 1


def test_priority_and_deadline_and_sequence_go_along_with_an_item() -> None:
    p = Builder("brought")
    p.output("y", p.step("a", "remember", value=p.input("x", "text")).value)
    desk = Desk(p)
    desk.submit(x=text("a"), priority=7, deadline_ms=50, sequence=SequencePart("s", True, False))
    assert desk.inbox[0][0].items[0].brought == msg.Brought(7, 50.0, "s", True, False)


def test_what_is_usual_brings_nothing_along() -> None:
    desk = Desk(one_step())
    desk.submit(x=1)
    assert desk.inbox[0][0].items[0].brought is None


def test_what_is_left_of_the_deadline_shrinks_along_the_graph() -> None:
    p = Builder("two")
    a = p.step("a", "echo", type="json", value=p.input("x", "json"))
    p.output("y", p.step("b", "echo", type="json", value=a.value).value)
    desk = Desk(p)
    desk.submit(x=1, deadline_ms=50)
    desk.now_ms += 20
    desk.answer("a")
    brought = desk.inbox[desk.at("b")][0].items[0].brought
    assert brought is not None and brought.left_ms == 30.0


def test_the_more_urgent_goes_first() -> None:
    desk = Desk(one_step(items_max=1))
    desk.submit(x="running")
    desk.submit(x="usual")
    desk.submit(x="urgent", priority=100)
    desk.answer("a")
    assert desk.batch("a") == ["urgent"]


def test_late_work_never_reaches_a_worker() -> None:
    desk = taught(Desk(one_step(items_max=1, slo=Slo(refuse_early=False))), run_ms=100.0)
    desk.submit(x="running")
    late = desk.submit(x="late", deadline_ms=150)
    desk.now_ms += 100
    desk.answer("a", run_ms=100.0)
    assert desk.running() == []
    assert desk.failure(late).error == "DeadlineExceeded"
    assert desk.failure(late).message == "by recent times it would be about 51 ms too late; it was not begun"
    assert desk.scheduler.counters.late == 1
    assert desk.is_clean()


def test_expired_work_never_reaches_a_worker_even_when_nothing_is_known() -> None:
    desk = Desk(one_step(items_max=1))
    desk.submit(x="running")
    late = desk.submit(x="late", deadline_ms=10)
    desk.advance(11)
    assert desk.failure(late).message == "the deadline passed after 10 ms; unfinished steps: a"
    desk.answer("a")
    assert desk.running() == []


def test_a_withdrawn_item_leaves_its_queue() -> None:
    desk = Desk(one_step(items_max=1))
    desk.submit(x=1)
    desk.withdraw(desk.submit(x=2))
    desk.answer("a")
    assert desk.running() == []
    assert desk.is_clean()


def test_suspects_do_not_wait_behind_a_worker_that_is_kept_busy() -> None:
    desk = taught(Desk(one_step(items_max=1, instances=2)), run_ms=2.0)
    desk.submit_all(["suspect", "other", *range(20)])
    assert [len(runs) for _, runs in sorted(desk.inbox.items())] == [2, 2]
    desk.die(0)
    desk.answer("a", worker=1)
    desk.answer("a", worker=1)
    assert [desk.value_of[item.id] for item in desk.inbox[1][0].items] == ["suspect"]
    assert desk.inbox[1][0].suspect


def test_nothing_is_put_at_risk_beside_a_suspect() -> None:
    desk = taught(Desk(one_step(items_max=1)), run_ms=2.0)
    desk.submit_all(range(10))
    desk.die_and_return(0)
    assert len(desk.inbox[0]) == 1 and desk.inbox[0][0].suspect


def test_the_items_of_a_streaming_step_are_dealt_out_among_its_instances() -> None:
    desk = Desk(trickle(instances=2))
    for value in "abcd":
        desk.submit(x=text(value))
    assert [len(held) for held in desk.held.values()] == [2, 2]


def test_a_stream_whose_reader_is_slow_already_begins_paused() -> None:
    desk = Desk(trickle(), up=False)
    one = desk.submit(x=text("a"))
    desk.tell(ev.Stalled(one))
    desk.up(0)
    assert len(desk.sent(msg.Submit)) == len(desk.sent(msg.Pause)) == 1


def test_outputs_of_known_size_are_given_room_beforehand() -> None:
    p = Builder("known")
    p.output("y", p.step("a", "echo", type="float32[65536]", value=p.input("x", "float32[65536]")).value)
    desk = Desk(p)
    block = desk.scheduler.try_reserve([1 << 18])[0]
    desk.submit(x=msg.Value("tensor", "float32", (65536,), place=block.place(0, 1 << 18)))
    assert desk.inbox[0][0].room[0].size_bytes == 1 << 18


@pytest.mark.parametrize("asked", [None, ("y",)])
def test_a_chain_is_one_run_and_told_once_to_each_incarnation(asked: tuple[str, ...] | None) -> None:
    p = Builder("chained")
    a = p.step("a", "echo", type="json", value=p.input("x", "json"), worker="w")
    p.output("y", p.step("b", "echo", type="json", value=a.value, worker="w").value)
    desk = Desk(p)
    for _ in range(2):
        one = desk.submit(x=1, wanted=asked)
        desk.answer("a")
        assert desk.output(one) == 1
    assert len(desk.sent(msg.Chain, everything=True)) == 1
    assert len(desk.sent(msg.Run, everything=True)) == 2
    desk.die_and_return(0)
    desk.submit(x=1, wanted=asked)
    assert len(desk.sent(msg.Chain)) == 1
