"""Room for outputs: granted when there is, waited for while some may come, refused when none will."""

from __future__ import annotations

import pytest

from tests.engine.desk import ARENA_BYTES, Desk, plan_of
from tests.engine.on_device import ARENA_BYTES as NEAR_BYTES
from tests.engine.on_device import on_device
from weftline.engine import messages as msg
from weftline.engine.scheduling import events as ev
from weftline.engine.scheduling.rooms import lease_all
from weftline.pipelines.builder import Builder
from weftline.shm.lease import Ledger

MOST = ARENA_BYTES - 4096


def desk() -> Desk:
    p = Builder("one-step")
    p.output("y", p.step("a", "echo", type="json", value=p.input("x", "json"), batch={"items_max": 1}).value)
    return Desk(p)


def answered_with_room(desk: Desk, size_bytes: int) -> int:
    """Let a request be answered with a value that takes this much of the worker's arena."""
    one = desk.submit(x=1)
    desk.hear(0, msg.Need((size_bytes,)))
    block = desk.sent(msg.Room)[0].blocks[0]
    desk.answer("a", lambda x: msg.Value("json", place=block.place(0, size_bytes)))
    return one


def test_all_is_leased_or_nothing() -> None:
    ledger = Ledger()
    ledger.add_arena(1, 1 << 16)
    assert lease_all(ledger, 1, [1 << 15, 1 << 15, 64]) is None
    assert ledger.stats().blocks == 0
    blocks = lease_all(ledger, 1, [1 << 15, 1 << 15])
    assert blocks is not None and len(blocks) == 2


def test_who_asks_waits_until_somebody_has_copied_out() -> None:
    d = desk()
    first = answered_with_room(d, MOST)
    d.submit(x=2)
    d.hear(0, msg.Need((MOST,)))
    assert d.sent(msg.Room) == []
    d.tell(ev.Delivered(first))
    assert len(d.sent(msg.Room)[0].blocks) == 1


def test_what_can_never_fit_is_refused_at_once_by_name_of_the_limit() -> None:
    p = Builder("two")
    for name in ("a", "b"):
        p.output(name, p.step(name, "echo", type="json", value=p.input(f"{name}x", "json")).value)
    d = Desk(p)
    d.submit(ax=1, bx=2)  # b is at work meanwhile, and may free memory
    d.hear(0, msg.Need((ARENA_BYTES + 1,)))
    told = "outputs of 1048577 bytes do not fit; the limit is limits.arena_bytes for each worker"
    assert d.sent(msg.Room) == [msg.Room((), told)]


def test_when_nothing_will_free_memory_by_itself_waiting_ends() -> None:
    p = Builder("two")
    a = p.step("a", "echo", type="json", value=p.input("x", "json"), worker="w", retry=1)
    p.output("y", p.step("b", "echo", type="json", value=a.value, worker="w", retry=1).value)
    d = Desk(p)
    one = d.submit(x=1)
    d.hear(0, msg.Need((MOST,)))
    block = d.sent(msg.Room)[0].blocks[0]
    d.answer("a", lambda x: msg.Value("json", place=block.place(0, MOST)))
    d.hear(0, msg.Need((MOST,)))  # while what it reads fills its arena
    assert d.sent(msg.Room)[0].refused
    d.answer("b", lambda x: msg.Failure("InputError", "no room"))
    assert d.failure(one).step == "b"
    assert d.is_clean()


def test_room_that_was_granted_is_given_back_when_its_worker_dies() -> None:
    d = desk()
    d.submit(x=1)
    d.hear(0, msg.Need((MOST,)))
    assert d.scheduler.ledger.stats().blocks == 1
    d.die_and_return(0)
    assert d.scheduler.ledger.stats().blocks == 0
    d.answer("a")
    assert d.scheduler.ledger.stats().stale_total == 0  # and once only


# on a device


def near_desk(near: str = "device", ordering: str = "host", rung: str = "descriptor") -> Desk:
    """Return a desk with one step on a GPU whose output is read there, or on both sides, of the size of its input."""
    p = Builder("one-step")
    x = p.input("x", "float32[N]")
    p.output("y", p.step("a", "echo", type="float32[N]", value=x, batch={"items_max": 1}).value)
    d = Desk(on_device(plan_of(p), {"a": near}, ordering), up=False)
    size, events = (0, ()) if rung == "host" else (NEAR_BYTES, (b"e" * 64,) if ordering == "event" else ())
    d.hear(0, msg.Hello(1, ARENA_BYTES))
    d.hear(0, msg.DeviceUp("fake:0", size, rung, events=events))
    d.hear(0, msg.Ready({}))
    return d


