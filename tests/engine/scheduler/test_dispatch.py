"""Which batch goes to which worker, and when."""

from __future__ import annotations

import pytest

from tests.engine.scheduler_harness import SchedulerHarness
from weftline.engine.protocol import messages as msg
from weftline.engine.scheduler import events as ev
from weftline.nodes.urgency import SequencePart
from weftline.pipelines.spec.builder import Builder
from weftline.pipelines.spec.policy import Limits


def one_step(items_max: int = 4, wait_max_ms: float = 0.0, limits: Limits | None = None, **more: object) -> Builder:
    p = Builder("one-step", limits=limits)
    batch = {"items_max": items_max, "wait_max_ms": wait_max_ms}
    a = p.step("a", "echo", type="json", value=p.input("x", "json"), batch=batch, **more)  # type: ignore[arg-type]
    p.output("y", a.value)
    return p


def trickle(**more: object) -> Builder:
    p = Builder("streams")
    p.output("y", p.step("a", "trickle", value=p.input("x", "text"), **more).value)  # type: ignore[arg-type]
    return p


def text(value: str) -> msg.Value:
    return msg.Value("text", data=value.encode())


def taught(harness: SchedulerHarness, run_ms: float, calls: int = 4, size: int = 1) -> SchedulerHarness:
    """Let the step take `run_ms` a few times, so that it is known."""
    for _ in range(calls):
        harness.submit_all(range(size))
        while harness.running():
            harness.now_ms += run_ms
            harness.answer("a", run_ms=run_ms)
    return harness


def test_an_item_is_dispatched_at_once_to_a_free_worker() -> None:
    harness = SchedulerHarness(one_step())
    harness.submit(x=1)
    assert harness.batch("a") == [1]


def test_what_gathers_while_the_worker_is_busy_leaves_together() -> None:
    harness = SchedulerHarness(one_step(items_max=4))
    harness.submit_all([0, 1, 2, 3, 4, 5])
    harness.answer("a")
    assert harness.answer("a") == [1, 2, 3, 4]
    assert harness.answer("a") == [5]


def test_an_item_waits_for_a_batch_no_longer_than_wait_max_ms() -> None:
    harness = SchedulerHarness(one_step(wait_max_ms=20))
    harness.submit(x=1)
    harness.advance(19)
    assert harness.running() == []
    harness.advance(2)
    assert harness.batch("a") == [1]


def test_a_full_batch_waits_for_nothing() -> None:
    harness = SchedulerHarness(one_step(items_max=2, wait_max_ms=20))
    harness.submit_all([1, 2])
    assert harness.batch("a") == [1, 2]


def test_every_instance_receives_work() -> None:
    harness = SchedulerHarness(one_step(items_max=1, instances=2))
    harness.submit_all([1, 2])
    assert harness.running() == ["a", "a"]


def test_a_quick_step_is_sent_a_second_batch_and_never_a_third() -> None:
    harness = taught(SchedulerHarness(one_step(items_max=2)), run_ms=2.0)
    harness.submit_all(range(10))
    assert [len(run.items) for run in harness.inbox[0]] == [1, 2]
    harness.answer("a", run_ms=2.0)
    assert [len(run.items) for run in harness.inbox[0]] == [2, 2]


def test_a_slow_step_is_sent_one_batch_at_a_time() -> None:
    harness = taught(SchedulerHarness(one_step(items_max=2)), run_ms=100.0)
    harness.submit_all(range(10))
    assert len(harness.inbox[0]) == 1


def test_priority_and_deadline_and_sequence_go_along_with_an_item() -> None:
    p = Builder("brought")
    p.output("y", p.step("a", "remember", value=p.input("x", "text")).value)
    harness = SchedulerHarness(p)
    harness.submit(x=text("a"), priority=7, deadline_ms=50, sequence=SequencePart("s", True, False))
    assert harness.inbox[0][0].items[0].metadata == msg.ItemMetadata(7, 50.0, "s", True, False)


def test_what_is_usual_brings_nothing_along() -> None:
    harness = SchedulerHarness(one_step())
    harness.submit(x=1)
    assert harness.inbox[0][0].items[0].metadata is None


def test_what_is_left_of_the_deadline_shrinks_along_the_graph() -> None:
    p = Builder("two")
    a = p.step("a", "echo", type="json", value=p.input("x", "json"))
    p.output("y", p.step("b", "echo", type="json", value=a.value).value)
    harness = SchedulerHarness(p)
    harness.submit(x=1, deadline_ms=50)
    harness.now_ms += 20
    harness.answer("a")
    brought = harness.inbox[harness.worker_running("b")][0].items[0].metadata
    assert brought is not None and brought.left_ms == 30.0


