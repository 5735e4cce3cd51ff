"""Test live tasks: timeouts, retries, and steps without workers."""

from __future__ import annotations

import pytest

from tests.engine.scheduler_harness import SchedulerHarness
from weftline.engine.protocol import messages as msg
from weftline.engine.scheduler import events as ev
from weftline.engine.token_bucket import START_TOKENS
from weftline.errors import InputError, StepError
from weftline.nodes.urgency import SequencePart
from weftline.pipelines.spec.builder import Builder
from weftline.pipelines.spec.policy import Limits


def broken(value: object) -> StepError:
    return StepError("drawn")


def one_step(items_max: int = 1, node: str = "echo", limits: Limits | None = None, **more: object) -> Builder:
    p = Builder("one-step", limits=limits)
    type = {"type": "json"} if node == "echo" else {}
    x = p.input("x", "json" if type else "text")
    a = p.step("a", node, value=x, batch={"items_max": items_max}, **type, **more)  # type: ignore[arg-type]
    p.output("y", a.value)
    return p


# time-outs


def test_a_task_that_waits_for_too_long_fails_by_name_of_its_limit() -> None:
    harness = SchedulerHarness(one_step(timeout_ms=10))
    busy, waits = harness.submit(x=1), harness.submit(x=2)
    harness.advance(11)
    assert harness.failure(waits).error == "DeadlineExceeded"
    assert harness.failure(waits).message == "it took longer than its timeout_ms, 10 ms"
    assert harness.failure(waits).step == "a"
    assert harness.ended[busy].request == busy


def test_a_task_that_times_out_is_cancelled_and_its_late_answer_ignored() -> None:
    harness = SchedulerHarness(one_step(timeout_ms=10))
    block = harness.scheduler.try_reserve([1 << 17])[0]
    one = harness.submit(x=msg.Value("json", place=block.place(0, 1 << 17)))
    harness.advance(11)
    assert harness.failure(one).error == "DeadlineExceeded"
    assert len(harness.sent(msg.CancelItems)) == 1
    assert harness.scheduler.ledger.stats().blocks == 1  # the worker may be reading
    harness.answer("a")
    assert harness.is_clean()


def test_what_timed_out_is_written_down_with_its_worker_and_its_time() -> None:
    harness = SchedulerHarness(one_step(timeout_ms=10))
    one = harness.submit(x=1)
    harness.advance(11)
    (timing,) = harness.failure(one).timings
    assert (timing.outcome, timing.worker) == ("lost", "a")
    assert timing.queued_ms == 0
    assert timing.run_ms == pytest.approx(10)


def test_a_time_out_activates_the_fallback() -> None:
    harness = SchedulerHarness(one_step(timeout_ms=10, fallback={"value": "late"}))
    one = harness.submit(x=1)
    harness.advance(11)
    assert harness.output(one) == "late"
    harness.answer("a")
    assert harness.is_clean()


def test_a_task_in_time_is_not_timed_out_afterwards() -> None:
    harness = SchedulerHarness(one_step(timeout_ms=10))
    one = harness.submit(x=1)
    harness.answer("a")
    harness.advance(20)
    assert harness.output(one) == 1
    assert harness.is_clean()


# further attempts


def test_what_failed_is_tried_again_after_waits_that_grow() -> None:
    harness = SchedulerHarness(one_step(retry={"attempts": 2, "wait_ms": 100}))
    one = harness.submit(x=1)
    harness.answer("a", broken)
    harness.advance(99)
    assert harness.running() == []
    harness.advance(2)
    harness.answer("a", broken)
    harness.advance(199)
    assert harness.running() == []
    harness.advance(2)
    harness.answer("a", broken)
    assert harness.failure(one).message == "drawn"
    assert [timing.attempts for timing in harness.failure(one).timings] == [1, 2, 3]
    assert harness.scheduler.counters.retried == 2
    assert harness.is_clean()


def test_a_task_that_waits_to_be_tried_again_is_dropped_with_its_request() -> None:
    harness = SchedulerHarness(one_step(retry={"attempts": 1, "wait_ms": 100}))
    one = harness.submit(x=1)
    harness.answer("a", broken)
    harness.withdraw(one)
    assert harness.is_clean()
    harness.advance(200)
    assert harness.running() == []


def test_a_wrong_input_stays_wrong() -> None:
    harness = SchedulerHarness(one_step(retry=3))
    one = harness.submit(x=1)
    harness.answer("a", lambda x: InputError("not this"))
    assert harness.failure(one).error == "InputError"


