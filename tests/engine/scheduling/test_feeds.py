"""Pieces from step to step: when a fed step begins, who waits for whom, and what an end of one means for the other."""

from __future__ import annotations

from typing import Any

import msgspec

from tests.engine.desk import Desk, json
from weftline.engine import messages as msg
from weftline.engine.scheduling import events as ev
from weftline.engine.scheduling.feeds import PIECE_BYTES
from weftline.pipelines.builder import Builder

SAY, GUARD, LATE_GUARD = 0, 1, 2  # workers; the guard is the third when a step beside it says whether it runs


def pipeline(
    raw: bool = False, late: bool = False, guards: int = 1, limits: dict[str, Any] | None = None, **more: Any
) -> Desk:
    """A source, and steps that take its pieces; with `raw`, the source's whole value is an output as well."""
    p = Builder("one", limits=limits or {})
    say = p.step("say", "trickle", value=p.input("x", "text"))
    if late:
        p.step("slow", "echo", type="json", value=p.input("z", "json"))
        more["when"] = "slow.value"
    for place in range(guards):
        guard = p.step(f"guard{place}", "guardrail", text=say.value, **more)
        p.output(f"y{place}", guard.text)
    if raw:
        p.output("raw", say.value)
    return Desk(p)


def begun(**more: Any) -> tuple[Desk, int]:
    """A request whose source has given its first piece."""
    desk = pipeline(**more)
    one = desk.submit(x="a")
    desk.piece(SAY, "p0")
    return desk, one


def say(desk: Desk, worker: int, *values: str, last: bool = False) -> None:
    """A streaming step says pieces, or all its outputs at the end."""
    step, item = desk.held[worker][0]
    if last:
        del desk.held[worker][0]
        outputs = {port: json(values[0]) for port in range(len(desk.plan.steps[step].outputs))}
        desk.hear(worker, msg.Pieces(step, (msg.PieceOf(item, outputs, True),), 1.0))
    else:
        desk.hear(worker, msg.Pieces(step, tuple(msg.PieceOf(item, {0: json(one)}) for one in values), 1.0))


def fed(desk: Desk) -> list[tuple[Any, bool]]:
    """What the last event fed: values, and whether each is the whole."""
    pieces = [piece for feed in desk.sent(msg.Feed) for piece in feed.pieces]
    return [(msg_value(piece.value), piece.last) for piece in pieces]


def msg_value(value: msg.Value) -> Any:
    return msgspec.msgpack.decode(value.data or b"")


def took(desk: Desk, worker: int, count: int = 1) -> None:
    step, item = desk.held[worker][0]
    desk.hear(worker, msg.Took(step, (item,) * count))


def test_a_fed_step_begins_with_the_first_piece_and_gets_the_whole_at_the_end() -> None:
    desk, one = begun()
    assert [item.inputs for item in desk.sent(msg.Submit)[0].items] == [(msg.PIECES,)]
    assert fed(desk) == [("p0", False)]
    say(desk, SAY, "p1", "p2")
    assert fed(desk) == [("p1", False), ("p2", False)] and len(desk.sent(msg.Feed)) == 1
    say(desk, SAY, "p0p1p2", last=True)
    assert fed(desk) == [("p0p1p2", True)]
    say(desk, GUARD, "fine", last=True)
    assert desk.output(one, "y0") == "fine" and desk.is_clean()


def test_the_caller_is_given_the_pieces_of_the_step_it_asked_for_and_no_other() -> None:
    desk, one = begun()
    assert not [said for said in desk.said if isinstance(said, ev.PieceReady)]
    say(desk, GUARD, "ok")
    assert [(said.request, said.output) for said in desk.said if isinstance(said, ev.PieceReady)] == [(one, "y0")]


def test_a_source_without_pieces_hands_over_the_whole() -> None:
    desk = pipeline()
    one = desk.submit(x="a")
    say(desk, SAY, "all", last=True)
    assert desk.sent(msg.Submit)[0].items[0].inputs == (json("all"),) and not fed(desk)
    say(desk, GUARD, "fine", last=True)
    assert desk.output(one, "y0") == "fine" and desk.is_clean()


def test_an_early_end_takes_the_source_along() -> None:
    desk, one = begun()
    step, item = desk.held[SAY][0]
    say(desk, GUARD, "no", last=True)
    assert desk.output(one, "y0") == "no"
    assert desk.sent(msg.Cancel) == [msg.Cancel(step, (item,))]
    desk.hear(SAY, msg.Pieces(step, (msg.PieceOf(item, {}, True, msg.Failure("RequestCancelled", "dropped")),), 1.0))
    assert desk.is_clean()


def test_a_source_that_is_an_output_too_goes_on() -> None:
    desk, one = begun(raw=True)
    say(desk, GUARD, "no", last=True)
    assert not desk.sent(msg.Cancel) and one not in desk.ended
    say(desk, SAY, "p1")
    assert not fed(desk)
    say(desk, SAY, "all", last=True)
    assert (desk.output(one, "y0"), desk.output(one, "raw")) == ("no", "all") and desk.is_clean()


