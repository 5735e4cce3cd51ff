"""The requests that are inside: every one ends once, and an ended one holds nothing."""

from __future__ import annotations

import pytest

from tests.engine.scheduler_harness import SchedulerHarness
from weftline.engine.protocol import messages as msg
from weftline.engine.scheduler import events as ev
from weftline.engine.scheduler import request_table
from weftline.engine.scheduler.request_table import STALE_DEADLINES_MAX
from weftline.errors import StepError
from weftline.pipelines.spec.builder import Builder
from weftline.pipelines.spec.policy import Limits

LARGE = 1 << 17


def fork(**more: object) -> SchedulerHarness:
    """`a` is read by `b` and `c`, which are outputs; so is the input itself."""
    p = Builder("fork", **more)  # type: ignore[arg-type]
    x = p.input("x", "json")
    a = p.step("a", "echo", type="json", value=x)
    for name in ("b", "c"):
        p.output(name, p.step(name, "echo", type="json", value=a.value).value)
    p.output("x", x)
    return SchedulerHarness(p)


def placed(harness: SchedulerHarness) -> msg.Value:
    return msg.Value("json", place=harness.scheduler.try_reserve([LARGE])[0].place(0, LARGE))


def leases(harness: SchedulerHarness) -> int:
    return harness.scheduler.ledger.stats().blocks


def test_a_value_lives_until_its_last_reader_is_done() -> None:
    p = Builder("line")
    a = p.step("a", "echo", type="json", value=p.input("x", "json"))
    p.output("y", p.step("b", "echo", type="json", value=a.value).value)
    harness = SchedulerHarness(p)
    harness.submit(x=placed(harness))
    harness.answer("a", lambda x: "small")
    assert leases(harness) == 0


def test_an_output_is_leased_until_it_was_copied_out() -> None:
    harness = fork()
    one = harness.submit(x=placed(harness))
    for step in ("a", "b", "c"):
        harness.answer(step)
    assert one in harness.ended and leases(harness) == 1
    assert not harness.scheduler.idle()
    harness.handle(ev.Delivered(one))
    assert leases(harness) == 0 and harness.scheduler.idle()


def test_a_request_that_fails_releases_its_leases_and_cancels_its_tasks() -> None:
    harness = fork()
    one = harness.submit(x=placed(harness))
    harness.answer("a")
    harness.answer("b", lambda x: StepError("drawn"))
    assert harness.failure(one).step == "b"
    assert leases(harness) == 1  # c's worker still reads
    harness.answer("c")
    assert leases(harness) == 0
    assert harness.is_clean()


@pytest.mark.parametrize("answered", [0, 1, 2])
def test_a_request_may_be_withdrawn_at_any_moment(answered: int) -> None:
    harness = fork()
    one = harness.submit(x=placed(harness))
    for step in ("a", "b")[:answered]:
        harness.answer(step)
    harness.withdraw(one)
    harness.withdraw(one)
    assert harness.failure(one).error == "RequestCancelled"
    for step in list(harness.running()):
        harness.answer(step)
    assert harness.is_clean()
    assert harness.scheduler.counters.cancelled == 1


def test_outputs_are_sent_as_they_come_to_a_streaming_caller() -> None:
    harness = fork()
    harness.submit(x=1)
    assert [one.output for one in harness.commands if isinstance(one, ev.OutputReady)] == ["x"]
    harness.submit(x=1, pieces=False)
    assert not any(isinstance(one, ev.OutputReady) for one in harness.commands)


def test_a_deadline_ends_a_request_and_names_what_is_unfinished() -> None:
    harness = fork()
    one = harness.submit(x=1, deadline_ms=50)
    harness.answer("a")
    harness.answer("b")
    harness.advance(51)
    assert harness.failure(one).message == "the deadline passed after 50 ms; unfinished steps: c"


def test_a_retried_step_is_unfinished_and_a_dormant_fallback_is_not() -> None:
    p = Builder("again")
    x = p.input("x", "json")
    b = p.step("b", "echo", type="json", value=x)
    p.output("y", p.step("a", "echo", type="json", value=x, retry=1, fallback=b).value)
    harness = SchedulerHarness(p)
    one = harness.submit(x=1, deadline_ms=50)
    harness.answer("a", lambda x: StepError("drawn"))
    harness.advance(51)
    assert harness.failure(one).message == "the deadline passed after 50 ms; unfinished steps: a"


def test_admission_is_by_requests_and_by_bytes() -> None:
    harness = fork(limits=Limits(requests_max=1))
    inside = harness.submit(x=placed(harness))
    other = harness.submit(x=placed(harness))
    refused = harness.refusal(other)
    assert (refused.message, refused.error) == ("1 requests are open; limits.requests_max is 1", "LimitReached")
    assert refused.retry_after_s > 0
    assert leases(harness) == 1
    assert harness.refusal(harness.submit(x=1)).retry_after_s > refused.retry_after_s
    harness.withdraw(inside)
    harness.answer("a")
    harness.submit(x=1)
    assert harness.running() == ["a"]


def test_an_output_that_does_not_exist_is_refused_and_its_inputs_released() -> None:
    harness = fork()
    one = harness.submit(x=placed(harness), wanted=("nowhere",))
    assert harness.refusal(one).error == "InputError"
    assert "no output is called nowhere; outputs: b, c, x" in harness.refusal(one).message
    assert harness.is_clean()


def test_totals_add_up() -> None:
    harness = fork()
    one, two, _ = harness.submit_all([1, 2, 3])
    harness.withdraw(two)
    for step in ("a", "b", "c"):
        harness.answer(step)
    counters = harness.scheduler.counters
    assert (counters.admitted, counters.ok, counters.cancelled) == (3, 1, 1)
    assert harness.scheduler.open_requests == 1
    assert one in harness.ended


def test_deadlines_of_requests_that_are_gone_do_not_pile_up() -> None:
    harness = fork()
    for _ in range(STALE_DEADLINES_MAX + 100):
        harness.withdraw(harness.submit(x=1, wanted=("x",), deadline_ms=1e9))
    assert len(harness.scheduler.state.deadlines) <= STALE_DEADLINES_MAX + 2
    assert request_table.wake_at_ms(harness.scheduler.state) is None


@pytest.mark.slow
def test_many_tasks_that_settle_each_other_end_the_request() -> None:
    p = Builder("long")
    x = p.input("x", "json")
    wire = x
    for index in range(400):
        wire = p.step(f"f{index}", "first", a=wire).value
    skipped = wire
    for index in range(200):
        skipped = p.step(f"s{index}", "echo", type="json", worker="w", when="x == 0", value=skipped).value
    p.output("y", p.step("last", "first", a=skipped, b=wire).value)
    harness = SchedulerHarness(p)
    one = harness.submit(x=1)
    assert harness.output(one) == 1
    assert harness.steps_of(one) == [(f"s{index}", "skipped") for index in range(200)]
    assert harness.is_clean()
