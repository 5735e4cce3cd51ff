"""What workers say, and what follows; what does not fit to what they were given costs them their life."""

from __future__ import annotations

import pytest

from tests.engine.desk import ARENA_BYTES, Desk, json
from weftline.engine import messages as msg
from weftline.engine.batching.lanes import CALM_BATCHES
from weftline.engine.scheduling import events as ev
from weftline.pipelines.builder import Builder
from weftline.shm.block import Place


def one_step(node: str = "echo", items_max: int = 8, **more: object) -> Builder:
    p = Builder("one-step")
    batch = {"batch": {"items_max": items_max}} if node == "echo" else {}
    type = {"type": "json"} if node == "echo" else {}
    x = p.input("x", "json" if type else "text")
    p.output("y", p.step("a", node, value=x, **type, **batch, **more).value)  # type: ignore[arg-type]
    return p


def text(value: str) -> msg.Value:
    return msg.Value("text", data=value.encode())


def test_one_item_that_fails_leaves_its_mates_alone() -> None:
    desk = Desk(one_step())
    first, *rest = desk.submit_all(range(4))
    desk.answer("a")
    desk.answer("a", lambda x: ValueError("not two") if x == 2 else x)
    assert [desk.ended[one].__class__ for one in (first, *rest)] == [ev.Finish, ev.Finish, ev.Fail, ev.Finish]
    assert (desk.failure(rest[1]).step, desk.failure(rest[1]).message) == ("a", "not two")


def test_what_an_earlier_incarnation_says_late_is_counted_and_dropped() -> None:
    desk = Desk(one_step())
    one = desk.submit(x=1)
    dispatch, arena = desk.inbox[0][0].dispatch, desk.arena[0]
    desk.die_and_return(0)
    desk.tell(ev.FromWorker(0, arena, msg.Done(dispatch, (msg.Given((text("old"),)),), ())))
    assert desk.said == [] and one not in desk.ended and desk.scheduler.counters.stale == 1
    desk.answer("a")
    assert desk.output(one) == 1


@pytest.mark.parametrize(
    "message",
    [
        msg.Hello(1, ARENA_BYTES),
        msg.Ready({}),
        msg.Beat(),
        msg.Need((64,)),
        msg.Done(1, (msg.Given((json("old"),)),), ()),
        msg.Pieces(0, (), 1.0),
        msg.Suspected(1, (b"",)),
    ],
)
def test_nothing_that_comes_from_one_that_is_gone_changes_anything(message: msg.FromWorker) -> None:
    desk = Desk(one_step())
    desk.submit(x=1)
    gone = desk.arena[0]
    desk.die(0)
    before = desk.scheduler.ledger.stats(), desk.scheduler.crew.members[0].state
    for _ in range(2):
        desk.tell(ev.FromWorker(0, gone, message))
        assert desk.said == []
    assert (desk.scheduler.ledger.stats(), desk.scheduler.crew.members[0].state) == before
    assert desk.scheduler.counters.stale == 2


def test_an_answer_that_comes_twice_frees_nothing_twice() -> None:
    desk = Desk(one_step())
    desk.submit_all(range(2))
    run = desk.inbox[0][0]
    desk.answer("a")
    desk.hear(0, msg.Done(run.dispatch, (msg.Given((json("again"),)),), ()))
    assert desk.kills() == ["it answered a dispatch that is not running"]
    desk.die_and_return(0)
    desk.answer("a")
    assert [desk.output(one) for one in (1, 2)] == [0, 1]
    assert desk.is_clean() and desk.scheduler.ledger.stats().stale_total == 0


def notes(desk: Desk) -> list[str]:
    """Return what the last event put down in the log."""
    return [one.message for one in desk.said if isinstance(one, ev.Note)]


STRAY = msg.Value("json", place=Place(1, 0, 4096, 0, 77))


