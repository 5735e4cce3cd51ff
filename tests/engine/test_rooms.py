"""Room for outputs: granted when there is, waited for while some may come, refused when none will."""

from __future__ import annotations

from tests.engine.desk import ARENA_BYTES, Desk
from weftline.engine import events as ev
from weftline.engine import messages as msg
from weftline.engine.rooms import lease_all
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
