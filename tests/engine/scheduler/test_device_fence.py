"""Test device fences: memory read by a dead worker is not reused before the arena's owner settles it."""

from __future__ import annotations

import pytest

from tests.engine.on_device import SIZE_BYTES, answer_on_device, answer_small, given, hop, is_leased, row
from tests.engine.scheduler_harness import SchedulerHarness
from weftline.engine.protocol import messages as msg
from weftline.engine.scheduler import events as ev

LEFT, RIGHT = 0, 1


def read_by_the_dead(ordering: str = "host", **more: object) -> tuple[SchedulerHarness, int, msg.RunBatch]:
    """A worker died while it read what another one gave it on the device, and its work must not run twice."""
    harness = SchedulerHarness(hop(ordering, idempotent=False, **more))  # type: ignore[arg-type]
    one = harness.submit(x=given(harness))
    run = answer_on_device(harness, "a", unfinished=ordering == "event")
    if ordering == "event":
        harness.receive(LEFT, msg.Released((run.dispatch,)))
    harness.die(RIGHT)
    return harness, one, run


@pytest.mark.parametrize("ordering", ["host", "event"])
def test_what_a_dead_worker_read_is_free_once_the_owner_has_settled(ordering: str) -> None:
    harness, one, _ = read_by_the_dead(ordering)
    assert harness.failure(one).error == "WorkerDied"
    stats = harness.scheduler.ledger.stats()
    assert stats.quarantined_bytes == SIZE_BYTES and stats.leased_bytes == 0
    (settle,) = harness.sent(msg.Settle)
    harness.receive(LEFT, msg.Settled(settle.token))
    assert harness.scheduler.ledger.stats().quarantined_bytes == 0
    assert harness.is_clean()


def test_nothing_new_is_leased_where_the_dead_may_still_read() -> None:
    harness, _, run = read_by_the_dead(arena_bytes=2 * SIZE_BYTES)
    (settle,) = harness.sent(msg.Settle)
    where = run.device_output_blocks[0].offset
    harness.submit(x=given(harness))
    assert harness.inbox[LEFT][0].device_output_blocks[0].offset != where  # the other half
    harness.receive(LEFT, msg.Settled(settle.token))
    harness.receive(LEFT, msg.BufferRequest((), (SIZE_BYTES,)))
    assert [block.offset for block in harness.sent(msg.OutputBuffer)[0].device_blocks] == [where]


def test_a_buffer_request_waits_for_device_fences() -> None:
    harness, _, _ = read_by_the_dead(arena_bytes=SIZE_BYTES)
    (settle,) = harness.sent(msg.Settle)
    harness.advance((harness.scheduler.workers[RIGHT].start_ms or 0.0) - harness.now_ms + 0.001)
    harness.start_worker(RIGHT)  # nothing else is on its way
    harness.submit(x=given(harness))
    assert not harness.inbox[LEFT][0].device_output_blocks
    harness.receive(LEFT, msg.BufferRequest((), (SIZE_BYTES,)))
    assert harness.sent(msg.OutputBuffer) == []
    harness.receive(LEFT, msg.Settled(settle.token))
    assert len(harness.sent(msg.OutputBuffer)[0].device_blocks) == 1


def test_a_retried_task_keeps_its_inputs_beside_the_quarantine() -> None:
    harness = SchedulerHarness(hop("host"))
    one = harness.submit(x=given(harness))
    run = answer_on_device(harness, "a", unfinished=False)
    harness.die(RIGHT)
    (settle,) = harness.sent(msg.Settle)
    harness.receive(LEFT, msg.Settled(settle.token))
    block = run.device_output_blocks[0]
    assert is_leased(harness, (block.arena, block.offset, block.generation))
    harness.advance((harness.scheduler.workers[RIGHT].start_ms or 0.0) - harness.now_ms + 0.001)
    harness.start_worker(RIGHT)
    answer_small(harness, "b")
    assert isinstance(harness.ended[one], ev.Finish) and harness.is_clean()


def test_what_a_withdrawn_request_brought_there_is_kept_from_use_too() -> None:
    harness = SchedulerHarness(hop("event"))
    one = harness.submit(x=given(harness))
    run = answer_on_device(harness, "a")
    harness.receive(LEFT, msg.Released((run.dispatch,)))
    harness.withdraw(one)
    harness.die(RIGHT)
    stats = harness.scheduler.ledger.stats()
    assert (stats.leased_bytes, stats.quarantined_bytes) == (0, SIZE_BYTES)
    (settle,) = harness.sent(msg.Settle)
    harness.receive(LEFT, msg.Settled(settle.token))
    assert harness.is_clean()


def test_what_it_had_answered_and_not_finished_is_kept_from_use_too() -> None:
    harness = SchedulerHarness(row("event"))
    harness.submit(x=given(harness))
    run = answer_on_device(harness, "a")
    harness.receive(LEFT, msg.Released((run.dispatch,)))
    answer_on_device(harness, "b")  # its device goes on reading what a gave
    harness.die(RIGHT)
    assert harness.scheduler.ledger.stats().quarantined_bytes == SIZE_BYTES
    (settle,) = harness.sent(msg.Settle)
    harness.receive(LEFT, msg.Settled(settle.token))
    assert harness.scheduler.ledger.stats().quarantined_bytes == 0
    harness.die(2)
    assert harness.is_clean()


def test_an_owner_that_dies_takes_the_quarantine_with_it() -> None:
    harness, _, run = read_by_the_dead()
    harness.die(LEFT)
    assert ev.ForgetArena(run.device_output_blocks[0].arena) in harness.commands
    assert harness.scheduler.ledger.stats().quarantined_bytes == 0
    assert harness.is_clean()


def test_two_workers_dead_at_once_request_no_device_fence() -> None:
    harness = SchedulerHarness(hop("host", idempotent=False))
    harness.submit(x=given(harness))
    answer_on_device(harness, "a", unfinished=False)
    harness.die(LEFT)
    harness.die(RIGHT)
    assert harness.sent(msg.Settle, everything=True) == []
    assert harness.is_clean()


@pytest.mark.parametrize("again", [False, True])
def test_a_worker_that_settles_what_it_was_not_asked_to_is_killed(again: bool) -> None:
    harness, _, _ = read_by_the_dead()
    (settle,) = harness.sent(msg.Settle)
    if again:
        harness.receive(LEFT, msg.Settled(settle.token))
    harness.receive(LEFT, msg.Settled(settle.token if again else settle.token + 1))
    assert harness.kill_reasons() == ["it confirmed a device fence that was not requested"]


def test_an_owner_that_never_settles_is_killed() -> None:
    harness, _, _ = read_by_the_dead()
    harness.advance(harness.plan.steps[0].run_max_ms + 1000.0)
    assert "its device fence was not reached within run_max_ms" in [
        one.why for one in harness.commands if hasattr(one, "why")
    ]
    harness.die(LEFT)
    assert harness.scheduler.ledger.stats().quarantined_bytes == 0
