"""Tasks while they live: time-outs, further attempts, and steps that nobody will run any more."""

from __future__ import annotations

import pytest

from tests.engine.desk import Desk
from weftline.engine import messages as msg
from weftline.engine.crew.budget import START_TOKENS
from weftline.engine.scheduling import events as ev
from weftline.errors import InputError, StepError
from weftline.nodes.urgency import SequencePart
from weftline.pipelines.builder import Builder
from weftline.pipelines.policy import Limits


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
    desk = Desk(one_step(timeout_ms=10))
    busy, waits = desk.submit(x=1), desk.submit(x=2)
    desk.advance(11)
    assert desk.failure(waits).error == "DeadlineExceeded"
    assert desk.failure(waits).message == "it took longer than its timeout_ms, 10 ms"
    assert desk.failure(waits).step == "a"
    assert desk.ended[busy].request == busy


def test_a_running_task_that_times_out_is_told_and_its_late_answer_ignored() -> None:
    desk = Desk(one_step(timeout_ms=10))
    block = desk.scheduler.try_reserve([1 << 17])[0]
    one = desk.submit(x=msg.Value("json", place=block.place(0, 1 << 17)))
    desk.advance(11)
    assert desk.failure(one).error == "DeadlineExceeded"
    assert len(desk.sent(msg.Cancel)) == 1
    assert desk.scheduler.ledger.stats().blocks == 1  # the worker may be reading
    desk.answer("a")
    assert desk.is_clean()


def test_what_timed_out_is_written_down_with_its_worker_and_its_time() -> None:
    desk = Desk(one_step(timeout_ms=10))
    one = desk.submit(x=1)
    desk.advance(11)
    (timing,) = desk.failure(one).timings
    assert (timing.outcome, timing.worker) == ("lost", "a")
    assert timing.queued_ms == 0
    assert timing.run_ms == pytest.approx(10)


def test_a_time_out_calls_the_stand_in() -> None:
    desk = Desk(one_step(timeout_ms=10, fallback={"value": "late"}))
    one = desk.submit(x=1)
    desk.advance(11)
    assert desk.output(one) == "late"
    desk.answer("a")
    assert desk.is_clean()


def test_a_task_in_time_is_not_timed_out_afterwards() -> None:
    desk = Desk(one_step(timeout_ms=10))
    one = desk.submit(x=1)
    desk.answer("a")
    desk.advance(20)
    assert desk.output(one) == 1
    assert desk.is_clean()


# further attempts


def test_what_failed_is_tried_again_after_waits_that_grow() -> None:
    desk = Desk(one_step(retry={"attempts": 2, "wait_ms": 100}))
    one = desk.submit(x=1)
    desk.answer("a", broken)
    desk.advance(99)
    assert desk.running() == []
    desk.advance(2)
    desk.answer("a", broken)
    desk.advance(199)
    assert desk.running() == []
    desk.advance(2)
    desk.answer("a", broken)
    assert desk.failure(one).message == "drawn"
    assert [timing.attempts for timing in desk.failure(one).timings] == [1, 2, 3]
    assert desk.scheduler.counters.retried == 2
    assert desk.is_clean()


def test_a_task_that_waits_to_be_tried_again_is_dropped_with_its_request() -> None:
    desk = Desk(one_step(retry={"attempts": 1, "wait_ms": 100}))
    one = desk.submit(x=1)
    desk.answer("a", broken)
    desk.withdraw(one)
    assert desk.is_clean()
    desk.advance(200)
    assert desk.running() == []


def test_a_wrong_input_stays_wrong() -> None:
    desk = Desk(one_step(retry=3))
    one = desk.submit(x=1)
    desk.answer("a", lambda x: InputError("not this"))
    assert desk.failure(one).error == "InputError"


@pytest.mark.parametrize(("on", "again"), [("error", True), ("timeout", False)])
def test_only_what_the_step_names_is_tried_again(on: str, again: bool) -> None:
    desk = Desk(one_step(timeout_ms=1000, retry={"attempts": 1, "on": [on]}))
    one = desk.submit(x=1)
    desk.answer("a", broken)
    assert (one not in desk.ended) is again


