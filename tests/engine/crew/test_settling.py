"""Device memory that a dead worker was reading: nobody writes there before the arena's owner has settled."""

from __future__ import annotations

import pytest

from tests.engine.desk import Desk
from tests.engine.on_device import SIZE_BYTES, answer_near, answer_small, given, hop, is_leased, row
from weftline.engine import messages as msg
from weftline.engine.scheduling import events as ev

LEFT, RIGHT = 0, 1


def read_by_the_dead(ordering: str = "host", **more: object) -> tuple[Desk, int, msg.Run]:
    """A worker died while it read what another one gave it on the device, and its work must not run twice."""
    desk = Desk(hop(ordering, idempotent=False, **more))  # type: ignore[arg-type]
    one = desk.submit(x=given(desk))
    run = answer_near(desk, "a", unfinished=ordering == "event")
    if ordering == "event":
        desk.hear(LEFT, msg.Released((run.dispatch,)))
    desk.die(RIGHT)
    return desk, one, run


@pytest.mark.parametrize("ordering", ["host", "event"])
def test_what_a_dead_worker_read_is_free_once_the_owner_has_settled(ordering: str) -> None:
    desk, one, _ = read_by_the_dead(ordering)
    assert desk.failure(one).error == "WorkerDied"
    stats = desk.scheduler.ledger.stats()
    assert stats.quarantined_bytes == SIZE_BYTES and stats.leased_bytes == 0
    (settle,) = desk.sent(msg.Settle)
    desk.hear(LEFT, msg.Settled(settle.token))
    assert desk.scheduler.ledger.stats().quarantined_bytes == 0
    assert desk.is_clean()


def test_nothing_new_is_leased_where_the_dead_may_still_read() -> None:
    desk, _, run = read_by_the_dead(arena_bytes=2 * SIZE_BYTES)
    (settle,) = desk.sent(msg.Settle)
    where = run.near_room[0].offset
    desk.submit(x=given(desk))
    assert desk.inbox[LEFT][0].near_room[0].offset != where  # the other half
    desk.hear(LEFT, msg.Settled(settle.token))
    desk.hear(LEFT, msg.Need((), (SIZE_BYTES,)))
    assert [block.offset for block in desk.sent(msg.Room)[0].near] == [where]


def test_who_needs_room_waits_for_what_settles() -> None:
    desk, _, _ = read_by_the_dead(arena_bytes=SIZE_BYTES)
    (settle,) = desk.sent(msg.Settle)
    desk.advance((desk.scheduler.crew.members[RIGHT].start_ms or 0.0) - desk.now_ms + 0.001)
    desk.up(RIGHT)  # nothing else is on its way
    desk.submit(x=given(desk))
    assert not desk.inbox[LEFT][0].near_room
    desk.hear(LEFT, msg.Need((), (SIZE_BYTES,)))
    assert desk.sent(msg.Room) == []
    desk.hear(LEFT, msg.Settled(settle.token))
    assert len(desk.sent(msg.Room)[0].near) == 1


def test_a_task_that_is_tried_again_keeps_what_it_reads_beside_the_quarantine() -> None:
    desk = Desk(hop("host"))
    one = desk.submit(x=given(desk))
    run = answer_near(desk, "a", unfinished=False)
    desk.die(RIGHT)
    (settle,) = desk.sent(msg.Settle)
    desk.hear(LEFT, msg.Settled(settle.token))
    block = run.near_room[0]
    assert is_leased(desk, (block.arena, block.offset, block.generation))
    desk.advance((desk.scheduler.crew.members[RIGHT].start_ms or 0.0) - desk.now_ms + 0.001)
    desk.up(RIGHT)
    answer_small(desk, "b")
    assert isinstance(desk.ended[one], ev.Finish) and desk.is_clean()


def test_what_a_withdrawn_request_brought_there_is_kept_from_use_too() -> None:
    desk = Desk(hop("event"))
    one = desk.submit(x=given(desk))
    run = answer_near(desk, "a")
    desk.hear(LEFT, msg.Released((run.dispatch,)))
    desk.withdraw(one)
    desk.die(RIGHT)
    stats = desk.scheduler.ledger.stats()
    assert (stats.leased_bytes, stats.quarantined_bytes) == (0, SIZE_BYTES)
    (settle,) = desk.sent(msg.Settle)
    desk.hear(LEFT, msg.Settled(settle.token))
    assert desk.is_clean()


def test_what_it_had_answered_and_not_finished_is_kept_from_use_too() -> None:
    desk = Desk(row("event"))
    desk.submit(x=given(desk))
    run = answer_near(desk, "a")
    desk.hear(LEFT, msg.Released((run.dispatch,)))
    answer_near(desk, "b")  # its device goes on reading what a gave
    desk.die(RIGHT)
    assert desk.scheduler.ledger.stats().quarantined_bytes == SIZE_BYTES
    (settle,) = desk.sent(msg.Settle)
    desk.hear(LEFT, msg.Settled(settle.token))
    assert desk.scheduler.ledger.stats().quarantined_bytes == 0
    desk.die(2)
    assert desk.is_clean()


def test_an_owner_that_dies_takes_the_quarantine_with_it() -> None:
    desk, _, run = read_by_the_dead()
    desk.die(LEFT)
    assert ev.ForgetArena(run.near_room[0].arena) in desk.said
    assert desk.scheduler.ledger.stats().quarantined_bytes == 0
    assert desk.is_clean()


def test_both_dead_at_once_ask_nobody_to_settle() -> None:
    desk = Desk(hop("host", idempotent=False))
    desk.submit(x=given(desk))
    answer_near(desk, "a", unfinished=False)
    desk.die(LEFT)
    desk.die(RIGHT)
    assert desk.sent(msg.Settle, everything=True) == []
    assert desk.is_clean()


@pytest.mark.parametrize("again", [False, True])
def test_a_worker_that_settles_what_it_was_not_asked_to_is_killed(again: bool) -> None:
    desk, _, _ = read_by_the_dead()
    (settle,) = desk.sent(msg.Settle)
    if again:
        desk.hear(LEFT, msg.Settled(settle.token))
    desk.hear(LEFT, msg.Settled(settle.token if again else settle.token + 1))
    assert desk.kills() == ["it settled what it was not asked to"]


def test_an_owner_that_never_settles_is_killed() -> None:
    desk, _, _ = read_by_the_dead()
    desk.advance(desk.plan.steps[0].run_max_ms + 1000.0)
    assert "its device did not settle within run_max_ms" in [one.why for one in desk.said if hasattr(one, "why")]
    desk.die(LEFT)
    assert desk.scheduler.ledger.stats().quarantined_bytes == 0
