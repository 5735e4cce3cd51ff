"""Test host copies: a worker that cannot attach an arena receives copies, and the arena is no longer used."""

from __future__ import annotations

import pytest

from tests.engine.on_device import SIZE_BYTES, answer_on_device, answer_small, given, hop, is_leased
from tests.engine.scheduler_harness import SchedulerHarness
from weftline.engine.protocol import messages as msg
from weftline.engine.scheduler import events as ev

LEFT, RIGHT = 0, 1


def refuse(harness: SchedulerHarness, worker: int = RIGHT, owner: int = LEFT) -> None:
    harness.receive(worker, msg.AttachFailed(harness.scheduler.workers[owner].device_arena, "in a container"))


def fail_unseen(harness: SchedulerHarness, step: str = "b") -> None:
    """Report that the worker of `step` could not read its inputs."""
    harness.answer(step, lambda x: msg.Failure("StepError", "an input cannot be read here"))


def fetched(harness: SchedulerHarness, fetch: msg.Fetch, owner: int = LEFT) -> msg.OutputBuffer:
    """The owner asks for room, and answers a Fetch; returns the room."""
    harness.receive(owner, msg.BufferRequest(tuple(value.size_bytes for value in fetch.values)))
    (buffer,) = harness.sent(msg.OutputBuffer)
    values = tuple(
        msg.Value(value.kind, value.dtype, value.shape, place=block.place(0, value.size_bytes))
        for value, block in zip(fetch.values, buffer.blocks)
    )
    harness.receive(owner, msg.Fetched(fetch.token, values, buffer.refused))
    return buffer


@pytest.mark.parametrize("ordering", ["host", "event"])
def test_an_arena_that_a_worker_cannot_attach_is_no_longer_used(ordering: str) -> None:
    harness = SchedulerHarness(hop(ordering))
    refuse(harness)
    assert harness.sent(msg.UseHostOutputs) == [msg.UseHostOutputs()] * 2
    one = harness.submit(x=given(harness))
    run = harness.inbox[LEFT][0]
    assert not run.device_output_blocks and run.ready is None and run.output_blocks
    (reported,) = [note.message for note in harness.all_commands if isinstance(note, ev.LogWarning)]
    assert reported.startswith(
        "device fake:0: worker right cannot attach the memory that worker left shares (in a cont"
    )
    assert harness.scheduler.device_sharing()["left"] == {
        "device": "fake:0",
        "share_mode": "host",
        "why": "in a container",
    }
    assert harness.scheduler.device_sharing()["right"]["share_mode"] == "host"  # it holds for all of the device
    harness.answer("a")
    answer_small(harness, "b")
    assert isinstance(harness.ended[one], ev.Finish) and harness.is_clean()


def test_it_is_recorded_once_and_the_owner_notified_once() -> None:
    harness = SchedulerHarness(hop("host"))
    refuse(harness)
    refuse(harness)
    refuse(harness, LEFT, RIGHT)
    harness.die_and_return(LEFT)
    assert sum(isinstance(one, ev.LogWarning) for one in harness.all_commands) == 1
    assert len(harness.sent(msg.UseHostOutputs, everything=True)) == 3  # left, right, and the new left, before any work
    harness.submit(x=given(harness))
    assert not harness.inbox[LEFT][0].device_output_blocks


@pytest.mark.parametrize("ordering", ["host", "event"])
def test_a_value_that_a_worker_cannot_import_is_copied_before_sending(ordering: str) -> None:
    harness = SchedulerHarness(hop(ordering, idempotent=False))
    one = harness.submit(x=given(harness))
    refuse(harness)
    run = answer_on_device(harness, "a", unfinished=ordering == "event")
    assert harness.inbox[RIGHT] == []
    (fetch,) = harness.sent(msg.Fetch)
    assert [value.device_place for value in fetch.values] == [run.device_output_blocks[0].place(0, SIZE_BYTES)]
    fetched(harness, fetch)
    (item,) = harness.inbox[RIGHT][0].items
    assert item.inputs[0].device_place is None and item.inputs[0].place is not None and item.inputs[0].ready is None
    assert is_leased(harness, item.inputs[0].place.key)
    if ordering == "event":
        harness.receive(LEFT, msg.Released((run.dispatch,)))
    answer_small(harness, "b")
    assert isinstance(harness.ended[one], ev.Finish) and harness.is_clean()