@pytest.mark.parametrize(("on", "again"), [("error", True), ("timeout", False)])
def test_only_what_the_step_names_is_tried_again(on: str, again: bool) -> None:
    harness = SchedulerHarness(one_step(timeout_ms=1000, retry={"attempts": 1, "on": [on]}))
    one = harness.submit(x=1)
    harness.answer("a", broken)
    assert (one not in harness.ended) is again


def test_a_running_task_that_timed_out_is_tried_again_beside_it() -> None:
    p = one_step(timeout_ms=10, retry=1, instances=2)
    harness = SchedulerHarness(p)
    one = harness.submit(x=1)
    harness.advance(11)
    assert harness.running() == ["a", "a"]
    harness.answer("a", lambda x: "too late", worker=0)
    assert one not in harness.ended
    harness.answer("a", lambda x: "in time", worker=1)
    assert harness.output(one) == "in time"
    assert harness.is_clean()


def test_work_that_must_not_run_twice_waits_for_its_worker() -> None:
    harness = SchedulerHarness(one_step(timeout_ms=10, retry=1, instances=2, idempotent=False))
    one = harness.submit(x=1)
    harness.advance(11)
    assert harness.failure(one).error == "DeadlineExceeded"
    assert harness.running() == ["a"]


def test_further_attempts_have_a_budget() -> None:
    harness = SchedulerHarness(one_step(retry=1, limits=Limits(retry_share=0.1)))
    allowed = 0
    while allowed < 2 * START_TOKENS:
        one = harness.submit(x=1)
        harness.answer("a", broken)
        if one in harness.ended:
            break
        allowed += 1
        harness.answer("a", broken)
    assert START_TOKENS <= allowed <= START_TOKENS + 1  # what it begins with; ten first attempts pay for one
    assert harness.failure(one).message == "drawn"


# steps that will not run any more


def two_ways() -> Builder:
    """`ill` and `well` in workers of their own, and an output of each."""
    p = Builder("two-ways")
    x = p.input("x", "json")
    p.output("ill", p.step("ill", "echo", type="json", value=x).value)
    p.output("well", p.step("well", "echo", type="json", value=x).value)
    return p


def test_a_crash_loop_fails_its_requests_and_serves_the_rest() -> None:
    harness = SchedulerHarness(two_ways())
    waits = [harness.submit(x=1, wanted=("ill",)) for _ in range(2)]
    harness.crash(harness.worker_running("ill"))
    assert harness.failure(waits[1]).error == "WorkerDied"
    assert harness.failure(waits[1]).step == "ill"
    assert "keeps failing to start" in harness.failure(waits[1]).message
    refusal = harness.refusal(harness.submit(x=1, wanted=("ill",)))
    assert (refusal.error, "step ill is unavailable" in refusal.message) == ("StepUnavailable", True)
    served = harness.submit(x=1, wanted=("well",))
    harness.answer("well")
    assert harness.output(served, "well") == 1
    assert harness.is_clean()


def test_a_task_that_reaches_a_hopeless_step_fails_at_once() -> None:
    p = Builder("later")
    x = p.input("x", "json")
    a = p.step("a", "echo", type="json", value=x)
    p.output("y", p.step("b", "echo", type="json", value=a.value).value)
    harness = SchedulerHarness(p)
    one = harness.submit(x=1)
    harness.crash(1)
    assert one not in harness.ended
    harness.answer("a")
    assert harness.failure(one).error == "WorkerDied"


def test_the_fallback_of_a_hopeless_step_is_activated() -> None:
    harness = SchedulerHarness(one_step(fallback={"value": "sorry"}))
    waits = harness.submit(x=1)
    harness.crash(0)
    assert harness.output(waits) == "sorry"
    assert harness.output(harness.submit(x=2)) == "sorry"
    assert harness.is_clean()


# sequences


def part(start: bool = False, end: bool = False, id: str = "s") -> SequencePart:
    return SequencePart(id, start, end)


def text(value: str) -> msg.Value:
    return msg.Value("text", data=value.encode())


def test_sequence_items_run_one_at_a_time_in_order_on_one_worker() -> None:
    harness = SchedulerHarness(one_step(node="remember", instances=2))
    harness.submit(x=text("a"), sequence=part(start=True))
    worker = harness.worker_running("a")
    harness.submit(x=text("b"), sequence=part())
    harness.submit(x=text("c"), sequence=part(end=True))
    assert harness.running() == ["a"]
    assert [harness.answer("a", worker=worker)[0] for _ in range(3)] == ["a", "b", "c"]
    assert harness.sent(msg.EndSequences) == [msg.EndSequences(0, ("s",))]
    assert harness.is_clean()


