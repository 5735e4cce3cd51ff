"""Test lost devices: workers and requests that depend on the unfinished device work of a dead worker."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.engine.on_device import TENSOR, answer_on_device, answer_small, given, hop, on_device, row
from tests.engine.scheduler_harness import SchedulerHarness, plan_of
from weftline.engine.protocol import messages as msg
from weftline.engine.scheduler import events as ev
from weftline.engine.scheduler import lost_devices
from weftline.engine.scheduler.lost_devices import LostDevice, lost_with
from weftline.engine.scheduler.recovery import SPARED_MAX, Recovery
from weftline.pipelines.spec.builder import Builder
from weftline.shm.block import Block

LEFT, RIGHT = 0, 1
WAITS = "it waits on the device for the work of a dead worker"


def test_with_ordering_host_a_reader_survives_its_writer() -> None:
    harness = SchedulerHarness(hop("host"))
    one = harness.submit(x=given(harness))
    answer_on_device(harness, "a", unfinished=False)
    harness.die(LEFT)
    assert harness.kill_reasons() == [] and harness.running() == ["b"]
    answer_small(harness, "b")
    assert isinstance(harness.ended[one], ev.Finish) and harness.is_clean()


def test_a_reader_of_unfinished_device_work_is_killed() -> None:
    harness = SchedulerHarness(hop("event"))
    one = harness.submit(x=given(harness))
    answer_on_device(harness, "a")
    harness.die(LEFT)
    assert harness.kill_reasons() == [WAITS]
    reported = harness.failure(one)
    assert (reported.error, reported.step) == ("WorkerDied", "a")
    assert reported.message == "the worker died (signal 9) before its work on the device was finished"
    harness.die(RIGHT)
    assert harness.is_clean()


def test_a_reader_of_what_was_finished_goes_on() -> None:
    harness = SchedulerHarness(hop("event"))
    one = harness.submit(x=given(harness))
    run = answer_on_device(harness, "a")
    harness.receive(LEFT, msg.Released((run.dispatch,)))
    harness.die(LEFT)
    assert harness.kill_reasons() == []
    answer_small(harness, "b")
    assert isinstance(harness.ended[one], ev.Finish) and harness.is_clean()


def test_what_was_finished_is_read_later_without_the_event_that_died() -> None:
    harness = SchedulerHarness(hop("event"))
    busy = harness.submit(x=given(harness))
    first = answer_on_device(harness, "a")
    waits = harness.submit(x=given(harness))
    second = answer_on_device(harness, "a")
    harness.receive(LEFT, msg.Released((first.dispatch, second.dispatch)))
    harness.die(LEFT)
    answer_small(harness, "b")
    value = harness.inbox[RIGHT][0].items[0].inputs[0]
    assert value.device_place is not None and value.ready is None
    answer_small(harness, "b")
    assert isinstance(harness.ended[busy], ev.Finish) and isinstance(harness.ended[waits], ev.Finish)
    assert harness.is_clean()


def test_unfinished_device_work_is_read_from_its_host_copy() -> None:
    harness = SchedulerHarness(hop("event", "both"))
    one = harness.submit(x=given(harness))
    answer_on_device(harness, "a", host=True)
    reported = harness.inbox[RIGHT][0].items[0].inputs[0]
    assert reported.place is not None and reported.device_place is not None and reported.ready is not None
    harness.die(LEFT)
    assert harness.kill_reasons() == [WAITS] and one not in harness.ended
    harness.die_and_return(RIGHT)
    value = harness.inbox[RIGHT][0].items[0].inputs[0]
    assert value.place == reported.place and value.device_place is None and value.ready is None
    answer_small(harness, "b")
    assert isinstance(harness.ended[one], ev.Finish)
    harness.die_and_return(LEFT)
    assert harness.is_clean()


def test_a_host_reader_of_unfinished_device_work_goes_on() -> None:
    harness = SchedulerHarness(hop("event", "both", takes=False))
    one = harness.submit(x=given(harness))
    answer_on_device(harness, "a", host=True)
    passed = harness.inbox[RIGHT][0].items[0].inputs[0]
    harness.die(LEFT)
    assert harness.kill_reasons() == [] and harness.running() == ["b"]
    harness.answer("b", lambda x: passed)  # what it passes on is what is left of it
    end = harness.ended[one]
    assert isinstance(end, ev.Finish) and end.outputs["y"] == msg.Value(
        "tensor", "uint8", passed.shape, place=passed.place
    )
    assert harness.is_clean()


def test_a_reader_on_the_host_whose_own_work_is_unfinished_goes_on_too() -> None:
    """The unfinished device work reads the host copy and no memory of the dead worker."""
    made = row("event")
    first, second, third = made.steps
    plan = replace(
        made, steps=(replace(first, device_outputs={"value": "both"}), replace(second, device_inputs=()), third)
    )
    harness = SchedulerHarness(plan)
    one = harness.submit(x=given(harness))
    answer_on_device(harness, "a", host=True)
    run = answer_on_device(harness, "b")
    harness.die(0)
    assert harness.kill_reasons() == []
    harness.receive(1, msg.Released((run.dispatch,)))
    answer_small(harness, "c")
    assert isinstance(harness.ended[one], ev.Finish) and harness.is_clean()


def test_what_was_finished_is_passed_on_without_the_event_that_died() -> None:
    harness = SchedulerHarness(row("event"))
    one = harness.submit(x=given(harness))
    run = answer_on_device(harness, "a")
    harness.receive(0, msg.Released((run.dispatch,)))
    given_before = harness.inbox[1][0].items[0].inputs[0]
    assert given_before.ready is not None
    harness.die(0)
    harness.answer("b", lambda x: given_before)
    value = harness.inbox[2][0].items[0].inputs[0]
    assert value.device_place == given_before.device_place and value.ready is None
    answer_small(harness, "c")
    assert isinstance(harness.ended[one], ev.Finish) and harness.is_clean()


def test_what_ended_with_a_worker_is_forgotten_with_its_arenas() -> None:
    state = SchedulerHarness(hop("event"), up=False).scheduler.state
    ledger = state.ledger
    ledger.add_arena(33, 1024, 256)
    block = ledger.try_lease(33, 256)
    assert block is not None
    lost_devices.add(state, LostDevice({}, 33))
    lost_devices.add(state, LostDevice({}, 34))
    assert [what.arena for what in state.lost_devices] == [33, 34]
    ledger.release((33, block.offset, block.generation))
    lost_devices.add(state, LostDevice({}, 35))
    assert [what.arena for what in state.lost_devices] == [35]


def test_a_waiting_request_fails_and_the_reader_of_others_lives() -> None:
    harness = SchedulerHarness(hop("event"))
    runs, ones = [], []
    for _ in range(2):
        ones.append(harness.submit(x=given(harness)))
        runs.append(answer_on_device(harness, "a"))
    harness.receive(LEFT, msg.Released((runs[0].dispatch,)))  # b runs what is finished, and the other waits for it
    harness.die(LEFT)
    assert harness.kill_reasons() == []
    assert harness.failure(ones[1]).step == "a" and ones[0] not in harness.ended
    answer_small(harness, "b")
    assert isinstance(harness.ended[ones[0]], ev.Finish) and harness.is_clean()


def test_mates_of_a_waiting_item_run_again_without_blame() -> None:
    """Two producers fill the batch of a reader; one of them dies."""
    p = Builder("two-producers")
    x = p.input("x", TENSOR)
    a = p.step("a", "echo", type=TENSOR, value=x, instances=2, batch={"items_max": 1})
    b = p.step("b", "echo", type=TENSOR, value=a.value, batch={"items_max": 2, "wait_max_ms": 5})
    p.output("y", b.value)
    harness = SchedulerHarness(on_device(plan_of(p), {"a": "device"}, "event"))
    reader = next(place for place, one in enumerate(harness.plan.workers) if "b" in one.steps)
    ones = [harness.submit(x=given(harness)) for _ in range(2)]
    producers = [worker for worker in harness.inbox if worker != reader]
    for _ in producers:
        answer_on_device(harness, "a")
    harness.advance(6)
    assert len(harness.inbox[reader][0].items) == 2
    harness.die(producers[0])
    assert harness.kill_reasons() == [WAITS]
    assert harness.failure(ones[0]).step == "a" and ones[1] not in harness.ended
    harness.die_and_return(reader)
    run = harness.inbox[reader][0]
    assert len(run.items) == 1 and not run.suspect
    task = harness.scheduler.state.live[run.items[0].id]
    assert (task.deaths, task.spared, task.attempts) == (0, 1, 2)
    answer_small(harness, "b")
    timings = harness.ended[ones[1]].timings  # type: ignore[union-attr]
    assert [(one.step, one.outcome) for one in timings] == [("a", "ok"), ("b", "lost"), ("b", "ok")]
    assert harness.scheduler.counters.quarantined == 0


def test_an_innocent_item_is_not_blamed_for_deaths_of_its_worker() -> None:
    harness = SchedulerHarness(hop("event"))
    harness.submit(x=given(harness))
    task = next(iter(harness.scheduler.state.live.values()))
    recovery = Recovery()
    for _ in range(SPARED_MAX):
        assert recovery.after_loss([task], "it waits").groups == [[task]]
    assert task.deaths == 0
    verdict = recovery.after_loss([task], "it waits")
    assert [why for _, why in verdict.failed] == [
        "9 workers were killed while running this item (it waits); it is not retried"
    ]
    assert not verdict.kept_out


def test_a_fallback_answers_for_a_step_whose_input_is_lost() -> None:
    p = Builder("stand-in")
    x = p.input("x", TENSOR)
    a = p.step("a", "echo", type=TENSOR, value=x, worker="left")
    p.step("other", "echo", type=TENSOR, value=x, worker="third")
    p.output("y", p.step("b", "echo", type=TENSOR, value=a.value, worker="right", fallback="other").value)
    harness = SchedulerHarness(on_device(plan_of(p), {"a": "device"}, "event"))
    one = harness.submit(x=given(harness))
    answer_on_device(harness, "a")
    harness.die(next(place for place, worker in enumerate(harness.plan.workers) if worker.name == "left"))
    assert harness.kill_reasons() == [WAITS]
    answer_small(harness, "other")
    assert isinstance(harness.ended[one], ev.Finish)
    harness.die(harness.worker_running("b"))
    assert harness.is_clean()


def test_a_whole_row_of_workers_falls_one_after_the_other() -> None:
    """c waits for b, which waits for a; each worker is killed when the one before it has died, and none hangs."""
    harness = SchedulerHarness(row("event"))
    one = harness.submit(x=given(harness))
    answer_on_device(harness, "a")
    answer_on_device(harness, "b")
    harness.die(0)
    assert harness.kill_reasons() == [WAITS]  # b's worker: its unfinished dispatch waits for a's event
    harness.die(1)
    assert harness.kill_reasons() == [WAITS]
    assert harness.failure(one).step == "b"
    harness.die(2)
    assert harness.is_clean()


def test_memory_shared_by_handle_ends_with_its_worker() -> None:
    harness = SchedulerHarness(hop("host"), share_mode="handle")
    one = harness.submit(x=given(harness))
    answer_on_device(harness, "a", unfinished=False)
    harness.die(LEFT)
    assert harness.kill_reasons() == []  # no work waits
    assert harness.failure(one).message == "a device tensor was lost when its worker died (signal 9)"
    answer_small(harness, "b")  # its inputs cannot be trusted, and the result is dropped
    assert harness.is_clean()


def test_a_host_copy_is_read_when_the_device_copy_is_gone() -> None:
    harness = SchedulerHarness(hop("host", "both"), share_mode="handle")
    ones = []
    for _ in range(2):
        ones.append(harness.submit(x=given(harness)))
        answer_on_device(harness, "a", unfinished=False, host=True)
    harness.die(LEFT)
    answer_small(harness, "b")
    value = harness.inbox[RIGHT][0].items[0].inputs[0]
    assert value.device_place is None and value.place is not None
    answer_small(harness, "b")
    assert all(isinstance(harness.ended[one], ev.Finish) for one in ones) and harness.is_clean()


def test_a_worker_whose_device_still_reads_what_is_gone_falls_too() -> None:
    harness = SchedulerHarness(row("event"), share_mode="handle")
    harness.submit(x=given(harness))
    run = answer_on_device(harness, "a")
    harness.receive(0, msg.Released((run.dispatch,)))
    answer_on_device(harness, "b")
    harness.die(0)
    assert harness.kill_reasons() == [WAITS]
    harness.die(1)
    harness.die(2)
    assert harness.is_clean()


NEAR, EVENT, OLD = Block(3, 0, 512, 1), Block(-3, 0, 64, 2), Block(-3, 64, 64, 3)


def tensor(ready: Block | None = None, place: Block | None = None) -> msg.Value:
    return msg.Value(
        "tensor", "uint8", (8,), device_place=NEAR.place(0, 8), ready=ready and ready.place(0, 64),
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
    assert LostDevice({(-3, 0, 2): 0}, 3, gone).has(value) is lost


def test_what_is_left_is_the_same_object_when_nothing_of_it_fell() -> None:
    what = LostDevice({(-3, 0, 2): 0}, 3)
    for value in (tensor(), msg.Value("json", data=b"1"), msg.Value("list", items=(tensor(), tensor()))):
        assert what.remaining(value) is value
    left = what.remaining(msg.Value("list", items=(tensor(), tensor(OLD))))
    assert left.items == (tensor(), tensor())


def test_a_worker_without_a_device_takes_nothing_along() -> None:
    assert not lost_with((), 0, "")