@pytest.mark.parametrize(
    ("message", "why"),
    [
        (msg.Done(99, (msg.Given((text("a"),)),), ()), "it answered a dispatch that is not running"),
        (msg.Done(1, (), ()), "it answered a dispatch that is not running"),
        (msg.Done(1, (msg.Given((STRAY,)),), ()), "it named memory it does not hold"),
        (msg.Done(1, (msg.Given(()),), ()), "it named memory it does not hold"),
        (msg.Hello(1, ARENA_BYTES), "it said twice that it is up"),
        (msg.Ready({}), "it said twice that it is ready"),
        (msg.Pieces(5, (), 1.0), "it gave pieces of a step that it does not hold"),
    ],
)
def test_a_worker_that_says_what_does_not_fit_is_killed(message: msg.FromWorker, why: str) -> None:
    desk = Desk(one_step())
    desk.submit(x=1)
    desk.hear(0, message)
    assert desk.kills() == [why]
    desk.die(0)
    assert desk.scheduler.counters.deaths == 1


def test_a_worker_that_is_about_to_be_killed_is_given_nothing_more() -> None:
    desk = Desk(one_step())
    desk.hear(0, msg.Ready({}))
    desk.submit(x=1)
    assert desk.running() == []


def test_a_step_that_cannot_be_opened_says_why_it_is_given_up() -> None:
    desk = Desk(one_step(), up=False)
    one = desk.submit(x=1)
    for _ in range(6):
        desk.hear(0, msg.OpenFailed("a", msg.Failure("ModelError", "no such file")))
        desk.die(0, "exit code 1")
        desk.advance(((desk.scheduler.crew.members[0].start_ms or desk.now_ms) - desk.now_ms) + 0.001)
    assert desk.failure(one).message == "its worker keeps failing to start (step a: no such file)"


# memory


def test_out_of_memory_halves_the_batch_and_calm_doubles_it_again() -> None:
    desk = Desk(one_step(items_max=8))
    desk.submit_all(range(9))
    desk.answer("a")
    desk.answer("a", out_of_memory=8)
    assert notes(desk) == ["step a: out of memory at 8 items; batches are at most 4 from now on"]
    for _ in range(CALM_BATCHES):
        assert desk.scheduler.batches == {"a": {"items_max": 4, "out_of_memory": 1}}
        desk.submit_all(range(5))
        desk.answer("a")  # the first comes alone, and the others as the batch behind it
        desk.answer("a")
    assert notes(desk) == ["step a: no want of memory lately; batches are at most 8 now"]
    assert desk.scheduler.batches == {"a": {"items_max": 8, "out_of_memory": 1}}
    assert desk.scheduler.counters.out_of_memory == 1


def test_what_is_short_of_memory_for_one_item_is_counted_and_says_nothing_new() -> None:
    desk = Desk(one_step(items_max=1))
    desk.submit(x=1)
    desk.answer("a", lambda x: msg.Failure("LimitReached", "out of memory for one item alone"), out_of_memory=1)
    assert notes(desk) == []
    assert desk.scheduler.batches == {"a": {"items_max": 1, "out_of_memory": 1}}


def test_room_is_asked_for_granted_and_given_back() -> None:
    desk = Desk(one_step())
    one = desk.submit(x=1)
    desk.hear(0, msg.Need((100_000,)))
    (room,) = desk.sent(msg.Room)
    value = msg.Value("json", place=room.blocks[0].place(0, 100_000))
    desk.answer("a", lambda x: value)
    assert desk.output(one) == value
    assert desk.scheduler.ledger.stats().blocks == 1
    assert desk.is_clean()


# streams


def test_pieces_go_to_the_caller_as_they_come() -> None:
    desk = Desk(one_step("trickle"))
    one = desk.submit(x=text("a"))
    desk.piece(0, "to")
    assert [told.value for told in desk.said if isinstance(told, ev.PieceReady)] == [json("to")]
    desk.piece(0, "together", last=True)
    assert desk.output(one) == "together"
    assert desk.is_clean()


def test_a_caller_who_wants_no_pieces_is_told_of_none() -> None:
    desk = Desk(one_step("trickle"))
    desk.submit(x=text("a"), pieces=False)
    desk.piece(0, "to")
    assert desk.said == []


