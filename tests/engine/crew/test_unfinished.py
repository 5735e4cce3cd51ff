"""Dispatches whose work goes on on a device: what they hold until they are released, and who says wrong things."""

from __future__ import annotations

import pytest

from tests.engine.desk import Desk, plan_of
from tests.engine.on_device import SIZE_BYTES, TENSOR, answer_near, answer_small, given, hop, is_leased, on_device
from weftline.engine import messages as msg
from weftline.engine.crew.unfinished import UNFINISHED_MAX, leaves, unmarked
from weftline.engine.scheduling import events as ev
from weftline.pipelines.builder import Builder
from weftline.shm.block import Block
from weftline.shm.lease import EVENT_BYTES


def begun(desk: Desk) -> tuple[int, msg.Run]:
    """A request whose first step was answered, unfinished."""
    one = desk.submit(x=given(desk))
    return one, answer_near(desk, "a")


def test_results_go_on_at_once_and_what_was_read_stays_leased_until_the_device_is_done() -> None:
    desk = Desk(hop("event"))
    one, run = begun(desk)
    read = run.items[0].inputs[0].keys[0]
    assert desk.running() == ["b"] and is_leased(desk, read)
    desk.hear(0, msg.Released((run.dispatch,)))
    assert not is_leased(desk, read)
    answer_small(desk, "b")
    assert desk.is_clean() and desk.ended[one]


def test_what_is_being_written_is_leased_to_nobody_else_though_nobody_wants_it_any_more() -> None:
    desk = Desk(hop("event"))
    one, run = begun(desk)
    answer_small(desk, "b")
    block, event = run.near_room[0].key, run.ready.key  # type: ignore[union-attr]
    assert one in desk.ended and is_leased(desk, block) and is_leased(desk, event)
    assert not desk.scheduler.idle()
    desk.hear(0, msg.Released((run.dispatch,)))
    assert not is_leased(desk, block) and not is_leased(desk, event)
    assert desk.is_clean()


def test_with_ordering_host_there_are_no_events_and_nothing_is_kept() -> None:
    desk = Desk(hop("host"))
    desk.submit(x=given(desk))
    run = answer_near(desk, "a", unfinished=False)
    assert run.ready is None and not is_leased(desk, run.items[0].inputs[0].keys[0])
    answer_small(desk, "b")
    assert desk.is_clean()


def test_a_worker_whose_device_is_far_behind_is_given_nothing_more() -> None:
    desk = Desk(hop("event", arena_bytes=2 * UNFINISHED_MAX * SIZE_BYTES))
    runs = []
    for _ in range(UNFINISHED_MAX):
        runs.append(begun(desk)[1])
        answer_small(desk, "b")
    desk.submit(x=given(desk))
    assert desk.running() == []
    desk.hear(0, msg.Released((runs[0].dispatch,)))
    assert desk.running() == ["a"]


@pytest.mark.parametrize("released", [99, "twice", "running"])
def test_a_worker_that_releases_what_it_had_not_left_unfinished_is_killed(released: int | str) -> None:
    desk = Desk(hop("event"))
    _, run = begun(desk)
    if released == "twice":
        desk.hear(0, msg.Released((run.dispatch,)))
    if released == "running":
        desk.submit(x=given(desk))
    wrong = {"twice": run.dispatch, "running": desk.inbox[0][-1].dispatch if desk.inbox[0] else 0}.get(released, 99)  # type: ignore[call-overload]
    desk.hear(0, msg.Released((wrong,)))
    assert desk.kills() == ["it released a dispatch that it had not left unfinished"]


def test_what_an_earlier_incarnation_releases_late_is_ignored() -> None:
    desk = Desk(hop("event"))
    _, run = begun(desk)
    arena = desk.arena[0]
    desk.die_and_return(0)
    desk.tell(ev.FromWorker(0, arena, msg.Released((run.dispatch,))))
    assert desk.said == [] and desk.scheduler.ledger.stats().stale_total == 0


def test_a_tensor_that_is_not_finished_comes_with_its_event() -> None:
    desk = Desk(hop("event"))
    desk.submit(x=given(desk))
    run = desk.inbox[0][0]
    value = msg.Value("tensor", "uint8", (SIZE_BYTES,), near=run.near_room[0].place(0, SIZE_BYTES))
    desk.hear(0, msg.Done(run.dispatch, (msg.Given((value,)),), (msg.Ran(1.0, 1, 1),), unfinished=True))
    assert desk.kills() == ["it gave a tensor that is not finished without its event"]


def test_nothing_is_left_unfinished_that_no_event_marks() -> None:
    desk = Desk(hop("host"))
    desk.submit(x=given(desk))
    answer_near(desk, "a", unfinished=True)
    assert desk.kills() == ["it left work unfinished that no event marks"]