def test_a_source_ends_with_the_last_of_its_readers() -> None:
    p = Builder("one")
    source = p.step("say", "trickle", value=p.input("x", "text"))
    for place in range(2):
        p.output(f"y{place}", p.step(f"guard{place}", "guardrail", text=source.value).text)
    p.output("other", p.step("other", "echo", value=p.input("z", "text")).value)
    desk = Desk(p)
    one = desk.submit(x="a", z="b")
    desk.piece(SAY, "p0")
    say(desk, 1, "no", last=True)
    assert not desk.sent(msg.Cancel)
    say(desk, 2, "no", last=True)
    assert len(desk.sent(msg.Cancel)) == 1 and one not in desk.ended, "another step still runs"
    desk.answer("other")
    assert desk.output(one, "y1") == "no"


def test_what_was_told_is_not_tried_again() -> None:
    desk, one = begun(retry=3)
    desk.die(GUARD)
    assert desk.failure(one).error == "WorkerDied" and desk.sent(msg.Cancel), "the source is dropped too"
    desk, one = begun()
    desk.die(SAY)
    assert desk.failure(one).error == "WorkerDied" and desk.sent(msg.Cancel)


def test_a_fed_step_that_fails_has_its_stand_in_and_its_source_ends() -> None:
    desk, one = begun(fallback={"text": "unchecked", "verdict": {}})
    step, item = desk.held[GUARD].pop(0)
    desk.hear(GUARD, msg.Pieces(step, (msg.PieceOf(item, {}, True, msg.Failure("StepError", "broken")),), 1.0))
    assert desk.output(one, "y0") == "unchecked" and desk.sent(msg.Cancel)


def test_a_piece_that_waits_for_a_worker_goes_with_the_item() -> None:
    desk = pipeline()
    desk.die(GUARD)
    desk.submit(x="a")
    desk.piece(SAY, "p0")
    say(desk, SAY, "p1")
    assert not fed(desk)
    desk.advance((desk.scheduler.crew.members[GUARD].start_ms or 0) - desk.now_ms + 0.001)
    desk.up(GUARD)
    assert fed(desk) == [("p0", False), ("p1", False)]


def test_a_step_that_had_no_worker_until_the_end_is_given_the_whole_like_any_other() -> None:
    desk = pipeline()
    desk.die(GUARD)
    one = desk.submit(x="a")
    desk.piece(SAY, "p0")
    say(desk, SAY, "all", last=True)
    desk.advance((desk.scheduler.crew.members[GUARD].start_ms or 0) - desk.now_ms + 0.001)
    desk.up(GUARD)
    assert desk.sent(msg.Submit)[0].items[0].inputs == (json("all"),)
    say(desk, GUARD, "fine", last=True)
    assert desk.output(one, "y0") == "fine" and desk.is_clean()


def test_pieces_wait_for_what_else_a_step_reads() -> None:
    desk = pipeline(late=True)
    desk.submit(x="a", z=True)
    desk.piece(SAY, "p0")
    say(desk, SAY, "p1")
    assert not desk.sent(msg.Submit)
    desk.answer("slow")
    say(desk, SAY, "p2")
    assert fed(desk) == [("p0", False), ("p1", False), ("p2", False)]


def test_a_step_that_is_skipped_is_fed_nothing() -> None:
    desk = pipeline(late=True)
    one = desk.submit(x="a", z=False)
    desk.piece(SAY, "p0")
    desk.answer("slow")
    say(desk, SAY, "p1")
    assert not desk.sent(msg.Submit, everything=True)[1:]
    assert desk.output(one, "y0") is None and desk.is_clean() is False  # its source still runs
    say(desk, SAY, "all", last=True)
    assert desk.is_clean()


def test_more_than_may_wait_for_a_step_that_cannot_begin_is_given_up_for_the_whole() -> None:
    desk = pipeline(late=True, limits={"stream_bytes_max": 2 * PIECE_BYTES + 20})
    one = desk.submit(x="a", z=True)
    desk.piece(SAY, "p0")
    say(desk, SAY, "p1", "p2")
    desk.answer("slow")
    say(desk, SAY, "p3")
    assert not desk.sent(msg.Submit) and not desk.sent(msg.Pause, everything=True)
    say(desk, SAY, "all", last=True)
    assert desk.sent(msg.Submit)[0].items[0].inputs == (json("all"),)
    say(desk, LATE_GUARD, "fine", last=True)
    assert desk.output(one, "y0") == "fine" and desk.is_clean()


def test_a_reader_that_falls_behind_pauses_its_source_until_it_has_caught_up() -> None:
    desk, one = begun(limits={"stream_bytes_max": 3 * PIECE_BYTES})
    say(desk, SAY, "p1")
    assert not desk.sent(msg.Pause)
    say(desk, SAY, "p2")
    item = desk.held[SAY][0][1]
    assert desk.sent(msg.Pause) == [msg.Pause(0, (item,))]
    took(desk, GUARD)
    assert not desk.sent(msg.Resume)
    took(desk, GUARD)
    assert desk.sent(msg.Resume) == [msg.Resume(0, (item,))]
    say(desk, SAY, "all", last=True)
    say(desk, GUARD, "fine", last=True)
    assert desk.output(one, "y0") == "fine" and desk.is_clean()


