"""Test dispatches with unfinished device work: leases until release, and invalid messages."""

from __future__ import annotations

import pytest

from tests.engine.on_device import SIZE_BYTES, TENSOR, answer_on_device, answer_small, given, hop, is_leased, on_device
from tests.engine.scheduler_harness import SchedulerHarness, plan_of
from weftline.engine.protocol import messages as msg
from weftline.engine.scheduler import events as ev
from weftline.engine.scheduler.device_work import UNFINISHED_MAX, leaves, unmarked
from weftline.pipelines.spec.builder import Builder
from weftline.shm.block import Block
from weftline.shm.lease import EVENT_BYTES


def begun(harness: SchedulerHarness) -> tuple[int, msg.RunBatch]:
    """A request whose first step was answered, unfinished."""
    one = harness.submit(x=given(harness))
    return one, answer_on_device(harness, "a")


def test_inputs_stay_leased_until_the_device_has_finished() -> None:
    harness = SchedulerHarness(hop("event"))
    one, run = begun(harness)
    read = run.items[0].inputs[0].keys[0]
    assert harness.running() == ["b"] and is_leased(harness, read)
    harness.receive(0, msg.Released((run.dispatch,)))
    assert not is_leased(harness, read)
    answer_small(harness, "b")
    assert harness.is_clean() and harness.ended[one]


def test_a_block_being_written_is_not_leased_again_after_its_request_ended() -> None:
    harness = SchedulerHarness(hop("event"))
    one, run = begun(harness)
    answer_small(harness, "b")
    block, event = run.device_output_blocks[0].key, run.ready.key  # type: ignore[union-attr]
    assert one in harness.ended and is_leased(harness, block) and is_leased(harness, event)
    assert not harness.scheduler.idle()
    harness.receive(0, msg.Released((run.dispatch,)))
    assert not is_leased(harness, block) and not is_leased(harness, event)
    assert harness.is_clean()


def test_with_ordering_host_there_are_no_events_and_nothing_is_kept() -> None:
    harness = SchedulerHarness(hop("host"))
    harness.submit(x=given(harness))
    run = answer_on_device(harness, "a", unfinished=False)
    assert run.ready is None and not is_leased(harness, run.items[0].inputs[0].keys[0])
    answer_small(harness, "b")
    assert harness.is_clean()


def test_a_worker_whose_device_is_far_behind_receives_no_dispatch() -> None:
    harness = SchedulerHarness(hop("event", arena_bytes=2 * UNFINISHED_MAX * SIZE_BYTES))
    runs = []
    for _ in range(UNFINISHED_MAX):
        runs.append(begun(harness)[1])
        answer_small(harness, "b")
    harness.submit(x=given(harness))
    assert harness.running() == []
    harness.receive(0, msg.Released((runs[0].dispatch,)))
    assert harness.running() == ["a"]


@pytest.mark.parametrize("released", [99, "twice", "running"])
def test_a_worker_that_releases_what_it_had_not_left_unfinished_is_killed(released: int | str) -> None:
    harness = SchedulerHarness(hop("event"))
    _, run = begun(harness)
    if released == "twice":
        harness.receive(0, msg.Released((run.dispatch,)))
    if released == "running":
        harness.submit(x=given(harness))
    wrong = {"twice": run.dispatch, "running": harness.inbox[0][-1].dispatch if harness.inbox[0] else 0}.get(
        released, 99
    )  # type: ignore[call-overload]
    harness.receive(0, msg.Released((wrong,)))
    assert harness.kill_reasons() == ["it released a batch that had no unfinished work"]


def test_what_an_earlier_incarnation_releases_late_is_ignored() -> None:
    harness = SchedulerHarness(hop("event"))
    _, run = begun(harness)
    arena = harness.arena[0]
    harness.die_and_return(0)
    harness.handle(ev.FromWorker(0, arena, msg.Released((run.dispatch,))))
    assert harness.commands == [] and harness.scheduler.ledger.stats().stale_total == 0


def test_a_tensor_that_is_not_finished_comes_with_its_event() -> None:
    harness = SchedulerHarness(hop("event"))
    harness.submit(x=given(harness))
    run = harness.inbox[0][0]
    value = msg.Value("tensor", "uint8", (SIZE_BYTES,), device_place=run.device_output_blocks[0].place(0, SIZE_BYTES))
    harness.receive(
        0, msg.BatchDone(run.dispatch, (msg.ItemResult((value,)),), (msg.StepRun(1.0, 1, 1),), unfinished=True)
    )
    assert harness.kill_reasons() == ["it sent an unfinished tensor without its event"]


def test_nothing_is_left_unfinished_that_no_event_marks() -> None:
    harness = SchedulerHarness(hop("host"))
    harness.submit(x=given(harness))
    answer_on_device(harness, "a", unfinished=True)
    assert harness.kill_reasons() == ["it reported unfinished device work without an event"]