@pytest.mark.parametrize("idempotent", [True, False])
def test_dispatches_of_an_unknown_worker_run_again_without_blame(idempotent: bool) -> None:
    harness = SchedulerHarness(hop("host", idempotent=idempotent))
    one = harness.submit(x=given(harness))
    answer_on_device(harness, "a", unfinished=False)
    refuse(harness)
    fail_unseen(harness)
    fetched(harness, *harness.sent(msg.Fetch))
    answer_small(harness, "b")
    assert harness.steps_of(one) == [("a", "ok"), ("b", "ok")]
    assert harness.scheduler.counters.retried == 0 and harness.is_clean()


def test_one_of_a_batch_that_can_be_read_is_not_held_up() -> None:
    harness = SchedulerHarness(hop("host", items_max=2))
    harness.submit(x=given(harness))
    answer_on_device(harness, "a", unfinished=False)  # b's worker is busy with it, so that the next two wait
    two = [harness.submit(x=given(harness)) for _ in range(2)]
    answer_on_device(harness, "a", unfinished=False)
    answer_small(harness, "a")
    refuse(harness)
    fail_unseen(harness)
    (first, second) = harness.sent(msg.Fetch)
    assert [len(run.items) for run in harness.inbox[RIGHT]] == [1]
    answer_small(harness, "b")
    assert [request in harness.ended for request in two] == [False, True]
    for fetch in (first, second):
        fetched(harness, fetch)
        answer_small(harness, "b")
    assert all(isinstance(end, ev.Finish) for end in harness.ended.values()) and harness.is_clean()


def test_a_request_that_ends_meanwhile_leaves_nothing_behind() -> None:
    harness = SchedulerHarness(hop("host"))
    one = harness.submit(x=given(harness))
    refuse(harness)
    answer_on_device(harness, "a", unfinished=False)
    (fetch,) = harness.sent(msg.Fetch)
    harness.withdraw(one)
    assert harness.scheduler.ledger.stats().leased_bytes == SIZE_BYTES  # the owner still reads it
    assert not harness.scheduler.idle()
    fetched(harness, fetch)
    assert harness.is_clean()


@pytest.mark.parametrize("wait_ms", [0, 30])
def test_a_task_that_is_tried_again_while_it_is_fetched_is_queued_once(wait_ms: float) -> None:
    harness = SchedulerHarness(hop("host", timeout_ms=50, retry={"attempts": 3, "on": ["timeout"], "wait_ms": wait_ms}))
    one = harness.submit(x=given(harness))
    refuse(harness)
    answer_on_device(harness, "a", unfinished=False)
    (fetch,) = harness.sent(msg.Fetch)
    harness.advance(60)
    assert harness.sent(msg.Fetch) == [] and harness.inbox[RIGHT] == []
    fetched(harness, fetch)
    assert len(harness.inbox[RIGHT]) == (wait_ms == 0)
    harness.advance(30)
    assert len(harness.inbox[RIGHT]) == 1
    answer_small(harness, "b")
    assert isinstance(harness.ended[one], ev.Finish) and harness.inbox[RIGHT] == [] and harness.is_clean()


def test_a_value_no_worker_can_fetch_fails_with_a_readable_error() -> None:
    harness = SchedulerHarness(hop("host"))
    waiting, coming = harness.submit(x=given(harness)), harness.submit(x=given(harness))
    refuse(harness)
    answer_on_device(harness, "a", unfinished=False)
    harness.die(LEFT)
    reported = harness.failure(waiting)
    assert (reported.error, reported.step) == ("WorkerDied", "b")
    assert reported.message == "a device tensor was lost when its worker died (signal 9)"
    assert coming not in harness.ended  # it is made again
    harness.advance(1000)
    harness.start_worker(LEFT)
    harness.answer("a")
    answer_small(harness, "b")
    assert isinstance(harness.ended[coming], ev.Finish) and harness.is_clean()