def test_a_source_is_paused_once_whoever_asks_for_it() -> None:
    desk, one = begun(limits={"stream_bytes_max": 2 * PIECE_BYTES}, raw=True)
    say(desk, SAY, "p1")
    assert [message.step for message in desk.sent(msg.Pause)] == [0]
    desk.tell(ev.Stalled(one))
    assert [message.step for message in desk.sent(msg.Pause)] == [1]
    took(desk, GUARD, 2)
    assert not desk.sent(msg.Resume), "its caller is slow too"
    desk.tell(ev.Resumed(one))
    assert sorted(message.step for message in desk.sent(msg.Resume)) == [0, 1]


def test_a_reader_that_ends_lets_a_paused_source_go_on_for_others() -> None:
    desk, _ = begun(limits={"stream_bytes_max": 2 * PIECE_BYTES}, raw=True)
    say(desk, SAY, "p1")
    say(desk, GUARD, "no", last=True)
    assert [message.step for message in desk.sent(msg.Resume)] == [0]


def test_a_source_does_not_wait_for_a_reader_behind_suspects_that_may_wait_for_its_end() -> None:
    desk = pipeline(limits={"stream_bytes_max": 2 * PIECE_BYTES}, retry={"attempts": 1, "wait_ms": 9_000})
    suspect = desk.submit(x="a")
    say(desk, SAY, "all", last=True)
    desk.die_and_return(GUARD)
    step, item = desk.held[GUARD].pop(0)
    desk.hear(GUARD, msg.Pieces(step, (msg.PieceOf(item, {}, True, msg.Failure("StepError", "drawn")),), 1.0))
    desk.die(GUARD)
    other = desk.submit(x="b")
    desk.piece(SAY, "p0")
    say(desk, SAY, "p1")
    assert desk.sent(msg.Pause), "its reader waits for its worker"
    desk.advance(9_000)
    assert desk.sent(msg.Resume), "now the suspect is before its reader, and goes to a worker that does nothing else"
    say(desk, SAY, "p2")
    assert not desk.sent(msg.Pause)
    desk.up(GUARD)
    assert [item.id for one in desk.sent(msg.Submit) for item in one.items] == [item]
    say(desk, GUARD, "fine", last=True)
    assert desk.output(suspect, "y0") == "fine" and fed(desk) == [("p0", False), ("p1", False), ("p2", False)]
    say(desk, SAY, "all", last=True)
    say(desk, GUARD, "fine", last=True)
    assert desk.output(other, "y0") == "fine" and desk.is_clean()


def test_who_waits_behind_a_suspect_goes_on_as_soon_as_that_is_withdrawn() -> None:
    p = Builder("one")
    p.output("y", p.step("say", "trickle", value=p.input("x", "text"), instances=2).value)
    desk = Desk(p)
    desk.submit(x="a")
    suspect = desk.submit(x="b")
    desk.die(1)
    desk.submit(x="c")
    assert not desk.sent(msg.Submit), "the suspect is first, and waits for a worker that does nothing else"
    desk.withdraw(suspect)
    assert [one.worker for one in desk.said if isinstance(one, ev.Send)] == [0]


def test_the_time_of_a_fed_step_counts_from_the_whole() -> None:
    desk, one = begun(timeout_ms=50)
    desk.advance(1_000)
    assert one not in desk.ended
    say(desk, SAY, "all", last=True)
    desk.advance(51)
    assert desk.failure(one).error == "DeadlineExceeded" and "timeout_ms" in desk.failure(one).message


def test_who_waits_for_pieces_is_not_taken_for_stuck_and_who_has_them_is() -> None:
    desk, one = begun(run_max_ms=2_000)
    took(desk, GUARD)
    desk.advance(10_000)
    assert not desk.kills() and one not in desk.ended
    say(desk, SAY, "p1")
    kills = []
    for _ in range(12):
        desk.advance(250)
        kills += desk.kills()
    assert kills == ["it was busy for longer than run_max_ms"]


def test_waiting_for_pieces_is_not_learned_as_the_step_s_own_time() -> None:
    desk, _ = begun()
    desk.advance(5_000)
    say(desk, SAY, "all", last=True)
    say(desk, GUARD, "fine", last=True)
    assert desk.scheduler._tasks.lanes[1].least_ms < 1 and desk.scheduler._tasks.lanes[0].least_ms > 4_000


def test_a_piece_that_lies_in_shared_memory_costs_its_worker_its_life() -> None:
    desk, _ = begun()
    step, item = desk.held[SAY][0]
    stray = msg.Value("text", place=msg.Place(1, 0, 4096, 0, 1))
    desk.hear(SAY, msg.Pieces(step, (msg.PieceOf(item, {0: stray}),), 1.0))
    assert desk.kills() == ["it gave a piece that is not inline"]


def test_a_request_that_ends_drops_both() -> None:
    desk, one = begun()
    desk.withdraw(one)
    assert len(desk.sent(msg.Cancel)) == 2
