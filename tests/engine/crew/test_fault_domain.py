"""What falls with a worker that dies: who waits for it on the device, and who needs what it had not finished."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.engine.desk import Desk, plan_of
from tests.engine.on_device import TENSOR, answer_near, answer_small, given, hop, on_device, row
from weftline.engine import messages as msg
from weftline.engine.crew.fault_domain import Fallen, Past, fallen
from weftline.engine.crew.recovery import SPARED_MAX, Recovery
from weftline.engine.scheduling import events as ev
from weftline.pipelines.builder import Builder
from weftline.shm.block import Block
from weftline.shm.lease import Ledger

LEFT, RIGHT = 0, 1
WAITS = "it waits on the device for work of a worker that died"


def test_with_ordering_host_a_reader_goes_on_when_the_one_that_gave_it_dies() -> None:
    desk = Desk(hop("host"))
    one = desk.submit(x=given(desk))
    answer_near(desk, "a", unfinished=False)
    desk.die(LEFT)
    assert desk.kills() == [] and desk.running() == ["b"]
    answer_small(desk, "b")
    assert isinstance(desk.ended[one], ev.Finish) and desk.is_clean()


def test_a_reader_of_what_was_not_finished_is_killed_and_the_request_fails_by_name_of_the_step() -> None:
    desk = Desk(hop("event"))
    one = desk.submit(x=given(desk))
    answer_near(desk, "a")
    desk.die(LEFT)
    assert desk.kills() == [WAITS]
    told = desk.failure(one)
    assert (told.error, told.step) == ("WorkerDied", "a")
    assert told.message == "its worker died (signal 9) before its work on the device was finished"
    desk.die(RIGHT)
    assert desk.is_clean()


def test_a_reader_of_what_was_finished_goes_on() -> None:
    desk = Desk(hop("event"))
    one = desk.submit(x=given(desk))
    run = answer_near(desk, "a")
    desk.hear(LEFT, msg.Released((run.dispatch,)))
    desk.die(LEFT)
    assert desk.kills() == []
    answer_small(desk, "b")
    assert isinstance(desk.ended[one], ev.Finish) and desk.is_clean()


def test_what_was_finished_is_read_later_without_the_event_that_died() -> None:
    desk = Desk(hop("event"))
    busy = desk.submit(x=given(desk))
    first = answer_near(desk, "a")
    waits = desk.submit(x=given(desk))
    second = answer_near(desk, "a")
    desk.hear(LEFT, msg.Released((first.dispatch, second.dispatch)))
    desk.die(LEFT)
    answer_small(desk, "b")
    value = desk.inbox[RIGHT][0].items[0].inputs[0]
    assert value.near is not None and value.ready is None
    answer_small(desk, "b")
    assert isinstance(desk.ended[busy], ev.Finish) and isinstance(desk.ended[waits], ev.Finish)
    assert desk.is_clean()


def test_what_was_not_finished_on_the_device_is_read_in_host_memory_where_it_lies_too() -> None:
    desk = Desk(hop("event", "both"))
    one = desk.submit(x=given(desk))
    answer_near(desk, "a", host=True)
    told = desk.inbox[RIGHT][0].items[0].inputs[0]
    assert told.place is not None and told.near is not None and told.ready is not None
    desk.die(LEFT)
    assert desk.kills() == [WAITS] and one not in desk.ended
    desk.die_and_return(RIGHT)
    value = desk.inbox[RIGHT][0].items[0].inputs[0]
    assert value.place == told.place and value.near is None and value.ready is None
    answer_small(desk, "b")
    assert isinstance(desk.ended[one], ev.Finish)
    desk.die_and_return(LEFT)
    assert desk.is_clean()


def test_a_reader_in_host_memory_of_what_the_device_had_not_finished_goes_on() -> None:
    desk = Desk(hop("event", "both", takes=False))
    one = desk.submit(x=given(desk))
    answer_near(desk, "a", host=True)
    passed = desk.inbox[RIGHT][0].items[0].inputs[0]
    desk.die(LEFT)
    assert desk.kills() == [] and desk.running() == ["b"]
    desk.answer("b", lambda x: passed)  # what it passes on is what is left of it
    end = desk.ended[one]
    assert isinstance(end, ev.Finish) and end.outputs["y"] == msg.Value(
        "tensor", "uint8", passed.shape, place=passed.place
    )
    assert desk.is_clean()


def test_a_reader_on_the_host_whose_own_work_is_unfinished_goes_on_too() -> None:
    """Its device works on what it made of the copy in host memory, and reads nothing of who died."""
    made = row("event")
    first, second, third = made.steps
    plan = replace(made, steps=(replace(first, near_outputs={"value": "both"}), replace(second, near_inputs=()), third))
    desk = Desk(plan)
    one = desk.submit(x=given(desk))
    answer_near(desk, "a", host=True)
    run = answer_near(desk, "b")
    desk.die(0)
    assert desk.kills() == []
    desk.hear(1, msg.Released((run.dispatch,)))
    answer_small(desk, "c")
    assert isinstance(desk.ended[one], ev.Finish) and desk.is_clean()


def test_what_was_finished_is_passed_on_without_the_event_that_died() -> None:
    desk = Desk(row("event"))
    one = desk.submit(x=given(desk))
    run = answer_near(desk, "a")
    desk.hear(0, msg.Released((run.dispatch,)))
    given_before = desk.inbox[1][0].items[0].inputs[0]
    assert given_before.ready is not None
    desk.die(0)
    desk.answer("b", lambda x: given_before)
    value = desk.inbox[2][0].items[0].inputs[0]
    assert value.near == given_before.near and value.ready is None
    answer_small(desk, "c")
    assert isinstance(desk.ended[one], ev.Finish) and desk.is_clean()


def test_what_ended_with_a_worker_is_forgotten_with_its_arenas() -> None:
    ledger = Ledger()
    past = Past(ledger)
    ledger.add_arena(3, 1024, 256)
    block = ledger.try_lease(3, 256)
    assert block is not None
    past.add(Fallen({}, 3))
    past.add(Fallen({}, 4))
    assert [what.arena for what in past._fallen] == [3, 4]
    ledger.release((3, block.offset, block.generation))
    past.add(Fallen({}, 5))
    assert [what.arena for what in past._fallen] == [5]


def test_a_request_that_still_waits_for_the_reader_fails_and_the_reader_of_others_lives() -> None:
    desk = Desk(hop("event"))
    runs, ones = [], []
    for _ in range(2):
        ones.append(desk.submit(x=given(desk)))
        runs.append(answer_near(desk, "a"))
    desk.hear(LEFT, msg.Released((runs[0].dispatch,)))  # b runs what is finished, and the other waits for it
    desk.die(LEFT)
    assert desk.kills() == []
    assert desk.failure(ones[1]).step == "a" and ones[0] not in desk.ended
    answer_small(desk, "b")
    assert isinstance(desk.ended[ones[0]], ev.Finish) and desk.is_clean()


def test_mates_of_the_one_that_waits_are_run_again_and_nothing_is_held_against_them() -> None:
    """Two producers give a reader its batch; one of them dies."""
    p = Builder("two-producers")
    x = p.input("x", TENSOR)
    a = p.step("a", "echo", type=TENSOR, value=x, instances=2, batch={"items_max": 1})
    b = p.step("b", "echo", type=TENSOR, value=a.value, batch={"items_max": 2, "wait_max_ms": 5})
    p.output("y", b.value)
    desk = Desk(on_device(plan_of(p), {"a": "device"}, "event"))
    reader = next(place for place, one in enumerate(desk.plan.workers) if "b" in one.steps)
    ones = [desk.submit(x=given(desk)) for _ in range(2)]
    producers = [worker for worker in desk.inbox if worker != reader]
    for _ in producers:
        answer_near(desk, "a")
    desk.advance(6)
    assert len(desk.inbox[reader][0].items) == 2
    desk.die(producers[0])
    assert desk.kills() == [WAITS]
    assert desk.failure(ones[0]).step == "a" and ones[1] not in desk.ended
    desk.die_and_return(reader)
    run = desk.inbox[reader][0]
    assert len(run.items) == 1 and not run.suspect
    task = desk.scheduler._tasks.live[run.items[0].id]
    assert (task.deaths, task.spared, task.attempts) == (0, 1, 2)
    answer_small(desk, "b")
    timings = desk.ended[ones[1]].timings  # type: ignore[union-attr]
    assert [(one.step, one.outcome) for one in timings] == [("a", "ok"), ("b", "lost"), ("b", "ok")]
    assert desk.scheduler.counters.quarantined == 0


def test_an_innocent_is_not_taken_for_a_killer_however_often_its_worker_is_taken() -> None:
    desk = Desk(hop("event"))
    desk.submit(x=given(desk))
    task = next(iter(desk.scheduler._tasks.live.values()))
    recovery = Recovery(desk.plan)
    for _ in range(SPARED_MAX):
        assert recovery.after_loss([task], "it waits").groups == [[task]]
    assert task.deaths == 0
    verdict = recovery.after_loss([task], "it waits")
    assert [why for _, why in verdict.failed] == ["9 workers were killed under it (it waits); it is not tried again"]
    assert not verdict.kept_out


def test_a_stand_in_takes_over_for_a_step_whose_input_cannot_be_had() -> None:
    p = Builder("stand-in")
    x = p.input("x", TENSOR)
    a = p.step("a", "echo", type=TENSOR, value=x, worker="left")
    p.step("other", "echo", type=TENSOR, value=x, worker="third")
    p.output("y", p.step("b", "echo", type=TENSOR, value=a.value, worker="right", fallback="other").value)
    desk = Desk(on_device(plan_of(p), {"a": "device"}, "event"))
    one = desk.submit(x=given(desk))
    answer_near(desk, "a")
    desk.die(next(place for place, worker in enumerate(desk.plan.workers) if worker.name == "left"))
    assert desk.kills() == [WAITS]
    answer_small(desk, "other")
    assert isinstance(desk.ended[one], ev.Finish)
    desk.die(desk.at("b"))
    assert desk.is_clean()


def test_a_whole_row_of_workers_falls_one_after_the_other() -> None:
    """c waits for b, which waits for a; nobody hangs, and each is killed when the one before it has died."""
    desk = Desk(row("event"))
    one = desk.submit(x=given(desk))
    answer_near(desk, "a")
    answer_near(desk, "b")
    desk.die(0)
    assert desk.kills() == [WAITS]  # b's worker: its unfinished dispatch waits for a's event
    desk.die(1)
    assert desk.kills() == [WAITS]
    assert desk.failure(one).step == "b"
    desk.die(2)
    assert desk.is_clean()


def test_memory_shared_by_handle_ends_with_its_worker() -> None:
    desk = Desk(hop("host"), rung="handle")
    one = desk.submit(x=given(desk))
    answer_near(desk, "a", unfinished=False)
    desk.die(LEFT)
    assert desk.kills() == []  # nobody waits for anything
    assert desk.failure(one).message == "a tensor on the device ended with the worker that held it (signal 9)"
    answer_small(desk, "b")  # what it read cannot be trusted, and nobody takes it
    assert desk.is_clean()


def test_what_lies_in_host_memory_too_is_read_there_when_the_device_s_copy_is_gone() -> None:
    desk = Desk(hop("host", "both"), rung="handle")
    ones = []
    for _ in range(2):
        ones.append(desk.submit(x=given(desk)))
        answer_near(desk, "a", unfinished=False, host=True)
    desk.die(LEFT)
    answer_small(desk, "b")
    value = desk.inbox[RIGHT][0].items[0].inputs[0]
    assert value.near is None and value.place is not None
    answer_small(desk, "b")
    assert all(isinstance(desk.ended[one], ev.Finish) for one in ones) and desk.is_clean()


def test_a_worker_whose_device_still_reads_what_is_gone_falls_too() -> None:
    desk = Desk(row("event"), rung="handle")
    desk.submit(x=given(desk))
    run = answer_near(desk, "a")
    desk.hear(0, msg.Released((run.dispatch,)))
    answer_near(desk, "b")
    desk.die(0)
    assert desk.kills() == [WAITS]
    desk.die(1)
    desk.die(2)
    assert desk.is_clean()


NEAR, EVENT, OLD = Block(3, 0, 512, 1), Block(-3, 0, 64, 2), Block(-3, 64, 64, 3)


def tensor(ready: Block | None = None, place: Block | None = None) -> msg.Value:
    return msg.Value(
        "tensor", "uint8", (8,), near=NEAR.place(0, 8), ready=ready and ready.place(0, 64),
        place=place and place.place(0, 8),
    )  # fmt: skip


@pytest.mark.parametrize(("gone", "value", "lost"), [
    (False, tensor(EVENT), True),
    (False, tensor(OLD), False),
    (False, tensor(), False),
    (True, tensor(), True),
    (True, tensor(place=Block(2, 0, 64, 9)), False),
    (True, msg.Value("json", data=b"1"), False),
    (False, msg.Value("list", items=(tensor(), tensor(EVENT))), True),
])  # fmt: skip
def test_what_cannot_be_had(gone: bool, value: msg.Value, lost: bool) -> None:
    assert Fallen({(-3, 0, 2): 0}, 3, gone).has(value) is lost


def test_what_is_left_is_the_same_object_when_nothing_of_it_fell() -> None:
    what = Fallen({(-3, 0, 2): 0}, 3)
    for value in (tensor(), msg.Value("json", data=b"1"), msg.Value("list", items=(tensor(), tensor()))):
        assert what.left_of(value) is value
    left = what.left_of(msg.Value("list", items=(tensor(), tensor(OLD))))
    assert left.items == (tensor(), tensor())


def test_a_worker_without_a_device_takes_nothing_along() -> None:
    assert not fallen((), 0, "")