def given(d: Desk, size_bytes: int = 100_000) -> msg.Value:
    place = d.scheduler.try_reserve([size_bytes])[0].place(0, size_bytes)
    return msg.Value("tensor", "float32", (size_bytes // 4,), place=place)


def asked(d: Desk, need: msg.Need) -> msg.Room:
    """Return the answer to a question for room."""
    d.hear(0, need)
    (room,) = d.sent(msg.Room)
    assert isinstance(room, msg.Room)
    return room


@pytest.mark.parametrize(
    ("near", "rung", "where"),
    [("device", "descriptor", (0, 1)), ("both", "descriptor", (1, 1)), ("device", "host", (1, 0))],
)
def test_room_is_set_aside_where_the_readers_are(near: str, rung: str, where: tuple[int, int]) -> None:
    d = near_desk(near, rung=rung)
    d.submit(x=given(d))
    (run,) = d.sent(msg.Run)
    assert (len(run.room), len(run.near_room)) == where and run.ready is None
    own = d.scheduler.crew.members[0]
    assert all(block.arena == own.arena for block in run.room.values())
    assert all(block.arena == own.near_arena and not block.offset % 256 for block in run.near_room.values())


def test_with_ordering_event_a_dispatch_has_an_event_while_there_are_any() -> None:
    d = near_desk(ordering="event")  # with one event
    first, _ = (d.submit(x=given(d)) for _ in range(2))
    (run,) = d.sent(msg.Run, everything=True)
    own = d.scheduler.crew.members[0].near_arena
    assert run.ready is not None and run.ready.arena == -own
    ready, near = run.ready.place(0, 64), run.near_room[0].place(0, 100_000)
    value = msg.Value("tensor", "float32", (25_000,), near=near, ready=ready)
    d.inbox[0].clear()
    d.hear(0, msg.Done(run.dispatch, (msg.Given((value,)),), (msg.Ran(1.0, 1, 1),), unfinished=True))
    (following,) = d.sent(msg.Run)
    assert following.ready is None, "the one there is marks what is not finished"
    d.hear(0, msg.Released((run.dispatch,)))
    d.tell(ev.Delivered(first))
    d.hear(0, msg.Done(following.dispatch, (msg.Failure("StepError", "no"),), (msg.Ran(1.0, 1, 1),)))
    d.submit(x=given(d))
    assert d.sent(msg.Run)[0].ready is not None


def test_what_is_asked_for_on_both_sides_is_given_together_or_not_at_all() -> None:
    d = near_desk()
    first = d.submit(x=given(d, 64))
    room = asked(d, msg.Need((MOST,), (NEAR_BYTES,)))
    assert len(room.blocks) == 1 and len(room.near) == 1
    value = msg.Value("tensor", "float32", (MOST // 4,), place=room.blocks[0].place(0, MOST))
    d.answer("a", lambda x: value)
    d.submit(x=given(d, 64))
    held = d.scheduler.ledger.stats().leased_bytes
    d.hear(0, msg.Need((MOST,), (NEAR_BYTES,)))  # there is room on the device, and none in host memory
    assert d.sent(msg.Room) == [] and d.scheduler.ledger.stats().leased_bytes == held
    d.tell(ev.Delivered(first))
    assert len(d.sent(msg.Room)[0].near) == 1


@pytest.mark.parametrize(
    ("sizes", "near", "told"),
    [
        ((), (NEAR_BYTES + 256,), "1048832 bytes do not fit; the limit is gpu.arena_bytes for each process on a GPU"),
        ((ARENA_BYTES + 1,), (256,), "1048577 bytes do not fit; the limit is limits.arena_bytes for each worker"),
        ((64,), (NEAR_BYTES, 256), "1048832 bytes do not fit; the limit is gpu.arena_bytes for each process on a GPU"),
    ],
)
def test_what_never_fits_is_refused_by_the_name_of_its_own_limit(
    sizes: tuple[int, ...], near: tuple[int, ...], told: str
) -> None:
    d = near_desk()
    d.submit(x=given(d, 64))
    held = d.scheduler.ledger.stats().leased_bytes
    assert asked(d, msg.Need(sizes, near)) == msg.Room((), f"outputs of {told}")
    assert d.scheduler.ledger.stats().leased_bytes == held