def test_a_running_task_that_timed_out_is_tried_again_beside_it() -> None:
    p = one_step(timeout_ms=10, retry=1, instances=2)
    desk = Desk(p)
    one = desk.submit(x=1)
    desk.advance(11)
    assert desk.running() == ["a", "a"]
    desk.answer("a", lambda x: "too late", worker=0)
    assert one not in desk.ended
    desk.answer("a", lambda x: "in time", worker=1)
    assert desk.output(one) == "in time"
    assert desk.is_clean()


def test_work_that_must_not_run_twice_is_not_begun_again_while_a_worker_may_have_it() -> None:
    desk = Desk(one_step(timeout_ms=10, retry=1, instances=2, idempotent=False))
    one = desk.submit(x=1)
    desk.advance(11)
    assert desk.failure(one).error == "DeadlineExceeded"
    assert desk.running() == ["a"]


def test_further_attempts_have_a_budget() -> None:
    desk = Desk(one_step(retry=1, limits=Limits(retry_share=0.1)))
    allowed = 0
    while allowed < 2 * START_TOKENS:
        one = desk.submit(x=1)
        desk.answer("a", broken)
        if one in desk.ended:
            break
        allowed += 1
        desk.answer("a", broken)
    assert START_TOKENS <= allowed <= START_TOKENS + 1  # what it begins with; ten first attempts pay for one
    assert desk.failure(one).message == "drawn"


# steps that nobody will run any more


def two_ways() -> Builder:
    """`ill` and `well` in workers of their own, and an output of each."""
    p = Builder("two-ways")
    x = p.input("x", "json")
    p.output("ill", p.step("ill", "echo", type="json", value=x).value)
    p.output("well", p.step("well", "echo", type="json", value=x).value)
    return p


def test_a_crash_loop_fails_what_waits_refuses_what_needs_it_and_serves_the_rest() -> None:
    desk = Desk(two_ways())
    waits = [desk.submit(x=1, wanted=("ill",)) for _ in range(2)]
    desk.crash(desk.at("ill"))
    assert desk.failure(waits[1]).error == "WorkerDied"
    assert desk.failure(waits[1]).step == "ill"
    assert "keeps failing to start" in desk.failure(waits[1]).message
    assert "step ill is unavailable" in desk.refusal(desk.submit(x=1, wanted=("ill",))).message
    served = desk.submit(x=1, wanted=("well",))
    desk.answer("well")
    assert desk.output(served, "well") == 1
    assert desk.is_clean()


def test_a_task_that_reaches_a_hopeless_step_fails_at_once() -> None:
    p = Builder("later")
    x = p.input("x", "json")
    a = p.step("a", "echo", type="json", value=x)
    p.output("y", p.step("b", "echo", type="json", value=a.value).value)
    desk = Desk(p)
    one = desk.submit(x=1)
    desk.crash(1)
    assert one not in desk.ended
    desk.answer("a")
    assert desk.failure(one).error == "WorkerDied"


def test_the_stand_in_of_a_hopeless_step_is_called() -> None:
    desk = Desk(one_step(fallback={"value": "sorry"}))
    waits = desk.submit(x=1)
    desk.crash(0)
    assert desk.output(waits) == "sorry"
    assert desk.output(desk.submit(x=2)) == "sorry"
    assert desk.is_clean()


# sequences


def part(start: bool = False, end: bool = False, id: str = "s") -> SequencePart:
    return SequencePart(id, start, end)


def text(value: str) -> msg.Value:
    return msg.Value("text", data=value.encode())


def test_the_items_of_a_sequence_run_one_at_a_time_in_order_with_one_worker() -> None:
    desk = Desk(one_step(node="remember", instances=2))
    desk.submit(x=text("a"), sequence=part(start=True))
    worker = desk.at("a")
    desk.submit(x=text("b"), sequence=part())
    desk.submit(x=text("c"), sequence=part(end=True))
    assert desk.running() == ["a"]
    assert [desk.answer("a", worker=worker)[0] for _ in range(3)] == ["a", "b", "c"]
    assert desk.sent(msg.EndSequences) == [msg.EndSequences(0, ("s",))]
    assert desk.is_clean()


def test_sequences_go_to_the_instance_that_holds_the_fewest() -> None:
    desk = Desk(one_step(node="remember", instances=2))
    for id in ("one", "two"):
        desk.submit(x=text("a"), sequence=part(start=True, id=id))
        workers = [worker for worker, runs in desk.inbox.items() if runs]
        assert workers == [["one", "two"].index(id)]
        desk.answer("a")