def test_a_suspect_has_no_event_so_that_its_worker_waits_for_the_device() -> None:
    harness = SchedulerHarness(hop("event"))
    harness.submit(x=given(harness))
    assert harness.inbox[0][0].ready is not None
    harness.die_and_return(0)
    assert harness.inbox[0][0].suspect and harness.inbox[0][0].ready is None


def test_a_suspect_waits_until_its_worker_has_nothing_unfinished() -> None:
    p = Builder("two-instances")
    a = p.step("a", "echo", type=TENSOR, value=p.input("x", TENSOR), instances=2, batch={"items_max": 1})
    p.output("y", p.step("b", "echo", type=TENSOR, value=a.value).value)
    harness = SchedulerHarness(on_device(plan_of(p), {"a": "device"}, "event"))
    _, run = begun(harness)  # by worker 0
    answer_small(harness, "b")
    deadly = [harness.submit(x=given(harness)) for _ in range(2)]
    assert harness.inbox[0] and harness.inbox[1]
    harness.answer("a", lambda x: msg.Failure("StepError", "drawn"), worker=0)
    harness.die(1)  # and worker 0 has nothing to run, but its device is at work
    assert harness.inbox[0] == [] and deadly[1] not in harness.ended
    harness.receive(0, msg.Released((run.dispatch,)))
    assert harness.inbox[0][0].suspect


def test_a_device_that_is_busy_for_too_long_costs_its_worker_its_life() -> None:
    harness = SchedulerHarness(hop("event"))
    begun(harness)
    answer_small(harness, "b")
    harness.advance(harness.plan.steps[0].run_max_ms + 1000.0)
    why = [one.why for one in harness.commands if hasattr(one, "why")]
    assert "its work on the device took longer than run_max_ms" in why


def test_each_dispatch_has_its_time_from_the_end_of_the_one_before() -> None:
    harness = SchedulerHarness(hop("event"))
    (_, first), (_, second) = begun(harness), begun(harness)
    limit_ms = harness.plan.steps[0].run_max_ms
    answer_small(harness, "b")
    answer_small(harness, "b")
    harness.advance(0.8 * limit_ms)
    harness.receive(0, msg.Released((first.dispatch,)))
    harness.advance(0.8 * limit_ms)
    assert not any(hasattr(one, "why") for one in harness.commands)
    harness.receive(0, msg.Released((second.dispatch,)))
    assert harness.is_clean()


def test_only_what_was_leased_for_it_must_be_marked() -> None:
    own, other, event = Block(3, 0, 512, 1), Block(4, 0, 512, 2), Block(-3, 64, EVENT_BYTES, 3)
    marked = msg.Value("tensor", "uint8", (8,), device_place=own.place(0, 8), ready=event.place(0, EVENT_BYTES))
    bare, passed_on = (msg.Value("tensor", "uint8", (8,), device_place=block.place(0, 8)) for block in (own, other))
    wrong = msg.Value("tensor", "uint8", (8,), device_place=own.place(0, 8), ready=Block(-3, 0, 64, 4).place(0, 64))
    for value, found in ((marked, False), (bare, True), (passed_on, False), (wrong, True)):
        for given_as in (value, msg.Value("list", items=(passed_on, value))):
            done = msg.BatchDone(1, (msg.Failure("StepError", ""), msg.ItemResult((given_as,))), (), unfinished=True)
            assert unmarked(done, (own,), event) is found


def test_lists_are_read_by_their_elements() -> None:
    one, two = msg.Value("json", data=b"1"), msg.Value("json", data=b"2")
    assert list(leaves([one, msg.Value("list", items=(two, msg.Value("list", items=(one,))))])) == [one, two, one]


def test_a_buffer_in_a_fragmented_arena_waits_for_device_work() -> None:
    """Three tensors fill it; the first and the last are free again, and the one between them is being written."""
    harness = SchedulerHarness(hop("event", arena_bytes=3 * SIZE_BYTES))
    runs = []
    for _ in range(3):
        runs.append(begun(harness)[1])
        answer_small(harness, "b")
    harness.receive(0, msg.Released((runs[0].dispatch, runs[2].dispatch)))
    harness.submit(x=given(harness))
    harness.receive(0, msg.BufferRequest((), (2 * SIZE_BYTES - 256,)))
    assert harness.sent(msg.OutputBuffer) == []
    harness.receive(0, msg.Released((runs[1].dispatch,)))
    assert [block.size_bytes for block in harness.sent(msg.OutputBuffer)[0].device_blocks] == [2 * SIZE_BYTES - 256]


def test_a_buffer_blocked_by_a_callers_tensor_is_refused_with_the_key() -> None:
    """What a waits for is held by its own request, and nothing else goes on."""
    harness = SchedulerHarness(hop("event", arena_bytes=2 * SIZE_BYTES))
    harness.submit(x=given(harness))
    harness.receive(0, msg.BufferRequest((), (2 * SIZE_BYTES,)))  # beside the room that it was given beforehand
    (buffer,) = harness.sent(msg.OutputBuffer)
    assert (
        buffer.refused == "outputs of 131072 bytes do not fit; the limit is gpu.arena_bytes for each process on a GPU"
    )