def test_sequences_go_to_the_instance_that_holds_the_fewest() -> None:
    harness = SchedulerHarness(one_step(node="remember", instances=2))
    for id in ("one", "two"):
        harness.submit(x=text("a"), sequence=part(start=True, id=id))
        workers = [worker for worker, runs in harness.inbox.items() if runs]
        assert workers == [["one", "two"].index(id)]
        harness.answer("a")


def test_a_sequence_is_not_assigned_to_a_worker_that_will_never_restart() -> None:
    harness = SchedulerHarness(one_step(node="remember", instances=2))
    harness.crash(0)
    one = harness.submit(x=text("a"), sequence=part(start=True))
    assert harness.answer("a", worker=1) == ["a"]
    assert one in harness.ended


def test_items_waiting_in_a_sequence_fail_with_their_worker_and_its_reason() -> None:
    harness = SchedulerHarness(one_step(node="remember"))
    first, second = (harness.submit(x=text("a"), sequence=part(start=begin)) for begin in (True, False))
    harness.die(0)
    assert "the worker died while running this item" in harness.failure(first).message
    assert "the state of the sequence was lost when its worker died" in harness.failure(second).message
    third = harness.submit(x=text("a"), sequence=part())
    assert harness.refusal(third).error == "InputError"
    assert "was lost when its worker died; start it again" in harness.refusal(third).message
    assert harness.is_clean()


def upstream() -> Builder:
    """`slow` comes before `a`, which remembers."""
    p = Builder("upstream")
    slow = p.step("slow", "echo", value=p.input("x", "text"), batch={"items_max": 1}, worker="slow")
    p.output("y", p.step("a", "remember", value=slow.value, worker="a").value)
    return p


def test_items_of_a_lost_sequence_never_reach_its_successor() -> None:
    harness = SchedulerHarness(upstream())
    harness.submit(x=text("a"), sequence=part(start=True))
    old = harness.submit(x=text("b"), sequence=part())
    harness.answer("slow")
    harness.die(harness.worker_running("a"))
    harness.submit(x=text("c"), sequence=part(start=True))
    harness.submit(x=text("d"), sequence=part(end=True))
    harness.answer("slow")
    assert (
        harness.failure(old).message
        == "the state of the sequence was lost when its worker died; start the sequence again"
    )
    harness.answer("slow")
    harness.advance(200)
    harness.start_worker(1)
    assert harness.answer("a") == ["c"]
    assert harness.sent(msg.EndSequences) == []  # another one is on its way
    harness.answer("slow")
    assert harness.answer("a") == ["d"]
    assert harness.sent(msg.EndSequences) == [msg.EndSequences(1, ("s",))]
    assert harness.is_clean()


def test_a_sequence_item_that_timed_out_is_not_retried_out_of_order() -> None:
    harness = SchedulerHarness(one_step(node="remember", timeout_ms=10, retry=1))
    harness.submit(x=text("a"), sequence=part(start=True))
    waits = harness.submit(x=text("b"), sequence=part())
    harness.advance(11)
    assert harness.failure(waits).error == "DeadlineExceeded"
    harness.answer("a")
    assert harness.running() == []
    assert harness.is_clean()


def test_a_request_without_a_sequence_is_refused_by_a_stateful_step() -> None:
    harness = SchedulerHarness(one_step(node="remember"))
    one = harness.submit(x=text("a"))
    assert harness.refusal(one).error == "InputError"
    assert "step a is stateful" in harness.refusal(one).message


def test_an_idle_sequence_is_ended_and_its_worker_notified() -> None:
    harness = SchedulerHarness(one_step(node="remember", sequence={"idle_max_ms": 1000}))
    harness.submit(x=text("a"), sequence=part(start=True))
    harness.answer("a")
    harness.advance(1500)
    assert harness.sent(msg.EndSequences) == [msg.EndSequences(0, ("s",))]


def test_a_request_that_ends_as_it_reaches_a_stateful_step_settles() -> None:
    p = Builder("turn")
    x = p.input("x", "text")
    a, b = (p.step(name, "echo", value=x) for name in ("a", "b"))
    p.output("y", p.step("c", "remember", value=a.value).value)
    p.output("z", b.value)
    harness = SchedulerHarness(p)
    harness.submit(x=text("a"), sequence=part(start=True, end=True))
    answers = [
        ev.FromWorker(
            0, harness.arena[0], msg.BatchDone(harness.inbox[0][0].dispatch, (msg.ItemResult((text("a"),)),), ())
        ),
        ev.FromWorker(
            1, harness.arena[1], msg.BatchDone(harness.inbox[1][0].dispatch, (msg.Failure("StepError", "drawn"),), ())
        ),
    ]
    harness.scheduler.on_all(answers, harness.now_ms)
    assert harness.scheduler.state.queues[2].sequences.live() == 0  # type: ignore[union-attr]
