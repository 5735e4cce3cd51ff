"""The requests that are inside: every one ends once, and an ended one holds nothing."""

from __future__ import annotations

import pytest

from tests.engine.desk import Desk
from weftline.engine import messages as msg
from weftline.engine.scheduling import events as ev
from weftline.engine.scheduling.book import STALE_DEADLINES_MAX
from weftline.errors import StepError
from weftline.pipelines.builder import Builder
from weftline.pipelines.policy import Limits

LARGE = 1 << 17


def fork(**more: object) -> Desk:
    """`a` is read by `b` and `c`, which are outputs; so is the input itself."""
    p = Builder("fork", **more)  # type: ignore[arg-type]
    x = p.input("x", "json")
    a = p.step("a", "echo", type="json", value=x)
    for name in ("b", "c"):
        p.output(name, p.step(name, "echo", type="json", value=a.value).value)
    p.output("x", x)
    return Desk(p)


def placed(desk: Desk) -> msg.Value:
    return msg.Value("json", place=desk.scheduler.try_reserve([LARGE])[0].place(0, LARGE))


def leases(desk: Desk) -> int:
    return desk.scheduler.ledger.stats().blocks


def test_a_value_lives_until_its_last_reader_is_done() -> None:
    p = Builder("line")
    a = p.step("a", "echo", type="json", value=p.input("x", "json"))
    p.output("y", p.step("b", "echo", type="json", value=a.value).value)
    desk = Desk(p)
    desk.submit(x=placed(desk))
    desk.answer("a", lambda x: "small")
    assert leases(desk) == 0


def test_an_output_is_leased_until_it_was_copied_out() -> None:
    desk = fork()
    one = desk.submit(x=placed(desk))
    for step in ("a", "b", "c"):
        desk.answer(step)
    assert one in desk.ended and leases(desk) == 1
    assert not desk.scheduler.idle()
    desk.tell(ev.Delivered(one))
    assert leases(desk) == 0 and desk.scheduler.idle()


def test_a_request_that_fails_gives_back_what_it_has_and_drops_what_it_began() -> None:
    desk = fork()
    one = desk.submit(x=placed(desk))
    desk.answer("a")
    desk.answer("b", lambda x: StepError("drawn"))
    assert desk.failure(one).step == "b"
    assert leases(desk) == 1  # c's worker still reads
    desk.answer("c")
    assert leases(desk) == 0
    assert desk.is_clean()


@pytest.mark.parametrize("answered", [0, 1, 2])
def test_a_request_may_be_withdrawn_at_any_moment(answered: int) -> None:
    desk = fork()
    one = desk.submit(x=placed(desk))
    for step in ("a", "b")[:answered]:
        desk.answer(step)
    desk.withdraw(one)
    desk.withdraw(one)
    assert desk.failure(one).error == "RequestCancelled"
    for step in list(desk.running()):
        desk.answer(step)
    assert desk.is_clean()
    assert desk.scheduler.counters.cancelled == 1


def test_outputs_are_told_as_they_come_to_who_takes_pieces() -> None:
    desk = fork()
    desk.submit(x=1)
    assert [one.output for one in desk.said if isinstance(one, ev.OutputReady)] == ["x"]
    desk.submit(x=1, pieces=False)
    assert not any(isinstance(one, ev.OutputReady) for one in desk.said)


def test_a_deadline_ends_a_request_and_names_what_is_unfinished() -> None:
    desk = fork()
    one = desk.submit(x=1, deadline_ms=50)
    desk.answer("a")
    desk.answer("b")
    desk.advance(51)
    assert desk.failure(one).message == "the deadline passed after 50 ms; unfinished steps: c"


def test_a_step_that_is_tried_again_is_unfinished_and_a_stand_in_nobody_called_is_not() -> None:
    p = Builder("again")
    x = p.input("x", "json")
    b = p.step("b", "echo", type="json", value=x)
    p.output("y", p.step("a", "echo", type="json", value=x, retry=1, fallback=b).value)
    desk = Desk(p)
    one = desk.submit(x=1, deadline_ms=50)
    desk.answer("a", lambda x: StepError("drawn"))
    desk.advance(51)
    assert desk.failure(one).message == "the deadline passed after 50 ms; unfinished steps: a"


def test_admission_is_by_requests_and_by_bytes() -> None:
    desk = fork(limits=Limits(requests_max=1))
    inside = desk.submit(x=placed(desk))
    other = desk.submit(x=placed(desk))
    refused = desk.refusal(other)
    assert (refused.message, refused.error) == ("1 requests are open; limits.requests_max is 1", "LimitReached")
    assert refused.retry_after_s > 0
    assert leases(desk) == 1
    assert desk.refusal(desk.submit(x=1)).retry_after_s > refused.retry_after_s
    desk.withdraw(inside)
    desk.answer("a")
    desk.submit(x=1)
    assert desk.running() == ["a"]


def test_an_output_that_does_not_exist_is_refused_and_its_inputs_given_back() -> None:
    desk = fork()
    one = desk.submit(x=placed(desk), wanted=("nowhere",))
    assert desk.refusal(one).error == "InputError"
    assert "no output is called nowhere; outputs: b, c, x" in desk.refusal(one).message
    assert desk.is_clean()


def test_totals_add_up() -> None:
    desk = fork()
    one, two, _ = desk.submit_all([1, 2, 3])
    desk.withdraw(two)
    for step in ("a", "b", "c"):
        desk.answer(step)
    counters = desk.scheduler.counters
    assert (counters.admitted, counters.ok, counters.cancelled) == (3, 1, 1)
    assert desk.scheduler.open_requests == 1
    assert one in desk.ended


def test_deadlines_of_requests_that_are_gone_do_not_pile_up() -> None:
    desk = fork()
    for _ in range(STALE_DEADLINES_MAX + 100):
        desk.withdraw(desk.submit(x=1, wanted=("x",), deadline_ms=1e9))
    assert len(desk.scheduler._book._deadlines) <= STALE_DEADLINES_MAX + 2
    assert desk.scheduler._book.wake_at_ms() is None


def test_however_many_units_settle_each_other_at_once_the_request_is_answered() -> None:
    p = Builder("long")
    x = p.input("x", "json")
    wire = x
    for index in range(400):
        wire = p.step(f"f{index}", "first", a=wire).value
    skipped = wire
    for index in range(200):
        skipped = p.step(f"s{index}", "echo", type="json", worker="w", when="x == 0", value=skipped).value
    p.output("y", p.step("last", "first", a=skipped, b=wire).value)
    desk = Desk(p)
    one = desk.submit(x=1)
    assert desk.output(one) == 1
    assert desk.steps_of(one) == [(f"s{index}", "skipped") for index in range(200)]
    assert desk.is_clean()