def test_the_more_urgent_goes_first() -> None:
    harness = SchedulerHarness(one_step(items_max=1))
    harness.submit(x="running")
    harness.submit(x="usual")
    harness.submit(x="urgent", priority=100)
    harness.answer("a")
    assert harness.batch("a") == ["urgent"]


def test_late_work_never_reaches_a_worker() -> None:
    harness = taught(SchedulerHarness(one_step(items_max=1, limits=Limits(refuse_early=False))), run_ms=100.0)
    harness.submit(x="running")
    late = harness.submit(x="late", deadline_ms=150)
    harness.now_ms += 100
    harness.answer("a", run_ms=100.0)
    assert harness.running() == []
    assert harness.failure(late).error == "DeadlineExceeded"
    assert (
        harness.failure(late).message == "by recent measurements it would be about 51 ms too late; it was not started"
    )
    assert harness.scheduler.counters.late == 1
    assert harness.is_clean()


def test_expired_work_never_reaches_a_worker_even_when_nothing_is_known() -> None:
    harness = SchedulerHarness(one_step(items_max=1))
    harness.submit(x="running")
    late = harness.submit(x="late", deadline_ms=10)
    harness.advance(11)
    assert harness.failure(late).message == "the deadline passed after 10 ms; unfinished steps: a"
    harness.answer("a")
    assert harness.running() == []


def test_a_withdrawn_item_leaves_its_queue() -> None:
    harness = SchedulerHarness(one_step(items_max=1))
    harness.submit(x=1)
    harness.withdraw(harness.submit(x=2))
    harness.answer("a")
    assert harness.running() == []
    assert harness.is_clean()


def test_suspects_do_not_wait_behind_a_worker_that_is_kept_busy() -> None:
    harness = taught(SchedulerHarness(one_step(items_max=1, instances=2)), run_ms=2.0)
    harness.submit_all(["suspect", "other", *range(20)])
    assert [len(runs) for _, runs in sorted(harness.inbox.items())] == [2, 2]
    harness.die(0)
    harness.answer("a", worker=1)
    harness.answer("a", worker=1)
    assert [harness.value_of[item.id] for item in harness.inbox[1][0].items] == ["suspect"]
    assert harness.inbox[1][0].suspect


def test_nothing_is_put_at_risk_beside_a_suspect() -> None:
    harness = taught(SchedulerHarness(one_step(items_max=1)), run_ms=2.0)
    harness.submit_all(range(10))
    harness.die_and_return(0)
    assert len(harness.inbox[0]) == 1 and harness.inbox[0][0].suspect


def test_the_items_of_a_streaming_step_are_dealt_out_among_its_instances() -> None:
    harness = SchedulerHarness(trickle(instances=2))
    for value in "abcd":
        harness.submit(x=text(value))
    assert [len(held) for held in harness.streaming.values()] == [2, 2]


def test_a_stream_whose_reader_is_slow_already_begins_paused() -> None:
    harness = SchedulerHarness(trickle(), up=False)
    one = harness.submit(x=text("a"))
    harness.handle(ev.Stalled(one))
    harness.start_worker(0)
    assert len(harness.sent(msg.Submit)) == len(harness.sent(msg.PauseItems)) == 1


def test_outputs_of_known_size_are_preallocated() -> None:
    p = Builder("known")
    p.output("y", p.step("a", "echo", type="float32[65536]", value=p.input("x", "float32[65536]")).value)
    harness = SchedulerHarness(p)
    block = harness.scheduler.try_reserve([1 << 18])[0]
    harness.submit(x=msg.Value("tensor", "float32", (65536,), place=block.place(0, 1 << 18)))
    assert harness.inbox[0][0].output_blocks[0].size_bytes == 1 << 18


@pytest.mark.parametrize("asked", [None, ("y",)])
def test_a_chain_is_one_run_and_sent_once_to_each_incarnation(asked: tuple[str, ...] | None) -> None:
    p = Builder("chained")
    a = p.step("a", "echo", type="json", value=p.input("x", "json"), worker="w")
    p.output("y", p.step("b", "echo", type="json", value=a.value, worker="w").value)
    harness = SchedulerHarness(p)
    for _ in range(2):
        one = harness.submit(x=1, wanted=asked)
        harness.answer("a")
        assert harness.output(one) == 1
    assert len(harness.sent(msg.Chain, everything=True)) == 1
    assert len(harness.sent(msg.RunBatch, everything=True)) == 2
    harness.die_and_return(0)
    harness.submit(x=1, wanted=asked)
    assert len(harness.sent(msg.Chain)) == 1