def test_a_sequence_is_not_given_to_a_worker_that_will_never_come_back() -> None:
    desk = Desk(one_step(node="remember", instances=2))
    desk.crash(0)
    one = desk.submit(x=text("a"), sequence=part(start=True))
    assert desk.answer("a", worker=1) == ["a"]
    assert one in desk.ended


def test_what_waits_in_a_sequence_is_lost_with_its_worker_and_told_so() -> None:
    desk = Desk(one_step(node="remember"))
    first, second = (desk.submit(x=text("a"), sequence=part(start=begin)) for begin in (True, False))
    desk.die(0)
    assert "its worker died while running it" in desk.failure(first).message
    assert "its sequence was lost when its worker died" in desk.failure(second).message
    third = desk.submit(x=text("a"), sequence=part())
    assert desk.refusal(third).error == "InputError"
    assert "was lost when its worker died; start it again" in desk.refusal(third).message
    assert desk.is_clean()


def upstream() -> Builder:
    """`slow` comes before `a`, which remembers."""
    p = Builder("upstream")
    slow = p.step("slow", "echo", value=p.input("x", "text"), batch={"items_max": 1}, worker="slow")
    p.output("y", p.step("a", "remember", value=slow.value, worker="a").value)
    return p


def test_what_is_still_on_its_way_to_a_lost_sequence_never_meets_the_one_that_is_begun_anew() -> None:
    desk = Desk(upstream())
    desk.submit(x=text("a"), sequence=part(start=True))
    old = desk.submit(x=text("b"), sequence=part())
    desk.answer("slow")
    desk.die(desk.at("a"))
    desk.submit(x=text("c"), sequence=part(start=True))
    desk.submit(x=text("d"), sequence=part(end=True))
    desk.answer("slow")
    assert desk.failure(old).message == "its sequence was lost when its worker died; start it again"
    desk.answer("slow")
    desk.advance(200)
    desk.up(1)
    assert desk.answer("a") == ["c"]
    assert desk.sent(msg.EndSequences) == []  # another one is on its way
    desk.answer("slow")
    assert desk.answer("a") == ["d"]
    assert desk.sent(msg.EndSequences) == [msg.EndSequences(1, ("s",))]
    assert desk.is_clean()


def test_an_item_of_a_sequence_that_timed_out_is_not_tried_again_behind_those_that_came_after_it() -> None:
    desk = Desk(one_step(node="remember", timeout_ms=10, retry=1))
    desk.submit(x=text("a"), sequence=part(start=True))
    waits = desk.submit(x=text("b"), sequence=part())
    desk.advance(11)
    assert desk.failure(waits).error == "DeadlineExceeded"
    desk.answer("a")
    assert desk.running() == []
    assert desk.is_clean()


def test_a_request_outside_of_any_sequence_is_refused_where_a_step_has_memory() -> None:
    desk = Desk(one_step(node="remember"))
    one = desk.submit(x=text("a"))
    assert desk.refusal(one).error == "InputError"
    assert "step a remembers" in desk.refusal(one).message


def test_an_idle_sequence_is_ended_and_its_worker_told() -> None:
    desk = Desk(one_step(node="remember", sequence={"idle_max_ms": 1000}))
    desk.submit(x=text("a"), sequence=part(start=True))
    desk.answer("a")
    desk.advance(1500)
    assert desk.sent(msg.EndSequences) == [msg.EndSequences(0, ("s",))]


def test_a_request_that_ends_in_the_turn_in_which_it_reached_a_step_with_memory_settles_its_sequence() -> None:
    p = Builder("turn")
    x = p.input("x", "text")
    a, b = (p.step(name, "echo", value=x) for name in ("a", "b"))
    p.output("y", p.step("c", "remember", value=a.value).value)
    p.output("z", b.value)
    desk = Desk(p)
    desk.submit(x=text("a"), sequence=part(start=True, end=True))
    answers = [
        ev.FromWorker(0, desk.arena[0], msg.Done(desk.inbox[0][0].dispatch, (msg.Given((text("a"),)),), ())),
        ev.FromWorker(1, desk.arena[1], msg.Done(desk.inbox[1][0].dispatch, (msg.Failure("StepError", "drawn"),), ())),
    ]
    desk.scheduler.on_all(answers, desk.now_ms)
    assert desk.scheduler._tasks.lanes[2].sequences.live() == 0  # type: ignore[union-attr]