def test_a_suspect_has_no_event_so_that_its_worker_waits_for_the_device() -> None:
    desk = Desk(hop("event"))
    desk.submit(x=given(desk))
    assert desk.inbox[0][0].ready is not None
    desk.die_and_return(0)
    assert desk.inbox[0][0].suspect and desk.inbox[0][0].ready is None


def test_a_suspect_waits_until_its_worker_has_nothing_unfinished() -> None:
    p = Builder("two-instances")
    a = p.step("a", "echo", type=TENSOR, value=p.input("x", TENSOR), instances=2, batch={"items_max": 1})
    p.output("y", p.step("b", "echo", type=TENSOR, value=a.value).value)
    desk = Desk(on_device(plan_of(p), {"a": "device"}, "event"))
    _, run = begun(desk)  # by worker 0
    answer_small(desk, "b")
    deadly = [desk.submit(x=given(desk)) for _ in range(2)]
    assert desk.inbox[0] and desk.inbox[1]
    desk.answer("a", lambda x: msg.Failure("StepError", "drawn"), worker=0)
    desk.die(1)  # and worker 0 has nothing to run, but its device is at work
    assert desk.inbox[0] == [] and deadly[1] not in desk.ended
    desk.hear(0, msg.Released((run.dispatch,)))
    assert desk.inbox[0][0].suspect


def test_a_device_that_is_busy_for_too_long_costs_its_worker_its_life() -> None:
    desk = Desk(hop("event"))
    begun(desk)
    answer_small(desk, "b")
    desk.advance(desk.plan.steps[0].run_max_ms + 1000.0)
    why = [one.why for one in desk.said if hasattr(one, "why")]
    assert "its device was busy for longer than run_max_ms" in why


def test_each_dispatch_has_its_time_from_the_end_of_the_one_before() -> None:
    desk = Desk(hop("event"))
    (_, first), (_, second) = begun(desk), begun(desk)
    limit_ms = desk.plan.steps[0].run_max_ms
    answer_small(desk, "b")
    answer_small(desk, "b")
    desk.advance(0.8 * limit_ms)
    desk.hear(0, msg.Released((first.dispatch,)))
    desk.advance(0.8 * limit_ms)
    assert not any(hasattr(one, "why") for one in desk.said)
    desk.hear(0, msg.Released((second.dispatch,)))
    assert desk.is_clean()


def test_only_what_was_leased_for_it_must_be_marked() -> None:
    own, other, event = Block(3, 0, 512, 1), Block(4, 0, 512, 2), Block(-3, 64, EVENT_BYTES, 3)
    marked = msg.Value("tensor", "uint8", (8,), near=own.place(0, 8), ready=event.place(0, EVENT_BYTES))
    bare, passed_on = (msg.Value("tensor", "uint8", (8,), near=block.place(0, 8)) for block in (own, other))
    wrong = msg.Value("tensor", "uint8", (8,), near=own.place(0, 8), ready=Block(-3, 0, 64, 4).place(0, 64))
    for value, found in ((marked, False), (bare, True), (passed_on, False), (wrong, True)):
        for given_as in (value, msg.Value("list", items=(passed_on, value))):
            done = msg.Done(1, (msg.Failure("StepError", ""), msg.Given((given_as,))), (), unfinished=True)
            assert unmarked(done, (own,), event) is found


def test_lists_are_read_by_their_elements() -> None:
    one, two = msg.Value("json", data=b"1"), msg.Value("json", data=b"2")
    assert list(leaves([one, msg.Value("list", items=(two, msg.Value("list", items=(one,))))])) == [one, two, one]


def test_who_needs_room_in_a_fragmented_arena_waits_for_what_the_device_is_at() -> None:
    """Three tensors fill it; the first and the last are free again, and the one between them is being written."""
    desk = Desk(hop("event", arena_bytes=3 * SIZE_BYTES))
    runs = []
    for _ in range(3):
        runs.append(begun(desk)[1])
        answer_small(desk, "b")
    desk.hear(0, msg.Released((runs[0].dispatch, runs[2].dispatch)))
    desk.submit(x=given(desk))
    desk.hear(0, msg.Need((), (2 * SIZE_BYTES - 256,)))
    assert desk.sent(msg.Room) == []
    desk.hear(0, msg.Released((runs[1].dispatch,)))
    assert [block.size_bytes for block in desk.sent(msg.Room)[0].near] == [2 * SIZE_BYTES - 256]


def test_when_only_a_caller_s_tensor_is_in_the_way_room_is_refused_by_name_of_its_key() -> None:
    """What a waits for is held by its own request, and nothing else goes on."""
    desk = Desk(hop("event", arena_bytes=2 * SIZE_BYTES))
    desk.submit(x=given(desk))
    desk.hear(0, msg.Need((), (2 * SIZE_BYTES,)))  # beside the room that it was given beforehand
    (room,) = desk.sent(msg.Room)
    assert room.refused == "outputs of 131072 bytes do not fit; the limit is gpu.arena_bytes for each process on a GPU"
