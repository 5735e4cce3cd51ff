"""A worker that cannot attach another's memory: what lies there for it is fetched, and nothing is given there again."""

from __future__ import annotations

import pytest

from tests.engine.desk import Desk
from tests.engine.on_device import SIZE_BYTES, answer_near, answer_small, given, hop, is_leased
from weftline.engine import messages as msg
from weftline.engine.scheduling import events as ev

LEFT, RIGHT = 0, 1


def refuse(desk: Desk, worker: int = RIGHT, owner: int = LEFT) -> None:
    desk.hear(worker, msg.AttachFailed(desk.scheduler.crew.members[owner].near_arena, "in a container"))


def fail_unseen(desk: Desk, step: str = "b") -> None:
    """The worker that runs `step` could not read what it was given."""
    desk.answer(step, lambda x: msg.Failure("StepError", "an input cannot be read here"))


def fetched(desk: Desk, fetch: msg.Fetch, owner: int = LEFT) -> msg.Room:
    """The owner asks for room, and answers a Fetch; returns the room."""
    desk.hear(owner, msg.Need(tuple(value.size_bytes for value in fetch.values)))
    (room,) = desk.sent(msg.Room)
    values = tuple(
        msg.Value(value.kind, value.dtype, value.shape, place=block.place(0, value.size_bytes))
        for value, block in zip(fetch.values, room.blocks)
    )
    desk.hear(owner, msg.Fetched(fetch.token, values, room.refused))
    return room


@pytest.mark.parametrize("ordering", ["host", "event"])
def test_an_arena_that_somebody_cannot_attach_is_given_in_no_more(ordering: str) -> None:
    desk = Desk(hop(ordering))
    refuse(desk)
    assert desk.sent(msg.GiveOnHost) == [msg.GiveOnHost()] * 2
    one = desk.submit(x=given(desk))
    run = desk.inbox[LEFT][0]
    assert not run.near_room and run.ready is None and run.room
    (told,) = [note.message for note in desk.all if isinstance(note, ev.Note)]
    assert told.startswith("device fake:0: worker right cannot attach the memory that worker left shares (in a cont")
    assert desk.scheduler.crew.sharing()["left"] == {"device": "fake:0", "rung": "host", "why": "in a container"}
    assert desk.scheduler.crew.sharing()["right"]["rung"] == "host"  # it holds for all of the device
    desk.answer("a")
    answer_small(desk, "b")
    assert isinstance(desk.ended[one], ev.Finish) and desk.is_clean()


def test_it_is_noted_once_and_the_owner_is_told_once() -> None:
    desk = Desk(hop("host"))
    refuse(desk)
    refuse(desk)
    refuse(desk, LEFT, RIGHT)
    desk.die_and_return(LEFT)
    assert sum(isinstance(one, ev.Note) for one in desk.all) == 1
    assert len(desk.sent(msg.GiveOnHost, everything=True)) == 3  # left, right, and the new left, before any work
    desk.submit(x=given(desk))
    assert not desk.inbox[LEFT][0].near_room


@pytest.mark.parametrize("ordering", ["host", "event"])
def test_what_waits_for_a_worker_that_cannot_see_it_is_fetched_before_it_is_sent(ordering: str) -> None:
    desk = Desk(hop(ordering, idempotent=False))
    one = desk.submit(x=given(desk))
    refuse(desk)
    run = answer_near(desk, "a", unfinished=ordering == "event")
    assert desk.inbox[RIGHT] == []
    (fetch,) = desk.sent(msg.Fetch)
    assert [value.near for value in fetch.values] == [run.near_room[0].place(0, SIZE_BYTES)]
    fetched(desk, fetch)
    (item,) = desk.inbox[RIGHT][0].items
    assert item.inputs[0].near is None and item.inputs[0].place is not None and item.inputs[0].ready is None
    assert is_leased(desk, item.inputs[0].place.key)
    if ordering == "event":
        desk.hear(LEFT, msg.Released((run.dispatch,)))
    answer_small(desk, "b")
    assert isinstance(desk.ended[one], ev.Finish) and desk.is_clean()


@pytest.mark.parametrize("idempotent", [True, False])
def test_what_a_worker_had_before_it_was_known_is_run_again_and_counts_for_nothing(idempotent: bool) -> None:
    desk = Desk(hop("host", idempotent=idempotent))
    one = desk.submit(x=given(desk))
    answer_near(desk, "a", unfinished=False)
    refuse(desk)
    fail_unseen(desk)
    fetched(desk, *desk.sent(msg.Fetch))
    answer_small(desk, "b")
    assert desk.steps_of(one) == [("a", "ok"), ("b", "ok")]
    assert desk.scheduler.counters.retried == 0 and desk.is_clean()


def test_one_of_a_batch_that_can_be_read_is_not_held_up() -> None:
    desk = Desk(hop("host", items_max=2))
    desk.submit(x=given(desk))
    answer_near(desk, "a", unfinished=False)  # b's worker is busy with it, so that the next two wait
    two = [desk.submit(x=given(desk)) for _ in range(2)]
    answer_near(desk, "a", unfinished=False)
    answer_small(desk, "a")
    refuse(desk)
    fail_unseen(desk)
    (first, second) = desk.sent(msg.Fetch)
    assert [len(run.items) for run in desk.inbox[RIGHT]] == [1]
    answer_small(desk, "b")
    assert [request in desk.ended for request in two] == [False, True]
    for fetch in (first, second):
        fetched(desk, fetch)
        answer_small(desk, "b")
    assert all(isinstance(end, ev.Finish) for end in desk.ended.values()) and desk.is_clean()