def test_a_buffer_larger_than_the_arena_fails_and_names_the_limit() -> None:
    harness = SchedulerHarness(hop("host"))
    one = harness.submit(x=given(harness))
    refuse(harness)
    answer_on_device(harness, "a", unfinished=False)
    (fetch,) = harness.sent(msg.Fetch)
    harness.receive(LEFT, msg.BufferRequest((1 << 30,)))
    (buffer,) = harness.sent(msg.OutputBuffer)
    harness.receive(LEFT, msg.Fetched(fetch.token, (), buffer.refused))
    assert harness.failure(one).error == "LimitReached" and "limits.arena_bytes" in harness.failure(one).message
    assert harness.is_clean()


def test_an_owner_that_never_answers_is_ended() -> None:
    harness = SchedulerHarness(hop("host"))
    harness.submit(x=given(harness))
    refuse(harness)
    answer_on_device(harness, "a", unfinished=False)
    harness.advance(max(step.run_max_ms for step in harness.plan.steps) + 1000)
    assert any(
        "a copy to host memory took longer" in one.why for one in harness.commands if isinstance(one, ev.KillWorker)
    )


def test_wrong_answers_cost_a_worker_its_life() -> None:
    harness = SchedulerHarness(hop("host"))
    one = harness.submit(x=given(harness))
    harness.receive(RIGHT, msg.Fetched(7, ()))
    assert harness.kill_reasons() == ["it sent a host copy that was not requested"]
    harness.die_and_return(RIGHT)
    refuse(harness)
    answer_on_device(harness, "a", unfinished=False)
    (fetch,) = harness.sent(msg.Fetch)
    harness.receive(LEFT, msg.Fetched(fetch.token, fetch.values))
    assert harness.kill_reasons() == ["it sent a host copy of another tensor than requested"]
    assert harness.failure(one).error == "WorkerDied"
    refuse(harness, LEFT, LEFT)
    assert harness.kill_reasons() == ["it cannot attach the arena that it made"]


def test_events_that_cannot_be_opened_are_dropped_and_memory_is_shared() -> None:
    harness = SchedulerHarness(hop("event"))
    one = harness.submit(x=given(harness))
    harness.receive(RIGHT, msg.AttachFailed(-harness.scheduler.workers[LEFT].device_arena, "in a container"))
    assert harness.sent(msg.UseHostOutputs) == []
    (reported,) = [note.message for note in harness.commands if isinstance(note, ev.LogWarning)]
    assert "worker right cannot open the events that worker left shares (in a container); tensors are sync" in reported
    first = answer_on_device(harness, "a")  # it was sent before, with an event
    (fetch,) = harness.sent(msg.Fetch)
    fetched(harness, fetch)
    harness.receive(LEFT, msg.Released((first.dispatch,)))
    answer_small(harness, "b")
    two = harness.submit(x=given(harness))
    run = answer_on_device(harness, "a", unfinished=False)
    assert run.ready is None and run.device_output_blocks
    (item,) = harness.inbox[RIGHT][0].items
    assert item.inputs[0].device_place is not None and item.inputs[0].place is None
    answer_small(harness, "b")
    assert all(isinstance(harness.ended[request], ev.Finish) for request in (one, two)) and harness.is_clean()


def test_an_arena_that_is_forgotten_cannot_be_refused_any_more() -> None:
    harness = SchedulerHarness(hop("host"))
    arena = harness.scheduler.workers[LEFT].device_arena
    harness.die_and_return(LEFT)
    harness.receive(RIGHT, msg.AttachFailed(arena, "late"))
    assert harness.kill_reasons() == [] and harness.sent(msg.UseHostOutputs) == []
    assert harness.scheduler.workers[LEFT].places_on_device