def test_a_last_piece_that_lacks_a_port_costs_the_worker_its_life() -> None:
    desk = Desk(one_step("trickle"))
    one = desk.submit(x=text("a"))
    step, item = desk.held[0][0]
    desk.hear(0, msg.Pieces(step, (msg.PieceOf(item, {}, True),), 1.0))
    assert desk.kills() == ["it named memory it does not hold"]
    assert desk.failure(one).error == "WorkerDied"


def test_what_is_said_of_items_that_are_over_is_counted_and_dropped() -> None:
    desk = Desk(one_step("trickle"))
    one = desk.submit(x=text("a"))
    desk.hear(0, msg.Pieces(0, (msg.PieceOf(777, {0: text("x")}, True), msg.PieceOf(777, {9: text("x")})), 1.0))
    assert desk.said == [] and desk.scheduler.counters.stale == 2
    desk.hear(0, msg.Took(0, (777,)))
    desk.hear(0, msg.Suspected(0, (b"d",), (777,)))
    desk.hear(0, msg.Suspected(777, (b"d",)))
    assert desk.said == [] and desk.scheduler.counters.stale == 5
    desk.piece(0, "end", last=True)
    assert desk.output(one) == "end"


def test_a_cancelled_stream_keeps_its_inputs_until_its_last_piece() -> None:
    desk = Desk(one_step("trickle"))
    block = desk.scheduler.try_reserve([1 << 17])[0]
    one = desk.submit(x=msg.Value("text", place=block.place(0, 1 << 17)))
    desk.withdraw(one)
    assert len(desk.sent(msg.Cancel)) == 1
    assert desk.scheduler.ledger.stats().blocks == 1
    desk.piece(0, "", last=True)
    assert desk.is_clean()


def test_a_slow_reader_pauses_its_stream_alone_and_resumes_it() -> None:
    desk = Desk(one_step("trickle"))
    one, _ = desk.submit(x=text("a")), desk.submit(x=text("b"))
    desk.tell(ev.Stalled(one))
    assert desk.sent(msg.Pause) == [msg.Pause(0, (desk.held[0][0][1],))]
    desk.tell(ev.Stalled(one))
    assert desk.said == []
    desk.tell(ev.Resumed(one))
    assert desk.sent(msg.Resume) == [msg.Resume(0, (desk.held[0][0][1],))]


def test_a_stream_whose_reader_takes_nothing_is_cut() -> None:
    p = Builder("stalls", limits={"stall_max_ms": 1000})
    p.output("y", p.step("a", "trickle", value=p.input("x", "text")).value)
    desk = Desk(p)
    one = desk.submit(x=text("a"))
    desk.tell(ev.Stalled(one))
    desk.advance(999)
    assert one not in desk.ended
    desk.advance(2)
    assert desk.failure(one).error == "LimitReached"
    assert desk.failure(one).message == "its reader took nothing for 1 s; limits.stall_max_ms"


def test_a_reader_that_reads_on_in_time_is_not_cut() -> None:
    p = Builder("stalls", limits={"stall_max_ms": 1000})
    p.output("y", p.step("a", "trickle", value=p.input("x", "text")).value)
    desk = Desk(p)
    one = desk.submit(x=text("a"))
    desk.tell(ev.Stalled(one))
    desk.tell(ev.Resumed(one))
    desk.advance(1500)
    assert one not in desk.ended


# chains


def chained() -> Desk:
    p = Builder("chained")
    a = p.step("a", "echo", type="json", value=p.input("x", "json"), worker="w")
    b = p.step("b", "echo", type="json", value=a.value, worker="w")
    p.output("y", p.step("c", "echo", type="json", value=b.value, worker="w").value)
    return Desk(p)


def test_a_failure_in_a_chain_names_the_step_that_failed() -> None:
    desk = chained()
    one = desk.submit(x=1)
    desk.answer("a", lambda x: msg.Failure("StepError", "drawn", 1))
    assert desk.failure(one).step == "b"


def test_a_stage_that_does_not_exist_is_taken_for_the_last() -> None:
    desk = chained()
    one = desk.submit(x=1)
    desk.answer("a", lambda x: msg.Failure("StepError", "drawn", 99))
    assert desk.failure(one).step == "c"