def test_a_request_that_ends_meanwhile_leaves_nothing_behind() -> None:
    desk = Desk(hop("host"))
    one = desk.submit(x=given(desk))
    refuse(desk)
    answer_near(desk, "a", unfinished=False)
    (fetch,) = desk.sent(msg.Fetch)
    desk.withdraw(one)
    assert desk.scheduler.ledger.stats().leased_bytes == SIZE_BYTES  # the owner still reads it
    assert not desk.scheduler.idle()
    fetched(desk, fetch)
    assert desk.is_clean()


@pytest.mark.parametrize("wait_ms", [0, 30])
def test_a_task_that_is_tried_again_while_it_is_fetched_is_queued_once(wait_ms: float) -> None:
    desk = Desk(hop("host", timeout_ms=50, retry={"attempts": 3, "on": ["timeout"], "wait_ms": wait_ms}))
    one = desk.submit(x=given(desk))
    refuse(desk)
    answer_near(desk, "a", unfinished=False)
    (fetch,) = desk.sent(msg.Fetch)
    desk.advance(60)
    assert desk.sent(msg.Fetch) == [] and desk.inbox[RIGHT] == []
    fetched(desk, fetch)
    assert len(desk.inbox[RIGHT]) == (wait_ms == 0)
    desk.advance(30)
    assert len(desk.inbox[RIGHT]) == 1
    answer_small(desk, "b")
    assert isinstance(desk.ended[one], ev.Finish) and desk.inbox[RIGHT] == [] and desk.is_clean()


def test_what_nobody_can_fetch_fails_in_words() -> None:
    desk = Desk(hop("host"))
    waiting, coming = desk.submit(x=given(desk)), desk.submit(x=given(desk))
    refuse(desk)
    answer_near(desk, "a", unfinished=False)
    desk.die(LEFT)
    told = desk.failure(waiting)
    assert (told.error, told.step) == ("WorkerDied", "b")
    assert told.message == "a tensor on the device ended with the worker that held it (signal 9)"
    assert coming not in desk.ended  # it is made again
    desk.advance(1000)
    desk.up(LEFT)
    desk.answer("a")
    answer_small(desk, "b")
    assert isinstance(desk.ended[coming], ev.Finish) and desk.is_clean()


def test_room_that_there_will_never_be_fails_the_request_by_the_limit() -> None:
    desk = Desk(hop("host"))
    one = desk.submit(x=given(desk))
    refuse(desk)
    answer_near(desk, "a", unfinished=False)
    (fetch,) = desk.sent(msg.Fetch)
    desk.hear(LEFT, msg.Need((1 << 30,)))
    (room,) = desk.sent(msg.Room)
    desk.hear(LEFT, msg.Fetched(fetch.token, (), room.refused))
    assert desk.failure(one).error == "LimitReached" and "limits.arena_bytes" in desk.failure(one).message
    assert desk.is_clean()


def test_an_owner_that_never_answers_is_ended() -> None:
    desk = Desk(hop("host"))
    desk.submit(x=given(desk))
    refuse(desk)
    answer_near(desk, "a", unfinished=False)
    desk.advance(max(step.run_max_ms for step in desk.plan.steps) + 1000)
    assert any("did not copy to host memory" in one.why for one in desk.said if isinstance(one, ev.KillWorker))


def test_wrong_answers_cost_a_worker_its_life() -> None:
    desk = Desk(hop("host"))
    one = desk.submit(x=given(desk))
    desk.hear(RIGHT, msg.Fetched(7, ()))
    assert desk.kills() == ["it fetched what it was not asked for"]
    desk.die_and_return(RIGHT)
    refuse(desk)
    answer_near(desk, "a", unfinished=False)
    (fetch,) = desk.sent(msg.Fetch)
    desk.hear(LEFT, msg.Fetched(fetch.token, fetch.values))
    assert desk.kills() == ["it fetched something else than was asked for"]
    assert desk.failure(one).error == "WorkerDied"
    refuse(desk, LEFT, LEFT)
    assert desk.kills() == ["it cannot attach the arena that it made"]


def test_events_that_somebody_cannot_open_mark_nothing_more_and_memory_is_shared_all_the_same() -> None:
    desk = Desk(hop("event"))
    one = desk.submit(x=given(desk))
    desk.hear(RIGHT, msg.AttachFailed(-desk.scheduler.crew.members[LEFT].near_arena, "in a container"))
    assert desk.sent(msg.GiveOnHost) == []
    (told,) = [note.message for note in desk.said if isinstance(note, ev.Note)]
    assert "worker right cannot open the events that worker left shares (in a container); tensors are wait" in told
    first = answer_near(desk, "a")  # it was sent before, with an event
    (fetch,) = desk.sent(msg.Fetch)
    fetched(desk, fetch)
    desk.hear(LEFT, msg.Released((first.dispatch,)))
    answer_small(desk, "b")
    two = desk.submit(x=given(desk))
    run = answer_near(desk, "a", unfinished=False)
    assert run.ready is None and run.near_room
    (item,) = desk.inbox[RIGHT][0].items
    assert item.inputs[0].near is not None and item.inputs[0].place is None
    answer_small(desk, "b")
    assert all(isinstance(desk.ended[request], ev.Finish) for request in (one, two)) and desk.is_clean()


def test_an_arena_that_is_forgotten_cannot_be_refused_any_more() -> None:
    desk = Desk(hop("host"))
    arena = desk.scheduler.crew.members[LEFT].near_arena
    desk.die_and_return(LEFT)
    desk.hear(RIGHT, msg.AttachFailed(arena, "late"))
    assert desk.kills() == [] and desk.sent(msg.GiveOnHost) == []
    assert desk.scheduler.crew.members[LEFT].gives_near
